"""What bitattn.torch costs a training step, as a share of it, on a GPU.

    PYTHONPATH=python python3 bench/python/hook_cost.py

Two transformers under autocast, the same steps watched and unwatched in turn; medians. The peer is the unwatched step of the same run.
"""

import statistics
import tempfile
import time

import torch
import torch.nn.functional as F

from bitattn.torch import record


class Block(torch.nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(size), torch.nn.LayerNorm(size)
        self.qkv, self.out = torch.nn.Linear(size, 3 * size), torch.nn.Linear(size, size)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(size, 4 * size), torch.nn.GELU(), torch.nn.Linear(4 * size, size))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def measure(size, heads, layers, batch, length, rounds=4):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(size, heads) for _ in range(layers))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(batch, length, size, device="cuda")

    def seconds(steps, recording=None):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if recording is not None:
                recording.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps

    # What is recorded, and of how many steps the mean is taken in a round.
    ways = {
        "watched, nothing recorded": ({"statistics": 0}, 10),
        "statistics at every tenth step": ({}, 10),
        "statistics at every step": ({"statistics": 1}, 10),
        "all tensors of one layer at every step": ({"steps": "all", "layers": "0"}, 2),
    }
    seconds(5)
    found = {"unwatched": []} | {name: [] for name in ways}
    for _ in range(rounds):
        found["unwatched"].append(seconds(10))
        for name, (options, steps) in ways.items():
            with tempfile.TemporaryDirectory() as folder, record(folder, model, **options) as recording:
                found[name].append(seconds(steps, recording))
    plain = statistics.median(found["unwatched"])
    print(f"{layers} layers of {heads} heads of {size // heads}, batch {batch}, {length} tokens: q takes {x.numel() * 2e-6:.1f} MB")
    for name, times in found.items():
        middle = statistics.median(times)
        print(f"  {name:40} {middle * 1e3:9.2f} ms a step  {middle / plain - 1:+8.1%}")


if __name__ == "__main__":
    print(torch.__version__, torch.cuda.get_device_name())
    measure(768, 12, 12, 8, 1024)
    measure(2048, 16, 8, 4, 2048)
