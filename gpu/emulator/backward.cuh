#pragma once
// The backward: D and E of every row, then key block by key block the pairs' gradients and the products that
// they go into, then the casts. docs/spec/fa3-operation-order.md 3 to 5 (sections in brackets).

#include "gpu/emulator/forward.cuh"

namespace bitattn::gpu::emulator {

/// Everything the backward kernels read and write. `units` are (sequence, query head): one for each pair,
/// sequences slowest. Padded rows: see BackwardOutputs.
struct BackwardState {
  Rules rules;
  Shape shape;
  profile::BackwardTiles tiles;
  const RowUnit* units;
  const KeyJob* jobs;  ///< of the launch
  const std::uint16_t *q, *k, *v, *dout, *out;
  const float* lse;
  const std::int64_t *rows, *q_rows, *k_rows;
  float *dpsum, *lse_log2;  ///< padded rows
  float* dq;                ///< padded rows x padded_dim, in the making
  float *dk_sum, *dv_sum;   ///< padded key rows x padded_dim, GQA
  float* scores;            ///< workspace: rows of block_n
  std::uint16_t *p, *ds;    ///< workspace: rows of block_n
  float *dk, *dv;           ///< workspace: [job][block_n][padded_dim], of one query head
  std::uint16_t *dq_words, *dk_words, *dv_words;
  float *dq_fp32, *dk_fp32, *dv_fp32;  ///< may be nullptr
};

/// D and E [3]. Rows past the sequence keep D = 0 and E = +inf. One thread a row. Blocks: units along x, 256
/// rows along y.
__global__ void __launch_bounds__(kThreads) backward_rows(const BackwardState state) {
  const Shape& shape = state.shape;
  const Ops ops{state.rules.flush};
  const RowUnit unit = state.units[blockIdx.x];
  const int r = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  const int padded = (unit.q_length + shape.block_m - 1) / shape.block_m * shape.block_m;
  if (r >= padded) return;
  float d = 0.0F;
  float e = negated(kMinusInfinity);
  if (r < unit.q_length) {
    const std::int64_t element =
        (static_cast<std::int64_t>(unit.q_begin + r) * shape.heads_q + unit.head) * shape.head_dim_v;
    d = dpsum(ops, state.rules, state.dout + element, state.out + element, shape.head_dim_v, shape.padded_dim,
              state.tiles.dpsum_threads);
    const float lse = state.lse[state.rows[blockIdx.x] + r];
    e = lse == kMinusInfinity ? 0.0F : ops.mul(lse, arith::from_bits(kLog2EBits));
  }
  const std::int64_t row = state.q_rows[blockIdx.x] + r;
  state.dpsum[row] = d;
  state.lse_log2[row] = e;
  for (int i = 0; i < shape.padded_dim; ++i) state.dq[row * shape.padded_dim + i] = 0.0F;
}

/// Queries from the unit's first on that lie in memory: packed sequences read their neighbours.
__device__ inline int queries_in_memory(const Shape& shape, const RowUnit& unit) {
  return shape.varlen ? shape.total_q - unit.q_begin : unit.q_length;
}

/// S = Q.K^T [4.3.1]. Blocks: (job, columns of 64) along x, rows of 64 along y.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    backward_scores(const BackwardState state) {
  __shared__ TileMemory memory;
  const Shape& shape = state.shape;
  const int column_tiles = (shape.block_n + kTile - 1) / kTile;
  const KeyJob job = state.jobs[static_cast<int>(blockIdx.x) / column_tiles];
  const int column = static_cast<int>(blockIdx.x) % column_tiles * kTile;
  const int row = static_cast<int>(blockIdx.y) * kTile;
  if (row >= job.rows) return;
  const RowUnit unit = state.units[job.unit];
  const OperandView q = token_rows(state.q, unit.q_begin, shape.heads_q, unit.head, shape.head_dim,
                                   queries_in_memory(shape, unit));
  const OperandView k = token_rows(state.k, unit.k_begin + job.block_n * shape.block_n, shape.heads_kv,
                                   unit.kv_head, shape.head_dim, keys_in_memory(shape, unit, job.block_n));
  Accumulators c = {};
  tile_product<AdjacentK, AdjacentK>(memory, q, job.first_row + row, k, column, steps_of(shape.head_dim),
                                     state.rules.tensor_core, state.rules.chip_tensor_core, c);
  for_own_elements(OwnPlace(), row, column, job.rows, shape.block_n, c, [&](int r, int j, float& x) {
    state.scores[(job.workspace_row + r) * shape.block_n + j] = x;
  });
}

