#pragma once
// Hopper's special-function unit, bits to bits: ex2, lg2, rcp, rsqrt (.approx.ftz.f32) and tanh
// (.approx.f32).
//
// All five are one table-driven quadratic: the upper bits of the 23-bit fraction pick a segment, the lower
// bits u go into C0 + C1*u + C2*u^2 with integer coefficients. The only inexact inner step is the squarer;
// one final floor.
//
// Source: docs/spec/hopper-arithmetic.md 2 to 5b; all 2^32 inputs of each on an H200, 0 mismatches.

#include <cstdint>

#include "emu/arith/bits.hpp"
#include "emu/arith/mufu_tables.hpp"

namespace bitattn::arith::mufu {

/// Square of a 17-bit u in units of 2^19, as the unit's folded squarer gives it: partial products whose own
/// weight is below 2^19 are dropped one by one, so no carry comes from them.
///
/// With u = h*2^10 + l: every product of two bits of h is kept (weights from 2^20 on), every product of two
/// bits of l is dropped (weights up to 2^18), and bit j of h keeps those bits of l that reach weight 2^19
/// with it, from 8 - j on.
BITATTN_HD constexpr std::uint32_t square_17(std::uint32_t u) {
  const std::uint32_t h = u >> 10U;
  const std::uint32_t l = u & 0x3ffU;
  std::uint32_t s = 2U * h * h;
  // A mask and no product with the bit: compilers turn that into a branch nobody can predict.
  for (std::uint32_t j = 0; j < 7; ++j) s += (0U - (h >> j & 1U)) & (l >> (8U - j));
  return s;
}

/// 2^x. No subnormal results; |x| < 2^-23 gives exactly 1, integers exact powers of two.
BITATTN_HD constexpr std::uint32_t ex2(std::uint32_t x) {
  if (is_nan(x)) return kQuietNan;
  const int exponent_field = static_cast<int>(x >> 23U & 255U);
  const bool negative = (x & kSignBit) != 0U;
  if (exponent_field >= 127 + 8) return negative ? 0U : kInfinity;
  std::uint32_t fixed = 0;  // |x| with 23 fraction bits, lower bits cut off
  if (exponent_field != 0) {
    const std::uint32_t significand = (x & 0x7fffffU) | 0x800000U;
    const int shift = 127 - exponent_field;
    fixed = shift <= 0 ? significand << -shift : shift > 23 ? 0U : significand >> shift;
  }
  int integer = static_cast<int>(fixed >> 23U);
  std::uint32_t fraction = fixed & 0x7fffffU;
  if (negative) {  // one's complement of the fraction
    integer = fraction != 0U ? -integer - 1 : -integer;
    fraction = fraction != 0U ? 0x7fffffU - fraction : 0U;
  }
  const table::Segment c = table::ex2(fraction >> 17U);
  const std::uint32_t u = fraction & 0x1ffffU;
  const std::int64_t sum = static_cast<std::int64_t>(c.c0) * 8192 + 6114 +
                           static_cast<std::int64_t>(c.c1) * u +
                           static_cast<std::int64_t>(c.c2) * square_17(u);
  const std::uint32_t significand = static_cast<std::uint32_t>(sum >> 15);  // in [2^23, 2^24)
  const int field = integer + 127;
  if (field >= 255) return kInfinity;
  if (field <= 0) return 0U;
  return static_cast<std::uint32_t>(field) << 23U | (significand & 0x7fffffU);
}

/// 1/x. Zeros and subnormals give infinity, |x| > 2^126 gives zero.
BITATTN_HD constexpr std::uint32_t rcp(std::uint32_t x) {
  if (is_nan(x)) return kQuietNan;
  const int exponent_field = static_cast<int>(x >> 23U & 255U);
  const std::uint32_t sign = x & kSignBit;
  if (exponent_field == 0) return sign | kInfinity;
  if (exponent_field == 255) return sign;
  const std::uint32_t fraction = x & 0x7fffffU;
  const table::Segment c = table::rcp(fraction >> 16U);
  const std::uint32_t v = fraction & 0xffffU;
  const std::int64_t sum = static_cast<std::int64_t>(c.c0) * 8192 + 2023 +
                           static_cast<std::int64_t>(c.c1) * v +
                           static_cast<std::int64_t>(c.c2) * square_17(v << 1U);
  const std::uint32_t m =
      static_cast<std::uint32_t>(sum >> 15);  // in [2^23, 2^24], unit 2^-24; 2^24 for powers of two
  const int field = 253 - exponent_field + static_cast<int>(m >> 24U);
  if (field <= 0) return sign;
  return sign | static_cast<std::uint32_t>(field) << 23U | ((m >> 24U) != 0U ? 0U : (m & 0x7fffffU));
}

/// log2(x). Zeros and subnormals give -inf, other negative numbers NaN, 1 gives +0.
BITATTN_HD constexpr std::uint32_t lg2(std::uint32_t x) {
  if (is_nan(x)) return kQuietNan;
  const int exponent_field = static_cast<int>(x >> 23U & 255U);
  if (exponent_field == 0) return kSignBit | kInfinity;
  if ((x & kSignBit) != 0U) return kQuietNan;
  if (exponent_field == 255) return kInfinity;
  if (x == kOne) return 0U;
  const std::uint32_t fraction = x & 0x7fffffU;
  const std::uint32_t u = fraction & 0x1ffffU;
  const table::Segment c = table::lg2(fraction >> 17U);
  const std::int64_t log_fraction =
      (static_cast<std::int64_t>(c.c0) * 4096 + 837 + static_cast<std::int64_t>(c.c1) * u +
       2 * static_cast<std::int64_t>(c.c2) * square_17(u)) >>
      2;  // log2(1.fraction), unit 2^-36
  std::int64_t r = static_cast<std::int64_t>(exponent_field - 127) * (std::int64_t{1} << 36) + log_fraction;
  std::uint32_t sign = 0;
  if (r < 0) {  // one's complement magnitude
    sign = kSignBit;
    r = ~r;
  }
  if (r == 0) return sign;
  const int top = highest_bit(static_cast<std::uint64_t>(r));
  const std::uint32_t m =
      static_cast<std::uint32_t>(top >= 23 ? r >> (top - 23) : r << (23 - top));  // cut off
  return sign | static_cast<std::uint32_t>(top - 36 + 127) << 23U | (m & 0x7fffffU);
}

/// 1/sqrt(x). Zeros and subnormals give infinity of their sign, other negative numbers NaN.
BITATTN_HD constexpr std::uint32_t rsqrt(std::uint32_t x) {
  if (is_nan(x)) return kQuietNan;
  const int exponent_field = static_cast<int>(x >> 23U & 255U);
  if (exponent_field == 0) return (x & kSignBit) | kInfinity;
  if ((x & kSignBit) != 0U) return kQuietNan;
  if (exponent_field == 255) return 0U;
  const std::uint32_t fraction = x & 0x7fffffU;
  const std::uint32_t u = fraction & 0x1ffffU;
  const int exponent = exponent_field - 127;
  const int odd = exponent & 1;
  const int k = (exponent - odd) / 2;  // x = 4^k * y, y in [1, 4)
  if (fraction == 0U && odd == 0) return static_cast<std::uint32_t>(127 - k) << 23U;
  const table::Segment c = table::rsqrt((fraction >> 17U) + (odd != 0 ? 64U : 0U));
  const std::int64_t sum = static_cast<std::int64_t>(c.c0) * 16384 + 16383 +
                           static_cast<std::int64_t>(c.c1) * u +
                           4 * static_cast<std::int64_t>(c.c2) * square_17(u);
  const std::uint32_t m = static_cast<std::uint32_t>(sum >> 16);  // unit 2^-24
  return static_cast<std::uint32_t>(126 - k) << 23U | (m & 0x7fffffU);
}

/// tanh(x), an odd function, no flush: below 2^-8 x itself (subnormals too), from 8 on exactly 1.
BITATTN_HD constexpr std::uint32_t tanh(std::uint32_t x) {
  if (is_nan(x)) return kQuietNan;
  const std::uint32_t sign = x & kSignBit;
  const std::uint32_t fraction = x & 0x7fffffU;
  const int exponent = static_cast<int>(x >> 23U & 255U) - 127;
  if (exponent < -8) return x;
  if (exponent > 2) return sign | kOne;
  const std::uint32_t row = static_cast<std::uint32_t>(exponent + 8);
  const int segment_bits = table::tanh_bits(row);
  const table::Segment c =
      table::tanh(static_cast<std::uint32_t>(table::tanh_first(row)) + (fraction >> (23 - segment_bits)));
  const std::uint32_t u =
      fraction >> (6 - segment_bits) & 0x1ffffU;  // 17 bits below the segment's, the rest cut off
  const std::int64_t sum = static_cast<std::int64_t>(c.c0) * 32768 + static_cast<std::int64_t>(c.c1) * u +
                           2 * static_cast<std::int64_t>(c.c2) * square_17(u);  // unit 2^(exponent - 40)
  const int top = highest_bit(static_cast<std::uint64_t>(sum));
  // C0*2^15 alone is above 2^37, so that top > 23.
  // NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult)
  const std::uint32_t m = static_cast<std::uint32_t>(sum >> (top - 23));  // cut off
  return sign | static_cast<std::uint32_t>(exponent - 40 + top + 127) << 23U | (m & 0x7fffffU);
}

}  // namespace bitattn::arith::mufu
