#pragma once
// experimental:integer-reference: r = ceil(m * c) is subtracted in place of m * c, so that factors between
// key blocks are powers of two and the sum of P' is exact. The largest p is then no longer exactly 1, and its
// cast goes into O and D.

#include <cmath>
#include <limits>

#include "emu/arith/bits.hpp"
#include "emu/kernels/remedies/subtract_first.hpp"
#include "emu/profile/sites.hpp"

namespace bitattn::kernels::remedies {

/// r of a running maximum m; -inf as long as the row has seen no key.
template <class Numbers, class Value>
Value integer_reference(const Numbers& numbers, Value m) {
  if (m == -std::numeric_limits<Value>::infinity()) return m;
  return std::ceil(numbers.scaled_max(m));
}

/// Factor between key blocks: ex2(r_before - r).
template <class Numbers, class Value>
Value integer_rescale_factor(const Numbers& numbers, Value before, Value reference) {
  using profile::Site;
  return numbers.ex2(Site::rescale, numbers.sub(Site::rescale, before, reference));
}

/// LSE = fma(r, ln2, log2(L) * ln2).
template <class Numbers, class Value>
Value integer_log_sum_exp(const Numbers& numbers, Value reference, Value total) {
  using profile::Site;
  const auto ln2 = static_cast<Value>(arith::from_bits(0x3f317218U));
  return numbers.fma(Site::lse, reference, ln2, numbers.mul(Site::lse, numbers.lg2(Site::lse, total), ln2));
}

/// Backward: P'_j = ex2(fma(S_j, c, -r)) * (1/L).
template <class Numbers, class Value>
void integer_reference_backward(const Numbers& numbers, const Value* s, Value* p, int n,
                                const SplitStatistic<Value>& row) {
  numbers.backward_exponentials(s, p, n, row.reference);
  numbers.scale(profile::Site::p_backward, p, n, row.inverse);
}

}  // namespace bitattn::kernels::remedies
