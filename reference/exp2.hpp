#pragma once
// 2^x for 0 <= x < 1 in 128-bit fixed point: three tables of 128 entries, then five terms of the exponential
// series.

#include <array>

#include "reference/wide.hpp"

namespace bitattn::reference {

class Exp2 {
 public:
  /// The tables, made once with MPFR.
  static const Exp2& instance();

  /// 2^(fraction / 2^128) in units of 2^-127, so in [2^127, 2^128). Too small by at most kRelativeError,
  /// never too large.
  U128 operator()(U128 fraction) const {
    const U128 t12 = table_product(first_[index(fraction, 121)], second_[index(fraction, 114)]);
    const U128 t = table_product(t12, third_[index(fraction, 107)]);
    // exp(x) - 1 for x < 2^-21 * ln 2, every power in units of 2^-128.
    const U128 rest = fraction & ((U128{1} << 107U) - 1);
    const U128 x = high_product(rest, ln2_);
    const U128 x2 = high_product(x, x);
    const std::uint64_t x_high = high_half(x);
    const auto x3 = low_half(high_product(x2, x));  // < 2^63
    const std::uint64_t x4 = high_half(product(x3, x_high));
    const std::uint64_t x5 = high_half(product(x4, x_high));
    const U128 series = x + (x2 >> 1U) + (x3 / 6 + x4 / 24 + x5 / 120);
    return t + high_product(t, series);
  }

  /// Three table entries and two products of them, each off by less than one unit of 2^-127; the last product
  /// by one more; the series by less than 8 units of 2^-128, what it leaves out (x^6/720 < 2^-138) included.
  static constexpr double kRelativeError = 0x1p-123;

 private:
  Exp2();
  static unsigned index(U128 fraction, unsigned low_bit) {
    return static_cast<unsigned>(fraction >> low_bit) & 127U;
  }
  /// a * b for factors in units of 2^-127 whose product is below 2.
  static U128 table_product(U128 a, U128 b) {
    const U256 p = full_product(a, b);
    return (p.high << 1U) | (p.low >> 127U);
  }

  std::array<U128, 128> first_, second_, third_;  ///< 2^(i/2^7), 2^(i/2^14), 2^(i/2^21), rounded down
  U128 ln2_;                                      ///< in units of 2^-128, rounded down
};

}  // namespace bitattn::reference
