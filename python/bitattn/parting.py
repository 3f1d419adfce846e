"""Where two runs part: the first step, layer, tensor and element whose bits differ.

    python3 -m bitattn.parting RUN_A RUN_B [--json]

Captures of the same step, layer, call and rank are followed in the order in which a training step makes them. Exit code 1 where a bit differs.
"""

import argparse
import json
import sys

import h5py
import numpy as np

from .listing import list_captures, natural_key

#: In the order in which a step makes them, and whether the attention call was given them.
FORWARD = (("q", True), ("k", True), ("v", True), ("out", False), ("lse", False))
BACKWARD = (("dout", True), ("dv", False), ("dk", False), ("dq", False))
SAME = ("softmax_scale", "causal", "window_left", "window_right", "softcap", "causal_alignment")


def _bits(dataset):
    """The words of a data set as they stand in the file."""
    kind = dataset.id.get_type()
    raw = np.empty(dataset.shape, {2: "<u2", 4: "<u4"}[kind.get_size()])
    if raw.size:
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=kind)
    return raw


def _place(name, index, packed):
    """A flat index in words: lse [B,H,S] or [H,total]; others [B,S,H,D] or [total,H,D]."""
    token = "j" if name in ("k", "v", "dk", "dv") else "i"
    if name == "lse":
        axes = ("h", "i") if packed else ("b", "h", "i")
    else:
        axes = (token, "h", "d") if packed else ("b", token, "h", "d")
    return {axis: int(n) for axis, n in zip(axes, index)}


def _differing(a, b, names):
    found = []
    packed = "cu_seqlens_q" in a
    for name, given in names:
        if name not in a or name not in b:
            continue
        x, y = _bits(a[name]), _bits(b[name])
        if x.shape != y.shape or x.dtype != y.dtype:
            raise ValueError(f"{a.file.filename}:{a.name} and {b.file.filename}:{b.name} are not the same problem: {name} has shape {list(x.shape)} against {list(y.shape)}")
        where = x != y
        if not where.any():
            continue
        first = np.unravel_index(int(np.argmax(where)), where.shape)
        digits = 2 * x.dtype.itemsize
        found.append(
            {
                "tensor": name, "input": given, "elements": int(x.size), "differing_bits": int(where.sum()), "first": _place(name, first, packed),
                "a_bits": f"0x{int(x[first]):0{digits}x}", "b_bits": f"0x{int(y[first]):0{digits}x}",
            }
        )  # fmt: skip
    return found


def _moment(capture):
    return (capture.step if capture.step is not None else 0, capture.layer or capture.group, capture.call, capture.rank)


def _by_moment(path):
    found = {}
    for capture in list_captures([path]):
        if found.setdefault(_moment(capture), capture) is not capture:
            raise ValueError(f"{path}: {found[_moment(capture)].name} and {capture.name} are of the same step, layer, call and rank")
    return found


def find(run_a, run_b):
    """{"first": … or None, "moments": […], "equal": bool, "only_in_a": […], "only_in_b": […]}. Raises ValueError where the runs cannot be compared.

    `first`: in the smallest step, the forward from the first layer to the last, then the backward from the last to the first.
    """
    a, b = _by_moment(run_a), _by_moment(run_b)
    both = sorted(a.keys() & b.keys(), key=lambda m: (m[0], natural_key(m[1]), m[2:]))
    if not both:
        raise ValueError(f"{run_a} and {run_b}: no step and layer is in both")
    moments, candidates = [], []
    for order, moment in enumerate(both):
        with h5py.File(a[moment].file) as file_a, h5py.File(b[moment].file) as file_b:
            x, y = file_a[a[moment].group], file_b[b[moment].group]
            for name in SAME:
                if x.attrs.get(name) != y.attrs.get(name):
                    raise ValueError(f"{a[moment].name} and {b[moment].name} are not the same problem: {name} is {x.attrs.get(name)} against {y.attrs.get(name)}")
            forward, backward = _differing(x, y, FORWARD), _differing(x, y, BACKWARD)
        if not forward + backward:
            continue
        step, layer, call, rank = moment
        found = {"step": step, "layer": layer, "call": call, "rank": rank, "a": a[moment].name, "b": b[moment].name, "tensors": forward + backward}
        moments.append(found)
        candidates.append(((step, 0, order) if forward else (step, 1, -order), found))
    return {
        "equal": not moments and a.keys() == b.keys(),
        "first": min(candidates, key=lambda c: c[0])[1] if candidates else None,
        "moments": moments,
        "compared": len(both),
        "only_in_a": [a[m].name for m in sorted(a.keys() - b.keys())],
        "only_in_b": [b[m].name for m in sorted(b.keys() - a.keys())],
    }


def _meaning(tensor):
    name = tensor["tensor"]
    if name == "dout":
        return "It is given to the backward: the runs parted above this layer, after its forward."
    if tensor["input"]:
        return "It is given to attention: the runs parted before this layer's attention."
    return f"What the kernel was given is equal: the two {'forward' if name in ('out', 'lse') else 'backward'} kernels part here."


def _said(moment):
    text = f"step {moment['step']}, layer {moment['layer']}"
    text += f", call {moment['call']}" if moment["call"] else ""
    return text + (f", rank {moment['rank']}" if moment["rank"] else "")


def text_of(found, most=20):
    """As it is printed."""
    text = ""
    for side in "ab":
        only = found[f"only_in_{side}"]
        text += f"Only in {side}: {len(only)} captures, the first {only[0]}\n" if only else ""
    if found["first"] is None:
        return text + f"No bit differs in {found['compared']} captures.\n"
    moment = found["first"]
    tensor = moment["tensors"][0]
    place = ", ".join(f"{axis} {n}" for axis, n in tensor["first"].items())
    text += f"THE RUNS PART\n  at {_said(moment)}\n  tensor {tensor['tensor']} at {place}: {tensor['a_bits']} against {tensor['b_bits']}\n"
    text += f"  {tensor['differing_bits']:,} of its {tensor['elements']:,} elements differ.\n  {_meaning(tensor)}\n"
    text += f"\nWHAT DIFFERS   in {len(found['moments'])} of {found['compared']} captures; share of the elements\n"
    for moment in found["moments"][:most]:
        shares = ", ".join(f"{t['tensor']} {t['differing_bits'] / t['elements']:.2g}" for t in moment["tensors"])
        text += f"  {_said(moment)}\n    {shares}\n"
    return text + (f"  and {len(found['moments']) - most} more\n" if len(found["moments"]) > most else "")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python3 -m bitattn.parting", description="Where two runs part; see docs/capture.md.")
    parser.add_argument("a", help="a file or folder of captures")
    parser.add_argument("b", help="another, of the same steps")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    given = parser.parse_args(arguments)
    try:
        found = find(given.a, given.b)
    except (OSError, ValueError, KeyError) as error:
        print(f"bitattn.parting: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    print(json.dumps(found) if given.json else text_of(found), end="\n" if given.json else "")
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
