"""Whole runs: many captures ranked, and a journal that a stopped ranking goes on from.

    runs_test.py PROGRAM SOURCE_DIR

Ends with 77 (skipped) where h5py is not installed.
"""

import contextlib
import io
import json
import math
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

from bitattn import ranking, words  # noqa: E402
from bitattn.listing import list_captures, natural_key  # noqa: E402
from bitattn.recorder import Call, write_captures  # noqa: E402

GOLDENS = os.path.join(SOURCE, "datasets", "goldens")
# Five captures of a real run where the large golden set is, else the one that is bundled.
REAL_RUN = os.path.join(os.environ.get("BITATTN_GOLDENS") or GOLDENS, "real-run")
SMALL = os.path.join(GOLDENS, "fa3", "d64_full_s64_normal.h5")
LATE = os.path.join(GOLDENS, "fa3", "d128_full_s128_late.h5")


def called(main, *arguments):
    """Exit code, standard output, standard error of a main()."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(a) for a in arguments])
    return code, out.getvalue(), err.getvalue()


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


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="bitattn_runs_")
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)


class Ranking(Case):
    def test_a_real_run(self):
        """A bundled layer, layers of other bundled captures, and a real run: every figure is that of its capture's own diagnosis."""
        run = self.path("run")
        os.mkdir(run)
        for source in os.listdir(REAL_RUN):
            if source.endswith(".h5"):
                shutil.copy(os.path.join(REAL_RUN, source), run)
        for step, source in ((1, SMALL), (2, LATE)):
            write_run(os.path.join(run, f"step_{step:06d}_layer_7.h5"), source, [(step, "7", nothing)])
        self.check(run)

    def check(self, run):
        expected = {}
        for name in sorted(os.listdir(run)):
            expected.setdefault(name[18:-3], []).append(int(name[5:11]))  # step_000783_layer_0.h5
        code, out, err = called(ranking.main, run, "--program", PROGRAM, "--json")
        self.assertEqual((code, err), (0, ""))
        found = json.loads(out)
        done = subprocess.run([PROGRAM, "diagnose", run, "--json", "--quiet", "--no-reference"], capture_output=True, check=True)
        captures = {os.path.basename(c["capture"].split(":")[0]): c for c in json.loads(done.stdout)["captures"]}
        layers = {x["layer"]: x for x in found["layers"]}
        self.assertEqual({n: [s["step"] for s in x["steps"]] for n, x in layers.items()}, expected)
        self.assertEqual(expected["7"], [1, 2])
        for name, layer in layers.items():
            for step in layer["steps"]:
                capture = captures[f"step_{step['step']:06d}_layer_{name}.h5"]
                self.assertEqual(step["leak"], capture["leak"]["p_weighted_key"])
                self.assertEqual(step["residue"], capture["row_max_residue"]["largest"])
                self.assertEqual(step["drift"], capture["score_gradient_sum"]["after_cast"]["rms"])
                self.assertEqual(step["largest_logit"], capture["largest_logit"]["value"])
                self.assertEqual((step["mean_q_norm"], step["mean_k_norm"]), (capture["norms"]["mean_q"], capture["norms"]["mean_k"]))
                self.assertEqual(list(step["leak_by_head"].values()), [h["leak"]["p_weighted_key"] for h in capture["heads"]])
            if len(layer["steps"]) > 1:
                self.assertAlmostEqual(layer["leak_growth"], layer["steps"][-1]["leak"] / layer["steps"][0]["leak"], places=12)
            else:
                self.assertIsNone(layer["leak_growth"])
        last = [x["steps"][-1]["leak"] for x in found["layers"]]
        self.assertEqual(last, sorted(last, reverse=True))
        self.assertEqual(found["fp32_first"], [x["layer"] for x in found["layers"] if x["steps"][-1]["leak"] > 2e-3])
        self.assertTrue(found["fp32_first"])
        heads = [h["leak"] for h in found["heads"]]
        self.assertEqual(heads, sorted(heads, reverse=True))
        self.assertEqual(len(heads), sum(len(x["steps"][-1]["leak_by_head"]) for x in layers.values()))

    def entry(self, layer, step, leak, heads=(), **more):
        path = self.path("x.h5")
        write_run(path, SMALL, [(step, layer, nothing)], **more)
        (capture,) = list_captures([path])
        figures = dict.fromkeys(ranking.FIGURES, 1.0) | {"leak": leak, "leak_by_head": list(heads)}
        return capture, figures

    def test_order_growth_and_several_ranks(self):
        nan = math.nan
        found = ranking.rank([
            self.entry("h.10", 1, 1e-3), self.entry("h.10", 2, 5e-3), self.entry("h.9", 2, 5e-3), self.entry("h.2", 2, nan),
            self.entry("h.3", 2, 1e-3, [1e-3, 4e-3], heads_kept="4,7"), self.entry("h.3", 2, 9e-3, [9e-3, 1e-3], heads_kept="4,7", rank=1),
        ])  # fmt: skip
        self.assertEqual([x["layer"] for x in found["layers"]], ["h.3", "h.9", "h.10", "h.2"])
        self.assertEqual(found["layers"][2]["leak_growth"], 5)
        self.assertEqual(found["fp32_first"], ["h.3", "h.9", "h.10"])
        self.assertEqual([(h["layer"], h["head"], h["leak"]) for h in found["heads"]], [("h.3", "4", 9e-3), ("h.3", "7", 4e-3)])
        self.assertLess(natural_key("a9b"), natural_key("a10a"))
        text = ranking.text_of(found)
        self.assertLessEqual(max(map(len, text.splitlines())), 100, text)
        for section in ("LAYERS", "OVER STEPS", "HEADS", "BACKWARD IN FP32 FIRST"):
            self.assertEqual(text.count(section), 1, text)
        calm = ranking.text_of(ranking.rank([self.entry("a", 1, 1e-4)]))
        self.assertIn("No layer: every leak", calm)
        self.assertNotIn("OVER STEPS", calm)

    def test_long_names_fit_a_terminal(self):
        found = ranking.rank([self.entry("transformer.blocks.%d.self_attention.core_attention" % n, 10**6 + s, 0.25, [0.1] * 3) for n in (1, 2) for s in (1, 2)])
        text = ranking.text_of(found)
        self.assertLessEqual(max(map(len, text.splitlines())), 100, text)


