"""Records what attention was given and returned in a PyTorch run, forward and backward, without changing a bit of it.

    with bitattn.torch.record("captures", model, steps=[1000], optimizer=optimizer):
        train()

Pure Python over torch, h5py and NumPy. The page: docs/capture.md.
"""

import contextlib
from dataclasses import dataclass, field
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import signatures, statistics as figures, words
from .recorder import CaptureRefused, CaptureWarning, Cut, Recorder, Selection, attention_shapes

__all__ = ["AttentionModule", "CaptureRefused", "CaptureWarning", "Recording", "record"]

# PyTorch's fused kernels by the operator that runs them, and where each aligns a causal mask.
_FUSED = {
    "_scaled_dot_product_flash_attention": ("pytorch-flash", "bottom-right"),
    "_scaled_dot_product_efficient_attention": ("pytorch-mem-efficient", "top-left"),
    "_scaled_dot_product_cudnn_attention": ("pytorch-cudnn", "top-left"),
    "_scaled_dot_product_flash_attention_for_cpu": ("pytorch-flash-cpu", "top-left"),
}
# FlashAttention-2 and -3 as (module, names of its distribution).
_PACKAGES = (("flash_attn", ("flash_attn",)), ("flash_attn_interface", ("flash_attn_3", "fa3")))
_FUNCTIONS = tuple(f"flash_attn_{form}func" for form in ("", "varlen_", "qkvpacked_", "kvpacked_", "varlen_qkvpacked_", "varlen_kvpacked_"))
_COMPILED = (
    "attention inside torch.compile cannot be recorded: its calls are fused into compiled code, and taking them out would change the "
    "step. Record the uncompiled model (model._orig_mod, or TORCH_COMPILE_DISABLE=1)"
)


class _Watch(TorchDispatchMode):
    """Sees the operators that run inside one call: which fused kernel it was, what it was given after any cast, and its lse."""

    supports_higher_order_operators = True  # such as flex_attention, which would otherwise refuse to run under a mode

    def __init__(self):
        super().__init__()
        self.kernel = self.alignment = ""
        self.inputs = self.out = self.lse = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "overloadpacket", func).__name__
        if name in _FUSED:
            self.kernel, self.alignment = _FUSED[name]
            self.inputs = args[:3]
            self.out, self.lse = result[:2]
        elif func.namespace.startswith("flash_attn") and isinstance(result, (tuple, list)) and len(result) > 1:
            # The packages register their kernels as operators that return out, lse, …
            if isinstance(result[1], torch.Tensor) and result[1].dtype == torch.float32:
                self.lse = result[1]
        return result


class _TorchMath:
    """BF16 tensors, for bitattn.statistics: sums over a vector in float32, over vectors in float64, so that nothing is copied in a wide type."""

    @staticmethod
    def norms(x):
        return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).double()

    @staticmethod
    def token_sum(x):
        return x.sum(dim=1, dtype=torch.float32).double()

    @staticmethod
    def dot(x, y):
        return (x.float() * y).sum(-1).sum(1, dtype=torch.float64)

    @staticmethod
    def noise(x, weight=None):
        # A power of two times a BF16 number is one: exact. 2^20 keeps small gradients' squares within float32.
        half = (x.contiguous().view(torch.int16) & 0x7F80).view(torch.bfloat16) * 2.0**20
        if weight is not None:
            half = half * weight
        norms = torch.linalg.vector_norm(half, dim=-1, dtype=torch.float32)
        return norms.double().square().sum(1) * (2.0**-56 / 3)

    @staticmethod
    def largest(x):
        return x.max().double()


