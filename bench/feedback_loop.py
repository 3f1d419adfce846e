#!/usr/bin/python3
"""The feedback loop as an experiment: small transformers trained with a kernel's attention, bit for bit.

    bench/feedback_loop.py [--program build/release/bench/feedback_loop] [--seeds 3] [--steps 250] [--replay-steps 250]
    bench/feedback_loop.py --part page          writes the page again from the evidence

Writes docs/feedback-loop.md, and what it rests on to docs/evidence/feedback_loop_training.csv and
feedback_loop_replay.csv. Standard library only; twelve minutes of processor time.
"""

import argparse
import concurrent.futures
import csv
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
from feedback_loop_page import page  # noqa: E402

TEXT = ROOT / "docs" / "spec" / "fa3-operation-order.md"
EVIDENCE = ROOT / "docs" / "evidence"

REMEDIES = ["fa3+subtract-first", "fa3+gproj", "fa3+gproj-weighted", "fa3+o-residual8+rounded-sum", "fa3+centred-keys",
            "fa3+mean-free-keys", "fa3+mean-free-keys-bf16", "fa3+fp32-backward"]
REPLAY_SHIFTS = [0, 3, 10, 30, 100, 300, 1000, 3000, 10000]
CHIEF = ["fa3+gproj-weighted", "fa3+o-residual8+rounded-sum", "fa3+centred-keys", "fa3+mean-free-keys"]
# 0.1: fp32 attention learns with it nearly as fast as with Adam; 0.3 is too much for it.
OPTIMIZERS = {"adam": [], "sgd": ["--sgd", "--rate", 0.1], "slow-sgd": ["--sgd", "--rate", 0.03]}
# Backend, key shift, QK-norm, optimizer.
RUNS = [*((b, 3000, False, "adam") for b in ("fa3", "fp32", *REMEDIES)),
        *((b, 0, False, "adam") for b in ("fa3", "fp32", "fa3+mean-free-keys")),
        *((b, 3000, True, "adam") for b in ("fa3", "fp32", *CHIEF)),
        *((b, 3000, False, "sgd") for b in ("fa3", "fp32", *REMEDIES)),
        *((b, 10000, False, "sgd") for b in ("fa3", "fp32", "fa3+gproj-weighted", "fa3+mean-free-keys")),
        ("fa3", 300, False, "sgd"), ("fa3", 1000, False, "sgd"),
        *((b, s, False, "slow-sgd") for s in (3000, 10000) for b in ("fa3", "fp32")),
        *((b, s, True, "sgd") for s in (30, 3000) for b in ("fa3", "fp32"))]
LOOKS = 10  # at a run's figures


def called(options, mode, steps, *arguments):
    """Rows of what the program prints."""
    command = [options.program, mode, "--text", str(TEXT), "--steps", str(steps), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"feedback_loop: {done.stderr.strip()}")
    return list(csv.DictReader(done.stdout.splitlines()))


def trained(options, path):
    """Rows of all runs; written after each of them, so that a run that was cut short leaves what it has."""
    def run(job):
        (backend, shift, qk_norm, optimizer), seed = job
        printed = called(options, "train", options.steps, "--backend", backend, "--key-shift", shift, "--seed", seed, "--every",
                         max(1, options.steps // LOOKS), *(["--qk-norm"] if qk_norm else []), *OPTIMIZERS[optimizer])
        return [{"backend": backend, "optimizer": optimizer, "qk_norm": int(qk_norm), "key_shift": shift, "seed": seed, **row} for row in printed]

    rows = []
    for job, of_job in at_once(run, [(r, seed) for r in RUNS for seed in range(1, options.seeds + 1)]):
        rows += of_job
        (backend, shift, qk_norm, optimizer), seed = job
        if seed == options.seeds:
            write(path, rows)
            print(f"feedback_loop: {backend}, shift {shift}, {optimizer}{', QK-norm' if qk_norm else ''}", file=sys.stderr, flush=True)


def replayed(options):
    def run(seed):
        printed = called(options, "replay", options.replay_steps, "--seed", seed, "--backend", "fa3", *REMEDIES, "fp32", "--key-shift", *REPLAY_SHIFTS)
        return [{"seed": seed, **row} for row in printed]

    rows = []
    for seed, of_seed in at_once(run, range(1, options.seeds + 1)):
        rows += of_seed
        print(f"feedback_loop: replay, seed {seed}", file=sys.stderr, flush=True)
    return rows


def at_once(run, jobs):
    """(job, what run(job) gave) in the order of the jobs, as many at once as there are cores: one run has too little work for several."""
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            yield from zip(jobs, pool.map(run, jobs))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "build/release/bench/feedback_loop"))
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs" / "feedback-loop.md")
    parser.add_argument("--evidence", type=pathlib.Path, default=EVIDENCE, help="folder of the two CSV files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250, help="of every training")
    parser.add_argument("--replay-steps", type=int, default=250, help="of the model whose gradient is replayed")
    parser.add_argument("--part", choices=["all", "replay", "training", "page"], default="all",
                        help="one of the two experiments, or only the page again from the evidence")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is another one")
    options = parser.parse_args()
    training = options.evidence / "feedback_loop_training.csv"
    replay = options.evidence / "feedback_loop_replay.csv"
    if options.part in ("all", "replay"):
        write(replay, replayed(options))
    if options.part in ("all", "training"):
        trained(options, training)
    text = page(read(training), read(replay))
    if options.check:
        if options.output.read_text() != text:
            sys.exit(f"feedback_loop: {options.output} is not what --part page writes")
        return
    options.output.write_text(text)
    print(f"feedback_loop: {options.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
