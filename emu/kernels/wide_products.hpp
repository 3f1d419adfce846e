#pragma once
// Tile products of fp64 operands: exactly (in fp64), and by the tensor core's rule for operands wider than
// BF16, which no chip takes but which arise where the cast before a product is run exactly.
//
//   (M,K) x (K,N) -> (M,N):   left [m][k], right [k][n], c [m][n], n contiguous

#include <cstddef>

#include "emu/arith/tensor_core.hpp"

namespace bitattn::kernels {

/// A product's shape and memory: left is rows x depth, right depth x columns; depth is a multiple of 16.
struct WideProduct {
  const double* left = nullptr;
  const double* right = nullptr;
  int rows = 0, depth = 0, columns = 0;
  double* c = nullptr;  ///< accumulated into
  std::ptrdiff_t ldc = 0;
};

/// c += left * right in fp64.
void multiply_exactly(const WideProduct& product);

/// The tensor core's step (docs/spec/hopper-arithmetic.md 1) for operands of 53 bits: the same alignment,
/// truncation and last rounding, k-step after k-step; a single product is formed in fp64. c holds fp32
/// numbers before and after.
void multiply_by_rule(const WideProduct& product, const arith::TensorCoreRule& rule);

/// The same by the definition, element by element: what the vector loops are tested against.
void multiply_by_rule_scalar(const WideProduct& product, const arith::TensorCoreRule& rule);

}  // namespace bitattn::kernels
