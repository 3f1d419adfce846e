#pragma once
// One fused tensor-core step of 16 products in the arithmetic of any GPU, bit-identical to
// arith::mma_bf16_k16.
//
// The model aligns every term to 2^(M-25), cuts it off toward zero, adds the terms exactly and cuts the sum
// to 24 bits (docs/spec/hopper-arithmetic.md 1). Here a term is
//
//     truncate((a * b) * 2^(25-M))                  two fp32 multiplies and one conversion to an integer,
//
// and the terms are added as 32-bit integers. This gives the model's bits under guards that every step checks
// (M in its biased form m = M + 127):
//
//   (1) no operand or accumulator is infinite or NaN                             [m stays small]
//   (2) m >= 26. A product of two BF16 numbers has 16 significant bits, so a * b is exact unless it is below
//   2^-126; then,
//       cut off toward zero, it stays below 2^-126 <= 2^(M-25) and its term is 0, as it should be. The second
//       multiply only moves the exponent; where it leaves the normal range the value is far below 1. The
//       result is a multiple of 2^(M-25) >= 2^-126: normal, or 0.
//   (3) m <= 248. Then |a * b| < 2^(M+2) <= 2^123, and the result is below 2^(M-25) * 2^31 <= 2^127: nothing
//   overflows. (4) The sum fits 32 bits. 16 products are below 16 * 255^2 * 2^11 < 2^31; only adding the
//   accumulator's term may
//       exceed that, which is tested.
//
// Where there is no product at all, the accumulator stays (-0 becomes +0). Below (2) `low_step` does the same
// with operands moved up; everything else goes through the model itself.

#include <cstdint>

#include "emu/arith/tensor_core.hpp"
#include "gpu/emulator/chip_math.hpp"

