#include "reference/sliced_operands.hpp"

#include <oneapi/tbb/parallel_for.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "reference/super_accumulator.hpp"

namespace bitattn::reference {
namespace {

constexpr std::int32_t kNothing = std::numeric_limits<std::int32_t>::min();

/// |x| < 2^top and x is a multiple of 2^bottom; significand must not be 0.
std::int32_t top_of(const Bf16Parts& x) {
  return x.exponent + std::bit_width(x.significand);
}
std::int32_t bottom_of(const Bf16Parts& x) {
  return x.exponent + std::countr_zero(x.significand);
}

int slices_for(std::int32_t bits) {
  return (bits + kSliceBits - 1) / kSliceBits;
}

/// Slice `slice` of x below 2^top: the bits of |x| of weight 2^(top - 22 slice) down to 2^(top - 22 (slice +
/// 1)), with sign.
std::int32_t slice_of(const Bf16Parts& x, std::int32_t top, int slice) {
  // In units of the slice's last place, then without what belongs to the slices above.
  const std::int32_t shift = x.exponent - (top - kSliceBits * (slice + 1));
  std::uint32_t bits = 0;
  if (shift >= 0) {
    bits =
        shift < kSliceBits ? (x.significand << static_cast<unsigned>(shift)) & ((1U << kSliceBits) - 1U) : 0U;
  } else {
    bits = shift > -8 ? x.significand >> static_cast<unsigned>(-shift) : 0U;
  }
  return x.negative ? -static_cast<std::int32_t>(bits) : static_cast<std::int32_t>(bits);
}

std::size_t chunks_of(std::size_t rows) {
  return (rows + kChunk - 1) / kChunk;
}

}  // namespace

RowScale scale_of(std::span<const std::uint16_t> row) {
  std::int32_t top = kNothing;
  std::int32_t bottom = std::numeric_limits<std::int32_t>::max();
  for (const std::uint16_t word : row) {
    const Bf16Parts x(word);
    if (x.significand == 0) continue;
    top = std::max(top, top_of(x));
    bottom = std::min(bottom, bottom_of(x));
  }
  if (top == kNothing) return {};
  return {top, std::min(slices_for(top - bottom), kInnerSlices + 1)};
}

void InnerLeft::set(std::span<const std::uint16_t* const> rows, std::size_t width) {
  width_ = width;
  scales_.assign(kBlockRows, RowScale{});
  slices_ = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    scales_[r] = scale_of({rows[r], width});
    if (!scales_[r].broad()) slices_ = std::max(slices_, scales_[r].slices);
  }
  data_.assign(static_cast<std::size_t>(slices_) * width * kBlockRows, 0.0);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (scales_[r].broad()) continue;
    for (std::size_t d = 0; d < width; ++d) {
      const Bf16Parts x(rows[r][d]);
      for (int m = 0; m < slices_; ++m) {
        data_[(static_cast<std::size_t>(m) * width + d) * kBlockRows + r] =
            slice_of(x, scales_[r].exponent, m);
      }
    }
  }
}

InnerRight::InnerRight(const Bf16Rows& matrix)
    : width_(matrix.width), scales_(matrix.rows), chunks_(chunks_of(matrix.rows)) {
  tbb::parallel_for(std::size_t{0}, chunks_.size(), [&](std::size_t c) {
    Chunk& chunk = chunks_[c];
    const std::size_t begin = c * kChunk;
    const std::size_t count = std::min(kChunk, matrix.rows - begin);
    for (std::size_t j = 0; j < count; ++j) {
      scales_[begin + j] = scale_of({matrix.row(begin + j), width_});
      if (!scales_[begin + j].broad()) chunk.slices = std::max(chunk.slices, scales_[begin + j].slices);
    }
    chunk.data.assign(static_cast<std::size_t>(chunk.slices) * width_ * kChunk, 0.0F);
    for (std::size_t j = 0; j < count; ++j) {
      const RowScale& scale = scales_[begin + j];
      if (scale.broad()) continue;
      const std::uint16_t* const words = matrix.row(begin + j);
      for (std::size_t d = 0; d < width_; ++d) {
        const Bf16Parts x(words[d]);
        for (int m = 0; m < chunk.slices; ++m) {
          chunk.data[(static_cast<std::size_t>(m) * width_ + d) * kChunk + j] =
              static_cast<float>(slice_of(x, scale.exponent, m));
        }
      }
    }
  });
}

OuterRight::OuterRight(const Bf16Rows& matrix)
    : columns_((matrix.width + 15) / 16 * 16),
      row_exponents_(chunks_of(matrix.rows) * kChunk, 0),
      column_exponents_(columns_, kNothing),
      chunks_(chunks_of(matrix.rows)) {
  for (std::size_t r = 0; r < matrix.rows; ++r) {
    const std::uint16_t* const words = matrix.row(r);
    const std::int32_t exponent = scale_of({words, matrix.width}).exponent;
    row_exponents_[r] = exponent;
    for (std::size_t d = 0; d < matrix.width; ++d) {
      const Bf16Parts x(words[d]);
      if (x.significand != 0) column_exponents_[d] = std::max(column_exponents_[d], top_of(x) - exponent);
    }
  }
  for (std::int32_t& f : column_exponents_) f = f == kNothing ? 0 : f;

  tbb::parallel_for(std::size_t{0}, chunks_.size(), [&](std::size_t c) {
    Chunk& chunk = chunks_[c];
    const std::size_t begin = c * kChunk;
    const std::size_t count = std::min(kChunk, matrix.rows - begin);
    std::int32_t bits = 0;
    for (std::size_t r = 0; r < count; ++r) {
      const std::uint16_t* const words = matrix.row(begin + r);
      for (std::size_t d = 0; d < matrix.width; ++d) {
        const Bf16Parts x(words[d]);
        if (x.significand == 0) continue;
        bits = std::max(bits, row_exponents_[begin + r] + column_exponents_[d] - bottom_of(x));
      }
    }
    chunk.slices = std::min(slices_for(bits), kMaxSlices);
    chunk.data.assign(static_cast<std::size_t>(chunk.slices) * kChunk * columns_, 0.0F);
    for (std::size_t r = 0; r < count; ++r) {
      const std::uint16_t* const words = matrix.row(begin + r);
      for (std::size_t d = 0; d < matrix.width; ++d) {
        const Bf16Parts x(words[d]);
        const std::int32_t top = row_exponents_[begin + r] + column_exponents_[d];
        for (int m = 0; m < chunk.slices; ++m) {
          chunk.data[(static_cast<std::size_t>(m) * kChunk + r) * columns_ + d] =
              static_cast<float>(slice_of(x, top, m));
        }
      }
    }
  });
}

}  // namespace bitattn::reference
