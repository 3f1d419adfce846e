#pragma once
// What the tests of the reference ask of two sets of outputs.

#include <gtest/gtest.h>

#include <cmath>

#include "tests/reference/support.hpp"

namespace bitattn::reference::testing {

inline double to_double(const Number& x) {
  return mpfr_get_d(raw(x), MPFR_RNDN);
}

/// |a - b| <= bound of both, for every element.
inline void expect_within_bounds(const char* name, const Values& a, const Values& b) {
  ASSERT_EQ(a.value.size(), b.value.size());
  Number difference = make_number(600);
  for (std::size_t i = 0; i < a.value.size(); ++i) {
    if (mpfr_inf_p(raw(a.value[i])) != 0) {
      ASSERT_TRUE(mpfr_equal_p(raw(a.value[i]), raw(b.value[i]))) << name << " " << i;
      continue;
    }
    mpfr_sub(raw(difference), raw(a.value[i]), raw(b.value[i]), MPFR_RNDA);
    ASSERT_GE(a.bound[i], 0) << name << " " << i;
    ASSERT_LE(std::abs(mpfr_get_d(raw(difference), MPFR_RNDA)), a.bound[i] + b.bound[i]) << name << " " << i;
  }
}

inline void expect_within_bounds(const KeepAll& a, const KeepAll& b) {
  expect_within_bounds("out", a.out, b.out);
  expect_within_bounds("lse", a.lse, b.lse);
  expect_within_bounds("dq", a.dq, b.dq);
  expect_within_bounds("dk", a.dk, b.dk);
  expect_within_bounds("dv", a.dv, b.dv);
}

inline bool same_bits(const Values& a, const Values& b) {
  for (std::size_t i = 0; i < a.value.size(); ++i) {
    const bool nan = mpfr_nan_p(raw(a.value[i])) != 0;
    if (nan != (mpfr_nan_p(raw(b.value[i])) != 0)) return false;
    if (nan) continue;
    if (mpfr_equal_p(raw(a.value[i]), raw(b.value[i])) == 0 || a.bound[i] != b.bound[i]) return false;
    if (mpfr_signbit(raw(a.value[i])) != mpfr_signbit(raw(b.value[i]))) return false;
  }
  return true;
}

inline bool same_bits(const KeepAll& a, const KeepAll& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) &&
         same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv);
}

}  // namespace bitattn::reference::testing
