#include "emu/profile/flash3.hpp"

#include <algorithm>
#include <limits>
#include <numbers>

namespace bitattn::profile {

namespace {

// C++ integer division on purpose, truncating toward zero also for negative numerators: it is what the
// kernels do.
constexpr int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

/// Window and causal flag as the host normalises them (2.1). `forward`: only the forward drops causal for one
/// query.
Mask normalise_mask(const Call& call, bool forward) {
  int left = call.window_left;
  int right = call.window_right;
  if (left >= call.seqlen_k - 1) left = -1;
  if (right >= call.seqlen_q - 1) right = -1;
  bool causal = call.causal;
  if (forward && call.seqlen_q == 1 && left == -1 && right == -1) causal = false;
  if (causal) right = 0;
  Mask mask;
  mask.causal = left < 0 && right == 0;
  mask.local = (left >= 0 || right >= 0) && !mask.causal;
  mask.left = left < 0 ? call.seqlen_k - 1 : left;
  mask.right = right < 0 ? call.seqlen_q - 1 : right;
  return mask;
}

struct BlockShape {
  int m, n;
};

/// Table 2.2.
BlockShape forward_block(int head_dim, int head_dim_v, const Mask& mask) {
  const bool masked = mask.causal || mask.local;
  switch (head_dim) {
    case 64:
      if (head_dim_v > 256) return {64, 64};
      if (head_dim_v > 128) return {128, 96};
      return {192, masked ? 128 : 192};
    case 96:
      return {192, mask.local ? 128 : 144};
    case 128:
      return {128, masked ? 128 : 176};
    case 192:
      return {128, mask.local ? 96 : head_dim_v > 128 ? 112 : 128};
    default:
      return {128, mask.local ? 64 : 80};
  }
}

/// Table 4.1.
BlockShape backward_block(int head_dim, const Mask& mask, bool softcap) {
  switch (head_dim) {
    case 64:
      return {mask.causal && softcap ? 96 : 128, 128};
    case 96:
      return {64, 128};
    case 128:
      return {mask.causal || mask.local || softcap ? 64 : 80, 128};
    case 192:
      return {64, 96};
    default:
      return {64, 80};
  }
}

/// Are the query heads of a group packed into one tile? Always where lengths vary, else where it fills tiles
/// much better. Never a matter of bits with finite inputs (2.9), but it decides which tiles a NaN enters.
bool packs_gqa(const Call& call, int block_m) {
  if (call.heads_q == call.heads_kv) return false;
  if (call.varlen) return true;
  const auto filled = [block_m](int rows) {
    return static_cast<float>(rows) / static_cast<float>(ceil_div(rows, block_m) * block_m);
  };
  return filled(call.seqlen_q) < 0.9F * filled(call.seqlen_q * (call.heads_q / call.heads_kv));
}

int preprocess_threads(int head_dim) {
  switch (head_dim) {  // table 3.1
    case 96:
      return 4;
    case 64:
    case 192:
      return 8;
    default:
      return 16;
  }
}

}  // namespace

int round_head_dim(int head_dim) {
  for (const int rounded : {64, 96, 128, 192, 256}) {
    if (head_dim <= rounded) return rounded;
  }
  return 0;
}

ForwardTiles flash3_forward_tiles(const Call& call, const Profile& profile) {
  ForwardTiles tiles;
  tiles.mask = normalise_mask(call, true);
  const BlockShape block =
      forward_block(round_head_dim(call.head_dim), round_head_dim(call.head_dim_v), tiles.mask);
  tiles.block_m = block.m;
  tiles.block_n = profile.forward.block_n > 0 ? profile.forward.block_n : block.n;
  const Deviation* blocks = find(profile.deviations, Point::blocks_forward);
  if (blocks != nullptr && blocks->kind == Kind::block_size) tiles.block_n = blocks->parameter;
  tiles.pack_gqa = packs_gqa(call, block.m);
  return tiles;
}

BackwardTiles flash3_backward_tiles(const Call& call, const Profile& profile) {
  BackwardTiles tiles;
  tiles.mask = normalise_mask(call, false);
  tiles.head_dim = round_head_dim(std::max(call.head_dim, call.head_dim_v));
  const BlockShape block = backward_block(tiles.head_dim, tiles.mask, call.softcap > 0);
  tiles.block_m = block.m;
  tiles.block_n = profile.backward.block_n > 0 ? profile.backward.block_n : block.n;
  const Deviation* blocks = find(profile.deviations, Point::blocks_backward);
  if (blocks != nullptr && blocks->kind == Kind::block_size) tiles.block_n = blocks->parameter;
  tiles.dq_added_by_atomics = tiles.head_dim == 256;
  tiles.dkv_order_fixed = call.deterministic && tiles.head_dim != 256;
  if (!call.deterministic || tiles.head_dim == 256) {
    tiles.dq_order = DqOrder::any;
  } else {
    const bool descending = tiles.mask.causal != profile.backward.dq_order_reversed;
    tiles.dq_order = descending ? DqOrder::descending : DqOrder::ascending;
  }
  tiles.dpsum_threads = preprocess_threads(tiles.head_dim);
  return tiles;
}

Scalars flash3_scalars(const Call& call) {
  Scalars scalars;
  scalars.softmax_scale = static_cast<float>(call.softmax_scale);
  if (call.softcap > 0) {
    const auto cap = static_cast<float>(call.softcap);
    scalars.scale_log2 = static_cast<float>(static_cast<double>(cap) * std::numbers::log2e);
    scalars.softcap_scale = scalars.softmax_scale / cap;
  } else {
    scalars.scale_log2 = static_cast<float>(static_cast<double>(scalars.softmax_scale) * std::numbers::log2e);
  }
  return scalars;
}

KeyBlocks flash3_key_blocks(const ForwardTiles& tiles, int block_m_index, int seqlen_q, int seqlen_k,
                            int group) {
  const int bm = tiles.block_m;
  const int bn = tiles.block_n;
  const int row_first = block_m_index * bm / group;  // first and one past the last query of the (packed) tile
  const int row_last = ((block_m_index + 1) * bm - 1) / group + 1;
  const int shift = seqlen_k - seqlen_q;
  const Mask& mask = tiles.mask;
  KeyBlocks blocks;
  blocks.last = ceil_div(seqlen_k, bn);
  if (mask.causal || mask.local) {
    const int right_edge = row_last + shift + (mask.local ? mask.right : 0);
    blocks.last = std::min(blocks.last, ceil_div(right_edge, bn));
  }
  if (mask.local) blocks.first = std::max(0, (row_first + shift - mask.left) / bn);
  blocks.causal_local_from = blocks.last;
  if (mask.causal || mask.local) {
    blocks.causal_local_from =
        std::max(blocks.first, (row_first + shift + (mask.local ? mask.right : 0)) / bn);
  }
  blocks.unmasked_from =
      mask.local ? std::max(blocks.first, ceil_div(row_last + shift - mask.left, bn)) : blocks.first;
  return blocks;
}

ShownKeys shown_keys(const Mask& mask, int query, int seqlen_q, int seqlen_k, const Deviation* deviation) {
  constexpr int kFar = std::numeric_limits<int>::max() / 2;
  int diagonal = query + seqlen_k - seqlen_q;
  if (deviation != nullptr && deviation->kind == Kind::top_left) diagonal = query;
  ShownKeys shown{-kFar, kFar, seqlen_k};
  if (mask.causal) shown.last = diagonal;
  if (mask.local) shown = {diagonal - mask.left, diagonal + mask.right, seqlen_k};
  if (deviation == nullptr) return shown;
  const int n = deviation->parameter;
  switch (deviation->kind) {
    case Kind::shifted:
      shown.first += n;
      shown.last += n;
      break;
    case Kind::left_shifted:
      shown.first -= n;
      break;
    case Kind::right_shifted:
      shown.last += n;
      break;
    case Kind::ignored:
      return {-kFar, kFar, seqlen_k};
    case Kind::length_ignored:
      shown.end = kFar;
      break;
    default:
      break;
  }
  return shown;
}

QueryBlocks flash3_query_blocks(const BackwardTiles& tiles, int block_n_index, int seqlen_q, int seqlen_k) {
  const int bm = tiles.block_m;
  const int bn = tiles.block_n;
  const Mask& mask = tiles.mask;
  QueryBlocks blocks;
  blocks.last = ceil_div(seqlen_q, bm);
  if (mask.local) {
    blocks.last =
        std::min(blocks.last, ceil_div((block_n_index + 1) * bn + seqlen_q - seqlen_k + mask.left, bm));
  }
  if (mask.causal || mask.local) {
    const int right = mask.local ? mask.right : 0;
    blocks.first = std::max(0, (block_n_index * bn + seqlen_q - seqlen_k - right) / bm);
  }
  return blocks;
}

}  // namespace bitattn::profile