@dataclass
class AttentionModule:
    """How a module that is an attention call by itself is read: its first three tensor arguments are q, k, v, its result is out.

    `layout`: BSHD, BHSD or SBHD, of the arguments and the result (whose last two axes may be one). `arguments`, if given, takes the module's
    (args, kwargs) and returns the names or positions of q, k and v among them.
    """

    layout: str = "BSHD"
    softmax_scale: float = None
    causal: bool = False
    window: tuple = (-1, -1)
    softcap: float = 0.0
    causal_alignment: str = "bottom-right"
    kernel: str = ""
    arguments: object = None

    def __post_init__(self):
        if self.layout not in ("BSHD", "BHSD", "SBHD"):
            raise ValueError(f"layout is {self.layout}, expected BSHD, BHSD or SBHD")


@dataclass
class _State:
    """What a call holds between its forward and its backward."""

    layout: str = "BSHD"
    heads_v: tuple = ()
    live: dict = field(default_factory=dict)
    expected: set = field(default_factory=set)
    seen: set = field(default_factory=set)
    softcap: float = 0.0
    without_grad: bool = False
    wants_live: bool = False


def _to_bshd(x, layout):
    if layout == "BHSD" and x.dim() == 4:  # heads and columns in one axis come last
        return x.transpose(1, 2)
    if layout == "SBHD":
        return x.transpose(0, 1)
    return x


def _first(result):
    """What a call returned first, or alone."""
    return result[0] if isinstance(result, (tuple, list)) and result else result


def _misfit(given, out):
    """Why shapes are not those of an attention call, so that nothing can be said of it; "" if they are."""
    packed = given.layout == "THD"
    axes, shapes = 3 if packed else 4, []
    for name, x in (("q", given.q), ("k", given.k), ("v", given.v)):
        if x.dim() != axes or 0 in x.shape:
            return f"{name} has shape {list(x.shape)}, expected {axes} axes, none of them empty"
        shapes.append(tuple(_to_bshd(x, given.layout).shape))
    try:
        expected = attention_shapes(*shapes, packed=packed)["out"]
    except CaptureRefused as why:
        return str(why)
    if not isinstance(out, torch.Tensor):
        return f"its result is of type {type(out).__name__}, expected a tensor"
    in_one = (*expected[:-2], expected[-2] * expected[-1])
    if out.dim() < 2 or tuple(_to_bshd(out, given.layout).shape) not in (expected, in_one):
        return f"its result has shape {list(out.shape)}, expected as many batch elements, tokens and heads as q, of the columns of v"
    return ""


@functools.cache
def _version_of(module_name, *packages):
    """As the package's metadata say, or where there are none (a build on the path) as the module itself does; "": neither."""
    for package in packages:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    version = getattr(sys.modules.get(module_name), "__version__", "")
    return f"{module_name} {version}" if version else ""


@functools.cache
def _torch_version():
    text = f"torch {torch.__version__}"
    if torch.version.cuda:
        text += f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return text


def _default_rank():
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", 0))


