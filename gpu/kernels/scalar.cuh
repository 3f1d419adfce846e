#pragma once
// The scalar fp32 arithmetic of FlashAttention-3, one PTX instruction a function.
//
// An operation order is the subject, so nothing here is left to the compiler: every addition, multiplication
// and fused multiply-add is written as the instruction that the real kernels execute
// (docs/spec/fa3-operation-order.md 1.2). PTX instructions with an explicit rounding mode are never
// contracted.

#include <cstdint>

namespace bitattn::gpu {

__device__ __forceinline__ float add(float a, float b) {
  float d;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

/// a - b. The chip's subtraction is the addition of b with its sign turned.
__device__ __forceinline__ float sub(float a, float b) {
  float d;
  asm("sub.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ float mul(float a, float b) {
  float d;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ float fma(float a, float b, float c) {
  float d;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

/// a * b - c in one rounding.
__device__ __forceinline__ float fused_multiply_subtract(float a, float b, float c) {
  return fma(a, b, -c);
}

__device__ __forceinline__ float max_ftz(float a, float b) {
  float d;
  asm("max.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ float ex2(float x) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

__device__ __forceinline__ float lg2(float x) {
  float d;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

__device__ __forceinline__ float rcp(float x) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

/// Plain IEEE addition: subnormals kept, as the bulk reduction to memory adds (1.2, RADD).
__device__ __forceinline__ float add_keeping_subnormals(float a, float b) {
  float d;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

/// Two BF16 words, `low` in the lower half: round to nearest even, NaN becomes 0x7fff.
__device__ __forceinline__ std::uint32_t bf16_pair(float low, float high) {
  std::uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float bf16_low(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float bf16_high(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000U);
}

__device__ __forceinline__ float minus_infinity() {
  return __uint_as_float(0xff800000U);
}
__device__ __forceinline__ float plus_infinity() {
  return __uint_as_float(0x7f800000U);
}
__device__ __forceinline__ float ln2() {
  return __uint_as_float(0x3f317218U);
}
__device__ __forceinline__ float log2e() {
  return __uint_as_float(0x3fb8aa3bU);
}

}  // namespace bitattn::gpu
