"""The recorder's core: which calls are kept, what becomes of them, and the files they end in. NumPy and h5py only.

A framework's hook (bitattn.torch) opens a Call for every attention call that it sees, fills its tensors and its statistics while
forward and backward run, and ends the step. Files appear under their names whole, in one step of the file system.
"""

import collections.abc
from dataclasses import dataclass, field
import fnmatch
import glob
import json
import math
import operator
import os
import sys
import threading
import warnings

import h5py
import numpy as np

from . import words

#: Axes of every tensor by name: what of it belongs to a query head, and what to a query token.
QUERY_TENSORS = ("q", "out", "dout", "dq", "lse")
KEY_TENSORS = ("k", "v", "dk", "dv")
TENSORS = ("q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv")


class CaptureRefused(RuntimeError):
    """What was asked for cannot be recorded; the message says why, and what to do instead."""


class CaptureWarning(UserWarning):
    """A call, or all further calls, could not be recorded. The run goes on."""


def _whole_number(value, what, most=None):
    """As int; raises ValueError unless it is a whole number from 0 (to `most`)."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0 or (most is not None and number > most):
        raise ValueError(f"{what} is {value!r}, expected a whole number from 0{'' if most is None else f' to {most}'}")
    return number


def _whole_numbers(choice, what):
    """A number or a collection of them, as a range or a set; raises ValueError."""
    if isinstance(choice, range):
        if choice:
            _whole_number(min(choice[0], choice[-1]), f"a number of {what}")
            return choice
    elif not isinstance(choice, collections.abc.Iterable):
        return {_whole_number(choice, what)}
    elif not isinstance(choice, str):
        choice = {_whole_number(value, f"a number of {what}") for value in choice}
        if choice:
            return choice
    raise ValueError(f"{what} is {choice!r}, expected whole numbers from 0")


def _as_test(steps):
    """None: nothing, "all": everything, a number, a collection, or a function: as a function of one argument."""
    if steps is None:
        return lambda value: False
    if isinstance(steps, str):
        if steps != "all":
            raise ValueError(f'steps is "{steps}", expected "all", numbers, or a function')
        return lambda value: True
    if callable(steps):
        return steps
    return _whole_numbers(steps, "steps").__contains__


def _place_outside():
    """File, line and module of whoever called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(__package__ + "."):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "")


def _more(count, what):
    return f"{count} more {what}{'s' if count > 1 else ''}"


@dataclass
class Selection:
    """Which tensors are kept. `steps`: None, "all", a number, a collection, or a function of the step.

    `layers`: a pattern as of the shell, or several, over layer names. `heads`: query heads, completed to whole groups of a KV head;
    `batch`: batch elements, or packed sequences. None: all of them. `statistics`: at steps that this number divides; 0: never.
    """

    steps: object = None
    layers: object = None
    heads: object = None
    batch: object = None
    statistics: int = 1

    def __post_init__(self):
        self._wants_step = _as_test(self.steps)
        self.patterns = None
        if self.layers is not None:
            patterns = [self.layers] if isinstance(self.layers, str) else self.layers
            self.patterns = tuple(patterns) if isinstance(patterns, collections.abc.Iterable) else ()
            if not self.patterns or not all(isinstance(pattern, str) for pattern in self.patterns):
                raise ValueError(f"layers is {self.layers!r}, expected a pattern or several")
        for name in ("heads", "batch"):
            if getattr(self, name) is not None:
                setattr(self, name, sorted(_whole_numbers(getattr(self, name), name)))
        self.statistics = _whole_number(self.statistics, "statistics")

    def wants_step(self, step):
        return bool(self._wants_step(step))

    def wants_statistics(self, step):
        return self.statistics > 0 and step % self.statistics == 0

    def wants_layer(self, layer):
        return self.patterns is None or any(fnmatch.fnmatchcase(layer, pattern) for pattern in self.patterns)


