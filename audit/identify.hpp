#pragma once
// Which kernel made these bits: the profile, and the one deviation from it, that gives every recorded bit.
//
// The search goes over points of the operation order and kinds of deviation (emu/profile/deviation.hpp), not
// over a list of known bugs. Each of the kernels (forward, preprocess, main loop, last casts) is run from the
// recorded tensors before it, so the earliest tensor that differs narrows the points; the bits decide.
// docs/identify.md

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "audit/compare.hpp"
#include "datasets/result.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn::audit {

struct IdentifyOptions {
  /// Remedied kernels (fa3+subtract-first, …), and deviations of the nearest one of them, too.
  bool with_remedies = true;
  /// Called with what is being done and the share of it; may throw to cancel.
  std::function<void(const std::string&, double)> progress;
};

/// A kernel that could have made the bits.
struct Explanation {
  std::string profile;  ///< "fa3", "fa3+subtract-first"
  std::vector<profile::Deviation> deviations;
  std::size_t differing = 0;  ///< elements that still differ where it was compared
  double residual = 1;  ///< what is left of the difference from the plain kernel's bits, as norms; 0: nothing
};

enum class Verdict : std::uint8_t {
  unmodified,  ///< the plain profile gives every bit
  deviation,   ///< a profile with a remedy, a deviation or several gives every bit
  stochastic,  ///< the statistics of a stochastic rounding at one site fit; no bits can
  nothing_fits,
};

/// How well a stochastic rounding at a site describes what the bits do.
struct StochasticFit {
  profile::Deviation deviation;
  std::string tensor;
  std::size_t elements = 0;    ///< that say something
  std::size_t impossible = 0;  ///< a last cast: recorded words that are neither neighbour of the value
  /// A last cast: (rounded up - expected) in standard deviations. Else: how far the mean error is from 0.
  double bias = 0;
  /// Recorded spread around the plain kernel's bits over that of a simulated stochastic rounding; 1 fits.
  double spread = 0;
};

struct Identification {
  std::string capture;
  Verdict verdict = Verdict::nothing_fits;
  std::optional<Explanation> best;  ///< what fits; where nothing does, the nearest if it is any near
  std::vector<Explanation> equals;  ///< others that give the same bits here
  std::optional<StochasticFit> stochastic;
  Comparison plain;     ///< recorded against the plain kernels, each run from the recorded tensors before it
  Comparison left;      ///< recorded against `best`, the same way
  std::string born_in;  ///< the earliest tensor that differs from the plain kernels; "" if none
  std::optional<ElementPair> born;  ///< its first difference
  std::size_t tried = 0;            ///< profiles and deviations that were run
  std::vector<std::string> notes;
};

/// Throws InputError where fa3 cannot run the capture or it has nothing recorded.
Identification identify(const Capture& capture, const IdentifyOptions& options);

}  // namespace bitattn::audit
