#pragma once
// The scalar steps that a remedy would change, as a policy of the kernels. What is not here is fixed.
//
// The kernels are templates on an order; another order is another struct with these functions.

#include "gpu/kernels/scalar.cuh"

namespace bitattn::gpu {

/// FlashAttention-3 as nvcc 13.0.88 compiles it (docs/spec/fa3-operation-order.md, sections in brackets).
struct Flash3Order {
  /// The row's reference of the exponents: m * c, rounded on its own [2.5.6].
  __device__ __forceinline__ static float forward_reference(float row_max, float c) {
    return mul(row_max, c);
  }
  /// Argument of the forward's exponential: x * c fused with the rounded reference [2.5.7].
  __device__ __forceinline__ static float forward_exponent(float x, float c, float reference) {
    return fused_multiply_subtract(x, c, reference);
  }
  /// Argument of the exponential that rescales what earlier key blocks summed: subtract first [2.5.5].
  __device__ __forceinline__ static float rescale_exponent(float previous_max, float row_max, float c) {
    return mul(sub(previous_max, row_max), c);
  }
  /// Log-sum-exp: the max term is fused, the log term rounded [2.7.3].
  __device__ __forceinline__ static float lse(float row_max, float total, float c) {
    return fma(mul(c, ln2()), row_max, mul(lg2(total), ln2()));
  }
  /// What the backward's exponential subtracts [3.2].
  __device__ __forceinline__ static float lse_log2(float lse) { return mul(lse, log2e()); }
  /// Argument of the backward's exponential [4.3.5].
  __device__ __forceinline__ static float backward_exponent(float s, float c, float lse_log2) {
    return fused_multiply_subtract(s, c, lse_log2);
  }
  /// dS from the unrounded P: subtract, then multiply [4.3.6].
  __device__ __forceinline__ static float score_gradient(float p, float dp, float dpsum) {
    return mul(p, sub(dp, dpsum));
  }
};

}  // namespace bitattn::gpu
