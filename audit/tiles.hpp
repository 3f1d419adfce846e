#pragma once
// Which tile of the kernel an element belongs to, and where padded accumulators keep a sequence.

#include <cstddef>

#include "datasets/problem.hpp"

namespace bitattn::audit {

/// Tile sizes in rows (m: queries, n: keys). 0: not known.
struct TileSizes {
  int forward_m = 0, forward_n = 0;
  int backward_m = 0, backward_n = 0;
};

/// What the capture says of its kernel's tiles (attributes fwd_block_m, …), and FlashAttention-3's own table
/// where it says nothing.
TileSizes tile_sizes(const Problem& problem);

/// First row of sequence b in an array whose sequences are padded to tiles of `block` rows
/// (docs/captures.md): THD floor((begin + b * block) / block) * block. `begin`: the sequence's first token.
std::size_t padded_begin(std::size_t begin, std::size_t b, std::size_t block);

}  // namespace bitattn::audit
