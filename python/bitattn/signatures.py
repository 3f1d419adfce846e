"""What the arguments of the attention functions that are known by name say, whatever way they were given. No torch needed."""

from dataclasses import dataclass, field
import functools
import inspect
import math


@dataclass
class CallArguments:
    """One call, in the words of docs/captures.md. `obstacle`: why its tensors cannot make a capture, "" if they can."""

    q: object
    k: object
    v: object
    layout: str = "BSHD"
    softmax_scale: float = 0.0
    causal: bool = False
    window: tuple = (-1, -1)
    softcap: float = 0.0
    deterministic: bool = False
    causal_alignment: str = "bottom-right"
    cu_seqlens_q: object = None
    cu_seqlens_k: object = None
    kernel: str = ""
    obstacle: str = ""
    attributes: dict = field(default_factory=dict)


def _scale(given, q):
    return 1.0 / math.sqrt(q.shape[-1]) if given is None else float(given)



# PyTorch's function is a builtin without a signature.
_SDPA = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in (
            ("query", inspect.Parameter.empty),
            ("key", inspect.Parameter.empty),
            ("value", inspect.Parameter.empty),
            ("attn_mask", None),
            ("dropout_p", 0.0),
            ("is_causal", False),
            ("scale", None),
            ("enable_gqa", False),
        )
    ]
)


def scaled_dot_product_attention(_function, args, kwargs):
    """torch.nn.functional.scaled_dot_product_attention: tensors [B,H,S,D]; causal aligned top left unless the kernel says otherwise."""
    given = _SDPA.bind(*args, **kwargs)
    given.apply_defaults()
    a = given.arguments
    causal, alignment, mask = bool(a["is_causal"]), "top-left", a["attn_mask"]
    if mask is not None and type(mask).__name__ == "CausalBias":
        # torch.nn.attention.bias: a mask that is only a word for an alignment.
        causal, alignment = True, "top-left" if mask.variant.name == "UPPER_LEFT" else "bottom-right"
        mask = None
    obstacle = ""
    if mask is not None:
        obstacle = "attn_mask is a tensor, and captures know causal and window masks only"
    elif a["dropout_p"]:
        obstacle = f"dropout_p is {a['dropout_p']}"
    elif len(a["query"].shape) != 4:
        obstacle = f"query has shape {list(a['query'].shape)}, expected [B,H,S,D]"
    return CallArguments(
        a["query"], a["key"], a["value"], layout="BHSD", softmax_scale=_scale(a["scale"], a["query"]), causal=causal,
        causal_alignment=alignment, obstacle=obstacle,
    )  # fmt: skip


_signature = functools.cache(inspect.signature)


def bound_arguments(function, args, kwargs):
    """Arguments of a Python function by name, with its own defaults."""
    given = _signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def flash_attention(function, args, kwargs):
    """flash_attn_func and flash_attn_varlen_func of FlashAttention-2 and -3; tensors [B,S,H,D], or [total,H,D] with cu_seqlens."""
    a = bound_arguments(function, args, kwargs)
    packed = "cu_seqlens_q" in a
    third = "num_splits" in a or "attention_chunk" in a
    obstacle = ""
    for name in ("alibi_slopes", "block_table", "page_table", "qv", "seqused_q", "seqused_k", "learnable_sink"):
        if a.get(name) is not None:
            obstacle = f"{name} is given, which captures do not know"
    if a.get("dropout_p"):
        obstacle = f"dropout_p is {a['dropout_p']}"
    if a.get("attention_chunk"):
        obstacle = f"attention_chunk is {a['attention_chunk']}"
    window = a.get("window_size") or (-1, -1)
    return CallArguments(
        a["q"], a["k"], a["v"], layout="THD" if packed else "BSHD", softmax_scale=_scale(a.get("softmax_scale"), a["q"]),
        causal=bool(a.get("causal", False)), window=tuple(-1 if w is None else int(w) for w in window),
        softcap=float(a.get("softcap") or 0.0), deterministic=bool(a.get("deterministic", False)),
        cu_seqlens_q=a.get("cu_seqlens_q"), cu_seqlens_k=a.get("cu_seqlens_k"),
        kernel="flash-attention-3" if third else "flash-attention-2", obstacle=obstacle,
    )  # fmt: skip
