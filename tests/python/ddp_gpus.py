"""Recording under DistributedDataParallel over several GPUs: the weights of four steps, two of them recorded, have the bits of an unwatched run.

    PYTHONPATH=python torchrun --nproc_per_node 2 tests/python/ddp_gpus.py FOLDER

Run by hand, as no test machine has two GPUs; two processes on a CPU are in torch_test.py. Exit code 1 where a bit differs on any rank.
"""

import contextlib
import hashlib
import os
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "bench", "python"))
from record_run import Model  # noqa: E402

import bitattn.torch  # noqa: E402


def weights_after_four_steps(rank, folder=None):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Model(4, 512).cuda(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(7 + rank)
    with bitattn.torch.record(folder, model, steps=[0, 2], optimizer=optimizer, statistics=1) if folder else contextlib.nullcontext():
        for _ in range(4):
            tokens = torch.randint(0, 256, (2, 513), generator=draw).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    # Else two unwatched runs would differ already.
    torch.use_deterministic_algorithms(True, warn_only=True)
    plain, again, watched = (weights_after_four_steps(rank, folder) for folder in (None, None, sys.argv[1]))
    print(f"rank {rank} of {dist.get_world_size()}: unwatched twice equal {plain == again}, watched equal {plain == watched}", flush=True)
    dist.destroy_process_group()
    return 0 if plain == again == watched else 1


if __name__ == "__main__":
    sys.exit(main())
