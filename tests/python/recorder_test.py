"""The recorder's core without any framework: what goes through it comes out bit by bit, and bitattn accepts it.

    recorder_test.py PROGRAM SOURCE_DIR

A stand-in for a framework's hook feeds it calls whose tensors are those of bundled captures of a real kernel, so that `bitattn verify` must
find every bit. Ends with 77 (skipped) where h5py is not installed.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import unittest
import warnings
from unittest import mock

try:
    import h5py
    import numpy as np
except ImportError:
    print("h5py or NumPy is not installed: skipped")
    sys.exit(77)

PROGRAM = os.path.abspath(sys.argv[1])
SOURCE = os.path.abspath(sys.argv[2])
sys.path.insert(0, os.path.join(SOURCE, "python"))

from bitattn import growth, signatures, statistics, words  # noqa: E402
from bitattn.recorder import CaptureRefused, CaptureWarning, Cut, Recorder, Selection, write_captures  # noqa: E402

GOLDENS = os.path.join(SOURCE, "datasets", "goldens", "fa3")
SMALL = os.path.join(GOLDENS, "d64_full_s64_normal.h5")
LATE = os.path.join(GOLDENS, "d128_full_s128_late.h5")
PACKED = os.path.join(GOLDENS, "d128_causal_varlen3_normal.h5")
GROUPED = os.path.join(GOLDENS, "d128_full_gqa4x2_s128_late.h5")
SPECIAL = os.path.join(GOLDENS, "special_causal_s200.h5")
KEPT = ("kernel", "kernel_version", "device", "softmax_scale", "causal", "window_left", "window_right", "softcap", "deterministic")


def run(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, timeout=300)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def load(path):
    """Tensors and attributes of a capture at the root of a file, as h5py gives them."""
    with h5py.File(path) as file:
        tensors = {}
        for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv"):
            tensors[name] = words.read_words(file[name])
        tensors["lse"] = file["lse"][...]
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if name in file:
                tensors[name] = file[name][...].astype(np.int32)
        kept = {name: file.attrs[name] for name in KEPT if name in file.attrs}
        return tensors, {name: value.decode() if isinstance(value, bytes) else value for name, value in kept.items()}


def feed(recorder, layer, tensors, attributes):
    """What a hook does for one call: forward, then backward in the order in which gradients come."""
    call = recorder.open_call(layer)
    if call is None:
        return None
    call.attributes |= attributes
    offsets = {n: tensors[n] for n in ("cu_seqlens_q", "cu_seqlens_k") if n in tensors}
    batch = len(offsets["cu_seqlens_q"]) - 1 if offsets else tensors["q"].shape[0]
    if call.wants_tensors:
        try:
            call.cut = Cut.of(recorder.selection, batch, tensors["q"].shape[-2], tensors["k"].shape[-2], **offsets)
        except CaptureRefused as why:
            recorder.refuse(call, str(why))
            return call
        for name in ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv"):
            if name in tensors:
                call.tensors[name] = call.cut.apply(name, tensors[name])
        call.tensors |= {name: getattr(call.cut, name) for name in offsets}
    four = {n: (x if x.ndim == 4 else x[None]) for n, x in tensors.items() if n != "lse" and not n.startswith("cu_")}
    forward = {n: four[n] for n in ("q", "k", "v", "out")}
    call.statistics |= statistics.forward_statistics(statistics.NumpyMath, **forward, lse=tensors["lse"], softmax_scale=attributes["softmax_scale"])
    call.statistics |= statistics.backward_statistics(statistics.NumpyMath, **four)
    return call


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="bitattn_recorder_")
        self.addCleanup(lambda: subprocess.run(["rm", "-rf", self.folder], check=True))
        # A warning that a test does not expect is an error.
        caught = warnings.catch_warnings()
        caught.__enter__()
        self.addCleanup(caught.__exit__, None, None, None)
        warnings.simplefilter("error")

    def path(self, name):
        return os.path.join(self.folder, name)

    def verified(self, *arguments):
        code, out, err = run("verify", *arguments, "--json")
        self.assertEqual((code, err), (0, ""), out)
        return json.loads(out)


class Bits(Case):
    def test_every_bit_of_a_real_kernel_survives(self):
        """Plain, packed and grouped heads, NaN and infinities: verified with every tensor compared."""
        for source in (SMALL, LATE, PACKED, GROUPED, SPECIAL):
            for compress in (0, 6):
                recorder = Recorder(self.path(f"{os.path.basename(source)}_{compress}"), Selection(steps=[7]), first_step=7, compress=compress)
                tensors, attributes = load(source)
                feed(recorder, "blocks.3.attn", tensors, attributes)
                path = recorder.finish_step()
                self.assertEqual(os.path.basename(path), "step_000007_rank_0000.h5")
                found = self.verified(path)
                sizes = sum(x.size for n, x in tensors.items() if n in ("out", "lse", "dq", "dk", "dv"))
                self.assertEqual(found["elements"], sizes, source)
                with h5py.File(path) as file:
                    group = file["step_000007/blocks.3.attn"]
                    for name, array in tensors.items():
                        again = words.read_words(group[name]) if array.dtype == np.uint16 else group[name][...]
                        self.assertEqual(again.tobytes(), array.tobytes(), (source, name))
                    self.assertEqual(group.attrs["layer"], "blocks.3.attn")
                    self.assertEqual((group.attrs["step"], group.attrs["call"]), (7, 0))
                    self.assertTrue(group["q"].fletcher32)

    def test_chosen_heads_are_verified_as_a_part_of_the_launch(self):
        """Query head 2 of 4 over 2 KV heads: its group, query heads 2 and 3, is kept, so that dk and dv are whole."""
        recorder = Recorder(self.folder, Selection(steps="all", heads=[2]))
        tensors, attributes = load(GROUPED)
        feed(recorder, "attn", tensors, attributes)
        path = recorder.finish_step()
        self.verified(path)
        with h5py.File(path) as file:
            group = file["step_000000/attn"]
            self.assertEqual(group["q"].shape[2], 2)
            self.assertEqual(group["k"].shape[2], 1)
            self.assertEqual(words.read_words(group["dk"]).tobytes(), tensors["dk"][:, :, 1:].tobytes())
            self.assertEqual(group.attrs["heads_kept"], "2,3")
            launched = [int(group.attrs["launch_" + n]) for n in ("batch", "heads_q", "heads_kv")]
            self.assertEqual(launched, [tensors["q"].shape[0], 4, 2])

    def test_chosen_sequences_of_a_packed_batch(self):
        recorder = Recorder(self.folder, Selection(steps="all", batch=[0, 2]))
        tensors, attributes = load(PACKED)
        feed(recorder, "attn", tensors, attributes)
        path = recorder.finish_step()
        self.verified(path)
        with h5py.File(path) as file:
            lengths = np.diff(tensors["cu_seqlens_q"])
            self.assertEqual(file["step_000000/attn/cu_seqlens_q"][...].tolist(), [0, lengths[0], lengths[0] + lengths[2]])

    def test_chosen_batch_elements(self):
        selection = Selection(steps="all", batch=1)
        cut = Cut.of(selection, 3, 4, 2)
        q = np.arange(3 * 5 * 4 * 2).reshape(3, 5, 4, 2)
        self.assertTrue(np.array_equal(cut.apply("q", q), q[1:2]))
        self.assertTrue(np.array_equal(cut.apply("lse", q[:, :, :, 0].transpose(0, 2, 1)), q[1:2, :, :, 0].transpose(0, 2, 1)))
        self.assertEqual(cut.attributes()["heads_kept"], "4,5,6,7")

    def test_info_and_diagnose_take_it(self):
        recorder = Recorder(self.folder, Selection(steps=range(0, 10, 2)), attributes={"run": "a stand-in"})
        tensors, attributes = load(SMALL)
        for _ in range(3):
            for layer in ("a", "b"):
                feed(recorder, layer, tensors, attributes)
            recorder.finish_step()
        self.assertEqual([os.path.basename(f) for f in recorder.files], ["step_000000_rank_0000.h5", "step_000002_rank_0000.h5"])
        code, out, err = run("info", self.folder, "--json")
        self.assertEqual((code, err), (0, ""))
        captures = json.loads(out)["captures"]
        self.assertEqual([c["capture"].split(":")[1] for c in captures], [f"/step_00000{s}/{x}" for s in (0, 2) for x in "ab"])
        self.assertEqual(captures[0]["attributes"]["run"], "a stand-in")
        code, out, err = run("diagnose", self.folder, "--json", "--no-reference", "--quiet")
        self.assertEqual((code, err), (0, ""))
        self.assertTrue(all(c["against_recorded"]["equal"] for c in json.loads(out)["captures"]))

    def test_what_is_recorded_is_not_touched(self):
        tensors, attributes = load(GROUPED)
        before = {n: hashlib.sha256(x.tobytes()).hexdigest() for n, x in tensors.items()}
        recorder = Recorder(self.folder, Selection(steps="all", heads=0))
        feed(recorder, "attn", tensors, attributes)
        recorder.finish_step()
        self.assertEqual({n: hashlib.sha256(x.tobytes()).hexdigest() for n, x in tensors.items()}, before)


class Choices(Case):
    def test_steps_layers_and_demand(self):
        tensors, attributes = load(SMALL)
        recorder = Recorder(self.folder, Selection(steps=lambda step: step == 1, layers=["h.*.attn", "last"]))
        for step in range(5):
            if step == 3:
                recorder.record_next()
            for layer in ("h.0.attn", "h.0.mlp", "last"):
                feed(recorder, layer, tensors, attributes)
            recorder.finish_step()
        self.assertEqual([os.path.basename(f)[:11] for f in recorder.files], ["step_000001", "step_000003"])
        with open(recorder.statistics_file, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        self.assertEqual([(x["step"], x["layer"]) for x in lines], [(s, n) for s in range(5) for n in ("h.0.attn", "last")])
        self.assertEqual(recorder.calls_seen, 15)

    def test_several_calls_of_a_layer_in_a_step(self):
        tensors, attributes = load(SMALL)
        recorder = Recorder(self.folder, Selection(steps="all"), rank=3)
        calls = [feed(recorder, "a/b", tensors, attributes) for _ in range(3)]
        self.assertEqual(calls[2].group, "/step_000000/a_b.2")
        recorder.drop_call(calls.pop(1))
        self.assertEqual([call.group for call in calls], ["/step_000000/a_b", "/step_000000/a_b.1"])
        path = recorder.finish_step(next_step=100)
        self.assertEqual(os.path.basename(path), "step_000000_rank_0003.h5")
        self.assertEqual(recorder.step, 100)
        self.assertEqual(self.verified(path)["captures_read"], 2)

    def test_bad_choices(self):
        for bad, text in (
            ({"heads": [-1]}, "a number of heads is -1, expected a whole number from 0"),
            ({"heads": 1.5}, "heads is 1.5, expected a whole number from 0"),
            ({"batch": []}, r"batch is set\(\), expected whole numbers from 0"),
            ({"steps": "some"}, 'steps is "some", expected "all", numbers, or a function'),
            ({"steps": -1}, "steps is -1, expected"),
            ({"steps": [3, 1.5]}, "a number of steps is 1.5, expected"),
            ({"steps": range(3, -2, -1)}, "a number of steps is -1, expected"),
            ({"steps": range(5, 5)}, r"steps is range\(5, 5\), expected"),
            ({"steps": True}, "steps is True, expected"),
            ({"layers": 3}, "layers is 3, expected a pattern or several"),
            ({"layers": ["a", 3]}, r"layers is \['a', 3\], expected"),
            ({"statistics": 0.5}, "statistics is 0.5, expected"),
        ):
            with self.assertRaisesRegex(ValueError, "^" + text):
                Selection(**bad)
        for bad, text in (
            ({"compress": 10}, "compress is 10, expected a whole number from 0 to 9"),
            ({"rank": -1}, "rank is -1, expected"),
            ({"first_step": "24000"}, "first_step is '24000', expected"),
            ({"attributes": {"run": None}}, "attribute 'run' is None, expected a text or a number"),
        ):
            with self.assertRaisesRegex(ValueError, "^" + text):
                Recorder(self.path("bad"), **bad)
        with self.assertRaisesRegex(CaptureRefused, "h5 cannot be made: File exists$"):
            Recorder(SMALL)
        with self.assertRaisesRegex(CaptureRefused, "h5/x cannot be made: Not a directory$"):
            Recorder(os.path.join(SMALL, "x"))
        for good in (7, np.int64(7), [7, 9], np.array([7, 9]), range(9, 5, -2), iter((7, 9)), lambda step: step == 7):
            chosen = Selection(steps=good)
            self.assertEqual([step for step in range(9) if chosen.wants_step(step)], [7])
        with self.assertRaisesRegex(CaptureRefused, r"none of heads \[9\] exists, the call has 4"):
            Cut.of(Selection(heads=[9]), 1, 4, 2)
        with self.assertRaisesRegex(CaptureRefused, r"none of batch elements \[2\] exists, the call has 2"):
            Cut.of(Selection(batch=[2]), 2, 4, 2)

    def test_a_call_that_does_not_fit_is_refused_and_its_statistics_are_kept(self):
        tensors, attributes = load(SMALL)
        recorder = Recorder(self.folder, Selection(steps="all"))
        feed(recorder, "good", tensors, attributes)
        call = feed(recorder, "bad", tensors, attributes)
        call.tensors["dq"] = call.tensors["dq"][:, :10]
        with self.assertWarnsRegex(CaptureWarning, r"bad: tensors are not recorded: dq has shape \[1, 10, "):
            path = recorder.finish_step()
        self.assertEqual(self.verified(path)["captures_read"], 1)
        with open(recorder.statistics_file, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        self.assertIn("dq has shape", lines[1]["not_recorded"])
        self.assertGreater(lines[1]["mean_q_norm"], 0)
        strict = Recorder(self.path("strict"), Selection(steps="all"), strict=True)
        call = feed(strict, "bad", tensors, attributes)
        call.tensors["lse"] = call.tensors["lse"].astype(np.float64)
        with self.assertRaisesRegex(CaptureRefused, "lse has type float64"):
            strict.finish_step()


    def test_what_the_program_cannot_read_is_not_written(self):
        """One such capture would make the others of its file unusable."""
        tensors, attributes = load(SMALL)
        packed, packed_attributes = load(PACKED)
        offsets = packed["cu_seqlens_q"]

        def wide(d):
            return {n: np.zeros((1, 8, 2, d), np.uint16) for n in "qkv"}

        def without(*names):
            return {n: x for n, x in tensors.items() if n not in names}

        refused = [
            (r"q has head size 300, expected 1 to 256", wide(300), attributes),
            (r"q has head size 0", wide(0), attributes),
            (r"v has head size 257", wide(256) | {"v": wide(257)["v"]}, attributes),
            (r"k has shape \[1, 8, 2, 64\], expected \[2, 8, 2, 64\]", wide(64) | {"q": np.zeros((2, 8, 2, 64), np.uint16)}, attributes),
            (r"batch is 0", {n: np.zeros((0, 8, 2, 64), np.uint16) for n in "qkv"}, attributes),
            (r"2 query heads over 3 KV heads", wide(64) | {n: np.zeros((1, 8, 3, 64), np.uint16) for n in "kv"}, attributes),
            (r"2 query heads over 0 KV heads", wide(64) | {n: np.zeros((1, 8, 0, 64), np.uint16) for n in "kv"}, attributes),
            (r"q has shape \[64\], expected \[B,S,H,D\]", wide(64) | {"q": np.zeros(64, np.uint16)}, attributes),
            (r"dout was not seen, expected beside dq", without("dout"), attributes),
            (r"v was not seen", without("v"), attributes),
            (r"cu_seqlens_q was not seen", {n: x for n, x in packed.items() if n != "cu_seqlens_q"}, packed_attributes),
            (r"cu_seqlens_k goes from 0 to 7", packed | {"cu_seqlens_k": np.array([0, 7], np.int32)}, packed_attributes),
            (r"cu_seqlens_k goes from 1", packed | {"cu_seqlens_k": offsets + np.int32(1)}, packed_attributes),
            (r"cu_seqlens_q .* expected rising", packed | {"cu_seqlens_q": offsets[[0, 2, 1, 3]]}, packed_attributes),
            (r"cu_seqlens_q has \d entries", packed | {"cu_seqlens_q": offsets[[0, 3]]}, packed_attributes),
            (r"cu_seqlens_q has shape \[4\] and type float64", packed | {"cu_seqlens_q": offsets.astype(np.float64)}, packed_attributes),
            (r"softmax_scale is missing", tensors, {}),
            (r"attribute 'kernel' is <object", tensors, attributes | {"kernel": object()}),
        ]
        for name, bad in {
            "softmax_scale": (0, -0.5, math.nan, math.inf, "0.125"), "softcap": (-1, math.nan), "window_left": (-2, 2**31, 0.5), "window_right": (-2,),
            "causal": (2, "yes"), "deterministic": (-1,), "dq_order_fixed": (2,), "dkv_order_fixed": (2,), "causal_alignment": ("top-right", 1),
        }.items():  # fmt: skip
            refused += [(f"{name} is {value}, expected", tensors, attributes | {name: value}) for value in bad]
        recorder = Recorder(self.folder, Selection(steps="all"))
        feed(recorder, "good", tensors, attributes)
        for n, (why, t, a) in enumerate(refused):
            call = recorder.open_call(str(n))
            call.tensors, call.attributes = dict(t), dict(a)
            with self.assertRaisesRegex(CaptureRefused, why):
                call.check()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            path = recorder.finish_step()
        self.assertEqual(len(said), len(refused), [str(x.message) for x in said])
        self.assertEqual(self.verified(path)["captures_read"], 1)


class Files(Case):
    def test_names_that_meet_or_cannot_be_written(self):
        """Each capture has a group of its own, and the run goes on."""
        tensors, attributes = load(SMALL)
        recorder = Recorder(self.folder, Selection(steps="all"))
        layers = ["0", "0", "0.1", "a/b", "a_b", "a/b~2", "nul\0", "half\udc80", ".", "", "é"]
        for layer in layers:
            feed(recorder, layer, tensors, attributes)
        path = recorder.finish_step()
        self.assertEqual(self.verified(path)["captures_read"], len(layers))
        with h5py.File(path) as file:
            found = sorted((x.attrs["layer"], int(x.attrs["call"]), name) for name, x in file["step_000000"].items())
        self.assertEqual(
            found,
            [
                ("", 0, "_"), (".", 0, "_."), ("0", 0, "0"), ("0", 1, "0.1"), ("0.1", 0, "0.1~2"), ("a/b", 0, "a_b"), ("a/b~2", 0, "a_b~2~2"),
                ("a_b", 0, "a_b~2"), ("half\\udc80", 0, "half\\udc80"), ("nul\\0", 0, "nul\\0"), ("é", 0, "é"),
            ],
        )  # fmt: skip

    def test_attributes_that_cannot_be_written(self):
        for value in (object(), 2**70, None, [1, "a", None], "nul\0", "half\udc80", {"a": 1}):
            with self.assertRaisesRegex(ValueError, "attribute 'x' is .*, expected a text or a number that HDF5 can hold"):
                Recorder(self.folder, attributes={"x": value})
        tensors, attributes = load(SMALL)
        # What says how a capture is to be read is the recorder's own.
        recorder = Recorder(self.folder, Selection(steps="all"), attributes={"schema_version": 2, "layout": "BHSD", "betas": [0.9, 0.95], "on": True})
        feed(recorder, "a", tensors, attributes)
        self.verified(recorder.finish_step())

    def test_an_unknown_fault_in_writing_is_a_warning(self):
        tensors, attributes = load(SMALL)
        recorder = Recorder(self.folder, Selection(steps="all"))
        feed(recorder, "a", tensors, attributes)
        with mock.patch.object(words, "write_array", side_effect=RuntimeError("a fault\nin many lines")):
            with self.assertWarnsRegex(CaptureWarning, "a: tensors are not recorded: RuntimeError: a fault$"):
                self.assertIsNone(recorder.finish_step())
        self.assertEqual(os.listdir(self.folder), ["statistics_rank_0000.jsonl"])
        feed(recorder, "a", tensors, attributes)
        self.verified(recorder.finish_step())
        feed(recorder, "a", tensors, attributes)
        with mock.patch.object(json, "dumps", side_effect=TypeError("a fault")):
            with self.assertWarnsRegex(CaptureWarning, "a: not recorded: TypeError: a fault"):
                recorder.finish_step()

    def test_a_failed_write_leaves_nothing_and_ends_the_recording_only(self):
        tensors, attributes = load(SMALL)
        recorder = Recorder(self.folder, Selection(steps="all"))
        feed(recorder, "a", tensors, attributes)
        first = recorder.finish_step()
        with open(first, "rb") as file:
            before = file.read()
        write, count = words.write_array, [0]

        def full_disk(*arguments):
            count[0] += 1
            if count[0] == 4:
                raise OSError(28, "No space left on device")
            write(*arguments)

        recorder.step = 0
        feed(recorder, "a", tensors, attributes)
        with mock.patch.object(words, "write_array", full_disk):
            with self.assertWarnsRegex(CaptureWarning, "recording has stopped, the run goes on: .*No space left"):
                self.assertIsNone(recorder.finish_step())
        self.assertEqual(sorted(os.listdir(self.folder)), ["statistics_rank_0000.jsonl", "step_000000_rank_0000.h5"])
        with open(first, "rb") as file:
            self.assertEqual(file.read(), before)
        self.assertIsNone(recorder.open_call("a"))
        count[0] = 0
        strict = Recorder(self.folder, Selection(steps="all"), strict=True, resume=True)
        feed(strict, "a", tensors, attributes)
        with mock.patch.object(words, "write_array", full_disk), self.assertRaises(OSError):
            strict.finish_step()
        self.assertEqual(len(os.listdir(self.folder)), 2)

    def test_a_folder_with_a_recording_is_refused_unless_it_goes_on(self):
        small, attributes = load(SMALL)
        late, late_attributes = load(LATE)
        recorder = Recorder(self.folder, Selection(steps=[0, 1]))
        for _ in range(2):
            feed(recorder, "a", small, attributes)
            recorder.finish_step()
        with open(recorder.files[0], "rb") as file:
            before = file.read()
        with self.assertRaisesRegex(CaptureRefused, r"holds a recording already \(st.*resume=True"):
            Recorder(self.folder)
        os.rename(recorder.statistics_file, self.path("aside"))
        with self.assertRaisesRegex(CaptureRefused, r"\(step_000000_rank_0000.h5\)"):
            Recorder(self.folder)
        os.rename(self.path("aside"), recorder.statistics_file)
        Recorder(self.folder, rank=1)
        resumed = Recorder(self.folder, Selection(steps="all"), first_step=1, resume=True)
        for _ in range(2):
            feed(resumed, "a", late, late_attributes)
            resumed.finish_step()
        with open(recorder.files[0], "rb") as file:
            self.assertEqual(file.read(), before)
        for step in (1, 2):
            with h5py.File(resumed.capture_file(step)) as file:
                self.assertEqual(file[f"step_00000{step}/a/q"].shape, late["q"].shape)
        with open(resumed.statistics_file, encoding="utf-8") as file:
            self.assertEqual([json.loads(line)["step"] for line in file], [0, 1, 1, 2])

    def test_same_content_same_file(self):
        tensors, attributes = load(SMALL)
        found = []
        for name in ("a", "b"):
            recorder = Recorder(self.path(name), Selection(steps="all"))
            feed(recorder, "x", tensors, attributes)
            with open(recorder.finish_step(), "rb") as file:
                found.append(file.read())
        self.assertEqual(found[0], found[1])

    def test_not_bf16_is_refused(self):
        with self.assertRaisesRegex(ValueError, "not BF16 numbers"):
            words.exact_words(np.array([1.0, 1.001], np.float32))
        self.assertEqual(words.exact_words(np.array([1.0, -0.0, np.inf], np.float32)).tolist(), [0x3F80, 0x8000, 0x7F80])
        values = np.array([1.00390625, 1.01171875, np.nan, 1e-40], np.float32)
        self.assertEqual(words.round_to_words(values).tolist(), [0x3F80, 0x3F82, 0x7FFF, 1])

    def test_empty_tensors(self):
        recorder = Recorder(self.folder, Selection(steps="all"))
        call = recorder.open_call("none")
        call.attributes["softmax_scale"] = 1.0
        call.tensors = {n: np.zeros((1, 0, 2, 64), np.uint16) for n in "qkv"}
        code, out, err = run("info", recorder.finish_step())
        self.assertEqual((code, err), (0, ""), out)
        with self.assertRaises(CaptureRefused):
            call.tensors.pop("k")
            write_captures(self.path("x.h5"), [call])
        self.assertFalse(os.path.exists(self.path("x.h5")))


class Statistics(Case):
    def naive(self, t, scale):
        """The definitions of docs/capture.md, one batch element and KV head at a time."""
        x = {n: words.to_float(a).astype(np.float64) for n, a in t.items() if a.dtype == np.uint16}
        heads_q, heads_kv = x["q"].shape[2], x["k"].shape[2]
        group = heads_q // heads_kv

        def variance(name, b, heads, weight):
            values = t[name][b][:, heads]
            exponent = (values.astype(int) >> 7) & 255
            half = np.where(exponent == 0, 2.0**-126, 2.0 ** (exponent - 127 - 8.0))
            return np.sum((half * weight) ** 2) / 3

        sums = {"dk_sum": [0, 0], "dq_dk_balance": [0, 0], "out_dv_balance": [0, 0]}
        for b in range(x["q"].shape[0]):
            for kv in range(heads_kv):
                own, of_q = [kv], list(range(kv * group, (kv + 1) * group))
                sums["dk_sum"][0] += np.sum(x["dk"][b, :, kv].sum(0) ** 2)
                sums["dk_sum"][1] += variance("dk", b, own, 1)
                for law, a, c in (("dq_dk_balance", ("dq", "q"), ("dk", "k")), ("out_dv_balance", ("out", "dout"), ("dv", "v"))):
                    left = np.sum(x[a[0]][b][:, of_q] * x[a[1]][b][:, of_q])
                    right = np.sum(x[c[0]][b][:, own] * x[c[1]][b][:, own])
                    sums[law][0] += (left - right) ** 2
                    sums[law][1] += variance(a[0], b, of_q, x[a[1]][b][:, of_q]) + variance(c[0], b, own, x[c[1]][b][:, own])
        found = {law: np.sqrt(r / n) for law, (r, n) in sums.items()}
        norm = {n: np.sqrt(np.sum(x[n] ** 2, -1)) for n in ("q", "k", "v", "out", "dout")}
        found |= {f"mean_{n}_norm": norm[n].mean() for n in norm}
        found |= {f"{n}_norm": np.sqrt(np.sum(x[n] ** 2)) for n in ("dq", "dk", "dv")}
        found["largest_mean_key_norm"] = np.sqrt(np.sum(x["k"].mean(1) ** 2, -1)).max()
        found["logit_bound"] = norm["q"].max() * norm["k"].max() * scale
        found["largest_lse"] = np.abs(t["lse"]).max()
        return found

    def test_against_their_definitions_and_the_program(self):
        for source in (SMALL, LATE, GROUPED):
            tensors, attributes = load(source)
            recorder = Recorder(self.path(os.path.basename(source)), Selection(steps="all"))
            feed(recorder, "a", tensors, attributes)
            path = recorder.finish_step()
            with open(recorder.statistics_file, encoding="utf-8") as file:
                line = json.loads(file.read())
            expected = self.naive(tensors, attributes["softmax_scale"])
            for name, value in expected.items():
                self.assertAlmostEqual(line[name] / value, 1, delta=2e-6, msg=(source, name))
            code, out, err = run("info", path, "--json")
            self.assertEqual((code, err), (0, ""))
            info = json.loads(out)["captures"][0]
            for name in ("q", "k", "v", "dout"):
                self.assertAlmostEqual(line[f"mean_{name}_norm"] / info["norms"][f"mean_{name}"], 1, delta=2e-6)
            self.assertLessEqual(abs(info["largest_logit"]["value"]), line["logit_bound"] * (1 + 1e-6))

    def test_nan_is_null(self):
        tensors, attributes = load(SPECIAL)
        recorder = Recorder(self.folder)
        feed(recorder, "a", tensors, attributes)
        recorder.finish_step()
        with open(recorder.statistics_file, encoding="utf-8") as file:
            line = json.loads(file.read(), parse_constant=lambda text: self.fail(text))
        self.assertIsNone(line["dq_norm"])
        self.assertEqual(recorder.files, [])


class Growth(Case):
    """What is read from hand-written statistics; every expected number is worked out here by hand."""

    LONG = "module.decoder.layers.10.self_attention.core_attention"

    def write(self, lines, rank=0, end="\n"):
        with open(self.path(f"statistics_rank_{rank:04d}.jsonl"), "w", encoding="utf-8") as file:
            file.write("\n".join(json.dumps({"rank": rank, "call": 0, "kernel": "x"} | line) for line in lines) + end)

    def run_main(self, *arguments):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = growth.main([str(a) for a in arguments])
        return code, out.getvalue(), err.getvalue()

    def test_numbers(self):
        a = [(0, 2.0, 3.0, 8.0, 0.5), (100, 3.0, 3.0, 16.0, 2.0), (200, 12.0, 6.0, 80.0, 10.0)]
        b = [(0, 2.0, 3.0, 5.0, 0.1), (100, 2.0, 3.0, 5.0, 0.9), (200, 1.0, 3.0, 40.0, 0.2)]
        figures = ("mean_q_norm", "mean_k_norm", "logit_bound", "dk_sum")
        of = {
            name: [{"layer": name, "step": row[0]} | dict(zip(figures, row[1:])) for row in rows] for name, rows in (("a", a), (self.LONG, b))
        }  # fmt: skip
        softcapped = [{"layer": "s", "step": step, "logit_bound": 50.0} for step in (0, 200)]
        broken = [{"layer": "n", "step": 0, "dk_sum": 3.0}, {"layer": "n", "step": 100, "dk_sum": None}]
        # A resumed run recorded step 100 again, a call was refused, and the last line was cut off.
        again = [{"layer": "a", "step": 100, "mean_q_norm": 99.0}]
        refused = [{"layer": "r", "step": 0, "not_recorded": "q is torch.float32, expected bfloat16"}]
        self.write(again + of["a"] + of[self.LONG] + softcapped + broken + refused + [{"layer": "cut off", "step": 0, "dk_sum": 1e9}], end="")
        # Of ranks and of calls the largest counts.
        self.write([of["a"][0] | {"mean_q_norm": 1.0}, of["a"][0] | {"call": 1, "logit_bound": 4.0}, of["a"][2] | {"dk_sum": 20.0}], rank=1)
        code, out, err = self.run_main(self.folder, "--json")
        self.assertEqual((code, err), (0, ""))
        found = json.loads(out, parse_constant=lambda text: self.fail(text))
        self.assertEqual([x["layer"] for x in found["layers"]], ["n", "a", self.LONG, "s"])
        n, first, second, s = found["layers"]
        self.assertEqual(first["growth"], {"mean_q_norm": 6.0, "mean_k_norm": 2.0, "logit_bound": 10.0, "dk_sum": 20.0})
        self.assertEqual(second["growth"], {"mean_q_norm": 0.5, "mean_k_norm": 1.0, "logit_bound": 8.0, "dk_sum": 1.0})
        self.assertEqual((n["growth"], s["growth"]), ({"dk_sum": None}, {"logit_bound": 1.0}))
        self.assertEqual(first["steps"][1], {"step": 100, "mean_q_norm": 3.0, "mean_k_norm": 3.0, "logit_bound": 16.0, "dk_sum": 2.0})
        self.assertEqual(
            [tuple(x.values()) for x in found["grew_most"]],
            [
                ("mean_q_norm", "a", 100, 200, 3.0, 12.0, 4.0), ("mean_k_norm", "a", 100, 200, 3.0, 6.0, 2.0),
                ("logit_bound", self.LONG, 100, 200, 5.0, 40.0, 8.0), ("dk_sum", "n", 0, 100, 3.0, None, None),
            ],
        )  # fmt: skip
        code, out, err = self.run_main(self.folder)
        self.assertEqual((code, err), (0, ""))
        self.assertLessEqual(max(map(len, out.splitlines())), 100)
        rows = [line.split() for line in out.splitlines()]
        self.assertIn("a 200 12 x6 6 x2 80 x10 20 x20".split(), rows)
        self.assertIn("n 100 - - - - - - inf inf".split(), rows)
        self.assertIn([self.LONG], rows)  # on a line of its own, uncut
        self.assertIn("logit_bound x8 5 40 100 200 …coder.layers.10.self_attention.core_attention".split(), rows)

    def test_one_step(self):
        self.write([{"layer": "a" * 200, "step": 7, "mean_q_norm": 1.0}])
        code, out, err = self.run_main(self.folder)
        self.assertEqual((code, err), (0, ""))
        self.assertIn("There is one step only.", out)
        self.assertLessEqual(max(map(len, out.splitlines())), 100)

    def test_what_a_recorder_wrote(self):
        tensors, attributes = load(SMALL)
        recorder = Recorder(self.folder)
        for _ in range(2):
            feed(recorder, "a", tensors, attributes)
            recorder.finish_step()
        done = subprocess.run([sys.executable, "-m", "bitattn.growth", recorder.statistics_file, "--json"], capture_output=True, timeout=60,
                              env=os.environ | {"PYTHONPATH": os.path.join(SOURCE, "python")})  # fmt: skip
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        found = json.loads(done.stdout)
        self.assertEqual(found["layers"][0]["growth"], dict.fromkeys(growth.FIGURES, 1.0))
        self.assertEqual(found["grew_most"], [])

    def test_bad_input_is_one_line(self):
        def refused(content):
            with open(self.path("x.jsonl"), "w", encoding="utf-8") as file:
                file.write(content)
            return (self.path("x.jsonl"),)

        good = '{"step": 0, "layer": "a", "dk_sum": 1}\n'
        for arguments, text in (
            (lambda: (), "got nothing, expected one folder or file"),
            (lambda: (self.folder, "x"), "expected one folder or file"),
            (lambda: ("--jsn",), "got --jsn, expected"),
            (lambda: (self.folder,), "holds no statistics_rank_"),
            (lambda: (self.path("none"),), "none: No such file or directory"),
            (lambda: refused(good + "x\n"), "x.jsonl:2: not a line of statistics"),
            (lambda: refused('{"step": "0", "layer": "a"}\n'), ":1: not a line"),
            (lambda: refused('{"step": 0, "layer": "a", "dk_sum": "1"}\n'), ":1: not a line"),
            (lambda: refused("[1]\n"), ":1: not a line"),
            (lambda: refused(""), "holds no figures: no calls"),
            (lambda: refused('{"step": 0, "layer": "a", "not_recorded": "dropout"}\n'), "holds no figures: dropout"),
        ):
            code, out, err = self.run_main(*arguments())
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
            self.assertTrue(err.startswith("bitattn.growth: "))
            self.assertIn(text, err)


# The signatures of FlashAttention 2.8 and of FlashAttention-3's interface at 0251105a.
def flash2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
           deterministic=False, return_attn_probs=False):  # fmt: skip
    pass


def flash2_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
                  window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
                  block_table=None):  # fmt: skip
    pass


def flash3(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
           attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0):  # fmt: skip
    pass


class Signatures(unittest.TestCase):
    q, k, v = (np.zeros((1, 8, 2, 64)) for _ in range(3))

    def test_flash_attention_2(self):
        c = signatures.flash_attention(flash2, (self.q, self.k, self.v), {"causal": True, "deterministic": True, "window_size": (5, 0)})
        self.assertEqual((c.kernel, c.layout, c.causal, c.window, c.softcap), ("flash-attention-2", "BSHD", True, (5, 0), 0))
        self.assertEqual((c.softmax_scale, c.causal_alignment, c.deterministic, c.obstacle), (0.125, "bottom-right", True, ""))
        c = signatures.flash_attention(flash2, (self.q, self.k, self.v, 0.1, 0.5), {})
        self.assertEqual((c.softmax_scale, c.obstacle), (0.5, "dropout_p is 0.1"))

    def test_packed(self):
        offsets = np.array([0, 8])
        c = signatures.flash_attention(flash2_packed, (self.q, self.k, self.v, offsets, offsets, 8, 8), {"block_table": offsets})
        self.assertEqual((c.layout, c.obstacle), ("THD", "block_table is given, which captures do not know"))
        self.assertIs(c.cu_seqlens_k, offsets)

    def test_flash_attention_3(self):
        c = signatures.flash_attention(flash3, (self.q, self.k, self.v), {"softcap": 15.0, "window_size": (None, None)})
        self.assertEqual((c.kernel, c.softcap, c.window, c.obstacle), ("flash-attention-3", 15.0, (-1, -1), ""))
        self.assertIn("qv", signatures.flash_attention(flash3, (self.q, self.k, self.v), {"qv": self.q}).obstacle)
        self.assertIn("attention_chunk", signatures.flash_attention(flash3, (self.q, self.k, self.v), {"attention_chunk": 4}).obstacle)

    def test_pytorch(self):
        c = signatures.scaled_dot_product_attention(None, (self.q, self.k), {"value": self.v, "is_causal": True, "scale": 0.25})
        self.assertEqual((c.layout, c.causal, c.causal_alignment, c.softmax_scale, c.obstacle), ("BHSD", True, "top-left", 0.25, ""))
        self.assertIn("attn_mask", signatures.scaled_dot_product_attention(None, (self.q, self.k, self.v, self.q), {}).obstacle)
        self.assertIn("dropout", signatures.scaled_dot_product_attention(None, (self.q, self.k, self.v, None, 0.5), {}).obstacle)
        self.assertIn("shape", signatures.scaled_dot_product_attention(None, (self.q[0], self.k[0], self.v[0]), {}).obstacle)
        with self.assertRaises(TypeError):
            signatures.scaled_dot_product_attention(None, (self.q, self.k), {})


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]])
