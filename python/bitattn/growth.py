"""What the statistics of a recorded run say: how norms, logits and witnesses grew, layer by layer, and when.

    python3 -m bitattn.growth captures
    python3 -m bitattn.growth captures --json

Reads statistics_rank_*.jsonl of a folder, or one such file, and no tensors: it says of which steps and layers to keep them.
The figures: docs/capture.md, "Statistics".
"""

import glob
import json
import math
import os
import sys

#: Followed over steps. The last three are witnesses: multiples of a noise, so that 1 and less say the same.
FIGURES = ("mean_q_norm", "mean_k_norm", "logit_bound", "dk_sum", "dq_dk_balance", "out_dv_balance")
WITNESSES = FIGURES[3:]
_SHOWN = (("mean_q_norm", "|q|"), ("mean_k_norm", "|k|"), ("logit_bound", "logit bound"), ("dk_sum", "dk_sum"))
_WIDTH = 100


def _number(value):
    """null is not finite, and worse than any number."""
    if value is None:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    return float(value)


def _lines(path):
    """The lines of one file, the last one of each call where a resumed run recorded it again. Raises ValueError."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().split("\n")
    found = {}
    for at, text in enumerate(lines[:-1], 1):  # what follows the last end of line is nothing, or was cut off by a crash
        try:
            line = json.loads(text)
            step, layer = line["step"], line["layer"]
            if isinstance(step, bool) or not isinstance(step, int) or not isinstance(layer, str):
                raise ValueError
            figures = {name: _number(line[name]) for name in FIGURES if name in line}
            found[line.get("rank", 0), step, layer, line.get("call", 0)] = layer, step, figures, str(line.get("not_recorded", ""))
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}:{at}: not a line of statistics") from None
    return found.values()


def read(path):
    """{layer: {step: {figure: value}}} of a folder or a file, steps rising; inf: not finite. Raises ValueError, OSError.

    Calls and ranks of one layer and step count as one, by the largest of each figure.
    """
    files = [path]
    if os.path.isdir(path):
        files = sorted(glob.glob(os.path.join(glob.escape(path), "statistics_rank_*.jsonl")))
        if not files:
            raise ValueError(f"{path}: holds no statistics_rank_*.jsonl")
    layers, why = {}, "no calls"
    for file in files:
        for layer, step, figures, obstacle in _lines(file):
            if not figures:
                why = obstacle or why
                continue
            kept = layers.setdefault(layer, {}).setdefault(step, {})
            for name, value in figures.items():
                kept[name] = max(value, kept.get(name, value))
    if not layers:
        raise ValueError(f"{path}: holds no figures: {why}")
    return {layer: dict(sorted(steps.items())) for layer, steps in layers.items()}


def growth(name, before, after):
    """After over before; witnesses from 1 on, as what is below is noise. nan: not known, inf: no longer finite."""
    if name in WITNESSES:
        before, after = max(before, 1.0), max(after, 1.0)
    if not math.isfinite(before) or before <= 0:
        return math.nan
    return after / before


def _last(steps, name):
    """At the layer's last step; -1: not known there."""
    return list(steps.values())[-1].get(name, -1.0)


def rank(layers):
    """Names of the layers, largest dk_sum at their last step first; those without it (softcap, no backward) after them, by logit bound."""
    return sorted(layers, key=lambda layer: (-_last(layers[layer], "dk_sum"), -_last(layers[layer], "logit_bound"), layer))


def since_first(steps):
    """Growth of every figure from a layer's first step to its last, where both have it."""
    first, last = next(iter(steps.values())), list(steps.values())[-1]
    return {name: growth(name, first[name], last[name]) for name in FIGURES if len(steps) > 1 and name in first and name in last}


def grew_most(layers):
    """For every figure that grew: where it grew most from one recorded step of a layer to the next, the earliest such place."""
    found = []
    for name in FIGURES:
        most = None
        for layer, steps in layers.items():
            known = [(step, figures[name]) for step, figures in steps.items() if name in figures]
            for (step, before), (next_step, after) in zip(known, known[1:]):
                ratio = growth(name, before, after)
                if ratio > 1 and (most is None or (-ratio, next_step) < (-most["growth"], most["to_step"])):
                    most = {"figure": name, "layer": layer, "from_step": step, "to_step": next_step, "from": before, "to": after, "growth": ratio}
        if most is not None:
            found.append(most)
    return found


