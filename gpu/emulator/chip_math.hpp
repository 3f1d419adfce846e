#pragma once
// The few instructions of a GPU that the fast tile product is made of, and the same on the host for tests.
// All of them are exact or cut off toward zero, and mean the same on every GPU.

#include <cstdint>

#include "emu/arith/bits.hpp"

namespace bitattn::gpu::emulator {

/// a * b cut off toward zero to fp32, subnormals kept; a and b finite, no overflow.
BITATTN_HD inline float multiply_toward_zero(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rz(a, b);
#else
  const double exact = static_cast<double>(a) * static_cast<double>(b);
  float nearest = static_cast<float>(exact);
  const double magnitude = exact < 0 ? -exact : exact;
  const double found = static_cast<double>(nearest < 0 ? -nearest : nearest);
  if (found > magnitude) nearest = arith::from_bits(arith::to_bits(nearest) - 1U);
  return nearest;
#endif
}

/// a * b where the product is exact, or of no account below 1.
BITATTN_HD inline float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

/// x cut off toward zero; |x| < 2^31, anything else gives something.
BITATTN_HD inline std::int32_t truncate(float x) {
#if defined(__CUDA_ARCH__)
  return __float2int_rz(x);
#else
  return x > -2147483648.0F && x < 2147483648.0F ? static_cast<std::int32_t>(x) : 0;
#endif
}

/// n cut off toward zero to 24 bits; 0 gives +0.
BITATTN_HD inline float to_float_toward_zero(std::int32_t n) {
#if defined(__CUDA_ARCH__)
  return __int2float_rz(n);
#else
  const std::uint32_t sign = n < 0 ? arith::kSignBit : 0U;
  std::uint32_t magnitude = n < 0 ? 0U - static_cast<std::uint32_t>(n) : static_cast<std::uint32_t>(n);
  if (magnitude == 0U) return 0.0F;
  const int excess = arith::highest_bit(magnitude) - 23;
  if (excess > 0) magnitude = magnitude >> excess << excess;
  return arith::from_bits(arith::to_bits(static_cast<float>(magnitude)) | sign);
#endif
}

// ---- Exponents of products, two at a time in the halves of a word. ----
//
// A number's exponent E (the exponent field, 1 for subnormals) becomes a half-word such that the halves of
// two numbers add up to the exponent of their product, and the greatest sum tells whether there is a product
// at all (zeros sink far below) or an infinity or NaN among them (they rise far above). From sm_90 on the
// halves are integers, added and compared in one instruction; before, they are fp16 numbers 512 + E, whose
// sums fp16 holds exactly.

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
inline constexpr std::uint32_t kZeroExponent = 0xf800U;     ///< -2048
inline constexpr std::uint32_t kSpecialExponent = 0x2000U;  ///< 8192
inline constexpr std::uint32_t kNoProducts = 0xc000c000U;   ///< two of -16384
inline constexpr int kSumBase = 0;
BITATTN_HD constexpr std::uint32_t finite_exponent(std::uint32_t field) {
  return field;
}
#else
inline constexpr std::uint32_t kZeroExponent = 0xf000U;     ///< -8192
inline constexpr std::uint32_t kSpecialExponent = 0x7c00U;  ///< infinity
inline constexpr std::uint32_t kNoProducts = 0xfbfffbffU;   ///< two of -65504
inline constexpr int kSumBase = 0x6400;                     ///< 1024
BITATTN_HD constexpr std::uint32_t finite_exponent(std::uint32_t field) {
  return 0x6000U | field << 1U;
}
#endif

/// The half-word of a BF16 number, given as fp32 bits.
BITATTN_HD constexpr std::uint32_t exponent_half(std::uint32_t bits) {
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const std::uint32_t field = magnitude >> 23U;
  if (magnitude == 0U) return kZeroExponent;
  return field == 255U ? kSpecialExponent : finite_exponent(field == 0U ? 1U : field);
}

/// Half by half the greater of a + b and m.
BITATTN_HD inline std::uint32_t greatest_sum(std::uint32_t a, std::uint32_t b, std::uint32_t m) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return __viaddmax_s16x2(a, b, m);
#elif defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("{\n.reg .b32 sum;\nadd.rn.f16x2 sum, %1, %2;\nmax.f16x2 %0, sum, %3;\n}"
      : "=r"(result)
      : "r"(a), "r"(b), "r"(m));
  return result;
#else
  const auto half = [](std::uint32_t word, int i) { return static_cast<std::int16_t>(word >> (16 * i)); };
  std::uint32_t result = 0;
  for (int i = 0; i < 2; ++i) {
    const int sum = static_cast<std::int16_t>(half(a, i) + half(b, i));
    const int greatest = sum > half(m, i) ? sum : half(m, i);
    result |= static_cast<std::uint32_t>(static_cast<std::uint16_t>(greatest)) << (16 * i);
  }
  return result;
#endif
}

/// E_a + E_b of the greatest product among both halves; far below 0 where there is none, above 1000 where an
/// operand is infinite or NaN.
BITATTN_HD inline int greatest_of_halves(std::uint32_t m) {
  const int low = static_cast<std::int16_t>(m);
  const int high = static_cast<std::int16_t>(m >> 16U);
  return (low > high ? low : high) - kSumBase;
}

}  // namespace bitattn::gpu::emulator
