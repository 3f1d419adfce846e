"""bitattn diagnose over a whole run: layers and heads ranked, a journal that a stopped run goes on from, a page with an index.

    ranking_test.py PROGRAM SOURCE_DIR

Runs are made of bundled captures that are given a layer, a step and a rank. Ends with 77 (skipped) where h5py is not installed.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree
import zlib

try:
    import h5py
    import numpy
except ImportError:
    print("h5py is not installed: skipped")
    sys.exit(77)

PROGRAM = os.path.abspath(sys.argv[1])
SOURCE = os.path.abspath(sys.argv[2])
GOLDENS = os.path.join(SOURCE, "datasets", "goldens")
# Five captures of a real run where the large golden set is, else the one that is bundled.
REAL_RUN = os.path.join(os.environ.get("BITATTN_GOLDENS") or GOLDENS, "real-run")
SMALL = os.path.join(GOLDENS, "fa3", "d64_full_s64_normal.h5")
LATE = os.path.join(GOLDENS, "fa3", "d128_full_s128_late.h5")
GROUPED = os.path.join(GOLDENS, "fa3", "d128_full_gqa4x2_s128_late.h5")
SOFTCAP = os.path.join(GOLDENS, "fa3", "d128_full_softcap15_s200_normal3.h5")
SECTIONS = ("LAYERS", "OVER STEPS", "HEADS", "BACKWARD IN FP32 FIRST", "WHOSE FIGURES")


def run(*arguments, cwd=None):
    """Exit code, standard output, standard error."""
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, timeout=300, cwd=cwd)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def checked(line):
    """A line of a journal with the checksum that its content has."""
    rest = line.rstrip(b"\n").split(b",", 1)[1]
    return b'{"crc32":"%08x",%s\n' % (zlib.crc32(rest), rest)


def number(value):
    """Unknown ones below all others, as they are ranked last."""
    return -1.0 if value is None else value


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="bitattn_ranking_")
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def capture(self, name, source, without=(), **attributes):
        """A copy of a capture with these attributes and without these tensors."""
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        shutil.copyfile(source, path)
        with h5py.File(path, "r+") as file:
            for tensor in without:
                if tensor in file:
                    del file[tensor]
            file.attrs.update(attributes)
        return path

    def small_run(self, steps=(1, 2), layers=("a", "b"), source=SMALL):
        for step in steps:
            for layer in layers:
                self.capture(f"run/{step}_{layer}.h5", source, step=step, layer=layer)
        return self.path("run")

    def good(self, *arguments):
        code, out, err = run("diagnose", *arguments)
        self.assertEqual((code, err), (0, ""), f"{arguments}\n{out}")
        return out

    def json(self, *arguments):
        return json.loads(self.good(*arguments, "--json"))

    def refused(self, *arguments, says):
        code, out, err = run("diagnose", *arguments)
        self.assertEqual((code, out), (2, ""), err)
        self.assertRegex(err, r"\Abitattn: [^\n]+\n\Z")
        self.assertIn(says, err)


class Ranks(Case):
    def test_a_real_run(self):
        """Every figure is that of its capture's own diagnosis, and the order is that of the leaks."""
        for source in os.listdir(REAL_RUN):
            if source.endswith(".h5"):
                self.capture("run/" + source, os.path.join(REAL_RUN, source))
        for step, source in ((1, SMALL), (2, LATE)):
            self.capture(f"run/step_{step:06d}_layer_7.h5", source, step=step, layer="7")
        expected = {}
        for name in sorted(os.listdir(self.path("run"))):
            expected.setdefault(name[18:-3], []).append(int(name[5:11]))  # step_000783_layer_0.h5
        report = self.json(self.path("run"), "--no-reference")
        found = report["ranking"]
        captures = {os.path.basename(c["capture"]): c for c in report["captures"]}
        layers = {x["layer"]: x for x in found["layers"]}
        self.assertEqual({n: [s["step"] for s in x["steps"]] for n, x in layers.items()}, expected)
        self.assertEqual(expected["7"], [1, 2])
        for name, layer in layers.items():
            for step in layer["steps"]:
                file = f"step_{step['step']:06d}_layer_{name}.h5"
                capture = captures[file]
                self.assertEqual((capture["layer"], capture["step"]), (name, step["step"]))
                self.assertEqual(step["leak"], capture["leak"]["p_weighted_key"])
                self.assertEqual(step["residue"], capture["row_max_residue"]["largest"])
                self.assertEqual(step["drift"], capture["score_gradient_sum"]["after_cast"]["rms"])
                self.assertEqual(step["condition"], capture["condition"])
                self.assertEqual(step["largest_logit"], capture["largest_logit"]["value"])
                self.assertEqual((step["mean_q_norm"], step["mean_k_norm"]), (capture["norms"]["mean_q"], capture["norms"]["mean_k"]))
                self.assertEqual(list(step["leak_by_head"].values()), [h["leak"]["of_all_heads"] for h in capture["heads"]])
                self.assertAlmostEqual(sum(x**2 for x in step["leak_by_head"].values()) ** 0.5 / step["leak"], 1, places=12)
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
        self.assertEqual(found["figures_of"]["recorded_kernel"], len(captures))
        # A capture among many is diagnosed as it is alone.
        alone = self.json(self.path("run/step_000002_layer_7.h5"), "--no-reference", "--blame", "none", "--no-remedies")
        self.assertEqual(alone["captures"][0], captures["step_000002_layer_7.h5"])
        self.assertNotIn("ranking", alone)

    def test_text(self):
        for step in (1, 2):
            for layer in (1, 2):
                self.capture(f"run/{step}_{layer}.h5", LATE, step=10**6 + step, layer=f"transformer.blocks.{layer}.self_attention.core_attention")
        text = self.good(self.path("run"))
        self.assertLessEqual(max(map(len, text.splitlines())), 100, text)
        for section in SECTIONS:
            self.assertEqual(text.count("\n" + section), 1, text)
        self.assertIn("share of the true |dQ|", text)
        self.assertIn("every recorded bit of 4 of 4 captures", text)
        self.assertIn("Not looked at, as it takes long on many captures: blame (--blame worst) and remedies (--remedies).",
                      " ".join(text.split()))
        first = text[text.index("BACKWARD IN FP32 FIRST"):]
        self.assertLess(first.index("blocks.1.self_attention"), first.index("blocks.2.self_attention"))
        # Threads change nothing, nor does the order in which captures are finished.
        self.assertEqual(self.good(self.path("run"), "--threads", "1"), text)

    def test_blame_and_remedies_that_were_asked_for_have_a_line_a_capture(self):
        self.capture("run/a.h5", SMALL, step=1, layer="a")
        self.capture("run/b.h5", LATE, step=1, layer="b")
        code, out, err = run("diagnose", "run", "--blame", "worst", "--remedies", cwd=self.folder)
        self.assertEqual((code, err), (0, ""))
        self.assertLessEqual(max(map(len, out.splitlines())), 100, out)
        lines = out[out.index("\nBLAME AND REMEDIES"):out.index("\nLAYERS")].splitlines()[3:]
        report = json.loads(run("diagnose", "run", "--blame", "worst", "--remedies", "--json", cwd=self.folder)[1])
        self.assertEqual([line.split()[0] for line in lines], ["run/b.h5", "run/a.h5"])  # worst leak first
        for capture, line in zip(report["captures"][::-1], lines):
            site = max((s for s in capture["blame"]["tensors"]["dq"]["sites"] if s["fair"] is not None), key=lambda s: s["fair"])
            self.assertEqual(line.split()[1], site["site"])
            self.assertAlmostEqual(float(line.split()[2].rstrip("%")), 100 * site["fair"], delta=0.6)
            cheapest = capture["remedies"]["cheapest"]
            self.assertIn("none needed" if cheapest == "fa3" else cheapest[4:34], line)
        self.assertNotIn("Not looked at", out)
        only = self.good(self.path("run"), "--no-reference", "--blame", "worst")
        self.assertIn("\nBLAME   ", only)
        self.assertNotIn("cheapest remedy", only)

    def test_nothing_to_do(self):
        text = self.good(self.small_run(steps=(1,)), "--no-reference")
        self.assertIn("No layer leaks more into dQ at its last step than the BF16 casts cost anyway", " ".join(text.split()))
        self.assertNotIn("NaN", text)
        self.assertNotIn("OVER STEPS", text)
        self.assertIn("share of the emulated |dQ|", text)

    def run_that_ends_in_nan(self, source):
        """Layers a and b over steps 1 to 3; dout of both is NaN at step 2, and everything at step 3."""
        self.small_run(steps=(1, 2, 3), source=source)
        for step, tensors in ((2, ("dout",)), (3, ("q", "k", "v", "dout"))):
            for layer in "ab":
                with h5py.File(self.path(f"run/{step}_{layer}.h5"), "r+") as file:
                    for tensor in tensors:
                        # The file's own type on both sides, so that HDF5 converts nothing.
                        place, words = file[tensor].id, numpy.full(file[tensor].shape, 0x7FC0, numpy.uint16)
                        place.write(h5py.h5s.ALL, h5py.h5s.ALL, words, mtype=place.get_type())
        return self.path("run")

    def test_a_run_that_ends_in_nan(self):
        """Ranked by the last step with a known leak, NaN said first, and the headline gives no all-clear."""
        for source, above in ((SMALL, []), (LATE, ["a", "b"])):
            folder, page = self.run_that_ends_in_nan(source), self.path("page.html")
            report = self.json(folder, "--no-reference")
            ranking = report["ranking"]
            self.assertEqual(ranking["not_finite"], {"first_step": 2, "first_in": "dout", "to_the_end": True, "layers": ["a", "b"]})
            self.assertEqual(ranking["fp32_first"], above)
            for layer in ranking["layers"]:
                first = next(c for c in report["captures"] if (c["layer"], c["step"]) == (layer["layer"], 1))
                self.assertEqual(layer["ranked_step"], 1)
                self.assertEqual(layer["not_finite"], {"first_step": 2, "first_in": "dout", "to_the_end": True})
                self.assertEqual([s["not_finite"][:1] for s in layer["steps"]], [[], ["dout"], ["q"]])
                self.assertEqual([s["leak"] for s in layer["steps"]], [first["leak"]["p_weighted_key"], None, None])
            self.assertTrue(all(h["leak"] is not None for h in ranking["heads"]))
            text = " ".join(self.good(folder, "--no-reference", "--html", page).split())
            with open(page, encoding="utf-8") as file:
                root = xml.etree.ElementTree.fromstring(file.read().split("\n", 1)[1])
            holder = next(e for e in root.iter() if "data-ranking" in e.attrib)
            self.assertEqual("".join(next(holder.iter("h1")).itertext()), "NaN or infinities from step 2 on, first in dout of a and b (2 of 2 layers).")
            for words in (text, " ".join("".join(holder.itertext()).split())):
                self.assertIn("NaN or infinities from step 2 on, first in dout of a and b (2 of 2 layers).", words)
                self.assertIn(("2 of 2 layers leak" if above else "No layer leaks") + " more into dQ", words)
                self.assertIn("of the steps after it nothing is known", words)
            self.assertLess(text.index("NaN AND INFINITIES"), text.index("LAYERS"))

    def test_captures_that_name_neither_layer_nor_step_are_only_listed(self):
        self.capture("run/a.h5", SMALL)
        self.capture("run/b.h5", LATE)
        self.assertNotIn("ranking", self.json(self.path("run"), "--no-reference"))
        text = self.good(self.path("run"), "--no-reference")
        self.assertNotIn("LAYERS", text)
        self.assertIn("b.h5", text.splitlines()[1])  # worst leak first

    def test_ranks_of_one_layer_and_step_count_as_the_worst(self):
        self.capture("run/rank_0.h5", SMALL, step=5, layer="a", rank=0, heads_kept="4")
        self.capture("run/rank_1.h5", LATE, step=5, layer="a", rank=1, heads_kept="7")
        report = self.json(self.path("run"), "--no-reference")
        small, late = report["captures"]
        (layer,) = report["ranking"]["layers"]
        (step,) = layer["steps"]
        self.assertEqual(step["leak"], late["leak"]["p_weighted_key"])
        self.assertEqual(step["largest_logit"], max(small["largest_logit"]["value"], late["largest_logit"]["value"]))
        self.assertEqual(step["leak_by_head"], {"4": small["heads"][0]["leak"]["of_all_heads"], "7": late["heads"][0]["leak"]["of_all_heads"]})

    def test_a_head_whose_gradient_is_next_to_nothing_does_not_lead(self):
        """Heads are ranked by what they put into the layer's dQ, not by the share of their own."""
        before = self.json(self.capture("alone.h5", GROUPED, step=1, layer="a"), "--no-reference", "--no-remedies", "--blame", "none")
        own = [h["leak"]["p_weighted_key"] for h in before["captures"][0]["heads"]]
        worst = own.index(max(own))
        for name, layer in (("run/a.h5", "a"), ("run/b.h5", "b")):
            with h5py.File(self.capture(name, GROUPED, step=1, layer=layer), "r+") as file:
                place = file["dout"].id
                words = numpy.empty(file["dout"].shape, numpy.uint16)
                place.read(h5py.h5s.ALL, h5py.h5s.ALL, words, mtype=place.get_type())
                words[:, :, worst] -= (words[:, :, worst] & 0x7F80 > 40 << 7) * numpy.uint16(40 << 7)  # times 2^-40
                place.write(h5py.h5s.ALL, h5py.h5s.ALL, words, mtype=place.get_type())
        report = self.json(self.path("run"), "--no-reference")
        heads = report["captures"][0]["heads"]
        self.assertAlmostEqual(heads[worst]["leak"]["p_weighted_key"] / own[worst], 1, places=2)
        self.assertLess(heads[worst]["leak"]["of_all_heads"], 1e-10)
        self.assertEqual([h["head"] for h in report["ranking"]["heads"][-2:]], [str(worst)] * 2)
        self.assertIn("share of the layer's |dQ|", self.good(self.path("run"), "--no-reference"))

    def test_heads_of_a_later_batch_element_have_their_numbers_in_the_layer(self):
        for step in (1, 2):
            self.capture(f"run/{step}.h5", SMALL, step=step, layer="a", heads_kept="6", launch_heads_q=4)
        report = self.json(self.path("run"), "--no-reference")
        self.assertEqual([head["head"] for head in report["ranking"]["heads"]], ["2"])
        self.assertEqual(report["captures"][0]["launch_heads_q"], 4)

    def test_unknown_figures_come_last(self):
        self.capture("run/a.h5", SMALL, ("dout", "dq", "dk", "dv", "dpsum", "dq_accum"), step=1, layer="forward")
        self.capture("run/b.h5", SMALL, step=1, layer="calm")
        self.capture("run/c.h5", SOFTCAP, step=1, layer="capped")
        report = self.json(self.path("run"), "--no-reference")
        ranking = report["ranking"]
        self.assertEqual(ranking["layers"][-1]["layer"], "forward")
        self.assertIsNone(ranking["layers"][-1]["steps"][0]["leak"])
        leaks = [number(h["leak"]) for h in ranking["heads"]]
        self.assertEqual(leaks, sorted(leaks, reverse=True))
        capped = next(x for x in ranking["layers"] if x["layer"] == "capped")
        self.assertEqual(capped["steps"][0]["drift"], report["captures"][2]["score_gradient_sum"]["before_cast"]["rms"])
        for name in ("b.h5", "c.h5"):
            os.unlink(self.path("run/" + name))
        self.capture("run/d.h5", SMALL, ("dout", "dq", "dk", "dv", "dpsum", "dq_accum"), step=2, layer="forward")
        self.assertIn("No layer has a leak that is known", self.good(self.path("run"), "--no-reference"))

    def test_whose_figures(self):
        self.capture("run/a.h5", SMALL, step=1, layer="a")
        other = self.capture("run/b.h5", SMALL, step=1, layer="b", kernel="pytorch-flash")
        with h5py.File(other, "r+") as file:
            file["lse"][0, 0, 0] += 1
        self.capture("run/c.h5", SMALL, ("out", "lse", "dq", "dk", "dv", "dpsum", "lse_log2", "dq_accum"), step=1, layer="c")
        found = self.json(self.path("run"), "--no-reference")["ranking"]["figures_of"]
        self.assertEqual(found, {"recorded_kernel": 1, "emulated_kernel": 2, "recorded_by_others": {"pytorch-flash": 1}, "nothing_recorded": 1})
        text = " ".join(self.good(self.path("run"), "--no-reference").split())
        self.assertIn("In 2 of 3 captures the figures are what fa3 has on the same inputs: 1 recorded by pytorch-flash and 1 with nothing "
                      "recorded.", text)

    def test_many_steps_are_thinned_in_the_table_only(self):
        for step in range(30):
            self.capture(f"run/{step:02d}.h5", SMALL, step=step, layer="a")
        text = self.good(self.path("run"), "--no-reference")
        over = text[text.index("OVER STEPS"):text.index("HEADS")]
        steps = [int(line.split()[-9]) for line in over.splitlines()[2:-2]]
        self.assertEqual((steps[0], steps[-1], len(steps)), (0, 29, 12))
        self.assertIn("12 steps of each", over)
        self.assertEqual(len(self.json(self.path("run"), "--no-reference")["ranking"]["layers"][0]["steps"]), 30)

    def test_every_key_is_documented(self):
        with open(os.path.join(SOURCE, "docs", "diagnose.md"), encoding="utf-8") as file:
            page = file.read()
        ranking = self.json(self.small_run(), "--no-reference")["ranking"]
        for known in (ranking, ranking["layers"][0], ranking["layers"][0]["steps"][0], ranking["heads"][0], ranking["figures_of"]):
            for key in known:
                self.assertIn("`" + key + "`", page)

    def test_a_bad_capture_among_good_ones(self):
        self.small_run()
        with h5py.File(self.path("run/1_a.h5"), "r+") as file:
            file.attrs["softmax_scale"] = "wide"
        code, out, err = run("diagnose", self.path("run"), "--no-reference", "--json")
        self.assertEqual(code, 2)
        self.assertRegex(err, r"\Abitattn: [^\n]*1_a.h5[^\n]*\n\Z")
        report = json.loads(out)
        self.assertEqual(len(report["captures"]), 3)
        self.assertEqual({x["layer"]: len(x["steps"]) for x in report["ranking"]["layers"]}, {"a": 1, "b": 2})
        self.refused(self.path("run"), "-b", "fa9", says="fa9")


