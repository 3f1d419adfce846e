#include "audit/tiles.hpp"

#include "backends/attention_inputs.hpp"
#include "emu/profile/flash3.hpp"

namespace bitattn::audit {

TileSizes tile_sizes(const Problem& problem) {
  const profile::Call call = profile_call(problem);

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
