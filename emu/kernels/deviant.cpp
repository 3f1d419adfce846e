#include "emu/kernels/deviant.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numbers>
#include <vector>

#include "emu/arith/fp32.hpp"
#include "emu/arith/fp32_ftz.hpp"

namespace bitattn::kernels {

namespace {

using profile::Deviation;
using profile::Format;
using profile::Kind;
using profile::PolynomialForm;

/// A draw from [0, 1) that depends on the value and the salt alone (a finaliser of 64 bits).
double draw(double x, std::uint64_t salt) {
  std::uint64_t z = std::bit_cast<std::uint64_t>(x) + 0x9e3779b97f4a7c15U * (salt + 1);
  z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27U)) * 0x94d049bb133111ebU;
  z ^= z >> 31U;
  return static_cast<double>(z >> 11U) * 0x1p-53;
}

double overflowed(double magnitude, const FloatFormat& format) {
  if (magnitude <= format.largest) return magnitude;
  return format.saturates ? format.largest : std::numeric_limits<double>::infinity();
}

/// The magnitude's units in the last place: whole part and what is left over, in [0, 1).
struct Units {
  double unit;
  double whole;
  double rest;
  double below;  ///< a further part too small for `rest`, negative or positive
};

Units units_of(double high, double low, const FloatFormat& format) {
  int e = std::ilogb(high);
  if (low < 0 && high == std::ldexp(1.0, e)) --e;  // the value lies just below a power of two
  Units u{};
  u.unit = std::ldexp(1.0, std::max(e, format.least_exponent) - (format.significant_bits - 1));
  const double scaled = high / u.unit;
  u.whole = std::floor(scaled);
  u.rest = scaled - u.whole;
  u.below = low / u.unit;
  if (u.rest == 0 && u.below < 0) {
    u.whole -= 1;
    u.rest = 1;
  }
  return u;
}

bool goes_up(const Units& u, bool negative, Rounding rounding) {
  const bool inexact = u.rest != 0 || u.below != 0;
  const auto half = [&] {
    if (u.rest != 0.5) return u.rest > 0.5 ? 1 : -1;
    return u.below > 0 ? 1 : u.below < 0 ? -1 : 0;
  };
  switch (rounding) {
    case Rounding::nearest_even: {
      const int h = half();
      return h > 0 || (h == 0 && std::fmod(u.whole, 2.0) != 0);
    }
    case Rounding::ties_away:
      return half() >= 0;
    case Rounding::toward_zero:
      return false;
    case Rounding::away_from_zero:
      return inexact;
    case Rounding::upward:
      return inexact && !negative;
    case Rounding::downward:
      return inexact && negative;
  }
  return false;
}

bool is_special(double x) {
  return x == 0 || !std::isfinite(x);
}

/// Coefficients of a polynomial for 2^f, constant term first.
std::vector<float> exp2_coefficients(PolynomialForm form, int degree) {
  // Published with FlashAttention-4 for degree 3.
  if (form == PolynomialForm::published_floor && degree == 3) {
    return {1.0F, 0.695146143436431884765625F, 0.227564394474029541015625F, 0.077119089663028717041015625F};
  }
  const auto count = static_cast<std::size_t>(degree) + 1;
  std::vector<double> coefficients(count, 0.0);
  if (form == PolynomialForm::taylor_floor || form == PolynomialForm::taylor_nearest) {
    double c = 1;
    for (std::size_t k = 0; k < count; ++k) {
      coefficients[k] = c;
      c *= std::numbers::ln2 / static_cast<double>(k + 1);
    }
  } else {
    // Interpolation of (2^f - 1)/f in Chebyshev's points: within a few percent of the minimax polynomial with
    // constant term 1.
    const bool floor_form = form != PolynomialForm::minimax_nearest;
    const double middle = floor_form ? 0.5 : 0.0;
    const std::size_t n = count - 1;
    std::vector<double> x(n);
    std::vector<double> divided(n);
    for (std::size_t i = 0; i < n; ++i) {
      x[i] =
          middle + 0.5 * std::cos(std::numbers::pi * (static_cast<double>(i) + 0.5) / static_cast<double>(n));
      divided[i] = x[i] == 0 ? std::numbers::ln2 : std::expm1(x[i] * std::numbers::ln2) / x[i];
    }
    for (std::size_t order = 1; order < n; ++order) {
      for (std::size_t i = n - 1; i >= order; --i) {
        divided[i] = (divided[i] - divided[i - 1]) / (x[i] - x[i - order]);
      }
    }
    std::vector<double> powers(n, 0.0);
    for (std::size_t i = n; i-- > 0;) {  // Newton's form multiplied out
      for (std::size_t k = n; k-- > 0;) powers[k] = (k > 0 ? powers[k - 1] : 0.0) - x[i] * powers[k];
      powers[0] += divided[i];
    }
    coefficients[0] = 1;
    std::copy(powers.begin(), powers.end(), coefficients.begin() + 1);
  }
  return {coefficients.begin(), coefficients.end()};
}

}  // namespace

