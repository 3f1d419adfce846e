"""The program as a user runs it.

    cli_test.py PROGRAM SOURCE_DIR [Suite...]

Exit codes, what is printed, what is written (read back with h5py), and that no input is ever touched. Ends with 77 (skipped) where
h5py is not installed.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree

try:
    import h5py
    import numpy as np
except ImportError:
    print("h5py or NumPy is not installed: skipped")
    sys.exit(77)

PROGRAM = os.path.abspath(sys.argv[1])
SOURCE = os.path.abspath(sys.argv[2])
GOLDENS = os.path.join(SOURCE, "datasets", "goldens")
SMALL = os.path.join(GOLDENS, "fa3", "d64_full_s64_normal.h5")
LATE = os.path.join(GOLDENS, "fa3", "d128_full_s128_late.h5")
PEAKY = os.path.join(GOLDENS, "fa3", "d128_causal_s256_peaky.h5")
TIES = os.path.join(GOLDENS, "fa3", "d128_causal_s256_ties.h5")
PACKED = os.path.join(GOLDENS, "fa3", "d128_causal_varlen3_normal.h5")
GROUPED = os.path.join(GOLDENS, "fa3", "d128_full_gqa4x2_s128_late.h5")
SOFTCAP = os.path.join(GOLDENS, "fa3", "d128_full_softcap15_s200_normal3.h5")
MASKED_ROWS = os.path.join(GOLDENS, "fa3", "d128_causal_q300_k200_maskedrows.h5")
SPECIAL = os.path.join(GOLDENS, "fa3", "special_causal_s200.h5")


def run(*arguments, timeout=300, cwd=None):
    """Exit code, standard output, standard error."""
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, timeout=timeout, cwd=cwd)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def digest(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def words(dataset):
    """BF16 data set as raw 16-bit words."""
    raw = np.empty(dataset.shape, dtype=np.uint16)
    # The file's own type on both sides, so that HDF5 converts nothing.
    dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=dataset.id.get_type())
    return raw


def to_float(raw):
    return (raw.astype(np.uint32) << 16).view(np.float32)


class Case(unittest.TestCase):
    """A folder of its own, and inputs that must come out as they went in."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="bitattn_cli_")
        self.inputs = {}

    def tearDown(self):
        for path, before in self.inputs.items():
            self.assertEqual(digest(path), before, path + " was changed")
        shutil.rmtree(self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def input(self, source, name="in.h5"):
        """A copy of a golden that is watched."""
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        shutil.copy(source, path)
        os.chmod(path, 0o644)
        return self.watch(path)

    def watch(self, path):
        self.inputs[path] = digest(path)
        return path

    def good(self, *arguments, code=0):
        result, out, err = run(*arguments)
        self.assertEqual(result, code, f"{arguments}\n{out}\n{err}")
        self.assertEqual(err, "", "standard error is for progress on a terminal and for messages")
        return out

    def json(self, *arguments, code=0):
        out = self.good(*arguments, "--json", code=code)
        value = json.loads(out, parse_constant=lambda name: self.fail("JSON holds " + name))
        self.assertIsInstance(value, dict)
        return value

    def refused(self, *arguments, says=""):
        """Exit 2, one clear line on standard error, nothing on standard output."""
        code, out, err = run(*arguments)
        self.assertEqual(code, 2, f"{arguments}\n{out}\n{err}")
        self.assertEqual(out, "")
        self.assertRegex(err, r"\Abitattn: [^\n]+\n\Z")
        self.assertIn(says, err)
        return err


class BadUsage(Case):
    def test_no_command_and_unknown_ones(self):
        self.refused()
        self.refused("frobnicate", says="frobnicate is no command")
        self.refused("--json", "frobnicate", says="frobnicate is no command")
        self.refused("info")
        self.refused("info", SMALL, "--frobnicate")
        self.refused("run", SMALL, "-b", "fa3")
        self.refused("run", SMALL, "-o", self.path("o.h5"))
        self.refused("verify", SMALL, "--threads", "0")
        self.refused("verify", SMALL, "--threads", "many")
        self.assertEqual(os.listdir(self.folder), [])

    def test_help_and_version_are_no_errors(self):
        for arguments in (["--help"], ["--version"]) + tuple([[c, "--help"] for c in
                          ("info", "generate", "run", "compare", "verify", "witness", "diagnose", "identify", "import", "remedies", "backends", "sites",
                           "bench", "probe")]):
            code, out, err = run(*arguments)
            self.assertEqual((code, err), (0, ""))
            self.assertTrue(out)
            self.assertLessEqual(max(map(len, out.splitlines())), 100, out)

    def test_unknown_backends_and_regimes(self):
        self.refused("verify", SMALL, "-b", "fa9", says="fa9")
        self.assertLessEqual(len(run("verify", SMALL, "-b", "fa9")[2]), 100)
        self.refused("run", SMALL, "-b", "fa9", "-o", self.path("o.h5"), says="fa9")
        self.refused("compare", SMALL, "-a", "fa3", "-b", "fa9", says="fa9")
        self.refused("diagnose", SMALL, "-b", "fp32", says="fp32")
        self.refused("diagnose", SMALL, "-b", "recorded")
        self.refused("run", SMALL, "-b", "reference:12x", "-o", self.path("o.h5"))
        self.refused("generate", self.path("o.h5"), "--regime", "sunny", says="sunny")
        self.assertEqual(os.listdir(self.folder), [])

    def test_generate_refuses_numbers_that_are_none(self):
        out = self.path("o.h5")
        for arguments in (["--heads", "3:2"], ["--heads", "0"], ["--heads", "x"], ["--heads", "2:"], ["--heads", "1:2:3"],
                          ["--seqlen", "-5"], ["--seqlen", "12.5"], ["--dim", "0"], ["--dim", "-64"], ["--dim", "1000"],
                          ["--batch", "0"], ["--window", "5"], ["--window", "a:b"], ["--window", "-2:0"],
                          ["--softcap", "-1"], ["--softcap", "nan"], ["--seed", "x"], ["--seed", "-1"], ["--scale", "-1"], ["--scale", "0"],
                          ["--scale", "nan"], ["--key-shift", "1e300"], ["--key-shift", "1e39"], ["--key-shift", "nan"],
                          ["--seqlen", "99999999999999999999"], ["--batch", "1000000", "--seqlen", "2000000"]):
            self.refused("generate", out, *arguments)
        self.assertEqual(os.listdir(self.folder), [])

    def test_remedies_refuses_factors_that_are_none(self):
        for factor in ("nan", "inf", "0.5", "-2", "x"):
            self.refused("remedies", SMALL, "--factor", factor, says="--factor")

    def test_compare_wants_two_backends_or_two_runs(self):
        self.refused("compare", SMALL)
        self.refused("compare", SMALL, "-a", "fa3")
        self.refused("compare", SMALL, SMALL, SMALL)
        self.refused("compare", SMALL, self.folder)

    def test_rows_that_are_none(self):
        for rows in ("x", "0", "5-3", "1:2:3:4", "64-64", "1:0", "2:0:0"):
            self.refused("diagnose", SMALL, "--rows", rows)
        self.refused("diagnose", SMALL, "--reference-bits", "12")
        self.refused("diagnose", SMALL, "--no-reference", "--reference-bits", "128")
        self.refused("run", SMALL, "-b", "fa3", "-o", self.path("o.h5"), "--trace=most")
        self.refused("run", SMALL, "-b", "fp32", "-o", self.path("o.h5"), "--trace", says="fp32")
        self.assertEqual(os.listdir(self.folder), [])


class BadInput(Case):
    def commands(self, path):
        """Every command that reads captures, on that one."""
        out = self.path("out.h5")
        return [["info", path], ["verify", path], ["compare", path, "-a", "fa3", "-b", "recorded"],
                ["compare", path, SMALL], ["compare", SMALL, path], ["witness", path], ["diagnose", path], ["diagnose", path, "-o", out],
                ["run", path, "-b", "fa3", "-o", out], ["run", path, "-b", "fa3", "-o", out, "--trace=full"]]

    def refused_by_all(self, path, says):
        for arguments in self.commands(path):
            self.refused(*arguments, says=says)
            self.assertFalse(os.path.exists(self.path("out.h5")))

    def test_missing_file_and_group(self):
        self.refused_by_all(self.path("nothing.h5"), "nothing.h5")
        self.refused_by_all(self.input(SMALL) + ":/no/such/group", "/no/such/group")

    def test_files_that_are_no_captures(self):
        text = self.path("text.h5")
        with open(text, "w") as f:
            f.write("this is no HDF5 file\n")
        self.refused_by_all(self.watch(text), "text.h5")
        open(self.path("empty.h5"), "w").close()
        self.refused_by_all(self.path("empty.h5"), "empty.h5")
        os.mkdir(self.path("folder"))
        self.refused_by_all(self.path("folder"), "folder")

    def test_truncated(self):
        with open(SMALL, "rb") as f:
            content = f.read()
        for share in (0.1, 0.5, 0.9):
            with open(self.path("cut.h5"), "wb") as f:
                f.write(content[:int(len(content) * share)])
            self.refused_by_all(self.watch(self.path("cut.h5")), "cut.h5")

    def changed(self, change):
        path = self.path("changed.h5")
        shutil.copy(SMALL, path)
        os.chmod(path, 0o644)
        with h5py.File(path, "r+") as f:
            change(f)
        return self.watch(path)

    def test_mistyped_tensors_and_attributes(self):
        def half(f):
            values = f["q"][()]
            del f["q"]
            f["q"] = values.astype(np.float16)

        def text(f):
            f.attrs["softmax_scale"] = "large"

        def no_scale(f):
            del f.attrs["softmax_scale"]

        for change, says in ((half, "q"), (text, "softmax_scale"), (no_scale, "softmax_scale")):
            self.refused_by_all(self.changed(change), says)

    def test_mis_shaped_and_missing_tensors(self):
        def short_k(f):
            kind = f["k"].id.get_type()
            del f["k"]
            space = h5py.h5s.create_simple((1, 32, 1, 63))
            h5py.h5d.create(f.id, b"k", kind, space)

        def no_v(f):
            del f["v"]

        def short_dq(f):
            kind = f["dq"].id.get_type()
            del f["dq"]
            h5py.h5d.create(f.id, b"dq", kind, h5py.h5s.create_simple((1, 64, 1, 32)))

        for change in (short_k, short_dq):
            self.refused_by_all(self.changed(change), "shape")
        self.refused_by_all(self.changed(no_v), "v")

    def test_outputs_that_cannot_be(self):
        path = self.input(SMALL)
        for arguments in (["run", path, "-b", "fa3", "-o"], ["diagnose", path, "-o"], ["generate"]):
            self.refused(*arguments, self.path("no/such/folder/out.h5"))
            self.refused(*arguments, self.folder)
        for arguments in (["run", path, "-b", "fa3", "-o"], ["diagnose", path, "-o"]):
            self.refused(*arguments, path)
            os.symlink(path, self.path("link.h5"))
            self.refused(*arguments, self.path("link.h5"))
            os.unlink(self.path("link.h5"))

    def test_a_problem_without_results_has_nothing_to_verify(self):
        path = self.path("problem.h5")
        self.good("generate", path, "--seqlen", "16", "--dim", "64")
        self.watch(path)
        self.refused("verify", path, says="recorded")
        self.refused("witness", path, says="nothing to check")
        self.refused("compare", path, "-a", "fa3", "-b", "recorded", says="recorded")
        self.refused("compare", path, path, says="recorded")

    def test_links_into_other_files_lead_nowhere(self):
        base = self.input(SMALL, "base.h5")
        link = self.path("link.h5")
        with h5py.File(link, "w") as f:
            f["inside"] = h5py.ExternalLink("base.h5", "/")
        self.watch(link)
        self.refused("info", link)
        self.refused("run", link + ":/inside", "-b", "fa3", "-o", base)

    def test_two_files_of_different_problems(self):
        a = self.input(SMALL, "a.h5")
        self.refused("compare", a, LATE, says="not the same problem")


class Commands(Case):
    def test_verify_tells_right_from_wrong(self):
        path = self.input(SMALL)
        self.assertIn("every bit equal", self.good("verify", path))
        for name in ("out", "dq", "dk", "dv"):
            wrong = self.path("wrong.h5")
            shutil.copy(SMALL, wrong)
            os.chmod(wrong, 0o644)
            with h5py.File(wrong, "r+") as f:
                raw = words(f[name])
                raw[0, 33, 0, 17] ^= 1
                f[name].id.write(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=f[name].id.get_type())
            report = self.json("verify", wrong, code=1)
            self.assertFalse(report["verified"])
            self.assertEqual(report["differing_bits"], 1)
            tensors = {t["tensor"]: t for t in report["captures"][0]["tensors"]}
            self.assertEqual([t for t in tensors if tensors[t]["differing_bits"]], [name])
            place = tensors[name]["first"]["place"]
            self.assertEqual((place["b"], place["h"], place["j" if name in ("dk", "dv") else "i"], place["d"]), (0, 0, 33, 17))
            self.assertEqual(tensors[name]["largest_ulp_distance"], 1)
            self.assertIn("FAIL", self.good("verify", wrong, code=1))
        for name in ("lse", "dpsum", "lse_log2", "dq_accum"):
            wrong = self.path("wrong.h5")
            shutil.copy(SMALL, wrong)
            os.chmod(wrong, 0o644)
            with h5py.File(wrong, "r+") as f:
                raw = f[name][()].view(np.uint32)
                raw.flat[7] ^= 1
                f[name][...] = raw.view(np.float32)
            self.assertEqual(self.json("verify", wrong, code=1)["differing_bits"], 1)

    def test_verify_of_one_recorded_tensor(self):
        for name in ("out", "lse", "dk", "dpsum"):
            path = self.path(name + ".h5")
            with h5py.File(SMALL, "r") as whole, h5py.File(path, "w") as f:
                for tensor in ("q", "k", "v", "dout", name):
                    whole.copy(tensor, f)
                for key, value in whole.attrs.items():
                    f.attrs[key] = value
            self.watch(path)
            self.assertIn("every bit equal: 1 tensor", self.good("verify", path))

    def test_remedies_are_the_same_for_any_number_of_threads(self):
        path = self.path("problem.h5")
        self.good("generate", path, "--regime", "late", "--batch", "2", "--heads", "4:2", "--seqlen", "150:200", "--dim", "64", "--causal")
        self.watch(path)
        outputs = {self.good("remedies", path, "--json", "--threads", n) for n in ("1", "2", "3")}
        self.assertEqual(len(outputs), 1)

    def test_diagnose_recommends_what_remedies_recommends(self):
        path = self.input(LATE)
        alone = self.json("remedies", path)["captures"][0]
        out = self.path("out.h5")
        within = self.json("diagnose", path, "-o", out)["captures"][0]["remedies"]
        self.assertIsNone(within["kv_head"])
        trials = {t["name"]: t for t in alone["trials"]}
        self.assertEqual([t["name"] for t in within["trials"]],
                         [t["name"] for t in alone["trials"] if not t.get("other_function")])
        for trial in within["trials"]:
            self.assertEqual(trial, trials[trial["name"]])
        for key in ("cheapest", "cheapest_with_inputs", "factor"):
            self.assertEqual(within[key], alone[key])
        self.assertIsNotNone(within["cheapest"])
        report = self.good("diagnose", path)
        self.assertIn("REMEDIES", report)
        self.assertIn(within["cheapest"], report)
        with h5py.File(out) as f:
            about = f["findings"].attrs
            self.assertEqual(about["cheapest_remedy"], within["cheapest"])
            self.assertEqual(about["remedies"].split(", "), [t["name"] for t in within["trials"]])
            for key in ("dq", "dk", "dv"):
                for when in ("before_cast", "stored"):
                    self.assertEqual(list(f["findings/remedies/" + key + "_" + when]),
                                     [t["errors"][key][when] for t in within["trials"]])

    def test_a_healthy_layer_with_a_recommendation_is_told_consistently(self):
        """The leak needs no remedy; what is recommended is against the roundings of the stored gradients."""
        path = self.input(SMALL)
        one = self.json("diagnose", path)["captures"][0]
        self.assertLess(one["leak"]["p_weighted_key"], 2e-3)
        self.assertNotIn(one["remedies"]["cheapest"], (None, "fa3"))
        text = " ".join(self.good("diagnose", path).split())
        self.assertIn("nothing has to be done about it. What REMEDIES names brings the stored gradients", text)
        self.assertIn("of the stored dQ's squared error", text)
        self.assertNotIn("What REMEDIES names", " ".join(self.good("diagnose", path, "--no-remedies").split()))

    def test_diagnose_says_why_it_tried_no_remedies(self):
        path = self.input(LATE)
        self.assertNotIn("REMEDIES", self.good("diagnose", path, "--no-remedies"))
        self.assertIn("--remedies", self.json("diagnose", path, "--no-reference")["captures"][0]["remedies"]["not_tried"])
        self.assertIn("--remedies", self.json("diagnose", path, "--rows", "3")["captures"][0]["remedies"]["not_tried"])
        self.assertIn("fa3+gproj", self.json("diagnose", path, "-b", "fa3+gproj")["captures"][0]["remedies"]["not_tried"])
        self.assertIn("trials", self.json("diagnose", path, "--rows", "3", "--remedies")["captures"][0]["remedies"])
        self.refused("diagnose", path, "--remedies", "--no-remedies")

    def test_verify_of_a_recorded_tensor_that_no_emulation_makes(self):
        path = self.path("extra.h5")
        shutil.copy(SMALL, path)
        os.chmod(path, 0o644)
        with h5py.File(path, "r+") as f:
            f["dk_accum"] = np.zeros((1, 1, 128, 64), np.float32)
        out = self.good("verify", path, code=1)
        self.assertIn("dk_accum is recorded, but not made by fa3", out)

    def test_compare_backends(self):
        path = self.input(SMALL)
        self.good("compare", path, "-a", "fa3", "-b", "recorded")
        self.good("compare", path, "-a", "fa3", "-b", "fa3")
        report = self.json("compare", path, "-a", "fa3", "-b", "reference", code=1)
        tensors = {t["tensor"]: t for t in report["comparisons"][0]["tensors"]}
        self.assertGreater(tensors["dq"]["differing_bits"], 0)
        self.assertAlmostEqual(tensors["dq"]["relative_error"], 2.4e-3, delta=5e-4)
        self.good("compare", path, "-a", "reference", "-b", "reference:200")

    def test_compare_files(self):
        path = self.input(SMALL)
        ours = self.path("ours.h5")
        self.good("run", path, "-b", "fa3", "-o", ours)
        self.good("compare", path, ours)
        self.good("verify", ours)
        fp32 = self.path("fp32.h5")
        self.good("run", path, "-b", "fp32", "-o", fp32)
        self.good("compare", path, fp32, "--no-identify", code=1)
        self.assertEqual(sorted(os.listdir(self.folder)), ["fp32.h5", "in.h5", "ours.h5"])

    def test_run_stores_the_bits_and_says_who_made_them(self):
        path = self.input(GROUPED)
        ours = self.path("ours.h5")
        self.good("run", path, "-b", "fa3", "-o", ours)
        with h5py.File(path) as a, h5py.File(ours) as b:
            for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv"):
                self.assertTrue(np.array_equal(words(a[name]), words(b[name])), name)
            for name in ("lse", "dpsum", "lse_log2", "dq_accum", "dk_accum", "dv_accum"):
                self.assertTrue(np.array_equal(a[name][()].view(np.uint32), b[name][()].view(np.uint32)), name)
            self.assertEqual(b.attrs["kernel"], "bitattn fa3")
            self.assertEqual(b.attrs["source_kernel"], "flash-attention-3")
            self.assertEqual(b.attrs["softmax_scale"], a.attrs["softmax_scale"])

    def test_generate_is_the_same_for_the_same_seed(self):
        recipe = ["--regime", "late", "--heads", "2:1", "--seqlen", "40:56", "--dim", "64", "--causal"]
        self.good("generate", self.path("a.h5"), *recipe, "--seed", "7")
        self.good("generate", self.path("b.h5"), *recipe, "--seed", "7")
        self.good("generate", self.path("c.h5"), *recipe, "--seed", "8")
        self.assertEqual(digest(self.path("a.h5")), digest(self.path("b.h5")))
        with h5py.File(self.path("a.h5")) as a, h5py.File(self.path("c.h5")) as c:
            self.assertEqual(a["q"].shape, (1, 40, 2, 64))
            self.assertEqual(a["k"].shape, (1, 56, 1, 64))
            self.assertEqual(a.attrs["causal"], 1)
            self.assertFalse(np.array_equal(words(a["q"]), words(c["q"])))

    def test_every_regime_is_generated_and_diagnosed(self):
        listed = re.search(r"Recipe of the inputs: ([^\n]*(?:\n\s{20,}[^\n]+)*)", run("generate", "--help")[1]).group(1)
        names = [n for n in re.split(r"[,\s]+", listed) if n]
        for wanted in ("normal", "normal3", "late", "ties", "peaky", "wild", "tiny", "tinygrad", "opposed-sink",
                       "opposed-cluster"):
            self.assertIn(wanted, names)
        for name in names:
            path = self.path(name + ".h5")
            self.good("generate", path, "--regime", name, "--seqlen", "48", "--dim", "64", "--seed", "3")
            report = self.json("diagnose", path)
            self.assertEqual(report["captures"][0]["row_max_residue"]["rows"], 48)

    def test_late_keys_drift_and_the_table_shows_it(self):
        path = self.path("late.h5")
        self.good("generate", path, "--regime", "late", "--seqlen", "192", "--causal", "--seed", "1")
        self.watch(path)
        one = self.json("diagnose", path)["captures"][0]
        self.assertEqual(one["row_max_residue"]["nonzero"], 192)
        self.assertGreater(one["row_max_residue"]["largest"], 1e-5)
        self.assertGreater(one["leak"]["p_weighted_key"], 0.1)
        self.assertGreater(one["errors"]["dq"]["before_cast"], 0.1)
        text = self.good("diagnose", path)
        for part in ("VERDICT", "ROW MAX", "SCORE-GRADIENT SUM", "LEAK", "ERRORS", "WORST ROWS", "WHAT IT MEANS",
                     "192 of 192"):
            self.assertIn(part, text)

    def test_key_shift_makes_the_leak_grow(self):
        leaks = []
        for shift in (0, 30, 300):
            path = self.path(f"shift{shift}.h5")
            self.good("generate", path, "--seqlen", "128", "--dim", "64", "--key-shift", shift, "--seed", "2")
            leaks.append(self.json("diagnose", path, "--no-reference")["captures"][0]["leak"]["p_weighted_key"])
        self.assertLess(leaks[0] * 5, leaks[1])
        self.assertLess(leaks[1] * 3, leaks[2])

    def test_forward_only_captures(self):
        path = self.path("forward.h5")
        shutil.copy(SMALL, path)
        os.chmod(path, 0o644)
        with h5py.File(path, "r+") as f:
            for name in ("dout", "dq", "dk", "dv", "dpsum", "lse_log2", "dq_accum"):
                del f[name]
        self.watch(path)
        self.good("verify", path)
        one = self.json("diagnose", path, "-o", self.path("o.h5"))["captures"][0]
        self.assertEqual(one["row_max_residue"]["nonzero"], 64)
        self.assertNotIn("leak", one)
        self.assertIn("Forward only", self.good("diagnose", path))
        self.refused("diagnose", path, "--rows", "3")
        self.good("run", path, "-b", "fa3", "-o", self.path("t.h5"), "--trace")

    def test_tables_fit_a_hundred_columns(self):
        path = self.input(GROUPED, "c.h5")
        shutil.copy(TIES, self.path("d.h5"))
        for arguments in (["diagnose", "c.h5"], ["diagnose", "d.h5"], ["diagnose", "c.h5", "d.h5"],
                          ["diagnose", "c.h5", "--rows", "3:4,100-103"], ["info", "c.h5"], ["verify", "c.h5"],
                          ["witness", "c.h5"], ["witness", "c.h5", "d.h5"],
                          ["compare", "c.h5", "-a", "fa3", "-b", "fp32"], ["backends"], ["sites"],
                          ["remedies", "c.h5", "--experimental"]):
            code, out, _ = run(*arguments, cwd=self.folder)
            self.assertIn(code, (0, 1))
            for line in out.splitlines():
                self.assertLessEqual(len(line), 100, line)
        self.assertTrue(path)

    def test_threads_change_no_figure(self):
        path = self.input(GROUPED)
        a = self.json("diagnose", path, "--threads", "1")
        b = self.json("diagnose", path, "--threads", "4")
        self.assertEqual(a, b)


class Witness(Case):
    def test_laws_of_the_bundled_captures(self):
        """Once more in NumPy: residual, noise and bound of each law (docs/witness.md)."""
        for source, code in ((SMALL, 0), (LATE, 1), (GROUPED, 1), (PACKED, 0), (SOFTCAP, 0), (MASKED_ROWS, 0)):
            one = self.json("witness", self.input(source), code=code)
            self.assertEqual(one["captures_broken"], code)
            laws = one["captures"][0]["laws"]
            with h5py.File(source) as f:
                t = {n: to_float(words(f[n])).astype(np.float64) for n in ("q", "k", "v", "dout", "out", "dq", "dk", "dv")}
                softcap = f.attrs["softcap"]
                spans = {n: f["cu_seqlens_" + n][()] if "cu_seqlens_" + n in f else None for n in ("q", "k")}
            half = {n: np.ldexp(1.0, np.where(t[n] == 0, -126, np.frexp(np.where(t[n] == 0, 1, t[n]))[1] - 9))
                    for n in ("out", "dq", "dk", "dv")}
            heads, group = t["k"].shape[-2], t["q"].shape[-2] // t["k"].shape[-2]

            def part(values, b, h, side):
                rows = values[b] if spans[side] is None else values[spans[side][b]:spans[side][b + 1]]
                return rows[:, h * group:(h + 1) * group] if side == "q" else rows[:, h:h + 1]

            if softcap:
                self.assertEqual(laws["dk_sum"]["not_checked"], "no law with a softcap")
            for law, checked in laws.items():
                self.assertEqual(checked["verdict"], "broken" if checked["broken"] else
                                 "not checked" if checked["not_checked"] else "holds")
                for head in checked["heads"]:
                    b, h = head["b"], head["kv_head"]
                    self.assertLess(h, heads)
                    if law == "dk_sum":
                        sums, errors = part(t["dk"], b, h, "k").sum((0, 1)), part(half["dk"], b, h, "k")
                        residual, noise = np.sqrt((sums**2).sum()), np.sqrt((errors**2).sum() / 3)
                        share = (np.abs(sums) / errors.sum((0, 1))).max()
                    else:
                        a, x, c, y = ("dq", "q", "dk", "k") if law == "dq_dk_balance" else ("out", "dout", "dv", "v")
                        left, right = part(t[a], b, h, "q") * part(t[x], b, h, "q"), part(t[c], b, h, "k") * part(t[y], b, h, "k")
                        errors = [np.abs(part(half[n], b, h, s) * part(t[w], b, h, s)) for n, w, s in ((a, x, "q"), (c, y, "k"))]
                        residual = abs(left.sum() - right.sum())
                        noise = np.sqrt(sum((e**2).sum() for e in errors) / 3)
                        share = residual / sum(e.sum() for e in errors)
                    self.assertAlmostEqual(head["residual"] / noise, residual / noise, delta=1e-9)
                    self.assertAlmostEqual(head["noise"] / noise, 1, delta=1e-12)
                    self.assertAlmostEqual(head["bound_share"], share, delta=1e-9)
                    self.assertEqual(head["verdict"], "broken" if share > 1 else "holds")

    def test_diagnose_begins_with_them_and_stores_them(self):
        out = self.path("out.h5")
        path = self.input(GROUPED)
        one = self.json("diagnose", path, "--no-reference", "-o", out)["captures"][0]
        self.assertEqual(one["witness"], self.json("witness", path, code=1)["captures"][0]["laws"])
        with h5py.File(out) as f:
            for law, checked in one["witness"].items():
                for figure in ("residual", "noise", "bound_share"):
                    stored = f["findings/witness"][law][figure]
                    self.assertEqual([d.label for d in stored.dims], ["batch", "kv_head"])
                    self.assertEqual(stored[()].ravel().tolist(), [h[figure] for h in checked["heads"]])
        text = self.good("diagnose", path, "--no-reference")
        self.assertLess(text.index("WITNESS"), text.index("ROW MAX"))
        self.assertIn("broken in 2 heads", text)

    def test_a_wrong_gradient_is_noticed(self):
        wrong = self.path("wrong.h5")
        shutil.copy(SMALL, wrong)
        os.chmod(wrong, 0o644)
        with h5py.File(wrong, "r+") as f:
            raw = words(f["dv"])
            f["dv"].id.write(h5py.h5s.ALL, h5py.h5s.ALL, raw ^ np.uint16(0x8000), mtype=f["dv"].id.get_type())
        laws = self.json("witness", wrong, code=1)["captures"][0]["laws"]
        self.assertEqual([laws[n]["verdict"] for n in laws], ["holds", "holds", "broken"])
        text = self.good("witness", wrong, code=1)
        self.assertIn("broken: sum_i out.dout = sum_j v.dv", text)
        self.assertNotIn("computes in BF16 inside", text)

    def test_a_share_of_the_bound_shows_on_which_side_of_1_it_is(self):
        """62 words of 1 and -1 cancel, and one of 63 / 256 or 62 / 256 is left: 1.014 and 0.998 of the bound, 62 / 2^8 + 1 / 2^11."""
        for left, shown, code in ((0x3e7c, "1.01", 1), (0x3e78, "0.998", 0)):
            path = self.input(SMALL, "bound.h5")
            with h5py.File(path, "r+") as f:
                raw = np.zeros_like(words(f["dk"]))
                raw[:, :62] = np.asarray([0x3f80, 0xbf80] * 31, np.uint16)[None, :, None, None]
                raw[:, 62] = left
                f["dk"].id.write(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=f["dk"].id.get_type())
                del f["out"], f["dv"], f["dq"]
            self.watch(path)
            folder = os.path.dirname(path)
            self.input(path, "set/bound.h5")
            self.input(path, "set/other.h5")
            for argument in (path, os.path.join(folder, "set")):
                text = " ".join(self.good("witness", argument, code=code).split())
                self.assertIn(f" {shown} {'broken' if code else 'holds'}", text)
                self.assertEqual("computes in BF16 inside" in text, code == 1)

    def test_folders_partial_captures_and_nan(self):
        self.input(SMALL, "set/small.h5")
        self.input(LATE, "set/late.h5")
        self.input(SPECIAL, "set/special.h5")
        part = self.path("set/part.h5")
        with h5py.File(SMALL) as whole, h5py.File(part, "w") as f:
            for tensor in ("q", "k", "v", "dout", "dk"):
                whole.copy(tensor, f)
            for key, value in whole.attrs.items():
                f.attrs[key] = value
        self.watch(part)
        self.good("generate", self.path("set/problem.h5"), "--seqlen", "8", "--dim", "64", "--quiet")
        lines = self.good("witness", self.path("set"), code=1).splitlines()
        self.assertIn("late.h5", lines[1])
        self.assertRegex(lines[1], r"broken$")
        self.assertRegex([l for l in lines if "problem.h5" in l][0], r"nothing recorded$")
        self.assertRegex([l for l in lines if "special.h5" in l][0], r"NaN$")
        one = self.json("witness", part)["captures"][0]["laws"]
        self.assertEqual(one["dk_sum"]["verdict"], "holds")
        self.assertEqual(one["dq_dk_balance"]["not_checked"], "not recorded: dq")
        self.assertEqual(one["out_dv_balance"]["not_checked"], "not recorded: out, dv")
        special = self.json("witness", SPECIAL)["captures"][0]["laws"]["dk_sum"]
        self.assertEqual((special["verdict"], special["multiple"], special["not_finite"]), ("not finite", None, 1))
        with open(self.path("set/broken.h5"), "w") as f:
            f.write("no")
        code, out, err = run("witness", self.path("set"))
        self.assertEqual(code, 2)
        self.assertIn("broken.h5", err)


class Page(Case):
    """diagnose --html: one self-contained, well-formed page whose numbers are those of --json."""

    def page(self, *arguments):
        path = self.path("page.html")
        report = self.json("diagnose", *arguments, "--html", path)
        self.assertEqual(report["page"], path)
        with open(path, encoding="utf-8") as f:
            text = f.read()
        self.assertTrue(text.startswith("<!DOCTYPE html>"))
        root = xml.etree.ElementTree.fromstring(text.split("\n", 1)[1])  # throws unless every element is closed
        return report, text, root

    def check_self_contained(self, text, root):
        self.assertNotRegex(text, r"(?i)https?:|//[a-z]|url\(|@import|javascript:|expression\(")
        allowed = {"html", "head", "meta", "title", "style", "body", "main", "article", "section", "p", "h1", "h2", "h3", "div", "span",
                   "code", "b", "data", "table", "thead", "tbody", "tr", "th", "td", "br", "dl", "dt", "dd", "footer", "details", "summary", "a",
                   "svg", "line", "circle", "rect", "path", "text"}
        for element in root.iter():
            self.assertIn(element.tag, allowed)
            for name, value in element.attrib.items():
                self.assertFalse(name.lower().startswith("on"), name)
                self.assertNotIn(name, ("src", "style", "srcdoc", "action"))
                if name == "href":
                    self.assertRegex(value, r"\A#capture-[0-9]+\Z")

    def check_figures(self, root, captures, least):
        seen = 0
        for holder in root.iter():
            if "data-capture" not in holder.attrib:
                continue
            one = captures[int(holder.attrib["data-capture"])]
            for data in holder.iter("data"):
                value = one
                for key in data.attrib["data-key"].strip("/").split("/"):
                    value = (value[int(key)] if isinstance(value, list) else value.get(key)) if value is not None else None
                if value is None:
                    self.assertEqual((data.attrib["value"], data.text), ("", "–"))
                    continue
                seen += 1
                self.assertEqual(float(data.attrib["value"]), value, data.attrib["data-key"])
                # What is shown is the value to two digits; counts in full.
                shown = data.text.replace(",", "").replace("−", "-").replace(" times", "")
                factor = 0.01 if shown.endswith(" %") else 1
                shown = shown.replace(" %", "")
                superscript = re.search(r"×10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)$", shown)
                if superscript:
                    power = superscript.group(1).translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
                    shown = shown[:superscript.start()] + "e" + power
                if shown == "∞":
                    continue
                self.assertLessEqual(abs(float(shown) * factor - value), 0.051 * abs(value), data.attrib["data-key"])
        self.assertGreaterEqual(seen, least)

    def test_pages_are_self_contained_and_their_numbers_are_those_of_json(self):
        for source, least in ((GROUPED, 200), (PACKED, 60), (SOFTCAP, 60), (MASKED_ROWS, 60), (SPECIAL, 30)):
            report, text, root = self.page(self.input(source), "--no-remedies")
            self.check_self_contained(text, root)
            self.check_figures(root, report["captures"], least)
        report, text, root = self.page(self.input(LATE))
        self.check_self_contained(text, root)
        self.check_figures(root, report["captures"], 150)
        self.assertIn(report["captures"][0]["remedies"]["cheapest"], text)
        report, text, root = self.page(self.input(TIES), "--rows", "0:5,100-110", "--no-remedies")
        self.check_self_contained(text, root)
        self.check_figures(root, report["captures"], 60)
        report, text, root = self.page(self.input(LATE), "--no-reference", "--no-remedies")
        self.check_figures(root, report["captures"], 60)
        self.assertIn("as emulated", text)

    def test_the_page_says_what_the_report_says(self):
        report, text, root = self.page(self.input(GROUPED), "--no-remedies")
        words = "".join(root.itertext())
        self.assertIn("leak 27 % of |dQ| into dQ", words)
        self.assertIn("every recorded bit is reproduced", words)
        self.assertIn("flash-attention-3", words)
        self.assertIn("--html", words)  # the command
        self.assertRegex(words, r"bitattn [0-9]+\.[0-9]+\.[0-9]+")
        self.assertIn("broken: ", words)  # a witness
        headings = [e.text for e in root.iter("h2")]
        for heading in ("Which rounding makes the sums", "How wrong the tensors are", "Where along the rows", "Heads", "Worst rows",
                        "Bits against the recorded tensors", "Witnesses in the recorded tensors", "What this is"):
            self.assertIn(heading, headings)
        strips = [e for e in root.iter("svg") if e.get("class") == "strip"]
        self.assertEqual(len(strips), 3 * 4)  # three quantities, four heads
        for strip in strips:
            self.assertEqual(strip.get("viewBox"), "0 0 128 1")
            covered = sum(int(n) for path in strip.iter("path") for n in re.findall(r"h([0-9]+)v", path.get("d")))
            self.assertEqual(covered, 128)  # every row is drawn once

    def test_many_heads_and_rows_make_no_large_page(self):
        path = self.path("heads.h5")
        self.good("generate", path, "--heads", "32", "--seqlen", "300", "--dim", "16", "--causal", "--quiet")
        report, text, root = self.page(path, "--no-reference")
        self.check_figures(root, report["captures"], 300)
        strips = [e for e in root.iter("svg") if e.get("class") == "strip"]
        self.assertEqual(len(strips), 3 * 32)
        for strip in strips:  # 300 rows in 256 bins, of which each is drawn once
            self.assertEqual(strip.get("viewBox"), "0 0 256 1")
            self.assertEqual(sum(int(n) for path in strip.iter("path") for n in re.findall(r"h([0-9]+)v", path.get("d"))), 256)
        self.assertLess(len(text.encode()), 600000)

    def test_text_from_captures_is_escaped(self):
        path = self.input(SMALL, "a<b>&'\"{{content}}.h5")
        self.inputs.clear()
        with h5py.File(path, "r+") as f:
            f.attrs["kernel"] = "<script>alert(1)</script>{{content}}"
            f.attrs["device"] = np.bytes_(b"\xff\xfe\" onload=\"x]]>\xc0\xaf")
            f.attrs["regime"] = "a&amp;b</style>"
        report, text, root = self.page(path, "--no-remedies")
        self.check_self_contained(text, root)
        words = "".join(root.itertext())
        self.assertIn("<script>alert(1)</script>{{content}}", words)
        self.assertIn("a&amp;b</style>", words)
        self.assertEqual(text.count("<h1>"), 1)

    def test_many_captures_have_an_index_worst_first(self):
        self.input(SMALL, "set/small.h5")
        self.input(LATE, "set/late.h5")
        self.input(SPECIAL, "set/special.h5")
        report, text, root = self.page(self.path("set"), "--no-remedies")
        self.check_self_contained(text, root)
        self.check_figures(root, report["captures"], 150)
        lines = [row for row in root.iter("tr") if "data-capture" in row.attrib]
        self.assertEqual(len(lines), 3)
        self.assertIn("late.h5", "".join(lines[0].itertext()))
        anchors = [a.get("href")[1:] for row in lines for a in row.iter("a")]
        self.assertEqual(sorted(anchors), sorted(e.get("id") for e in root.iter("article")))

    def test_forward_only_and_nothing_recorded(self):
        path = self.path("forward.h5")
        shutil.copy(SMALL, path)
        os.chmod(path, 0o644)
        with h5py.File(path, "r+") as f:
            for name in ("dout", "out", "lse", "dq", "dk", "dv", "dpsum", "lse_log2", "dq_accum"):
                del f[name]
        report, text, root = self.page(path)
        self.check_figures(root, report["captures"], 10)
        self.assertIn("Forward only", text)
        self.assertIn("Nothing was recorded", text)

    def test_places_that_cannot_be_written_are_refused_before_the_work(self):
        path = self.input(SMALL)
        self.refused("diagnose", path, "--html", self.path("no/such/folder/page.html"))
        self.refused("diagnose", path, "--html", self.folder)
        self.refused("diagnose", path, "--html", path)
        self.refused("diagnose", path, "--html", self.path("x"), "-o", self.path("x"))
        self.refused("diagnose", self.path("missing.h5"), "--html", self.path("page.html"))
        self.assertEqual(os.listdir(self.folder), ["in.h5"])


class Identify(Case):
    def test_names_the_site_of_a_real_kernel(self):
        path = self.input(os.path.join(GOLDENS, "fa3-variants", "case_01_late.h5"))
        found = self.json("identify", path)["captures"][0]
        self.assertTrue(found["exact"])
        self.assertEqual(found["verdict"], "deviation")
        self.assertEqual(found["born_in"], "dpsum")
        self.assertEqual([d["site"] for d in found["best"]["deviations"]], ["dpsum"])
        self.assertEqual(found["left"]["differing_bits"], 0)
        report = self.good("identify", path)
        self.assertIn("site       dpsum", report)
        self.assertIn("each product dO*O rounded to BF16", report)
        self.assertLessEqual(max(map(len, report.splitlines())), 100)

    def test_an_unmodified_kernel_is_exact(self):
        self.assertIn("unmodified (fa3)", self.good("identify", self.input(SMALL)))
        self.assertEqual(self.json("identify", self.input(SMALL))["captures"][0]["verdict"], "unmodified")

    def test_many_captures_end_in_a_summary(self):
        for name, source in (("a", SMALL), ("b", LATE), ("c", os.path.join(GOLDENS, "fa3-variants", "case_01_late.h5"))):
            self.input(source, f"set/{name}.h5")
        deviation = "fa3; dpsum: each product dO*O rounded to BF16"
        text = self.good("identify", self.path("set"), "--without-remedies")
        self.assertTrue(text.endswith(f"\nIN ALL   3 captures\n  2  fa3, unmodified\n  1  {deviation}\n"), text)
        self.assertEqual(self.json("identify", self.path("set"), "--without-remedies")["kinds"], {"fa3, unmodified": 2, deviation: 1})
        self.assertNotIn("IN ALL", self.good("identify", self.path("set/a.h5")))

    def test_bits_of_no_kernel_are_not_explained_away(self):
        wrong = self.path("wrong.h5")
        shutil.copy(SMALL, wrong)
        os.chmod(wrong, 0o644)
        with h5py.File(wrong, "r+") as f:
            raw = words(f["out"])
            raw[0, 5::7, 0, ::3] ^= 0x40
            f["out"].id.write(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=f["out"].id.get_type())
        report = self.good("identify", wrong, code=1)
        self.assertIn("No profile of flash-attention-3 fits", report)

    def test_without_outputs_there_is_nothing_to_identify(self):
        problem = self.path("problem.h5")
        self.good("generate", problem, "--regime", "normal", "--batch", 1, "--heads", 1, "--seqlen", 16, "--dim", 64)
        code, out, err = run("identify", problem)
        self.assertEqual((code, out), (2, ""))
        self.assertIn("nothing is recorded", err)


class Json(Case):
    def test_info(self):
        one = self.json("info", self.input(SPECIAL))["captures"][0]
        for key in ("capture", "kernel", "layout", "batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim",
                    "softmax_scale", "causal", "window_left", "softcap", "norms", "largest_logit", "recorded",
                    "not_finite_inputs", "attributes"):
            self.assertIn(key, one)
        self.assertEqual(one["recorded"], ["out", "lse", "dq", "dk", "dv", "dpsum", "lse_log2", "dq_accum"])
        q = [t for t in one["not_finite_inputs"] if t["tensor"] == "q"][0]
        self.assertEqual((q["nan"], q["infinite"], q["first"]["i"]), (1, 1, 50))

    def changed(self, tensors):
        path = self.path("changed.h5")
        shutil.copy(SMALL, path)
        os.chmod(path, 0o644)
        with h5py.File(path, "r+") as f:
            for name in tensors:
                raw = np.full_like(words(f[name]), 0x7fc0)
                f[name].id.write(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=f[name].id.get_type())
        return path

    def test_info_of_inputs_of_which_nothing_is_finite(self):
        path = self.changed(["q"])
        one = self.json("info", path)["captures"][0]
        self.assertIsNone(one["norms"]["mean_q"])
        self.assertGreater(one["norms"]["mean_k"], 0)
        self.assertEqual(one["largest_logit"]["value"], None)
        self.assertEqual(one["largest_logit"]["i"], None)
        text = " ".join(self.good("info", path).split())
        self.assertIn("mean |q| - (none finite)", text)
        self.assertIn("largest logit - (none finite)", text)

    def test_a_comparison_of_nothing_finite_has_no_error(self):
        path = self.changed(["q", "dq"])
        dq = [t for t in self.json("compare", path, "-a", "fa3", "-b", "recorded", code=1)["comparisons"][0]["tensors"]
              if t["tensor"] == "dq"][0]
        self.assertIsNone(dq["relative_error"])
        line = [l for l in self.good("compare", path, "-a", "fa3", "-b", "recorded", code=1).splitlines() if l.startswith("  dq ")]
        self.assertRegex(line[0], r" -( |$)")

    def test_a_scale_that_fp32_cannot_hold_is_diagnosed(self):
        path = self.changed([])
        with h5py.File(path, "r+") as f:
            f.attrs["softmax_scale"] = 1e-300
        one = self.json("diagnose", path)["captures"][0]
        self.assertEqual(one["scale_log2"], 0)
        self.assertEqual(one["row_max_residue"]["nonzero"], 0)
        self.good("run", path, "-b", "fa3", "-o", self.path("t.h5"), "--trace")
        self.refused("diagnose", path, "-b", "fp32", says="fp32")

    def test_backends_and_generate(self):
        names = [b["name"] for b in self.json("backends")["backends"]]
        for name in ("fa3", "fp32", "recorded"):
            self.assertIn(name, names)
        made = self.json("generate", self.path("a.h5"), "--seqlen", "16", "--dim", "64")
        self.assertEqual(made["q"], [1, 16, 1, 64])

    def test_sites(self):
        sites = self.json("sites")["sites"]
        names = [s["name"] for s in sites]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual(names.index("dpsum_o_cast"), names.index("o_cast") + 1)
        self.assertEqual({s["pass"] for s in sites}, {"forward", "backward"})
        table = self.good("sites")
        for name in names:
            self.assertRegex(table, rf"(?m)^{name} ")

    def test_exact_sites_of_a_backend(self):
        path = self.input(SMALL)
        # The last cast, left out, is made when the result is stored.
        report = self.json("compare", path, "-a", "fa3", "-b", "fa3+exact:dv_cast")
        self.assertTrue(report["equal"], "dV before its cast, rounded to BF16 for storing, is dV")
        report = self.json("compare", path, "-a", "fa3", "-b", "fa3+exact:ds_cast", code=1)
        moved = {t["tensor"] for t in report["comparisons"][0]["tensors"]
                 if t.get("differing_bits", 0) > 0}  # intermediates are not what this backend keeps
        self.assertEqual(moved, {"dq", "dk"})
        # Every site exact is the truth, up to the rounding of what is stored.
        self.good("run", path, "-b", "fa3+exact:all", "-o", self.path("exact.h5"))
        self.good("run", path, "-b", "reference", "--quiet", "-o", self.path("truth.h5"))
        with h5py.File(self.path("exact.h5")) as a, h5py.File(self.path("truth.h5")) as b:
            for name in ("out", "dq", "dk", "dv"):
                differing = np.count_nonzero(words(a[name]) != words(b[name]))
                self.assertLessEqual(differing, 2, name)
        for name, says in (("fa3+exact:", "''"), ("fa3+exact:nowhere", "nowhere"), ("fa3+exact:o_cast,o_cast", "twice"),
                           ("fp32+exact:o_cast", "only fa3"), ("fa3+fp32+exact:o_cast", "no rounding sites"),
                           ("fa3+exact:o_cast+exact:lse", "twice")):
            self.refused("compare", path, "-a", "fa3", "-b", name, says=says)

    def test_verify_compare_run(self):
        path = self.input(SMALL)
        report = self.json("verify", path)
        self.assertEqual((report["verified"], report["captures_verified"], report["differing_bits"]), (True, 1, 0))
        for t in report["captures"][0]["tensors"]:
            self.assertEqual(t["elements"], t["equal_bits"])
        self.assertTrue(self.json("compare", path, "-a", "fa3", "-b", "recorded")["equal"])
        self.assertEqual(self.json("run", path, "-b", "fa3", "-o", self.path("o.h5"))["backend"], "fa3")

    def test_diagnose(self):
        one = self.json("diagnose", self.input(GROUPED))["captures"][0]
        self.assertTrue(one["against_recorded"]["equal"])
        for key in ("row_max_residue", "tied_maxima", "p_sum_excess", "score_gradient_sum", "leak", "condition", "errors",
                    "heads", "rows", "reference"):
            self.assertIn(key, one)
        self.assertEqual(len(one["heads"]), 4)
        self.assertEqual(len(one["errors"]["dk"]["heads"]), 2)
        self.assertEqual(len(one["rows"]), 8)
        self.assertEqual(len(self.json("diagnose", self.input(GROUPED), "--worst", "3")["captures"][0]["rows"]), 3)
        # The figures of docs/spec/measured-facts.md for this capture.
        self.assertEqual(f"{one['row_max_residue']['largest']:.1e}", "6.1e-05")
        self.assertEqual(f"{one['score_gradient_sum']['after_cast']['rms']:.1e}", "2.1e-05")
        self.assertEqual(f"{one['leak']['p_weighted_key']:.1e}", "2.7e-01")
        self.assertEqual(f"{one['errors']['dq']['before_cast']:.1e}", "2.7e-01")

    def test_values_that_are_not_finite_are_null_and_followed(self):
        one = self.json("diagnose", self.input(SPECIAL))["captures"][0]
        self.assertTrue(one["against_recorded"]["equal"])
        spread = {t["tensor"]: t for t in one["not_finite_outputs"]}
        with h5py.File(SPECIAL) as f:
            for name, vectors in (("out", "rows"), ("dq", "rows"), ("dk", "keys"), ("dv", "keys")):
                raw = words(f[name])
                exponents, fractions = raw & 0x7f80, raw & 0x7f
                self.assertEqual(spread[name]["nan"], np.count_nonzero((exponents == 0x7f80) & (fractions != 0)))
                self.assertEqual(spread[name]["infinite"], np.count_nonzero((exponents == 0x7f80) & (fractions == 0)))
                self.assertEqual(spread[name][vectors], np.count_nonzero((exponents == 0x7f80).any(-1)))
        self.assertGreater(one["score_gradient_sum"]["before_cast"]["not_finite"], 0)
        self.assertIn("NaN AND INFINITIES", self.good("diagnose", SPECIAL))

    def test_where_nothing_is_finite_nothing_is_measured(self):
        """No zero where there is no figure, and neither blame nor remedies are run."""
        for tensor, why, kept in (("dout", "no row has finite score gradients", ["out", "lse"]),
                                  ("q", "no row sees a key with finite scores", [])):
            path = self.changed([tensor])
            one = self.json("diagnose", path)["captures"][0]
            self.assertNotIn("blame", one)
            self.assertEqual(one["remedies"], {"not_tried": why})
            errors = {name: e.get("stored", e.get("largest_absolute")) for name, e in one["errors"].items()}
            self.assertEqual([name for name, e in errors.items() if e is not None], kept)
            page = self.path("page.html")
            text = self.good("diagnose", path, "--html", page)
            with open(page, encoding="utf-8") as f:
                self.assertNotIn("Which rounding makes the sums", f.read())
            for section in ("BLAME\n  Not run: ", "REMEDIES\n  Not tried: "):
                self.assertIn(section + why + ".", text)
            self.assertIn("0 in exact arithmetic; no row is finite", text)
            self.assertNotRegex(text, r"over 0 rows|0 of 0|most 0 off|up to 0 equal")
            self.assertEqual("lse at most - off" in text, not kept)

    def test_softcap_has_no_sum_after_the_cast(self):
        one = self.json("diagnose", self.input(SOFTCAP))["captures"][0]
        self.assertIsNone(one["score_gradient_sum"]["after_cast"]["rms"])
        self.assertGreater(one["score_gradient_sum"]["before_cast"]["rms"], 0)
        self.assertIn("1 - tanh^2", self.good("diagnose", SOFTCAP))

    def test_without_reference_leaks_are_relative_to_the_emulated_dq(self):
        path = self.input(LATE)
        one = self.json("diagnose", path, "--no-reference")["captures"][0]
        self.assertIsNone(one["reference"])
        self.assertNotIn("errors", one)
        self.assertEqual(one["leak"]["relative_to"], "emulated dq")
        other = self.json("diagnose", path, "--reference-bits", "256")["captures"][0]
        self.assertEqual(other["reference"], "reference:256")

    def test_rows_are_those_asked_for(self):
        path = self.input(GROUPED)
        rows = self.json("diagnose", path, "--rows", "2:5,100-101")["captures"][0]["rows"]
        self.assertEqual(sorted((r["h"], r["i"]) for r in rows),
                         sorted([(2, 5)] + [(h, i) for h in range(4) for i in (100, 101)]))
        whole = self.json("diagnose", path, "--worst", "512")["captures"][0]["rows"]
        at = {(r["b"], r["h"], r["i"]): r for r in whole}
        for row in rows:
            self.assertEqual(row, at[row["b"], row["h"], row["i"]])
        worst = self.json("diagnose", path, "--rows", "2")["captures"][0]
        self.assertEqual(worst["rows"], whole[:2])
        self.assertNotIn("dk", worst["errors"])


class Blame(Case):
    def shares(self, tensor):
        """Fair shares by site, those of the others under None; they make 1."""
        shares = {s["site"]: s["fair"] for s in tensor["sites"] if s["fair"] is not None}
        shares[None] = tensor["others"]["fair"]
        self.assertAlmostEqual(sum(shares.values()), 1, 9)
        return shares

    def test_late(self):
        path = self.input(LATE)
        out = self.path("out.h5")
        one = self.json("diagnose", path, "-o", out)["captures"][0]
        blame = one["blame"]
        self.assertTrue(blame["whole"])
        self.assertEqual(blame["rows_looked_at"], 128)
        self.assertLess(blame["left_over"], 1e-4)
        dq = self.shares(blame["tensors"]["dq"])
        self.assertEqual(max(dq, key=dq.get), "dpsum_o_cast")
        self.assertAlmostEqual(blame["tensors"]["dq"]["relative_error"], one["errors"]["dq"]["stored"], 6)
        with h5py.File(out) as f:
            group = f["findings/blame"]
            sites = group.attrs["sites"]
            sites = (sites.decode() if isinstance(sites, bytes) else sites).split(",")
            self.assertEqual(sites, [s["name"] for s in self.json("sites")["sites"]])
            fair = group["heads/dq/fair"][()]
            self.assertEqual(fair.shape, (1, len(sites)))
            self.assertAlmostEqual(fair[0, sites.index("dpsum_o_cast")], dq["dpsum_o_cast"], 12)
            self.assertTrue(np.isnan(fair[0, sites.index("dv_cast")]))
            self.assertEqual(group["worst_rows/place"].shape, (8, 3))
        text = self.good("diagnose", path)
        self.assertRegex(text, r"Largest cause: dpsum_o_cast, .*")
        self.assertIn("BLAME", text)

    def test_how_much(self):
        path = self.path("long.h5")
        self.good("generate", path, "--regime", "late", "--seqlen", "1500", "--heads", "2:1", "--dim", "64", "--quiet")
        part = self.json("diagnose", self.watch(path), "--rows", "1:3-4,0:900-901")["captures"][0]["blame"]
        self.assertFalse(part["whole"])
        self.assertEqual(part["rows_looked_at"], 4)
        self.assertEqual({r["i"] for r in part["rows"]}, {3, 4, 900, 901})
        none = self.json("diagnose", self.input(SMALL), "--blame", "none")["captures"][0]
        self.assertNotIn("blame", none)
        two = [self.input(SMALL, "a.h5"), self.input(LATE, "b.h5")]
        self.assertNotIn("blame", self.json("diagnose", *two)["captures"][0])
        for one in self.json("diagnose", *two, "--blame", "worst")["captures"]:
            self.shares(one["blame"]["tensors"]["dk"])
        self.refused("diagnose", SMALL, "--blame", "some", says="blame")

    def test_a_remedied_kernel(self):
        # In peaky most of dQ's error comes through D's rounded O (docs/remedies.md).
        plain = self.json("diagnose", self.input(PEAKY))["captures"][0]["blame"]
        remedied = self.json("diagnose", self.input(PEAKY, "o.h5"), "-b", "fa3+o-residual")["captures"][0]["blame"]
        self.assertGreater(self.shares(plain["tensors"]["dq"])["dpsum_o_cast"], 0.5)
        self.assertEqual(remedied["kernel"], "fa3+o-residual")
        self.assertLess(remedied["tensors"]["dq"]["error"], 0.5 * plain["tensors"]["dq"]["error"])
        self.assertLess(self.shares(remedied["tensors"]["dq"]).get("dpsum_o_cast", 0), 0.05)


class Findings(Case):
    def expect_residues(self, findings):
        """Bit for bit what the definition gives: fma(m, c, -rn(m*c)), exact in float64."""
        m = findings["row_max"][()]
        residue = findings["row_max_residue"][()]
        c = np.float32(findings.attrs["scale_log2"])
        self.assertEqual(m.dtype, np.float32)
        self.assertEqual(residue.dtype, np.float32)
        seen = np.isfinite(m)
        exact = m[seen].astype(np.float64) * np.float64(c)
        rounded = (m[seen] * c).astype(np.float32)
        expected = (exact - rounded.astype(np.float64)).astype(np.float32)
        self.assertTrue(np.array_equal(expected.view(np.uint32), residue[seen].view(np.uint32)))
        self.assertTrue(np.all(np.isnan(residue[~seen])))
        return seen

    def test_residues_are_what_the_definition_gives(self):
        for source in (LATE, TIES, PACKED, GROUPED, MASKED_ROWS, SOFTCAP):
            out = self.path("out.h5")
            self.good("diagnose", self.input(source, os.path.basename(source)), "-o", out, "--no-reference", "--quiet")
            with h5py.File(out) as f:
                seen = self.expect_residues(f["findings"])
                self.assertGreater(np.count_nonzero(f["findings/row_max_residue"][()][seen]), 0.9 * np.count_nonzero(seen))

    def test_a_generated_late_capture_has_residues_and_drift(self):
        path = self.path("late.h5")
        out = self.path("out.h5")
        self.good("generate", path, "--regime", "late", "--seqlen", "160", "--causal", "--quiet")
        self.good("diagnose", self.watch(path), "-o", out, "--quiet")
        with h5py.File(out) as f:
            seen = self.expect_residues(f["findings"])
            self.assertEqual(np.count_nonzero(seen), 160)
            self.assertGreater(np.abs(f["findings/score_gradient_sum/after_cast"][()]).max(), 1e-6)
            self.assertGreater(np.sqrt(np.square(f["findings/leak"][()]).sum()) /
                               np.sqrt(np.square(f["findings/dq_norm"][()]).sum()), 0.1)

    def test_names_axes_units_and_descriptions(self):
        path = self.input(GROUPED)
        out = self.path("out.h5")
        self.good("diagnose", path, "-o", out)
        with h5py.File(path) as a, h5py.File(out) as b:
            # The capture itself is in the file, bit for bit.
            for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv"):
                self.assertTrue(np.array_equal(words(a[name]), words(b[name])), name)
            self.assertEqual(b.attrs["kernel"], "flash-attention-3")
            findings = b["findings"]
            rows = a["lse"].shape
            for name in ("row_max", "row_sum", "row_max_residue", "largest_block_residue", "tied_maxima", "p_sum_excess",
                         "dpsum", "lse_log2", "score_gradient_sum/before_cast", "score_gradient_sum/after_cast",
                         "score_gradient_sum/terms/g_minus_d", "score_gradient_sum/terms/d_p_excess",
                         "score_gradient_sum/terms/eta", "score_gradient_sum/terms/beta", "leak", "leak_mean_key",
                         "leak_share", "uncancelled", "condition", "dq_norm", "dq_error"):
                self.assertEqual(findings[name].shape, rows, name)
                self.assertTrue(findings[name].attrs["units"], name)
                self.assertTrue(findings[name].attrs["description"], name)
                self.assertEqual([d.label for d in findings[name].dims], ["batch", "head", "query"], name)
                self.assertTrue(all(len(d) == 1 for d in findings[name].dims), name)
            self.assertEqual(findings["leak_dk"].shape, (1, 2, 128))
            self.assertEqual([d.label for d in findings["leak_dk"].dims], ["batch", "kv_head", "key"])
            blocks = findings["row_max_residue_blocks"]
            self.assertEqual(blocks.shape, rows + (1,))
            self.assertEqual(findings.attrs["recorded_elements_differing"], 0)
            total = (findings["score_gradient_sum/terms/g_minus_d"][()] -
                     findings["score_gradient_sum/terms/d_p_excess"][()] +
                     findings["score_gradient_sum/terms/eta"][()] + findings["score_gradient_sum/terms/beta"][()])
            after = findings["score_gradient_sum/after_cast"][()]
            scale = np.abs(findings["dpsum"][()]).max()
            self.assertLess(np.abs(total - after).max(), 1e-15 * scale)
            # The stored dpsum and E are the recorded ones.
            self.assertTrue(np.array_equal(findings["dpsum"][()], a["dpsum"][()][:, :, :rows[2]]))
            self.assertTrue(np.array_equal(findings["lse_log2"][()], a["lse_log2"][()][:, :, :rows[2]]))

    def test_packed_sequences_have_head_and_token_axes(self):
        out = self.path("out.h5")
        self.good("diagnose", self.input(PACKED), "-o", out)
        with h5py.File(out) as f:
            self.assertEqual(f["findings/leak"].shape, (1, 400))
            self.assertEqual([d.label for d in f["findings/leak"].dims], ["head", "token"])
            self.expect_residues(f["findings"])

    def test_rows_without_a_key_have_no_figures(self):
        out = self.path("out.h5")
        self.good("diagnose", self.input(MASKED_ROWS), "-o", out)
        with h5py.File(out) as f:
            seen = self.expect_residues(f["findings"])
            self.assertEqual(np.count_nonzero(seen), 200)
            for name in ("leak", "score_gradient_sum/after_cast", "p_sum_excess"):
                self.assertTrue(np.array_equal(np.isfinite(f["findings"][name][()]), seen), name)

    def test_block_residues_by_key_block(self):
        out = self.path("out.h5")
        self.good("diagnose", self.input(TIES), "-o", out, "--no-reference")
        with h5py.File(out) as f:
            blocks = f["findings/row_max_residue_blocks"][()]
            last = f["findings/row_max_residue"][()]
            self.assertEqual(blocks.shape, (1, 1, 256, 2))
            # Right to left: the block of key 0 comes last and has the row's own residue.
            self.assertTrue(np.array_equal(blocks[..., 0].view(np.uint32), last.view(np.uint32)))
            self.assertTrue(np.all(np.isnan(blocks[0, 0, :128, 1])))
            self.assertTrue(np.all(np.isfinite(blocks[0, 0, 128:, 1])))

    def test_several_captures_in_one_file(self):
        out = self.path("out.h5")
        a = self.input(SMALL, "one/a.h5")
        b = self.input(LATE, "one/b.h5")
        self.good("diagnose", self.path("one"), "-o", out, "--no-reference")
        with h5py.File(out) as f:
            self.assertEqual(sorted(f), ["a", "b"])
            for group, source in (("a", a), ("b", b)):
                with h5py.File(source) as g:
                    self.assertTrue(np.array_equal(words(f[group]["q"]), words(g["q"])))
                self.expect_residues(f[group]["findings"])
        self.good("verify", out)


class Trace(Case):
    def test_rows(self):
        out = self.path("out.h5")
        self.good("run", self.input(LATE), "-b", "fa3", "-o", out, "--trace")
        with h5py.File(out) as f:
            for name in ("row_max", "row_sum", "row_max_residue", "dpsum", "lse_log2", "score_gradient_sum/before_cast",
                         "score_gradient_sum/after_cast"):
                self.assertEqual(f["findings"][name].shape, (1, 1, 128))
            self.assertNotIn("trace", f)
        with h5py.File(out) as f:
            plain = self.path("plain.h5")
            self.good("run", LATE, "-b", "fa3", "-o", plain)
            with h5py.File(plain) as g:
                self.assertNotIn("findings", g)

    def test_full_is_what_the_rows_were_made_of(self):
        for source in (LATE, PACKED, MASKED_ROWS):
            out = self.path("out.h5")
            path = self.input(source, os.path.basename(source))
            code, text, err = run("run", path, "-b", "fa3", "-o", out, "--trace=full")
            self.assertEqual(code, 0, err)
            self.assertRegex(err, r"\Abitattn: --trace=full writes every \(query, key\) pair: [0-9.]+ [KMG]iB[^\n]*\n\Z")
            with h5py.File(out) as f:
                trace = f["trace"]
                c = np.float32(f["findings"].attrs["scale_log2"])
                scores = trace["scores"][()]
                m = f["findings/row_max"][()]
                seen = np.isfinite(m)
                masked = np.where(np.isnan(scores), -np.inf, scores)
                self.assertTrue(np.array_equal(masked.max(-1)[seen], m[seen]))
                ties = (masked == m[..., None]).sum(-1)
                self.assertTrue(np.array_equal(ties[seen], f["findings/tied_maxima"][()][seen]))
                visible = np.isfinite(scores)
                p = np.where(visible, trace["p"][()], 0).astype(np.float64)
                dp = np.where(visible, trace["dp"][()], 0).astype(np.float64)
                after = np.where(visible, trace["ds_bf16"][()], 0).astype(np.float64).sum(-1)
                scale = np.abs(p * dp).sum(-1).max()
                self.assertLess(np.abs(after[seen] - f["findings/score_gradient_sum/after_cast"][()][seen]).max(), 1e-14 * scale)
                self.assertLess(np.abs(p.sum(-1)[seen] - 1 - f["findings/p_sum_excess"][()][seen]).max(), 1e-13)
                g = (p * dp).sum(-1)
                d = f["findings/dpsum"][()].astype(np.float64)
                self.assertLess(np.abs((g - d)[seen] - f["findings/score_gradient_sum/terms/g_minus_d"][()][seen]).max(),
                                1e-14 * scale)
                # The cast values are the BF16 of the fp32 ones.
                ds = trace["ds"][()][visible].view(np.uint32)
                cast = ((ds + 0x7fff + ((ds >> 16) & 1)) >> 16 << 16).astype(np.uint32)
                self.assertTrue(np.array_equal(cast, trace["ds_bf16"][()][visible].view(np.uint32)))
                self.assertGreater(float(c), 0)
                for name in trace:
                    self.assertTrue(trace[name].attrs["units"])
                    self.assertTrue(trace[name].attrs["description"])

    def test_a_full_trace_that_no_disk_holds_is_refused(self):
        path = self.path("long.h5")
        self.good("generate", path, "--seqlen", "1:200000", "--dim", "8", "--quiet")
        with h5py.File(path) as f:
            self.assertEqual(f["k"].shape[1], 200000)
        # One query row: small. The refusal itself needs a problem that no test can afford, so only the announcement is checked.
        code, _, err = run("run", path, "-b", "fa3", "-o", self.path("o.h5"), "--trace=full")
        self.assertEqual(code, 0, err)
        self.assertIn("5.3 MiB", err)


class Many(Case):
    def two_captures(self):
        path = self.path("two.h5")
        with h5py.File(path, "w") as f:
            for group, source in (("step_1/layer_0", SMALL), ("step_1/layer_1", LATE)):
                with h5py.File(source) as g:
                    f.require_group("step_1")
                    g.copy(g["/"], f, group)
        return self.watch(path)

    def test_a_file_with_many_captures_is_worked_through(self):
        path = self.two_captures()
        report = self.json("verify", path)
        self.assertEqual(report["captures_verified"], 2)
        self.assertEqual([c["capture"] for c in report["captures"]],
                         [path + ":/step_1/layer_0", path + ":/step_1/layer_1"])
        self.assertEqual(len(self.json("info", path)["captures"]), 2)
        one = self.json("verify", path + ":/step_1/layer_1")
        self.assertEqual(one["captures_verified"], 1)
        lines = self.good("diagnose", path, "--no-reference").splitlines()
        self.assertIn("layer_1", lines[1])  # worst leak first
        self.assertIn("layer_0", lines[2])
        out = self.path("out.h5")
        self.good("run", path, "-b", "fa3", "-o", out)
        self.good("compare", path, out)
        with h5py.File(out) as f:
            self.assertIn("step_1/layer_1/dq", f)

    def test_bits_of_another_kernel_are_not_told_as_a_fault_alone(self):
        """verify says that the capture's kernel is none of the emulated ones, and keeps to 100 columns."""
        for name, kernel in (("a", "flash-attention-3"), ("b", "pytorch-flash-cpu"), ("c", "pytorch-flash-cpu")):
            path = self.input(SMALL, "set/" + "deep" * 30 + f"/{name}.h5")
            with h5py.File(path, "r+") as f:
                f.attrs["kernel"] = kernel
                f["lse"][0, 0, 0] += 1
            self.watch(path)
        folder = self.path("set")
        self.assertEqual(self.json("verify", folder, code=1)["recorded_by_others"], {"pytorch-flash-cpu": 2})
        text = self.good("verify", folder, code=1)
        self.assertLessEqual(max(map(len, text.splitlines())), 100, text)
        self.assertEqual(text.count("Recorded by 'pytorch-flash-cpu', which fa3 does not emulate"), 2)
        self.assertIn("2 of those that differ were recorded by 'pytorch-flash-cpu', which fa3 does not emulate.", text)
        self.assertNotIn("recorded by", self.good("verify", folder + "/" + "deep" * 30 + "/a.h5", code=1).lower())

    def test_folders_and_a_broken_file_among_good_ones(self):
        self.input(SMALL, "set/a.h5")
        self.input(LATE, "set/below/b.hdf5")
        self.good("verify", self.path("set"))
        with open(self.path("set/broken.h5"), "w") as f:
            f.write("no")
        code, out, err = run("verify", self.path("set"))
        self.assertEqual(code, 2)
        self.assertEqual(out.count("ok  "), 2)
        self.assertRegex(err, r"\Abitattn: [^\n]*broken.h5[^\n]*\n\Z")
        code, out, err = run("diagnose", self.path("set"), "--no-reference", "--json")
        self.assertEqual(code, 2)
        self.assertEqual(len(json.loads(out)["captures"]), 2)
        # With an output all has to be good: nothing is written otherwise.
        self.refused("diagnose", self.path("set"), "--no-reference", "-o", self.path("out.h5"))
        self.assertFalse(os.path.exists(self.path("out.h5")))

    def test_folders_of_recorded_files_are_compared_by_name(self):
        for side in ("x", "y"):
            self.input(SMALL, side + "/a.h5")
            self.input(LATE, side + "/sub/b.h5")
        self.good("compare", self.path("x"), self.path("y"))
        os.unlink(self.path("y/a.h5"))
        del self.inputs[self.path("y/a.h5")]
        self.assertIn("Only in a: 1 capture, the first " + self.path("x/a.h5"),
                      self.good("compare", self.path("x"), self.path("y"), code=1))
        self.assertIn("Only in b: 1 capture", self.good("compare", self.path("y"), self.path("x"), code=1))


class Interrupt(Case):
    def test_an_interrupted_run_leaves_nothing_behind(self):
        path = self.path("large.h5")
        self.good("generate", path, "--seqlen", "4096", "--heads", "8", "--quiet")
        self.watch(path)
        for arguments in (["run", path, "-b", "fa3", "-o", self.path("out.h5"), "--threads", "1"],
                          ["diagnose", path, "-o", self.path("out.h5"), "--threads", "1"],
                          ["run", path, "-b", "fp32", "-o", self.path("out.h5"), "--threads", "1"]):
            process = subprocess.Popen([PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            time.sleep(2)
            self.assertIsNone(process.poll(), "the run was too short to be interrupted")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 2)
            self.assertEqual(out, b"")
            self.assertRegex(err.decode(), r"\Abitattn: interrupted[^\n]*\n\Z")
            self.assertEqual(os.listdir(self.folder), ["large.h5"])


class Documents(Case):
    def test_every_finding_and_json_key_is_documented(self):
        page = ""
        for name in ("diagnose.md", "blame.md"):
            with open(os.path.join(SOURCE, "docs", name)) as f:
                page += f.read()
        out = self.path("out.h5")
        one = self.json("diagnose", self.input(GROUPED), "-o", out)["captures"][0]
        names = []
        with h5py.File(out) as f:
            f["findings"].visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) and
                                     "description" in item.attrs else None)
            names += list(f["findings"].attrs) + list(f["findings/blame"].attrs)
        self.assertGreater(len(names), 20)
        for name in names:
            name = re.sub(r"relative_error_(out|dq|dk|dv)", "relative_error_TENSOR", name)
            name = re.sub(r"blame/heads/\w+/", "blame/heads/TENSOR/", name)
            self.assertIn("`" + name + "`", page)

        def keys(value):
            if isinstance(value, dict):
                for key, below in value.items():
                    yield key
                    yield from keys(below)
            elif isinstance(value, list) and value:
                yield from keys(value[0])

        for key in set(keys({k: v for k, v in one.items() if k not in ("attributes",)})):
            self.assertIn("`" + key + "`", page, "JSON key " + key)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=1)
