#pragma once
// From an exact inner product to the numerator of the softmax, a power of two, and the derivative of the
// softcap; with bounds on how far they are off. Derivation: docs/reference.md, "Numerators".

#include <cmath>

#include "reference/bound_arithmetic.hpp"
#include "reference/exp2.hpp"
#include "reference/problem_view.hpp"
#include "reference/wide_number.hpp"

namespace bitattn::reference {

inline constexpr double kLn2 = 0.69314718056;    // rounded up
inline constexpr double kLog2e = 1.44269504089;  // rounded up

/// Precision of the few MPFR operations that a problem or a row needs.
inline constexpr mpfr_prec_t kRowBits = 256;

/// What all scores of a problem are multiplied with.
struct Constants {
  bool softcap = false;
  Wide log2_scale;        ///< no softcap: scale * log2 e
  Wide argument_scale;    ///< softcap: 2 log2 e * |scale| / cap
  Wide cap_log2;          ///< softcap: cap * log2 e
  bool flip = false;      ///< softcap with a negative scale
  double cap_log2_error;  ///< softcap: error of the exponent that does not grow with it

  explicit Constants(const ProblemView& problem) : softcap(problem.softcap > 0) {
    Number log2e = make_number(kRowBits);
    mpfr_const_log2(raw(log2e), MPFR_RNDN);
    mpfr_ui_div(raw(log2e), 1, raw(log2e), MPFR_RNDN);
    Number x = make_number(kRowBits);
    mpfr_mul_d(raw(x), raw(log2e), problem.softmax_scale, MPFR_RNDN);
    log2_scale = wide_from(raw(x));
    cap_log2_error = 0;
    if (!softcap) return;
    mpfr_abs(raw(x), raw(x), MPFR_RNDN);
    mpfr_div_d(raw(x), raw(x), problem.softcap, MPFR_RNDN);
    mpfr_mul_2ui(raw(x), raw(x), 1, MPFR_RNDN);
    argument_scale = wide_from(raw(x));
    mpfr_mul_d(raw(x), raw(log2e), problem.softcap, MPFR_RNDN);
    cap_log2 = wide_from(raw(x));
    flip = problem.softmax_scale < 0;
    cap_log2_error = problem.softcap * 0x1p-120;
  }
};

/// whole + fraction / 2^128.
struct FixedPoint {
  std::int32_t whole = 0;
  U128 fraction = 0;
  bool operator<(const FixedPoint& b) const {
    return whole != b.whole ? whole < b.whole : fraction < b.fraction;
  }
};

/// x cut to a multiple of 2^-128 (towards zero); |x| < 2^30.
inline FixedPoint fixed_point(const Wide& x) {
  if (x.zero()) return {};
  FixedPoint f;
  const std::int32_t shift = -x.exponent;  // > 97
  f.whole = shift < 128 ? static_cast<std::int32_t>(x.significand >> static_cast<unsigned>(shift)) : 0;
  f.fraction = shift < 128    ? x.significand << static_cast<unsigned>(128 - shift)
               : shift == 128 ? x.significand
                              : shift_right(x.significand, shift - 128);
  if (!x.negative) return f;
  if (f.fraction == 0) return {-f.whole, 0};
  return {-f.whole - 1, U128{0} - f.fraction};
}

/// 2^x.
inline Wide exp2_of(const Exp2& exp2, const FixedPoint& x) {
  return {exp2(x.fraction), x.whole - 127, false};
}

/// 1 / d for d in [1, 2], in units of 2^-126 for d and 2^-127 for the result; off by at most 4 units.
inline U128 reciprocal(U128 d) {
  // Newton's iteration r += r (1 - d r), from 2^-49 to 2^-98 to the last places.
  const double start = 0x1p63 / (static_cast<double>(high_half(d)) * 0x1p-62 + 0x1p-50);
  U128 r = static_cast<U128>(static_cast<std::uint64_t>(start)) << 64U;  // <= 1/d, in units of 2^-127
  for (int i = 0; i < 2; ++i) {
    const U256 dr = full_product(d, r);  // units of 2^-253; d r <= 1
    const U128 dr_high =
        (dr.high << 3U) | (dr.low >> 125U);  // units of 2^-128, 2^128 itself cannot be: r <= 1/d
    const U128 rest = U128{0} - dr_high;     // 1 - d r
    r += high_product(r, rest);
  }
  return r;
}

/// The score's part in the softmax: log2 of the numerator, and with softcap the derivative.
struct Exponent {
  FixedPoint value;
  Wide derivative;      ///< softcap only: 1 - tanh^2
  double argument = 0;  ///< softcap only: log2 of 1 / exp(-2|y|), for the error of the derivative
};

inline Exponent exponent_of(const Constants& constants, const Exp2& exp2, const Wide& score) {
  if (!constants.softcap) return {fixed_point(multiply(score, constants.log2_scale)), {}, 0};
  // e = exp(-2|y|), tanh|y| = (1 - e) / (1 + e), 1 - tanh^2 = 4 e / (1 + e)^2.
  Wide argument = multiply(score, constants.argument_scale);
  argument.negative = true;
  Wide e;  // 0 where the argument is so large that e vanishes
  if (argument.zero() || argument.top() <= 28) e = exp2_of(exp2, fixed_point(argument));
  const U128 one = U128{1} << 126U;
  const U128 e_fixed = e.zero() ? U128{0} : shift_right(e.significand, -126 - e.exponent);
  const U128 r = reciprocal(one + e_fixed);
  const U256 t = full_product(one - e_fixed, r);         // units of 2^-253
  const U128 tanh_y = (t.high << 2U) | (t.low >> 126U);  // units of 2^-127
  Wide tanh_wide;
  if (tanh_y != 0) {
    const int shift = leading_zeros(tanh_y);
    tanh_wide = {tanh_y << static_cast<unsigned>(shift), -127 - shift, score.negative != constants.flip};
  }
  const int shift = leading_zeros(r);
  const Wide r_wide{r << static_cast<unsigned>(shift), -127 - shift, false};
  Wide h = multiply(multiply(e, r_wide), r_wide);
  h.exponent += 2;
  return {fixed_point(multiply(tanh_wide, constants.cap_log2)), h, e.zero() ? 0 : magnitude(argument)};
}

/// How far 2^exponent can be off, relatively, where |exponent| <= largest.
inline double numerator_error(const Constants& constants, double largest) {
  const double exponent = largest * 0x1p-125 + constants.cap_log2_error + 0x1p-127;
  return (exponent * kLn2 + Exp2::kRelativeError) * kSlack;
}

/// How far the softcap derivative can be off, relatively, where the argument's log2 is at most `largest`.
inline double derivative_error(const Constants& constants, double largest) {
  return constants.softcap ? (largest * 0x1p-125 + 0x1p-121) * kSlack : 0;
}

}  // namespace bitattn::reference
