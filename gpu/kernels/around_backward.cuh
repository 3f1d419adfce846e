#pragma once
// The small kernels before and after the backward's main kernel: row statistics, and the last casts.
// Step numbers in brackets: docs/spec/fa3-operation-order.md.

#include "gpu/kernels/order.cuh"
#include "gpu/kernels/params.hpp"

namespace bitattn::gpu {

inline constexpr int kRowThreads = 256;

/// D = rowsum(dO . O) and E = LSE * log2(e) of every query row [3.1, 3.2]. A row is shared by D/8 threads,
/// each with eight neighbouring columns; rows past the end get D = 0 and E = +inf.
template <int kHeadDim, class Order>
__global__ void __launch_bounds__(kRowThreads) preprocess_kernel(const __grid_constant__ PreprocessParams p) {
  constexpr int kThreadsPerRow = kHeadDim / 8;
  const int thread = static_cast<int>(threadIdx.x) % kThreadsPerRow;
  const int row =
      static_cast<int>(blockIdx.x * (kRowThreads / kThreadsPerRow) + threadIdx.x / kThreadsPerRow);
  const int head = static_cast<int>(blockIdx.y);
  const int batch = static_cast<int>(blockIdx.z);
  uint4 o{0, 0, 0, 0};
  uint4 dout{0, 0, 0, 0};
  if (row < p.seqlen_q) {
    const auto load = [&](const std::uint16_t* tensor, const Strides& s) {
      return *reinterpret_cast<const uint4*>(tensor + batch * s.batch + row * s.token + head * s.head +
                                             8 * thread);
    };
    o = load(p.out, p.out_strides);
    dout = load(p.dout, p.dout_strides);
  }
  // The second product is rounded on its own; the first and all others are fused.
  float sum = mul(bf16_high(dout.x), bf16_high(o.x));
  sum = fma(bf16_low(dout.x), bf16_low(o.x), sum);
  sum = fma(bf16_low(dout.y), bf16_low(o.y), sum);
  sum = fma(bf16_high(dout.y), bf16_high(o.y), sum);
  sum = fma(bf16_low(dout.z), bf16_low(o.z), sum);
  sum = fma(bf16_high(dout.z), bf16_high(o.z), sum);
  sum = fma(bf16_low(dout.w), bf16_low(o.w), sum);
  sum = fma(bf16_high(dout.w), bf16_high(o.w), sum);
#pragma unroll
  for (int offset = kThreadsPerRow / 2; offset > 0; offset /= 2) {
    sum = add(sum, __shfl_xor_sync(0xffffffffU, sum, offset));
  }
  if (thread != 0 || row >= p.padded_q) return;
  const std::int64_t unit = static_cast<std::int64_t>(batch) * p.heads_q + head;
  float lse_log2 = plus_infinity();
  if (row < p.seqlen_q) {
    const float lse = p.lse[unit * p.seqlen_q + row];
    lse_log2 = lse == minus_infinity() ? 0.0F : Order::lse_log2(lse);
  }
  p.dpsum[unit * p.padded_q + row] = row < p.seqlen_q ? sum : 0.0F;
  p.lse_log2[unit * p.padded_q + row] = lse_log2;
}

/// dQ = BF16(accumulator * softmax_scale) [5]. The accumulator of a tile lies in the order of the main
/// kernel's registers: [warpgroup][group of 8 queries][thread][4], dQ transposed.
template <class Tile>
__global__ void __launch_bounds__(128 * Tile::kWarpgroups)
    dq_postprocess_kernel(const __grid_constant__ DqPostprocessParams p) {
  constexpr int kD = Tile::kHeadDim;
  constexpr int kM = Tile::kBlockM;
  constexpr int kPitch = kD + 8;  // 16 bytes more than a row, so that neighbouring rows meet other banks
  __shared__ __align__(16) std::uint16_t rows[kM * kPitch];
  const int block_m = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int batch = static_cast<int>(blockIdx.z);
  const std::int64_t unit = static_cast<std::int64_t>(batch) * p.heads_q + head;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = thread % 32;
  const bool split_columns = Tile::kPanels == Tile::kWarpgroups;
  const int column = (split_columns ? 64 * warpgroup : 0) + thread / 32 * 16 + lane / 4;
  const int first_row = (split_columns ? 0 : Tile::kDqRows * warpgroup) + 2 * (lane % 4);

  // Query blocks that no key block has visited were never written.
  int visits = p.blocks_n;
  if constexpr (Tile::kCausal) {
    const int visible = (block_m + 1) * kM + p.seqlen_k - p.seqlen_q;
    visits = max(0, min(p.blocks_n, (visible + Tile::kBlockN - 1) / Tile::kBlockN));
  }
  const std::int64_t tile = unit * p.blocks_m + block_m;
  const auto* accum = reinterpret_cast<const float4*>(p.dq_accum) +
                      (tile * (kM * kD) + warpgroup * (Tile::kDqSliceBytes / 4)) / 4 + thread;
#pragma unroll
  for (int g = 0; g < Tile::kDqRows / 8; ++g) {
    const float4 quad = visits > 0 ? accum[g * 128] : float4{0, 0, 0, 0};
    const float values[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = first_row + 8 * g + e % 2;
      const int d = column + e / 2 * 8;
      rows[r * kPitch + d] = static_cast<std::uint16_t>(bf16_pair(mul(values[e], p.softmax_scale), 0.0F));
      if (p.dq_rows != nullptr) p.dq_rows[(tile * kM + r) * kD + d] = values[e];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kM * (kD / 8); i += 128 * Tile::kWarpgroups) {
    const int r = i / (kD / 8);
    const int d = i % (kD / 8) * 8;
    const std::int64_t token = static_cast<std::int64_t>(block_m) * kM + r;
    if (token >= p.seqlen_q) break;
    auto* out = p.dq + batch * p.dq_strides.batch + token * p.dq_strides.token + head * p.dq_strides.head + d;
    *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(rows + r * kPitch + d);
  }
}

/// dK or dV of a KV head: the tiles of its query heads added in ascending order onto +0, subnormals kept
/// [4.5], then the postprocess's multiply by one, which flushes them, and the cast [5].
template <int kHeadDim>
__global__ void __launch_bounds__(kRowThreads) group_sum_kernel(const __grid_constant__ GroupSumParams p) {
  constexpr int kThreadsPerRow = kHeadDim / 4;
  const int d = static_cast<int>(threadIdx.x) % kThreadsPerRow * 4;
  const int row =
      static_cast<int>(blockIdx.x * (kRowThreads / kThreadsPerRow) + threadIdx.x / kThreadsPerRow);
  const int kv_head = static_cast<int>(blockIdx.y);
  const int batch = static_cast<int>(blockIdx.z);
  if (row >= p.padded_k) return;
  const std::int64_t kv_unit = static_cast<std::int64_t>(batch) * p.heads_kv + kv_head;
  float4 sum{0, 0, 0, 0};
  for (int g = 0; g < p.group; ++g) {
    const std::int64_t at = ((kv_unit * p.group + g) * p.padded_k + row) * kHeadDim + d;
    const float4 part = *reinterpret_cast<const float4*>(p.parts + at);
    sum.x = add_keeping_subnormals(sum.x, part.x);
    sum.y = add_keeping_subnormals(sum.y, part.y);
    sum.z = add_keeping_subnormals(sum.z, part.z);
    sum.w = add_keeping_subnormals(sum.w, part.w);
  }
  if (p.sums != nullptr) {
    *reinterpret_cast<float4*>(p.sums + (kv_unit * p.padded_k + row) * kHeadDim + d) = sum;
  }
  if (row >= p.seqlen_k) return;
  auto* out = p.gradient + batch * p.strides.batch + row * p.strides.token + kv_head * p.strides.head + d;
  *reinterpret_cast<uint2*>(out) =
      uint2{bf16_pair(mul(sum.x, 1.0F), mul(sum.y, 1.0F)), bf16_pair(mul(sum.z, 1.0F), mul(sum.w, 1.0F))};
}

/// Zeros for a tensor that no kernel writes (no keys, or no queries).
struct FillParams {
  std::uint16_t* tensor;
  Strides strides;
  int batch, tokens, heads, head_dim;
};
static __global__ void __launch_bounds__(kRowThreads) zero_kernel(FillParams p) {
  const std::int64_t per_token = static_cast<std::int64_t>(p.heads) * p.head_dim;
  const std::int64_t size = static_cast<std::int64_t>(p.batch) * p.tokens * per_token;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; i < size;
       i += static_cast<std::int64_t>(gridDim.x) * kRowThreads) {
    const std::int64_t token = i / per_token;
    p.tensor[token / p.tokens * p.strides.batch + token % p.tokens * p.strides.token +
             i % per_token / p.head_dim * p.strides.head + i % p.head_dim] = 0;
  }
}
static __global__ void __launch_bounds__(kRowThreads)
    fill_kernel(float* values, std::int64_t count, float value) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kRowThreads) {
    values[i] = value;
  }
}

}  // namespace bitattn::gpu
