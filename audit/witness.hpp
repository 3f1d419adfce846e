#pragma once
// Witnesses: three laws that exact gradients of attention obey, looked at in the recorded tensors alone.
// Nothing is run; the cost is one pass over the tensors. What each law means and what its noise and bound
// are: docs/witness.md.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "datasets/result.hpp"

namespace bitattn::audit {

enum class Law : std::uint8_t {
  dk_sum,          ///< sum_j dK_j = 0, a vector of head_dim (not with softcap)
  dq_dk_balance,   ///< sum_i q_i.dq_i = sum_j k_j.dk_j
  out_dv_balance,  ///< sum_i out_i.dout_i = sum_j v_j.dv_j
};

/// As in JSON and HDF5: "dk_sum", …
const char* law_name(Law law);
/// As a formula: "sum_j dK_j = 0", …
const char* law_text(Law law);

/// One law in one KV head (with the query heads of its group) of one batch element or packed sequence.
/// Figures are NaN where one of the tensors holds NaN or infinities there.
struct LawInHead {
  std::size_t sequence = 0, kv_head = 0;
  bool finite = true;
  double residual =
      0;  ///< what should be 0: norm of the vector, or magnitude. dk_sum: unit of dK; else of the loss
  double noise =
      0;  ///< RMS that rounding the stored words to BF16 gives it: each word uniform in its own half ulp
  /// The same with every significand near 2, where a word's rounding is least for its magnitude: |x| 2^-9 /
  /// sqrt(3).
  double least_noise = 0;
  /// Residual over the most that rounding of the stored words can make of it, every word off by its half ulp
  /// in the worst direction; dk_sum: the largest over the columns. Above 1 the law is broken: no exact
  /// gradient rounds to these words.
  double bound_share = 0;
  std::size_t column = 0;  ///< dk_sum: the column of bound_share

  /// The margin is for the rounding of the float64 sums here.
  bool broken() const { return finite && bound_share > 1 + 1e-9; }
  double multiple() const;           ///< residual / noise; 0 / 0 is 0
  double multiple_of_least() const;  ///< residual / least_noise
};

/// One law over the whole capture.
struct WitnessOfLaw {
  Law law = Law::dk_sum;
  std::string not_checked;       ///< why not, "" where it was: tensors that are not recorded, softcap
  std::vector<LawInHead> heads;  ///< sequence-major; empty where it was not checked

  /// Root of the sum of squares of the residuals over that of the noises, heads that are finite; NaN without
  /// any.
  double multiple() const;
  double multiple_of_least() const;
  const LawInHead* largest() const;   ///< by multiple; nullptr without any
  const LawInHead* farthest() const;  ///< by bound_share; nullptr without any
  std::size_t broken() const;         ///< heads
  std::size_t finite() const;         ///< heads
};

struct Witness {
  std::array<WitnessOfLaw, 3> laws;  ///< in the order of Law
  bool any_checked() const;
  bool broken() const;
};

/// The laws in what a capture recorded.
Witness witness(const Capture& capture);

}  // namespace bitattn::audit