def _finite(x):
    """The same with null for what is not finite."""
    if isinstance(x, dict):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, list):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def to_json(layers):
    """What is printed, as an object: `layers` in their order with `growth` and `steps`, and `grew_most`. null: not finite; absent: not known."""
    ranked = [
        {"layer": layer, "growth": since_first(layers[layer]), "steps": [{"step": step} | figures for step, figures in layers[layer].items()]}
        for layer in rank(layers)
    ]
    return _finite({"layers": ranked, "grew_most": grew_most(layers)})


def _text(value):
    return "inf" if math.isinf(value) else f"{value:.3g}"


def _times(ratio):
    if math.isnan(ratio):
        return "-"
    return "inf" if math.isinf(ratio) else f"x{ratio:.0f}" if 10 <= ratio < 1e5 else f"x{ratio:.2g}"


def _table(names, header, rows):
    """Names on the left, or on a line of their own where they do not fit; all else to the right of its column."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    room = max(len(names[0]), _WIDTH - 2 - sum(2 + width for width in widths))
    left = max(len(name) for name in names if len(name) <= room)
    lines = []
    for name, row in zip(names, [header, *rows]):
        if len(name) > room:
            lines.append("  " + (name if len(name) <= _WIDTH - 2 else "…" + name[3 - _WIDTH :]))
            name = ""
        lines.append("  " + name.ljust(left) + "".join("  " + cell.rjust(width) for cell, width in zip(row, widths)))
    return "\n".join(lines)


def to_text(layers):
    """The tables, at most 100 columns wide."""
    all_steps = sorted({step for steps in layers.values() for step in steps})
    span = f"step {all_steps[0]}" if len(all_steps) == 1 else f"{len(all_steps)} steps, {all_steps[0]} to {all_steps[-1]}"
    text = f"{len(layers)} layer{'s' if len(layers) > 1 else ''}, {span}; of several ranks or calls the largest\n"

    rows, ranked = [], rank(layers)
    for layer in ranked:
        grown, cells = since_first(layers[layer]), [str(list(layers[layer])[-1])]
        for name, _ in _SHOWN:
            value = _last(layers[layer], name)
            cells += ["-" if value < 0 else _text(value), _times(grown.get(name, math.nan))]
        rows.append(cells)
    header = ["step"] + [cell for _, title in _SHOWN for cell in (title, "growth")]
    text += "\nLAYERS   at their last step, with the growth since their first; largest dk_sum first\n"
    text += _table(["layer", *ranked], header, rows) + "\n"

    most = grew_most(layers)
    text += "\nGREW MOST   from one recorded step to the next: keep the tensors of these steps and layers\n"
    if not most:
        return text + ("  There is one step only.\n" if len(all_steps) == 1 else "  No figure grew.\n")
    rows = [[_times(m["growth"]), _text(m["from"]), _text(m["to"]), str(m["from_step"]), str(m["to_step"])] for m in most]
    lines = _table(["figure", *(m["figure"] for m in most)], ["growth", "from", "to", "from step", "to step"], rows).split("\n")
    for line, layer in zip(lines, ["layer", *(m["layer"] for m in most)]):
        room = _WIDTH - 2 - len(line)
        text += f"{line}  {layer if len(layer) <= room else '…' + layer[1 - room:]}\n"
    return text


def main(arguments=None):
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):
        print(f"usage: python3 -m bitattn.growth FOLDER|FILE [--json]\n\n{__doc__}", end="")
        return 0
    paths = [a for a in arguments if a != "--json"]
    try:
        if len(paths) != 1 or paths[0].startswith("-"):
            raise ValueError(f"got {' '.join(arguments) or 'nothing'}, expected one folder or file of statistics, and --json or nothing")
        layers = read(paths[0])
        print(json.dumps(to_json(layers)) if "--json" in arguments else to_text(layers).rstrip("\n"))
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # `| head` has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"bitattn.growth: {error.filename}: {error.strerror}", file=sys.stderr)
    except ValueError as error:
        print(f"bitattn.growth: {error}".replace("\n", " "), file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
