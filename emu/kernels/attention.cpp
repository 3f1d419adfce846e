#include "emu/kernels/attention.hpp"

#include <algorithm>

namespace bitattn::kernels {

mma::MatrixView token_rows(const std::uint16_t* tensor, int token, int heads, int head, int columns, int rows,
                           int rows_in_memory) {
  const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(heads) * columns;
  mma::MatrixView view;
  view.data = tensor + token * stride + static_cast<std::ptrdiff_t>(head) * columns;
  view.row_stride = stride;
  view.k_stride = 1;
  view.rows = rows;
  view.k = columns;
  view.rows_in_memory = std::max(0, rows_in_memory);
  view.k_in_memory = columns;
  return view;
}

mma::MatrixView token_columns(const std::uint16_t* tensor, int token, int heads, int head, int columns,
                              int rows, int rows_in_memory) {
  const mma::MatrixView by_rows = token_rows(tensor, token, heads, head, columns, rows, rows_in_memory);
  mma::MatrixView view;
  view.data = by_rows.data;
  view.row_stride = by_rows.k_stride;
  view.k_stride = by_rows.row_stride;
  view.rows = columns;
  view.k = rows;
  view.rows_in_memory = columns;
  view.k_in_memory = by_rows.rows_in_memory;
  return view;
}

arith::TensorCoreRule tensor_core_rule(const profile::Arithmetic& arithmetic) {
  arith::TensorCoreRule rule = arith::kHopperWide;
  rule.aligned_fraction_bits = arithmetic.tensor_core_fraction_bits;
  rule.round_to_nearest = arithmetic.tensor_core_rounds_to_nearest;
  return rule;
}

}  // namespace bitattn::kernels