/// dP = dO.V^T, and from it and S: P and dS, cast [4.3.2 to 4.3.7]. Blocks as for backward_scores.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    backward_gradients(const BackwardState state) {
  __shared__ TileMemory memory;
  const Shape& shape = state.shape;
  const Rules& rules = state.rules;
  const int column_tiles = (shape.block_n + kTile - 1) / kTile;
  const KeyJob job = state.jobs[static_cast<int>(blockIdx.x) / column_tiles];
  const int column = static_cast<int>(blockIdx.x) % column_tiles * kTile;
  const int row = static_cast<int>(blockIdx.y) * kTile;
  if (row >= job.rows) return;
  const RowUnit unit = state.units[job.unit];
  const OperandView dout = token_rows(state.dout, unit.q_begin, shape.heads_q, unit.head, shape.head_dim_v,
                                      queries_in_memory(shape, unit));
  const OperandView v = token_rows(state.v, unit.k_begin + job.block_n * shape.block_n, shape.heads_kv,
                                   unit.kv_head, shape.head_dim_v, keys_in_memory(shape, unit, job.block_n));
  Accumulators c = {};
  tile_product<AdjacentK, AdjacentK>(memory, dout, job.first_row + row, v, column, steps_of(shape.head_dim_v),
                                     rules.tensor_core, rules.chip_tensor_core, c);
  const Ops ops{rules.flush};
  const profile::Mask& mask = shape.mask;
  for_own_elements(OwnPlace(), row, column, job.rows, shape.block_n, c, [&](int r, int j, float& dp) {
    const int query = job.first_row + r;
    const int key = job.block_n * shape.block_n + j;
    const std::int64_t at = (job.workspace_row + r) * shape.block_n + j;
    float s = state.scores[at];
    float h = 1.0F;
    const bool softcap = rules.scalars.softcap_scale != 0;
    if (softcap) {
      s = ops.tanh(ops.mul(s, rules.scalars.softcap_scale));
      h = ops.fma(negated(s), s, 1.0F);
    }
    // The length is always tested, and the causal or local window; query rows past the end are not masked.
    const int diagonal = query + unit.k_length - unit.q_length;
    bool hidden = key >= unit.k_length;
    if (mask.causal) hidden = hidden || key > diagonal;
    if (mask.local) hidden = hidden || key > diagonal + mask.right || key < diagonal - mask.left;
    if (hidden) s = kMinusInfinity;
    const std::int64_t padded = state.q_rows[job.unit] + query;
    const float p =
        exponential(ops, s, rules.scalars.scale_log2, state.lse_log2[padded], rules.backward.exponent_fused);
    float ds = score_gradient(ops, rules, p, dp, state.dpsum[padded]);
    if (softcap) ds = ops.mul(ds, h);
    state.p[at] = arith::bf16_from_fp32(p);
    state.ds[at] = arith::bf16_from_fp32(ds);
  });
}

/// dV = P^T.dO (blockIdx.z 0) and dK = dS^T.Q (1) of one query head: one chain over all visiting query blocks
/// [4.7]; dK times the softmax scale. Blocks: (job, columns of 64) along x, keys of 64 along y.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    backward_keys(const BackwardState state) {
  __shared__ TileMemory memory;
  const Shape& shape = state.shape;
  const bool is_dk = blockIdx.z == 1;
  const int column_tiles = (shape.padded_dim + kTile - 1) / kTile;
  const int j = static_cast<int>(blockIdx.x) / column_tiles;
  const KeyJob job = state.jobs[j];
  const int column = static_cast<int>(blockIdx.x) % column_tiles * kTile;
  const int row = static_cast<int>(blockIdx.y) * kTile;
  const RowUnit unit = state.units[job.unit];
  OperandView pairs;
  pairs.data = (is_dk ? state.ds : state.p) + job.workspace_row * shape.block_n;
  pairs.stride = shape.block_n;
  pairs.lines = shape.block_n;
  pairs.depth = job.rows;
  const OperandView queries =
      token_columns(is_dk ? state.q : state.dout, unit.q_begin + job.first_row, shape.heads_q, unit.head,
                    is_dk ? shape.head_dim : shape.head_dim_v,
                    max(0, min(job.rows, queries_in_memory(shape, unit) - job.first_row)));
  Accumulators c = {};
  tile_product<AdjacentLines, AdjacentLines>(memory, pairs, row, queries, column, steps_of(job.rows),
                                             state.rules.tensor_core, state.rules.chip_tensor_core, c);
  const Ops ops{state.rules.flush};
  float* const out =
      (is_dk ? state.dk : state.dv) + static_cast<std::int64_t>(j) * shape.block_n * shape.padded_dim;
  for_own_elements(OwnPlace(), row, column, shape.block_n, shape.padded_dim, c, [&](int r, int d, float& x) {
    out[static_cast<std::int64_t>(r) * shape.padded_dim + d] =
        is_dk ? ops.mul(x, state.rules.scalars.softmax_scale) : x;
  });
}

