#pragma once
// How a deviation (emu/profile/deviation.hpp) changes a number. Plain functions over fp64 values that hold
// what a register of the chip would.

#include <cstdint>

#include "emu/profile/deviation.hpp"

namespace bitattn::kernels {

enum class Rounding : std::uint8_t { nearest_even, ties_away, toward_zero, away_from_zero, upward, downward };

/// A binary floating-point format: significant bits, least exponent of a normal number, largest finite
/// number, and what lies above it.
struct FloatFormat {
  int significant_bits;
  int least_exponent;
  double largest;
  bool saturates;        ///< above the largest: the largest, else infinity
  bool flushes = false;  ///< subnormal results become zero (fp32 arithmetic with FTZ)
};
/// parameter: a profile::Format, or profile::kBits + significant bits (then fp32's exponents).
FloatFormat float_format(int parameter);
inline constexpr FloatFormat kFp32{24, -126, 0x1.fffffep127, false};
inline constexpr FloatFormat kBf16{8, -126, 0x1.fep127, false};

/// The exact value high + low (|low| at most half an ulp of high) rounded once to a format. Infinities and
/// NaNs pass.
double round_to(double high, double low, const FloatFormat& format, Rounding rounding);

/// What a value becomes that the chip has already rounded to fp32: kinds narrowed*; others leave it.
double deviated_value(const profile::Deviation& deviation, double x);

/// An fp32 operation of exact result high + low, rounded as the deviation says (directed roundings) and then
/// kept as it says (narrowed*). flush: the operation flushes subnormal results.
double deviated_operation(const profile::Deviation& deviation, double high, double low, bool flush);
/// Does the deviation replace the operation's own rounding?
bool rounds_otherwise(const profile::Deviation& deviation);

/// A cast to BF16. `salt` tells apart the draws of equal values when rounded stochastically.
double deviated_cast(const profile::Deviation& deviation, double x, std::uint64_t salt);

/// exp2 by the deviation's polynomial in fp32 fused multiply-adds; flushed.
double deviated_exp2(const profile::Deviation& deviation, double x);

/// fp32 constant `k` ulps away.
float ulps_away(float x, int k);

/// high + low == a + b exactly.
struct ExactSum {
  double high, low;
};
ExactSum exact_sum(double a, double b);

}  // namespace bitattn::kernels
