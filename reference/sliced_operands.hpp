#pragma once
// BF16 matrices cut into slices of kSliceBits for exact products.
//
// Every row r has a power of two above it, |x_rd| < 2^e_r; a row is written as x_rd = 2^e_r * sum_m b_m
// 2^(-22 (m+1)) with integers |b_m| < 2^22 of the sign of x.

#include <cstdint>
#include <span>
#include <vector>

#include "reference/exact_products.hpp"
#include "reference/problem_view.hpp"

namespace bitattn::reference {

/// Rows of a matrix that are worked on together: as keys of a query block, or as queries of a key block.
inline constexpr std::size_t kChunk = 256;

/// Rows of a BF16 matrix in memory, `stride` apart.
struct Bf16Rows {
  const std::uint16_t* data = nullptr;
  std::ptrdiff_t stride = 0;
  std::size_t rows = 0;
  std::size_t width = 0;

  const std::uint16_t* row(std::size_t r) const { return data + static_cast<std::ptrdiff_t>(r) * stride; }
};

/// Slices that the inner product of two rows may take from each: it is exact for rows whose bits span up to
/// 44 places; the others ("broad") are left out and must be multiplied by exact_inner_product.
inline constexpr int kInnerSlices = 2;

/// Exponents of the rows of a matrix.
struct RowScale {
  std::int32_t exponent = 0;  ///< every |x| < 2^exponent; 0 for a row of zeros
  int slices = 0;             ///< for an exact inner product; 0: all zero, kInnerSlices + 1: broad
  bool broad() const { return slices > kInnerSlices; }
};
RowScale scale_of(std::span<const std::uint16_t> row);

/// Up to kBlockRows rows as left-hand blocks for inner products: block(m) is [d][kBlockRows].
class InnerLeft {
 public:
  /// Rows past `rows.size()` and broad rows become zeros.
  void set(std::span<const std::uint16_t* const> rows, std::size_t width);
  int slices() const { return slices_; }
  const double* block(int slice) const {
    return data_.data() + static_cast<std::size_t>(slice) * width_ * kBlockRows;
  }
  const RowScale& scale(std::size_t row) const { return scales_[row]; }

 private:
  std::size_t width_ = 0;
  int slices_ = 0;
  std::vector<double> data_;
  std::vector<RowScale> scales_;
};

/// A whole matrix as right-hand operand of inner products, in chunks of kChunk rows: block(chunk, m) is
/// [d][kChunk].
class InnerRight {
 public:
  explicit InnerRight(const Bf16Rows& matrix);
  int slices(std::size_t chunk) const { return chunks_[chunk].slices; }
  const float* block(std::size_t chunk, int slice) const {
    return chunks_[chunk].data.data() + static_cast<std::size_t>(slice) * width_ * kChunk;
  }
  const RowScale& scale(std::size_t row) const { return scales_[row]; }

 private:
  struct Chunk {
    int slices = 0;
    std::vector<float> data;
  };
  std::size_t width_;
  std::vector<RowScale> scales_;
  std::vector<Chunk> chunks_;
};

/// A whole matrix as right-hand operand of sums over its rows. Columns have exponents as well, |x_rd| <
/// 2^(e_r + f_d), so that a matrix whose rows or columns differ much in size needs no more slices than
/// another. block(chunk, m) is [row in chunk][columns()].
class OuterRight {
 public:
  /// Bits past this many slices are cut off.
  static constexpr int kMaxSlices = 6;

  explicit OuterRight(const Bf16Rows& matrix);
  /// The width rounded up to a multiple of 16; the columns past the width are zero.
  std::size_t columns() const { return columns_; }
  int slices(std::size_t chunk) const { return chunks_[chunk].slices; }
  const float* block(std::size_t chunk, int slice) const {
    return chunks_[chunk].data.data() + static_cast<std::size_t>(slice) * kChunk * columns_;
  }
  /// Exponents of the rows of a chunk.
  const std::int32_t* row_exponents(std::size_t chunk) const {
    return row_exponents_.data() + chunk * kChunk;
  }
  std::int32_t column_exponent(std::size_t column) const { return column_exponents_[column]; }

 private:
  struct Chunk {
    int slices = 0;
    std::vector<float> data;
  };
  std::size_t columns_;
  std::vector<std::int32_t> row_exponents_, column_exponents_;
  std::vector<Chunk> chunks_;
};

}  // namespace bitattn::reference
