"""bitattn.importing: tensors of a .pt file become captures that verify bit by bit; bad input is one clear line.

    importing_test.py PROGRAM SOURCE_DIR

Where PyTorch is not installed, a stand-in of torch.load and of tensors takes its place: what is tested is what bitattn does with them. Ends with
77 (skipped) where h5py is not installed. What the program does with tensors is tests/cli/import_test.py.
"""

import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import types
import unittest

try:
    import h5py
    import numpy as np
except ImportError:
    print("h5py or NumPy is not installed: skipped")
    sys.exit(77)

PROGRAM = os.path.abspath(sys.argv[1])
SOURCE = os.path.abspath(sys.argv[2])
os.environ["BITATTN"] = PROGRAM
from bitattn import importing, words  # noqa: E402

GOLDENS = os.path.join(SOURCE, "datasets", "goldens", "fa3")
SMALL = os.path.join(GOLDENS, "d64_full_s64_normal.h5")
PACKED = os.path.join(GOLDENS, "d128_causal_varlen3_normal.h5")
BF16 = ("q", "k", "v", "dout", "out", "dq", "dk", "dv")


class StandIn:
    """A tensor of PyTorch, as far as bitattn.importing goes."""

    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype

    def detach(self):
        return self

    contiguous = detach

    def view(self, dtype):
        return StandIn(self.array.view(dtype), dtype)

    def numpy(self):
        return self.array


try:
    import torch

    def bfloat16(array):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)

    plain = torch.from_numpy
except ImportError:
    torch = types.ModuleType("torch")
    torch.Tensor, torch.bfloat16 = StandIn, "bfloat16"
    for kind in ("float16", "float32", "float64", "int16", "int32", "int64"):
        setattr(torch, kind, np.dtype(kind))
    sys.modules["torch"] = torch

    def bfloat16(array):
        return StandIn(array, torch.bfloat16)

    def plain(array):
        return StandIn(array, array.dtype)

    def save(content, path):
        with open(path, "wb") as file:
            pickle.dump(content, file)

    def load_stand_in(path, map_location, weights_only):
        assert map_location == "cpu" and weights_only
        with open(path, "rb") as file:
            return pickle.load(file)

    torch.save, torch.load = save, load_stand_in


def load(path):
    with h5py.File(path) as file:
        tensors = {name: bfloat16(words.read_words(file[name])) for name in BF16}
        tensors["lse"] = plain(file["lse"][...])
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if name in file:
                tensors[name] = plain(file[name][...].astype(np.int32))
        return tensors, float(file.attrs["softmax_scale"]), bool(file.attrs["causal"])


def run_import(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = importing.main([str(a) for a in arguments])
    return code, out.getvalue(), err.getvalue()


def verify(path):
    done = subprocess.run([PROGRAM, "verify", path, "--json"], capture_output=True, timeout=300)
    return done.returncode, json.loads(done.stdout)


class Pt(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="bitattn_importing_")
        self.addCleanup(shutil.rmtree, self.folder)
        self.source = os.path.join(self.folder, "x.pt")
        self.out = os.path.join(self.folder, "out.h5")

    def test_tensors_become_captures_that_verify(self):
        tensors, scale, causal = load(PACKED)
        torch.save(tensors, self.source)
        code, text, err = run_import(self.source, "-o", self.out, "--scale", scale, *(["--causal"] if causal else []))
        self.assertEqual((code, err), (0, ""))
        self.assertIn(f"{self.out}: ", text)
        code, found = verify(self.out)
        self.assertEqual((code, found["captures"][0]["elements"] > 0), (0, True))

    def test_nested_values_are_groups_with_attributes(self):
        tensors, scale, _ = load(SMALL)
        torch.save({"layers": [{"attn": tensors | {"softmax_scale": scale, "causal": False, "layer": "the first"}}], "step": 3, "odd": None}, self.source)
        self.assertEqual(run_import(self.source, "-o", self.out)[::2], (0, ""))
        code, found = verify(self.out)
        self.assertEqual((code, found["captures"][0]["capture"]), (0, self.out + ":/layers.0.attn"))
        with h5py.File(self.out) as file:
            self.assertEqual(file["layers.0.attn"].attrs["layer"], "the first")

    def test_what_cannot_be_a_tensor_of_a_capture_is_left_out_and_told(self):
        tensors, scale, _ = load(SMALL)
        odd = bfloat16(np.zeros((2, 2), np.uint16))
        if isinstance(odd, StandIn):
            odd.dtype = "torch.float8_e4m3fn"
        else:
            odd = odd.to(torch.float8_e4m3fn)
        torch.save(tensors | {"more": {"/dout": odd, "large": 2**70}}, self.source)
        code, _, err = run_import(self.source, "-o", self.out, "--scale", scale)
        self.assertEqual((code, err), (0, "bitattn.importing: left out: more//dout (float8_e4m3fn)\n"))
        self.assertEqual(verify(self.out)[0], 0)

    def test_bad_input_is_one_line(self):
        def refused(pattern, *arguments):
            code, text, err = run_import(*arguments)
            self.assertEqual((code, text, err.count("\n")), (2, "", 1), err)
            self.assertRegex(err, pattern)
            self.assertFalse(os.path.exists(self.out))

        tensors, scale, _ = load(SMALL)
        refused(r"x\.pt: No such file", self.source, "-o", self.out)
        with open(self.source, "wb") as file:
            file.write(b"not what PyTorch writes")
        refused(r"x\.pt: PyTorch cannot read it: ", self.source, "-o", self.out)
        torch.save(tensors, self.source)
        with open(self.source, "rb") as file:
            before = file.read()
        os.symlink(self.source, os.path.join(self.folder, "link.h5"))
        for out in (self.source, self.source + ":/x", os.path.join(self.folder, ".", "x.pt"), os.path.join(self.folder, "link.h5")):
            refused("the output would replace the input", self.source, "-o", out, "--scale", scale)
        with open(self.source, "rb") as file:
            self.assertEqual(file.read(), before)
        torch.save(tensors["q"], self.source)
        refused(r"x\.pt: holds one \w+, expected tensors by name", self.source, "-o", self.out)
        torch.save(tensors, self.source)
        refused(r"x\.pt: softmax_scale is not said", self.source, "-o", self.out)
        refused("expected one file that ends in .pt or .pth", SMALL, "-o", self.out)
        torch.save({n: x for n, x in tensors.items() if n != "v"}, self.source)
        refused(r"x\.pt: ", self.source, "-o", self.out, "--scale", scale)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]])
