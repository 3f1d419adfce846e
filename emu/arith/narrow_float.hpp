#pragma once
// FP16 and FP8 (e4m3, e5m2): conversion from fp32 as Hopper's cvt does it, and e4m3 widened to FP16.
// Source: docs/spec/hopper-arithmetic.md 7; all 2^32 inputs of each compared on an H200, 0 mismatches.

#include "emu/arith/bits.hpp"

namespace bitattn::arith {

namespace detail {

/// fp32 bits to a float of `exponent_bits` and `fraction_bits`, to nearest even, subnormal results kept.
/// `largest`: code of the largest finite magnitude; `overflow`: code above it and for infinity; `nan`: code
/// of any NaN.
template <int exponent_bits, int fraction_bits>
BITATTN_HD constexpr std::uint32_t narrow(std::uint32_t x, std::uint32_t largest, std::uint32_t overflow,
                                          std::uint32_t nan) {
  if (is_nan(x)) return nan;
  const std::uint32_t sign = (x >> 31U) << (exponent_bits + fraction_bits);
  const int exponent_field = static_cast<int>(x >> 23U & 255U);
  if (exponent_field == 255) return sign | overflow;
  const std::uint32_t significand = (x & 0x7fffffU) | (exponent_field != 0 ? 0x800000U : 0U);
  const int exponent = (exponent_field != 0 ? exponent_field : 1) - 127;
  constexpr int min_exponent = 2 - (1 << (exponent_bits - 1));
  const int shift = 23 - fraction_bits + (exponent < min_exponent ? min_exponent - exponent : 0);
  if (shift > 31) return sign;
  std::uint32_t quotient = static_cast<std::uint32_t>(static_cast<std::uint64_t>(significand) >> shift);
  const std::uint32_t rest = significand & static_cast<std::uint32_t>((std::uint64_t{1} << shift) - 1U);
  const std::uint32_t half = std::uint32_t{1} << (shift - 1);
  if (rest > half || (rest == half && (quotient & 1U) != 0U)) ++quotient;
  const std::uint32_t code =
      exponent < min_exponent
          ? quotient
          : quotient + (static_cast<std::uint32_t>(exponent - min_exponent) << fraction_bits);
  return sign | (code > largest ? overflow : code);
}

}  // namespace detail

/// cvt.rn.f16x2.f32: overflow to infinity, NaN 0x7fff.
BITATTN_HD constexpr std::uint16_t f16_from_fp32(std::uint32_t x) {
  return static_cast<std::uint16_t>(detail::narrow<5, 10>(x, 0x7bffU, 0x7c00U, 0x7fffU));
}
/// cvt.rn.satfinite.e4m3x2.f32: magnitudes above 448 and infinities become 448, NaN 0x7f.
BITATTN_HD constexpr std::uint8_t e4m3_from_fp32(std::uint32_t x) {
  return static_cast<std::uint8_t>(detail::narrow<4, 3>(x, 0x7eU, 0x7eU, 0x7fU));
}
/// cvt.rn.satfinite.e5m2x2.f32: magnitudes above 57344 and infinities become 57344, NaN 0x7f.
BITATTN_HD constexpr std::uint8_t e5m2_from_fp32(std::uint32_t x) {
  return static_cast<std::uint8_t>(detail::narrow<5, 2>(x, 0x7bU, 0x7bU, 0x7fU));
}

/// e4m3 to FP16: exact; NaN becomes 0x7fff.
BITATTN_HD constexpr std::uint16_t f16_from_e4m3(std::uint8_t v) {
  const std::uint32_t sign = static_cast<std::uint32_t>(v >> 7U) << 15U;
  const std::uint32_t exponent = v >> 3U & 15U;
  const std::uint32_t fraction = v & 7U;
  if ((v & 0x7fU) == 0x7fU) return 0x7fffU;
  if (exponent != 0U) return static_cast<std::uint16_t>(sign | (exponent + 8U) << 10U | fraction << 7U);
  if (fraction == 0U) return static_cast<std::uint16_t>(sign);
  const std::uint32_t top = fraction >= 4U ? 2U : fraction >= 2U ? 1U : 0U;  // the value is fraction * 2^-9
  return static_cast<std::uint16_t>(sign | (top + 6U) << 10U | (fraction << (10U - top) & 0x3ffU));
}

namespace detail {

/// A code of `exponent_bits` and `fraction_bits` as fp32, exact. The top exponent is a number like any other.
template <int exponent_bits, int fraction_bits>
BITATTN_HD constexpr std::uint32_t widen(std::uint32_t code) {
  const std::uint32_t sign = (code >> (exponent_bits + fraction_bits) & 1U) << 31U;
  const std::uint32_t exponent = code >> fraction_bits & ((1U << exponent_bits) - 1U);
  std::uint32_t fraction = code & ((1U << fraction_bits) - 1U);
  constexpr std::uint32_t bias = 127U - ((1U << (exponent_bits - 1)) - 1U);
  if (exponent != 0U) return sign | (exponent + bias) << 23U | fraction << (23 - fraction_bits);
  if (fraction == 0U) return sign;
  std::uint32_t field = bias + 1U;  // a subnormal: shifted up until its leading bit is the implied one
  while (fraction >> fraction_bits == 0U) {
    fraction <<= 1U;
    --field;
  }
  return sign | field << 23U | (fraction & ((1U << fraction_bits) - 1U)) << (23 - fraction_bits);
}

}  // namespace detail

/// e4m3 to fp32: exact; NaN becomes 0x7fffffff.
BITATTN_HD constexpr std::uint32_t fp32_from_e4m3(std::uint8_t v) {
  return (v & 0x7fU) == 0x7fU ? kQuietNan : detail::widen<4, 3>(v);
}
/// e5m2 to fp32: exact; NaN becomes 0x7fffffff.
BITATTN_HD constexpr std::uint32_t fp32_from_e5m2(std::uint8_t v) {
  if ((v & 0x7fU) > 0x7cU) return kQuietNan;
  if ((v & 0x7fU) == 0x7cU) return kInfinity | (v >> 7U != 0U ? kSignBit : 0U);
  return detail::widen<5, 2>(v);
}

}  // namespace bitattn::arith
