#pragma once
// FlashAttention-3 (SM90, BF16): what the library's host code decides for a call, before any arithmetic.
// Tiles, masks, packing of query heads, the order of dQ. Source: docs/spec/fa3-operation-order.md 2.1
// to 2.4, 4.1, 4.6.

#include <cstdint>

#include "emu/profile/profile.hpp"

namespace bitattn::profile {

/// The arguments of an attention call that choose a kernel.
struct Call {
  int head_dim = 0, head_dim_v = 0;
  int heads_q = 0, heads_kv = 0;
  int seqlen_q = 0, seqlen_k = 0;  ///< of every batch element, or the longest of packed sequences
  bool varlen = false;             ///< packed sequences (cu_seqlens)
  double softmax_scale = 0;
  bool causal = false;
  int window_left = -1, window_right = -1;
  double softcap = 0;
  bool deterministic = true;
};

/// A mask as the kernels see it: query i of a sequence sees key j if j <= i + sk - sq + right and j >= i + sk
/// - sq - left.
struct Mask {
  bool causal = false;
  bool local = false;
  int left = 0, right = 0;  ///< meaningful where local; right is 0 where causal
};

enum class DqOrder : std::uint8_t {
  ascending,
  descending,
  any,  ///< the kernel fixes no order
};

struct ForwardTiles {
  int block_m = 0, block_n = 0;
  Mask mask;
  bool pack_gqa = false;  ///< the query heads of a group are rows of one tile
};

struct BackwardTiles {
  int block_m = 0, block_n = 0;
  int head_dim = 0;  ///< the larger of both head dims, rounded up: last axis of the accumulators
  Mask mask;
  DqOrder dq_order = DqOrder::ascending;
  bool dq_added_by_atomics = false;  ///< fp32 global atomics (flushing) in place of the bulk reduction
  bool dkv_order_fixed = true;       ///< query heads of a group are added in ascending order
  int dpsum_threads = 0;             ///< threads that share a row of the preprocess kernel
};

/// fp32 numbers the host passes to the kernels.
struct Scalars {
  float softmax_scale = 0;
  float scale_log2 = 0;     ///< c: softmax_scale * log2(e), with softcap softcap * log2(e)
  float softcap_scale = 0;  ///< softmax_scale / softcap; 0 without softcap
};

/// Head dim rounded up to 64, 96, 128, 192 or 256; 0 if it is larger.
int round_head_dim(int head_dim);

ForwardTiles flash3_forward_tiles(const Call& call, const Profile& profile);
BackwardTiles flash3_backward_tiles(const Call& call, const Profile& profile);
Scalars flash3_scalars(const Call& call);

/// Key blocks [first, last) of a forward tile, and where its masking steps change (2.3, 2.4).
struct KeyBlocks {
  int first = 0, last = 0;
  int causal_local_from = 0;  ///< blocks from here on (but the last one) test the causal or local mask
  int unmasked_from =
      0;  ///< blocks from here on, below the former, test nothing; those below test the local mask
};
/// group: query heads that share the tile's rows (1 without packing).
KeyBlocks flash3_key_blocks(const ForwardTiles& tiles, int block_m_index, int seqlen_q, int seqlen_k,
                            int group);

/// What a mask shows of a query: keys [first, last] by the causal or local window, and keys below `end`.
struct ShownKeys {
  int first = 0, last = 0, end = 0;
};
/// deviation: of the mask, or nullptr.
ShownKeys shown_keys(const Mask& mask, int query, int seqlen_q, int seqlen_k, const Deviation* deviation);

/// Query blocks [first, last) that a backward key block visits (4.2).
struct QueryBlocks {
  int first = 0, last = 0;
};
QueryBlocks flash3_query_blocks(const BackwardTiles& tiles, int block_n_index, int seqlen_q, int seqlen_k);

}  // namespace bitattn::profile
