#pragma once
// shifted-max: where a key block of a row has several scores within 1e-3 (natural units) of its maximum, the
// block's maximum counts as twice itself if it is positive and as 0 if it is negative, so that no p is
// exactly 1. Source: arXiv 2510.04212 and the authors' own code, in which the running reference is the
// largest of the blocks' shifted maxima.

#include <limits>

#include "emu/profile/sites.hpp"

namespace bitattn::kernels::remedies {

/// Distance below a block's maximum that still counts as equal, in raw score units.
/// `natural_scale`: what a raw score is multiplied with (softmax_scale; with softcap the cap).
inline float shifted_max_tolerance(double natural_scale) {
  return static_cast<float>(1e-3 / natural_scale);
}

/// The running reference after one key block; `before` is -inf on the row's first.
template <class Numbers, class Value>
Value shifted_max(const Numbers& numbers, const Value* x, int n, Value before, float tolerance) {
  using profile::Site;
  constexpr Value kNone = -std::numeric_limits<Value>::infinity();
  Value block = numbers.row_max(x, n, kNone);
  if (block != kNone) {
    const Value least = numbers.sub(Site::row_max_scale, block, static_cast<Value>(tolerance));
    int close = 0;
    for (int j = 0; j < n; ++j) close += x[j] >= least ? 1 : 0;
    if (close > 1 && block > 0) block = numbers.mul(Site::row_max_scale, block, Value{2});
    if (close > 1 && block < 0) block = 0;
  }
  return numbers.row_max(&block, 1, before);
}

}  // namespace bitattn::kernels::remedies
