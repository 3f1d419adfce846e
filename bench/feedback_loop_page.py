"""The page that feedback_loop.py writes: what its two experiments found."""

import math


def number(x):
    if x == 0:
        return "0"
    if 0.01 <= abs(x) < 1000:
        return f"{x:.2g}" if abs(x) < 100 else f"{x:.0f}"
    mantissa, exponent = f"{x:.1e}".split("e")
    return f"{mantissa}·10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def middle(values):
    """Geometric mean; of values that are 0 somewhere, the plain one."""
    if min(values) > 0:
        return math.exp(sum(map(math.log, values)) / len(values))
    return sum(values) / len(values)


def spread(values):
    """Geometric mean over seeds and, where it shows, the smallest and largest; runs that diverged are counted apart."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return "diverged"
    low, high = number(min(finite)), number(max(finite))
    text = low if low == high else f"{number(middle(finite))} ({low}–{high})"
    return text if len(finite) == len(values) else f"{text}; {len(values) - len(finite)} of {len(values)} diverged"


def table(headings, rows):
    lines = ["| " + " | ".join(map(str, headings)) + " |", "|" + "---|" * len(headings)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def unique(rows, key):
    return list(dict.fromkeys(row[key] for row in rows))


def replay_section(rows):
    shifts = unique(rows, "key_shift")
    backends = unique(rows, "backend")

    def of(backend, shift, figure):
        chosen = [r for r in rows if r["backend"] == backend and r["key_shift"] == shift]
        if figure == "gradient_norm":
            return [float(r[figure]) / float(r["gradient_norm_fp32"]) for r in chosen]
        return [float(r[figure]) for r in chosen]

    shown = [s for s in shifts if s in ("0", "10", "100", "300", "1000", "3000", "10000")]
    text = "## One gradient, replayed\n\n"
    text += (
        "A trained model, one more batch, its gradient; then again with one vector added to all keys of a head (`shift` times the mean key norm, a "
        "direction at random for each head), and with other attention. Softmax does not notice the vector, so nothing should change. Error of dWq: "
        "‖dWq − dWq(fp32)‖ / ‖dWq(fp32)‖ of the worse layer, the fp32 attention taking the same BF16 q, k, v.\n\n")
    text += table(["error of dWq at shift", *shown],
                  [[b, *(spread(of(b, s, "wq_error")) for s in shown)] for b in backends if b != "fp32"])
    text += "\nGradient norm of the whole model, over that with fp32 attention of the same keys:\n\n"
    text += table(["gradient norm at shift", *shown],
                  [[b, *(spread(of(b, s, "gradient_norm")) for s in shown)] for b in backends if b != "fp32"])
    silent = middle(of("fa3", "300", "gradient_norm"))
    text += (
        f"\n- The error of the kernel grows in proportion to the shift: {number(middle(of('fa3', '30', 'wq_error')))} at 30, "
        f"{number(middle(of('fa3', '300', 'wq_error')))} at 300, {number(middle(of('fa3', '10000', 'wq_error')))} at 10000. What it multiplies, the row sum of dS, stays what "
        f"it was ({number(middle(of('fa3', '0', 'drift')))} RMS at 0, {number(middle(of('fa3', '1000', 'drift')))} at 1000).\n"
        f"- **At a shift of 300, {100 * middle(of('fa3', '300', 'wq_error')):.0f}% of dWq is error, and the gradient norm is {silent:.3f} of the true one**, the loss the same to four digits. "
        f"At 10000 the gradient norm is {number(middle(of('fa3', '10000', 'gradient_norm')))} times the true one, all of it rounding in the backward.\n"
        f"- `fp32-backward` ends it, and so do `gproj`, `gproj-weighted` and `centred-keys`, which cost far less: {number(middle(of('fa3+gproj', '10000', 'wq_error')))}, "
        f"{number(middle(of('fa3+gproj-weighted', '10000', 'wq_error')))}, {number(middle(of('fa3+centred-keys', '10000', 'wq_error')))} at 10000. Here all keys share one long vector, the one case where an even "
        "projection is right ([notebook 03](../notebooks/03_remedies.ipynb) has others).\n"
        f"- `o-residual8+rounded-sum` makes the sum {number(middle(of('fa3', '0', 'drift')) / middle(of('fa3+o-residual8+rounded-sum', '0', 'drift')))} times smaller, "
        "and leaves the amplifier: the error is that much smaller at every shift.\n"
        "- `subtract-first` changes nothing.\n"
        "- Keys centred in the model have the fp32 backward's error. Centred *before* the cast to BF16 (`mean-free-keys`) they also keep the bits that the cast of a shifted key loses, so "
        "its dWq is another one than that of fp32 attention on the shifted keys (the row above). Against the gradient **without a shift**:\n\n")
    text += table(["distance from dWq of fp32 at shift 0", *shown],
                  [[b, *(spread(of(b, s, "wq_error_unshifted")) for s in shown)] for b in ("fa3", "fp32", "fa3+mean-free-keys-bf16", "fa3+mean-free-keys")])
    text += ("\nOnly centring before the cast keeps the gradient; fp32 attention, whose keys were cast, cannot.\n\n"
             "The witness, |Σⱼ dKⱼ| as a multiple of what storing dK in BF16 explains, needs no second computation. It is "
             f"{spread(of('fa3', '0', 'witness'))} for the kernel at shift 0 and {spread(of('fa3', '10000', 'witness'))} at 10000, {spread(of('fp32', '0', 'witness'))} for fp32: it sees the row sums, and not how far they leak.\n\n")
    text += "### Which part of the H200's experiment comes out\n\n"
    text += (
        "[Replay facts](spec/replay-facts.md) did the same with a model of six layers, width 512, heads of 128 and 2,500 steps behind it.\n\n")
    text += table(["", "there", "here"], [
        ["error of dWq, shift 10, 100, 300", "0.11, 0.98, 3.4", ", ".join(number(middle(of("fa3", s, "wq_error"))) for s in ("10", "100", "300"))],
        ["gradient norm at 300", "1.09", f"{silent:.2f}"],
        ["gradient norm at 10000", "2,990 (another run 1,370)", number(middle(of("fa3", "10000", "gradient_norm")))],
        ["the same with an FP32 backward", "1.75", number(middle(of("fa3+fp32-backward", "10000", "gradient_norm")))],
        ["error of dWq at 300 with an FP32 backward", "0.42", number(middle(of("fa3+fp32-backward", "300", "wq_error")))],
        ["keys centred after the cast: error of dWq at 300", "0.52", number(middle(of("fa3+mean-free-keys-bf16", "300", "wq_error")))],
        ["keys centred before the cast: as without a shift", "yes, at every shift", f"yes: {number(middle(of('fa3+mean-free-keys', '10000', 'wq_error_unshifted')))} at 10000, {number(middle(of('fa3+mean-free-keys', '0', 'wq_error_unshifted')))} at 0"]])
    text += (
        "\nThe mechanism comes out, its silence, and what ends it. The thousandfold gradient norm does not: this model is small and its drift too; the error in dWq is "
        "a third to a fifth of that one's at the same shift, and has four fewer layers to grow through. The function also suffers less here from the bits that shifted keys lose: "
        f"the loss goes from {middle(of('fp32', '0', 'loss')):.3f} to {middle(of('fp32', '10000', 'loss')):.3f} (there 0.716 to 3.03).\n\n")
    return text


LOOP = (("loss", "loss"), ("norm of q", "q_norm"), ("norm of k less the mean key", "centred_k_norm"), ("gradient norm", "gradient_norm"),
        ("error of dQ", "dq_error"), ("row sum of dS, RMS", "drift"), ("witness", "witness"))
NO_ERROR = ("dq_error", "drift")  # of fp32 attention: 0


def training_section(rows):
    def of(backend, shift, figure, qk_norm="0", step=None, optimizer="adam"):
        chosen = [r for r in rows if r["backend"] == backend and r["key_shift"] == shift and r["qk_norm"] == qk_norm and r["optimizer"] == optimizer]
        at = step if step is not None else max((int(r["step"]) for r in chosen), default=0)
        return [float(r[figure]) for r in chosen if int(r["step"]) == at]

    def backends_of(shift, qk_norm="0", optimizer="adam"):
        return [b for b in unique(rows, "backend") if of(b, shift, "loss", qk_norm, optimizer=optimizer)]

    def at_the_end(shift, qk_norm="0", optimizer="adam"):
        return table(["backend", *(name for name, _ in LOOP)],
                     [[b, *(spread(of(b, shift, f, qk_norm, optimizer=optimizer)) for _, f in LOOP)] for b in backends_of(shift, qk_norm, optimizer)])

    def over_steps(lines, optimizer="adam"):
        """lines: (backend, shift, name, figure)."""
        return table(["step", *shown], [[f"{b}{', shift ' + s if varied else ''}: {name}", *(spread_middle(of(b, s, f, step=at, optimizer=optimizer)) for at in shown)]
                                        for b, s, name, f in lines for varied in [len({x[1] for x in lines}) > 1]])

    steps = sorted({int(r["step"]) for r in rows})
    shown = steps[::2] if len(steps) > 7 else steps
    last = steps[-1]
    text = "## Training with it\n\n"
    text += (
        f"The same model from its first step on, {last} steps, the key vector now a bias that is trained (true gradient 0), at a shift of 3000. Row sum, error and witness: of the worse layer. At the end:\n\n")
    text += at_the_end("3000")
    text += "\nOver the steps:\n\n"
    text += over_steps([(b, "3000", name, f) for b in ("fa3", "fp32") for name, f in LOOP if not (b == "fp32" and f in NO_ERROR)]
                       + [(b, "3000", name, f) for b in backends_of("3000") if b not in ("fa3", "fp32") for name, f in LOOP if f in ("q_norm", "gradient_norm")])
    ADAM_VERDICT
    SGD
    text += "## A bias that nothing should move\n\n"
    text += (
        "Key bias from 0. Its true gradient is 0, so whatever moves it is error. Norm of its gradient over that of the whole model, and how far Adam has moved it:\n\n")
    zero = [b for b in unique(plain, "backend") if of(b, "0", "loss")]
    table_rows = []
    for b in zero:
        share = [g / n for g, n in zip(of(b, "0", "key_bias_gradient"), of(b, "0", "gradient_norm"))]
        table_rows.append([b, spread(share), spread(of(b, "0", "key_bias")), spread(of(b, "0", "witness"))])
    text += table(["backend", "gradient of the bias, share", "norm of the bias", "witness"], table_rows)
    text += (
        f"\nThe kernel moves it by {number(middle(of('fa3', '0', 'key_bias')))}, fp32 attention by {number(middle(of('fp32', '0', 'key_bias')))}: storing dK in BF16 is enough, for Adam makes full steps of any gradient "
        "above its epsilon (10⁻⁸), however small. Only keys centred in the model "
        f"({number(middle(of('fa3+mean-free-keys', '0', 'key_bias')))}) leave it where it was: the gradient is centred too, and what is left are fp32 sums.\n\n")
    if of("fa3", "3000", "loss", "1") and of("fp32", "3000", "loss", "1"):
        text += "## With QK-norm\n\n"
        text += (
            "Keys are normalised after the bias, which so becomes a direction that all keys share and has a gradient of its own. At a shift of 3000 keys differ by 1/3000 of their norm before the "
            "cast, less than BF16 can hold:\n\n")
        text += table(["backend", "loss", "gradient norm", "mean of the norms of k", "error of dQ", "row sum of dS, RMS", "witness"],
                      [[b, *(spread(of(b, "3000", f, "1")) for f in ("loss", "gradient_norm", "k_norm", "dq_error", "drift", "witness"))] for b in ("fa3", "fp32")])
        text += (
            f"\nThe norm of the keys stays where the gain holds it, and the gradient norm with it. The error stays: dQ is off by {number(middle(of('fa3', '3000', 'dq_error', '1')))} times its norm, "
            "because what a shared direction does to dQ depends on how much of the keys is shared and not on their length.\n\n")
    return text


def page(training, replay):
    seeds = len(unique(replay, "seed"))
    text = "# The feedback loop\n\n"
    text += (
        "Does the rounding of an attention kernel change the training that it serves? A byte-level transformer, small enough for a CPU, learns to continue a page of this "
        "repository. Two layers, width 64, two heads of 32, sequences of 128 bytes, two a batch, pre-norm, learned positions, no RoPE, Adam at 2·10⁻³. It is fp32 "
        "throughout but for its attention: q, k, v and dO are cast to BF16, and the named backend computes forward and backward, bit for bit; dQ, dK, dV come back as the kernel stores them.\n\n"
        "    bench/feedback_loop.py                   both experiments and this page\n"
        "    build/release/bench/feedback_loop train --text README.md --key-shift 300 --capture run.h5      one run; its last attention calls as captures\n"
        "    bitattn diagnose run.h5                  what its attention did\n\n"
        f"{seeds} seeds; figures are geometric means over them (smallest–largest). Every figure, and those that are not shown: "
        "[replay](evidence/feedback_loop_replay.csv), [training](evidence/feedback_loop_training.csv).\n\n"
        "That the experiment is what it says is tested (`ctest --preset release -R FeedbackLoop`): the model's own gradient is the slope of its loss for every parameter, in fp64 with attention written from the "
        "mathematics, to 10⁻⁵; with a backend's attention it is that gradient to what BF16 costs; what the model gets is the backend's result in every bit, and `bitattn verify` finds the captures of a run equal to "
        "the emulated kernel.\n\n")
    text += replay_section(replay)
    text += training_section(training)
    return text.rstrip("\n") + "\n"
