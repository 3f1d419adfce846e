#pragma once
// o-residual, o-residual8: what O's cast to BF16 drops is kept beside it, as a BF16 number or as an 8-bit
// share of O's spacing, and D = rowsum(dO.O) is taken from O and it. O itself keeps every bit.

#include <array>
#include <cmath>
#include <limits>

#include "emu/arith/bf16.hpp"
#include "emu/profile/flash3.hpp"
#include "emu/profile/sites.hpp"

namespace bitattn::kernels::remedies {

/// Shares of half a spacing that 8 bits hold: 127 each way.
inline constexpr float kResidualSteps = 254.0F;

/// BF16(y - O) of one normalised output y; 0 where O is no finite number.
template <class Numbers, class Value>
Value o_residual(const Numbers& numbers, Value y) {
  using profile::Site;
  const Value o = Numbers::output_read_by_dpsum(y);
  if (!std::isfinite(o)) return 0;
  return Numbers::value(numbers.cast(Site::dpsum_o_cast, numbers.sub(Site::dpsum_o_cast, y, o)));
}

/// The same in 8 bits: q = round((y - O) * 254/u), read back as (q * (1/254)) * u with u the spacing of BF16
/// numbers at O; 0 for |O| < 2^-119, where u is below the smallest normal fp32 number.
template <class Numbers, class Value>
Value o_residual8(const Numbers& numbers, Value y) {
  using profile::Site;
  const Value o = Numbers::output_read_by_dpsum(y);
  if (!std::isfinite(o) || std::abs(o) < Value{0x1p-119F}) return 0;
  const Value u = std::ldexp(Value{1}, std::ilogb(o) - 7);
  const auto site = Site::dpsum_o_cast;
  const Value share =
      numbers.mul(site, numbers.mul(site, numbers.sub(site, y, o), 1 / u), Value{kResidualSteps});
  const Value q = std::nearbyint(share);  // to nearest even; |q| <= 127, as |y - O| <= u/2
  return numbers.mul(site, numbers.mul(site, q, static_cast<Value>(1.0F / kResidualSteps)), u);
}

/// D of a row from fp32 outputs, in the order of the preprocess kernel (docs/spec/fa3-operation-order.md
/// 3.1). With products that are no longer exact, which of a thread's first two is fused shows in the bits.
template <class Numbers, class Value>
Value dpsum_of_values(const Numbers& numbers, const std::uint16_t* dout, const Value* out, int columns,
                      const profile::BackwardTiles& tiles) {
  using profile::Site;
  const auto x = [&](int d) {
    return d < columns ? static_cast<Value>(arith::fp32_from_bf16(dout[d])) : Value{0};
  };
  const auto o = [&](int d) { return d < columns ? out[d] : Value{0}; };
  const int threads = tiles.dpsum_threads;
  std::array<Value, 16> partial{};
  for (int t = 0; t < threads; ++t) {
    const int first = 8 * t;
    Value a = numbers.mul(Site::dpsum, x(first + 1), o(first + 1));
    a = numbers.fma(Site::dpsum, x(first), o(first), a);
    for (int base = first; base < tiles.head_dim; base += 8 * threads) {
      for (int d = base == first ? first + 2 : base; d < base + 8; ++d) {
        a = numbers.fma(Site::dpsum, x(d), o(d), a);
      }
    }
    partial[static_cast<std::size_t>(t)] = a;
  }
  for (int offset = threads / 2; offset > 0; offset /= 2) {
    for (int t = 0; t < offset; ++t) {
      const auto i = static_cast<std::size_t>(t);
      partial[i] = numbers.add(Site::dpsum, partial[i], partial[i + static_cast<std::size_t>(offset)]);
    }
  }
  return partial[0];
}

}  // namespace bitattn::kernels::remedies
