"""The PyTorch hook on a small model: the bits of a step stay as they are, and what is recorded is what the kernels had.

    torch_test.py PROGRAM SOURCE_DIR

Runs on the CPU, and with PyTorch's fused CUDA kernels too where a GPU is found. FlashAttention-2 and -3 are stand-ins with the signatures of their
packages. PROGRAM may be "": then captures are not given to bitattn. Ends with 77 (skipped) where PyTorch 2 or h5py is not installed.
"""

import contextlib
import glob
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock
import warnings

try:
    import h5py
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.checkpoint import checkpoint
except ImportError as error:
    print(f"PyTorch 2.3 or later, h5py or NumPy is not installed ({error}): skipped")
    sys.exit(77)

PROGRAM = os.path.abspath(sys.argv[1]) if sys.argv[1] else ""
SOURCE = os.path.abspath(sys.argv[2])
sys.path.insert(0, os.path.join(SOURCE, "python"))

import bitattn.torch  # noqa: E402
from bitattn import statistics as figures, words  # noqa: E402
from bitattn.torch import AttentionModule, CaptureRefused, CaptureWarning, record  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
early_import = F.scaled_dot_product_attention  # as a program has it that imported the function before


class Attention(torch.nn.Module):
    def __init__(self, size, heads, call=None):
        super().__init__()
        self.heads = heads
        self.call = call
        self.qkv = torch.nn.Linear(size, 3 * size)
        self.out = torch.nn.Linear(size, size)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attend = self.call or F.scaled_dot_product_attention
        return self.out(attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    """A small transformer; `checkpointed`: None, "reentrant" or "other"."""

    def __init__(self, size=128, heads=2, layers=2, checkpointed=None, attention=Attention):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = torch.nn.ModuleList()
        for _ in range(layers):
            block = torch.nn.Module()
            block.norm, block.attn, block.mlp = torch.nn.LayerNorm(size), attention(size, heads), torch.nn.Linear(size, size)
            self.blocks.append(block)
        self.checkpointed = checkpointed

    @staticmethod
    def block(block, x):
        return x + block.mlp(x + block.attn(block.norm(x)))

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(self.block, block, x, use_reentrant=self.checkpointed == "reentrant")
            else:
                x = self.block(block, x)
        return x


def train(model, optimizer, device, steps=3, autocast=False, length=40):
    for step in range(steps):
        x = torch.randn(2, length, 128, generator=torch.Generator().manual_seed(step)).to(device)
        x = x if autocast else x.bfloat16()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(x.requires_grad_()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def built(device, autocast, **options):
    model = Model(**options).to(device)
    model = model if autocast else model.bfloat16()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def bits(model):
    return [p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def load(path, group):
    with h5py.File(path) as file:
        group = file[group]
        tensors = {n: words.read_words(d) if d.dtype == np.float32 and n != "lse" else d[...] for n, d in group.items()}
        return tensors, dict(group.attrs)


def to_torch(array, device="cpu"):
    return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)


def to_words(tensor):
    return tensor.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16)


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="bitattn_torch_")
        self.addCleanup(shutil.rmtree, self.folder)
        torch.manual_seed(0)
        caught = warnings.catch_warnings()
        caught.__enter__()
        self.addCleanup(caught.__exit__, None, None, None)
        warnings.simplefilter("error", CaptureWarning)

    def accepted(self, folder=None):
        """bitattn reads all of it: info, verify (its emulation of another kernel may differ: exit 1), diagnose."""
        if not PROGRAM:
            return
        for arguments, codes in ((("info",), (0,)), (("verify",), (0, 1)), (("diagnose", "--no-reference"), (0,))):
            done = subprocess.run([PROGRAM, *arguments, folder or self.folder, "--json", "--quiet"], capture_output=True, timeout=120)
            self.assertIn(done.returncode, codes, done.stderr.decode())
            self.assertEqual(done.stderr, b"")

    def lines(self, folder=None, rank=0):
        with open(os.path.join(folder or self.folder, f"statistics_rank_{rank:04d}.jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]


class Bits(Case):
    def test_a_watched_run_has_the_bits_of_an_unwatched_one(self):
        """Weights after three steps, every one of them recorded; and the figures of checkpointed runs are those of the plain one."""
        for device in DEVICES:
            for autocast in (False, True):
                figures = {}
                for checkpointed in (None, "reentrant", "other"):
                    plain, optimizer = built(device, autocast, checkpointed=checkpointed)
                    train(plain, optimizer, device, autocast=autocast)
                    watched, optimizer = built(device, autocast, checkpointed=checkpointed)
                    folder = os.path.join(self.folder, f"{device}_{autocast}_{checkpointed}")
                    with record(folder, watched, steps="all", optimizer=optimizer) as recording:
                        train(watched, optimizer, device, autocast=autocast)
                    self.assertEqual(bits(plain), bits(watched), (device, autocast, checkpointed))
                    self.assertEqual(len(recording.files), 3)
                    figures[checkpointed] = self.lines(folder)
                    found = [load(f, f"step_00000{s}/blocks.{b}.attn")[0] for s, f in enumerate(recording.files) for b in (0, 1)]
                    self.assertTrue(all({"q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv"} <= set(x) for x in found))
                self.assertEqual(len(figures[None]), 6)
                self.assertIn("dk_sum", figures[None][0])
                self.assertEqual(figures[None], figures["reentrant"])
                self.assertEqual(figures[None], figures["other"])
        self.accepted()

    def test_one_tensor_as_q_k_and_v(self):
        """Its three gradients are added in the order of an unwatched step, be it a leaf or not."""
        for device in DEVICES:
            for leaf in (True, False):
                found = []
                for watched in (False, True):
                    x = torch.randn(1, 2, 65, 64, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16).requires_grad_()
                    y = x if leaf else x * 1.5

                    def step():
                        (F.scaled_dot_product_attention(y, y, y) * y.detach().cos()).sum().backward()

                    if watched:
                        with record(os.path.join(self.folder, f"{device}_{leaf}"), steps="all"):
                            step()
                    else:
                        step()
                    found.append(to_words(x.grad).tobytes())
                self.assertEqual(found[0], found[1], (device, leaf))

    def test_what_is_recorded_is_what_the_kernel_returned(self):
        """The gradients recorded are those of the kernel's own backward, called again on what was recorded."""
        model, optimizer = built("cpu", True)
        with record(self.folder, model, steps=[0], optimizer=optimizer) as recording:
            train(model, optimizer, "cpu", 1, autocast=True)
        t, attributes = load(recording.files[0], "step_000000/blocks.1.attn")
        q, k, v, out, dout = (to_torch(t[n]).transpose(1, 2) for n in ("q", "k", "v", "out", "dout"))
        again, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=float(attributes["softmax_scale"]))
        self.assertEqual(to_words(again.transpose(1, 2)).tobytes(), t["out"].tobytes())
        self.assertEqual(lse.contiguous().numpy().tobytes(), t["lse"].tobytes())
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, torch.from_numpy(t["lse"]), 0.0, True, scale=float(attributes["softmax_scale"])
        )
        for name, gradient in zip(("dq", "dk", "dv"), gradients):
            self.assertEqual(to_words(gradient.transpose(1, 2)).tobytes(), t[name].tobytes(), name)
        expected = {"kernel": "pytorch-flash-cpu", "layer": "blocks.1.attn", "step": 0, "rank": 0, "causal": 1, "causal_alignment": "top-left"}
        self.assertEqual({name: attributes[name] for name in expected}, expected)
        self.assertIn(torch.__version__, attributes["kernel_version"])

    @unittest.skipUnless("cuda" in DEVICES, "no GPU")
    def test_every_fused_kernel_of_a_gpu(self):
        kernels = {"FLASH_ATTENTION": "pytorch-flash", "CUDNN_ATTENTION": "pytorch-cudnn", "EFFICIENT_ATTENTION": "pytorch-mem-efficient"}
        for backend, kernel in kernels.items():
            found = []
            for watched in (False, True):
                model, optimizer = built("cuda", False)
                folder = os.path.join(self.folder, backend)
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    if watched:
                        with record(folder, model, steps="all", optimizer=optimizer) as recording:
                            train(model, optimizer, "cuda", length=300)
                    else:
                        train(model, optimizer, "cuda", length=300)
                found.append(bits(model))
            t, attributes = load(recording.files[2], "step_000002/blocks.0.attn")
            self.assertEqual(attributes["kernel"], kernel)
            self.assertEqual(attributes["causal_alignment"], "bottom-right" if kernel == "pytorch-flash" else "top-left")
            self.assertEqual(t["lse"].shape, (2, 2, 300))
            # cuDNN's dq is added in any order; the other two give the same bits each time here.
            if kernel != "pytorch-cudnn":
                self.assertEqual(found[0], found[1], kernel)

    def test_math_and_grouped_heads(self):
        """Without a fused kernel dk and dv are PyTorch's sums over a group."""
        q = torch.randn(1, 4, 30, 64, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.randn(1, 2, 30, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        with sdpa_kernel(SDPBackend.MATH), record(self.folder, steps="all") as recording:
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True).float().sum().backward()
        t, attributes = load(recording.files[0], "step_000000/attention")
        self.assertEqual((attributes["kernel"], t["k"].shape, "lse" in t), ("pytorch-math", (1, 30, 2, 64), False))
        self.assertEqual(to_words(k.grad.transpose(1, 2)).tobytes(), t["dk"].tobytes())
        self.accepted()


class Choices(Case):
    def test_steps_layers_heads_batch(self):
        for name, choice in {"all": {}, "some": {"layers": "*.1.attn", "heads": [1], "batch": [1]}}.items():
            model, optimizer = built("cpu", False)
            with record(os.path.join(self.folder, name), model, steps=[1], optimizer=optimizer, statistics=1, **choice):
                train(model, optimizer, "cpu")
        whole, _ = load(os.path.join(self.folder, "all", "step_000001_rank_0000.h5"), "step_000001/blocks.1.attn")
        part, attributes = load(os.path.join(self.folder, "some", "step_000001_rank_0000.h5"), "step_000001/blocks.1.attn")
        for name, x in whole.items():
            expected = x[1:, 1:] if name == "lse" else x[1:, :, 1:]
            self.assertEqual(part[name].tobytes(), expected.tobytes(), name)
        self.assertEqual(attributes["heads_kept"], "3")
        with h5py.File(os.path.join(self.folder, "some", "step_000001_rank_0000.h5")) as file:
            self.assertEqual(list(file["step_000001"]), ["blocks.1.attn"])
        self.assertEqual(len(self.lines(os.path.join(self.folder, "some"))), 3)
        self.accepted()

    def test_on_demand_and_by_hand(self):
        model, optimizer = built("cpu", False)
        with record(self.folder, model, first_step=100, statistics=1) as recording:
            train(model, optimizer, "cpu", 1)
            self.assertIsNone(recording.step())
            recording.record_next()
            train(model, optimizer, "cpu", 1)
            self.assertEqual(os.path.basename(recording.step()), "step_000101_rank_0000.h5")
            train(model, optimizer, "cpu", 1)
        self.assertEqual([x["step"] for x in self.lines()], [100, 100, 101, 101, 102, 102])
        self.assertEqual(len(recording.files), 1)
        with self.assertRaisesRegex(CaptureRefused, "holds a recording already"):
            record(self.folder, model, first_step=103)
        with record(self.folder, model, first_step=103, statistics=1, resume=True):
            train(model, optimizer, "cpu", 1)
        self.assertEqual([x["step"] for x in self.lines()], [100, 100, 101, 101, 102, 102, 103, 103])

    def test_chosen_steps_that_never_come_are_said(self):
        """As when a resumed run is recorded without first_step; where one of them came, nothing is said."""
        for steps, first_step, seen in (
            (range(24000, 24010), 0, "steps 0 to 1 were seen"), ([24000], 23000, "steps 23000 to 23001 were seen"),
            (lambda step: step > 1, 0, "steps 0 to 1 were seen"), (range(24000, 24010), 24000, ""),
        ):  # fmt: skip
            for strict in (False, True):
                model, optimizer = built("cpu", False, layers=1)
                folder = os.path.join(self.folder, f"{first_step}_{seen}_{strict}_{callable(steps)}")
                expected = contextlib.nullcontext()
                if seen:
                    text = f"none of the chosen steps was reached: {seen} .first_step="
                    expected = self.assertRaisesRegex(CaptureRefused, text) if strict else self.assertWarnsRegex(CaptureWarning, text)
                with expected, record(folder, model, steps=steps, first_step=first_step, optimizer=optimizer, strict=strict):
                    train(model, optimizer, "cpu", 2)
        with self.assertRaises(KeyError), self.assertWarnsRegex(CaptureWarning, "step 0 was seen"):
            with record(os.path.join(self.folder, "error"), steps=[5], strict=True):
                F.scaled_dot_product_attention(*(torch.randn(1, 1, 8, 8, dtype=torch.bfloat16) for _ in range(3)))
                raise KeyError("the run's own error stays what it is")

    def test_validation_is_left_out_unless_asked_for(self):
        for forward_only in (False, True):
            model, optimizer = built("cpu", False)
            folder = os.path.join(self.folder, str(forward_only))
            with record(folder, model, steps="all", forward_only=forward_only) as recording:
                with torch.no_grad():
                    model(torch.randn(2, 40, 128, dtype=torch.bfloat16))
                train(model, optimizer, "cpu", 1)
            with h5py.File(recording.files[0]) as file:
                groups = sorted(file["step_000000"])
            self.assertEqual(groups, sorted(f"blocks.{b}.attn{end}" for b in (0, 1) for end in (("", ".1") if forward_only else ("",))))
        self.accepted()

    def test_accumulated_micro_batches(self):
        model, optimizer = built("cpu", False, layers=1, checkpointed="reentrant")
        with record(self.folder, model, steps="all") as recording:
            for _ in range(2):
                model(torch.randn(1, 20, 128, dtype=torch.bfloat16).requires_grad_()).float().sum().backward()
            recording.step()
        with h5py.File(recording.files[0]) as file:
            self.assertEqual(sorted(file["step_000000"]), ["blocks.0.attn", "blocks.0.attn.1"])
            self.assertTrue(all("dq" in group for group in file["step_000000"].values()))

    def test_patterns_that_meet_no_layer_are_said(self):
        model, optimizer = built("cpu", False, layers=5)
        text = r"no layer is named like \*\.attnn, x: attention was seen in blocks\.0\.attn, blocks\.1\.attn, blocks\.2\.attn and 2 more layers$"
        with self.assertWarnsRegex(CaptureWarning, text):
            with record(self.folder, model, layers=["*.attnn", "*.3.*", "x"], statistics=1, optimizer=optimizer):
                train(model, optimizer, "cpu", 1)
        self.assertEqual([x["layer"] for x in self.lines()], ["blocks.3.attn"])

    def test_steps_that_were_never_ended_are_said(self):
        """Three backward passes without a step: said at the end. A checkpoint's second forward is no pass of its own; one pass alone is a step."""
        for checkpointed in (None, "reentrant", "other"):
            for passes in (1, 3):
                model, optimizer = built("cpu", False, checkpointed=checkpointed)
                expected = contextlib.nullcontext()
                if passes == 3:
                    text = "^3 backward passes ran and no step was ended, so that all their calls count as step 7"
                    expected = self.assertWarnsRegex(CaptureWarning, text)
                with expected, record(os.path.join(self.folder, f"{checkpointed}_{passes}"), model, statistics=1, first_step=7):
                    train(model, optimizer, "cpu", passes)

    def test_statistics_are_those_of_numpy_and_come_as_often_as_asked_for(self):
        for device in DEVICES:
            folder = os.path.join(self.folder, device)
            model, optimizer = built(device, True)
            with record(folder, model, steps=[3], optimizer=optimizer, statistics=2) as recording:
                train(model, optimizer, device, 6, autocast=True)
            lines = self.lines(folder)
            self.assertEqual([x["step"] for x in lines], [0, 0, 2, 2, 3, 3, 4, 4])
            t, attributes = load(recording.files[0], "step_000003/blocks.1.attn")
            scale, math = attributes["softmax_scale"], figures.NumpyMath
            expected = figures.forward_statistics(math, *(t[n] for n in ("q", "k", "v", "out", "lse")), softmax_scale=scale)
            expected |= figures.backward_statistics(math, *(t[n] for n in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")))
            for name, value in expected.items():
                self.assertAlmostEqual(lines[5][name] / value, 1, delta=1e-4, msg=name)
        with record(os.path.join(self.folder, "none"), statistics=0) as recording:
            F.scaled_dot_product_attention(*(torch.randn(1, 1, 8, 8, dtype=torch.bfloat16) for _ in range(3)))
        self.assertEqual(os.listdir(recording.recorder.folder), [])


class Refusals(Case):
    def test_what_a_capture_cannot_hold(self):
        q = torch.randn(1, 2, 30, 64, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.ones(30, 30, dtype=torch.bool)
        for why, arguments, options in (
            ("attn_mask is a tensor", (q, q, q, mask), {}),
            ("dropout_p is 0.5", (q, q, q), {"dropout_p": 0.5}),
            ("q is torch.float32", (q.float(), q.float(), q.float()), {}),
            ("query has shape", (q[0], q[0], q[0]), {}),
        ):
            folder = os.path.join(self.folder, why.split()[0])
            with self.assertWarnsRegex(CaptureWarning, why):
                with record(folder, steps="all") as recording:
                    F.scaled_dot_product_attention(*arguments, **options).float().sum().backward()
            self.assertEqual(recording.files, [])
            self.assertIn(why, self.lines(folder)[0]["not_recorded"])
            with self.assertRaisesRegex(CaptureRefused, why), record(f"{folder}_strict", steps="all", strict=True):
                F.scaled_dot_product_attention(*arguments, **options)
            self.assertIs(F.scaled_dot_product_attention, early_import)

    def test_a_warning_a_reason_at_the_line_of_record(self):
        """Not one for every layer and step, and none that points into the package."""
        model, optimizer = built("cpu", False, layers=4)
        model.float()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            line = sys._getframe().f_lineno + 1
            with record(self.folder, model, steps="all", optimizer=optimizer):
                for _ in range(2):
                    model(torch.randn(1, 8, 128).requires_grad_()).sum().backward()
                    optimizer.step()
        self.assertEqual([str(w.message) for w in caught],
                         ["blocks.0.attn and 3 more layers: tensors are not recorded: q is torch.float32, expected bfloat16"])  # fmt: skip
        self.assertEqual((caught[0].filename, caught[0].lineno, caught[0].category), (__file__, line, CaptureWarning))

    def test_compiled_models_are_refused(self):
        model, _ = built("cpu", False)
        for compiled in (torch.compile(model, backend="eager"), self.compiled_in_place(model)):
            with self.assertRaisesRegex(CaptureRefused, "torch.compile cannot be recorded.*uncompiled model"):
                record(self.folder, compiled).start()

        def attention(x):
            return F.scaled_dot_product_attention(x, x, x) + 1

        x = torch.randn(1, 2, 30, 64, dtype=torch.bfloat16)
        for before in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(attention, backend="eager")
            if before:
                compiled(x)
            with record(self.folder) as recording, self.assertRaisesRegex(Exception, "cannot_record_inside_torch_compile"):
                try:
                    compiled(x)
                finally:
                    recording.recorder.calls_seen = 1
        torch._dynamo.reset()
        self.assertEqual(compiled(x).shape, x.shape)

    @staticmethod
    def compiled_in_place(model):
        model.blocks[0].compile(backend="eager")
        return model

    def test_arguments_of_another_kind(self):
        model, _ = built("cpu", False)
        for bad, text in (
            ({"steps": [1.5]}, "a number of steps is 1.5"), ({"layers": 3}, "layers is 3"), ({"model": "blocks"}, "model is of type str"),
            ({"optimizer": model}, "optimizer is of type Model, which does not tell when its step ends: call Recording.step"),
            ({"modules": ["*.core"]}, "modules is of type list, expected a dictionary"),
            ({"modules": {"*.core": "SBHD"}}, "modules has 'SBHD' for .*.core, expected"),
            ({"attributes": "run"}, "attributes is of type str"),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, text):
                record(os.path.join(self.folder, "x"), **bad)

    def test_nothing_seen_is_said(self):
        with self.assertWarnsRegex(CaptureWarning, "no attention call was seen"):
            with record(self.folder):
                pass
        with record(self.folder) as recording:
            with self.assertRaisesRegex(CaptureRefused, "another recording"):
                record(self.folder).start()
            recording.recorder.calls_seen = 1
        model, _ = built("cpu", False)
        with self.assertRaisesRegex(CaptureRefused, r"no module of the model is named like \*.core"):
            record(self.folder, model, modules={"*.core": None}).start()
        self.assertIs(F.scaled_dot_product_attention, early_import)

    def test_multihead_attention_and_its_cure_are_named(self):
        class Encoder(torch.nn.Module):
            def __init__(self, need_weights):
                super().__init__()
                self.need_weights = need_weights
                self.layers = torch.nn.ModuleList(torch.nn.MultiheadAttention(128, 2, dtype=torch.bfloat16) for _ in range(3))

            def forward(self, x):
                for layer in self.layers:
                    x = layer(x, x, x, need_weights=self.need_weights)[0]
                return x

        x = torch.randn(10, 2, 128, dtype=torch.bfloat16)
        text = r"no attention call was seen: torch\.nn\.MultiheadAttention \(layers\.0 and 2 more\) calls .* need_weights=False"
        model = Encoder(True)
        with self.assertWarnsRegex(CaptureWarning, text), record(self.folder, model, steps="all"):
            model(x).float().sum().backward()
        with self.assertRaisesRegex(CaptureRefused, text), record(self.folder, model, steps="all", strict=True):
            model(x).float().sum().backward()
        model = Encoder(False)
        with record(self.folder, model, steps="all") as recording:
            model(x).float().sum().backward()
        self.assertIn("dq", load(recording.files[0], "step_000000/layers.2")[0])

    def test_calls_without_gradient_alone_are_said(self):
        model, _ = built("cpu", False)
        for strict in (False, True):
            text = "no attention call had a gradient .forward_only=True"
            expected = self.assertRaisesRegex(CaptureRefused, text) if strict else self.assertWarnsRegex(CaptureWarning, text)
            with expected, record(self.folder, model, steps="all", strict=strict), torch.no_grad():
                model(torch.randn(2, 40, 128, dtype=torch.bfloat16))

    def test_a_second_backward(self):
        q = torch.randn(1, 2, 30, 64, dtype=torch.bfloat16, requires_grad=True)
        with self.assertWarnsRegex(CaptureWarning, "the backward ran more than once"):
            with record(self.folder, steps="all"):
                out = F.scaled_dot_product_attention(q, q, q).float().sum()
                out.backward(retain_graph=True)
                out.backward()

    def test_an_error_in_attention_stays_what_it_was(self):
        q = torch.randn(1, 2, 30, 64)
        with record(self.folder, steps="all") as recording:
            with self.assertRaises(RuntimeError):
                F.scaled_dot_product_attention(q, q[..., :32], q)
            with self.assertRaises(TypeError):
                F.scaled_dot_product_attention(q)
            with self.assertWarnsRegex(CaptureWarning, "attention: tensors are not recorded: missing a required argument: 'key'"):
                recording.step()
        self.assertEqual(recording.files, [])

    def check_unrecorded(self, step, why, model=None, **options):
        """A step that runs as if nobody watched; its one call says in its line why nothing is recorded, and at a chosen step in a warning too."""
        for steps in (None, "all"):
            folder = tempfile.mkdtemp(dir=self.folder)
            expected = self.assertWarnsRegex(CaptureWarning, f"recorded: .*{why}") if steps else contextlib.nullcontext()
            with self.subTest(why=why, steps=steps), expected, record(folder, model, steps=steps, **options) as recording:
                step()
            self.assertEqual(recording.files, [])
            (line,) = self.lines(folder)
            self.assertRegex(line["not_recorded"], why)
            self.assertEqual(set(line), {"step", "rank", "layer", "call", "kernel", "not_recorded"})

    def test_shapes_that_are_no_attention_of_four_axes(self):
        plain = [(2, 4, 8, 64)] * 3
        for why, *shapes in (
            (r"query has shape \[24, 64\]", *[(24, 64)] * 3),
            (r"query has shape \[2, 24, 64\]", *[(2, 24, 64)] * 3),
            ("query has shape", *[(2, 2, 2, 24, 64)] * 3),
            ("query has shape", *[(1, 2, 2, 2, 24, 64)] * 3),
            ("1 query heads over 3 KV heads", (2, 1, 8, 64), (2, 3, 8, 64), (2, 3, 8, 64)),
            (r"k has shape \[1, 8, 4, 64\]", plain[0], (1, 4, 8, 64), (1, 4, 8, 64)),
            ("q has shape", (2, 4, 0, 64), *plain[1:]),
            ("k has shape", plain[0], *[(2, 4, 0, 64)] * 2),
            ("q has shape", *[(0, 4, 8, 64)] * 3),
            (r"k has shape \[8, 64\]", plain[0], *[(8, 64)] * 2),
            (r"k has shape \[4, 8, 64\]", plain[0], *[(4, 8, 64)] * 2),
        ):
            def step():
                x = [torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
                F.scaled_dot_product_attention(*x).float().sum().backward()

            self.check_unrecorded(step, why)

    def test_modules_that_are_no_attention(self):
        q = torch.randn(2, 8, 4, 64, dtype=torch.bfloat16)
        k3, k2, three = q[:, :, 0], q[0, :, 0], q[:, :, :3]
        for why, out, k in (
            ("k has shape", q, k3), ("k has shape", q, k2), ("4 query heads over 3 KV heads", q, three),
            ("its result is of type dict", {}, q), ("its result is of type NoneType", None, q), ("its result is of type tuple", (), q),
            ("its result has shape", q.mean((1, 2)), q), ("its result has shape", q.flatten(2)[..., :-1], q), ("its result has shape", q.sum(), q),
        ):  # fmt: skip
            model = torch.nn.Module()
            model.core = torch.nn.Module()
            model.core.forward = lambda q, k, v: out
            self.check_unrecorded(lambda: self.assertIs(model.core(q.requires_grad_(), k, k), out), why, model, modules={"core": AttentionModule()})

    def test_what_the_recorder_throws_is_a_warning(self):
        """Whatever it is, in forward, in backward or at the end of a step: the run goes on, and the next step is recorded."""
        q = torch.randn(1, 2, 30, 64, dtype=torch.bfloat16, requires_grad=True)
        unwatched = F.scaled_dot_product_attention(q, q, q)
        (gradient,) = torch.autograd.grad(unwatched.float().square().sum(), q)
        expected = [to_words(x).tobytes() for x in (unwatched, gradient)]
        for name in ("_describe", "_finish_statistics", "_through_views", "_to_host", "_send_statistics"):
            folder = os.path.join(self.folder, name)
            with record(folder, steps="all") as recording:
                with mock.patch.object(bitattn.torch.Recording, name, side_effect=KeyError("a fault")):
                    with self.assertWarnsRegex(CaptureWarning, "attention: not recorded: KeyError: 'a fault'"):
                        out = F.scaled_dot_product_attention(q, q, q)
                        (gradient,) = torch.autograd.grad(out.float().square().sum(), q)
                        recording.step()
                self.assertEqual([to_words(x).tobytes() for x in (out, gradient)], expected)
                F.scaled_dot_product_attention(q, q, q).float().sum().backward()
            self.assertEqual([os.path.basename(f)[:11] for f in recording.files], ["step_000001"], name)
            self.assertEqual(["not_recorded" in x for x in self.lines(folder)], [True, False])
            with record(os.path.join(folder, "strict"), steps="all", strict=True) as recording:
                with mock.patch.object(bitattn.torch.Recording, name, side_effect=KeyError("a fault")):
                    with self.assertRaisesRegex(CaptureRefused, "not recorded: KeyError: 'a fault'"):
                        F.scaled_dot_product_attention(q, q, q).float().sum().backward()
                        recording.step()
        with self.assertWarnsRegex(CaptureWarning, "not recorded: ZeroDivisionError"), record(self.folder, steps=lambda step: step / 0) as recording:
            F.scaled_dot_product_attention(q, q, q)

    def test_a_cuda_graph(self):
        q = torch.randn(1, 2, 30, 64, dtype=torch.bfloat16)
        for strict in (False, True):
            with record(os.path.join(self.folder, str(strict)), steps="all", strict=strict) as recording:
                capturing = (mock.patch.object(torch.cuda, name, return_value=True) for name in ("is_available", "is_current_stream_capturing"))
                expected = self.assertRaisesRegex(CaptureRefused, "CUDA graph") if strict else self.assertWarnsRegex(CaptureWarning, "CUDA graph")
                with next(capturing), next(capturing), expected:
                    self.assertEqual(F.scaled_dot_product_attention(q, q, q).shape, q.shape)
                recording.recorder.calls_seen = 1

    def test_a_higher_order_operator_inside_a_module(self):
        """PyTorch runs none under a mode that does not know them."""
        try:
            from torch.nn.attention.flex_attention import flex_attention
        except ImportError:
            self.skipTest("this PyTorch has no flex_attention")
        model = torch.nn.Module()
        model.core = torch.nn.Module()
        model.core.forward = lambda q, k, v: flex_attention(q, k, v)
        x = [torch.randn(1, 2, 30, 64, dtype=torch.bfloat16) for _ in range(3)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is slow without torch.compile
            with record(self.folder, model, steps="all", forward_only=True, modules={"core": AttentionModule(layout="BHSD")}) as recording:
                out = model.core(*x)
        t, _ = load(recording.files[0], "step_000000/core")
        self.assertEqual(t["out"].tobytes(), to_words(out.transpose(1, 2)).tobytes())


class _Standin(torch.autograd.Function):
    """Attention of [B,S,H,D] or packed tensors, as an autograd function like those of the flash-attention packages."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, offsets):
        out, lse = torch.empty_like(q), []
        ctx.save_for_backward(q, k, v)
        ctx.rest = scale, causal, offsets
        for a, b in zip(offsets, offsets[1:]):
            x = torch.einsum("bihd,bjhd->bhij", q[:, a:b].float(), k[:, a:b].float()) * scale
            x = x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), -torch.inf) if causal else x
            lse.append(x.logsumexp(-1))
            out[:, a:b] = torch.einsum("bhij,bjhd->bihd", x.softmax(-1), v[:, a:b].float()).bfloat16()
        return out, torch.cat(lse, -1)

    @staticmethod
    def backward(ctx, dout, _):
        # No true gradient: three sums that differ from each other are enough to see which one is recorded as what.
        q, k, v = ctx.saved_tensors
        return dout * 2 + q, dout * 3 + k, dout * 4 + v, None, None, None


def _flash(q, k, v, scale, causal, offsets=None):
    packed = q.dim() == 3
    four = [x[None] if packed else x for x in (q, k, v)]
    offsets = offsets.tolist() if packed else [0, q.shape[1]]
    out, lse = _Standin.apply(*four, q.shape[-1] ** -0.5 if scale is None else scale, causal, offsets)
    return (out[0], lse[0]) if packed else (out, lse)


def flash2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
           deterministic=False, return_attn_probs=False):  # fmt: skip
    out, lse = _flash(q, k, v, softmax_scale, causal)
    return (out, lse, None) if return_attn_probs else out


def flash2_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
                  window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
                  block_table=None):  # fmt: skip
    out, lse = _flash(q, k, v, softmax_scale, causal, cu_seqlens_q)
    return (out, lse, None) if return_attn_probs else out


def flash3(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
           attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0):  # fmt: skip
    return _flash(q, k, v, softmax_scale, causal)


def flash2_qkv(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
               return_attn_probs=False):  # fmt: skip
    return _flash(*qkv.unbind(2), softmax_scale, causal)[0]


def flash2_kv(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
              return_attn_probs=False):  # fmt: skip
    return _flash(q, *kv.unbind(2), softmax_scale, causal)[0]


def flash2_packed_qkv(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                      alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    return _flash(*qkv.unbind(1), softmax_scale, causal, cu_seqlens)[0]


def flash2_packed_kv(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    return _flash(q, *kv.unbind(1), softmax_scale, causal, cu_seqlens_q)[0]


def flash3_qkv(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
               softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0):  # fmt: skip
    heads = (qkv.shape[2] - num_heads_q) // 2 if num_heads_q else 0
    parts = qkv.split([num_heads_q, heads, heads], 2) if num_heads_q else qkv.unbind(2)
    return _flash(*parts, softmax_scale, causal)[0]


class FlashAttention(Case):
    """Stand-ins of the packages' signatures, found where programs keep them."""

    def setUp(self):
        super().setUp()
        # As where the packages were built and put on the path, also if they are installed here.
        none = mock.patch("importlib.metadata.version", side_effect=importlib.metadata.PackageNotFoundError)
        none.start()
        self.addCleanup(none.stop)
        bitattn.torch._version_of.cache_clear()
        self.addCleanup(bitattn.torch._version_of.cache_clear)
        for name, functions in (
            (
                "flash_attn",
                {
                    "flash_attn_func": flash2, "flash_attn_varlen_func": flash2_packed, "flash_attn_qkvpacked_func": flash2_qkv,
                    "flash_attn_kvpacked_func": flash2_kv, "flash_attn_varlen_qkvpacked_func": flash2_packed_qkv,
                    "flash_attn_varlen_kvpacked_func": flash2_packed_kv,
                },
            ),
            ("flash_attn_interface", {"flash_attn_func": flash3, "flash_attn_qkvpacked_func": flash3_qkv}),
        ):
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            vars(module).update(functions)
            if name == "flash_attn":
                module.__version__ = "2.8.3.stand-in"
            sys.modules[name] = module
            self.addCleanup(sys.modules.pop, name)

    def inputs(self, *shape):
        return [torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def check(self, group, q, k, v, kernel):
        t, attributes = load(os.path.join(self.folder, "step_000000_rank_0000.h5"), f"step_000000/{group}")
        self.assertEqual(attributes["kernel"], kernel)
        for name, x in (("q", q), ("k", k), ("v", v)):
            self.assertEqual(t[name].tobytes(), to_words(x).tobytes(), (group, name))
            self.assertEqual(t["d" + name].tobytes(), to_words(x.grad).tobytes(), (group, "d" + name))
        return t, attributes

    def test_functions_under_any_name(self):
        kept = types.ModuleType("a_program")
        kept.attention = flash2
        sys.modules["a_program"] = kept
        self.addCleanup(sys.modules.pop, "a_program")
        model = torch.nn.Module()
        model.kernel = flash3
        calls = []
        with record(self.folder, model, steps="all", attributes={"run": "stand-in"}) as recording:
            for place in ("package", "program", "model"):
                x = self.inputs(2, 24, 3, 64)
                if place == "package":
                    result = sys.modules["flash_attn"].flash_attn_func(*x, causal=True)
                elif place == "program":
                    result = kept.attention(v=x[2], k=x[1], q=x[0], return_attn_probs=True)
                else:
                    result = model.kernel(*x, causal=True)
                out = result[0] if isinstance(result, tuple) else result
                (out.float() ** 2).sum().backward()
                calls.append((x, out))
            recording.step()
        for (x, out), name, kernel, with_lse in zip(
            calls, ("attention", "attention.1", "attention.2"), ("flash-attention-2", "flash-attention-2", "flash-attention-3"), (False, True, True)
        ):
            t, attributes = self.check(name, *x, kernel)
            self.assertEqual(t["out"].tobytes(), to_words(out).tobytes())
            self.assertEqual("lse" in t, with_lse)
            self.assertEqual(attributes["kernel_version"], "flash_attn 2.8.3.stand-in" if kernel == "flash-attention-2" else "")
            self.assertEqual((attributes["causal"], attributes["run"]), (int(name != "attention.1"), "stand-in"))
        self.assertIs(kept.attention, flash2)
        self.assertIs(model.kernel, flash3)
        self.assertIs(sys.modules["flash_attn"].flash_attn_func, flash2)
        self.accepted()

    def test_packed_sequences(self):
        for batch in (None, [1]):
            x = self.inputs(40, 2, 64)
            offsets = torch.tensor([0, 10, 40], dtype=torch.int32)
            with record(self.folder, steps="all", batch=batch, resume=batch is not None):
                out = sys.modules["flash_attn"].flash_attn_varlen_func(*x, offsets, offsets, 30, 30, causal=True, return_attn_probs=True)[0]
                out.float().sum().backward()
            if batch is None:
                t, attributes = self.check("attention", *x, "flash-attention-2")
                self.assertEqual((attributes["layout"], t["lse"].shape, t["cu_seqlens_k"].tolist()), ("THD", (2, 40), [0, 10, 40]))
            else:
                t, attributes = load(os.path.join(self.folder, "step_000000_rank_0000.h5"), "step_000000/attention")
                self.assertEqual(t["dk"].tobytes(), to_words(x[1].grad[10:]).tobytes())
                self.assertEqual((t["cu_seqlens_q"].tolist(), t["lse"].shape, attributes["launch_batch"]), ([0, 30], (2, 30), 2))
            self.accepted()

    def test_q_k_and_v_in_one_tensor(self):
        """What a packed argument holds is recorded as q, k and v, its gradient as dq, dk and dv, and the gradient has the bits of an unwatched step."""
        offsets = torch.tensor([0, 10, 40], dtype=torch.int32)
        cases = [("flash_attn", f"flash_attn_{name}packed_func", (2, 24), (), n, {}) for name, n in (("qkv", 3), ("kv", 2))]
        cases += [("flash_attn", "flash_attn_varlen_qkvpacked_func", (40,), (offsets, 30), 3, {})]
        cases += [("flash_attn", "flash_attn_varlen_kvpacked_func", (40,), (offsets, offsets, 30, 30), 2, {})]
        cases += [("flash_attn_interface", "flash_attn_qkvpacked_func", (2, 24), (), 3, {})]
        cases += [("flash_attn_interface", "flash_attn_qkvpacked_func", (2, 24), (), 6, {"num_heads_q": 2})]
        for module, function, tokens, rest, parts, options in cases:
            with self.subTest(function=f"{module}.{function}", **options):
                in_a_row = bool(options)
                shape = (*tokens, parts, 64) if in_a_row else (*tokens, parts, 2, 64)
                packed = torch.randn(*shape, dtype=torch.bfloat16)
                given = {"qkv" if parts != 2 else "kv": packed}
                if parts == 2:
                    given = {"q": torch.randn(*tokens, 2, 64, dtype=torch.bfloat16)} | given
                gradients = []
                for watched in (False, True):
                    x = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
                    with record(self.folder, steps="all", resume=True) if watched else contextlib.nullcontext():
                        out = getattr(sys.modules[module], function)(*x.values(), *rest, causal=True, **options)
                        out.float().square().sum().backward()
                    gradients.append(x)
                for name, tensor in gradients[0].items():
                    self.assertTrue(torch.equal(tensor.grad.view(torch.int16), gradients[1][name].grad.view(torch.int16)))
                t, attributes = load(os.path.join(self.folder, "step_000000_rank_0000.h5"), "step_000000/attention")
                self.assertEqual(attributes["kernel"], "flash-attention-3" if module == "flash_attn_interface" else "flash-attention-2")
                self.assertEqual(attributes["causal"], 1)
                for name, tensor in gradients[1].items():
                    split = (lambda x: x.split(2, -2)) if in_a_row else (lambda x: x.unbind(-3)) if len(name) > 1 else (lambda x: [x])
                    for part, value, gradient in zip(name, split(tensor), split(tensor.grad)):
                        self.assertEqual(t[part].tobytes(), to_words(value).tobytes(), part)
                        self.assertEqual(t["d" + part].tobytes(), to_words(gradient).tobytes(), part)
                self.assertEqual("cu_seqlens_q" in t, bool(rest))
                self.accepted()

    def test_an_error_of_the_function_stays_what_it_was(self):
        with self.assertWarns(CaptureWarning), record(self.folder, steps="all"):
            with self.assertRaisesRegex(AttributeError, "'NoneType' object has no attribute 'unbind'"):  # the stand-in's own
                sys.modules["flash_attn"].flash_attn_qkvpacked_func(None)

    def test_an_operator_gives_its_lse(self):
        """Newer packages register their kernels as operators; the lse is taken from there, though the function does not return it."""
        library = torch.library.Library("flash_attn_stand_in", "DEF")
        library.define("forward(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)")
        library.impl("forward", lambda q, k, v, scale: _flash(q, k, v, scale, False), "CompositeExplicitAutograd")

        def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
            return torch.ops.flash_attn_stand_in.forward(q, k, v, softmax_scale)[0]

        sys.modules["flash_attn"].flash_attn_func = flash_attn_func
        x = [t.detach() for t in self.inputs(1, 20, 2, 64)]
        with record(self.folder, steps="all", forward_only=True):
            sys.modules["flash_attn"].flash_attn_func(*x, softmax_scale=0.5)
        t, attributes = load(os.path.join(self.folder, "step_000000_rank_0000.h5"), "step_000000/attention")
        self.assertEqual(t["lse"].tobytes(), _flash(*x, 0.5, False)[1].numpy().tobytes())
        self.assertEqual(attributes["softmax_scale"], 0.5)


class Core(torch.nn.Module):
    """An attention module of Megatron's shape: [S,B,H,D] in, [S,B,H*D] out, with a function of its own."""

    def forward(self, q, k, v):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1) @ v
        return out.permute(2, 0, 1, 3).flatten(2)


class Modules(Case):
    def test_a_module_by_its_name(self):
        results = []
        for watched in (False, True):
            model = torch.nn.Module()
            model.core_attention = Core()
            q, k, v = (torch.randn(33, 2, 4, 64, generator=torch.Generator().manual_seed(n)).bfloat16().requires_grad_() for n in range(3))
            if watched:
                how = AttentionModule(layout="SBHD", softmax_scale=0.125, kernel="my kernel")
                with record(self.folder, model, steps="all", modules={"*core_attention": how}) as recording:
                    out = model.core_attention(q, k, v)
                    (out.float() * torch.arange(256)).sum().backward()
            else:
                out = model.core_attention(q, k, v)
                (out.float() * torch.arange(256)).sum().backward()
            results.append([to_words(x).tobytes() for x in (out, q.grad, k.grad, v.grad)])
        self.assertEqual(results[0], results[1])
        t, attributes = load(recording.files[0], "step_000000/core_attention")
        self.assertEqual((t["q"].shape, t["out"].shape, attributes["kernel"]), ((2, 33, 4, 64), (2, 33, 4, 64), "my kernel"))
        self.assertEqual(t["dk"].tobytes(), to_words(k.grad.transpose(0, 1)).tobytes())
        self.assertEqual(t["out"].tobytes(), to_words(out.unflatten(-1, (4, 64)).transpose(0, 1)).tobytes())
        self.assertNotIn("forward", vars(model.core_attention))
        self.accepted()

    def test_heads_and_columns_of_a_result_in_one_axis(self):
        """They come last, in whatever order heads and tokens stood."""
        q = torch.randn(2, 8, 16, 2, dtype=torch.bfloat16)
        model = torch.nn.Module()
        model.core = torch.nn.Module()
        model.core.forward = lambda q, k, v: v.transpose(1, 2).flatten(2)
        with record(self.folder, model, steps="all", forward_only=True, modules={"core": AttentionModule(layout="BHSD")}) as recording:
            model.core(q, q, q)
        t, _ = load(recording.files[0], "step_000000/core")
        self.assertEqual(t["out"].tobytes(), to_words(q.transpose(1, 2)).tobytes())


def ddp_rank(rank, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model, _ = built("cpu", False)
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with record(folder, model, steps=[1], optimizer=optimizer, statistics=1):
        train(model, optimizer, "cpu", 2)
    torch.distributed.destroy_process_group()


class Distributed(Case):
    def test_a_file_a_rank(self):
        torch.multiprocessing.spawn(ddp_rank, (self.folder,), nprocs=2)
        found = sorted(os.path.basename(f) for f in glob.glob(os.path.join(self.folder, "*")))
        self.assertEqual(
            found, [f"statistics_rank_000{r}.jsonl" for r in (0, 1)] + [f"step_000001_rank_000{r}.h5" for r in (0, 1)]
        )
        for rank in (0, 1):
            t, attributes = load(os.path.join(self.folder, f"step_000001_rank_000{rank}.h5"), "step_000001/blocks.0.attn")
            self.assertEqual((attributes["rank"], "dq" in t), (rank, True))
            self.assertEqual([x["layer"] for x in self.lines(rank=rank)], ["blocks.0.attn", "blocks.1.attn"] * 2)
        self.accepted()


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]])
