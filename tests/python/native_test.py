"""The compiled module: the dictionaries are those of the program's --json, the bits those of the files, and bad input is a clear ValueError.

    native_test.py PROGRAM SOURCE_DIR

Ends with 77 (skipped) where the module, h5py or NumPy is missing.
"""

import ast
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

try:
    import h5py
    import numpy as np
except ImportError:
    print("h5py or NumPy is not installed: skipped")
    sys.exit(77)

import bitattn

if not hasattr(bitattn, "_native"):
    print("the compiled module is not built: skipped")
    sys.exit(77)

from bitattn import InputError, words

PROGRAM = os.path.abspath(sys.argv[1])
SOURCE = os.path.abspath(sys.argv[2])
GOLDENS = os.path.join(SOURCE, "datasets", "goldens", "fa3")
SMALL = os.path.join(GOLDENS, "d64_full_s64_normal.h5")
PACKED = os.path.join(GOLDENS, "d128_causal_varlen3_normal.h5")
GROUPED = os.path.join(GOLDENS, "d128_full_gqa4x2_s128_late.h5")
TENSORS = ("q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv")


def program(*arguments):
    done = subprocess.run([PROGRAM, *arguments, "--json", "--quiet"], capture_output=True, timeout=300)
    return json.loads(done.stdout)


class Dlpack:
    """A NumPy array that only speaks DLPack, as BF16: what a torch tensor is to us. The capsule is NumPy's, its element type set to BF16."""

    def __init__(self, array, code=4, device=None):
        self.array, self.code, self.device = array, code, device
        self.requires_grad = False

    def __dlpack_device__(self):
        return self.device or self.array.__dlpack_device__()

    def __dlpack__(self):
        import ctypes

        capsule = self.array.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # data, device (type, id), ndim, then the type's code.
        ctypes.cast(get(capsule, b"dltensor") + 8 + 8 + 4, ctypes.POINTER(ctypes.c_uint8))[0] = self.code
        return capsule


class CopiedDlpack:
    """Asks for a copy, as torch.from_dlpack(x, copy=True) does."""

    def __init__(self, view):
        self.view = view

    def __dlpack_device__(self):
        return self.view.__dlpack_device__()

    def __dlpack__(self):
        return self.view.__dlpack__(copy=True)


