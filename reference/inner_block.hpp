#pragma once
// Exact inner products of a block of BF16 rows with a chunk of others.

#include <array>
#include <vector>

#include "reference/exact_products.hpp"
#include "reference/sliced_operands.hpp"
#include "reference/wide.hpp"

namespace bitattn::reference {

/// Products of slices of one left block with one chunk of a right operand, as exact inner products.
class InnerBlock {
 public:
  /// Rows of `left` with rows [begin, end) of chunk `chunk` of `right`.
  void compute(const InnerLeft& left, const InnerRight& right, std::size_t width, std::size_t chunk,
               std::size_t begin, std::size_t end) {
    // Whole vectors of 16 columns; the chunk has room for them.
    begin_ = begin / 16 * 16;
    const std::size_t columns = (end - begin_ + 15) / 16 * 16;
    sums_count_ =
        left.slices() == 0 || right.slices(chunk) == 0 ? 0 : left.slices() + right.slices(chunk) - 1;
    totals_.assign(static_cast<std::size_t>(sums_count_) * kBlockRows * kChunk, 0);
    for (int s = 0; s < sums_count_; ++s) {
      std::array<SlicePair, kInnerSlices> pairs{};
      std::size_t count = 0;
      for (int l = 0; l < left.slices() && l <= s; ++l) {
        if (s - l < right.slices(chunk)) pairs[count++] = {left.block(l), right.block(chunk, s - l) + begin_};
      }
      add_exact_products({pairs.data(), count}, width, columns, kChunk,
                         totals_.data() + static_cast<std::size_t>(s) * kBlockRows * kChunk, kChunk);
    }
  }

  /// The inner product of row r and column j of the chunk, exactly.
  Wide get(std::size_t r, std::size_t j, const RowScale& left, const RowScale& right) const {
    if (sums_count_ == 0) return {};
    I128 total = 0;
    for (int s = 0; s < sums_count_; ++s) {
      total = total * (I128{1} << kSliceBits) +
              totals_[(static_cast<std::size_t>(s) * kBlockRows + r) * kChunk + j - begin_];
    }
    return wide_from(total, left.exponent + right.exponent - kSliceBits * (sums_count_ + 1));
  }

 private:
  std::size_t begin_ = 0;
  int sums_count_ = 0;
  std::vector<std::int64_t> totals_;  ///< [sum of slice numbers][kBlockRows][kChunk]
};

}  // namespace bitattn::reference