class OddSteps(Case):
    def test_a_step_that_is_no_whole_number_is_told(self):
        for name, step in (("a", 0.5), ("b", "abc"), ("c", 3.0), ("d", "4")):
            self.capture(f"run/{name}.h5", SMALL, step=step, layer=name)
        code, out, err = run("diagnose", self.path("run"), "--no-reference", "--json")
        self.assertEqual(code, 0)
        steps = {x["layer"]: x["steps"][0]["step"] for x in json.loads(out)["ranking"]["layers"]}
        self.assertEqual(steps, {"a": None, "b": None, "c": 3, "d": 4})
        lines = err.splitlines()
        self.assertEqual(len(lines), 2, err)
        self.assertIn("a.h5: its step, 0.5, is no whole number: ranked as without one", lines[0])
        self.assertIn("b.h5: its step, abc, is no whole number", lines[1])


class Journals(Case):
    def lines(self, path):
        with open(path, "rb") as file:
            return file.read().splitlines(keepends=True)

    def write(self, path, lines):
        with open(path, "wb") as file:
            file.writelines(lines)

    def marked(self, report):
        return {(c["layer"], c["step"]): c["device"] == "marked" for c in report["captures"]}

    def test_a_killed_run_goes_on(self):
        """Stopped after its first line, by an interrupt and by a kill: the same output as of a run in one go, and nothing done twice."""
        for n in range(12):
            path = self.path(f"run/{n:02d}.h5")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self.assertEqual(run("generate", path, "--regime", "late", "--heads", "2", "--seqlen", "512", "--dim", "64", "--quiet", "--seed", n)[0], 0)
            with h5py.File(path, "r+") as file:
                file.attrs.update(step=n // 3, layer=f"h.{n % 3}")
        arguments = (self.path("run"), "--no-reference", "--threads", "1")
        whole = self.good(*arguments)
        for stop, code in ((signal.SIGINT, 2), (signal.SIGKILL, -signal.SIGKILL)):
            journal = self.path(f"journal {stop}")
            for _ in range(5):  # on a busy machine it may have finished before the signal came
                process = subprocess.Popen([PROGRAM, "diagnose", *arguments, "--journal", journal], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                while process.poll() is None and not (os.path.exists(journal) and len(self.lines(journal)) > 1):
                    time.sleep(0.001)
                process.send_signal(stop)
                out, err = process.communicate(timeout=60)
                if process.returncode != 0:
                    break
                os.unlink(journal)
            self.assertEqual((process.returncode, out), (code, b""))
            if stop == signal.SIGINT:
                self.assertRegex(err.decode(), r"\Abitattn: interrupted: [0-9]+ of 12 captures are kept in [^\n]+\n\Z")
            begun = len(self.lines(journal))
            self.assertLess(begun, 13)
            self.assertEqual(self.good(*arguments, "--journal", journal), whole)
            self.assertEqual(len(self.lines(journal)), 13)  # the first line names the format
            self.assertEqual(self.good(*arguments, "--journal", journal), whole)
            self.assertEqual(len(self.lines(journal)), 13)

    def test_what_is_taken_from_the_journal_and_what_is_done_again(self):
        arguments = (self.small_run(), "--no-reference", "--journal", self.path("journal"))
        whole = self.json(*arguments)
        kept = self.lines(self.path("journal"))
        self.assertEqual(len(kept), 5)
        # Three captures are finished, and marked, to see that they are taken from here; a crash cut off the fourth.
        marks = [checked(line.replace(b'"device":"', b'"device":"marked","was":"')) for line in kept[1:4]]
        order = [json.loads(line)["entry"]["diagnosis"] for line in kept[1:]]
        expected = {(c["layer"], c["step"]): n < 3 for n, c in enumerate(order)}
        self.write(self.path("journal"), [kept[0], *marks, kept[4][:50]])
        again = self.json(*arguments)
        self.assertEqual(self.marked(again), expected)
        self.assertEqual(again["ranking"], whole["ranking"])
        self.assertEqual(self.lines(self.path("journal")), [kept[0], *marks, kept[4]])
        # A file that has changed is done again,
        os.utime(self.path("run/1_a.h5"), ns=(1, 1))
        expected[("a", 1)] = False
        self.assertEqual(self.marked(self.json(*arguments)), expected)
        # and all of them with other settings.
        self.assertFalse(any(self.marked(self.json(*arguments, "--worst", "3")).values()))
        self.assertEqual(self.marked(self.json(*arguments)), expected)

    def test_a_damaged_line_is_told_and_its_capture_done_again(self):
        arguments = (self.small_run(), "--no-reference", "--journal", self.path("journal"))
        whole = self.json(*arguments)
        kept = self.lines(self.path("journal"))
        for line in (kept[2].replace(b'"leak":', b'"leak": ', 1), b"text\n", b'{"key":1}\n', b'{"key":' + b"[" * 100000 + b"]" * 100000 + b',"entry":{}}\n'):
            self.write(self.path("journal"), [*kept[:2], line, *kept[3:]])
            code, out, err = run("diagnose", *arguments, "--json")
            self.assertEqual((code, json.loads(out)), (0, whole))
            self.assertIn("line 3 is damaged", err)
            self.assertEqual(self.lines(self.path("journal"))[5:], [kept[2]])

    def test_captures_of_one_name_in_two_folders_are_two(self):
        for folder, seed in (("a", 1), ("b", 2)):
            os.mkdir(self.path(folder))
            path = self.path(folder + "/x.h5")
            run("generate", path, "--regime", "late", "--seqlen", 32, "--dim", 64, "--seed", seed)
            os.truncate(path, 1 << 17)  # what stands behind a file's end is not read
            os.utime(path, ns=(1, 1))
        self.assertEqual(os.path.getsize(self.path("a/x.h5")), os.path.getsize(self.path("b/x.h5")))
        leaks = []
        for folder in "ab":
            _, out, _ = run("diagnose", "x.h5", "--no-reference", "--json", "--journal", "../journal", cwd=self.path(folder))
            leaks.append(json.loads(out)["captures"][0]["leak"]["p_weighted_key"])
        self.assertNotEqual(*leaks)

    def test_a_first_line_that_was_cut_off_is_begun_anew(self):
        self.small_run(steps=(1,), layers=("a",))
        arguments = (self.path("run"), "--no-reference", "--journal", self.path("journal"))
        self.good(*arguments)
        kept = self.lines(self.path("journal"))
        for content in (b"", kept[0][:9], kept[0]):
            self.write(self.path("journal"), [content])
            self.good(*arguments)
            self.assertEqual(self.lines(self.path("journal")), kept)

    def test_with_a_page(self):
        """A journal of a run without a page serves one with it: what only a diagnosis itself shows is computed."""
        arguments = (self.small_run(), "--no-reference", "--journal", self.path("journal"))
        self.good(*arguments)
        self.good(*arguments, "--html", self.path("page.html"))
        self.assertEqual(len(self.lines(self.path("journal"))), 9)
        with open(self.path("page.html"), encoding="utf-8") as file:
            page = file.read()
        self.good(*arguments, "--html", self.path("page.html"))
        self.assertEqual(len(self.lines(self.path("journal"))), 9)
        with open(self.path("page.html"), encoding="utf-8") as file:
            self.assertEqual(file.read(), page)

    def test_refusals(self):
        folder = self.small_run(steps=(1,))
        for content in (b"not a journal\n", b"half a line", b'{"capture": 1}\n', b'{"journal":"bitattn diagnose","format":1}\n'):
            self.write(self.path("journal"), [content])
            self.refused(folder, "--journal", self.path("journal"), says="is no journal of bitattn diagnose")
            with open(self.path("journal"), "rb") as file:
                self.assertEqual(file.read(), content)
        self.refused(folder, "--journal", self.folder, says="folder")
        self.refused(folder, "--journal", self.path("no/such/folder/journal"), says="cannot be opened")
        self.refused(folder, "--journal", self.path("run/1_a.h5"), says="input")
        self.refused(folder, "--journal", self.path("x"), "--html", self.path("x"), says="both")
        self.refused(folder, "--journal", self.path("x"), "--html", self.path("./x"), says="both")
        self.refused(folder, "-o", self.path("x"), "--html", self.path("./x"), says="both")
        self.refused(folder, "--journal", self.path("x"), "-o", self.path("y.h5"), says="--journal")
        self.refused(self.path("missing"), "--journal", self.path("x"), says="missing")
        self.assertFalse(os.path.exists(self.path("x")))
        os.unlink(self.path("journal"))
        with open(self.path("journal"), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.refused(folder, "--journal", self.path("journal"), says="another run")


class Pages(Case):
    def page(self, *arguments):
        report = self.json(*arguments, "--html", self.path("page.html"))
        with open(self.path("page.html"), encoding="utf-8") as file:
            text = file.read()
        return report, text, xml.etree.ElementTree.fromstring(text.split("\n", 1)[1])

    def test_an_index_that_leads_to_every_capture(self):
        for step, source in ((1, SMALL), (2, GROUPED)):
            for layer in ("h.2", "<h.10>"):
                self.capture(f"run/{step}{layer[-2]}.h5", source, step=step, layer=layer)
        report, text, root = self.page(self.path("run"))
        lines = [row for row in root.iter("tr") if "data-capture" in row.attrib]
        self.assertEqual(len(lines), 4)
        sections = {article.get("id"): article for article in root.iter("article")}
        for line in lines:
            capture = report["captures"][int(line.get("data-capture"))]
            words = "".join(line.itertext())
            self.assertIn(capture["capture"], words)
            self.assertIn(f"layer {capture['layer']}, step {capture['step']}", words)
            (link,) = line.iter("a")
            section = sections[link.get("href")[1:]]
            self.assertEqual(section.get("data-capture"), line.get("data-capture"))
            self.assertIn("What this is", [h.text for h in section.iter("h2")])

    def test_the_ranking_stands_first_with_the_numbers_of_json(self):
        for step, source in ((1, SMALL), (2, GROUPED)):
            for layer in ("h.2", "<h.10>"):
                self.capture(f"run/{step}{layer[-2]}.h5", source, step=step, layer=layer)
        report, text, root = self.page(self.path("run"))
        self.assertEqual(text.count("<h1>"), 1)
        (holder,) = [e for e in root.iter() if "data-ranking" in e.attrib]
        words = "".join(holder.itertext())
        self.assertIn("2 of 2 layers leak more into dQ", words)
        self.assertIn("in this order: " + ", ".join(report["ranking"]["fp32_first"]), words)
        self.assertIn("4 of 4 captures hold what fa3 gives", words)
        self.assertIn("blame (--blame worst) and remedies (--remedies)", words)
        keys = set()
        for data in holder.iter("data"):
            value = report["ranking"]
            for key in data.get("data-key").strip("/").split("/"):
                value = value[int(key)] if isinstance(value, list) else value[key]
            self.assertEqual(float(data.get("value")), value)
            keys.add(data.get("data-key").split("/")[-1])
        self.assertLessEqual({"leak", "leak_growth", "dq_error", "condition", "residue", "drift", "mean_q_norm", "mean_k_norm", "largest_logit"}, keys)
        self.assertLess(text.index("data-ranking"), text.index("<h2>Captures</h2>"))

    def test_of_very_many_the_worst_have_sections(self):
        for step in range(26):
            self.capture(f"run/{step:02d}.h5", LATE if step in (3, 25) else SMALL, step=step, layer="a")
        report, text, root = self.page(self.path("run"), "--no-reference")
        lines = [row for row in root.iter("tr") if "data-capture" in row.attrib]
        self.assertEqual(len(lines), 26)
        self.assertEqual(len(list(root.iter("article"))), 24)
        self.assertEqual([line.get("data-capture") for line in lines[:2]], ["3", "25"])
        self.assertEqual([len(list(line.iter("a"))) for line in lines], [1] * 24 + [0] * 2)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]])
