#pragma once
// The one operation of remedies that meets every (query, key) pair and column: a row of fused multiply-adds.

#include "emu/kernels/row_ops.hpp"

namespace bitattn::kernels::remedies {

/// sum_j := fma(factor, x_j, sum_j), FFMA with the flushing that `ops` has.
void add_scaled(const ScalarOps& ops, float factor, const float* x, float* sum, int n);

}  // namespace bitattn::kernels::remedies
