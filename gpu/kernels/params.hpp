#pragma once
// What the host hands to the kernels.

#include <cuda.h>

#include <cstdint>

namespace bitattn::gpu {

struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};

/// Strides in elements; the head dim is contiguous.
struct Strides {
  std::int64_t batch, token, head;
};

struct ForwardParams {
  CUtensorMap q, out;  ///< boxes of 64 rows
  CUtensorMap k, v;    ///< boxes of a key tile
  std::uint16_t* out_data;
  float* lse;  ///< [batch][heads_q][seqlen_q]
  Strides out_strides;
  float scale_log2;  ///< c
  int batch, heads_q, group, seqlen_q, seqlen_k;
  int blocks_m, tiles;
  unsigned* ticket_counter;  ///< zero before and after
  int heads_per_group;       ///< (batch, head) pairs that are computed side by side
};

struct PreprocessParams {
  const std::uint16_t *out, *dout;
  const float* lse;
  float *dpsum, *lse_log2;  ///< [batch][heads_q][padded_q]
  Strides out_strides, dout_strides;
  int batch, heads_q, seqlen_q, padded_q;
};

struct BackwardParams {
  CUtensorMap q, dout, k, v;  ///< boxes of a tile's rows
  CUtensorMap dk, dv;         ///< boxes of 64 rows; not used where query heads share a KV head
  const float *dpsum, *lse_log2;
  float* dq_accum;  ///< [batch][heads_q][block m][block_m * head_dim], in the order of the threads' registers
  float *dk_parts, *dv_parts;  ///< group > 1: [batch][heads_q][padded_k][head_dim]
  int* turns;                  ///< [batch][heads_q][block m]: key blocks that have added their dQ
  int* ticket;                 ///< blocks of threads that have started
  float scale_log2, softmax_scale;
  int batch, heads_q, group, seqlen_q, seqlen_k;
  int blocks_m, blocks_n;
  int descending;     ///< key blocks add to dQ from right to left
  int longest_first;  ///< key blocks of a head start from the left all the same
};

struct DqPostprocessParams {
  const float* dq_accum;
  std::uint16_t* dq;
  float*
      dq_rows;  ///< may be nullptr: the accumulators as rows, [batch][heads_q][blocks_m * block_m][head_dim]
  Strides dq_strides;
  float softmax_scale;
  int batch, heads_q, seqlen_q, seqlen_k, blocks_m, blocks_n;
  int causal;
};

struct GroupSumParams {
  const float* parts;  ///< [batch][heads_q][padded_k][head_dim]
  float* sums;         ///< may be nullptr: [batch][heads_kv][padded_k][head_dim]
  std::uint16_t* gradient;
  Strides strides;
  int batch, heads_kv, group, seqlen_k, padded_k;
};

}  // namespace bitattn::gpu
