#pragma once
// The one operation of remedies that meets every (query, key) pair and column: a row of fused multiply-adds.

#include <string_view>

#include "emu/profile/profile.hpp"

namespace bitattn::kernels::remedies {

/// sum_j := fma(factor, x_j, sum_j), FFMA as the profile's arithmetic has it. In vector instructions where an
/// engine of that name has them, else scalar; the same bits.
class AddScaled {
 public:
  AddScaled(const profile::Arithmetic& arithmetic, std::string_view engine);
  void operator()(float factor, const float* x, float* sum, int n) const;

 private:
  using Loop = void (*)(float factor, const float* x, float* sum, int n);
  bool flush_;
  Loop loop_;  ///< nullptr: scalar
};

}  // namespace bitattn::kernels::remedies
