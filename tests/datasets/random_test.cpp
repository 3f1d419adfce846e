// The parts of the generator against other sources: Philox's published answers, libm for the functions made
// without it.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "datasets/deviate.hpp"
#include "datasets/philox.hpp"

namespace bitattn {
namespace {

// Random123 1.09, examples/kat_vectors, philox4x32 with 10 rounds.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffffU;
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

std::uint64_t random_word(std::uint32_t i) {
  const PhiloxCounter w = philox({i, 0, 0, 0}, {1, 2});
  return w[0] | static_cast<std::uint64_t>(w[1]) << 32U;
}

double ulps(double x, double reference) {
  return std::abs(x - reference) / (std::nextafter(std::abs(reference), HUGE_VAL) - std::abs(reference));
}

TEST(Log, WithinThreeUlpsOfLibm) {
  double worst = 0;
  for (std::uint32_t i = 0; i < 200000; ++i) {
    const double x = std::ldexp(uniform_from_word(random_word(i)), -static_cast<int>(i % 54));
    worst = std::max(worst, ulps(log_of(x), std::log(x)));
  }
  EXPECT_LT(worst, 3.0);
  EXPECT_EQ(log_of(1.0), 0.0);
}

TEST(Exp2, WithinTheStatedErrorOfLibm) {
  double worst = 0;
  for (std::uint32_t i = 0; i < 200000; ++i) {
    const double x =
        std::floor((uniform_from_word(random_word(i)) * 400 - 200) * 4294967296.0) / 4294967296.0;
    worst = std::max(worst, std::abs(exp2_of(x) / std::exp2(x) - 1));
  }
  EXPECT_LT(worst, 1e-14);
  EXPECT_EQ(exp2_of(-140.0), std::ldexp(1.0, -140));
  EXPECT_EQ(exp2_of(6.0), 64.0);
  EXPECT_EQ(exp2_of(0.5), std::sqrt(2.0));
}

/// The distribution function below 0, from erfc: accurate in the tail.
double lower_tail(double x) {
  return 0.5 * std::erfc(-x / std::sqrt(2.0));
}

TEST(Normal, InvertsTheDistributionFunction) {
  double worst = 0;
  const auto check = [&](std::uint64_t word) {
    const double p = (static_cast<double>((word >> 11U) & ((std::uint64_t{1} << 52U) - 1)) + 0.5) * 0x1p-53;
    const double x =
        normal_from_word(word | std::uint64_t{1} << 63U);  // with the top bit set: the negative one
    ASSERT_LE(x, 0.0);
    // Newton's step from x is the error of x: (F(x) - p) / F'(x).
    const double density = std::exp(-0.5 * x * x) / std::sqrt(2 * 3.14159265358979323846);
    worst = std::max(worst, std::abs(lower_tail(x) - p) / density / std::max(1.0, -x));
    ASSERT_EQ(normal_from_word(word & ~(std::uint64_t{1} << 63U)), -x);
  };
  for (std::uint32_t i = 0; i < 200000; ++i) check(random_word(i));
  for (unsigned bit = 11; bit < 63; ++bit) check(std::uint64_t{1} << bit);  // ever further into the tail
  check(0);
  check(~std::uint64_t{0});
  EXPECT_LT(worst, 2e-15);
  EXPECT_NEAR(normal_from_word(0), 8.2924, 1e-4);
}

TEST(Normal, PinnedBits) {
  // Any machine and compiler must give these.
  EXPECT_EQ(std::bit_cast<std::uint64_t>(normal_from_word(0x0123456789abcdefU)),
            std::uint64_t{0x4004ee2dc0a9dffdU});
  EXPECT_EQ(std::bit_cast<std::uint64_t>(normal_from_word(0xfedcba9876543210U)),
            std::uint64_t{0xbf86d0fcf0ac5befU});
  EXPECT_EQ(std::bit_cast<std::uint64_t>(normal_from_word(0x8000000000000000U)),
            std::uint64_t{0xc02095b059d67c4cU});
}

std::uint16_t bf16_by_search(double x) {
  // The nearest of all BF16 numbers, found by looking at both neighbours.
  const auto value = [](std::uint16_t w) {
    return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(w) << 16U));
  };
  const double magnitude = std::abs(x);
  std::uint16_t low = 0;
  std::uint16_t high = 0x7f80;
  while (high - low > 1) {
    const auto middle = static_cast<std::uint16_t>((low + high) / 2);
    (value(middle) <= magnitude ? low : high) = middle;
  }
  // Beyond the largest number, infinity stands for the number that would follow.
  const double above = high == 0x7f80 ? 0x1p128 : value(high);
  const double to_low = magnitude - value(low);
  const double to_high = above - magnitude;
  const bool up = to_high < to_low || (to_high == to_low && low % 2 == 1);
  return static_cast<std::uint16_t>((up ? high : low) | (std::signbit(x) ? 0x8000U : 0U));
}

TEST(Bf16FromDouble, RoundsToNearestEvenEverywhere) {
  for (std::uint32_t w = 0; w < 0x7f80U; ++w) {
    const double a = static_cast<double>(std::bit_cast<float>(w << 16U));
    const double b = w == 0x7f7f ? 0x1p128 : static_cast<double>(std::bit_cast<float>((w + 1) << 16U));
    const double middle = a + (b - a) / 2;
    for (const double x : {a, middle, std::nextafter(middle, 0.0), std::nextafter(middle, HUGE_VAL),
                           std::nextafter(a, HUGE_VAL), std::nextafter(b, 0.0)}) {
      ASSERT_EQ(bf16_from_double(x), bf16_by_search(x)) << std::hexfloat << x;
      ASSERT_EQ(bf16_from_double(-x), bf16_by_search(-x)) << std::hexfloat << x;
    }
  }
  EXPECT_EQ(bf16_from_double(0.0), 0x0000);
  EXPECT_EQ(bf16_from_double(-0.0), 0x8000);
  EXPECT_EQ(bf16_from_double(1e300), 0x7f80);
  EXPECT_EQ(bf16_from_double(-1e-300), 0x8000);
  EXPECT_EQ(bf16_from_double(std::numeric_limits<double>::denorm_min()), 0x0000);
  EXPECT_EQ(bf16_from_double(-std::numeric_limits<double>::infinity()), 0xff80);
  EXPECT_EQ(bf16_from_double(1.00390625), 0x3f80);
  EXPECT_EQ(bf16_from_double(1.01171875), 0x3f82);
}

}  // namespace
}  // namespace bitattn
