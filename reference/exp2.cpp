#include "reference/exp2.hpp"

#include "reference/wide_number.hpp"

namespace bitattn::reference {

Exp2::Exp2() {
  Number x = make_number(256);
  const auto fill = [&x](std::array<U128, 128>& table, int bits) {
    for (unsigned i = 0; i < 128; ++i) {
      mpfr_set_ui_2exp(raw(x), i, -bits, MPFR_RNDN);
      mpfr_exp2(raw(x), raw(x), MPFR_RNDD);
      table[i] = wide_from(raw(x)).significand;  // in [1, 2): the top bit is the unit
    }
  };
  fill(first_, 7);
  fill(second_, 14);
  fill(third_, 21);
  mpfr_const_log2(raw(x), MPFR_RNDD);
  ln2_ = wide_from(raw(x)).significand;  // ln 2 in [1/2, 1)
}

const Exp2& Exp2::instance() {
  static const Exp2 tables;
  return tables;
}

}  // namespace bitattn::reference
