#pragma once
// A second model of the tensor core, written straight from docs/spec/hopper-arithmetic.md 1 with exact
// integers: slow, and sharing no code with emu/arith. Two models that were written apart and agree on every
// bit are hard to get wrong in the same way. It can also deviate from the chip, one rule at a time, to show
// that a comparison notices.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "tests/emu/arith/big_fixed_point.hpp"

namespace bitattn::test {

/// An operand format, as the definition describes it ("FR fraction bits and exponent bias B").
struct SlowFormat {
  int exponent_bits;
  int fraction_bits;
  bool has_infinity;  ///< false: e4m3, whose only NaNs have all exponent and fraction bits set

  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  constexpr int width() const { return 1 + exponent_bits + fraction_bits; }
};

inline constexpr SlowFormat kSlowBf16{8, 7, true};
inline constexpr SlowFormat kSlowF16{5, 10, true};
inline constexpr SlowFormat kSlowE4m3{4, 3, false};
inline constexpr SlowFormat kSlowE5m2{5, 2, true};
inline constexpr SlowFormat kSlowFp32{8, 23, true};

/// What the slow model does; the defaults are the chip's BF16 and FP16 units. Below `result_fraction_bits`
/// stand the deviations that the page lists under "What fails".
struct SlowRule {
  int aligned_fraction_bits = 25;  ///< F
  int result_fraction_bits = 23;   ///< OF
  int exponent_floor = -133;
  bool has_floor = true;
  bool align_toward_minus_infinity = false;  ///< floor instead of cut off
  bool round_to_nearest = false;             ///< last rounding to nearest even instead of toward zero
  bool normalise_products = false;           ///< a product in [2,4) counts with the next exponent
  bool zero_products_enter_maximum = false;
  bool zero_c_enters_maximum = false;
  bool keep_sign_of_underflow = false;
  bool flush_subnormal_inputs = false;
  bool saturate = false;  ///< overflow to the largest finite number
  int group = 0;          ///< products of one fused sum; 0: all of them
};

inline constexpr SlowRule kSlowHopperWide{};
inline constexpr SlowRule kSlowHopperFp8{.aligned_fraction_bits = 13, .result_fraction_bits = 13};

/// "Operand decode."
struct SlowOperand {
  bool nan = false, infinite = false, negative = false;
  std::int64_t significand = 0;  ///< s
  int exponent = 0;              ///< e; the value is s * 2^(e - FR)
};

inline SlowOperand slow_decode(std::uint32_t word, const SlowFormat& format) {
  const std::uint32_t fraction = word % (1U << format.fraction_bits);
  const int field = static_cast<int>((word >> format.fraction_bits) % (1U << format.exponent_bits));
  const int top_field = (1 << format.exponent_bits) - 1;
  SlowOperand x;
  x.negative = (word >> (format.width() - 1)) % 2U == 1U;
  if (format.has_infinity) {
    x.infinite = field == top_field && fraction == 0;
    x.nan = field == top_field && fraction != 0;
  } else {
    x.nan = field == top_field && fraction == (1U << format.fraction_bits) - 1U;
  }
  x.significand = field == 0 ? fraction : fraction + (1U << format.fraction_bits);
  x.exponent = (field == 0 ? 1 : field) - format.bias();
  return x;
}

/// Value of a finite operand, and the same as a double (which holds every operand exactly).
inline Exact slow_value(const SlowFormat& format, std::uint32_t word) {
  const SlowOperand x = slow_decode(word, format);
  return scaled(x.negative ? -x.significand : x.significand, x.exponent - format.fraction_bits);
}
inline double slow_double(const SlowFormat& format, std::uint32_t word) {
  const SlowOperand x = slow_decode(word, format);
  const auto significand = static_cast<double>(x.negative ? -x.significand : x.significand);
  return std::ldexp(significand, x.exponent - format.fraction_bits);
}

namespace detail {

/// v cut off toward zero to a multiple of `grid` (or down to one, toward minus infinity).
inline Exact cut_off(const Exact& v, const Exact& grid, bool toward_minus_infinity) {
  Exact quotient = v / grid;  // Boost divides as C++ does, toward zero
  if (toward_minus_infinity && v < 0 && quotient * grid != v) quotient -= 1;
  return quotient * grid;
}

/// "Else round |S| toward zero to OF+1 significant bits ..."
inline std::uint32_t slow_round(const Exact& sum, const SlowRule& rule) {
  if (sum == 0) return 0U;
  const Exact magnitude = abs(sum);
  const std::uint32_t sign = sum < 0 ? 0x80000000U : 0U;
  const int e = std::max(binary_exponent(sum), -126);
  const Exact last_place = power_of_two(e - rule.result_fraction_bits);
  Exact quotient = magnitude / last_place;
  if (rule.round_to_nearest) {
    const Exact twice_rest = 2 * (magnitude - quotient * last_place);
    if (twice_rest > last_place || (twice_rest == last_place && quotient % 2 == 1)) quotient += 1;
  }
  const Exact rounded = quotient * last_place;
  if (rounded == 0) return rule.keep_sign_of_underflow ? sign : 0U;
  if (rounded >= power_of_two(128)) return sign + (rule.saturate ? 0x7f7fffffU : 0x7f800000U);
  return sign + fp32_from_exact(rounded);
}

}  // namespace detail

/// One fused step: c + sum of a[i]*b[i], i < a.size().
inline std::uint32_t slow_fused_step(const std::vector<SlowOperand>& a, const SlowFormat& format_a,
                                     const std::vector<SlowOperand>& b, const SlowFormat& format_b,
                                     std::uint32_t c_bits, const SlowRule& rule) {
  // Step 1: specials.
  const SlowOperand c = slow_decode(c_bits, kSlowFp32);
  bool nan = c.nan;
  bool plus_infinity = c.infinite && !c.negative;
  bool minus_infinity = c.infinite && c.negative;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const bool a_zero = !a[i].infinite && a[i].significand == 0;
    const bool b_zero = !b[i].infinite && b[i].significand == 0;
    const bool infinite = a[i].infinite || b[i].infinite;
    if (a[i].nan || b[i].nan || (infinite && (a_zero || b_zero))) nan = true;
    if (infinite && a[i].negative == b[i].negative) plus_infinity = true;
    if (infinite && a[i].negative != b[i].negative) minus_infinity = true;
  }
  if (nan || (plus_infinity && minus_infinity)) return 0x7fffffffU;
  if (plus_infinity) return 0x7f800000U;
  if (minus_infinity) return 0xff800000U;

