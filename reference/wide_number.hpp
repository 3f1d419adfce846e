#pragma once
// Between the fast reference's own numbers and MPFR's.

#include "reference/number.hpp"
#include "reference/wide.hpp"

namespace bitattn::reference {

/// x truncated to 128 bits: at most 2^-127 too small in magnitude, relatively. x must be finite, its exponent
/// below 2^30 in magnitude.
Wide wide_from(mpfr_srcptr x);

/// to := x, rounded to the precision of `to`.
void set_wide(mpfr_ptr to, const Wide& x);

}  // namespace bitattn::reference
