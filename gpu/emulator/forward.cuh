#pragma once
// The forward, one visit of a key block at a time: scores, the rows' softmax step, P.V; then the end of every
// row. Docs/spec/fa3-operation-order.md 2 (sections in brackets).

#include "gpu/emulator/plan.hpp"
#include "gpu/emulator/rules.hpp"
#include "gpu/emulator/tile_product.cuh"

namespace bitattn::gpu::emulator {

/// Everything the forward kernels read and write. Slot t of the workspace belongs to tile t of the wave.
struct ForwardState {
  Rules rules;
  Shape shape;
  const RowUnit* units;
  const ForwardTile* tiles;
  const std::uint16_t *q, *k, *v;
  float* scores;     ///< [tile][block_m][block_n]
  std::uint16_t* p;  ///< [tile][block_m][block_n]
  float* o;          ///< [tile][block_m][head_dim_v]
  float* row_max;    ///< [tile][block_m]
  float* alpha;      ///< [tile][block_m]
  float* sums;       ///< [tile][block_m][4]
  std::uint16_t* out;
  float* out_fp32;  ///< may be nullptr
  float* lse;
  const std::int64_t* rows;  ///< first row of (sequence, head) in lse
};

/// The key block of a tile's visit, right to left or left to right.
__device__ inline int visited_block(const ForwardState& state, const ForwardTile& tile, int visit) {
  return state.rules.forward.key_blocks == profile::KeyBlockOrder::right_to_left ? tile.last_block - 1 - visit
                                                                                 : tile.first_block + visit;
}

/// Tokens of a tile of keys that lie in memory: packed sequences read their neighbours.
__device__ inline int keys_in_memory(const Shape& shape, const RowUnit& unit, int block) {
  const int first = block * shape.block_n;
  const int in_memory = shape.varlen ? shape.total_k - unit.k_begin - first : unit.k_length - first;
  return max(0, min(in_memory, shape.block_n));
}

/// `tensor` from a token on, its head's columns as k of the product.
__device__ inline OperandView token_rows(const std::uint16_t* tensor, int token, int heads, int head,
                                         int columns, int tokens) {
  OperandView view;
  view.stride = static_cast<std::int64_t>(heads) * columns;
  view.data = tensor + token * view.stride + static_cast<std::int64_t>(head) * columns;
  view.lines = tokens;
  view.depth = columns;
  return view;
}

/// The same memory with tokens as k of the product.
__device__ inline OperandView token_columns(const std::uint16_t* tensor, int token, int heads, int head,
                                            int columns, int tokens) {
  OperandView view = token_rows(tensor, token, heads, head, columns, tokens);
  view.lines = columns;
  view.depth = tokens;
  return view;
}

__device__ inline int steps_of(int depth) {
  return (depth + kStep - 1) / kStep;
}

/// S of one visit [2.5.1]. Blocks: (tile, columns of 64) along x, rows of 64 along y.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    forward_scores(const ForwardState state, int visit) {
  __shared__ TileMemory memory;
  const Shape& shape = state.shape;
  const int column_tiles = (shape.block_n + kTile - 1) / kTile;
  const int t = static_cast<int>(blockIdx.x) / column_tiles;
  const int column = static_cast<int>(blockIdx.x) % column_tiles * kTile;
  const int row = static_cast<int>(blockIdx.y) * kTile;
  const ForwardTile tile = state.tiles[t];
  if (row >= tile.rows) return;
  const RowUnit unit = state.units[tile.unit];
  const int n = visited_block(state, tile, visit);
  OperandView q =
      token_rows(state.q, unit.q_begin, shape.heads_q, unit.head, shape.head_dim, tile.first_row + tile.rows);
  q.group = unit.group;
  q.group_stride = shape.head_dim;
  const OperandView k = token_rows(state.k, unit.k_begin + n * shape.block_n, shape.heads_kv, unit.kv_head,
                                   shape.head_dim, keys_in_memory(shape, unit, n));
  Accumulators c = {};
  tile_product<AdjacentK, AdjacentK>(memory, q, tile.first_row + row, k, column, steps_of(shape.head_dim),
                                     state.rules.tensor_core, state.rules.chip_tensor_core, c);
  const OwnPlace own;
  for_own_elements(own, row, column, min(shape.block_m, tile.rows), shape.block_n, c,
                   [&](int r, int j, float& x) {
                     state.scores[(static_cast<std::int64_t>(t) * shape.block_m + r) * shape.block_n + j] = x;
                   });
}