namespace bitattn::gpu::emulator {

inline constexpr int kStep = 16;       ///< products of one step
inline constexpr int kSmallestM = 26;  ///< of the fast path, biased
inline constexpr int kLargestM = 248;
inline constexpr int kNoM = -1000;  ///< below: no term that is not zero
inline constexpr int kFloorM = -133 + 127;

/// m of a step: `products` as greatest_of_halves gives it, c the accumulator.
BITATTN_HD inline int alignment(int products, float c) {
  const std::uint32_t magnitude = arith::to_bits(c) & 0x7fffffffU;
  const int field = static_cast<int>(magnitude >> 23U);
  const int c_exponent = magnitude == 0U ? 2 * kNoM : field > 1 ? field : 1;
  const int product_exponent = products - 127;
  return product_exponent > c_exponent ? product_exponent : c_exponent;
}

/// Is there any product? `products` as greatest_of_halves gives it.
BITATTN_HD constexpr bool has_products(int products) {
  return products > 0;
}

BITATTN_HD constexpr bool is_fast(int m) {
  return m < kNoM || (m >= kSmallestM && m <= kLargestM);
}

/// m for the scales below: within the guards.
BITATTN_HD constexpr int clamped(int m) {
  return m < kSmallestM ? kSmallestM : m > kLargestM ? kLargestM : m;
}
/// 2^(25-M)
BITATTN_HD constexpr float scale_up(int clamped_m) {
  return arith::from_bits(static_cast<std::uint32_t>(279 - clamped_m) << 23U);
}
/// 2^(M-25) from 2^(25-M).
BITATTN_HD constexpr float scale_down_from_up(float up) {
  return arith::from_bits((254U << 23U) - arith::to_bits(up));
}

/// Exponent field of an accumulator, 0 for zeros and subnormals: below the guards either way.
BITATTN_HD constexpr int exponent_field(float c) {
  return static_cast<int>(arith::to_bits(c) << 1U >> 24U);
}

/// A step without products: the accumulator stays, -0 becomes +0, a NaN the chip's.
BITATTN_HD inline float idle_step(float c) {
  return arith::add(c, 0.0F);
}

/// Term of a product; a and b are BF16 numbers as fp32.
BITATTN_HD inline std::int32_t product_term(float a, float b, float up) {
  return truncate(multiply(multiply_toward_zero(a, b), up));
}

/// Sum of the terms and the accumulator's. Sets the sign of `overflow` where it does not fit 32 bits.
BITATTN_HD inline std::int32_t add_accumulator(std::int32_t products, float c, float up,
                                               std::uint32_t& overflow) {
  const std::uint32_t c_term = static_cast<std::uint32_t>(truncate(multiply(c, up)));
  const std::uint32_t p = static_cast<std::uint32_t>(products);
  const std::uint32_t sum = p + c_term;
  overflow |= (p ^ sum) & (c_term ^ sum);
  return static_cast<std::int32_t>(sum);
}

/// The accumulator after a step.
BITATTN_HD inline float finish_step(std::int32_t sum, float down) {
  return multiply(to_float_toward_zero(sum), down);
}

/// A step with m < kSmallestM and finite terms. `a` and `b`: 16 numbers as fp32, `stride_a` and `stride_b`
/// apart. `done` false: not for this path, nothing decided.
BITATTN_HD inline float low_step(const float* a, int stride_a, const float* b, int stride_b, float c, int m,
                                 bool& done) {
  // All products are below 2^(M+2) <= 2^-100, so a number whose partner is not zero is below 2^34: moved up
  // by 2^64 it does not overflow, and every product of 2^-158 <= 2^(M-25) or more is then a normal number,
  // exact.
  constexpr float kUp = 0x1p64F;
  if (m < kFloorM) m = kFloorM;
  const float up = arith::from_bits(static_cast<std::uint32_t>(215 - m) << 23U);  // 2^(25-M-64)
  std::int32_t products = 0;
  for (int k = 0; k < kStep; ++k) {
    const float x = a[k * stride_a];
    const float y = b[k * stride_b];
    if (x == 0.0F || y == 0.0F) continue;
    products += product_term(multiply(x, kUp), y, up);
  }
  std::uint32_t overflow = 0;
  const std::int32_t sum = add_accumulator(products, multiply(c, kUp), up, overflow);
  done = overflow >> 31U == 0U;
  // sum * 2^(M-25) in two multiplies: the first exact, the second cut off below 2^-149.
  const float first = multiply(to_float_toward_zero(sum), 0x1p-64F);
  const float result =
      multiply_toward_zero(first, arith::from_bits(static_cast<std::uint32_t>(m - 127 + 39 + 127) << 23U));
  return result == 0.0F ? 0.0F : result;  // an underflow to zero loses its sign
}

/// A step outside the fast path's guards. Operands as fp32 numbers, which may be infinite or NaN.
BITATTN_HD inline float careful_step(const float* a, int stride_a, const float* b, int stride_b, float c,
                                     int m, arith::TensorCoreRule rule, bool chip_rule) {
  if (chip_rule && m < kSmallestM) {
    bool done = false;
    const float result = low_step(a, stride_a, b, stride_b, c, m, done);
    if (done) return result;
  }
  std::uint16_t x[kStep];
  std::uint16_t y[kStep];
  for (int k = 0; k < kStep; ++k) {
    x[k] = static_cast<std::uint16_t>(arith::to_bits(a[k * stride_a]) >> 16U);
    y[k] = static_cast<std::uint16_t>(arith::to_bits(b[k * stride_b]) >> 16U);
  }
  return arith::from_bits(arith::mma_bf16_k16(x, y, arith::to_bits(c), rule));
}

/// The whole step for one element, in the order in which a tile product takes it. For tests.
inline float whole_step(const float* a, const float* b, float c) {
  std::uint32_t pairs = kNoProducts;
  for (int k = 0; k < kStep; k += 2) {
    const auto pair = [](const float* v) {
      return exponent_half(arith::to_bits(v[0])) | exponent_half(arith::to_bits(v[1])) << 16U;
    };
    pairs = greatest_sum(pair(a + k), pair(b + k), pairs);
  }
  const int products = greatest_of_halves(pairs);
  const int m = alignment(products, c);
  const float up = scale_up(clamped(m));
  std::int32_t sum = 0;
  for (int k = 0; k < kStep; ++k) sum += product_term(a[k], b[k], up);
  std::uint32_t overflow = 0;
  sum = add_accumulator(sum, c, up, overflow);
  if (!is_fast(m) || overflow >> 31U != 0U) return careful_step(a, 1, b, 1, c, m, arith::kHopperWide, true);
  return finish_step(sum, scale_down_from_up(up));
}

}  // namespace bitattn::gpu::emulator