  // Step 2: the terms, exact, each with its exponent.
  struct Term {
    Exact value;
    int exponent;
    bool enters_maximum;
  };
  std::vector<Term> terms;
  terms.reserve(a.size() + 1);
  const auto add_term = [&](std::int64_t significand, int last_place, bool negative, int exponent,
                            bool enters) {
    const Exact magnitude = scaled(significand, last_place);
    terms.push_back({negative ? Exact(-magnitude) : magnitude, exponent, enters});
  };
  add_term(c.significand, c.exponent - 23, c.negative, c.exponent,
           c.significand != 0 || rule.zero_c_enters_maximum);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const std::int64_t significand = a[i].significand * b[i].significand;
    const int fraction_bits = format_a.fraction_bits + format_b.fraction_bits;
    int exponent = a[i].exponent + b[i].exponent;
    const int last_place = exponent - fraction_bits;
    if (rule.normalise_products && significand >> (fraction_bits + 1) != 0) ++exponent;
    add_term(significand, last_place, a[i].negative != b[i].negative, exponent,
             significand != 0 || rule.zero_products_enter_maximum);
  }

  // Step 3: the largest exponent.
  int largest = rule.has_floor ? rule.exponent_floor : -280;
  for (const Term& term : terms) {
    if (term.enters_maximum) largest = std::max(largest, term.exponent);
  }

  // Steps 4 and 5: alignment and sum. Steps 6 and 7: rounding.
  const Exact grid = power_of_two(largest - rule.aligned_fraction_bits);
  Exact sum = 0;
  for (const Term& term : terms) sum += detail::cut_off(term.value, grid, rule.align_toward_minus_infinity);
  return detail::slow_round(sum, rule);
}

/// c + sum over i < k of a[i]*b[i] with the chip's rule or a deviation from it; one fused step, or k/group of
/// them.
template <class Word>
std::uint32_t slow_dot_product(const Word* a, const SlowFormat& format_a, const Word* b,
                               const SlowFormat& format_b, int k, std::uint32_t c, const SlowRule& rule) {
  const int group = rule.group == 0 ? k : rule.group;
  for (int first = 0; first < k; first += group) {
    std::vector<SlowOperand> x;
    std::vector<SlowOperand> y;
    for (int i = first; i < first + group; ++i) {
      x.push_back(slow_decode(a[i], format_a));
      y.push_back(slow_decode(b[i], format_b));
      if (rule.flush_subnormal_inputs) {
        for (auto [operand, format] : {std::pair{&x.back(), &format_a}, std::pair{&y.back(), &format_b}}) {
          if (operand->significand >> format->fraction_bits == 0) operand->significand = 0;
        }
      }
    }
    c = slow_fused_step(x, format_a, y, format_b, c, rule);
  }
  return c;
}

}  // namespace bitattn::test
