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
    #: Arguments that hold several of q, k and v, by a name that spells them: {"qkv": tensor} or {"kv": tensor}; q, k and v are views of them.
    packed: dict = field(default_factory=dict)
    #: Query heads of a qkv whose heads stand in a row (q, then k, then v); 0: an axis before the heads tells q, k and v apart.
    packed_heads_q: int = 0

    def sources(self):
        """The tensors among the arguments, by the names they hold."""
        inside = "".join(self.packed)
        return {name: getattr(self, name) for name in "qkv" if name not in inside} | self.packed

    def parts(self, name, x):
        """What a source, or its gradient, holds of q, k and v."""
        if len(name) == 1:
            return {name: x}
        return dict(zip(name, _unpacked(x, self.packed_heads_q)))


def _unpacked(x, heads_q=0):
    if not heads_q:
        return x.unbind(-3)
    heads_kv = (x.shape[-2] - heads_q) // 2
    return x.split([heads_q, heads_kv, heads_kv], -2)


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
    """flash_attn_func and its varlen, qkvpacked and kvpacked forms in FlashAttention-2 and -3; tensors [B,S,H,D], or [total,H,D] with cu_seqlens.

    A packed qkv is [B,S,3,H,D] or [total,3,H,D], or in FlashAttention-3, with num_heads_q, [B,S,HQ+2*HK,D]; kv is [B,S,2,H,D] or [total,2,H,D].
    """
    a = bound_arguments(function, args, kwargs)
    varlen = "cu_seqlens_q" in a or "cu_seqlens" in a
    third = "num_splits" in a or "attention_chunk" in a
    heads_q = a.get("num_heads_q") or 0
    packed = {name: a[name] for name in ("qkv", "kv") if name in a}
    if "qkv" in a:
        q, k, v = _unpacked(a["qkv"].detach(), heads_q)
    elif "kv" in a:
        q, (k, v) = a["q"], _unpacked(a["kv"].detach())
    else:
        q, k, v = a["q"], a["k"], a["v"]
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
        q, k, v, layout="THD" if varlen else "BSHD", softmax_scale=_scale(a.get("softmax_scale"), q),
        causal=bool(a.get("causal", False)), window=tuple(-1 if w is None else int(w) for w in window),
        softcap=float(a.get("softcap") or 0.0), deterministic=bool(a.get("deterministic", False)),
        cu_seqlens_q=a.get("cu_seqlens_q", a.get("cu_seqlens")), cu_seqlens_k=a.get("cu_seqlens_k", a.get("cu_seqlens")),
        kernel="flash-attention-3" if third else "flash-attention-2", obstacle=obstacle, packed=packed, packed_heads_q=heads_q,
    )  # fmt: skip
