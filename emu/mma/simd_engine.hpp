#pragma once
// Engines for the vector instructions of this processor, all of one source (Google Highway), all
// bit-identical to the scalar engine.

#include <cstdint>
#include <span>

#include "emu/mma/tile_product.hpp"

namespace bitattn::mma {

/// The SIMD engines of this build that this processor can run, narrowest first.
std::span<const Engine* const> simd_engines();

/// Which way rows of C went, counted per panel of columns and chunk of 128 products.
struct RowCounts {
  std::uint64_t by_add = 0;       ///< fast path, exponents added
  std::uint64_t by_multiply = 0;  ///< fast path for large magnitudes
  std::uint64_t careful = 0;      ///< the model's integer steps, vectorised
  std::uint64_t scalar =
      0;  ///< elements (not rows) that went through the scalar model: infinite operands, other rules
};

/// What this thread's SIMD products did since it last cleared the counts. For tests and benchmarks.
RowCounts& row_counts();

}  // namespace bitattn::mma
