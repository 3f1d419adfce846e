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
  for (int j = 0; j < n; ++j) p[j] = numbers.sub(profile::Site::score_scale, x[j], m);
  numbers.forward_exponentials(p, p, n, Value{0});  // fma(p, c, -0) is the rounded product
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
  for (int j = 0; j < n; ++j) p[j] = numbers.sub(profile::Site::p_backward, s[j], row.reference);
  numbers.backward_exponentials(p, p, n, Value{0});
  numbers.scale(profile::Site::p_backward, p, n, row.inverse);
}

}  // namespace bitattn::kernels::remedies