/// dQ += dS.K of one key block for all its query rows [4.6]. Jobs of one launch belong to different units.
/// Blocks: (job, columns of 64) along x, rows of 64 along y.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    backward_queries(const BackwardState state) {
  __shared__ TileMemory memory;
  const Shape& shape = state.shape;
  const int column_tiles = (shape.padded_dim + kTile - 1) / kTile;
  const KeyJob job = state.jobs[static_cast<int>(blockIdx.x) / column_tiles];
  const int column = static_cast<int>(blockIdx.x) % column_tiles * kTile;
  const int row = static_cast<int>(blockIdx.y) * kTile;
  if (row >= job.rows) return;
  const RowUnit unit = state.units[job.unit];
  OperandView ds;
  ds.data = state.ds + job.workspace_row * shape.block_n;
  ds.stride = shape.block_n;
  ds.lines = job.rows;
  ds.depth = shape.block_n;
  const OperandView k = token_columns(state.k, unit.k_begin + job.block_n * shape.block_n, shape.heads_kv,
                                      unit.kv_head, shape.head_dim, keys_in_memory(shape, unit, job.block_n));
  Accumulators c = {};
  tile_product<AdjacentK, AdjacentLines>(memory, ds, row, k, column, steps_of(shape.block_n),
                                         state.rules.tensor_core, state.rules.chip_tensor_core, c);
  const std::int64_t first = state.q_rows[job.unit] + job.first_row;
  for_own_elements(OwnPlace(), row, column, job.rows, shape.padded_dim, c, [&](int r, int d, float& part) {
    float& dq = state.dq[(first + r) * shape.padded_dim + d];
    dq = reduce_add(state.rules, dq, part, state.tiles.dq_added_by_atomics);
  });
}

/// Where the parts of one key block of a KV head lie among a launch's jobs.
struct KeyGroup {
  int first_job, jobs;
  int unit;  ///< of the first job
  int block_n;
  int last;  ///< 1: the last query head of the group is among them
};

/// dK and dV of a key block: the query heads of a group added in ascending order [4.5], then cast [5].
/// Blocks: groups along x; threads go over the block's elements.
__global__ void __launch_bounds__(kThreads)
    backward_keys_end(const BackwardState state, const KeyGroup* groups, int group) {
  const Shape& shape = state.shape;
  const Ops ops{state.rules.flush};
  const KeyGroup at = groups[blockIdx.x];
  const RowUnit unit = state.units[at.unit];
  const std::int64_t size = static_cast<std::int64_t>(shape.block_n) * shape.padded_dim;
  const std::int64_t padded =
      (state.k_rows[static_cast<std::int64_t>(unit.sequence) * shape.heads_kv + unit.kv_head] +
       static_cast<std::int64_t>(at.block_n) * shape.block_n) *
      shape.padded_dim;
  for (std::int64_t i = threadIdx.x; i < size; i += kThreads) {
    float dk = 0.0F;
    float dv = 0.0F;
    if (group == 1) {
      dk = state.dk[at.first_job * size + i];
      dv = state.dv[at.first_job * size + i];
    } else {
      dk = state.dk_sum[padded + i];
      dv = state.dv_sum[padded + i];
      for (int j = at.first_job; j < at.first_job + at.jobs; ++j) {
        dv = reduce_add(state.rules, dv, state.dv[j * size + i], false);
        dk = reduce_add(state.rules, dk, state.dk[j * size + i], false);
      }
      state.dk_sum[padded + i] = dk;
      state.dv_sum[padded + i] = dv;
      // The postprocess multiplies by a run-time 1.0, which only flushes subnormals.
      dk = ops.mul(dk, 1.0F);
      dv = ops.mul(dv, 1.0F);
    }
    const int key = at.block_n * shape.block_n + static_cast<int>(i / shape.padded_dim);
    const int d = static_cast<int>(i % shape.padded_dim);
    if (at.last == 0 || key >= unit.k_length) continue;
    const std::int64_t token = static_cast<std::int64_t>(unit.k_begin + key) * shape.heads_kv + unit.kv_head;
    if (d < shape.head_dim) {
      state.dk_words[token * shape.head_dim + d] = arith::bf16_from_fp32(dk);
      if (state.dk_fp32 != nullptr) state.dk_fp32[token * shape.head_dim + d] = dk;
    }
    if (d < shape.head_dim_v) {
      state.dv_words[token * shape.head_dim_v + d] = arith::bf16_from_fp32(dv);
      if (state.dv_fp32 != nullptr) state.dv_fp32[token * shape.head_dim_v + d] = dv;
    }
  }
}

/// dQ times the softmax scale, cast [5]. One warp a row. Blocks: units along x, 8 rows along y.
__global__ void __launch_bounds__(kThreads) backward_queries_end(const BackwardState state) {
  const Shape& shape = state.shape;
  const Ops ops{state.rules.flush};
  const RowUnit unit = state.units[blockIdx.x];
  const int r = static_cast<int>(blockIdx.y) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (r >= unit.q_length) return;
  const std::int64_t element =
      (static_cast<std::int64_t>(unit.q_begin + r) * shape.heads_q + unit.head) * shape.head_dim;
  const float* const dq = state.dq + (state.q_rows[blockIdx.x] + r) * shape.padded_dim;
  for (int d = static_cast<int>(threadIdx.x) % 32; d < shape.head_dim; d += 32) {
    const float x = ops.mul(dq[d], state.rules.scalars.softmax_scale);
    state.dq_words[element + d] = arith::bf16_from_fp32(x);
    if (state.dq_fp32 != nullptr) state.dq_fp32[element + d] = x;
  }
}

}  // namespace bitattn::gpu::emulator
