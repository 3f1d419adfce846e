#pragma once
// subtract-first: the row max is subtracted from a score before the scale is multiplied on, so that the row
// max's own exponent is exactly 0. Its backward has the split statistic: the max m and the row sum L in place
// of the log-sum-exp (docs/remedies.md).

#include <limits>

#include "emu/profile/sites.hpp"

namespace bitattn::kernels::remedies {

/// Forward: p_j = ex2((x_j - m) * c), two roundings.
template <class Numbers, class Value>
void subtract_first(const Numbers& numbers, const Value* x, Value* p, int n, Value m) {
  using profile::Site;
  const auto c = static_cast<Value>(numbers.scale_log2());
  for (int j = 0; j < n; ++j) {
    const Value difference = numbers.sub(Site::score_scale, x[j], m);
    p[j] = numbers.ex2(Site::exp2, numbers.mul(Site::score_scale, difference, c));
  }
}

/// What the backward needs of a row's forward: the number subtracted from its scores, and 1/L.
template <class Value>
struct SplitStatistic {
  /// A row past the sequence's end: every P' is 0.
  Value reference = std::numeric_limits<Value>::infinity();
  Value inverse = 0;
};

/// A row that saw no key, or a NaN, gets reference 0 and inverse 0.
template <class Numbers, class Value>
SplitStatistic<Value> split_statistic(const Numbers& numbers, Value reference, Value total) {
  if (total == 0 || total != total) return {Value{0}, Value{0}};
  return {reference, numbers.inverse(total)};
}

/// Backward: P'_j = ex2((S_j - m) * c) * (1/L).
template <class Numbers, class Value>
void subtract_first_backward(const Numbers& numbers, const Value* s, Value* p, int n,
                             const SplitStatistic<Value>& row) {
  using profile::Site;
  const auto c = static_cast<Value>(numbers.scale_log2());
  for (int j = 0; j < n; ++j) {
    const Value argument =
        numbers.mul(Site::p_backward, numbers.sub(Site::p_backward, s[j], row.reference), c);
    p[j] = numbers.mul(Site::p_backward, numbers.ex2(Site::p_backward, argument), row.inverse);
  }
}

}  // namespace bitattn::kernels::remedies
