"""What can be said of an attention call at a cost linear in its tensors: norms, and the three witnesses of `bitattn witness`.

Written once for NumPy arrays and torch tensors: a `Math` says how to read and how to sum them. All tensors are [B,S,H,D] of BF16.
"""

import numpy as np


class NumpyMath:
    """BF16 words as uint16 arrays; sums in float64."""

    @staticmethod
    def _number(words):
        return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    @classmethod
    def norms(cls, x):
        """Of every vector: [B,S,H]."""
        return np.sum(cls._number(x) ** 2, axis=-1) ** 0.5

    @classmethod
    def token_sum(cls, x):
        """[B,H,D]"""
        return np.sum(cls._number(x), axis=1)

    @classmethod
    def dot(cls, x, y):
        """Over tokens and columns: [B,H]."""
        return np.sum(cls._number(x) * cls._number(y), axis=(1, 3))

    @classmethod
    def noise(cls, x, weight=None):
        """Variance that the rounding of every word of x gives to the sum of x, or of x times an exact weight: [B,H].

        Every word uniform in its own half ulp, and in 2^-126 where kernels flush to zero.
        """
        power = cls._number(x & np.uint16(0x7F80))
        half = np.where(power == 0, 2.0**-126, power * 2.0**-8)
        if weight is not None:
            half = half * cls._number(weight)
        return np.sum(half * half, axis=(1, 3)) / 3

    @staticmethod
    def largest(values):
        return np.max(values)


def _multiple(residual2, variance):
    """Root of the sum of squared residuals over that of the noises, batch elements and KV heads together."""
    return (residual2.sum() / variance.sum()) ** 0.5


def _balance(math, x, y, z, w, heads_kv):
    """sum x.y over query tokens less sum z.w over keys, of which x and z were rounded."""

    def of_kv_head(sums):
        return sums.reshape(sums.shape[0], heads_kv, -1).sum(-1)

    residual = of_kv_head(math.dot(x, y)) - math.dot(z, w)
    return _multiple(residual**2, of_kv_head(math.noise(x, y)) + math.noise(z, w))


@np.errstate(all="ignore")  # infinities and NaN end in figures that are not finite, which says it
def forward_statistics(math, q, k, v, out, lse, softmax_scale):
    """Norms over tokens and heads; `logit_bound`: softmax_scale times the largest norms, no logit is larger."""
    q_norms, k_norms = math.norms(q), math.norms(k)
    mean_key = math.token_sum(k) / k.shape[1]
    found = {
        "mean_q_norm": q_norms.mean(),
        "mean_k_norm": k_norms.mean(),
        "mean_v_norm": math.norms(v).mean(),
        "mean_out_norm": math.norms(out).mean(),
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
    heads_kv = k.shape[2]
    found = {"mean_dout_norm": math.norms(dout).mean()}
    for name, x in (("dq", dq), ("dk", dk), ("dv", dv)):
        if x is not None:
            found[f"{name}_norm"] = (math.norms(x) ** 2).sum() ** 0.5
    if dk is not None and softcap == 0:
        sums = math.token_sum(dk)
        found["dk_sum"] = _multiple((sums * sums).sum(-1), math.noise(dk))
    if dq is not None and dk is not None:
        found["dq_dk_balance"] = _balance(math, dq, q, dk, k, heads_kv)
    if dv is not None:
        found["out_dv_balance"] = _balance(math, out, dout, dv, v, heads_kv)
    return found
