#pragma once
// Exact sums of products of small integers on the floating-point units: doubles hold every integer up to
// 2^53, so as long as no sum can pass that, nothing is ever rounded and the order of operations is free.

#include <cstddef>
#include <cstdint>
#include <span>

namespace bitattn::reference {

/// Bits of one slice: |slice| < 2^22, so a sum of up to 2^9 products stays within 2^53.
inline constexpr int kSliceBits = 22;
inline constexpr std::size_t kLongestSum = 512;

/// Rows of a left-hand block, all worked on at once.
inline constexpr std::size_t kBlockRows = 16;

/// One pair of slices to be multiplied: a[k][kBlockRows] and b[k][columns], b's rows `b_stride` apart.
/// Integers.
struct SlicePair {
  const double* a;
  const float* b;
};

using AddExactProducts = void (*)(std::span<const SlicePair> pairs, std::size_t depth, std::size_t columns,
                                  std::size_t b_stride, std::int64_t* sums, std::size_t sums_stride);

/// The same function for every instruction set that this processor has, the fastest first.
std::span<const AddExactProducts> exact_product_engines();

/// sums[r][c] += sum over pairs and k < depth of a[k][r] * b[k][c], exactly. `columns` is a multiple of 16;
/// rows of `sums` are `sums_stride` apart.
void add_exact_products(std::span<const SlicePair> pairs, std::size_t depth, std::size_t columns,
                        std::size_t b_stride, std::int64_t* sums, std::size_t sums_stride);

}  // namespace bitattn::reference
