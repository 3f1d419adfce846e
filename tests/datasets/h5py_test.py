"""Captures as h5py sees them, against what bitattn reads and writes.

    h5py_test.py CAPTURE_TOOL DOCS_CAPTURES_MD GOLDENS...

Exits with 77 (skipped) where h5py is not installed.
"""

import glob
import os
import re
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
except ImportError:
    print("h5py is not installed")
    sys.exit(77)

TENSORS = ["q", "k", "v", "dout", "out", "dq", "dk", "dv", "lse", "dpsum", "lse_log2", "dq_accum"]


def run(*arguments):
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout


def raw(dataset):
    """The words of a dataset as they stand in the file, without any conversion."""
    kind = dataset.id.get_type()
    words = np.empty(dataset.shape, {2: "<u2", 4: "<u4", 8: "<u8"}[kind.get_size()])
    if words.size:
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, words, kind)
    return words


def fnv(words):
    value = 0xCBF29CE484222325
    for byte in words.tobytes():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def captures(file):
    found = []
    file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Group) else None)
    return [g for g in [file] + [file[n] for n in found] if all(t in g for t in "qkv")]


def digest(path):
    """What capture_tool digest prints, from h5py alone."""
    lines = []
    with h5py.File(path, "r") as file:
        for group in captures(file):
            lines.append("capture " + (path if group.name == "/" else f"{path}:{group.name}"))
            attribute = group.attrs.get
            lines.append(f"softmax_scale {float(attribute('softmax_scale')):.17g}")
            lines.append(f"causal {int(attribute('causal', 0))}")
            lines.append(f"window {attribute('window_left', -1)} {attribute('window_right', -1)}")
            lines.append(f"softcap {float(attribute('softcap', 0)):.17g}")
            lines.append(f"heads {group['q'].shape[-2]} {group['k'].shape[-2]}")
            for name in TENSORS:
                if name not in group:
                    continue
                words = raw(group[name])
                if name == "lse":
                    rows = group["q"].shape[-3]
                    words = words.reshape(words.shape[:-1]) if words.shape[-1] == 1 and words.shape[-2] >= rows > 1 else words
                    words = np.ascontiguousarray(words[..., :rows])
                lines.append(" ".join([name, *map(str, words.shape), f"{fnv(words):016x}"]))
    return "\n".join(lines) + "\n"


def check_rewritten(path, again):
    with h5py.File(path, "r") as before, h5py.File(again, "r") as after:
        assert [g.name for g in captures(before)] == [g.name for g in captures(after)]
        for old in captures(before):
            new = after[old.name]
            for name in TENSORS:
                if name not in old or name == "lse":
                    continue
                assert np.array_equal(raw(old[name]), raw(new[name])), (path, name)
                assert new[name].compression == "gzip" and new[name].shuffle and new[name].fletcher32, name
                # h5py gives the values as float32, exactly.
                if raw(new[name]).dtype == np.uint16:
                    values = new[name][...]
                    assert values.dtype == np.float32
                    bits = raw(new[name]).astype(np.uint32) << 16
                    number = ~np.isnan(values)
                    assert np.array_equal(values.view(np.uint32)[number], bits[number]), name
            for name, value in old.attrs.items():
                value = value.decode() if isinstance(value, bytes) else value
                assert np.all(new.attrs[name] == value), (path, name, value, new.attrs[name])
            finding = new["findings/test/row_index"]
            assert np.array_equal(finding[...].ravel(), np.arange(finding.size))
            assert finding.attrs["units"] == "1" and finding.attrs["description"] == "flat index of the row"
            axes = ["batch", "head", "query"] if finding.ndim == 3 else ["head", "token"]
            assert [d.label for d in finding.dims] == axes
            for dimension, length in zip(finding.dims, finding.shape):
                assert np.array_equal(dimension[0][...], np.arange(length))


def check_snippet(tool, page):
    with open(page, encoding="utf-8") as file:
        code = re.search(r"```python\n(.*?)```", file.read(), re.S).group(1)
    variables = {}
    exec(compile(code, page, "exec"), variables)
    assert run(tool, "digest", "my_capture.h5") == digest("my_capture.h5")
    printed = run(tool, "digest", "my_capture.h5")
    assert "capture my_capture.h5:/step_000100/layer_3\n" in printed and "causal 1\n" in printed
    words = variables["bf16_words"](np.array([1.00390625, 1.01171875, -0.0, np.nan, np.inf, 1e-40], np.float32))
    assert words.tolist() == [0x3F80, 0x3F82, 0x8000, 0x7FFF, 0x7F80, 0x0001], words
    with h5py.File("my_capture.h5", "r") as file:
        assert file["step_000100/layer_3/q"][...].dtype == np.float32


def main():
    tool, page, *folders = sys.argv[1:]
    tool, page = os.path.abspath(tool), os.path.abspath(page)
    extra = os.environ.get("BITATTN_GOLDENS")
    files = [f for folder in folders for f in glob.glob(os.path.join(folder, "**", "*.h5"), recursive=True)]
    if extra:  # one of each kind is enough: pure Python hashes slowly
        for pattern in ("torch-kernels/*128x128*", "torch-corners/*80*", "fa3-variants/*03_late*", "fa3-corners/q*"):
            files += glob.glob(os.path.join(extra, pattern))
    files = [f for f in sorted(files) if os.path.getsize(f) < 400000]
    assert len(files) >= 5, files
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for path in files:
            found, expected = run(tool, "digest", path), digest(path)
            assert found == expected, f"{path}\n{found}\n{expected}"
            run(tool, "rewrite", path, "again.h5")
            check_rewritten(path, "again.h5")
        check_snippet(tool, page)
    print(f"{len(files)} files")


main()
