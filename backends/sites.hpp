#pragma once
// The emulator with rounding sites as switches: as a backend, and as runs in fp64 for whoever takes many of
// them with other switches each time.

#include <functional>
#include <memory>
#include <vector>

#include "backends/attention_inputs.hpp"
#include "backends/backend.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn {

/// A backend that runs this profile over fp64 numbers, its `exact` sites without rounding
/// and its deviations honoured. Result::uncast
/// holds the values before the last cast whether asked for or not, Result's words their BF16 casts. No
/// intermediates, no observers.
std::unique_ptr<Backend> site_backend(const profile::Profile& profile);

/// What a forward leaves, in fp64 and the shapes of the problem: as stored, and before its cast.
struct SiteForward {
  std::vector<double> out, out_uncast;     ///< [tokens, heads_q, head_dim_v]
  std::vector<double> lse;                 ///< Problem::row_shape()
  std::vector<double> residual;            ///< what remedies keep beside O; empty without them
  std::vector<double> reference, row_sum;  ///< the split statistic; empty without a remedy that wants it
};

/// What a backward leaves: as stored, and before the last cast.
struct SiteGradients {
  std::vector<double> dq, dk, dv;  ///< shapes of q, k, v
  std::vector<double> dq_uncast, dk_uncast, dv_uncast;
  std::vector<double> score_gradient_sums;  ///< Problem::row_shape(); 0 where no key is seen
};

/// One problem and one kernel, run with any set of exact sites, forward and backward apart, so that a
/// backward can be run again on a forward that is known.
class SiteRuns {
 public:
  /// `profile.exact` counts for nothing here. The capture must outlive this. Throws InputError where the
  /// profile has no rounding sites or cannot run the problem.
  SiteRuns(const Capture& capture, const profile::Profile& profile);

  using Advance = std::function<void(std::int64_t)>;  ///< kernels::Execution::advance
  SiteForward forward(const profile::SiteSet& exact, const Advance& advance = {}) const;
  SiteGradients backward(const SiteForward& forward, const profile::SiteSet& exact,
                         const Advance& advance = {}) const;

 private:
  const Problem& problem_;
  profile::Profile profile_;
  ProblemViews views_;
};

}  // namespace bitattn
