"""A small transformer trained on a text, with its attention recorded: captures to try docs/capture.md on, on a CPU or a GPU.

    PYTHONPATH=python python3 bench/python/record_run.py captures [--steps 31] [--every 10] [--kernel flash] [--device cuda]

Byte by byte, 4 layers of 2 heads of 128, BF16 by autocast, AdamW.
"""

import argparse
import os
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import bitattn.torch

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}  # fmt: skip
HEADS, HEAD_DIM = 2, 128


class Attention(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_attn, self.attn = torch.nn.LayerNorm(width), Attention(width)
        self.norm_mlp = torch.nn.LayerNorm(width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.norm_attn(x))
        return x + self.mlp(self.norm_mlp(x))


class Model(torch.nn.Module):
    def __init__(self, layers, length):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.embedding, self.position = torch.nn.Embedding(256, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 256)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where the captures go")
    parser.add_argument("--text", default=os.path.join(os.path.dirname(__file__), "..", "..", "docs", "remedies.md"))
    parser.add_argument("--steps", type=int, default=31)
    parser.add_argument("--every", type=int, default=10, help="a step of this many has its tensors kept (default 10)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--kernel", choices=KERNELS, default="flash")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()

    with open(given.text, "rb") as file:
        text = torch.tensor(list(file.read()))
    torch.manual_seed(0)
    model = Model(given.layers, given.length).to(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    draw = torch.Generator().manual_seed(1)
    steps = range(0, given.steps, given.every)
    with bitattn.torch.record(given.folder, model, steps=steps, optimizer=optimizer, statistics=1) as recording, sdpa_kernel(KERNELS[given.kernel]):
        for step in range(given.steps):
            first = torch.randint(0, len(text) - given.length - 1, (given.batch,), generator=draw)
            window = torch.stack([text[i : i + given.length + 1] for i in first.tolist()]).to(given.device)
            with torch.autocast(given.device, torch.bfloat16):
                logits = model(window[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))
            optimizer.step()
            if step in steps:
                print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.3g}", flush=True)
    print(f"{len(recording.files)} files in {given.folder}")


if __name__ == "__main__":
    try:
        main()
    except (bitattn.torch.CaptureRefused, OSError) as error:
        sys.exit(f"record_run.py: {error}")
