"""Types of the compiled module. `Words`: BF16, as uint16 words, ml_dtypes.bfloat16, or a bfloat16 tensor on the host that speaks DLPack."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__version__: str

Words: TypeAlias = Any
WordsOut: TypeAlias = NDArray[np.uint16]
Progress: TypeAlias = Callable[[str, float], object]

class InputError(ValueError):
    """Bad input: one line that names the tensor or file, what was found and what was expected."""

class Capture:
    """One attention call: its inputs and, if recorded, its outputs."""

    def __init__(
        self,
        q: Words,
        k: Words,
        v: Words,
        *,
        softmax_scale: float,
        dout: Words | None = None,
        out: Words | None = None,
        lse: NDArray[np.float32] | Any | None = None,
        dq: Words | None = None,
        dk: Words | None = None,
        dv: Words | None = None,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = True,
        causal_alignment: str = "bottom-right",
        cu_seqlens_q: Sequence[int] | NDArray[np.integer] | None = None,
        cu_seqlens_k: Sequence[int] | NDArray[np.integer] | None = None,
        attributes: Mapping[str, int | float | str] = {},
        name: str = "memory",
    ) -> None: ...
    def dlpack(self, name: str) -> Any: ...
    @property
    def q(self) -> WordsOut: ...
    @property
    def k(self) -> WordsOut: ...
    @property
    def v(self) -> WordsOut: ...
    @property
    def dout(self) -> WordsOut | None: ...
    @property
    def out(self) -> WordsOut | None: ...
    @property
    def lse(self) -> NDArray[np.float32] | None: ...
    @property
    def dq(self) -> WordsOut | None: ...
    @property
    def dk(self) -> WordsOut | None: ...
    @property
    def dv(self) -> WordsOut | None: ...
    @property
    def dpsum(self) -> NDArray[np.float32] | None: ...
    @property
    def lse_log2(self) -> NDArray[np.float32] | None: ...
    @property
    def dq_accum(self) -> NDArray[np.float32] | None: ...
    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def notes(self) -> list[str]: ...
    @property
    def softmax_scale(self) -> float: ...
    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> tuple[int, int]: ...
    @property
    def softcap(self) -> float: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def causal_alignment(self) -> str: ...
    @property
    def cu_seqlens_q(self) -> list[int]: ...
    @property
    def cu_seqlens_k(self) -> list[int]: ...
    @property
    def attributes(self) -> dict[str, int | float | str]: ...

def list_captures(path: str) -> list[str]: ...
def load(name: str) -> Capture: ...
def save(path: str, captures: Mapping[str, Capture]) -> None: ...
def import_tensors(
    files: Sequence[str],
    output: str,
    *,
    names: Mapping[str, str] = {},
    layout: str = "",
    round: bool = False,
    softmax_scale: float | None = None,
    causal: bool | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    causal_alignment: str | None = None,
    attributes: Mapping[str, int | float | str] = {},
) -> list[str]: ...
def info(capture: Capture) -> dict[str, Any]: ...
def backends() -> dict[str, str]: ...
def verify(capture: Capture, backend: str = "fa3", *, progress: Progress | None = None) -> dict[str, Any]: ...
def compare(capture: Capture, a: str, b: str, *, progress: Progress | None = None) -> dict[str, Any]: ...
def compare_recorded(a: Capture, b: Capture) -> dict[str, Any]: ...
def identify(capture: Capture, *, remedies: bool = True, progress: Progress | None = None) -> dict[str, Any]: ...
def witness(capture: Capture) -> dict[str, Any]: ...
def run(capture: Capture, backend: str, *, progress: Progress | None = None) -> Capture: ...
def diagnose(
    capture: Capture,
    backend: str = "fa3",
    *,
    reference: str | None = "reference",
    rows: str = "",
    worst: int = 8,
    blame: str = "worst",
    remedies: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]: ...
def generate(
    regime: str = "normal",
    *,
    batch: int = 1,
    heads_q: int = 1,
    heads_kv: int = 0,
    seqlen_q: int = 256,
    seqlen_k: int = 0,
    head_dim: int = 128,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float = 0.0,
    seed: int = 0,
    key_shift: float = 0.0,
) -> Capture: ...
