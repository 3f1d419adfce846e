#pragma once
// fp32 with flush to zero, as all scalar code compiled with --use_fast_math runs on Hopper: FADD, FMUL, FFMA
// and FMNMX with .FTZ.
//
// Inputs that are subnormal become zero of their sign. The result becomes zero of its sign when it is tiny
// AFTER rounding to 24 bits with unbounded exponent, that is when the exact value v has
// 0 < |v| < 2^-126 - 2^-151; between that and 2^-126 it is the smallest normal number. Every NaN is
// 0x7fffffff.
//
// Source: docs/spec/hopper-arithmetic.md 6 and 9; 6.4e9 cases on an H200, 0 mismatches.

#include "emu/arith/bits.hpp"
#include "emu/arith/fp32.hpp"
#include "emu/arith/mufu.hpp"

namespace bitattn::arith::ftz {

BITATTN_HD constexpr float in(float x) {
  return from_bits(flush(to_bits(x)));
}

namespace detail {

/// `r`: an IEEE result of magnitude at most 2^-126 of operands that are not subnormal. Decides, from the
/// exact value p + z (p a product of two floats, exact in double), between zero and the smallest normal
/// number.
BITATTN_HD inline float settle_tiny(float r, double p, double z) {
  const double s = p + z;  // two-sum: s + error is exactly p + z
  const double bb = s - p;
  const double error = (p - (s - bb)) + (z - bb);
  constexpr double kThreshold = 0x1p-126 - 0x1p-151;
  const double magnitude = s < 0 ? -s : s;
  const double magnitude_error = s < 0 ? -error : error;
  const bool tiny = magnitude < kThreshold || (magnitude == kThreshold && magnitude_error < 0);
  return from_bits((to_bits(r) & kSignBit) | (tiny ? 0U : kSmallestNormal));
}

BITATTN_HD constexpr bool near_underflow(float r) {
  return (to_bits(r) & 0x7fffffffU) <= kSmallestNormal;
}

}  // namespace detail

/// FADD.FTZ. A sum of two normal numbers is exact when it is subnormal, so flushing the IEEE result is
/// enough.
BITATTN_HD inline float add(float a, float b) {
  return in(arith::add(in(a), in(b)));
}

/// FADD.FTZ with the second operand negated; a NaN stays the chip's.
BITATTN_HD inline float sub(float a, float b) {
  return add(a, from_bits(to_bits(b) ^ kSignBit));
}

/// FMUL.FTZ.
BITATTN_HD inline float mul(float a, float b) {
  a = in(a);
  b = in(b);
  const float r = arith::mul(a, b);
  if (!detail::near_underflow(r)) return r;
  return detail::settle_tiny(r, static_cast<double>(a) * static_cast<double>(b), 0.0);
}

/// FFMA.FTZ: a*b + c with one rounding.
BITATTN_HD inline float fma(float a, float b, float c) {
  a = in(a);
  b = in(b);
  c = in(c);
  const float r = arith::fma(a, b, c);
  if (!detail::near_underflow(r)) return r;
  return detail::settle_tiny(r, static_cast<double>(a) * static_cast<double>(b), static_cast<double>(c));
}

/// FMNMX.FTZ, the greater: one NaN gives the other operand, flushed, two NaNs 0x7fffffff; -0 < +0.
BITATTN_HD constexpr float max(float a, float b) {
  return arith::max(in(a), in(b));
}

/// max.NaN.ftz.f32: as max, but one NaN is enough for 0x7fffffff.
BITATTN_HD constexpr float max_nan(float a, float b) {
  return is_nan(to_bits(a)) || is_nan(to_bits(b)) ? from_bits(kQuietNan) : max(a, b);
}

/// FMNMX.FTZ, the smaller: mirrors max.
BITATTN_HD constexpr float min(float a, float b) {
  const std::uint32_t m = to_bits(max(from_bits(to_bits(a) ^ kSignBit), from_bits(to_bits(b) ^ kSignBit)));
  return from_bits(is_nan(m) ? kQuietNan : m ^ kSignBit);
}

/// div.approx.ftz.f32: a * rcp(b), no range scaling, so |b| > 2^126 gives 0 (or NaN for an infinite a).
BITATTN_HD inline float div(float a, float b) {
  return mul(a, from_bits(mufu::rcp(to_bits(b))));
}

/// neg.ftz.f32 and abs.ftz.f32: flush, then set the sign; a NaN becomes 0x7fffffff.
BITATTN_HD constexpr float neg(float a) {
  const std::uint32_t x = to_bits(a);
  return from_bits(is_nan(x) ? kQuietNan : flush(x) ^ kSignBit);
}
BITATTN_HD constexpr float abs(float a) {
  const std::uint32_t x = to_bits(a);
  return from_bits(is_nan(x) ? kQuietNan : flush(x) & ~kSignBit);
}

}  // namespace bitattn::arith::ftz