class Journals(Case):
    def test_a_stopped_ranking_goes_on(self):
        run = self.path("run")
        os.mkdir(run)
        for step in range(2):
            write_run(os.path.join(run, f"{step}.h5"), SMALL, [(step, "a", nothing), (step, "b", nothing)])
        journal = self.path("journal")
        arguments = (run, "--program", PROGRAM, "--json", "--journal", journal)
        code, whole, err = called(ranking.main, *arguments)
        self.assertEqual((code, err), (0, ""))
        with open(journal, encoding="utf-8") as file:
            kept = file.read().splitlines(keepends=True)
        self.assertEqual(len(kept), 4)
        # Stopped in the middle of a line: three captures are finished. They are marked, to see that they are taken from there.
        marked = [line.replace('"largest_logit": ', '"largest_logit": 1000') for line in kept[:3]]
        with open(journal, "w", encoding="utf-8") as file:
            file.writelines([*marked, kept[3][:50]])
        code, again, err = called(ranking.main, *arguments)
        self.assertEqual((code, err), (0, ""))
        logits = {(x["layer"], s["step"]): s["largest_logit"] > 1000 for x in json.loads(again)["layers"] for s in x["steps"]}
        self.assertEqual(logits, {("a", 0): True, ("b", 0): True, ("a", 1): True, ("b", 1): False})
        with open(journal, encoding="utf-8") as file:
            self.assertEqual(file.read(), "".join([*marked, kept[3]]))
        # A file that has changed is done again.
        os.utime(os.path.join(run, "0.h5"), ns=(1, 1))
        code, again, err = called(ranking.main, *arguments)
        logits = {(x["layer"], s["step"]): s["largest_logit"] > 1000 for x in json.loads(again)["layers"] for s in x["steps"]}
        self.assertEqual(logits, {("a", 0): False, ("b", 0): False, ("a", 1): True, ("b", 1): False})

    def test_refusals(self):
        write_run(self.path("a.h5"), SMALL, [(1, "a", nothing)])
        for content in ("not a journal\n", "half a line", '{"capture": 1}\n'):
            with open(self.path("journal"), "w", encoding="utf-8") as file:
                file.write(content)
            code, out, err = called(ranking.main, self.path("a.h5"), "--program", PROGRAM, "--journal", self.path("journal"))
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
            self.assertIn("is no journal of bitattn.ranking", err)
            with open(self.path("journal"), encoding="utf-8") as file:
                self.assertEqual(file.read(), content)
        os.mkdir(self.path("empty"))
        with open(self.path("text.h5"), "w", encoding="utf-8") as file:
            file.write("text")
        for arguments, expected in (
            ((self.path("missing.h5"),), "cannot be read"),
            ((self.path("text.h5"),), "cannot be read"),
            ((self.path("empty"),), "holds no HDF5 files"),
            ((self.path("a.h5"), "-b", "fa9"), "fa9"),
            ((self.path("a.h5"), "--program", self.path("missing")), "missing"),
        ):
            code, out, err = called(ranking.main, *(("--program", PROGRAM) if "--program" not in arguments else ()), *arguments)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
            self.assertIn(expected, err)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]])
