"""What can be said of an attention call at a cost linear in its tensors: norms, and the three witnesses of `bitattn witness`.

Written once for NumPy arrays and torch tensors: a `Math` says how to read numbers and how to sum. All tensors are [B,S,H,D].
"""

import numpy as np


class NumpyMath:
    """BF16 words as uint16 arrays."""

    @staticmethod
    def number(words):
        return (words.astype(np.uint32) << 16).view(np.float32)

    @staticmethod
    def power(words):
        """2^exponent of every word, 0 below the normal numbers."""
        return ((words & np.uint16(0x7F80)).astype(np.uint32) << 16).view(np.float32)

    @staticmethod
    def total(values, axes):
        return np.sum(values, axis=axes, dtype=np.float64)

    @staticmethod
    def largest(values):
        return np.max(values)


def _norms(math, words):
    x = math.number(words)
    return math.total(x * x, (3,)) ** 0.5


def _variance(math, words, weight=None):
    """Of every word's rounding, times a weight: uniform in its own half ulp, 2^-126 where kernels flush to zero."""
    power = math.power(words)
    half = power * 2.0**-8 + (power == 0) * 2.0**-126
    if weight is not None:
        half = half * weight
    return half * half / 3


def _multiple(residual2, variance):
    """Root of the sum of squared residuals over that of the noises, batch elements and KV heads together."""
    return (residual2.sum() / variance.sum()) ** 0.5


def _by_kv_head(sums, heads_kv):
    """[B,Hq] summed over the query heads of every KV head."""
    return sums.reshape(sums.shape[0], heads_kv, -1).sum(-1)


@np.errstate(all="ignore")  # infinities and NaN end in figures that are not finite, which says it
def forward_statistics(math, q, k, v, out, lse, softmax_scale):
    """Norms over tokens and heads; `logit_bound`: softmax_scale times the largest norms, no logit is larger."""
    q_norms, k_norms = _norms(math, q), _norms(math, k)
    mean_key = math.total(math.number(k), (1,)) / k.shape[1]
    found = {
        "mean_q_norm": q_norms.mean(),
        "mean_k_norm": k_norms.mean(),
        "mean_v_norm": _norms(math, v).mean(),
        "mean_out_norm": _norms(math, out).mean(),
        "largest_mean_key_norm": math.largest((mean_key * mean_key).sum(-1) ** 0.5),
        "logit_bound": math.largest(q_norms) * math.largest(k_norms) * softmax_scale,
    }
    if lse is not None:
        found["largest_lse"] = math.largest(abs(lse))
    return found


@np.errstate(all="ignore")
def backward_statistics(math, q, k, v, out, dout, dq, dk, dv, softcap=0.0):
    """Norms of the gradients, and the witnesses as multiples of what rounding the stored words to BF16 explains.

    `dk_sum`: sum_j dK_j, which is 0 in exact arithmetic without softcap; `dq_dk_balance`: sum_i q_i.dq_i - sum_j k_j.dk_j;
    `out_dv_balance`: sum_i out_i.dout_i - sum_j v_j.dv_j. A tensor that is None leaves out what needs it.
    """
    number, total = math.number, math.total
    heads_kv = k.shape[2]
    found = {"mean_dout_norm": _norms(math, dout).mean()}
    for name, x in (("dq", dq), ("dk", dk), ("dv", dv)):
        if x is not None:
            found[f"{name}_norm"] = total(number(x) ** 2, (0, 1, 2, 3)) ** 0.5
    if dk is not None and dk.shape[2] == heads_kv and softcap == 0:
        sums = total(number(dk), (1,))
        found["dk_sum"] = _multiple((sums * sums).sum(-1), total(_variance(math, dk), (1, 3)))
    if dq is not None and dk is not None:
        left = _by_kv_head(total(number(q) * number(dq), (1, 3)), heads_kv)
        right = total(number(k) * number(dk), (1, 3))
        noise = _by_kv_head(total(_variance(math, dq, number(q)), (1, 3)), heads_kv)
        noise = noise + total(_variance(math, dk, number(k)), (1, 3))
        found["dq_dk_balance"] = _multiple((left - right) ** 2, noise)
    if dv is not None:
        left = _by_kv_head(total(number(out) * number(dout), (1, 3)), heads_kv)
        right = total(number(v) * number(dv), (1, 3))
        noise = _by_kv_head(total(_variance(math, out, number(dout)), (1, 3)), heads_kv)
        noise = noise + total(_variance(math, dv, number(v)), (1, 3))
        found["out_dv_balance"] = _multiple((left - right) ** 2, noise)
    return found
