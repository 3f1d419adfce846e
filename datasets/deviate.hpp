#pragma once
// Random numbers with the same bits on every machine: from a 64-bit word by + - * / and square roots of IEEE
// doubles, each correctly rounded and in a fixed order (so compile without -ffast-math and with
// -ffp-contract=off), and no libm.

#include <cstdint>

namespace bitattn {

/// A standard normal deviate: the inverse normal distribution at (m + 1/2) / 2^53, m the word's 52 bits below
/// the top one, negated where the top bit is set. Between -8.3 and 8.3; relative error of the inverse about
/// 1e-15. Source: M. Wichura, algorithm AS 241 (PPND16), Applied Statistics 37 (1988).
double normal_from_word(std::uint64_t word);

/// (m + 1/2) / 2^32, m the word's 32 bits below the top one: above 0, below 1, exact.
double uniform_from_word(std::uint64_t word);

/// Natural logarithm of a normal, positive x; error below 3 ulp.
double log_of(double x);

/// 2^x for -1000 < x < 1000; x is cut to 32 bits after the binary point first, the rest is good to 1e-14.
double exp2_of(double x);

/// To BF16, to nearest, ties to even, in one rounding; subnormals kept, overflow to infinity. x must not be
/// NaN.
std::uint16_t bf16_from_double(double x);

}  // namespace bitattn
