"""Which layers and heads of a run leak most, how that grew over steps, and whose backward should go to FP32 first.

    python3 -m bitattn.ranking captures [--journal FILE] [--reference] [--json]

Every capture is diagnosed by the program (`bitattn diagnose`, on all cores); what is shown is docs/capture.md, "Rank".
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time

from .listing import list_captures, natural_key

#: What the casts to BF16 cost dQ anyway (docs/spec/measured-facts.md): a leak below it is not worth a remedy.
LEAK_OF_CASTS = 2e-3

FIGURES = ("leak", "dq_error", "condition", "residue", "drift", "mean_q_norm", "mean_k_norm", "largest_logit")


def _number(value):
    return math.nan if value is None else float(value)


def _falling(value):
    """Sorts larger first, what is not known last."""
    return (1, 0) if math.isnan(value) else (0, -value)


def figures_of(diagnosis):
    """What is followed over steps, out of one capture's `bitattn diagnose --json`; NaN where it is not known."""
    leak = diagnosis.get("leak") or {}
    sums = diagnosis.get("score_gradient_sum") or {}
    drift = sums.get("before_cast" if diagnosis["softcap"] else "after_cast") or {}
    return {
        "leak": _number(leak.get("p_weighted_key")),
        "dq_error": _number(diagnosis.get("dq_error")),
        "condition": _number(diagnosis.get("condition")),
        "residue": _number(diagnosis["row_max_residue"]["largest"]),
        "drift": _number(drift.get("rms")),
        "mean_q_norm": _number(diagnosis["norms"]["mean_q"]),
        "mean_k_norm": _number(diagnosis["norms"]["mean_k"]),
        "largest_logit": _number(diagnosis["largest_logit"]["value"]),
        "leak_by_head": [_number((head.get("leak") or {}).get("p_weighted_key")) for head in diagnosis["heads"]],
    }


def _worse(a, b):
    return min(a, b, key=_falling)


def _head_names(capture, heads):
    """Numbers of a capture's heads in its layer. heads_kept counts batch element by batch element, so the first ones are one element's."""
    kept = capture.heads_kept.split(",") if capture.heads_kept else []
    return kept[:heads] if len(kept) >= heads else [str(h) for h in range(heads)]


def rank(captures):
    """Pairs (Listed, figures) as {"layers", "heads", "fp32_first"}.

    Captures that name no layer are one layer each; several of one layer and step (ranks, calls) count as one, by the worst of their figures.
    """
    by_layer = {}
    for capture, figures in captures:
        steps = by_layer.setdefault(capture.layer or capture.name, {})
        step = capture.step if capture.step is not None else 0
        heads = dict(zip(_head_names(capture, len(figures["leak_by_head"])), figures["leak_by_head"]))
        found = {name: figures[name] for name in FIGURES} | {"step": step, "leak_by_head": heads}
        if step in steps:
            old = steps[step]
            found |= {name: _worse(old[name], found[name]) for name in FIGURES}
            every = old["leak_by_head"].keys() | heads.keys()
            found["leak_by_head"] = {h: _worse(old["leak_by_head"].get(h, math.nan), heads.get(h, math.nan)) for h in every}
        steps[step] = found
    layers = []
    for name, steps in by_layer.items():
        ordered = [steps[step] for step in sorted(steps)]
        first, last = ordered[0]["leak"], ordered[-1]["leak"]
        growth = last / first if len(ordered) > 1 and first > 0 else math.nan
        layers.append({"layer": name, "leak_growth": growth, "steps": ordered})
    layers.sort(key=lambda layer: (_falling(layer["steps"][-1]["leak"]), natural_key(layer["layer"])))
    heads = [{"layer": x["layer"], "head": h, "leak": leak} for x in layers for h, leak in x["steps"][-1]["leak_by_head"].items()]
    heads.sort(key=lambda head: (_falling(head["leak"]), natural_key(head["layer"]), natural_key(head["head"])))
    return {"layers": layers, "heads": heads, "fp32_first": [x["layer"] for x in layers if x["steps"][-1]["leak"] > LEAK_OF_CASTS]}