/// Softcap, mask, row max, exponentials, partial sums and the cast of P for every row of one visit [2.5.2
/// to 2.5.9]. Four threads a row, which own its columns as the quad of lanes in the kernel does. Blocks:
/// tiles along x, 64 rows along y.
__global__ void __launch_bounds__(kThreads) forward_rows(const ForwardState state, int visit) {
  const Shape& shape = state.shape;
  const Rules& rules = state.rules;
  const Ops ops{rules.flush};
  const int t = static_cast<int>(blockIdx.x);
  const ForwardTile tile = state.tiles[t];
  const int r = static_cast<int>(blockIdx.y) * (kThreads / 4) + static_cast<int>(threadIdx.x) / 4;
  const int quad = static_cast<int>(threadIdx.x) % 4;
  if (static_cast<int>(blockIdx.y) * (kThreads / 4) >= tile.rows) return;
  const bool valid = r < tile.rows;
  const RowUnit unit = state.units[tile.unit];
  const int n = visited_block(state, tile, visit);
  const bool first = visit == 0;
  // The kernel's masking steps [2.4]: the last block tests the length too; unmasked steps do not look for
  // -inf.
  const profile::Mask& mask = shape.mask;
  const bool test_length = n == tile.last_block - 1;
  const bool test_window =
      (mask.causal || mask.local) && (test_length || n >= tile.causal_local_from || n < tile.unmasked_from);
  const bool check_infinity = first || test_length || test_window;
  const int query = (tile.first_row + r) / unit.group;
  const int diagonal = query + unit.k_length - unit.q_length;
  const std::int64_t at = static_cast<std::int64_t>(t) * shape.block_m + r;
  float* const x = state.scores + at * shape.block_n;
  const int columns = valid ? shape.block_n : 0;

  const float previous = valid ? (first ? kMinusInfinity : state.row_max[at]) : kMinusInfinity;
  float m = previous;
  for (int v = 2 * quad; v < columns; v += 8) {
    float2 pair = *as<float2>(x + v);
    float* const both[2] = {&pair.x, &pair.y};
    for (int u = 0; u < 2; ++u) {
      float& value = *both[u];
      if (rules.scalars.softcap_scale != 0) value = ops.tanh(ops.mul(value, rules.scalars.softcap_scale));
      const int key = n * shape.block_n + v + u;
      bool hidden = test_length && key >= unit.k_length;
      if (test_window) {
        hidden = hidden || key > diagonal + (mask.local ? mask.right : 0) ||
                 (mask.local && key < diagonal - mask.left);
      }
      if (hidden) value = kMinusInfinity;
      m = ops.max(m, value);
    }
    *as<float2>(x + v) = pair;
  }
  m = ops.max(m, __shfl_xor_sync(0xffffffffU, m, 2));
  m = ops.max(m, __shfl_xor_sync(0xffffffffU, m, 1));
  const bool guarded = check_infinity && m == kMinusInfinity;
  const float reference = guarded ? 0.0F : m;
  const float c = rules.scalars.scale_log2;
  const float alpha = first ? 1.0F : ops.ex2(ops.mul(ops.sub(previous, reference), c));
  const float scaled_max = guarded ? 0.0F : ops.mul(m, c);
  if (!valid) return;

  float sum = first ? 0.0F : state.sums[at * 4 + quad];
  std::uint16_t* const words = state.p + at * shape.block_n;
  for (int v = 2 * quad; v < columns; v += 8) {
    const float2 pair = *as<float2>(x + v);
    const float p0 = exponential(ops, pair.x, c, scaled_max, rules.forward.exponent_fused);
    const float p1 = exponential(ops, pair.y, c, scaled_max, rules.forward.exponent_fused);
    if (v != 2 * quad) {
      sum = ops.add(sum, p0);
    } else if (first) {
      sum = p0;
    } else if (rules.forward.row_sum_rescale_fused) {
      sum = ops.fma(alpha, sum, p0);
    } else {
      sum = ops.add(ops.mul(alpha, sum), p0);
    }
    sum = ops.add(sum, p1);
    *as<std::uint32_t>(words + v) =
        arith::bf16_from_fp32(p0) | static_cast<std::uint32_t>(arith::bf16_from_fp32(p1)) << 16U;
  }
  state.sums[at * 4 + quad] = sum;
  if (quad == 0) {
    state.row_max[at] = m;
    state.alpha[at] = alpha;
  }
}

