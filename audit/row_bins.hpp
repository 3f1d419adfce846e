#pragma once
// Figures of many rows, drawn in little room: rows gathered into bins of neighbours.

#include <cstddef>
#include <vector>

#include "audit/locate.hpp"
#include "datasets/problem.hpp"

namespace bitattn::audit {

/// Magnitudes of the finite figures of one bin's rows.
struct RowBin {
  std::size_t rows = 0;                       ///< with a finite figure
  std::size_t not_finite = 0;                 ///< that see a key, without one
  double smallest = 0, largest = 0, rms = 0;  ///< NaN without any row
};

/// The rows of one query head as `bins` bins (fewer where there are fewer rows) of equal width along the
/// token axis: batch elements, or packed sequences, side by side. Rows that see no key count nowhere. `unit`
/// divides every figure.
std::vector<RowBin> bin_rows(const Problem& problem, const Fp64Tensor& values, std::size_t head,
                             std::size_t bins, double unit = 1);
std::vector<RowBin> bin_rows(const Problem& problem, const Fp32Tensor& values, std::size_t head,
                             std::size_t bins, double unit = 1);

}  // namespace bitattn::audit