def _is_compiled(model):
    return any(type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


def _saved_elsewhere():
    """Is what autograd saves taken away by someone (activation checkpointing)?"""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(False) is not None


def _inside_backward():
    return torch._C._current_graph_task_id() != -1


_active = None  # the recording that is under way in this process
_wrappers = {}  # what stands in for a function, by the function's id; kept for ever, as others may have kept it too


def _recorded(original, read, version):
    """A function that goes through the recording that is under way, if one is."""
    if id(original) in _wrappers:
        return _wrappers[id(original)]

    def recorded(*args, **kwargs):
        if _active is None:
            return original(*args, **kwargs)
        return _active._called(original, read, version, args, kwargs)

    functools.update_wrapper(recorded, original, updated=())
    # TorchDynamo names the function that it was told never to trace: this is how the refusal reaches the user.
    recorded.__qualname__ = "bitattn_cannot_record_inside_torch_compile__record_the_uncompiled_model"
    importlib.import_module("torch._dynamo").forbid_in_graph(recorded)  # imported late: it takes seconds
    _wrappers[id(original)] = recorded
    return recorded


class Recording:
    """Attention calls of this process are recorded from start() to stop(), or inside `with`. Made by record()."""

    def __init__(self, recorder, model=None, optimizer=None, modules=None, forward_only=False):
        self.recorder = recorder
        self._model = model
        self._optimizer = optimizer
        self._modules = {name: how or AttentionModule() for name, how in dict(modules or {}).items()}
        self._forward_only = forward_only
        self._restore = []
        self._handles = []
        self._thread = threading.local()
        self._device_facts = {}
        self._on_their_way = None  # statistics of the last step: calls and names, numbers on the host, an event
        self._any_recorded = self._any_without_grad = False
        self._step_ended = False
        self._backward_passes = 0
        self._backward_ran = False  # since the last forward

    # --- life

    def __enter__(self):
        return self.start()

    def __exit__(self, kind, error, trace):
        self._stop(may_raise=kind is None)

    def start(self):
        """Puts the hooks in place."""
        global _active
        if _active is not None:
            raise CaptureRefused("another recording is under way in this process: stop it first")
        if self._model is not None:
            if _is_compiled(self._model):
                raise CaptureRefused(_COMPILED)
            if isinstance(self._model, torch.nn.parallel.DistributedDataParallel):
                self._model = self._model.module
        try:
            if self._model is not None:
                self._name_modules()
            self._wrap_functions()
            if self._optimizer is not None:
                self._handles.append(self._optimizer.register_step_post_hook(lambda *_: self.step()))
        except BaseException:
            self._unhook()
            raise
        _active = self
        return self

    def stop(self):
        """Ends the step that is under way, takes the hooks away and says what was asked for and never came."""
        self._stop()

    def _stop(self, may_raise=True):
        self._unhook()
        self._end_step()
        self._settle()
        self.recorder.close(self._complaints(), may_raise)

    def _complaints(self):
        if self.recorder.calls_seen == 0:
            yield "no attention call was seen: " + self._why_none_was_seen()
        if self._any_without_grad and not self._any_recorded:
            yield "nothing was recorded: no attention call had a gradient (forward_only=True records such calls)"
        passes = self._backward_passes + self._backward_ran
        if self._optimizer is None and not self._step_ended and passes > 1:
            yield (
                f"{passes} backward passes ran and no step was ended, so that all their calls count as step {self.recorder.first_step}: give "
                "optimizer=, or call Recording.step() after every step"
            )

    def _why_none_was_seen(self):
        modules = self._model.named_modules() if self._model is not None else ()
        own = [name or type(module).__name__ for name, module in modules if isinstance(module, torch.nn.MultiheadAttention)]
        if own:
            return (
                f"torch.nn.MultiheadAttention ({own[0]}{f' and {len(own) - 1} more' if own[1:] else ''}) calls an attention function only with "
                "need_weights=False, and without gradients only in train()"
            )
        return (
            "it may have gone through a function that bitattn.torch does not know (name the module in modules=), or one that was kept in a "
            "closure before record() (docs/capture.md)"
        )

    def _unhook(self):
        global _active
        if _active is self:
            _active = None
        for handle in self._handles:
            handle.remove()
        for place, name, original in reversed(self._restore):
            place[name] = original
        self._handles, self._restore = [], []

    def step(self, next_step=None):
        """Ends a step: call it after the optimizer's step, unless the optimizer was given. Returns the capture file that was written, or None."""
        self._step_ended = True
        return self._end_step(next_step)

    def _end_step(self, next_step=None):
        self._settle()
        for call in self.recorder.calls:
            state, call.state = call.state, None
            if state is not None and state.without_grad and not self._forward_only:
                self.recorder.drop_call(call)
                self._any_without_grad = True
            else:
                self._any_recorded = True
        calls = self.recorder.calls
        with self._own_work(*calls):
            for device in {x.device for call in calls for x in call.sources}:
                torch.cuda.synchronize(device)
        for call in calls:
            call.sources.clear()
            with self._own_work(call):
                self._to_host(call)
        with self._own_work(*calls):
            self._send_statistics(calls)
        return self.recorder.finish_step(next_step, hold_statistics=self._on_their_way is not None)

    def _send_statistics(self, calls):
        """From a GPU they travel while the next step runs: waiting for them would cost more than making them."""
        places = [(call, name) for call in calls for name in call.statistics]
        if not places:
            return
        values = [torch.as_tensor(call.statistics[name], dtype=torch.float64) for call, name in places]
        values = torch.stack([value.to(values[0].device) for value in values])
        event = None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(values.device))
            values = host
        self._on_their_way = places, values, event
        if event is None:
            self._arrive()

    def _arrive(self):
        places, values, event = self._on_their_way
        self._on_their_way = None
        if event is not None:
            event.synchronize()
        for (call, name), value in zip(places, values.tolist()):
            call.statistics[name] = value

    def _settle(self):
        if self._on_their_way is not None:
            with self._own_work():
                self._arrive()
            self.recorder.write_held()

    @contextlib.contextmanager
    def _own_work(self, *calls):
        """The recorder's own work at these calls: whatever it throws becomes a warning, never the run's error (unless strict)."""
        try:
            yield
        except CaptureWarning:  # a program that has made warnings errors
            raise
        except Exception as error:
            self.recorder.give_up(error, *calls)

    def record_next(self, steps=1):
        """Keep the tensors of this step and the ones after it, that many in all, whatever `steps` said."""
        self.recorder.record_next(steps)

    @property
    def files(self):
        """The capture files written so far."""
        return list(self.recorder.files)

    def _to_host(self, call):
        try:
            for name, tensor in call.tensors.items():
                if isinstance(tensor, np.ndarray):
                    continue
                if name == "lse" or name.startswith("cu_"):
                    call.tensors[name] = tensor.numpy()
                elif tensor.dtype == torch.bfloat16:
                    call.tensors[name] = tensor.view(torch.int16).numpy().view(np.uint16)
                else:
                    call.tensors[name] = words.exact_words(tensor.numpy())
        except ValueError as error:
            self.recorder.refuse(call, f"{name} {error}")

    # --- hooks into the program

    def _name_modules(self):
        found = set()
        for name, module in self._model.named_modules():
            how = next((how for pattern, how in self._modules.items() if Selection(layers=pattern).wants_layer(name)), None)
            if how is not None:
                found.add(name)
                self._hook_module(name, module, how)
            elif next(module.children(), None) is not None or self.recorder.selection.patterns is not None:
                self._handles.append(module.register_forward_pre_hook(functools.partial(self._enter, name)))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        if self._modules and not found:
            raise CaptureRefused(f"no module of the model is named like {', '.join(self._modules)}")

    def _enter(self, name, *_):
        self._stack().append(name)

    def _leave(self, *_):
        if self._stack():  # not entered where the recording began inside
            self._stack().pop()

    def _stack(self):
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
            self._thread.inside = False
        return self._thread.stack

    def _layer(self):
        stack = self._stack()
        return stack[-1] or type(self._model).__name__ if stack else "attention"

    def _wrap_functions(self):
        functional = torch.nn.functional
        self._wrap(functional.scaled_dot_product_attention, signatures.scaled_dot_product_attention, _torch_version)
        for module_name, packages in _PACKAGES:
            module = sys.modules.get(module_name)
            if module is None and importlib.util.find_spec(module_name) is not None:
                try:
                    module = importlib.import_module(module_name)
                except Exception as error:  # a package that does not fit this PyTorch is no reason to stop a run
                    self.recorder.warn(f"{module_name} is installed but cannot be imported: {error}")
            for name in _FUNCTIONS:
                function = getattr(module, name, None)
                if callable(function):
                    self._wrap(function, signatures.flash_attention, functools.partial(_version_of, module_name, *packages))

    def _wrap(self, original, read, version):
        """Replaces a function wherever a module, or a module of the model, holds it under any name."""

        recorded = _recorded(original, read, version)
        places = []
        for name, module in list(sys.modules.items()):
            ours = name.startswith("bitattn") or (name.startswith("torch.") and name != "torch.nn.functional")
            if module is not None and not ours and name != "torch":
                places.append(getattr(module, "__dict__", {}))
        if self._model is not None:
            places += [vars(module) for module in self._model.modules()]
        for place in places:
            for name in [name for name, value in list(place.items()) if value is original]:
                self._restore.append((place, name, original))
                place[name] = recorded

    def _hook_module(self, name, module, how):
        def read(_function, args, kwargs):
            if how.arguments is not None:
                where = how.arguments(args, kwargs)
                q, k, v = (kwargs[w] if isinstance(w, str) else args[w] for w in where)
            else:
                tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
                if len(tensors) < 3:
                    raise CaptureRefused(f"{len(tensors)} tensors among its arguments, expected q, k and v")
                q, k, v = tensors[:3]
            scale = q.shape[-1] ** -0.5 if how.softmax_scale is None else float(how.softmax_scale)
            return signatures.CallArguments(
                q, k, v, layout=how.layout, softmax_scale=scale, causal=how.causal, window=how.window, softcap=how.softcap,
                causal_alignment=how.causal_alignment, kernel=how.kernel or type(module).__name__,
                obstacle="" if q.dim() == 4 else f"q has shape {list(q.shape)}, expected four axes",
            )  # fmt: skip

        forward = module.forward

        def recorded(*args, **kwargs):
            return self._called(forward, read, _torch_version, args, kwargs, layer=name)

        had = "forward" in vars(module)
        vars(module)["forward"] = recorded

        class Handle:
            @staticmethod
            def remove():
                if had:
                    vars(module)["forward"] = forward
                else:
                    del vars(module)["forward"]

        self._handles.append(Handle)

    # --- one call

    def _called(self, original, read, version, args, kwargs, layer=None):
        self._stack()
        if self._thread.inside or self.recorder.stopped:
            return original(*args, **kwargs)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            with self._own_work():
                raise CaptureRefused("attention inside a CUDA graph cannot be recorded: nothing may be copied to the host while it is captured")
            return original(*args, **kwargs)
        layer = layer or self._layer()
        self._thread.inside = True
        try:
            if _inside_backward():
                return self._recomputed(layer, original, read, version, args, kwargs)
            self._backward_passes += self._backward_ran
            self._backward_ran = False
            call = None
            with self._own_work():
                call = self.recorder.open_call(layer)
            if call is None:
                return original(*args, **kwargs)
            call.state = _State()
            if not torch.is_grad_enabled() and not self._forward_only:
                # Validation; or the first pass of a reentrant checkpoint, whose second pass takes this call over.
                call.state.without_grad = True
                return original(*args, **kwargs)
            return self._watched(call, original, read, version, args, kwargs)
        finally:
            self._thread.inside = False

    def _recomputed(self, layer, original, read, version, args, kwargs):
        """A forward that activation checkpointing runs a second time, inside the backward."""
        for call in self.recorder.open_calls(layer):
            if call.state is None:
                continue
            if call.state.without_grad and torch.is_grad_enabled():
                call.state = _State()
                return self._watched(call, original, read, version, args, kwargs)
            if call.state.wants_live:
                call.state.wants_live = False
                state, out = call.state, None
                with _Watch() as watch:
                    try:
                        result = original(*args, **kwargs)
                        out = _first(result)
                        return result
                    finally:
                        with self._own_work(call), torch.no_grad(), _disable_current_modes():
                            given = read(original, args, kwargs)
                            # A checkpoint stops its second forward, by an exception, as soon as it has what the backward needs.
                            if out is None and watch.out is not None:
                                out = watch.out[..., : given.v.shape[-1]]
                            if out is not None:
                                state.live |= self._inputs(given, watch) | {"out": self._out(state, out)}
        return original(*args, **kwargs)

    def _watched(self, call, original, read, version, args, kwargs):
        try:
            given = read(original, args, kwargs)
        except Exception as why:
            # The function itself will say what is wrong with its arguments.
            self.recorder.refuse(call, str(why))
            return original(*args, **kwargs)
        views = {}
        with self._own_work(call):
            views, args, kwargs = self._through_views(given, args, kwargs)
        with _Watch() as watch:
            result = original(*args, **kwargs)
        with self._own_work(call), torch.no_grad(), _disable_current_modes():
            if call.state is not None:
                self._keep_forward(call, given, version, watch, result, views)
        return result

    @staticmethod
    def _through_views(given, args, kwargs):
        """Views of q, k and v that nothing else uses, so that their gradients are those of this call alone, and the arguments with them."""
        views, sources = {}, given.sources()
        if torch.is_grad_enabled():
            # Made in the order v, k, q: autograd runs what was made last first, so where one tensor is q, k and v at once their gradients are
            # added in the order of an unwatched step.
            with _disable_current_modes():
                for name, tensor in reversed(sources.items()):
                    if tensor.requires_grad:
                        views[name] = tensor.view_as(tensor)
        replaced = {id(sources[name]): [] for name in views}
        for name in sources:
            if name in views:
                replaced[id(sources[name])].append(views[name])

        def take(x):
            # q, k and v come in this order among the arguments, by position and by name.
            waiting = replaced.get(id(x))
            return waiting.pop(0) if waiting else x

        args = tuple(take(x) for x in args)
        return views, args, {name: take(kwargs[name]) for name in sorted(kwargs, key=lambda name: "qkv".find(name[0]))}

    def _inputs(self, given, watch):
        """q, k, v as the kernel had them: after autocast, before any padding."""
        found = {}
        for at, name in enumerate("qkv"):
            tensor = getattr(given, name).detach()
            seen = watch.inputs[at].detach() if watch.inputs is not None else None
            if seen is not None and seen.shape[:-1] == tensor.shape[:-1]:
                tensor = seen[..., : tensor.shape[-1]]
            elif torch.is_autocast_enabled(tensor.device.type) and tensor.is_floating_point():
                tensor = tensor.to(torch.get_autocast_dtype(tensor.device.type))
            found[name] = _to_bshd(tensor, given.layout)
        return found

    @staticmethod
    def _out(state, out):
        out = _to_bshd(out.detach(), state.layout)
        return out.reshape(*out.shape[:-1], *state.heads_v) if state.heads_v else out

    def _keep_forward(self, call, given, version, watch, result, views):
        state = call.state
        state.layout, state.softcap = given.layout, given.softcap
        out = _first(result)
        misfit = _misfit(given, out)
        if misfit:
            given.obstacle = given.obstacle or misfit
            self._describe(call, given, version, watch)
            if call.wants_tensors:
                self.recorder.refuse(call, given.obstacle)
            call.obstacle = given.obstacle
            return
        live = self._inputs(given, watch)
        if out.dim() == len(given.q.shape) - 1:
            state.heads_v = (live["q"].shape[-2], live["v"].shape[-1])
        live["out"] = self._out(state, out)
        not_bf16 = [name for name, x in live.items() if x.dtype != torch.bfloat16]
        if not_bf16:
            given.obstacle = f"{not_bf16[0]} is {live[not_bf16[0]].dtype}, expected bfloat16"
        self._describe(call, given, version, watch)
        lse = self._lse(given, watch, result, live)
        if given.obstacle:
            if call.wants_tensors:
                self.recorder.refuse(call, given.obstacle)
            call.obstacle = given.obstacle
            if not_bf16:
                return
        if call.wants_tensors and not call.obstacle:
            try:
                self._keep_inputs(call, given, live, lse)
            except CaptureRefused as why:
                self.recorder.refuse(call, str(why))
        if call.wants_statistics:
            four = {name: self._four_axes(x) for name, x in live.items()}
            call.statistics |= figures.forward_statistics(_TorchMath, **four, lse=lse, softmax_scale=given.softmax_scale)
        if not views or not isinstance(out, torch.Tensor) or not out.requires_grad:
            return
        state.expected = set("".join(views))
        if call.wants_statistics:
            # Under activation checkpointing what the call was given is made again before its gradients: holding on to it would undo the saving.
            if _saved_elsewhere():
                state.wants_live = True
            else:
                state.live = live
        out.register_hook(functools.partial(self._gradient, call, "dout"))
        for name, view in views.items():
            view.register_hook(functools.partial(self._gradients, call, functools.partial(given.parts, name)))

    @staticmethod
    def _four_axes(x):
        return x if x.dim() == 4 else x.unsqueeze(0)

    def _describe(self, call, given, version, watch):
        device = given.q.device
        if device not in self._device_facts:
            facts = {"device": "CPU"}
            if device.type == "cuda":
                properties = torch.cuda.get_device_properties(device)
                facts = {"device": properties.name, "num_sm": properties.multi_processor_count}
            self._device_facts[device] = facts
        alignment = given.causal_alignment
        if watch.alignment:
            alignment = watch.alignment
        own_flag = given.kernel.startswith("flash-attention")
        call.attributes |= {
            "kernel": watch.kernel or given.kernel or "pytorch-math",
            "kernel_version": version(),
            "softmax_scale": given.softmax_scale,
            "causal": int(given.causal),
            "window_left": given.window[0],
            "window_right": given.window[1],
            "softcap": given.softcap,
            "deterministic": int(given.deterministic if own_flag else torch.are_deterministic_algorithms_enabled()),
            "causal_alignment": alignment,
        }
        call.attributes |= self._device_facts[device] | given.attributes

    @staticmethod
    def _lse(given, watch, result, live):
        """[B,H,S] or [H,total] float32, without the padding that some kernels leave; None where it is not to be had."""
        lse = watch.lse
        if lse is None and isinstance(result, (tuple, list)) and len(result) > 1:
            lse = result[1]
        if not isinstance(lse, torch.Tensor) or lse.dtype != torch.float32:
            return None
        tokens, heads = live["q"].shape[-3], live["q"].shape[-2]
        leading = () if given.layout == "THD" else (live["q"].shape[0],)
        lse = lse.detach()
        if lse.dim() == len(leading) + 3 and lse.shape[-1] == 1:
            lse = lse[..., 0]
        lse = lse[..., :tokens]
        return lse if lse.shape == (*leading, heads, tokens) else None

    def _keep_inputs(self, call, given, live, lse):
        offsets = {}
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if getattr(given, name) is not None:
                offsets[name] = getattr(given, name).detach().to("cpu", torch.int32).numpy()
        batch = len(offsets["cu_seqlens_q"]) - 1 if offsets else live["q"].shape[0]
        call.cut = Cut.of(self.recorder.selection, batch, live["q"].shape[-2], live["k"].shape[-2], **offsets)
        for name, tensor in live.items():
            self._keep(call, name, tensor)
        if lse is not None:
            self._keep(call, "lse", lse)
        if offsets:
            call.tensors |= {name: np.array(getattr(call.cut, name), np.int32) for name in offsets}

    @staticmethod
    def _keep(call, name, tensor):
        """A copy on the host; from a GPU it is on its way when this returns, and there once step() has waited for the device."""
        part = call.cut.apply(name, tensor)
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        host.copy_(part, non_blocking=True)
        call.tensors[name] = host
        if part.is_cuda and not call.sources:
            call.sources.append(part.new_empty(0))  # the device to wait for, and nothing that holds memory

    def _gradients(self, call, parts, gradient):
        with self._own_work(call):
            for name, part in parts(gradient.detach()).items():
                self._gradient(call, "d" + name, part)

    def _gradient(self, call, name, gradient):
        self._backward_ran = True
        state = call.state
        if state is None:  # the step has ended, or nothing is recorded of the call
            return
        with self._own_work(call), torch.no_grad(), _disable_current_modes():
            if name in state.seen:
                if call.wants_tensors and not call.obstacle:
                    self.recorder.refuse(call, f"{name} came twice: the backward ran more than once")
                return
            state.seen.add(name)
            gradient = gradient.detach()
            gradient = _to_bshd(gradient, state.layout)
            if name == "dout" and state.heads_v:
                gradient = gradient.reshape(*gradient.shape[:-1], *state.heads_v)
            if call.wants_tensors and not call.obstacle:
                self._keep(call, name, gradient)
            if not call.wants_statistics:
                return
            state.live[name] = gradient
            if state.expected <= {n[1:] for n in state.seen if n != "dout"}:
                self._finish_statistics(call, state)

    def _finish_statistics(self, call, state):
        live, state.live = state.live, {}
        if "out" not in live or "dout" not in live:
            return
        gradients = {name: self._four_axes(x.to(torch.bfloat16)) for name, x in live.items() if name[0] == "d"}
        inputs = {name: self._four_axes(live[name]) for name in ("q", "k", "v", "out")}
        missing = {name: None for name in ("dq", "dk", "dv") if name not in gradients}
        call.statistics |= figures.backward_statistics(_TorchMath, **inputs, **gradients, **missing, softcap=state.softcap)