/// O := O * alpha + P.V of one visit [2.5.10]. Blocks: (tile, columns of 64) along x, rows of 64 along y.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    forward_pv(const ForwardState state, int visit) {
  __shared__ TileMemory memory;
  const Shape& shape = state.shape;
  const Ops ops{state.rules.flush};
  const int column_tiles = (shape.head_dim_v + kTile - 1) / kTile;
  const int t = static_cast<int>(blockIdx.x) / column_tiles;
  const int column = static_cast<int>(blockIdx.x) % column_tiles * kTile;
  const int row = static_cast<int>(blockIdx.y) * kTile;
  const ForwardTile tile = state.tiles[t];
  if (row >= tile.rows) return;
  const RowUnit unit = state.units[tile.unit];
  const int n = visited_block(state, tile, visit);
  const std::int64_t slot = static_cast<std::int64_t>(t) * shape.block_m;
  OperandView p;
  p.data = state.p + slot * shape.block_n;
  p.stride = shape.block_n;
  p.lines = tile.rows;
  p.depth = shape.block_n;
  const OperandView v = token_columns(state.v, unit.k_begin + n * shape.block_n, shape.heads_kv, unit.kv_head,
                                      shape.head_dim_v, keys_in_memory(shape, unit, n));
  const OwnPlace own;
  Accumulators c = {};
  if (visit > 0) {
    for_own_elements(own, row, column, tile.rows, shape.head_dim_v, c, [&](int r, int d, float& x) {
      x = ops.mul(state.o[(slot + r) * shape.head_dim_v + d], state.alpha[slot + r]);
    });
  }
  tile_product<AdjacentK, AdjacentLines>(memory, p, row, v, column, steps_of(shape.block_n),
                                         state.rules.tensor_core, state.rules.chip_tensor_core, c);
  for_own_elements(own, row, column, tile.rows, shape.head_dim_v, c,
                   [&](int r, int d, float& x) { state.o[(slot + r) * shape.head_dim_v + d] = x; });
}

/// Normalisation, LSE and the cast of O [2.7]. A tile without key blocks writes O = 0 and LSE = -inf. One
/// warp a row. Blocks: tiles along x, 8 rows along y.
__global__ void __launch_bounds__(kThreads) forward_end(const ForwardState state) {
  const Shape& shape = state.shape;
  const Ops ops{state.rules.flush};
  const int t = static_cast<int>(blockIdx.x);
  const ForwardTile tile = state.tiles[t];
  const int r = static_cast<int>(blockIdx.y) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (r >= tile.rows) return;
  const RowUnit unit = state.units[tile.unit];
  const int query = (tile.first_row + r) / unit.group;
  const int head = unit.head + (tile.first_row + r) % unit.group;
  const bool visited = tile.last_block > tile.first_block;
  const std::int64_t at = static_cast<std::int64_t>(t) * shape.block_m + r;
  const float sum = visited ? total(ops, state.rules, state.sums + at * 4) : 0.0F;
  const bool usable = !(sum == 0.0F || sum != sum);
  const float inverse = usable ? ops.rcp(sum) : 0.0F;
  if (lane == 0) {
    // Without any key in the whole call the host fills in +inf and runs no kernel [2.8].
    float lse = shape.total_k == 0 ? negated(kMinusInfinity) : kMinusInfinity;
    if (usable) lse = log_sum_exp(ops, state.rules, state.row_max[at], sum);
    state.lse[state.rows[static_cast<std::int64_t>(unit.sequence) * shape.heads_q + head] + query] = lse;
  }
  const std::int64_t element =
      (static_cast<std::int64_t>(unit.q_begin + query) * shape.heads_q + head) * shape.head_dim_v;
  for (int d = lane; d < shape.head_dim_v; d += 32) {
    const float o = visited ? ops.mul(state.o[at * shape.head_dim_v + d], inverse) : 0.0F;
    state.out[element + d] = arith::bf16_from_fp32(o);
    if (state.out_fp32 != nullptr) state.out_fp32[element + d] = o;
  }
}

}  // namespace bitattn::gpu::emulator
