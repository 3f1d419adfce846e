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


def spread(values, number=number):
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
        "a third to a fifth of that one's at the same shift, and has four fewer layers to grow through; in training it grows ([SGD](#training-with-sgd)). The function also suffers less here from the bits that shifted keys lose: "
        f"the loss goes from {middle(of('fp32', '0', 'loss')):.3f} to {middle(of('fp32', '10000', 'loss')):.3f} (there 0.716 to 3.03).\n\n")
    return text


LOOP = (("loss", "loss"), ("norm of q", "q_norm"), ("norm of k less the mean key", "centred_k_norm"), ("gradient norm", "gradient_norm"),
        ("error of dQ", "dq_error"), ("row sum of dS, RMS", "drift"), ("witness", "witness"))
NO_ERROR = ("dq_error", "drift")  # of fp32 attention: 0


class Runs:
    """The rows of the training runs, by what was run."""

    def __init__(self, rows):
        self.rows = rows
        self.steps = sorted({int(r["step"]) for r in rows})

    def of(self, backend, figure, shift="3000", optimizer="adam", qk_norm="0", step=None):
        """The figure of every seed; at the end if no step is given."""
        at = self.steps[-1] if step is None else step
        return [float(r[figure]) for r in self.rows if r["backend"] == backend and r["key_shift"] == shift and r["optimizer"] == optimizer
                and r["qk_norm"] == qk_norm and int(r["step"]) == at]

    def middle(self, *which, **how):
        return middle(self.of(*which, **how))

    def over_fp32(self, backend, figure, **how):
        return self.middle(backend, figure, **how) / self.middle("fp32", figure, **how)

    def backends(self, **how):
        return [b for b in unique(self.rows, "backend") if self.of(b, "loss", **how)]

    def at_the_end(self, **how):
        return table(["backend", *(name for name, _ in LOOP)],
                     [[b, *(spread(self.of(b, f, **how), written(f)) for _, f in LOOP)] for b in self.backends(**how)])

    def over_steps(self, lines, **how):
        """`lines`: (label, backend, figure, {what differs from how}). Geometric means."""
        shown = self.steps[::2] if len(self.steps) > 7 else self.steps
        return table(["step", *shown], [[label, *(mean_text(self.of(b, f, step=s, **(how | own)), written(f)) for s in shown)] for label, b, f, own in lines])

    def whole_loop(self, backend):
        return [(f"{backend}: {name}", backend, f, {}) for name, f in LOOP if not (backend == "fp32" and f in NO_ERROR)]


def written(figure):
    """How a figure's numbers are written: of a loss the third digit counts."""
    return (lambda x: f"{x:.2f}") if figure == "loss" else number


def mean_text(values, number):
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return "diverged"
    return number(middle(finite)) + (f" ({len(values) - len(finite)} of {len(values)} diverged)" if len(finite) < len(values) else "")


def signed(values):
    return ", ".join(f"{x:+.3f}".replace("-", "−") for x in values)


