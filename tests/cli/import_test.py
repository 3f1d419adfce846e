"""bitattn import: every format and layout gives back the bits of a real capture, names by rule and by --map; bad input is one clear line.

    import_test.py PROGRAM SOURCE_DIR

A bundled capture is written in each format (.safetensors by hand, from its published layout), imported, and must verify bit by bit. Ends with 77
(skipped) where h5py is not installed.
"""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import zipfile

try:
    import h5py
    import numpy as np
except ImportError:
    print("h5py or NumPy is not installed: skipped")
    sys.exit(77)

PROGRAM = os.path.abspath(sys.argv[1])
SOURCE = os.path.abspath(sys.argv[2])
sys.path.insert(0, os.path.join(SOURCE, "python"))
from bitattn import words  # noqa: E402

GOLDENS = os.path.join(SOURCE, "datasets", "goldens", "fa3")
GROUPED = os.path.join(GOLDENS, "d128_full_gqa4x2_s128_late.h5")
SMALL = os.path.join(GOLDENS, "d64_full_s64_normal.h5")
PACKED = os.path.join(GOLDENS, "d128_causal_varlen3_normal.h5")
SPECIAL = os.path.join(GOLDENS, "special_causal_s200.h5")
BF16 = ("q", "k", "v", "dout", "out", "dq", "dk", "dv")


def run(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, timeout=300)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def load(path):
    with h5py.File(path) as file:
        tensors = {name: words.read_words(file[name]) for name in BF16}
        tensors["lse"] = file["lse"][...]
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if name in file:
                tensors[name] = file[name][...].astype(np.int32)
        return tensors, float(file.attrs["softmax_scale"]), bool(file.attrs["causal"])


