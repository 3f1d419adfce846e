"""Tensors of .safetensors, .npz, .npy, .pt and other HDF5 files as captures.

    python3 -m bitattn.importing IN… -o OUT.h5 --scale 0.125 [--causal] [--layout BHSD] [--map q=NAME] [--round]

Names, layouts and what is refused: docs/capture.md, "Tensors from elsewhere".
"""

import argparse
import json
import math
import os
import sys

import h5py
import numpy as np

from . import words
from .recorder import Call, CaptureRefused, write_captures

#: How the tensors of a capture are called elsewhere: the last part of a name, in lower case.
USUAL = {
    "q": ("q", "query", "query_states", "query_layer", "queries"),
    "k": ("k", "key", "key_states", "key_layer", "keys"),
    "v": ("v", "value", "value_states", "value_layer", "values"),
    "out": ("out", "o", "output", "attn_output", "context", "context_layer"),
    "lse": ("lse", "softmax_lse", "logsumexp"),
    "dout": ("dout", "do", "d_out", "grad_out", "grad_output", "out_grad", "output_grad"),
    "dq": ("dq", "d_q", "grad_q", "q_grad", "grad_query", "query_grad"),
    "dk": ("dk", "d_k", "grad_k", "k_grad", "grad_key", "key_grad"),
    "dv": ("dv", "d_v", "grad_v", "v_grad", "grad_value", "value_grad"),
    "cu_seqlens_q": ("cu_seqlens_q", "cu_seqlens"),
    "cu_seqlens_k": ("cu_seqlens_k", "cu_seqlens"),
}
AXES = {"BSHD": (0, 1, 2, 3), "BHSD": (0, 2, 1, 3), "SBHD": (1, 0, 2, 3)}
_SAFETENSORS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8", "I16": "<i2", "U16": "<u2", "I32": "<i4", "I64": "<i8", "U32": "<u4", "U64": "<u8"}


class _Imported(Call):
    @property
    def group(self):
        return "/" + self.layer.replace("/", ".")

    @property
    def moment(self):
        return {}