def record(
    folder, model=None, *, steps=None, layers=None, heads=None, batch=None, optimizer=None, modules=None, statistics=100, forward_only=False,
    compress=0, strict=False, first_step=0, resume=False, rank=None, attributes=None,
):  # fmt: skip
    """Records the attention calls of this process into a folder, inside `with`.

    model: names the layers, and has its own references to attention functions found. steps: whose tensors are kept: None (none; see
    Recording.record_next), "all", a number, a collection, or a function of the step. layers: patterns of the shell over module names. heads:
    query heads, completed to whole groups of a KV head. batch: batch elements or packed sequences. optimizer: its step() ends a step; without it
    call Recording.step() after every step. modules: {pattern: AttentionModule(…)} for modules that are an attention call by themselves.
    statistics: a line a call in statistics_rank_*.jsonl at every step that this number divides and at steps whose tensors are kept; 1: every
    step, 0: never. forward_only: calls without gradient too (validation, generation). compress: 0 to 9, of the capture files. strict: what cannot
    be recorded raises CaptureRefused instead of a CaptureWarning. first_step: the number of the first step. resume: goes on with the recording of
    this rank that the folder holds, which is refused otherwise: statistics are appended, and a step that is recorded again replaces its file.
    attributes: written to every capture, numbers and texts by name.

    Raises ValueError where an argument is not one of these, and CaptureRefused where the folder cannot be used.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is of type {type(model).__name__}, expected a torch.nn.Module")
    if optimizer is not None and not callable(getattr(optimizer, "register_step_post_hook", None)):
        raise ValueError(f"optimizer is of type {type(optimizer).__name__}, which does not tell when its step ends: call Recording.step() instead")
    for name, given in (("modules", modules), ("attributes", attributes)):
        if given is not None and not isinstance(given, dict):
            raise ValueError(f"{name} is of type {type(given).__name__}, expected a dictionary")
    for pattern, how in (modules or {}).items():
        if not isinstance(how, (AttentionModule, type(None))):
            raise ValueError(f"modules has {how!r} for {pattern}, expected an AttentionModule")
    recorder = Recorder(
        folder, Selection(steps, layers, heads, batch, statistics), rank=_default_rank() if rank is None else rank, attributes=attributes,
        compress=compress, strict=strict, first_step=first_step, resume=resume,
    )  # fmt: skip
    return Recording(recorder, model, optimizer, modules, forward_only)
