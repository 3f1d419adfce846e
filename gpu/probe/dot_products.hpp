#pragma once
// Operands for tensor-core products, as functions of counters alone: the words of A by (tile, row, k), those
// of B by (tile, column, k), the accumulator by (tile, row, column). A tile is of one kind; each kind asks
// one awkward question of every dot product of its rows and columns.

#include <cstdint>

#include "emu/arith/tensor_core.hpp"
#include "gpu/probe/mix.hpp"

namespace bitattn::gpu::probe {

enum class Kind : int {
  narrow_exponents,
  medium_exponents,
  wide_exponents,
  random_finite,
  c_cancels,            ///< c is minus the products' sum, give or take some last places
  underflow,            ///< products around 2^-144, c zero or subnormal
  zeros_of_both_signs,  ///< mostly zeros, one of them beside a huge number
  overflow,
  cancelling_pairs,
  attention_like,  ///< probabilities times values
  infinities_and_nans,
  one_dominates,
  large_c,
  few_extreme,  ///< one to three products, significands of almost all ones or zeros
  extreme_significands,
  underflow_few,  ///< a few products around 2^-149
  pairs_but_for_one_bit,
  exponent_floor,  ///< sums that the floor of the alignment exponent decides
  subnormal_operands,
  zeros_only,
  beyond_fp32,  ///< products too large for fp32 that cancel
  window_edge,  ///< bits around the cut of the alignment window
  one_special,
  random_all,  ///< any bits, infinities and NaNs among them
};
inline constexpr int kKinds = 24;

enum class Operand : int { a, b };

/// A number of format F: 1.fraction * 2^exponent, clamped to what F holds (never infinity or NaN); below the
/// normal numbers a subnormal that is not zero.
template <class F>
BITATTN_HD constexpr std::uint32_t make_number(bool negative, int exponent, std::uint32_t fraction) {
  constexpr bool kIeee = F::infinite(static_cast<std::uint32_t>(F::kTopExponent) << F::kFractionBits);
  constexpr int kLargest = F::kTopExponent - F::kBias - (kIeee ? 1 : 0);
  constexpr int kSmallest = 1 - F::kBias;
  constexpr int kSignShift = F::kFractionBits + (F::kTopExponent == 255 ? 8 : F::kTopExponent == 31 ? 5 : 4);
  const std::uint32_t sign = negative ? 1U << kSignShift : 0U;
  fraction &= F::kFractionMask;
  if (exponent > kLargest) exponent = kLargest;
  if (exponent < kSmallest) {
    const int shift = kSmallest - exponent;
    const std::uint32_t word = shift > 15 ? 0U : ((1U << F::kFractionBits) | fraction) >> shift;
    return sign | (word != 0U ? word : 1U);
  }
  if (!kIeee && exponent == kLargest && fraction == F::kFractionMask) --fraction;
  return sign | static_cast<std::uint32_t>(exponent + F::kBias) << F::kFractionBits | fraction;
}

namespace detail {

/// Successive random numbers drawn from 64 bits.
struct Draw {
  std::uint64_t bits;
  BITATTN_HD constexpr std::uint32_t below(std::uint32_t n) {
    const std::uint32_t value = static_cast<std::uint32_t>(bits & 0xffffU) % n;
    bits = bits >> 16U | bits << 48U;
    return value;
  }
  BITATTN_HD constexpr int between(int low, int high) {
    return low + static_cast<int>(below(static_cast<std::uint32_t>(high - low + 1)));
  }
};

template <class F>
BITATTN_HD constexpr std::uint32_t finite(std::uint32_t word) {
  if (F::nan(word) || F::infinite(word)) return word ^ (1U << F::kFractionBits);  // the exponent below
  return word;
}

template <class F>
BITATTN_HD constexpr int word_bits() {
  return F::kTopExponent == 255 || F::kFractionBits == 10 ? 16 : 8;
}

}  // namespace detail

/// What a tile's operands have in common.
struct TileShape {
  Kind kind;
  std::uint64_t seed;
  int middle;    ///< exponent of a typical product
  int middle_a;  ///< the share of A in it
  int width;     ///< how far single exponents stray
  int chosen;    ///< one k
  int live;      ///< kinds with few products: how many
};

template <class A, class B>
BITATTN_HD constexpr TileShape tile_shape(std::uint64_t tile, int k) {
  TileShape shape{};
  shape.kind = static_cast<Kind>(tile % kKinds);
  shape.seed = mix(tile * 0x2545f4914f6cdd1dULL + 77);
  detail::Draw draw{mix(shape.seed)};
  constexpr int kSmallest = 2 - A::kBias - B::kBias;
  constexpr int kLargest = A::kBias + B::kBias - 1;
  const int low = kSmallest > -110 ? kSmallest : -110;
  const int high = kLargest < 110 ? kLargest : 110;
  shape.middle = draw.between(low, high);
  shape.chosen = static_cast<int>(draw.below(static_cast<std::uint32_t>(k)));
  shape.live = draw.between(1, 3);
  detail::Draw more{mix(shape.seed + 1)};
  switch (shape.kind) {
    case Kind::narrow_exponents:
      shape.width = 2;
      break;
    case Kind::medium_exponents:
      shape.width = 8;
      break;
    case Kind::wide_exponents:
      shape.width = 40;
      break;
    case Kind::c_cancels:
      shape.width = more.between(0, 12);
      break;
    case Kind::underflow:
      shape.middle = more.between(-160, -128);
      shape.width = 8;
      break;
    case Kind::zeros_of_both_signs:
      shape.width = more.between(0, 30);
      break;
    case Kind::overflow:
      shape.middle = more.between(118, 128);
      shape.width = 2;
      break;
    case Kind::cancelling_pairs:
    case Kind::pairs_but_for_one_bit:
      shape.width = more.between(0, 20);
      break;
    case Kind::few_extreme:
      shape.width = more.between(0, 20);
      break;
    case Kind::extreme_significands:
      shape.width = more.between(0, 6);
      break;
    case Kind::underflow_few:
      shape.middle = more.between(-165, -132);
      shape.width = 10;
      break;
    case Kind::exponent_floor:
      shape.middle = -155;
      shape.width = 4;
      break;
    case Kind::beyond_fp32:
      shape.middle = more.between(126, 230);
      shape.width = 6;
      break;
    default:
      shape.width = 4;
      break;
  }
  // Split between the two sides as far as the formats reach.
  const int skew = more.between(-20, 20);
  shape.middle_a = shape.middle / 2 + (A::kBias > 20 && B::kBias > 20 ? skew : 0);
  return shape;
}

/// The word at position k of a row of A (or column of B) `line`.
template <class F, Operand side>
BITATTN_HD constexpr std::uint32_t operand_word(const TileShape& shape, int line, int k) {
  using detail::Draw;
  constexpr bool kIsA = side == Operand::a;
  const Kind kind = shape.kind;
  // Where pairs cancel, the odd element repeats the even one, with A's sign turned.
  const bool paired =
      kind == Kind::cancelling_pairs || kind == Kind::pairs_but_for_one_bit || kind == Kind::beyond_fp32;
  const int source = paired ? k & ~1 : k;
  Draw draw{mix(shape.seed ^ mix(static_cast<std::uint64_t>(line) * 4096U +
                                 static_cast<std::uint64_t>(source) * 2U + (kIsA ? 0U : 1U)))};
  const bool negative = draw.below(2) != 0U;
  std::uint32_t fraction = draw.below(65536U);
  const int base = kIsA ? shape.middle_a : shape.middle - shape.middle_a;
  int exponent = base + draw.between(-shape.width / 2, (shape.width + 1) / 2);
  Draw extra{mix(draw.bits + 0x9e37U)};
  constexpr std::uint32_t kWordMask = (1U << (detail::word_bits<F>() - 1) << 1U) - 1U;
  constexpr std::uint32_t kSign = 1U << (detail::word_bits<F>() - 1);
  const std::uint32_t signed_zero = negative ? kSign : 0U;
  switch (kind) {
    case Kind::random_finite:
      return detail::finite<F>((fraction ^ (negative ? kSign : 0U)) & kWordMask);
    case Kind::random_all:
      return (fraction ^ (negative ? kSign : 0U)) & kWordMask;
    case Kind::underflow:
      if (kIsA && extra.below(4) == 0U) return signed_zero;
      break;
    case Kind::zeros_of_both_signs:
      if (kIsA && (k == shape.chosen || extra.below(4) != 0U)) return signed_zero;
      if (!kIsA && k == shape.chosen) return make_number<F>(negative, F::kBias, fraction);
      if (!kIsA && extra.below(4) == 0U) return signed_zero;
      break;
    case Kind::cancelling_pairs:
    case Kind::pairs_but_for_one_bit: {
      std::uint32_t word = make_number<F>(negative, exponent, fraction);
      if (kIsA && (k & 1) != 0) word ^= kSign;
      if (!kIsA && kind == Kind::pairs_but_for_one_bit && k == shape.chosen)
        word = detail::finite<F>(word ^ 1U);
      return word;
    }
    case Kind::beyond_fp32: {
      if (k == shape.chosen) {  // its partner stays, and it becomes a product that fp32 holds
        return make_number<F>(negative, (kIsA ? 50 : 40) + extra.between(0, 18), fraction);
      }
      if (k == (shape.chosen ^ 1) && kIsA) return signed_zero;
      std::uint32_t word = make_number<F>(negative, exponent, fraction);
      if (kIsA && (k & 1) != 0) word ^= kSign;
      return word;
    }
    case Kind::attention_like:
      if (kIsA) return make_number<F>(false, -extra.between(0, 14), fraction);
      return make_number<F>(negative, extra.between(-3, 2), fraction);
    case Kind::infinities_and_nans:
    case Kind::one_special: {
      std::uint32_t word = make_number<F>(negative, exponent, fraction);
      const std::uint32_t rarity = kind == Kind::one_special ? 128U : 12U;
      const std::uint32_t roll = extra.below(rarity);
      const std::uint32_t top = static_cast<std::uint32_t>(F::kTopExponent) << F::kFractionBits;
      if (roll == 0U) word = signed_zero | top;  // infinity, where there is one
      if (roll == 1U && extra.below(4) == 0U) word = signed_zero | top | F::kFractionMask;  // NaN
      if (roll == 2U) word = signed_zero;
      if (roll == 3U) word = signed_zero | (1U + extra.below(F::kFractionMask));  // subnormal
      return word;
    }
    case Kind::one_dominates:
      if (k != shape.chosen) exponent -= extra.between(0, 30);
      break;
    case Kind::large_c:
      exponent -= extra.between(0, 20);
      break;
    case Kind::few_extreme:
    case Kind::extreme_significands: {
      const std::uint32_t which = extra.below(4);
      fraction = which == 0U ? 0U : which == 1U ? 1U : which == 2U ? F::kFractionMask : F::kFractionMask - 1U;
      if (kind == Kind::few_extreme && kIsA) {
        // `live` neighbours from the chosen k on, within a step of 16.
        const int distance = (k - shape.chosen) & 15;
        if (distance >= shape.live) return signed_zero;
      }
      break;
    }
    case Kind::underflow_few:
      if (kIsA && ((k - shape.chosen) & 15) >= shape.live) return signed_zero;
      break;
    case Kind::exponent_floor:
      // All of one sign. The chosen product stops short of a multiple of 2^-149, the crowd around 2^-158
      // decides.
      if (k == shape.chosen)
        return make_number<F>(false, kIsA ? -75 : -75, kIsA ? F::kFractionMask : fraction);
      return make_number<F>(false, exponent, fraction);
    case Kind::subnormal_operands:
      if (!kIsA && extra.below(3) == 0U)
        return make_number<F>(negative, extra.between(0, F::kBias), fraction);
      return signed_zero | (fraction & F::kFractionMask);
    case Kind::zeros_only:
      if (kIsA) return signed_zero;
      return make_number<F>(negative, extra.between(-F::kBias - 8, F::kBias), fraction);
    case Kind::window_edge:
      if (k != shape.chosen)
        exponent -= kIsA ? extra.between(3, 6) + static_cast<int>(shape.seed & 7U) : extra.between(3, 10);
      break;
    default:
      break;
  }
  return make_number<F>(negative, exponent, fraction);
}

/// fp32 of that exponent, subnormal below 2^-126.
BITATTN_HD constexpr std::uint32_t fp32_number(bool negative, int exponent, std::uint32_t fraction) {
  fraction &= 0x7fffffU;
  const std::uint32_t sign = negative ? arith::kSignBit : 0U;
  if (exponent > 127) exponent = 127;
  if (exponent < -126) {
    const int shift = -126 - exponent;
    return sign | (shift > 23 ? 0U : (0x800000U | fraction) >> shift);
  }
  return sign | static_cast<std::uint32_t>(exponent + 127) << 23U | fraction;
}

/// The accumulator before the first step. Kind::c_cancels wants `products`, the bits of the chain from +0;
/// see needs_products.
BITATTN_HD constexpr std::uint32_t accumulator_word(const TileShape& shape, int row, int column,
                                                    std::uint32_t products) {
  using detail::Draw;
  Draw draw{mix(shape.seed ^ mix((static_cast<std::uint64_t>(row) << 20U) +
                                 static_cast<std::uint64_t>(column) + (1ULL << 40U)))};
  const bool negative = draw.below(2) != 0U;
  const std::uint32_t fraction = draw.below(65536U) << 7U | draw.below(128U);
  const std::uint32_t zero = negative ? arith::kSignBit : 0U;
  Draw extra{mix(draw.bits)};
  switch (shape.kind) {
    case Kind::random_all:
      return fraction << 9U ^ static_cast<std::uint32_t>(extra.bits);
    case Kind::random_finite: {
      const std::uint32_t word = fraction << 9U ^ static_cast<std::uint32_t>(extra.bits);
      return (word & arith::kInfinity) == arith::kInfinity ? word ^ 0x40000000U : word;
    }
    case Kind::c_cancels: {
      const std::uint32_t exponent = products & arith::kInfinity;
      if (exponent == 0U || exponent >= 0x7f000000U) return fp32_number(negative, shape.middle, fraction);
      return (products ^ arith::kSignBit) + static_cast<std::uint32_t>(extra.between(-3, 3));
    }
    case Kind::underflow:
    case Kind::subnormal_operands:
      if (extra.below(3) == 0U) return zero;
      return zero | fraction >> extra.between(0, 22);
    case Kind::underflow_few:
    case Kind::exponent_floor:
      return zero;
    case Kind::zeros_only: {
      const std::uint32_t which = extra.below(4);
      if (which < 2U) return zero;
      if (which == 2U) return zero | fraction >> extra.between(0, 22);
      return fp32_number(negative, extra.between(-126, 127), fraction);
    }
    case Kind::overflow:
      if (extra.below(8) == 0U) return 0x7f7fffffU | zero;
      return extra.below(4) == 0U ? zero : fp32_number(negative, extra.between(124, 127), fraction);
    case Kind::beyond_fp32:
      return fp32_number(negative, extra.between(90, 127), fraction);
    case Kind::large_c:
      return fp32_number(negative, shape.middle + extra.between(0, 30), fraction);
    case Kind::one_dominates:
    case Kind::window_edge:
      return fp32_number(negative, shape.middle - extra.between(-2, 30), fraction);
    case Kind::attention_like:
      return fp32_number(negative, extra.between(-4, 3), fraction);
    case Kind::few_extreme:
    case Kind::extreme_significands:
      return fp32_number(negative, shape.middle + extra.between(-10, 10),
                         extra.below(2) == 0U ? 0x7fffffU : fraction);
    case Kind::infinities_and_nans: {
      const std::uint32_t which = extra.below(24);
      if (which == 0U) return zero | arith::kInfinity;
      if (which == 1U) return zero | 0x7fc00000U | fraction;
      return fp32_number(negative, shape.middle + extra.between(-4, 4), fraction);
    }
    default:
      if (extra.below(8) == 0U) return zero;
      return fp32_number(negative, shape.middle + extra.between(-shape.width, shape.width), fraction);
  }
}

BITATTN_HD constexpr bool needs_products(const TileShape& shape) {
  return shape.kind == Kind::c_cancels;
}

/// A chain of fused steps of k products each under `rule`.
template <class A, class B, class Word>
BITATTN_HD constexpr std::uint32_t chain(const Word* a, const Word* b, int k, int steps, std::uint32_t c,
                                         arith::TensorCoreRule rule) {
  for (int s = 0; s < steps; ++s) c = arith::fused_step<A, B>(a + s * k, b + s * k, k, c, rule);
  return c;
}

}  // namespace bitattn::gpu::probe
