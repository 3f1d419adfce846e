#pragma once
// How a SIMD engine keeps a packed operand in PackedOperand::extra, and which guards follow from what it
// found in it.
//
//   left,  [rows][steps]      { 16 values, 16 exponent bytes }          one row of C at a time, k broadcast
//   right, [panels][steps]    { [16][W] words, [16][W] exponent bytes } W columns of C side by side
//
// then, for every line (a row of the left operand, a panel of the right one), what LineFacts lists; then one
// word for every (line, step): is any element of it not zero; then, right only, one word for every column:
// its Special.
//
// Values are fp32 bits of the BF16 elements (exact). Right operands stay words until they are used: an
// attention call keeps many of them, and what does not come from an outer cache need not be waited for.
// Infinities and NaNs are kept as zeros; their rows and columns are listed as special and computed by other
// means.
//
// Exponents: E is the exponent field, 1 for subnormals. The left side stores the byte E + 64 (0 for a zero
// element), the right side 191 - E (255 for a zero element): a saturating subtraction of bytes is then E_left
// + E_right - 127, the biased exponent of the product before normalisation, and 0 if either element is zero.
// Inside a row of W bytes, byte 4*i + j belongs to column j*W/4 + i, so that the j-th vector of columns finds
// its exponents in byte j of each of its lanes.

#include <cstddef>
#include <cstdint>

#include "emu/mma/tile_product.hpp"

namespace bitattn::mma::simd {

inline constexpr int kStep = 16;           ///< products of one fused step
inline constexpr int kLeftStep = 20;       ///< 32-bit words of one (row, step) of a left operand
inline constexpr int kSmallestNone = 255;  ///< LineFacts::smallest of a line of zeros

/// Does a row or column hold infinities or NaNs?
enum Special : std::uint32_t { kFinite = 0, kHasInfinity = 1, kHasNan = 2 };

/// Facts about one line of an operand, from which multiply() picks its path. Over finite elements.
struct LineFacts {
  std::uint32_t largest;   ///< largest E of its elements that are not zero, 0 without any
  std::uint32_t smallest;  ///< smallest E of them, kSmallestNone without any
  std::uint32_t heavy;     ///< is there a step whose 16 significands sum up to more than kHeavySum?
  std::uint32_t special;   ///< the greatest Special in it
};
inline constexpr int kFactWords = 4;

/// If the 16 significands (1.0 = 128) of one side of a step sum up to no more, then its 16 terms and the
/// accumulator sum up, in units of 2^(M-25), to at most 2^25 * (3983 * 255 / 128^2 + 2) < 2^25 * 63.992 <
/// 2^31, whatever the other side is.
inline constexpr std::uint32_t kHeavySum = 3983;

/// Offsets, in words, of the parts of an operand whose columns come in panels of `width` (left: unused).
struct Layout {
  int lines = 0, steps = 0;
  std::size_t line_words = 0;  ///< of the values and exponents of a line
  std::size_t facts = 0, live = 0, columns = 0, total = 0;

  Layout(Side side, int rows, int k, int width) : steps(k / kStep) {
    lines = side == Side::left ? rows : (rows + width - 1) / width;
    line_words = static_cast<std::size_t>(steps) * step_words(side, width);
    facts = line_words * static_cast<std::size_t>(lines);
    live = facts + static_cast<std::size_t>(kFactWords) * static_cast<std::size_t>(lines);
    columns = live + static_cast<std::size_t>(lines) * static_cast<std::size_t>(steps);
    total = columns +
            (side == Side::right ? static_cast<std::size_t>(lines) * static_cast<std::size_t>(width) : 0U);
  }

  static constexpr std::size_t step_words(Side side, int width) {
    return side == Side::left ? kLeftStep
                              : static_cast<std::size_t>(kStep) * static_cast<std::size_t>(width) * 3 / 4;
  }
};

// ---- Guards of the fast path; the proof is in docs/performance.md, here are its numbers. ----
//
// The fast path computes, for a step of one element, every term as trunc(a*b * 2^(25-M)) from fp32 numbers.
// It gives the model's bits if
//   (1) products and partial sums are finite, and M is not above what the scaling can do (ScaleBounds);
//   (2) c is 0 or an integer multiple of 2^-126 (it is, if |c| >= 2^-101), and wherever a product is not
//   zero, M > -101:
//       then a product that fp32 cannot hold exactly is below 2^-126 <= 2^(M-25) and its term is 0 either
//       way, and the result is such a multiple again;
//   (3) M is computed from exponents that the byte arithmetic holds (E <= kLargestByteField on each side);
//   (4) the sum of a step fits 32 bits (not both sides heavy).

inline constexpr std::uint32_t kLargestByteField = 191;
inline constexpr std::uint32_t kSmallestM =
    26;  ///< biased; M is taken as no less, and no accumulator begins below
inline constexpr std::uint32_t kSmallestProductM =
    27;                                ///< biased; smallest M of a fast step that has products
inline constexpr int kChunkSteps = 8;  ///< steps between two looks at the accumulators

/// The two ways to multiply a product by 2^(25-M): adding to the exponent field (which needs M <= 25, or a
/// zero would become something) or an fp32 multiply. Each with the bounds that keep M low for a chunk of 128
/// products: |c| < 2^25 + 128 * 2^(16+2) = 2^26 and |c| < 2^112 + 128 * 2^(90+2) < 2^113.
struct ScaleBounds {
  std::uint32_t largest_fields;     ///< E_left + E_right of the largest elements
  std::uint32_t accumulator_limit;  ///< fp32 bits; |c| is below
};
inline constexpr ScaleBounds kScaleByAdd{254 + 16, (127U + 25U) << 23U};
inline constexpr ScaleBounds kScaleByMultiply{254 + 90, (127U + 112U) << 23U};

}  // namespace bitattn::mma::simd
