#pragma once
// What the emulator's host side hands to its kernels: plain data, computed once for a call.

#include <cstdint>

#include "emu/profile/flash3.hpp"

namespace bitattn::gpu::emulator {

/// Tokens and heads that share rows of a tile: one (sequence, query head), or where query heads are packed
/// one (sequence, KV head). Row r of it is query r / group of head `head + r % group`.
struct RowUnit {
  int q_begin, q_length;
  int k_begin, k_length;
  int head, kv_head;
  int group;  ///< packed query heads, else 1
  int sequence;
};

/// A tile of the forward: rows [first_row, first_row + rows) of a unit, and its key blocks (2.3).
struct ForwardTile {
  int unit;
  int first_row, rows;
  int first_block, last_block;
  int causal_local_from, unmasked_from;
};

/// One key block of one query head in the backward, with the query blocks that visit it (4.2). Its pairs lie
/// in the workspace from row `workspace_row` on, rows of block_n.
struct KeyJob {
  int unit;  ///< (sequence, query head)
  int block_n;
  int first_row, rows;  ///< query rows from the first to past the last visiting block
  std::int64_t workspace_row;
};

/// Sizes and places that all kernels of a call read.
struct Shape {
  int head_dim, head_dim_v;
  int heads_q, heads_kv;
  int total_q, total_k;
  bool varlen;
  int block_m, block_n;  ///< of the pass at hand
  int padded_dim;        ///< backward: the rounded head dim
  profile::Mask mask;
};

}  // namespace bitattn::gpu::emulator
