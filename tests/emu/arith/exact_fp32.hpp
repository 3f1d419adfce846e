#pragma once
// fp32 arithmetic straight from its definition: the exact value first (big_fixed_point.hpp), then one
// rounding. docs/spec/hopper-arithmetic.md 6, 8 and 9. Shares no code with emu/arith and does no
// floating-point arithmetic.

#include <cstdint>

#include "tests/emu/arith/big_fixed_point.hpp"

namespace bitattn::test {

/// What becomes of results below the smallest normal number.
enum class Underflow {
  kGradual,             ///< IEEE: subnormals kept, in and out
  kFlushAfterRounding,  ///< the chip's .ftz: zero if tiny after rounding to 24 bits with unbounded exponent
  // Two rules the chip does not follow, to show that a comparison can tell:
  kFlushBeforeRounding,  ///< zero if the exact value is tiny
  kFlushSubnormal,       ///< zero if the IEEE result is subnormal
};

namespace detail {

inline bool is_nan_pattern(std::uint32_t x) {
  return x % 0x80000000U > 0x7f800000U;
}
inline bool is_infinity_pattern(std::uint32_t x) {
  return x % 0x80000000U == 0x7f800000U;
}
inline std::uint32_t sign_of(std::uint32_t x) {
  return x / 0x80000000U * 0x80000000U;
}
inline bool is_zero_pattern(std::uint32_t x) {
  return x % 0x80000000U == 0U;
}

/// v rounded to a multiple of `grid`, to nearest, ties to the even multiple.
inline Exact nearest_multiple(const Exact& v, const Exact& grid) {
  const Exact magnitude = abs(v);
  Exact quotient = magnitude / grid;
  const Exact twice_rest = 2 * (magnitude - quotient * grid);
  if (twice_rest > grid || (twice_rest == grid && quotient % 2 == 1)) quotient += 1;
  return v < 0 ? Exact(-quotient * grid) : Exact(quotient * grid);
}

}  // namespace detail

/// An exact value that is not zero, to fp32.
inline std::uint32_t exact_round(const Exact& v, Underflow underflow) {
  const std::uint32_t sign = v < 0 ? 0x80000000U : 0U;
  const int e = binary_exponent(v);
  const Exact smallest_normal = power_of_two(-126);
  const Exact gradual = detail::nearest_multiple(v, power_of_two(std::max(e, -126) - 23));
  if (abs(gradual) >= power_of_two(128)) return sign + 0x7f800000U;
  const std::uint32_t ieee = gradual == 0 ? sign : fp32_from_exact(gradual);
  switch (underflow) {
    case Underflow::kGradual:
      return ieee;
    case Underflow::kFlushAfterRounding: {
      // An exponent of its own for the rounding, as if there were no smallest one; 2^-300 is as good as
      // unbounded here.
      const Exact unbounded = e - 23 < kUnitExponent ? v : detail::nearest_multiple(v, power_of_two(e - 23));
      return abs(unbounded) < smallest_normal ? sign : ieee;
    }
    case Underflow::kFlushBeforeRounding:
      return abs(v) < smallest_normal ? sign : ieee;
    case Underflow::kFlushSubnormal:
      return abs(gradual) < smallest_normal ? sign : ieee;
  }
  return ieee;
}

/// An operand as the instruction takes it.
inline std::uint32_t exact_input(std::uint32_t x, Underflow underflow) {
  const bool subnormal = x % 0x80000000U < 0x00800000U;
  return underflow != Underflow::kGradual && subnormal ? detail::sign_of(x) : x;
}

/// a*b + c with one rounding.
inline std::uint32_t exact_fma(std::uint32_t a, std::uint32_t b, std::uint32_t c, Underflow underflow) {
  using namespace detail;
  a = exact_input(a, underflow);
  b = exact_input(b, underflow);
  c = exact_input(c, underflow);
  const std::uint32_t product_sign = sign_of(a ^ b);
  const bool product_infinite = is_infinity_pattern(a) || is_infinity_pattern(b);
  if (is_nan_pattern(a) || is_nan_pattern(b) || is_nan_pattern(c)) return 0x7fffffffU;
  if (product_infinite && (is_zero_pattern(a) || is_zero_pattern(b))) return 0x7fffffffU;
  if (product_infinite && is_infinity_pattern(c) && sign_of(c) != product_sign) return 0x7fffffffU;
  if (product_infinite) return product_sign + 0x7f800000U;
  if (is_infinity_pattern(c)) return c;
  const Exact product = exact_from_fp32(a) * exact_from_fp32(b) / power_of_two(0);
  const Exact sum = product + exact_from_fp32(c);
  if (sum != 0) return exact_round(sum, underflow);
  // An exact zero: minus only where both terms are minus zero.
  const bool both_negative_zero = product == 0 && product_sign != 0U && sign_of(c) != 0U;
  return both_negative_zero ? 0x80000000U : 0U;
}

/// a*b.
inline std::uint32_t exact_mul(std::uint32_t a, std::uint32_t b, Underflow underflow) {
  // A zero of the product's own sign added to it changes nothing, not even a zero's sign.
  return exact_fma(a, b, detail::sign_of(a ^ b), underflow);
}

/// a + b.
inline std::uint32_t exact_add(std::uint32_t a, std::uint32_t b, Underflow underflow) {
  return exact_fma(a, 0x3f800000U, b, underflow);
}

/// The greater (or the smaller) of two, -0 below +0; a NaN loses against a number.
inline std::uint32_t exact_extreme(std::uint32_t a, std::uint32_t b, bool greatest, Underflow underflow) {
  using namespace detail;
  a = exact_input(a, underflow);
  b = exact_input(b, underflow);
  if (is_nan_pattern(a) && is_nan_pattern(b)) return 0x7fffffffU;
  if (is_nan_pattern(a)) return b;
  if (is_nan_pattern(b)) return a;
  const auto position = [](std::uint32_t x) {
    if (is_infinity_pattern(x)) return sign_of(x) != 0U ? Exact(-power_of_two(200)) : power_of_two(200);
    // Half the smallest fp32 number is room enough to put -0 below +0.
    if (is_zero_pattern(x)) return sign_of(x) != 0U ? Exact(-power_of_two(-150)) : Exact(0);
    return exact_from_fp32(x);
  };
  const bool a_is_greater = position(a) > position(b);
  return a_is_greater == greatest ? a : b;
}

}  // namespace bitattn::test
