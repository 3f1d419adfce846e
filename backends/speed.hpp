#pragma once
// How fast this build computes on this machine: rates, each beside a named peer in the same run.

#include <functional>
#include <string>
#include <vector>

namespace bitattn {

struct EngineSpeed {
  std::string name;
  double products_per_second =
      0;                       ///< fused products of bare tile products, a core and second of processor time
  double ratio_to_scalar = 0;  ///< to the scalar model of emu/arith
};

/// One whole head through the fa3 schedules, forward and backward, causal, head size 128.
struct KernelSpeed {
  int tokens = 0;
  double products_per_second =
      0;  ///< fused products of all visited tiles, a core and second of processor time
  double share_of_product_rate = 0;  ///< of the same engine's bare tile products
};

/// One head of the truth, forward and backward, full mask, head size 128.
struct ReferenceSpeed {
  int tokens = 0;
  double seconds = 0;             ///< processor time of the backend "reference"
  double plain_mpfr_seconds = 0;  ///< of the same with every product in MPFR
  double ratio_to_plain_mpfr = 0;
};

struct Speed {
  std::vector<EngineSpeed> engines;  ///< scalar first, the default last
  std::vector<KernelSpeed> kernels;
  std::vector<ReferenceSpeed> references;
};

/// Measures on one core by processor time, so that other work on the machine disturbs little. `quick`: small
/// sizes, within a minute. `progress` is called with what is measured next and the share done, and may throw
/// to cancel.
Speed measure_speed(bool quick, const std::function<void(const std::string&, double)>& progress);

}  // namespace bitattn
