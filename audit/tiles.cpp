#include "audit/tiles.hpp"

#include "emu/profile/flash3.hpp"

namespace bitattn::audit {

TileSizes tile_sizes(const Problem& problem) {
  profile::Call call;
  call.head_dim = static_cast<int>(problem.head_dim);
  call.head_dim_v = static_cast<int>(problem.head_dim_v);
  call.heads_q = static_cast<int>(problem.heads_q);
  call.heads_kv = static_cast<int>(problem.heads_kv);
  call.seqlen_q = static_cast<int>(problem.seqlen_q);
  call.seqlen_k = static_cast<int>(problem.seqlen_k);
  call.varlen = problem.layout == Layout::thd;
  call.softmax_scale = problem.softmax_scale;
  call.causal = problem.causal;
  call.window_left = problem.window_left;
  call.window_right = problem.window_right;
  call.softcap = problem.softcap;
  call.deterministic = problem.deterministic;

  TileSizes own;
  if (profile::round_head_dim(call.head_dim) != 0 && profile::round_head_dim(call.head_dim_v) != 0) {
    const profile::ForwardTiles forward = profile::flash3_forward_tiles(call, {});
    const profile::BackwardTiles backward = profile::flash3_backward_tiles(call, {});
    own = {forward.block_m, forward.block_n, backward.block_m, backward.block_n};
  }
  const auto said = [&problem](const char* name, int otherwise) {
    const std::int64_t value = problem.integer(name, otherwise);
    return value > 0 && value <= 65536 ? static_cast<int>(value) : otherwise;
  };
  return {said("fwd_block_m", own.forward_m), said("fwd_block_n", own.forward_n),
          said("bwd_block_m", own.backward_m), said("bwd_block_n", own.backward_n)};
}

std::size_t padded_begin(std::size_t begin, std::size_t b, std::size_t block) {
  return block == 0 ? begin : (begin + b * block) / block * block;
}

}  // namespace bitattn::audit