class Dictionaries(unittest.TestCase):
    def assert_same(self, found, expected):
        """What the module says is what the program says of it; the program may add sections of its own."""
        self.assertEqual(found, {name: expected[name] for name in found})

    def test_info(self):
        for source in (SMALL, PACKED, GROUPED):
            self.assert_same(bitattn.info(bitattn.load(source)), program("info", source)["captures"][0])

    def test_witness(self):
        for source in (GROUPED, PACKED):
            self.assert_same(bitattn.witness(bitattn.load(source)), program("witness", source)["captures"][0])

    def test_verify(self):
        found = bitattn.verify(bitattn.load(GROUPED))
        self.assertTrue(found["verified"])
        self.assert_same(found, program("verify", GROUPED)["captures"][0])

    def test_compare(self):
        capture = bitattn.load(SMALL)
        found = bitattn.compare(capture, "fa3", "fp32")
        self.assertFalse(found["equal"])
        self.assert_same(found, program("compare", SMALL, "-a", "fa3", "-b", "fp32")["comparisons"][0])
        other = bitattn.run(capture, "fp32")
        found = bitattn.compare_recorded(capture, other)
        self.assertEqual([t["tensor"] for t in found["tensors"] if t["verdict"] == "differs"][:2], ["out", "lse"])
        self.assertTrue(bitattn.compare_recorded(capture, capture)["equal"])
        with self.assertRaisesRegex(InputError, "are not the same problem: "):
            bitattn.compare_recorded(capture, bitattn.load(GROUPED))
        tensors = {n: getattr(capture, n).copy() for n in ("q", "k", "v", "dout", "out")}
        tensors["k"].flat[5] ^= 1
        changed = bitattn.Capture(**tensors, softmax_scale=capture.softmax_scale, causal=capture.causal)
        with self.assertRaisesRegex(InputError, r"are not the same problem: k differs in 1 of \d+ elements"):
            bitattn.compare_recorded(capture, changed)

    def test_diagnose(self):
        for options, arguments in (({"reference": None}, ["--no-reference"]), ({"rows": "3", "worst": 2}, ["--rows", "3", "--worst", "2"])):
            found = bitattn.diagnose(bitattn.load(SMALL), **options)
            self.assert_same(found, program("diagnose", SMALL, *arguments)["captures"][0])

    def test_identify(self):
        found = bitattn.identify(bitattn.load(GROUPED), remedies=False)
        self.assertEqual((found["verdict"], found["exact"]), ("unmodified", True))
        self.assert_same(found, program("identify", GROUPED, "--without-remedies")["captures"][0])

    def test_run_is_what_was_recorded(self):
        capture = bitattn.load(GROUPED)
        computed = bitattn.run(capture, "fa3")
        for name in TENSORS:
            self.assertEqual(getattr(computed, name).tobytes(), getattr(capture, name).tobytes(), name)
        self.assertEqual(computed.backend, "fa3")

    def test_generate_and_backends(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x.h5")
            program("generate", path, "--regime", "late", "--heads", "2:1", "--seqlen", "40:50", "--dim", "64", "--seed", "7", "--causal")
            expected = bitattn.load(path)
        found = bitattn.generate("late", heads_q=2, heads_kv=1, seqlen_q=40, seqlen_k=50, head_dim=64, seed=7, causal=True)
        for name in ("q", "k", "v", "dout"):
            self.assertEqual(getattr(found, name).tobytes(), getattr(expected, name).tobytes())
        self.assertEqual(found.attributes["seed"], 7)
        self.assertIn("fa3", bitattn.backends())


class Tensors(unittest.TestCase):
    def rebuilt(self, capture, convert=lambda x: x):
        tensors = {n: getattr(capture, n) for n in TENSORS}
        q, k, v = (convert(tensors.pop(n)) for n in "qkv")
        rest = {n: x if n == "lse" else convert(x) for n, x in tensors.items()}
        offsets = {n: getattr(capture, n) or None for n in ("cu_seqlens_q", "cu_seqlens_k")}
        return bitattn.Capture(
            q, k, v, **rest, **offsets, softmax_scale=capture.softmax_scale, causal=capture.causal, window=capture.window,
            softcap=capture.softcap, deterministic=capture.deterministic, attributes={"kernel": "mine", "step": 3, "loss": 0.5},
        )  # fmt: skip

    def test_the_words_are_those_of_the_file(self):
        for source in (SMALL, PACKED):
            capture = bitattn.load(source)
            with h5py.File(source) as file:
                for name in TENSORS:
                    expected = file[name][...] if name == "lse" else words.read_words(file[name])
                    self.assertEqual(getattr(capture, name).tobytes(), expected.tobytes())

    def test_from_arrays(self):
        """Words, words with any strides, and BF16 through DLPack make the capture that verifies."""
        for source in (SMALL, PACKED, GROUPED):
            capture = bitattn.load(source)
            for convert in (
                lambda x: x,
                lambda x: np.asfortranarray(x),
                lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
                lambda x: Dlpack(x.copy()),
                lambda x: Dlpack(np.asfortranarray(x)),
            ):
                again = self.rebuilt(capture, convert)
                self.assertEqual(again.attributes, {"kernel": "mine", "step": 3, "loss": 0.5})
                self.assertTrue(bitattn.compare_recorded(capture, again)["equal"])
            self.assertTrue(bitattn.verify(again)["verified"])

    def test_ml_dtypes(self):
        try:
            import ml_dtypes
        except ImportError:
            self.skipTest("ml_dtypes is not installed")
        capture = bitattn.load(SMALL)
        again = self.rebuilt(capture, lambda x: x.view(ml_dtypes.bfloat16))
        self.assertTrue(bitattn.compare_recorded(capture, again)["equal"])

    def test_torch(self):
        try:
            import torch
        except ImportError:
            self.skipTest("PyTorch is not installed")
        capture = bitattn.load(SMALL)
        for grad in (False, True):
            again = self.rebuilt(capture, lambda x: torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16).requires_grad_(grad))
            self.assertTrue(bitattn.compare_recorded(capture, again)["equal"])
        x = torch.from_dlpack(capture.dlpack("k"))
        self.assertEqual((x.dtype, x.data_ptr()), (torch.bfloat16, capture.k.ctypes.data))
        expected = capture.k.tobytes()
        del capture
        gc.collect()
        self.assertEqual(x.view(torch.int16).numpy().tobytes(), expected)

    def test_out_through_dlpack(self):
        """The way back: a view of the same memory, which keeps the capture."""
        capture = bitattn.load(SMALL)
        self.assertEqual(capture.dlpack("q").__dlpack_device__(), (1, 0))
        again = bitattn.Capture(*(capture.dlpack(n) for n in "qkv"), softmax_scale=1)
        for name in "qkv":
            self.assertEqual(getattr(again, name).tobytes(), getattr(capture, name).tobytes())
        before = sys.getrefcount(capture)
        for _ in range(3):
            capture.dlpack("dk").__dlpack__()
        self.assertEqual(sys.getrefcount(capture), before)
        with self.assertRaisesRegex(InputError, "no tensor lse, expected q, k"):
            capture.dlpack("lse")
        with self.assertRaisesRegex(InputError, "tensor out was not recorded"):
            bitattn.generate("normal", seqlen_q=8).dlpack("out")

    def test_arrays_are_views_that_keep_the_capture(self):
        capture = bitattn.load(SMALL)
        q, expected = capture.q, capture.q.tobytes()
        self.assertEqual(q.ctypes.data, capture.q.ctypes.data)
        self.assertFalse(q.flags.writeable)
        del capture
        gc.collect()
        self.assertEqual(q.tobytes(), expected)

    def test_dlpack_tensors_are_given_back(self):
        capture = bitattn.load(SMALL)
        array = capture.q.copy()
        before = sys.getrefcount(array)
        self.rebuilt(capture, lambda x: Dlpack(array) if x.ctypes.data == capture.q.ctypes.data else x)
        with self.assertRaises(InputError):
            self.rebuilt(capture, lambda x: Dlpack(array, code=1))
        gc.collect()
        self.assertEqual(sys.getrefcount(array), before)

    def test_load_of_a_file_with_several_and_text_that_is_no_utf8(self):
        capture = bitattn.load(SMALL)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x.h5")
            bitattn.save(path, {"/a": capture, "/b": capture})
            with self.assertRaisesRegex(InputError, r"holds 2 captures, expected the name of one, such as .*:/a \("):
                bitattn.load(path)
            self.assertEqual(bitattn.list_captures(folder), [f"{path}:/a", f"{path}:/b"])
            bitattn.save(path, {"/a": capture})
            with h5py.File(path, "a") as file:
                file["a"].attrs["layer"] = np.bytes_(b"caf\xe9")
            again = bitattn.load(path)  # the only one
            self.assertEqual(again.attributes["layer"], "caf\ufffd")
            self.assertIn("caf", json.dumps(bitattn.diagnose(again, reference=None, remedies=False, blame="none")))

    def test_a_copy_through_dlpack_is_a_copy(self):
        capture = bitattn.load(SMALL)
        copy = bitattn.Capture(*(CopiedDlpack(capture.dlpack(n)) for n in "qkv"), softmax_scale=1)
        self.assertEqual(copy.k.tobytes(), capture.k.tobytes())

    def test_save_and_load(self):
        capture = self.rebuilt(bitattn.load(PACKED))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x.h5")
            bitattn.save(path, {"/step_3/a": capture, "/step_3/b": capture})
            self.assertEqual(bitattn.list_captures(path), [f"{path}:/step_3/a", f"{path}:/step_3/b"])
            again = bitattn.load(f"{path}:/step_3/b")
            self.assertTrue(bitattn.compare_recorded(capture, again)["equal"])
            self.assertEqual((again.attributes["step"], again.cu_seqlens_q), (3, capture.cu_seqlens_q))
            self.assertTrue(program("verify", path)["verified"])
            with self.assertRaises(InputError):
                bitattn.save(os.path.join(folder, "missing", "x.h5"), {"/": capture})
            self.assertEqual(os.listdir(folder), ["x.h5"])


    def test_import(self):
        capture = bitattn.load(GROUPED)
        with tempfile.TemporaryDirectory() as folder:
            np.savez(os.path.join(folder, "x.npz"), **{f"a.{n}": getattr(capture, n).transpose(0, 2, 1, 3) if n != "lse" else capture.lse for n in TENSORS})
            out = os.path.join(folder, "out.h5")
            options = {"layout": "BHSD", "softmax_scale": capture.softmax_scale, "attributes": {"step": 4}}
            self.assertEqual(bitattn.import_tensors([os.path.join(folder, "x.npz")], out, **options), ["/a"])
            again = bitattn.load(out + ":/a")
            self.assertTrue(bitattn.compare_recorded(capture, again)["equal"])
            self.assertEqual(again.attributes["step"], 4)
            with self.assertRaisesRegex(InputError, "softmax_scale is not said"):
                bitattn.import_tensors([os.path.join(folder, "x.npz")], out, layout="BHSD")


