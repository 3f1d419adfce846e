#!/usr/bin/python3
"""The tables of docs/lower-precision.md: P, dS and products in FP8, measured on bundled captures.

    bench/lower_precision.py [--program build/release/bitattn]

Replaces what stands between the page's marks. Standard library only; a minute or two on two cores.
"""

import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "lower-precision.md"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
CAPTURES = {"normal": "fa3/d64_full_s64_normal.h5", "real run": "real-run/step_000783_layer_0.h5",
            "peaky": "fa3/d128_causal_s256_peaky.h5", "late": "fa3/d128_full_s128_late.h5"}
E = "experimental:"
CASTS = [E + "p-e4m3", E + "p-e5m2", E + "ds-e4m3", E + "ds-e4m3-tensor", E + "ds-e5m2", E + "ds-e5m2-tensor"]
PRODUCTS = [E + "fp8-forward", E + "fp8-backward", f"{E}fp8-forward+{E}fp8-backward"]
REPAIRS = ["gproj", "gproj-weighted", "o-residual8+rounded-sum", "o-residual8+rounded-sum+centred-keys", "consistent-d", "heavy-low", "centred-keys"]


def trials(program, names):
    found = {}
    for label, file in CAPTURES.items():
        chosen = [part for name in names for part in ("--remedy", name)]
        done = subprocess.run([program, "remedies", str(ROOT / "datasets" / "goldens" / file), "--json", "--quiet", *chosen],
                              capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"lower_precision: {done.stderr.strip()}")
        found[label] = {t["name"]: t for t in json.loads(done.stdout)["captures"][0]["trials"]}
        print(f"lower_precision: {label}", file=sys.stderr, flush=True)
    return found


def table(found, names, figure):
    lines = ["| | " + " | ".join(CAPTURES) + " |", "|" + "---|" * (len(CAPTURES) + 1)]
    for name in names:
        cells = [f"{figure(found[c][name]):.1e}" for c in CAPTURES]
        lines.append(f"| `{name.removeprefix('fa3+').replace(E, '')}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def stored(tensor):
    return lambda trial: trial["errors"][tensor]["stored"]


def measured(program):
    repaired = [f"{cast}+{remedy}" for cast in (E + "ds-e4m3", E + "p-e4m3") for remedy in REPAIRS]
    found = trials(program, CASTS + PRODUCTS + repaired)
    rows = ["fa3", *("fa3+" + n for n in CASTS + PRODUCTS)]
    text = "### Row sum of dS, RMS over rows\n\n" + table(found, rows, lambda t: t["drift"])
    text += "\n### Leak into dQ, over |dQ|\n\n" + table(found, rows, lambda t: t["leak"])
    for tensor, name in (("out", "O"), ("dq", "dQ"), ("dk", "dK"), ("dv", "dV")):
        text += f"\n### Error of stored {name}\n\n" + table(found, rows, stored(tensor))
    for cast in ("ds-e4m3", "p-e4m3"):
        repaired_rows = ["fa3+" + E + cast, *(f"fa3+{E}{cast}+{remedy}" for remedy in REPAIRS)]
        for tensor, name in (("dq", "dQ"), ("dk", "dK")):
            text += f"\n### `{cast}` and the remedies: error of stored {name}\n\n" + table(found, repaired_rows, stored(tensor))
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "build/release/bitattn"))
    options = parser.parse_args()
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(text[:begin] + "\n" + measured(options.program) + "\n" + text[end:])


if __name__ == "__main__":
    main()
