#pragma once
// A profile's kernels run one by one, each fed with what the capture recorded of the kernels before it: so
// that what a kernel gives does not hang on an error of an earlier one.

#include "backends/backend.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn {

struct StageOptions {
  bool forward = true;
  bool backward = true;
  /// Take recorded out, lse (preprocess), dpsum, lse_log2 (main loop), dq_accum, dk_accum, dv_accum (last
  /// casts) in place of computed ones, where the capture has them.
  bool from_recorded = true;
  bool want_order_free_parts = false;
};

/// Runs the profile over fp64 numbers, its exact sites without rounding and its deviations honoured. The
/// result holds words as stored, values before the last cast (Result::uncast) and the intermediates
/// (fp32-rounded where a site is exact). Throws InputError where fa3 cannot run the capture.
Result run_stages(const profile::Profile& profile, const Capture& capture, const StageOptions& options);

}  // namespace bitattn
