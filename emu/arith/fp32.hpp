#pragma once
// Plain IEEE fp32 (no flush): add, mul, fma, to nearest even, subnormals kept, every NaN 0x7fffffff; and max.
// Source: docs/spec/hopper-arithmetic.md 6; 134,217,728 cases for each operation against an H200, 0
// mismatches.
//
// Callers must be compiled without contraction (-ffp-contract=off): a fused product here is a bug. On the
// device the instructions are written out, because nvcc makes __fadd_rn flush under -ftz=true (part of
// --use_fast_math).

#include "emu/arith/bits.hpp"

#if !defined(__CUDA_ARCH__)
#include <cmath>
#endif

#if defined(__FAST_MATH__)
#error "emu/arith is exact IEEE arithmetic: compile without -ffast-math and -Ofast"
#endif

namespace bitattn::arith {

/// A float whose NaN, if it is one, is the chip's.
BITATTN_HD constexpr float canonical(float x) {
  return is_nan(to_bits(x)) ? from_bits(kQuietNan) : x;
}

BITATTN_HD inline float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return canonical(r);
#else
  return canonical(a + b);
#endif
}

BITATTN_HD inline float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return canonical(r);
#else
  return canonical(a * b);
#endif
}

BITATTN_HD inline float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return canonical(r);
#else
  return canonical(std::fma(a, b, c));
#endif
}

/// FMNMX, the greater: one NaN gives the other operand, two NaNs 0x7fffffff; -0 < +0. Subnormals kept.
/// Source: docs/spec/hopper-arithmetic.md 9.
BITATTN_HD constexpr float max(float a, float b) {
  const std::uint32_t x = to_bits(a);
  const std::uint32_t y = to_bits(b);
  if (is_nan(x)) return canonical(b);
  if (is_nan(y)) return a;
  // Sign and magnitude as an ordered integer in which -0 comes just below +0.
  const std::int64_t ordered_x = (x & kSignBit) != 0U ? ~std::int64_t{x & 0x7fffffffU} : std::int64_t{x};
  const std::int64_t ordered_y = (y & kSignBit) != 0U ? ~std::int64_t{y & 0x7fffffffU} : std::int64_t{y};
  return ordered_x > ordered_y ? a : b;
}

}  // namespace bitattn::arith
