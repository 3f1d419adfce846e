#!/usr/bin/python3
"""The figures of docs/blame.md: who owns dQ's and dK's error in the bundled captures.

    bench/blame_table.py [--program build/release/bitattn] [FILE...]

Prints a Markdown table, a line a capture and tensor: |error| / |truth| of the stored tensor, and the fair shares of every site
with at least 3 % of the squared error. Standard library only.
"""

import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEAST = 0.03


def captures():
    goldens = ROOT / "datasets" / "goldens"
    return sorted((goldens / "fa3").glob("*.h5")) + sorted((goldens / "real-run").glob("*.h5"))


def owners(tensor):
    shares = [(s["fair"], s["site"]) for s in tensor["sites"] if s["fair"] is not None]
    named = [(fair, site) for fair, site in shares if abs(fair) >= LEAST]
    return ", ".join(f"`{site}` {100 * fair:.0f} %" for fair, site in sorted(named, key=lambda s: -s[0]))


def lines(program, path):
    command = [program, "diagnose", str(path), "--blame", "all", "--no-remedies", "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"blame_table: {done.stderr.strip()}")
    tensors = json.loads(done.stdout)["captures"][0]["blame"]["tensors"]
    for name in ("dq", "dk"):
        tensor = tensors.get(name)
        if tensor is None or not tensor["error"] or tensor["relative_error"] is None:
            continue
        yield f"| {path.stem} | {name} | {tensor['relative_error']:.1e} | {owners(tensor)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default=str(ROOT / "build" / "release" / "bitattn"))
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    options = parser.parse_args()
    print("| capture | tensor | \\|error\\| / \\|truth\\| | owners of the squared error |\n|---|---|---|---|")
    for path in options.files or captures():
        for line in lines(options.program, path):
            print(line, flush=True)


if __name__ == "__main__":
    main()