@dataclass
class Cut:
    """The part of one call's tensors that is kept: `heads_q`, `heads_kv`, `batch` are indices, or None for all."""

    launch_batch: int
    launch_heads_q: int
    launch_heads_kv: int
    heads_q: object = None
    heads_kv: object = None
    batch: object = None
    tokens_q: object = None
    tokens_k: object = None
    cu_seqlens_q: object = None
    cu_seqlens_k: object = None

    @classmethod
    def of(cls, selection, batch, heads_q, heads_kv, cu_seqlens_q=None, cu_seqlens_k=None):
        """For a call of that many batch elements (or packed sequences, whose offsets are given) and heads."""
        cut = cls(batch, heads_q, heads_kv)
        if heads_kv < 1 or heads_q % heads_kv:
            raise CaptureRefused(f"{heads_q} query heads over {heads_kv} KV heads, expected a multiple")
        group = heads_q // heads_kv
        if selection.heads is not None:
            kept = sorted({h // group for h in selection.heads if h < heads_q})
            if not kept:
                raise CaptureRefused(f"none of heads {selection.heads} exists, the call has {heads_q}")
            if len(kept) < heads_kv:
                cut.heads_kv = kept
                cut.heads_q = [h * group + g for h in kept for g in range(group)]
        if selection.batch is not None:
            kept = [b for b in selection.batch if b < batch]
            if not kept:
                raise CaptureRefused(f"none of batch elements {selection.batch} exists, the call has {batch}")
            if len(kept) < batch:
                cut.batch = kept
        cut.cu_seqlens_q, cut.cu_seqlens_k = cu_seqlens_q, cu_seqlens_k
        if cut.batch is not None and cu_seqlens_q is not None:
            cut.tokens_q, cut.cu_seqlens_q = cls._pack(cut.batch, cu_seqlens_q)
            cut.tokens_k, cut.cu_seqlens_k = cls._pack(cut.batch, cu_seqlens_k)
        return cut

    @staticmethod
    def _pack(sequences, offsets):
        spans = [np.arange(offsets[b], offsets[b + 1]) for b in sequences]
        lengths = [0] + [len(span) for span in spans]
        return np.concatenate(spans).tolist(), np.cumsum(lengths).astype(np.int32)

    @property
    def whole(self):
        return self.heads_kv is None and self.batch is None

    def apply(self, name, tensor):
        """The kept part of a tensor ([B,S,H,D] or [total,H,D]; lse [B,H,S] or [H,total]), of NumPy or torch."""
        of_query = name in QUERY_TENSORS
        heads = self.heads_q if of_query else self.heads_kv
        tokens = self.tokens_q if of_query else self.tokens_k
        if self.cu_seqlens_q is None:
            if self.batch is not None:
                tensor = tensor[self.batch]
            if heads is not None:
                tensor = tensor[:, heads] if name == "lse" else tensor[:, :, heads]
        elif name == "lse":
            tensor = tensor if heads is None else tensor[heads]
            tensor = tensor if tokens is None else tensor[:, tokens]
        else:
            tensor = tensor if tokens is None else tensor[tokens]
            tensor = tensor if heads is None else tensor[:, heads]
        return tensor

    def attributes(self):
        """What a kernel was launched with, where only a part of it is kept."""
        if self.whole:
            return {}
        heads = range(self.launch_heads_q) if self.heads_q is None else self.heads_q
        batch = range(self.launch_batch) if self.batch is None else self.batch
        return {
            "launch_batch": self.launch_batch,
            "launch_heads_q": self.launch_heads_q,
            "launch_heads_kv": self.launch_heads_kv,
            "heads_kept": ",".join(str(b * self.launch_heads_q + h) for b in batch for h in heads),
        }


#: As of the program's own reader (datasets/problem.cpp): what lies beyond makes a whole file unreadable.
LARGEST_HEAD_SIZE = 256
MOST_TOKENS = 2**31 - 1
MOST_SEQUENCES = 2**24 - 1


def _is_whole(x, least, most):
    return isinstance(x, (int, np.integer, np.bool_)) and least <= x <= most


def _is_finite(x):
    return isinstance(x, (int, np.integer, float, np.floating)) and math.isfinite(x)


_WINDOW = (lambda x: _is_whole(x, -1, MOST_TOKENS), "-1 (no limit) or more")
_FLAG = (lambda x: _is_whole(x, 0, 1), "0 or 1")
#: What attributes may be, and how to say it.
_DEMANDS = {
    "softmax_scale": (lambda x: _is_finite(x) and x > 0, "a finite number above 0"),
    "softcap": (lambda x: _is_finite(x) and x >= 0, "0 (none) or a finite number above 0"),
    "window_left": _WINDOW, "window_right": _WINDOW,
    "causal": _FLAG, "deterministic": _FLAG, "dq_order_fixed": _FLAG, "dkv_order_fixed": _FLAG,
    "causal_alignment": (lambda x: x in ("bottom-right", "top-left"), "bottom-right or top-left"),
}  # fmt: skip


def attention_shapes(q, k, v, packed=False):
    """Shapes of all tensors of the call that q, k and v ([B,S,H,D], or `packed` [total,H,D]) of these shapes make.

    Raises CaptureRefused where they make none.
    """
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != (3 if packed else 4):
            raise CaptureRefused(f"{name} has shape {list(shape)}, expected {'[total,H,D]' if packed else '[B,S,H,D]'}")
    tokens_q, tokens_k = q[:-2], k[:-2] if packed else (q[0], k[1])
    if k[-2] < 1 or q[-2] < 1 or q[-2] % k[-2]:
        raise CaptureRefused(f"{q[-2]} query heads over {k[-2]} KV heads, expected a multiple")
    expected = {"q": q, "k": (*tokens_k, k[-2], q[-1]), "v": (*tokens_k, k[-2], v[-1])}
    for name, shape in (("k", k), ("v", v)):
        if tuple(shape) != expected[name]:
            raise CaptureRefused(f"{name} has shape {list(shape)}, expected {list(expected[name])} beside q {list(q)}")
    out = (*tokens_q, q[-2], v[-1])
    lse = (q[-2], *tokens_q) if packed else (q[0], q[-2], q[1])
    return expected | {"out": out, "lse": lse, "dout": out, "dq": q, "dk": expected["k"], "dv": expected["v"]}


def check_attributes(attributes):
    """Raises ValueError unless an HDF5 file can hold every one of them; found by writing them into one in memory."""
    with h5py.File("attributes", "w", driver="core", backing_store=False, libver=("earliest", "v108")) as file:
        for name, value in attributes.items():
            try:
                file.attrs[name] = value
            except Exception as error:  # h5py's own come in many types
                raise ValueError(f"attribute {name!r} is {repr(value)[:60]}, expected a text or a number that HDF5 can hold ({one_line(error)})") from None


def one_line(error):
    """What an exception says: all of a refusal, the first line of any other."""
    return str(error) if isinstance(error, CaptureRefused) else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def _writable(name):
    """A text as HDF5 can hold it: no NUL, no half of a surrogate pair."""
    return name.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


@dataclass
class Call:
    """One attention call of one step. `tensors`: BF16 words as uint16, lse as float32, laid out as in a capture."""

    layer: str
    index: int
    step: int
    wants_tensors: bool
    wants_statistics: bool = True
    attributes: dict = field(default_factory=dict)
    tensors: dict = field(default_factory=dict)
    cut: object = None
    statistics: dict = field(default_factory=dict)
    obstacle: str = ""
    state: object = None  # the hook's own, while the step runs
    sources: list = field(default_factory=list)  # the same: what its tensors on the host still wait for

    @property
    def group(self):
        """Its group in a file, unless that is taken: /step_000100/layer, with .1, .2, … for further calls of the layer in the step."""
        name = _writable(self.layer).replace("/", "_")
        name = f"_{name}" if name in ("", ".") else name  # which would be the group of the step itself
        return f"/step_{self.step:06d}/{name}" + (f".{self.index}" if self.index else "")

    @property
    def moment(self):
        """What its attributes say of where in the run it was."""
        return {"step": self.step, "layer": _writable(self.layer), "call": self.index}

    def check(self):
        """Raises CaptureRefused unless tensors and attributes are such that what is written can be read."""
        shapes = {name: tuple(x.shape) for name, x in self.tensors.items()}
        for name in "qkv":
            if name not in shapes:
                raise CaptureRefused(f"{name} was not seen")
        expected = attention_shapes(*(shapes[name] for name in "qkv"), packed=self.packed)
        for name, shape in shapes.items():
            if name in expected and shape != expected[name]:
                raise CaptureRefused(f"{name} has shape {list(shape)}, expected {list(expected[name])}")
            if name in expected and self.tensors[name].dtype != (np.float32 if name == "lse" else np.uint16):
                raise CaptureRefused(f"{name} has type {self.tensors[name].dtype}, expected BF16 words as uint16, and lse as float32")
            if name in ("dq", "dk", "dv") and "dout" not in shapes:
                raise CaptureRefused(f"dout was not seen, expected beside {name}")
        for name in "qkv":
            if not 1 <= shapes[name][-1] <= LARGEST_HEAD_SIZE:
                raise CaptureRefused(f"{name} has head size {shapes[name][-1]}, expected 1 to {LARGEST_HEAD_SIZE}")
            if math.prod(shapes[name][:-2]) > MOST_TOKENS:
                raise CaptureRefused(f"{name} has shape {list(shapes[name])}, expected at most {MOST_TOKENS} tokens")
        if self.packed:
            self._check_offsets(shapes)
        elif shapes["q"][0] == 0:
            raise CaptureRefused("batch is 0, expected at least 1")
        self._check_attributes()

    @property
    def packed(self):
        """Are its sequences packed, [total,H,D] with cu_seqlens?"""
        return "cu_seqlens_q" in self.tensors or "cu_seqlens_k" in self.tensors

    def _check_offsets(self, shapes):
        sizes = []
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            offsets = self.tensors.get(name)
            if offsets is None:
                raise CaptureRefused(f"{name} was not seen")
            if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not 2 <= offsets.size <= MOST_SEQUENCES + 1:
                raise CaptureRefused(f"{name} has shape {list(offsets.shape)} and type {offsets.dtype}, expected sequences + 1 whole numbers")
            tokens = shapes[name[-1]][0]
            if offsets[0] != 0 or offsets[-1] != tokens or np.any(np.diff(offsets.astype(np.int64)) < 0):
                raise CaptureRefused(f"{name} goes from {offsets[0]} to {offsets[-1]}, expected rising from 0 to the number of tokens, {tokens}")
            sizes.append(offsets.size)
        if sizes[0] != sizes[1]:
            raise CaptureRefused(f"cu_seqlens_q has {sizes[0]} entries and cu_seqlens_k {sizes[1]}, expected the same number")

    def _check_attributes(self):
        try:
            check_attributes(self.attributes)
        except ValueError as error:
            raise CaptureRefused(str(error)) from None
        if "softmax_scale" not in self.attributes:
            raise CaptureRefused("softmax_scale is missing")
        for name, (fits, expected) in _DEMANDS.items():
            if name in self.attributes and not fits(self.attributes[name]):
                raise CaptureRefused(f"{name} is {self.attributes[name]}, expected {expected}")


def _write_call(file, call, compress):
    call.check()
    # A layer "0.1" beside the second call of a layer "0", or layers whose names differ by what "_" stands for: the later one is told apart.
    name, count = call.group, 1
    while name in file:
        count += 1
        name = f"{call.group}~{count}"
    group = file.create_group(name)
    for name, array in call.tensors.items():
        words.write_array(group, name, array, compress)
    attributes = call.attributes | {"schema_version": 1, "layout": "THD" if call.packed else "BSHD"}
    attributes |= call.moment
    if call.cut is not None:
        attributes |= call.cut.attributes()
    for name, value in attributes.items():
        group.attrs[name] = value


def write_captures(path, calls, compress=0):
    """Calls into one new file, which replaces what stood there in one step once it is whole and on the disk."""
    aside = f"{path}.{os.getpid()}.tmp"
    try:
        with h5py.File(aside, "w", libver=("earliest", "v108")) as file:
            for call in calls:
                _write_call(file, call, compress)
        with open(aside, "rb") as written:
            os.fsync(written.fileno())
        os.replace(aside, path)
    finally:
        if os.path.exists(aside):
            os.unlink(aside)


def _json_number(value):
    value = float(value)
    return value if math.isfinite(value) else None


class Recorder:
    """Calls of one process, step by step, into a folder.

    Tensors go to FOLDER/step_000100_rank_0000.h5, a file a step that was chosen; statistics to FOLDER/statistics_rank_0000.jsonl, a line
    a call. What cannot be written is warned of once and ends the recording, never the run; with `strict` it raises.
    A folder that holds a recording of this rank is refused (CaptureRefused), as two runs in one folder would be ranked as one; with `resume`
    this recording goes on with it: statistics are appended, and a step that is recorded again replaces its file.
    """

    def __init__(self, folder, selection=None, *, rank=0, attributes=None, compress=0, strict=False, first_step=0, resume=False):
        self.folder = os.fspath(folder)
        self.selection = selection or Selection()
        self.rank = _whole_number(rank, "rank")
        self.attributes = dict(attributes or {})
        check_attributes(self.attributes)
        self.compress = _whole_number(compress, "compress", 9)
        self.strict = strict
        self.first_step = self.step = _whole_number(first_step, "first_step")
        self.stopped = ""
        self.files = []
        self.calls_seen = 0
        self._steps_seen = []  # the first and the last with a call
        self._chosen_step_came = False
        self._layers_seen = {}  # an ordered set
        self._calls = []
        self._count = {}
        self._on_demand = 0
        self._held = []
        self._said = set()
        self._refusals = {}  # layers by reason, of the step under way
        self._place = _place_outside()
        self._lock = threading.Lock()
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            raise CaptureRefused(f"{self.folder} cannot be made: {error.strerror}") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise CaptureRefused(f"{self.folder} cannot be written to")
        if not resume:
            self._refuse_a_used_folder()

    def _refuse_a_used_folder(self):
        found = glob.glob(os.path.join(glob.escape(self.folder), f"step_*_rank_{self.rank:04d}.h5"))
        found += [self.statistics_file] if os.path.exists(self.statistics_file) else []
        if found:
            raise CaptureRefused(
                f"{self.folder} holds a recording already ({os.path.basename(min(found))}): two runs in one folder would be taken for one. "
                "Name another folder, or give resume=True where this run goes on with that one"
            )

    @property
    def statistics_file(self):
        return os.path.join(self.folder, f"statistics_rank_{self.rank:04d}.jsonl")

    def capture_file(self, step):
        return os.path.join(self.folder, f"step_{step:06d}_rank_{self.rank:04d}.h5")

    def record_next(self, steps=1):
        """Keep the tensors of this step and the ones after it, that many in all, whatever `steps` said."""
        self._on_demand = max(self._on_demand, _whole_number(steps, "steps"))

    def warn(self, text, once=None):
        """A CaptureWarning; with `once`, only the first of that key."""
        with self._lock:
            if once is not None and once in self._said:
                return
            self._said.add(once)
        # It points at where the recorder was made: a call deep inside the run would say less, and may be in another thread.
        warnings.warn_explicit(text, CaptureWarning, *self._place)

    def refuse(self, call, why):
        """This call's tensors are not kept; its statistics are. The end of the step warns, once for every reason in a run."""
        call.obstacle = why
        call.tensors.clear()
        if self.strict:
            raise CaptureRefused(f"{call.layer}: {why}")
        with self._lock:
            self._refusals.setdefault(why, {})[call.layer] = None

    def _tell_refusals(self):
        refusals, self._refusals = self._refusals, {}
        for why, layers in refusals.items():
            first = next(iter(layers))
            others = f" and {_more(len(layers) - 1, 'layer')}" if len(layers) > 1 else ""
            self.warn(f"{first}{others}: tensors are not recorded: {why}", once=why)

    def give_up(self, error, *calls):
        """Whatever the recorder's own code threw: nothing of these calls is recorded, and the run goes on. With `strict` it raises."""
        why = one_line(error)
        for call in calls:
            call.obstacle = call.obstacle or why
            call.wants_tensors = call.wants_statistics = False
            call.state = None
            call.tensors.clear()
            call.statistics.clear()
        if self.strict:
            raise error if isinstance(error, CaptureRefused) else CaptureRefused(f"not recorded: {why}") from error
        layer = f"{calls[0].layer}: " if calls else ""
        self.warn(f"{layer}not recorded: {why}", once=(layer, why))

    def open_call(self, layer):
        """A new call of the current step; None where nothing is to be recorded of it."""
        if self.stopped:
            return None
        with self._lock:
            self.calls_seen += 1
            self._layers_seen[layer] = None
            self._steps_seen = [*self._steps_seen[:1], self.step]
            chosen = self.selection.wants_step(self.step)
            self._chosen_step_came |= chosen
            tensors = self._on_demand > 0 or chosen
            statistics = self.selection.statistics > 0 and (tensors or self.selection.wants_statistics(self.step))
            if not (tensors or statistics) or not self.selection.wants_layer(layer):
                return None
            index = self._count.get(layer, 0)
            self._count[layer] = index + 1
            call = Call(layer, index, self.step, tensors, statistics, dict(self.attributes) | {"rank": self.rank})
            self._calls.append(call)
            return call

    def drop_call(self, call):
        """Forgets a call; the layer's later ones move up."""
        with self._lock:
            self._calls.remove(call)
            self._count[call.layer] -= 1
            for other in self._calls:
                if other.layer == call.layer and other.index > call.index:
                    other.index -= 1

    def open_calls(self, layer):
        """The calls of a layer in this step, latest first."""
        return [call for call in reversed(list(self._calls)) if call.layer == layer]

    @property
    def calls(self):
        return list(self._calls)

    def finish_step(self, next_step=None, hold_statistics=False):
        """Writes what the step left, and begins the next. Returns the capture file's path, or None.

        With `hold_statistics` its lines are written by write_held(), once they are complete.
        """
        path = self._write_step(next_step, hold_statistics)
        self._tell_refusals()
        return path

    def _write_step(self, next_step, hold_statistics):
        """finish_step() but for its warnings."""
        calls, step = self._calls, self.step
        self._calls, self._count = [], {}
        self.step = step + 1 if next_step is None else int(next_step)
        self._on_demand = max(0, self._on_demand - 1)
        if self.stopped or not calls:
            return None
        kept = []
        for call in calls:
            if not call.wants_tensors or call.obstacle or not call.tensors:
                continue
            try:
                call.check()
                kept.append(call)
            except Exception as error:
                self.refuse(call, one_line(error))
        path = self.capture_file(step) if kept else None
        try:
            if kept:
                path = self._write(path, kept)
            self._held += calls
            if not hold_statistics:
                self._append_held()
        except OSError as error:
            self._stop(error)
            return None
        return path

    def write_held(self):
        """Writes the statistics that finish_step() held back."""
        try:
            self._append_held()
        except OSError as error:
            self._stop(error)

    def _write(self, path, calls):
        try:
            write_captures(path, calls, self.compress)
        except OSError:
            raise
        except Exception as error:  # nothing that is known, but no reason to end a run
            for call in calls:
                self.refuse(call, one_line(error))
            return None
        self.files.append(path)
        return path

    def close(self, found=(), may_raise=True):
        """The recording is over: says what was asked for and never came, and what the hook `found`; with `strict` raises it, if it may."""
        found = list(found)
        if not self.stopped and self.calls_seen:
            found += self._never_came()
        if found and self.strict and may_raise:
            raise CaptureRefused("; ".join(found))
        for text in found:
            self.warn(text, once=text)

    def _never_came(self):
        if self.selection.steps is not None and self._steps_seen and not self._chosen_step_came:
            first, last = self._steps_seen[0], self._steps_seen[-1]
            seen = f"step {first} was seen" if first == last else f"steps {first} to {last} were seen"
            yield f"none of the chosen steps was reached: {seen} (first_step=... says where a resumed run begins)"
        missing = [p for p in self.selection.patterns or () if not fnmatch.filter(self._layers_seen, p)]
        if missing and self._layers_seen:
            names = list(self._layers_seen)
            seen = ", ".join(names[:3]) + (f" and {_more(len(names) - 3, 'layer')}" if len(names) > 3 else "")
            yield f"no layer is named like {', '.join(missing)}: attention was seen in {seen}"

    def _stop(self, error):
        if self.strict:
            raise error
        self.stopped = str(error)
        self.warn(f"recording has stopped, the run goes on: {error}")

    def _append_held(self):
        held, self._held = self._held, []
        try:
            self._append_statistics(held)
        except OSError:
            raise
        except Exception as error:
            self.give_up(error, *held)

    def _append_statistics(self, calls):
        lines = []
        for call in calls:
            if not call.statistics and not call.obstacle:
                continue
            line = {"step": call.step, "rank": self.rank, "layer": call.layer, "call": call.index}
            line["kernel"] = str(call.attributes.get("kernel", ""))
            line |= {name: _json_number(value) for name, value in call.statistics.items()}
            if call.obstacle:
                line["not_recorded"] = call.obstacle
            lines.append(json.dumps(line))
        if lines:
            with open(self.statistics_file, "a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