def _read_safetensors(path):
    with open(path, "rb") as file:
        raw = file.read()
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > len(raw) - 8:
        raise ValueError(f"{path}: is no .safetensors file: its header would be longer than the file")
    try:
        header = json.loads(raw[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in _SAFETENSORS:
                continue
            if not 0 <= begin <= end <= len(raw) - 8 - length:
                raise ValueError("a tensor lies outside the file")
            tensors[name] = np.frombuffer(raw[8 + length + begin : 8 + length + end], _SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: is no .safetensors file: {error}") from None
    return tensors, dict(metadata)


def _read_numpy(path):
    try:
        with open(path, "rb") as file:
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return {os.path.splitext(os.path.basename(path))[0]: content}, {}
            return {name: content[name] for name in content.files}, {}
    except FileNotFoundError:
        raise
    except Exception as error:  # zip, zlib and NumPy each have their own for a damaged file
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _read_hdf5(path):
    tensors, attributes = {}, {}
    with h5py.File(path, "r") as file:

        def take(name, item):
            prefix = f"{name}/" if name else ""
            attributes.update({prefix + key: value for key, value in item.attrs.items() if isinstance(item, h5py.Group)})
            if not isinstance(item, h5py.Dataset) or item.dtype.kind not in "fiu":
                return
            bf16 = item.id.get_type().equal(words.BF16)
            tensors[name] = words.read_words(item) if bf16 else item[...]

        take("", file)
        file.visititems(take)
    return tensors, attributes


def _read_pt(path):
    import torch

    found = {}

    def take(value, name):
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous()
            found[name] = value.view(torch.int16).numpy().view(np.uint16) if value.dtype == torch.bfloat16 else value.numpy()
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        for key, item in items:
            take(item, f"{name}.{key}" if name else str(key))

    take(torch.load(path, map_location="cpu", weights_only=True), "")
    return found, {}


_READERS = {
    ".safetensors": _read_safetensors, ".npz": _read_numpy, ".npy": _read_numpy, ".h5": _read_hdf5, ".hdf5": _read_hdf5, ".pt": _read_pt,
    ".pth": _read_pt,
}  # fmt: skip


def read(path):
    """Tensors by name, BF16 as uint16 words, and what the file says beside them. Raises ValueError or OSError."""
    reader = _READERS.get(os.path.splitext(path)[1])
    if reader is None:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(_READERS)}")
    return reader(path)


def to_words(name, array, round_to_bf16=False):
    """An array as BF16 words, and how many elements were rounded (once, to nearest even). Raises ValueError where rounding was not asked for."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # what NumPy makes of an ml_dtypes.bfloat16 array
        array = array.view("<u2")
    if array.dtype.kind in "iu" and array.dtype.itemsize == 2:
        return np.ascontiguousarray(array).view(np.uint16), 0
    if array.dtype.kind != "f":
        raise ValueError(f"tensor {name} is {array.dtype}, expected BF16, words of 16 bits, or floating point")
    exact = array.astype(np.float64)
    with np.errstate(over="ignore"):
        near = exact.astype(np.float32)
    # Rounded to odd first: towards 0, and the last bit set where that was not exact. Then rounding again is rounding once.
    bits = np.ascontiguousarray(near).view(np.uint32)
    with np.errstate(invalid="ignore"):
        bits = np.where(np.abs(near.astype(np.float64)) > np.abs(exact), bits - np.uint32(1), bits)
        bits = np.where((near != exact) & ~np.isnan(exact), bits | np.uint32(1), bits).astype(np.uint32)
    rounded = words.round_to_words(bits.view(np.float32))
    inexact = (words.to_float(rounded) != exact) & ~np.isnan(exact)
    if inexact.any() and not round_to_bf16:
        at = int(np.argmax(inexact))
        raise ValueError(f"tensor {name} is {array.dtype} and element {at}, {float(exact.flat[at])!r}, is no BF16 number; expected BF16, or --round")
    return rounded, int(inexact.sum())


def _names(tensors, given):
    """{prefix: {tensor of a capture: name in the file}} for every capture there is."""
    for own, name in given.items():
        if own not in USUAL:
            raise ValueError(f"--map {own}={name}: expected one of {', '.join(USUAL)}")
        if name not in tensors:
            raise ValueError(f"--map {own}={name}: the file has no tensor of that name")
    found = {}
    for name in tensors:
        cut = max(name.rfind("."), name.rfind("/"))
        prefix, last = name[: max(cut, 0)], name[cut + 1 :].lower()
        for own, usual in USUAL.items():
            if own in given or last not in usual:
                continue
            other = found.setdefault(prefix, {}).setdefault(own, name)
            if other != name:
                raise ValueError(f"tensors {other} and {name} could both be {own}; expected --map {own}=NAME")
    if given and not found:
        found[""] = {}
    captures = {prefix: names | given for prefix, names in found.items() if {"q", "k", "v"} <= (names | given).keys()}
    if not captures:
        raise ValueError(f"no q, k and v by their usual names among {', '.join(list(tensors)[:20]) or 'no tensors'}; expected --map q=NAME and so on")
    if given and len(captures) > 1:
        raise ValueError(f"--map fits one capture, found several: {', '.join(captures)}")
    return captures


def _in_order(name, array, layout, heads):
    """To [B,S,H,D] or [total,H,D]; heads and columns may be one axis in the file."""
    axes = 3 if layout == "THD" else 4
    if array.ndim == axes - 1 and heads and layout != "BHSD" and array.shape[-1] % heads == 0:
        array = array.reshape(*array.shape[:-1], heads, -1)
    if array.ndim != axes:
        raise ValueError(f"tensor {name} has shape {list(array.shape)}, expected {axes} axes for {layout}")
    return array if layout == "THD" else np.ascontiguousarray(array.transpose(AXES[layout]))


def captures_of(tensors, attributes, *, names=None, layout="", round_to_bf16=False, **given):
    """Calls for recorder.write_captures, and how many elements were rounded. `given`: softmax_scale, causal, … over what the file says."""
    calls, rounded = [], 0
    for prefix, found in _names(tensors, names or {}).items():
        order = layout or ("THD" if tensors[found["q"]].ndim == 3 else "BSHD")
        own = {}
        for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv"):
            if name in found:
                array, count = to_words(found[name], tensors[found[name]], round_to_bf16)
                heads = own["k" if name in ("dk", "dv") else "q"].shape[-2] if name not in ("q", "k", "v") else 0
                own[name] = _in_order(found[name], array, order, heads)
                rounded += count
        if "dout" not in own and own.keys() & {"dq", "dk", "dv"}:
            raise ValueError("tensor dout is missing, expected beside dq, dk, dv")
        if "lse" in found:
            lse = tensors[found["lse"]]
            if lse.dtype != np.float32:
                raise ValueError(f"tensor {found['lse']} is {lse.dtype}, expected float32")
            own["lse"] = np.ascontiguousarray(lse)
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if order == "THD":
                if name not in found:
                    raise ValueError(f"tensor {name} is missing, expected for packed sequences (THD)")
                own[name] = tensors[found[name]].astype(np.int32)
        said = {key.rsplit("/", 1)[-1]: value for key, value in attributes.items() if "/" not in key or key.startswith(prefix + "/")}
        said |= {key: value for key, value in given.items() if value is not None}
        try:
            said["softmax_scale"] = float(said["softmax_scale"])
        except KeyError:
            raise ValueError(f"softmax_scale is not said, expected --scale (1/sqrt(head size) is {own['q'].shape[-1] ** -0.5!r})") from None
        if not (math.isfinite(said["softmax_scale"]) and said["softmax_scale"] > 0):
            raise ValueError(f"softmax_scale is {said['softmax_scale']}, expected a number above 0")
        said["causal"] = int(said.get("causal", 0))
        said.pop("layout", None)
        call = _Imported(prefix, 0, 0, True, attributes=said, tensors=own)
        call.check()
        calls.append(call)
    return calls, rounded


def _pair(option, text):
    name, equals, value = text.partition("=")
    if not name or not value:
        raise ValueError(f"{option} {text}: expected NAME=VALUE")
    return name, value


def _value(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python3 -m bitattn.importing", description="Tensors of other formats as captures; see docs/capture.md.")
    parser.add_argument("files", nargs="+", help="IN.safetensors, IN.npz, IN.pt, IN.h5, or q.npy k.npy v.npy …")
    parser.add_argument("-o", "--output", required=True, help="the file to write")
    parser.add_argument("--map", action="append", default=[], metavar="TENSOR=NAME", help="which tensor of the file is q, k, v, dout, …")
    parser.add_argument("--layout", default="", choices=["", *AXES, "THD"], help="order of the file's axes (default BSHD; THD for three axes)")
    parser.add_argument("--round", action="store_true", help="round what is not BF16 to nearest even; else it is refused")
    parser.add_argument("--scale", type=float, help="softmax_scale")
    parser.add_argument("--causal", action="store_true", default=None, help="causal mask")
    parser.add_argument("--attribute", action="append", default=[], metavar="NAME=VALUE", help="window_left=…, softcap=…, kernel=…, step=…, layer=…")
    given = parser.parse_args(arguments)
    try:
        tensors, attributes = {}, {}
        for path in given.files:
            if os.path.exists(given.output) and os.path.exists(path) and os.path.samefile(path, given.output):
                raise ValueError(f"{given.output}: the output would replace the input")
            found, said = read(path)
            twice = tensors.keys() & found.keys()
            if twice:
                raise ValueError(f"{path}: tensor {sorted(twice)[0]} is in another of the files too")
            tensors |= found
            attributes |= said
        names = dict(_pair("--map", text) for text in given.map)
        extra = {name: _value(value) for name, value in (_pair("--attribute", text) for text in given.attribute)}
        options = extra | {"softmax_scale": given.scale, "causal": given.causal}
        calls, rounded = captures_of(tensors, attributes, names=names, layout=given.layout, round_to_bf16=given.round, **options)
        write_captures(given.output, calls)
    except (OSError, ValueError, CaptureRefused, ImportError) as error:
        print(f"bitattn.importing: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    print(f"{given.output}: {len(calls)} captures" + (f", {rounded} elements rounded to BF16" if rounded else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
