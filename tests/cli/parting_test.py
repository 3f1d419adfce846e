"""Two runs compared: `bitattn compare A B` on captures as the recorder writes them, and on those of real kernels.

    parting_test.py PROGRAM SOURCE_DIR

Ends with 77 (skipped) where h5py is not installed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

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
from bitattn.recorder import Call, write_captures  # noqa: E402

GOLDENS = os.path.join(SOURCE, "datasets", "goldens")
SMALL = os.path.join(GOLDENS, "fa3", "d64_full_s64_normal.h5")
PACKED = os.path.join(GOLDENS, "fa3", "d128_causal_varlen3_normal.h5")
VARIANT = os.path.join(GOLDENS, "fa3-variants", "case_01_late.h5")


def load(path):
    with h5py.File(path) as file:
        tensors = {name: words.read_words(file[name]) for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv")}
        tensors |= {name: file[name][...] for name in ("lse", "cu_seqlens_q", "cu_seqlens_k") if name in file}
        return tensors, {"softmax_scale": float(file.attrs["softmax_scale"]), "causal": int(file.attrs["causal"])}


def write_run(path, source, moments, **more):
    """A file of captures of (step, layer, change), change being a function of the tensors."""
    calls = []
    for step, layer, change in moments:
        tensors, attributes = load(source)
        tensors = {name: array.copy() for name, array in tensors.items()}
        change(tensors)
        calls.append(Call(layer, 0, step, True, attributes=attributes | {"kernel": "flash-attention-3"} | more, tensors=tensors))
    write_captures(path, calls)


def nothing(tensors):
    pass


def flip(*places):
    """A change that turns the last bit of elements, given as (tensor, index)."""

    def change(tensors):
        for name, index in places:
            bits = tensors[name].view(np.uint32) if name == "lse" else tensors[name]
            bits[index] ^= 1

    return change


class Parting(unittest.TestCase):
    LAYERS = ("h.2.attn", "h.10.attn", "h.9.attn")

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="bitattn_parting_")
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, changes, source=SMALL):
        """Steps 1 and 2 of three layers, in two folders; what is changed in the second, by (step, layer)."""
        for side in ("a", "b"):
            os.makedirs(self.path(side), exist_ok=True)
            for step in (1, 2):
                moments = [(step, n, changes.get((step, n), nothing) if side == "b" else nothing) for n in self.LAYERS]
                write_run(os.path.join(self.path(side), f"step_{step}.h5"), source, moments)

    def run_compare(self, *arguments):
        """Exit code, standard output, standard error; in the folder, so that names are short."""
        done = subprocess.run([PROGRAM, "compare", *arguments], capture_output=True, cwd=self.folder, timeout=300)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def compare(self, *arguments):
        code, out, err = self.run_compare(*(arguments or ("a", "b", "--no-identify")), "--json")
        self.assertEqual(err, "")
        found = json.loads(out)
        self.assertEqual(code, 0 if found["equal"] else 1)
        return found

    def refused(self, *arguments, says):
        for more in ((), ("--json",)):
            code, out, err = self.run_compare(*arguments, *more)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
            self.assertIn(says, err)

    def test_equal_runs(self):
        self.write({})
        found = self.compare("a", "b")  # with nothing to identify
        self.assertEqual((found["equal"], found["first"], found["identified"], found["not_identified"]), (True, None, None, None))
        self.assertEqual((found["compared"], found["differing"]), (6, 0))
        self.assertEqual(self.run_compare("a", "b"), (0, "No bit differs in 6 captures.\n", ""))

    def test_tensors_on_one_side_only_are_told(self):
        self.write({})
        for folder, _, names in os.walk(os.path.join(self.folder, "b")):
            for name in names:
                with h5py.File(os.path.join(folder, name), "r+") as file:
                    groups = [file]
                    file.visititems(lambda _, item: groups.append(item) if isinstance(item, h5py.Group) else None)
                    for group in groups:
                        if "dq" in group:
                            del group["dq"]
        code, out, err = self.run_compare("a", "b")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(out, "No bit differs in 6 captures.\n  Not compared, as only a holds them: dq (6 captures).\n")

    def test_the_forward_of_a_step_comes_before_its_backward(self):
        """The backward of layer 9 comes before that of layer 2; the forward of layer 10 before both, but not if it is of a later step."""
        self.write({
            (1, "h.2.attn"): flip(("dq", (0, 3, 0, 5))),
            (1, "h.9.attn"): flip(("dv", (0, 7, 0, 1)), ("dq", (0, 0, 0, 0)), ("dq", (0, 0, 0, 1))),
            (2, "h.10.attn"): flip(("out", (0, 0, 0, 0))),
        })  # fmt: skip
        found = self.compare()
        first = found["first"]
        tensors, _ = load(SMALL)
        word = int(tensors["dv"][0, 7, 0, 1])
        self.assertEqual((first["step"], first["layer"], first["call"], first["rank"]), (1, "h.9.attn", 0, 0))
        self.assertEqual((first["differing"], first["pass"], first["input"]), (["dv", "dq"], "backward", False))
        place = first["tensor"]["first"]["place"]
        self.assertEqual({axis: place[axis] for axis in "bjhd"}, {"b": 0, "j": 7, "h": 0, "d": 1})
        self.assertEqual((first["tensor"]["first"]["a_bits"], first["tensor"]["first"]["b_bits"]), (f"0x{word:04x}", f"0x{word ^ 1:04x}"))
        self.assertEqual(first["b_capture"], "b/step_1.h5:/step_000001/h.9.attn")
        layers = [(c["step"], c["layer"], c["equal"]) for c in found["comparisons"]]
        self.assertEqual(layers, [(s, f"h.{n}.attn", (s, n) not in ((1, 2), (1, 9), (2, 10))) for s in (1, 2) for n in (2, 9, 10)])
        of_dq = [t for t in found["comparisons"][1]["tensors"] if t["tensor"] == "dq"][0]
        self.assertEqual(of_dq["differing_bits"], 2)
        self.write({(1, "h.2.attn"): flip(("dq", (0, 3, 0, 5))), (1, "h.10.attn"): flip(("lse", (0, 0, 9)))})
        first = self.compare()["first"]
        place = first["tensor"]["first"]["place"]
        self.assertEqual((first["step"], first["layer"], place["h"], place["i"]), (1, "h.10.attn", 0, 9))
        self.assertEqual(len(first["tensor"]["first"]["a_bits"]), 10)

    def test_what_was_given_already_differs(self):
        self.write({(2, "h.9.attn"): flip(("q", (0, 1, 0, 2)), ("out", (0, 1, 0, 2))), (2, "h.10.attn"): flip(("out", (0, 4, 0, 6)))})
        code, out, err = self.run_compare("a", "b", "--no-identify")
        self.assertEqual((code, err), (1, ""))
        self.assertIn("THE RUNS PART\n  at step 2, layer h.9.attn\n  tensor q at b 0, h 0, i 1, d 2\n", out)
        self.assertIn("the runs parted before this layer's attention", out)
        self.assertLess(out.index("WHAT DIFFERS   in 2 of 6"), out.index("h.10.attn"))
        self.assertLess(out.index("h.10.attn"), out.index("b/step_2.h5:/step_000002/h.9.attn\n  a against b: 2 of "))
        self.assertLessEqual(max(map(len, out.splitlines())), 100)
        self.write({(1, "h.9.attn"): flip(("dout", (0, 1, 0, 2)))})
        self.assertIn("the runs parted above this layer", self.run_compare("a", "b", "--no-identify")[1])

    def test_packed_sequences(self):
        self.LAYERS = ("a",)
        self.write({(1, "a"): flip(("dk", (5, 0, 3)))}, PACKED)
        place = self.compare()["first"]["tensor"]["first"]["place"]
        with h5py.File(PACKED) as file:
            self.assertGreater(file["cu_seqlens_k"][1], 5)
        self.assertEqual((place["j"], place["h"], place["d"]), (5, 0, 3))

    def test_runs_that_do_not_fit(self):
        self.write({})
        os.unlink(self.path("b/step_2.h5"))
        found = self.compare()
        self.assertEqual((found["equal"], len(found["only_in_a"]), found["only_in_b"], found["differing"]), (False, 3, [], 0))
        code, out, _ = self.run_compare("a", "b")
        self.assertEqual(code, 1)
        self.assertIn("Only in a: 3 captures, the first a/step_2.h5:/step_000002/h.2.attn\n", out)
        write_run(self.path("c.h5"), SMALL, [(7, "a", nothing)])
        write_run(self.path("d.h5"), SMALL, [(1, "h.2.attn", nothing)], softcap=15.0)
        write_run(self.path("e.h5"), PACKED, [(7, "a", nothing)])
        self.refused("a", "c.h5", says="no step and layer is in both")
        self.refused("a", "d.h5", says="not the same problem: softcap")
        self.refused("a", "missing", says="missing")
        self.refused("c.h5", "e.h5", says="not the same problem")
        shutil.copy(self.path("a/step_1.h5"), self.path("a/again.h5"))
        self.refused("a", "b", says="are of the same step, layer, call and rank")
        os.unlink(self.path("a/again.h5"))
        with h5py.File(self.path("a/step_1.h5"), "r+") as file:
            file["step_000001/h.2.attn"].attrs["step"] = "first"
        self.refused("a", "b", says="attribute step is first, expected a whole number")
        with open(self.path("a/step_1.h5"), "w", encoding="utf-8") as file:
            file.write("text")
        self.refused("a", "b", says="a/step_1.h5")

    def test_recorders_that_write_attributes_otherwise(self):
        """A run of another recorder: other file and group names, numbers as text and text as numbers, a mask said in other words."""
        self.LAYERS = ("3", "10")
        self.write({(2, "10"): flip(("dv", (0, 0, 0, 0)))})
        os.mkdir(self.path("other"))
        for step in (1, 2):
            with h5py.File(self.path(f"b/step_{step}.h5")) as file, h5py.File(self.path(f"other/{step}.hdf5"), "w") as to:
                for n, layer in enumerate(self.LAYERS):
                    file.copy(f"step_{step:06d}/{layer}", to, f"x{n}")
                    to[f"x{n}"].attrs["layer"] = int(layer)
                    to[f"x{n}"].attrs["step"] = np.bytes_(str(step))
                    to[f"x{n}"].attrs["causal_alignment"] = "top-left"
                    for name in ("call", "rank"):
                        to[f"x{n}"].attrs.pop(name, None)
        found = self.compare("a", "other", "--no-identify")
        self.assertEqual((found["identified"], found["not_identified"]), (None, "--no-identify"))
        first = found["first"]
        self.assertEqual((first["step"], first["layer"], first["tensor"]["tensor"]), (2, "10", "dv"))
        self.assertEqual(first["b_capture"], "other/2.hdf5:/x1")

    def test_which_kernel_each_side_follows(self):
        """Step 2 of one run was computed by a kernel that deviates at one place: a real one, on an H200."""
        plain = self.path("plain.h5")
        subprocess.run([PROGRAM, "run", VARIANT, "-b", "fa3", "-o", plain, "--quiet"], check=True, capture_output=True)
        for side in ("a", "b"):
            with h5py.File(self.path(side + ".h5"), "w") as to:
                for step in (1, 2):
                    source = VARIANT if (side, step) == ("b", 2) else plain
                    with h5py.File(source) as file:
                        group = to.create_group(f"step_{step}/h.0")
                        for name in file:
                            file.copy(name, group)
                        for name in file.attrs:
                            group.attrs[name] = file.attrs[name]
                        group.attrs.update({"step": step, "layer": "h.0"})
        code, out, err = self.run_compare("a.h5", "b.h5")
        self.assertEqual((code, err), (1, ""))
        self.assertIn("at step 2, layer h.0\n  tensor dpsum at ", out)
        self.assertIn("What the kernel was given is equal: the two backward kernels part here.", out)
        a, b = out.index("follows fa3 in every recorded bit"), out.index("follows fa3 with 1 deviation in every recorded bit")
        self.assertTrue(out.index("WHICH KERNEL") < a < b < out.index("dpsum: each product dO*O rounded to BF16"))
        self.assertLessEqual(max(map(len, out.splitlines())), 100)
        identified = self.compare("a.h5", "b.h5")["identified"]
        self.assertEqual([identified[side]["verdict"] for side in "ab"], ["unmodified", "deviation"])
        self.assertEqual(identified["b"]["best"]["deviations"][0]["site"], "dpsum")

    def test_the_same_kernel_on_other_inputs(self):
        """Not a step of one run: two captures of one layer, as the user named them."""
        with h5py.File(SMALL) as file:
            shutil.copy(SMALL, self.path("other.h5"))
        os.chmod(self.path("other.h5"), 0o644)
        with h5py.File(self.path("other.h5"), "r+") as file:
            raw = words.read_words(file["q"])
            raw[0, 1, 0, 2] ^= 0x8000
            file["q"].id.write(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=file["q"].id.get_type())
        subprocess.run([PROGRAM, "run", "other.h5", "-b", "fa3", "-o", "b.h5", "--quiet"], check=True, capture_output=True, cwd=self.folder)
        code, out, err = self.run_compare(SMALL, "b.h5")
        self.assertEqual((code, err), (1, ""))
        self.assertNotIn("  at step", out)
        self.assertNotIn("WHAT DIFFERS", out)
        # No kernel explains a difference of inputs, so none is looked for.
        self.assertIn("WHICH KERNEL\n  Not looked for: what attention was given differs already", out)
        found = self.compare(SMALL, "b.h5")
        self.assertIsNone(found["identified"])
        self.assertIn("given differs already", found["not_identified"])
        # The tensors stand in the order of the step, as in WHAT DIFFERS.
        table = out[out.index("  tensor    "):out.index("  where\n")]
        names = [line.split()[0] for line in table.splitlines() if line.startswith("  ") and line.split()[0] in found["first"]["differing"]]
        self.assertEqual(names, found["first"]["differing"])
        self.assertGreater(len(names), 5)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]])
