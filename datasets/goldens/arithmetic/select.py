#!/usr/bin/env python3
"""Picks the bundled vectors out of the full measured set: select.py FULL_FOLDER BUNDLE_FOLDER.

Every file keeps its format and the order of its records, and keeps every n-th record of each of its blocks, so that
every kind of operands stays in. Whole: the underflow kinds of wgmma BF16 (the exponent floor shows in under one in a
thousand of them), the pairs of special values and the digests of all 2^32 inputs. See README.md.
"""
import csv
import pathlib
import shutil
import sys

# file: (bytes a record, records a block, keep every n-th); a block is one kind of operands.
BINARY = {
    "mma_bf16_k16.bin": (72, 128, 4),
    "mma_bf16_k8x2.bin": (72, 128, 4),
    "wgmma_f16_k16.bin": (72, 128, 4),
    "wgmma_e4m3_k32.bin": (72, 128, 4),
    "wgmma_e5m2_k32.bin": (72, 128, 4),
    "wgmma_e4m3xe5m2_k32.bin": (72, 128, 4),
    "mma_sync_e4m3_k32.bin": (72, 256, 4),
    "wgmma_bf16_chain4.bin": (264, 128, 4),
    "mufu_ex2.bin": (8, 28, 4),
    "mufu_lg2.bin": (8, 28, 4),
    "mufu_rcp.bin": (8, 28, 4),
    "mufu_rsq.bin": (8, 24, 4),
    "mufu_tanh.bin": (8, 24, 4),
    "cvt.bin": (16, 16384, 4),
    "fp32_ops.bin": (16, 512, 4),
    "fp32_reductions.bin": (16, 512, 4),
}
UNDERFLOW_KINDS = (5, 15)


def every(data, size, block, step):
    """Every step-th record of every block; the first one kept moves from block to block."""
    count = len(data) // size
    assert count * size == len(data) and count % block == 0
    kept = []
    for first in range(0, count, block):
        phase = (first // block) % step
        kept += [data[i * size:(i + 1) * size] for i in range(first + phase, first + block, step)]
    return b"".join(kept)


def wgmma_bf16(data):
    """8192 records with scale-d 1 in 16 kinds of 512, then 2048 with scale-d 0 in 16 kinds of 128."""
    records = [data[i:i + 72] for i in range(0, len(data), 72)]
    kept = []
    for start, kind_size in ((0, 512), (8192, 128)):
        for kind in range(16):
            first = start + kind * kind_size
            step = 1 if kind in UNDERFLOW_KINDS else 4
            phase = (kind + 2) % step
            kept += records[first + phase:first + kind_size:step]
    return b"".join(kept)


def specials(rows):
    """All pairs of each operation with two operands; of the others, which repeat, every value once."""
    kept, seen = [], set()
    for row in rows:
        key = (row["op"], row["a"])
        if row["op"] not in ("abs.ftz", "neg.ftz") or key not in seen:
            kept.append(row)
        seen.add(key)
    return kept


def main():
    full, bundle = map(pathlib.Path, sys.argv[1:3])
    for name, (size, block, step) in BINARY.items():
        (bundle / name).write_bytes(every((full / name).read_bytes(), size, block, step))
    name = "wgmma_bf16_k16.bin"
    (bundle / name).write_bytes(wgmma_bf16((full / name).read_bytes()))
    with open(full / "fp32_specials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(bundle / "fp32_specials.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["op", "a", "b", "c", "d"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(specials(rows))
    shutil.copyfile(full / "mufu_exhaustive_digest.csv", bundle / "mufu_exhaustive_digest.csv")


main()