def adam_section(runs):
    last = runs.steps[-1]
    text = "## Training with it\n\n"
    text += (
        f"The same model from its first step on, {last} steps of Adam, the key vector now a bias that is trained (true gradient 0), at a shift of 3000. Error of dQ, row sum and witness are of the worse layer. At the end:\n\n")
    text += runs.at_the_end()
    text += "\nOver the steps:\n\n"
    others = [b for b in runs.backends() if b not in ("fa3", "fp32")]
    text += runs.over_steps(runs.whole_loop("fa3") + runs.whole_loop("fp32") + [(f"{b}: gradient norm", b, "gradient_norm", {}) for b in others])
    ratios = [(s, runs.over_fp32("fa3", "gradient_norm", step=s)) for s in runs.steps if s in (last // 5, 3 * last // 5, last)]
    against = {b: [x - y for x, y in zip(runs.of(b, "loss"), runs.of("fp32", "loss"))] for b in ("fa3", "fa3+centred-keys", "fa3+mean-free-keys")}
    healthy = {b: runs.over_fp32(b, "gradient_norm") for b in others if runs.over_fp32(b, "gradient_norm") < 1.25}
    text += (
        "\n**The gradient norm parts from that of fp32 attention, slowly**: it is " + ", ".join(f"{r:.2f} times as large after {s} steps" for s, r in ratios)
        + f". The row sum of dS has grown {number(runs.middle('fa3', 'drift') / runs.middle('fa3', 'drift', step=0))} times by then (with centred keys {number(runs.middle('fa3+centred-keys', 'drift') / runs.middle('fa3+centred-keys', 'drift', step=0))} "
        f"times), dQ is {number(runs.middle('fa3', 'dq_error'))} times its own norm off, and q is {runs.over_fp32('fa3', 'q_norm'):.2f} times as long. Seed by seed its loss less that of fp32 attention is {signed(against['fa3'])}; with centred keys {signed(against['fa3+centred-keys'])}, "
        f"centred before their cast {signed(against['fa3+mean-free-keys'])}.\n\n"
        "- Not with " + ", ".join(f"`{b[4:]}` ({r:.2f})" for b, r in healthy.items()) + "; `subtract-first` changes nothing "
        f"({runs.over_fp32('fa3+subtract-first', 'gradient_norm'):.2f}).\n"
        f"- With `gproj` and `gproj-weighted` q gets longer ({number(runs.middle('fa3+gproj', 'q_norm'))} and {number(runs.middle('fa3+gproj-weighted', 'q_norm'))}; fp32 {number(runs.middle('fp32', 'q_norm'))}), along the vector that all keys share: "
        "what their corrections leave of dQ there is small, of one sign, and Adam makes full steps of it (seed 1 after 500 steps, `train --capture`: 15 of 18 in the last head). Softmax does not see it. With SGD (below) it is "
        f"{number(runs.middle('fa3+gproj', 'q_norm', optimizer='sgd'))} and {number(runs.middle('fa3+gproj-weighted', 'q_norm', optimizer='sgd'))} (fp32 {number(runs.middle('fp32', 'q_norm', optimizer='sgd'))}).\n\n")
    return text


def sgd_section(runs):
    sgd = {"optimizer": "sgd"}
    last = runs.steps[-1]
    text = "## Training with SGD\n\n"
    text += (
        "Adam makes steps of one length, whatever the gradient's. Is that why a gradient that is mostly error does so little above? The same runs with SGD, momentum 0.9, rate 0.1, with which fp32 attention "
        f"learns nearly as fast (loss {runs.middle('fp32', 'loss', **sgd):.2f}; with Adam {runs.middle('fp32', 'loss'):.2f}; at 0.3 it no longer does). Shift 3000, at the end:\n\n")
    text += runs.at_the_end(**sgd)
    text += "\nOver the steps:\n\n"
    text += runs.over_steps(runs.whole_loop("fa3") + runs.whole_loop("fp32"), **sgd)
    text += "\nGradient norm over the steps, by shift:\n\n"
    at = [(b, s) for s in ("300", "1000", "3000", "10000") for b in runs.backends(shift=s, **sgd) if s != "3000" or b in runs.backends(shift="10000", **sgd)]
    text += runs.over_steps([(f"{b}, shift {s}", b, "gradient_norm", {"shift": s}) for b, s in at], **sgd)
    grown = {f: runs.middle("fa3", f, **sgd) / runs.middle("fa3", f, step=0, **sgd) for f in ("q_norm", "centred_k_norm", "dq_error")}
    largest = max(runs.middle("fa3", "drift", step=s, **sgd) for s in runs.steps) / runs.middle("fa3", "drift", step=0, **sgd)
    ratio = runs.over_fp32("fa3", "gradient_norm", **sgd)
    against = {b: [x - y for x, y in zip(runs.of(b, "loss", **sgd), runs.of("fp32", "loss", **sgd))] for b in runs.backends(**sgd)}
    lost = sum(not math.isfinite(x) for x in runs.of("fa3", "loss", shift="10000", **sgd))
    all_seeds = len(runs.of("fa3", "loss", shift="10000", **sgd))
    first = next((s for s in runs.steps if not all(map(math.isfinite, runs.of("fa3", "loss", shift="10000", step=s, **sgd)))), None)
    cured = [b for b in against if b not in ("fa3", "fp32") and runs.over_fp32(b, "q_norm", **sgd) < 1.5]
    not_cured = [b for b in against if b not in ("fa3", "fp32") and b not in cured]
    text += (
        f"\n**{'It is' if ratio > 3 else 'It is not'}: with steps as long as the gradient makes them {'the loop closes' if ratio > 3 else 'nothing more shows'}.** From step 0 to {last} queries get {number(grown['q_norm'])} times as long and keys (less the mean key) {number(grown['centred_k_norm'])} times, "
        f"the row sum of dS up to {number(largest)} times as large, the error of dQ from {number(runs.middle('fa3', 'dq_error', step=0, **sgd))} to {number(runs.middle('fa3', 'dq_error', **sgd))} times its norm, the witness to {number(runs.middle('fa3', 'witness', **sgd))}; "
        f"the gradient norm is {number(ratio)} times that with fp32 attention, and the loss {signed(against['fa3'])} beside it, seed by seed. "
        + (f"At a shift of 10000 {lost} of {all_seeds} runs end in NaN, the first by step {first}" if lost else f"At a shift of 10000 the gradient norm is {number(runs.over_fp32('fa3', 'gradient_norm', shift='10000', **sgd))} times that of fp32 attention")
        + f"; at 1000 the gradient norm is {number(runs.middle('fa3', 'gradient_norm', shift='1000', **sgd))} at the end, at 300 {number(runs.middle('fa3', 'gradient_norm', shift='300', **sgd))} (fp32 attention at 3000: {number(runs.middle('fp32', 'gradient_norm', **sgd))}).\n\n"
        "- Queries stay as long as with fp32 attention, or nearly, with " + ", ".join(f"`{b[4:]}` ({runs.over_fp32(b, 'q_norm', **sgd):.2f} times)" for b in cured) + ".\n"
        "- Not with " + ", ".join(f"`{b[4:]}` ({number(runs.over_fp32(b, 'q_norm', **sgd))} times)" for b in not_cured) + ".\n"
        "- A rate of 0.1 is near the most that fp32 attention takes: towards the end single runs with any attention, fp32 too, have spikes of loss and gradient norm. At 0.03 they have none, and the loop closes all the same, later:\n\n")
    slow = [(b, s) for s in ("3000", "10000") for b in runs.backends(shift=s, optimizer="slow-sgd")]
    text += runs.over_steps([(f"{b}, shift {s}: {name}", b, f, {"shift": s}) for b, s in slow for name, f in (("norm of q", "q_norm"), ("gradient norm", "gradient_norm"))],
                            optimizer="slow-sgd")
    return text + "\n"


def bias_section(runs):
    text = "## A bias that nothing should move\n\n"
    text += (
        "Key bias from 0, Adam. Its true gradient is 0, so whatever moves it is error. Norm of its gradient over that of the whole model, and how far it has moved:\n\n")
    table_rows = []
    for b in runs.backends(shift="0"):
        share = [g / n for g, n in zip(runs.of(b, "key_bias_gradient", shift="0"), runs.of(b, "gradient_norm", shift="0"))]
        table_rows.append([b, spread(share), spread(runs.of(b, "key_bias", shift="0")), spread(runs.of(b, "witness", shift="0"))])
    text += table(["backend", "gradient of the bias, share", "norm of the bias", "witness"], table_rows)
    text += (
        f"\nThe kernel moves it by {number(runs.middle('fa3', 'key_bias', shift='0'))}, fp32 attention by {number(runs.middle('fp32', 'key_bias', shift='0'))}: storing dK in BF16 is enough, for Adam makes full steps of any gradient "
        "above its epsilon (10⁻⁸), however small. Only keys centred in the model "
        f"({number(runs.middle('fa3+mean-free-keys', 'key_bias', shift='0'))}) leave it where it was: the gradient is centred too, and what is left are fp32 sums.\n\n")
    return text


def qk_norm_section(runs):
    normed = {"qk_norm": "1"}
    text = "## With QK-norm\n\n"
    text += (
        "Keys are normalised after the bias, which so becomes a direction that all keys share and has a gradient of its own. At a shift of 3000 keys differ by 1/3000 of their norm before the "
        "cast, less than BF16 can hold. With Adam, at the end:\n\n")
    text += runs.at_the_end(**normed)
    for shift in ("3000", "30"):
        text += f"\nWith SGD, at a shift of {shift}:\n\n"
        text += runs.at_the_end(optimizer="sgd", shift=shift, **normed)
    text += "\nOver the steps, at a shift of 3000:\n\n"
    text += runs.over_steps([(f"{b}, {o}: {name}", b, f, {"optimizer": o.lower()}) for o in ("Adam", "SGD") for b in ("fa3", "fp32") for name, f in
                             (("norm of q", "q_norm"), ("norm of k", "k_norm"), ("gradient norm", "gradient_norm"))], **normed)
    text += (
        f"\nThe norms stay where the gains hold them, and the gradient norm with them: {runs.over_fp32('fa3', 'gradient_norm', **normed):.2f} times that with fp32 attention with Adam, {runs.over_fp32('fa3', 'gradient_norm', optimizer='sgd', **normed):.2f} times with SGD, and {runs.over_fp32('fa3', 'gradient_norm', optimizer='sgd', shift='30', **normed):.2f} times at a shift of 30 "
        "(at 3000 attention is nearly even, so that little of the gradient goes through dQ at all). "
        f"**QK-norm opens the loop; the error stays**: dQ is off by {number(runs.middle('fa3', 'dq_error', **normed))} times its norm, "
        "because what a shared direction does to dQ depends on how much of the keys is shared and not on their length. What ends it without QK-norm ends it here.\n\n")
    return text


def page(training, replay):
    seeds = len(unique(replay, "seed"))
    text = "# The feedback loop\n\n"
    text += (
        "Does the rounding of an attention kernel change the training that it serves? A byte-level transformer, small enough for a CPU, learns to continue a page of this "
        "repository. Two layers, width 64, two heads of 32, sequences of 128 bytes, two a batch, pre-norm, learned positions, no RoPE, Adam at 2·10⁻³ unless it says SGD. It is fp32 "
        "throughout but for its attention: q, k, v and dO are cast to BF16, and the named backend computes forward and backward, bit for bit; dQ, dK, dV come back as the kernel stores them.\n\n"
        "    bench/feedback_loop.py                   both experiments and this page; twelve minutes of processor time\n"
        "    build/release/bench/feedback_loop train --text README.md --key-shift 300 --capture run.h5      one run; its last attention calls as captures\n"
        "    bitattn diagnose run.h5                  what its attention did\n\n"
        f"{seeds} seeds; figures are geometric means over them (smallest–largest). Every figure, and those that are not shown: "
        "[replay](evidence/feedback_loop_replay.csv), [training](evidence/feedback_loop_training.csv).\n\n"
        "That the experiment is what it says is tested (`ctest --preset release -R FeedbackLoop`): the model's own gradient is the slope of its loss for every parameter, in fp64 with attention written from the "
        "mathematics, to 10⁻⁵; with a backend's attention it is that gradient to what BF16 costs; what the model gets is the backend's result in every bit, and `bitattn verify` finds the captures of a run equal to "
        "the emulated kernel.\n\n")
    text += replay_section(replay)
    runs = Runs(training)
    text += adam_section(runs) + sgd_section(runs) + bias_section(runs) + qk_norm_section(runs)
    return text.rstrip("\n") + "\n"
