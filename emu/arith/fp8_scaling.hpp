#pragma once
// FP8 numbers with a scale that is a power of two: how a kernel would keep P or dS in 8 bits. Scaling by a
// power of two is exact, so the cast is the only rounding, and a scaled FP8 number is a BF16 number too.

#include <cmath>
#include <cstdint>

#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/narrow_float.hpp"

namespace bitattn::arith {

enum class Fp8 : std::uint8_t { e4m3, e5m2 };

constexpr float largest_fp8(Fp8 format) {
  return format == Fp8::e4m3 ? 448.0F : 57344.0F;
}

/// The FP8 number nearest to x as Hopper's cvt.rn.satfinite takes it (docs/spec/hopper-arithmetic.md 7),
/// widened.
constexpr float nearest_fp8(Fp8 format, float x) {
  const std::uint32_t bits = to_bits(x);
  return from_bits(format == Fp8::e4m3 ? fp32_from_e4m3(e4m3_from_fp32(bits))
                                       : fp32_from_e5m2(e5m2_from_fp32(bits)));
}

/// The largest e in [-126, 126] with amax * 2^e not above the format's largest number; 0 where amax is 0 or
/// no number.
inline int fp8_scale_exponent(Fp8 format, float amax) {
  if (!(amax > 0) || !std::isfinite(amax)) return 0;
  int e = std::ilogb(largest_fp8(format)) - std::ilogb(amax);
  if (std::ldexp(static_cast<double>(amax), e) > static_cast<double>(largest_fp8(format))) --e;
  return e < -126 ? -126 : e > 126 ? 126 : e;
}

/// x through FP8 at a scale of 2^exponent: MUL(nearest(MUL(x, 2^exponent)), 2^-exponent).
inline float through_fp8(Fp8 format, float x, int exponent) {
  const float scaled = ftz::mul(x, std::ldexp(1.0F, exponent));
  return ftz::mul(nearest_fp8(format, scaled), std::ldexp(1.0F, -exponent));
}

}  // namespace bitattn::arith
