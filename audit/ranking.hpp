#pragma once
// Captures of a whole run ranked: which layers and heads leak most, how that grew over steps, and whose
// backward should go to FP32 first.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace bitattn::audit {

/// What the casts to BF16 cost dQ anyway, relative (docs/spec/measured-facts.md): a leak below it is not
/// worth a remedy.
inline constexpr double kLeakOfCasts = 2e-3;

/// What is followed over steps; NaN: not known. Units: docs/diagnose.md.
struct RankedFigures {
  double leak = 0, dq_error = 0, condition = 0;  ///< shares of |dQ|
  double residue = 0;                            ///< the largest
  double drift = 0;                              ///< RMS over rows
  double mean_q_norm = 0, mean_k_norm = 0, largest_logit = 0;
};

/// One diagnosed capture.
struct RankedCapture {
  std::string name, layer;           ///< layer "": it names none
  std::optional<std::int64_t> step;  ///< none: it names none
  std::string heads_kept;            ///< "4,7": which of the layer's heads it has; "": from 0 on
  std::int64_t launch_heads_q = 0;   ///< above 0: heads_kept counts batch · launch_heads_q + head
  std::string kernel;                ///< that recorded it
  bool recorded = false;             ///< it holds what a kernel returned …
  bool reproduced = false;           ///< … and the emulated kernel gives every bit of that
  RankedFigures figures;
  std::vector<double> leak_by_head;  ///< shares of the |dQ| of all heads: their squares add up to the leak's
  std::vector<std::string> not_finite;  ///< inputs and emulated outputs that hold NaN or infinities
};

struct RankedStep {
  std::optional<std::int64_t> step;
  RankedFigures figures;
  std::vector<std::pair<std::string, double>> leak_by_head;  ///< numbers of heads and their leaks
  std::vector<std::string> not_finite;  ///< tensors that hold NaN or infinities, in the order of the passes
};

struct RankedLayer {
  std::string layer;
  double leak_growth = 0;         ///< ranked step over first; NaN: they are one, or the first is not above 0
  std::vector<RankedStep> steps;  ///< rising, at least one
  std::size_t ranked = 0;  ///< place of the last step with a known leak; of the last where there is none
  std::optional<std::size_t> not_finite;  ///< place of the first step with NaN or infinities
  bool stays_not_finite = false;          ///< every later step has them too

  const RankedStep& ranked_step() const { return steps[ranked]; }
  /// The leak was known once, but is not at the last step.
  bool falls_back() const { return ranked + 1 < steps.size(); }
};

/// Where NaN or infinities first appear in a run.
struct FirstNotFinite {
  std::optional<std::int64_t> step;
  std::string tensor;               ///< that attention has first: q k v out dout dq dk dv
  std::vector<std::string> layers;  ///< where it has them at that step, in natural order
  bool stays = false;               ///< in all later steps of these layers too
};

struct RankedHead {
  std::string layer, head;
  double leak = 0;  ///< share of the layer's |dQ|, at its ranked step
};

struct Ranking {
  std::vector<RankedLayer> layers;      ///< by leak at their ranked step, worst first, unknown ones last
  std::vector<RankedHead> heads;        ///< likewise
  std::vector<std::string> fp32_first;  ///< layers whose leak is above kLeakOfCasts, worst first
  std::optional<FirstNotFinite> not_finite;
  std::size_t captures = 0;
  std::size_t reproduced = 0;  ///< whose figures are the recording kernel's own
  std::size_t nothing_recorded = 0;
  std::map<std::string, std::size_t> not_reproduced;  ///< of others by kernel: how many
};

/// Captures that name no layer are one layer each, called by the capture's name. Several of one layer and
/// step (ranks, calls) count as one, by the worst of their figures. A layer whose last steps have no known
/// leak, as in a run that ends in NaN, is ranked by the last step that has one.
Ranking rank(const std::vector<RankedCapture>& captures);

}  // namespace bitattn::audit