class Journal:
    """Finished captures, a line each; a file that has changed, other settings, and a line that was cut off count for nothing."""

    def __init__(self, path, settings):
        self.path, self.settings, self.kept = path, settings, {}
        if path is None or not os.path.exists(path):
            return
        with open(path, "rb") as file:
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            try:
                entry = json.loads(line)
                key = (entry["capture"], tuple(entry["file"]), entry["settings"])
                self.kept[key] = entry["figures"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}: is no journal of bitattn.ranking") from None
        if len(whole) < len(content):
            if not whole:
                raise ValueError(f"{path}: is no journal of bitattn.ranking")
            os.truncate(path, len(whole))

    def _key(self, capture):
        about = os.stat(capture.file)
        return capture.name, (about.st_size, about.st_mtime_ns), self.settings

    def find(self, capture):
        return self.kept.get(self._key(capture))

    def add(self, capture, figures):
        if self.path is None:
            return
        name, about, settings = self._key(capture)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"capture": name, "file": about, "settings": settings, "figures": figures}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _time_left(seconds):
    if seconds < 120:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def diagnose(captures, program, options, journal, report=None):
    """Pairs (Listed, figures), in the order of the captures. `report` is told how far it is. Raises ValueError with the program's own line."""
    found, spent, computed = [], 0.0, 0
    for number, capture in enumerate(captures, 1):
        figures = journal.find(capture)
        if figures is None:
            if report is not None:
                left = f", {_time_left(spent / computed * (len(captures) - number + 1))} left" if computed else ""
                report(f"{number}/{len(captures)}{left}  {capture.name}")
            begin = time.monotonic()
            done = subprocess.run([program, "diagnose", capture.name, "--json", "--quiet", *options], capture_output=True)
            if done.returncode != 0:
                raise ValueError(done.stderr.decode(errors="replace").strip().removeprefix("bitattn: ") or f"{program} ended with {done.returncode}")
            figures = figures_of(json.loads(done.stdout)["captures"][0])
            spent, computed = spent + time.monotonic() - begin, computed + 1
            journal.add(capture, figures)
        found.append((capture, figures))
    return found


# --- text


def _brief(value):
    return "-" if math.isnan(value) else f"{value:.1e}"


def _short(value):
    return "-" if math.isnan(value) else f"{value:.3g}"


def _shortened(text, width=22):
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= width else ".." + text[2 - width :]


def _table(rows):
    """Columns aligned, the first to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:])]) for row in rows]
    return "".join(f"  {line.rstrip()}\n" for line in lines)


_HEAD = ("layer", "step", "leak", "growth", "dQ error", "residue", "drift", "|q|", "|k|", "logit")


def _row(name, step, growth):
    return (
        _shortened(name), str(step["step"]), _brief(step["leak"]), "-" if math.isnan(growth) else f"x{growth:.2g}", _brief(step["dq_error"]),
        _brief(step["residue"]), _brief(step["drift"]), _short(step["mean_q_norm"]), _short(step["mean_k_norm"]), _short(step["largest_logit"]),
    )  # fmt: skip


def text_of(ranking, most=20):
    """As it is printed, at most 100 columns wide."""
    layers = ranking["layers"]
    text = "LAYERS   by leak at their last step; worst first\n"
    text += _table([_HEAD] + [_row(x["layer"], x["steps"][-1], x["leak_growth"]) for x in layers[:most]])
    text += f"  and {len(layers) - most} more\n" if len(layers) > most else ""
    several = [x for x in layers[:5] if len(x["steps"]) > 1]
    if several:
        rows = [_HEAD]
        for layer in several:
            first = layer["steps"][0]["leak"]
            for step in layer["steps"]:
                begin = step is layer["steps"][0]
                rows.append(_row(layer["layer"] if begin else "", step, math.nan if begin or not first > 0 else step["leak"] / first))
        text += "\nOVER STEPS   of the layers that leak most\n" + _table(rows)
    if ranking["heads"]:
        text += "\nHEADS   by leak at the last step; worst first\n"
        text += _table([("layer", "head", "leak")] + [(_shortened(h["layer"]), h["head"], _brief(h["leak"])) for h in ranking["heads"][: most // 2]])
    text += "\nBACKWARD IN FP32 FIRST\n"
    if not ranking["fp32_first"]:
        return text + "  No layer: every leak is within what the casts to BF16 cost anyway (2e-3 of dQ).\n"
    text += "  More leaks there than the casts to BF16 cost anyway (2e-3 of dQ); in this order:\n"
    return text + "".join(f"  {_shortened(name, 96)}\n" for name in ranking["fp32_first"])


def _without_nan(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list) else value


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python3 -m bitattn.ranking", description="Layers and heads of a run by leak; see docs/capture.md.")
    parser.add_argument("captures", nargs="+", help="files or folders")
    parser.add_argument("--journal", metavar="FILE", help="finished captures are kept there: the same command goes on where it was stopped")
    parser.add_argument("--reference", action="store_true", help="against the truth: leaks relative to the true dQ, and errors; slower")
    parser.add_argument("-b", "--backend", default="fa3", help="the emulated kernel (default fa3)")
    parser.add_argument("--program", default=shutil.which("bitattn") or "build/release/bitattn", help="the program bitattn (default: on the path)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    given = parser.parse_args(arguments)
    options = ["-b", given.backend, "--no-remedies"] + ([] if given.reference else ["--no-reference"])
    terminal = sys.stderr.isatty()
    report = (lambda line: print(f"\r\033[K{line[:100]}", end="", file=sys.stderr, flush=True)) if terminal else None
    try:
        version = subprocess.run([given.program, "--version"], capture_output=True, check=True).stdout.decode().strip()
        journal = Journal(given.journal, " ".join([version, *options]))
        found = diagnose(list_captures(given.captures), given.program, options, journal, report)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"bitattn.ranking: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr)
    ranking = rank(found)
    print(json.dumps(_without_nan(ranking)) if given.json else text_of(ranking), end="\n" if given.json else "")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
