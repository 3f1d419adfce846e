"""bitattn: what a BF16 attention kernel computes, to the last bit.

`bitattn.torch` records captures in a PyTorch run; `bitattn.recorder` is its core, for other frameworks.
"""