SAFE = {"bf16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "int32": "I32", "uint16": "U16", "bool": "BOOL"}


def write_safetensors(path, tensors, metadata=None):
    """uint16 arrays are BF16 words, unless named with a leading "u:"."""
    header, data = {}, b""
    for name, array in tensors.items():
        kind = "bf16" if array.dtype == np.uint16 and not name.startswith("u:") else array.dtype.name
        raw = np.ascontiguousarray(array).tobytes()
        header[name.removeprefix("u:")] = {"dtype": SAFE[kind], "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    if metadata:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="bitattn_import_")
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def imported(self, files, source, *options):
        """Imports, and compares every tensor with the source's: verified bit by bit."""
        tensors, scale, causal = load(source)
        out = self.path("out.h5")
        files = files if isinstance(files, list) else [files]
        code, text, err = run("import", *files, "-o", out, "--scale", repr(scale), *(["--causal"] if causal else []), *options)
        self.assertEqual((code, err), (0, ""), text)
        with h5py.File(out) as file:
            for name, array in tensors.items():
                found = words.read_words(file[name]) if name in BF16 else file[name][...]
                self.assertEqual(found.tobytes(), array.tobytes(), name)
        code, said, err = run("verify", out)
        self.assertEqual((code, err), (0, ""), said)
        os.unlink(out)
        return text

    def refused(self, expected, *arguments):
        out = self.path("refused.h5")
        code, text, err = run("import", *arguments, "-o", out)
        self.assertEqual((code, text), (2, ""), err)
        self.assertRegex(err, expected)
        self.assertEqual(err.count("\n"), 1, err)
        self.assertFalse(os.path.exists(out))


class Formats(Case):
    def test_safetensors(self):
        for source in (GROUPED, PACKED):
            write_safetensors(self.path("x.safetensors"), load(source)[0])
            self.imported(self.path("x.safetensors"), source)

    def test_npz_stored_and_deflated(self):
        for source in (GROUPED, PACKED):
            for save in (np.savez, np.savez_compressed):
                save(self.path("x.npz"), **load(source)[0])
                self.imported(self.path("x.npz"), source)

    def test_npy_files(self):
        tensors, _, _ = load(GROUPED)
        files = []
        for name, array in tensors.items():
            files.append(self.path(name + ".npy"))
            # Column-major arrays, and the type that ml_dtypes leaves in a file.
            array = np.asfortranarray(array) if name in ("k", "lse") else array.view("V2") if name == "q" else array
            np.save(files[-1], array)
        self.imported(files, GROUPED)

    def test_hdf5_of_other_layouts(self):
        """Compressed, chunked, as plain words, and as float32 that holds BF16 numbers; attributes are taken."""
        tensors, scale, _ = load(GROUPED)
        with h5py.File(self.path("x.h5"), "w") as file:
            group = file.create_group("step_7/layer_3")
            for name, array in tensors.items():
                array = words.to_float(array) if name in ("q", "dout") else array
                group.create_dataset(name, data=array, compression="gzip" if name == "k" else None)
            group.create_dataset("note", data="text is passed over")
            group.attrs["softmax_scale"] = scale
            group.attrs["layer"] = 3
            file.attrs["run"] = "mine"
        out = self.path("out.h5")
        code, text, err = run("import", self.path("x.h5"), "-o", out, "--attribute", "step=7", "--attribute", "kernel=flash-attention-3")
        self.assertEqual((code, err), (0, ""))
        code, text, err = run("info", out, "--json")
        found = json.loads(text)["captures"][0]
        self.assertEqual(found["capture"], out + ":/step_7.layer_3")
        self.assertEqual(found["attributes"], {"layer": 3, "run": "mine", "step": 7, "kernel": "flash-attention-3"})
        self.assertEqual(run("verify", out)[0], 0)

    def test_infinities_nan_and_subnormals(self):
        write_safetensors(self.path("x.safetensors"), load(SPECIAL)[0])
        self.imported(self.path("x.safetensors"), SPECIAL)


class Layouts(Case):
    def test_axes(self):
        tensors, _, _ = load(GROUPED)
        for layout, axes in {"BSHD": (0, 1, 2, 3), "BHSD": (0, 2, 1, 3), "SBHD": (1, 0, 2, 3)}.items():
            turned = {n: x.transpose(axes) if n in BF16 else x for n, x in tensors.items()}
            if layout == "SBHD":  # as Megatron leaves it: [S,B,H*D]
                turned["out"] = turned["out"].reshape(*turned["out"].shape[:2], -1)
            write_safetensors(self.path("x.safetensors"), turned)
            self.imported(self.path("x.safetensors"), GROUPED, "--layout", layout)

    def test_names_by_rule_and_by_map(self):
        tensors, _, _ = load(GROUPED)
        usual = {"q": "query", "k": "key_states", "v": "Value", "out": "attn_output", "dout": "grad_output", "dq": "q.grad", "lse": "softmax_lse"}
        del usual["dq"]
        renamed = {"layers.3/" + usual.get(n, n): x for n, x in tensors.items()}
        np.savez(self.path("x.npz"), **renamed)
        out = self.path("out.h5")
        code, text, err = run("import", self.path("x.npz"), "-o", out, "--scale", 0.1)
        self.assertEqual((code, err), (0, ""))
        self.assertIn("q from layers.3/query, k from layers.3/key_states", text)
        with h5py.File(out) as file:
            self.assertEqual(words.read_words(file["layers.3/dout"]).tobytes(), tensors["dout"].tobytes())
        other = {f"t{i}": x for i, x in enumerate(tensors.values())}
        np.savez(self.path("x.npz"), **other)
        maps = [f"--map={n}=t{i}" for i, n in enumerate(tensors)]
        self.imported(self.path("x.npz"), GROUPED, *maps)
        self.refused("no q, k and v by their usual names among t0, t1", self.path("x.npz"), "--scale", "1")

    def test_many_captures_in_one_file(self):
        tensors, scale, _ = load(SMALL)
        write_safetensors(self.path("x.safetensors"), {f"model.layers.{i}.{n}": x for i in range(3) for n, x in tensors.items()}, {"softmax_scale": repr(scale)})
        out = self.path("out.h5")
        code, text, err = run("import", self.path("x.safetensors"), "-o", out + ":/step_9", "--json")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual([c["group"] for c in json.loads(text)["captures"]], [f"/step_9/model.layers.{i}" for i in range(3)])
        code, text, err = run("verify", out, "--json")
        self.assertEqual((code, json.loads(text)["captures_verified"]), (0, 3))


class Numbers(Case):
    def test_what_is_not_bf16_is_refused_or_rounded_to_nearest_even(self):
        tensors, scale, _ = load(SMALL)
        values = np.random.default_rng(1).standard_normal(tensors["q"].shape)
        values[0, 0, 0, :4] = [1.00390625, 1.01171875, 1 + 2.0**-8 + 2.0**-40, -0.0]
        for kind in (np.float16, np.float32, np.float64):
            other = {n: x for n, x in tensors.items() if n in ("k", "v")} | {"q": values.astype(kind)}
            np.savez(self.path("x.npz"), **other)
            self.refused(r"tensor q for q is fp\d\d and element \d+, .* is no BF16 number; expected BF16, or --round", self.path("x.npz"), "--scale", scale)
            out = self.path("out.h5")
            code, text, err = run("import", self.path("x.npz"), "-o", out, "--scale", scale, "--round", "--json")
            self.assertEqual((code, err), (0, ""))
            with h5py.File(out) as file:
                found = words.read_words(file["q"])
            # To nearest even of the float64 itself, by exact comparison of both neighbours.
            exact = values.astype(kind).astype(np.float64)
            near = words.to_float(found).astype(np.float64)
            for step in (-1, 1):
                other = words.to_float((found.astype(np.int32) + step).astype(np.uint16)).astype(np.float64)
                distance, distance_other = np.abs(exact - near), np.abs(exact - other)
                with np.errstate(invalid="ignore"):
                    wrong = (distance_other < distance) | ((distance_other == distance) & (found % 2 == 1))
                self.assertFalse(np.any(wrong & (exact != 0)), kind)
            self.assertEqual(json.loads(text)["captures"][0]["rounded"], int(np.sum(near != exact)))
            if kind == np.float64:
                self.assertEqual(found[0, 0, 0, :4].tolist(), [0x3F80, 0x3F82, 0x3F81, 0x8000])
            os.unlink(out)


class Refusals(Case):
    def test_bad_arguments(self):
        tensors, scale, _ = load(SMALL)
        good = self.path("x.npz")
        np.savez(good, **tensors)
        self.refused(r"softmax_scale is not said, expected --scale \(1/sqrt\(head size\) is 0.125\)", good)
        self.refused("--map q: expected NAME=VALUE", good, "--map", "q")
        self.refused("--map z=q: expected one of cu_seqlens_k, cu_seqlens_q, dk", good, "--map", "z=q")
        self.refused("--map q=nothing: the file has no tensor of that name", good, "--map", "q=nothing")
        self.refused("--layout XYZ: expected BSHD, BHSD, SBHD or THD", good, "--layout", "XYZ", "--scale", "1")
        self.refused("causal_alignment", good, "--causal-alignment", "left", "--scale", "1")
        self.refused("--window 5: expected LEFT:RIGHT", good, "--window", "5", "--scale", "1")
        self.refused("three axes|cu_seqlens", good, "--layout", "THD", "--scale", "1")
        self.refused("softmax_scale", good, "--scale", "-1")
        self.refused("tensor q is in another of the files too|tensor dk is in another", good, good, "--scale", "1")
        self.refused("cannot be opened", self.path("missing.safetensors"))
        self.refused("ends in .safetensors, .npz, .npy, .h5 or .hdf5", self.path("x.bin"))
        self.refused("use python3 -m bitattn.importing", self.path("x.pt"))
        code, text, err = run("import", SMALL, "-o", SMALL)
        self.assertEqual((code, "replace the input" in err), (2, True))

    def test_tensors_that_do_not_fit(self):
        tensors, _, _ = load(SMALL)
        for change, expected in (
            ({"k": tensors["k"][:, :, :, :32]}, "k"),
            ({"dq": tensors["dq"][:, :5]}, "dq"),
            ({"lse": tensors["lse"].astype(np.float64)}, r"tensor lse is fp64 \[1, 1, 64\]|tensor lse is fp64 .* expected float32"),
            ({"q": tensors["q"][0]}, "axes|cu_seqlens_q is missing"),
            ({"q": tensors["q"].astype(np.int32)}, "tensor q for q has type i32, expected BF16"),
            ({"dout": None}, "tensor dout is missing, expected beside dq, dk, dv"),
            ({"query": tensors["q"]}, "tensors q and query could both be q; expected --map q=NAME"),
        ):
            changed = {n: x for n, x in (tensors | change).items() if x is not None}
            np.savez(self.path("x.npz"), **changed)
            self.refused(expected, self.path("x.npz"), "--scale", "1")

    def test_damaged_files_end_in_one_line(self):
        """Cut off, bits flipped, absurd sizes: exit 2 or a capture, never a crash."""
        tensors, _, _ = load(SMALL)
        tensors = {n: tensors[n][:, :8, :1, :16] for n in ("q", "k", "v")}
        write_safetensors(self.path("x.safetensors"), tensors)
        np.savez_compressed(self.path("x.npz"), **tensors)
        np.save(self.path("q.npy"), tensors["q"])
        with h5py.File(self.path("x.h5"), "w") as file:
            for name, array in tensors.items():
                file[name] = array
        draw = random.Random(5)
        for name in ("x.safetensors", "x.npz", "q.npy", "x.h5"):
            with open(self.path(name), "rb") as file:
                good = file.read()
            for case in range(25):
                bad = bytearray(good)
                if case % 3 == 0:
                    del bad[draw.randrange(len(bad)) :]
                for _ in range(draw.randrange(1, 4)):
                    if bad:
                        bad[draw.randrange(min(len(bad), 400))] = draw.randrange(256)
                damaged = self.path("damaged" + os.path.splitext(name)[1])
                with open(damaged, "wb") as file:
                    file.write(bad)
                code, _, err = run("import", damaged, "-o", self.path("out.h5"), "--scale", "1", "--round")
                self.assertIn(code, (0, 2), (name, case, err))
                self.assertLessEqual(err.count("\n"), 1, (name, case, err))
        for header in (b"[]", b'{"q":1}', b'{"q":{"dtype":"BF16","shape":[99999999999,99999999999],"data_offsets":[0,2]}}', b"{" * 100000):
            with open(self.path("y.safetensors"), "wb") as file:
                file.write(struct.pack("<Q", len(header)) + header + b"xx")
            self.refused("y.safetensors: ", self.path("y.safetensors"))
        with open(self.path("y.safetensors"), "wb") as file:
            file.write(struct.pack("<Q", 2**63) + b"{}")
        self.refused("header would be longer than the file", self.path("y.safetensors"))

    def test_scalars_of_npz_are_attributes_and_a_prefix_is_the_layer(self):
        tensors, scale, _ = load(SMALL)
        turned = {n: np.swapaxes(x, 1, 2) if n in BF16 else x for n, x in tensors.items()}
        np.savez(self.path("x.npz"), softmax_scale=scale, step=7, **{f"blocks.3/{n}": x for n, x in turned.items()})
        code, text, err = run("import", self.path("x.npz"), "-o", self.path("out.h5"), "--layout", "BHSD")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("read as BHSD: batch 1, 64 tokens, 1 head, head size 64", text.replace("\n", " "))
        self.assertTrue(all(len(line) <= 100 for line in text.splitlines()), text)
        with h5py.File(self.path("out.h5")) as file:
            attributes = file["blocks.3"].attrs
            self.assertEqual((attributes["step"], attributes["layer"], attributes["softmax_scale"]), (7, "blocks.3", scale))

    def test_a_zip_bomb_is_refused(self):
        with zipfile.ZipFile(self.path("x.npz"), "w") as archive:
            archive.writestr("q.npy", b"\x93NUMPY")
        with open(self.path("x.npz"), "rb") as file:
            raw = bytearray(file.read())
        # The central directory claims 4 GiB for the one entry.
        at = raw.rindex(b"PK\x01\x02")
        raw[at + 24 : at + 28] = struct.pack("<I", 0xFFFFFFFE)
        with open(self.path("x.npz"), "wb") as file:
            file.write(raw)
        self.refused("x.npz: ", self.path("x.npz"))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]])