class Refusals(unittest.TestCase):
    def test_clear_errors(self):
        q = np.zeros((1, 8, 2, 64), np.uint16)
        good = {"q": q, "k": q, "v": q, "softmax_scale": 0.125}
        offsets = [0, 8]
        for change, expected in (
            ({"q": q.astype(np.float32)}, "tensor q is an array of float32, expected BF16: uint16 words"),
            ({"k": q.tolist()}, "tensor k is list, expected BF16"),
            ({"v": Dlpack(q, code=2)}, "tensor v is a Dlpack of float16, expected BF16"),
            ({"v": Dlpack(q, device=(2, 0))}, r"tensor v is on a device \(Dlpack\), expected on the host: call .cpu\(\)"),
            ({"q": q[0]}, r"tensor q has shape \[8, 2, 64\], expected \[B,S,H,D\]"),
            ({"k": q[:, :, :, :32]}, "k"),
            ({"k": np.zeros((1, 8, 3, 64), np.uint16), "v": np.zeros((1, 8, 3, 64), np.uint16)}, "heads"),
            ({"out": q[:, :4]}, r"tensor out has shape \[1, 4, 2, 64\], expected \[1, 8, 2, 64\]"),
            ({"lse": np.zeros((1, 2, 8))}, "tensor lse is an array of float64, expected float32"),
            ({"dq": q}, "tensor dout is missing, expected beside dq, dk, dv"),
            ({"softmax_scale": -1.0}, "softmax_scale"),
            ({"causal_alignment": "left"}, 'causal_alignment is "left", expected bottom-right or top-left'),
            ({"cu_seqlens_q": offsets}, "one is given, expected both or neither"),
            ({"q": q[0], "k": q[0], "v": q[0], "cu_seqlens_q": [0, 9], "cu_seqlens_k": offsets}, "cu_seqlens_q"),
            ({"q": q[0], "k": q[0], "v": q[0], "cu_seqlens_q": ["a"], "cu_seqlens_k": offsets}, "cu_seqlens_q is no list of 32-bit integers"),
            ({"attributes": {"x": [1, 2]}}, "attribute x is no number and no text"),
            ({"attributes": {"x": 2**63}}, "attribute x is beyond 64 bits"),
            ({"attributes": {"x": "a\0b"}}, "attribute x holds a character NUL"),
            ({"attributes": {"x": "\ud800"}}, "attribute x is no text that UTF-8 can hold"),
            ({"attributes": {"causal": 1}}, "attribute causal is an argument of its own"),
        ):
            with self.assertRaisesRegex(InputError, expected):
                bitattn.Capture(**good | change)
        self.assertTrue(issubclass(InputError, ValueError))
        problem = bitattn.generate("normal", seqlen_q=8)
        with self.assertRaisesRegex(InputError, "group /a is None, expected a Capture"):
            bitattn.save(os.path.join(tempfile.gettempdir(), "x.h5"), {"/a": None})
        with self.assertRaisesRegex(InputError, "NUL"):
            bitattn.save("x\0.h5", {"/a": problem})
        with self.assertRaisesRegex(InputError, "no output is recorded in both"):
            bitattn.compare_recorded(problem, problem)
        for call in (lambda: bitattn.load("missing.h5"), lambda: bitattn.verify(bitattn.load(SMALL), "fa9"), lambda: bitattn.generate("fast")):
            with self.assertRaises(InputError) as caught:
                call()
            self.assertNotIn("\n", str(caught.exception))


