#pragma once
// Arithmetic on error bounds, in doubles, always on the safe side. Derivation: docs/reference.md.

#include <cmath>
#include <limits>

namespace bitattn::reference {

/// More than the doubles in which a bound is summed can lose to rounding: (1 + 2^-53)^n for n up to 2^30
/// operations.
inline constexpr double kSlack = 1 + 0x1p-20;

/// Unit roundoff of `bits` of precision, never below 2^-900, so that no bound vanishes into underflow.
inline double unit_roundoff(int bits) {
  return std::ldexp(1.0, -std::min(bits, 900));
}

/// gamma_n = n u / (1 - n u): n roundings in a chain give at most this relative error. Infinity where n u
/// >= 1.
inline double gamma_factor(double n, double u) {
  const double nu = n * u;
  return nu < 1 ? nu / (1 - nu) * kSlack : std::numeric_limits<double>::infinity();
}

/// |a'/a - 1| <= r implies |a/a' - 1| <= r / (1 - r). Infinity where r >= 1.
inline double reciprocal_factor(double r) {
  return r < 1 ? r / (1 - r) * kSlack : std::numeric_limits<double>::infinity();
}

}  // namespace bitattn::reference
