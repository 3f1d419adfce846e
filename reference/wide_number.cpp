#include "reference/wide_number.hpp"

#include <gmp.h>

#include <array>

namespace bitattn::reference {

Wide wide_from(mpfr_srcptr x) {
  if (mpfr_zero_p(x) != 0) return {};
  Number top = make_number(128);
  mpfr_set(raw(top), x, MPFR_RNDZ);
  mpz_t integer;
  mpz_init(integer);
  const mpfr_exp_t exponent = mpfr_get_z_2exp(integer, raw(top));
  std::array<std::uint64_t, 2> limbs{};
  std::size_t count = 0;
  mpz_export(limbs.data(), &count, -1, sizeof(std::uint64_t), 0, 0, integer);
  const bool negative = mpz_sgn(integer) < 0;
  mpz_clear(integer);
  const U128 m = (static_cast<U128>(limbs[1]) << 64U) | limbs[0];
  const int shift = leading_zeros(m);
  return {m << static_cast<unsigned>(shift), static_cast<std::int32_t>(exponent) - shift, negative};
}

void set_wide(mpfr_ptr to, const Wide& x) {
  if (x.zero()) {
    mpfr_set_zero(to, 1);
    return;
  }
  const std::array<mp_limb_t, 2> limbs{low_half(x.significand), high_half(x.significand)};
  mpz_t integer;
  const mpz_srcptr view = mpz_roinit_n(integer, limbs.data(), x.negative ? -2 : 2);
  mpfr_set_z_2exp(to, view, x.exponent, MPFR_RNDN);
}

}  // namespace bitattn::reference