FloatFormat float_format(int parameter) {
  if (parameter > profile::kBits) {
    FloatFormat format = kFp32;
    format.significant_bits = parameter - profile::kBits;
    return format;
  }
  switch (static_cast<Format>(parameter)) {
    case Format::bf16:
      return kBf16;
    case Format::fp16:
      return {11, -14, 65504.0, false};
    case Format::tf32:
      return {11, -126, 0x1.ffcp127, false};
    case Format::e4m3:
      return {4, -6, 448.0, true};
    case Format::e5m2:
      return {3, -14, 57344.0, true};
    case Format::bits:
      break;
  }
  return kFp32;
}

double round_to(double high, double low, const FloatFormat& format, Rounding rounding) {
  if (is_special(high)) return high;
  const bool negative = high < 0;
  const double sign = negative ? -1.0 : 1.0;
  const Units u = units_of(sign * high, sign * low, format);
  double magnitude = (u.whole + (goes_up(u, negative, rounding) ? 1.0 : 0.0)) * u.unit;
  magnitude = overflowed(magnitude, format);
  if (format.flushes && magnitude < 0x1p-126) magnitude = 0;
  return std::copysign(magnitude, sign);
}

double deviated_value(const Deviation& deviation, double x) {
  switch (deviation.kind) {
    case Kind::narrowed:
      return round_to(x, 0, float_format(deviation.parameter), Rounding::nearest_even);
    case Kind::narrowed_truncated:
      return round_to(x, 0, float_format(deviation.parameter), Rounding::toward_zero);
    case Kind::narrowed_ties_away:
      return round_to(x, 0, float_format(deviation.parameter), Rounding::ties_away);
    default:
      return x;
  }
}

bool rounds_otherwise(const Deviation& deviation) {
  switch (deviation.kind) {
    case Kind::truncated:
    case Kind::upward:
    case Kind::downward:
    case Kind::away_from_zero:
      return true;
    default:
      return false;
  }
}

double deviated_operation(const Deviation& deviation, double high, double low, bool flush) {
  Rounding rounding = Rounding::nearest_even;
  if (deviation.kind == Kind::truncated) rounding = Rounding::toward_zero;
  if (deviation.kind == Kind::upward) rounding = Rounding::upward;
  if (deviation.kind == Kind::downward) rounding = Rounding::downward;
  if (deviation.kind == Kind::away_from_zero) rounding = Rounding::away_from_zero;
  FloatFormat fp32 = kFp32;
  fp32.flushes = flush;
  return deviated_value(deviation, round_to(high, low, fp32, rounding));
}

double deviated_cast(const Deviation& deviation, double x, std::uint64_t salt) {
  if (is_special(x)) return x;
  switch (deviation.kind) {
    case Kind::truncated:
      return round_to(x, 0, kBf16, Rounding::toward_zero);
    case Kind::ties_away:
      return round_to(x, 0, kBf16, Rounding::ties_away);
    case Kind::away_from_zero:
      return round_to(x, 0, kBf16, Rounding::away_from_zero);
    case Kind::upward:
      return round_to(x, 0, kBf16, Rounding::upward);
    case Kind::downward:
      return round_to(x, 0, kBf16, Rounding::downward);
    case Kind::twice:
      return round_to(round_to(x, 0, float_format(deviation.parameter), Rounding::nearest_even), 0, kBf16,
                      Rounding::nearest_even);
    case Kind::stochastic: {
      const Units u = units_of(std::fabs(x), 0, kBf16);
      const double magnitude = (u.whole + (draw(x, salt) < u.rest ? 1.0 : 0.0)) * u.unit;
      return std::copysign(overflowed(magnitude, kBf16), x);
    }
    case Kind::narrowed:
    case Kind::narrowed_truncated:
    case Kind::narrowed_ties_away:
      return deviated_value(deviation, x);
    default:
      return round_to(x, 0, kBf16, Rounding::nearest_even);
  }
}

double deviated_exp2(const Deviation& deviation, double x) {
  const auto form = static_cast<PolynomialForm>(deviation.parameter / 10);
  thread_local int of = -1;
  thread_local std::vector<float> coefficients;
  if (of != deviation.parameter) {
    coefficients = exp2_coefficients(form, deviation.parameter % 10);
    of = deviation.parameter;
  }
  if (std::isnan(x)) return x;
  const float argument = std::max(static_cast<float>(x), -127.0F);  // below, the result would underflow
  if (argument > 128.0F) return std::numeric_limits<double>::infinity();
  const bool nearest = form == PolynomialForm::minimax_nearest || form == PolynomialForm::taylor_nearest;
  const float whole = nearest ? std::nearbyint(argument) : std::floor(argument);
  const float f = arith::ftz::add(argument, -whole);
  float sum = coefficients.back();
  for (std::size_t k = coefficients.size() - 1; k-- > 0;) sum = arith::ftz::fma(sum, f, coefficients[k]);
  return static_cast<double>(
      arith::ftz::in(static_cast<float>(std::ldexp(static_cast<double>(sum), static_cast<int>(whole)))));
}

float ulps_away(float x, int k) {
  const float end = k > 0 ? std::numeric_limits<float>::infinity() : -std::numeric_limits<float>::infinity();
  for (int i = 0; i < std::abs(k); ++i) x = std::nextafter(x, end);
  return x;
}

ExactSum exact_sum(double a, double b) {
  const double s = a + b;
  if (!std::isfinite(s)) return {s, 0};
  const double bb = s - a;
  return {s, (a - (s - bb)) + (b - bb)};
}

}  // namespace bitattn::kernels
