#pragma once
// High-precision numbers: Boost.Multiprecision over MPFR, with the precision chosen in bits at run time.
//
// Precision is set number by number and every hot loop calls MPFR on the backend, so that no temporary is
// made and no precision is ever taken from a default. Rounding is to nearest, ties to even, everywhere.

#include <mpfr.h>

#include <boost/multiprecision/mpfr.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bitattn::reference {

using Number = boost::multiprecision::mpfr_float;

inline mpfr_ptr raw(Number& x) {
  return x.backend().data();
}
inline mpfr_srcptr raw(const Number& x) {
  return x.backend().data();
}

/// A NaN of `bits` precision.
Number make_number(mpfr_prec_t bits);
std::vector<Number> make_numbers(std::size_t count, mpfr_prec_t bits);
/// All of them +0.
void set_zero(std::vector<Number>& numbers);

/// The exact value of a BF16 word; 8 bits of precision are enough. Infinities and NaNs keep their kind.
void set_bf16(mpfr_ptr x, std::uint16_t word);
/// The exact value of a finite BF16 word, or its infinity or NaN.
double fp64_from_bf16(std::uint16_t word);

/// Rounded once, directly, to nearest, ties to even; overflow gives infinity, NaN gives 0x7fff.
std::uint16_t round_to_bf16(mpfr_srcptr x);
float round_to_fp32(mpfr_srcptr x);
double round_to_fp64(mpfr_srcptr x);

/// Do all numbers within `bound` of x round to the same BF16 word? False if x or the bound is not finite.
bool bf16_decided(mpfr_srcptr x, double bound);

}  // namespace bitattn::reference
