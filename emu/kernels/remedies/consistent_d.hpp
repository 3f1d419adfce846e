#pragma once
// consistent-d: D = sum_j P'_j dP_j / sum_j P'_j of the very numbers that dS is formed of, from a pass over
// all keys before it.

#include "emu/kernels/remedies/block_sums.hpp"

namespace bitattn::kernels::remedies {

/// p, dp: the row's key blocks side by side, masked keys with P' = 0. Blocks are added in ascending order.
template <class Numbers, class Value>
Value consistent_d(const Numbers& numbers, const Value* p, const Value* dp, int blocks, int block_n) {
  const auto site = profile::Site::dpsum;
  Value g = 0;
  Value total = 0;
  for (int n = 0; n < blocks; ++n) {
    const Value dot = block_dot(numbers, site, p + n * block_n, dp + n * block_n, block_n);
    const Value sum = block_sum(numbers, site, p + n * block_n, block_n);
    g = n == 0 ? dot : numbers.add(site, g, dot);
    total = n == 0 ? sum : numbers.add(site, total, sum);
  }
  if (total == 0 || total != total) return 0;
  return numbers.mul(site, g, numbers.rcp(site, total));
}

}  // namespace bitattn::kernels::remedies
