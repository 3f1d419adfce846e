// Rounding of high-precision numbers to BF16: every word comes back, every half-way case goes to the even
// neighbour, and the smallest step to either side of a half-way case decides it.

#include "reference/number.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace bitattn::reference {
namespace {

TEST(RoundToBf16, EveryWordAndEveryHalfWayCase) {
  Number low = make_number(256);
  Number high = make_number(256);
  Number middle = make_number(256);
  for (unsigned word = 0; word < 0x7f80U; ++word) {
    for (const unsigned sign : {0U, 0x8000U}) {
      const auto w = static_cast<std::uint16_t>(word | sign);
      set_bf16(raw(low), w);
      ASSERT_EQ(round_to_bf16(raw(low)), w);
      // The next magnitude; past the largest finite number the grid goes on to 2^128.
      if (word + 1 < 0x7f80U) {
        set_bf16(raw(high), static_cast<std::uint16_t>(w + 1));
      } else {
        mpfr_set_d(raw(high), sign != 0 ? -0x1p128 : 0x1p128, MPFR_RNDN);
      }
      mpfr_add(raw(middle), raw(low), raw(high), MPFR_RNDN);
      mpfr_div_2ui(raw(middle), raw(middle), 1, MPFR_RNDN);
      const auto next = static_cast<std::uint16_t>(w + 1);
      ASSERT_EQ(round_to_bf16(raw(middle)), word % 2 == 0 ? w : next) << word;
      mpfr_nexttoward(raw(middle), raw(low));
      ASSERT_EQ(round_to_bf16(raw(middle)), w);
      mpfr_nexttoward(raw(middle), raw(high));
      mpfr_nexttoward(raw(middle), raw(high));
      ASSERT_EQ(round_to_bf16(raw(middle)), next);
    }
  }
}

TEST(RoundToBf16, OutsideTheFiniteRange) {
  Number x = make_number(128);
  mpfr_set_d(raw(x), 0x1p-135, MPFR_RNDN);
  EXPECT_EQ(round_to_bf16(raw(x)), 0x0000U);
  mpfr_set_d(raw(x), -0x1p-1000, MPFR_RNDN);
  EXPECT_EQ(round_to_bf16(raw(x)), 0x8000U);
  mpfr_set_d(raw(x), -0x1p+1000, MPFR_RNDN);
  EXPECT_EQ(round_to_bf16(raw(x)), 0xff80U);
  mpfr_set_inf(raw(x), 1);
  EXPECT_EQ(round_to_bf16(raw(x)), 0x7f80U);
  mpfr_set_zero(raw(x), -1);
  EXPECT_EQ(round_to_bf16(raw(x)), 0x8000U);
  mpfr_set_nan(raw(x));
  EXPECT_EQ(round_to_bf16(raw(x)), 0x7fffU);
}

TEST(RoundToBf16, OnceAndNotThroughFp32) {
  // 1 + 2^-8 + 2^-40 lies just above a half-way case, which rounding to fp32 first would land on.
  Number x = make_number(128);
  mpfr_set_d(raw(x), 1 + 0x1p-8 + 0x1p-40, MPFR_RNDN);
  EXPECT_EQ(round_to_bf16(raw(x)), 0x3f81U);
}

TEST(Bf16Decided, OnlyWhereTheWholeIntervalAgrees) {
  Number x = make_number(128);
  mpfr_set_d(raw(x), 1 + 0x1p-8 + 0x1p-40, MPFR_RNDN);
  EXPECT_TRUE(bf16_decided(raw(x), 0x1p-41));
  EXPECT_FALSE(bf16_decided(raw(x), 0x1p-39));
  EXPECT_FALSE(bf16_decided(raw(x), std::numeric_limits<double>::infinity()));
  mpfr_set_nan(raw(x));
  EXPECT_FALSE(bf16_decided(raw(x), 0));
  mpfr_set_zero(raw(x), 1);
  EXPECT_TRUE(bf16_decided(raw(x), 0x1p-200));
  EXPECT_FALSE(bf16_decided(raw(x), 0x1p-133));
}

}  // namespace
}  // namespace bitattn::reference