class Running(unittest.TestCase):
    def test_the_lock_is_released_and_progress_is_told(self):
        """Another thread counts on while the emulator runs in this one."""
        capture = bitattn.generate("late", heads_q=2, seqlen_q=1024, causal=True)
        counted, done, told = [0], threading.Event(), []

        def count():
            while not done.is_set():
                counted[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        thread.start()
        begin = counted[0]
        bitattn.diagnose(capture, reference=None, remedies=False, progress=lambda stage, share: told.append((stage, share)))
        during = counted[0] - begin
        done.set()
        thread.join()
        self.assertGreater(during, 5)
        self.assertTrue(told)
        self.assertTrue(all(0 <= share <= 1 for _, share in told))

    def test_interrupts_and_errors_of_progress_arrive(self):
        capture = bitattn.generate("late", heads_q=8, seqlen_q=2048, causal=True)

        def fail(stage, share):
            raise RuntimeError("enough")

        with self.assertRaisesRegex(RuntimeError, "enough"):
            bitattn.run(capture, "fa3", progress=fail)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with self.assertRaises(KeyboardInterrupt):
            for _ in range(100):
                bitattn.run(capture, "fa3")

    def test_the_types_name_what_there_is(self):
        with open(os.path.join(SOURCE, "python", "bitattn", "__init__.pyi"), encoding="utf-8") as file:
            tree = ast.parse(file.read())
        functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        classes = {n.name: {m.name for m in n.body if isinstance(m, ast.FunctionDef)} for n in tree.body if isinstance(n, ast.ClassDef)}
        self.assertEqual(functions | set(classes), set(bitattn.__all__))
        self.assertEqual(classes["Capture"] - {"__init__"}, {n for n in vars(bitattn.Capture) if not n.startswith("_")})
        for name in functions:
            signature = inspect.getdoc(getattr(bitattn, name)).splitlines()[0]
            node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
            expected = [a.arg for a in node.args.args + node.args.kwonlyargs]
            self.assertTrue(all(f"{a}:" in signature for a in expected), (signature, expected))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]])
