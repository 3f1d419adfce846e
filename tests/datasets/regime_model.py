"""A second writing of the regimes, in plain Python from the text of docs/captures.md, to check the first one's bits.

    regime_model.py            prints the table tests/datasets/pinned_regimes.inc
    regime_model.py --check F  compares it with the file F

Python's float is an IEEE double and its + - * / and math.sqrt are correctly rounded, so equal order means equal bits.
"""

import math
import sys

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK32, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK32]
        k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
    return c


STREAMS = ["q", "k", "v", "dout", "direction", "special_keys", "key_shift"]


class Words:
    def __init__(self, seed):
        self.key, self.cache = (seed & MASK32, seed >> 32), {}

    def __call__(self, stream, b, token, head, d):
        counter = (d // 2, token, b, STREAMS.index(stream) << 16 | head)
        if counter not in self.cache:
            self.cache[counter] = philox(counter, self.key)
        w = self.cache[counter]
        return w[2 * (d % 2)] | w[2 * (d % 2) + 1] << 32


def horner(coefficients, x):
    total = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


# AS 241 (PPND16): numerators a, c, e and denominators b, d, f, lowest degree first.
A = [3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3]
B = [1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
     3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3]
C = [1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4]
D = [1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
     1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9]
E = [6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7]
F = [1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2, 7.86869131145613259100e-4,
     1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15]


def log(x):
    m, e = math.frexp(x)
    m, e = 2.0 * m, e - 1
    if m > 1.4142135623730951:
        m, e = 0.5 * m, e + 1
    z = (m - 1.0) / (m + 1.0)
    series = horner([1.0 / k for k in range(1, 24, 2)], z * z)
    high, low = float.fromhex("0x1.62e42fefa3800p-1"), float.fromhex("0x1.ef35793c76730p-45")
    return e * high + (2.0 * z * series + e * low)


ROOTS = []
for _ in range(32):
    ROOTS.append(math.sqrt(ROOTS[-1] if ROOTS else 2.0))


def exp2(x):
    whole = math.floor(x)
    fraction, product = int((x - whole) * 2.0**32), 1.0
    for i, root in enumerate(ROOTS):
        if fraction >> (31 - i) & 1:
            product = product * root
    return math.ldexp(product, whole)


def normal(word):
    tail = ((word >> 11 & (1 << 52) - 1) + 0.5) * 2.0**-53
    q = 0.5 - tail
    if q <= 0.425:
        r = 0.180625 - q * q
        x = q * horner(A, r) / horner(B, r)
    else:
        r = math.sqrt(-log(tail))
        x = horner(C, r - 1.6) / horner(D, r - 1.6) if r <= 5.0 else horner(E, r - 5.0) / horner(F, r - 5.0)
    return -x if word >> 63 else x


def bf16(x):
    """To nearest, ties to even, by exact integers: x times 2^1200 is one."""
    if x == 0.0:
        return 0x8000 if math.copysign(1.0, x) < 0 else 0
    n = abs(int(math.ldexp(*math.frexp(abs(x))[:1], 60)))  # 60-bit significand
    e = math.frexp(x)[1] - 60  # x = n 2^e
    quantum = max(e + 60 - 8, -133)  # the last place kept
    up = quantum - e
    kept, rest = n >> up, n & (1 << up) - 1
    kept += rest > 1 << up - 1 or (rest == 1 << up - 1 and kept & 1)
    word = kept if quantum == -133 else kept + (quantum + 133 << 7)
    return (0x8000 if x < 0 else 0) | min(word, 0x7F80)


def norm(spread, direction, mean):
    return lambda w, u, d, dim: spread * normal(w) + direction * u[d] + mean


def sweep(low, high):
    return lambda w, u, d, dim: exp2(low + (high - low) * (d / (dim - 1))) * normal(w)


def log_uniform(low, high):
    def draw(w, u, d, dim):
        x = exp2(low + (high - low) * (((w >> 31 & MASK32) + 0.5) * 2.0**-32))
        return -x if w >> 63 else x
    return draw


N = norm(1.0, 0.0, 0.0)
REGIMES = {  # q, k, v, dout, which keys are special, how they are drawn
    "normal": (N, N, N, N, None, None),
    "normal3": (norm(3.0, 0.0, 0.0), norm(3.0, 0.0, 0.0), N, N, None, None),
    "late": (norm(1.0, 2.0, 0.0), norm(1.0, 40.0, 0.0), norm(1.0, 0.0, -1.0), norm(2.0**-10, 0.0, 0.0), None, None),
    "ties": (norm(1.0, 1.0, 0.0), N, norm(1.0, 0.0, -1.5), norm(1.0, 0.0, 0.5), "eight", norm(0.0, 2.0, 0.0)),
    "peaky": (norm(1.0, 0.5, 0.0), N, N, N, "first", norm(0.0, 2.0, 0.0)),
    "wild": (log_uniform(-20, 6), log_uniform(-20, 6), log_uniform(-30, 30), log_uniform(-40, 20), None, None),
    "tiny": (sweep(-8, 0), sweep(-8, 0), sweep(-134, -114), N, None, None),
    "tinygrad": (sweep(-8, 0), sweep(-8, 0), N, sweep(-140, -116), None, None),
    "opposed-sink": (norm(0.5, 0.25, 0.0), norm(1.0, -1.0, 0.0), N, N, "first", norm(0.0, 2.0, 0.0)),
    "opposed-cluster": (norm(0.5, -0.25, 0.0), norm(1.0, 1.0, 0.0), norm(1.0, 0.0, -1.0), N, "quarter",
                        norm(1.0, -1.0, 0.0)),
}


def direction(words, stream, head, dim, length):
    g, squares = [normal(words(stream, 0, 0, head, d)) for d in range(dim)], 0.0
    for x in g:
        squares += x * x
    factor = length / math.sqrt(squares)
    return [x * factor for x in g]


def generate(regime, seed, batch, heads_q, heads_kv, sq, sk, dim, key_shift=0.0):
    words, group = Words(seed), heads_q // heads_kv
    q, k, v, dout, which, special = REGIMES[regime]
    u = [direction(words, "direction", h, dim, math.sqrt(dim)) for h in range(heads_kv)]

    def tensor(draw, stream, length, heads, per):
        return [bf16(draw(words(stream, b, t, h, d), u[h // per], d, dim))
                for b in range(batch) for t in range(length) for h in range(heads) for d in range(dim)]

    def chosen(b, h):
        first = {0} if which in ("first", "eight") else set()
        count = {"eight": min(7, sk - 1), "quarter": sk // 4}.get(which, 0)
        order = sorted((words("special_keys", b, j, h, 0), j) for j in range(len(first), sk))
        return first | {j for _, j in order[:count]}

    keys = {}
    for h in range(heads_kv):
        norms = 0.0
        for b in range(batch):
            marked = chosen(b, h) if which else set()
            for j in range(sk):
                row, squares = [], 0.0
                for d in range(dim):
                    row.append((special if j in marked else k)(words("k", b, j, h, d), u[h], d, dim))
                    squares += row[-1] * row[-1]
                norms += math.sqrt(squares)
                keys[b, j, h] = row
        if key_shift:
            shift = direction(words, "key_shift", h, dim, key_shift * (norms / (batch * sk)))
            for b in range(batch):
                for j in range(sk):
                    keys[b, j, h] = [x + s for x, s in zip(keys[b, j, h], shift)]
    k_words = [bf16(x) for b in range(batch) for j in range(sk) for h in range(heads_kv) for x in keys[b, j, h]]
    return (tensor(q, "q", sq, heads_q, group), k_words, tensor(v, "v", sk, heads_kv, 1),
            tensor(dout, "dout", sq, heads_q, group))


def digest(tensors):
    value = 0xCBF29CE484222325
    for tensor in tensors:
        for word in tensor:
            for byte in (word & 0xFF, word >> 8):
                value = ((value ^ byte) * 0x100000001B3) & MASK64
    return value


def table():
    lines = []
    for regime, shift in [(r, 0.0) for r in REGIMES] + [("normal", 10.0)]:
        t = generate(regime, 20240607, 2, 4, 2, 33, 47, 40, shift)
        firsts = ", ".join(f"0x{x[0]:04x}" for x in t)
        lines.append(f'{{"{regime}", {shift:.1f}, {firsts}, 0x{digest(t):016x}U}},')
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--check":
        with open(sys.argv[2], encoding="ascii") as pinned:
            same = pinned.read() == table()
        print("equal" if same else "different")
        sys.exit(0 if same else 1)
    sys.stdout.write(table())
