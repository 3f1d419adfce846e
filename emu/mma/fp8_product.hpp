#pragma once
// Tile products on Hopper's FP8 tensor core: e4m3 operands with one scale a tile, and the chip's own sum of
// 32 products, which keeps 13 fraction bits (docs/spec/hopper-arithmetic.md 1).
//
//   (M,K) x (N,K) -> (M,N):   t = chain from +0 over k-steps of 32, ascending, of
//                             t := wgmma_fp8_k32(A[m][k..k+31], B[n][k..k+31], t)
//                             T = MUL(MUL(t, 2^-a), 2^-b);   C := T, or ADD(C, T)
//
// The chain never leaves a tile: its 13 bits are promoted to an fp32 sum, as kernels do that must not lose
// them.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emu/mma/tile_product.hpp"

namespace bitattn::mma {

/// A tile in e4m3: element (r, k) is codes[r * k_padded + k] * 2^-exponent.
struct Fp8Operand {
  int rows = 0;
  int k_padded = 0;  ///< K with zeros up to a multiple of 32
  int exponent = 0;  ///< of the scale that brings the tile's largest magnitude just below 448
  std::vector<std::uint8_t> codes;
};

/// Casts a BF16 tile: e4m3(MUL(x, 2^exponent)).
void pack_fp8(const MatrixView& view, Fp8Operand& out);

/// C[m * ldc + n] for m < left.rows, n < right.rows; both of one k_padded.
void multiply_fp8(const Fp8Operand& left, const Fp8Operand& right, Start start, float* c, std::ptrdiff_t ldc);

}  // namespace bitattn::mma
