// FP8: numbers widened and scaled, and tile products on the FP8 tensor core.

#include "emu/mma/fp8_product.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp8_scaling.hpp"
#include "tests/emu/arith/random_bits.hpp"

namespace bitattn {
namespace {

using arith::Fp8;

/// The value of a finite code from its fields.
double value_of(int code, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = code >> fraction_bits & ((1 << exponent_bits) - 1);
  const int fraction = code & ((1 << fraction_bits) - 1);
  const int significand = fraction + (exponent != 0 ? 1 << fraction_bits : 0);
  const double magnitude = std::ldexp(significand, (exponent != 0 ? exponent : 1) - bias - fraction_bits);
  return (code >> (exponent_bits + fraction_bits) & 1) != 0 ? -magnitude : magnitude;
}

TEST(Fp8, WideningIsExactAndTheCastBringsEveryNumberBack) {
  for (int code = 0; code < 256; ++code) {
    const auto word = static_cast<std::uint8_t>(code);
    const std::uint32_t e4m3 = arith::fp32_from_e4m3(word);
    if ((code & 127) == 127) {
      EXPECT_EQ(e4m3, arith::kQuietNan);
    } else {
      EXPECT_EQ(static_cast<double>(arith::from_bits(e4m3)), value_of(code, 4, 3)) << code;
      EXPECT_EQ(arith::e4m3_from_fp32(e4m3), word);
    }
    const std::uint32_t e5m2 = arith::fp32_from_e5m2(word);
    if ((code & 127) > 124) {
      EXPECT_EQ(e5m2, arith::kQuietNan);
    } else if ((code & 127) == 124) {
      EXPECT_EQ(e5m2, arith::kInfinity | (code >= 128 ? arith::kSignBit : 0U));
    } else {
      EXPECT_EQ(static_cast<double>(arith::from_bits(e5m2)), value_of(code, 5, 2)) << code;
      EXPECT_EQ(arith::e5m2_from_fp32(e5m2), word);
    }
  }
}

TEST(Fp8, TheScaleBringsTheLargestJustBelowTheFormatsLargest) {
  for (const Fp8 format : {Fp8::e4m3, Fp8::e5m2}) {
    const auto largest = static_cast<double>(arith::largest_fp8(format));
    for (const float amax : {1.0F, 0.999F, 448.0F, 449.0F, 57344.0F, 3e-20F, 1e30F, 1.75F, 1.7500001F}) {
      const double scaled = std::ldexp(static_cast<double>(amax), arith::fp8_scale_exponent(format, amax));
      EXPECT_LE(scaled, largest) << amax;
      EXPECT_GT(scaled, largest / 2) << amax;
    }
    EXPECT_EQ(arith::fp8_scale_exponent(format, 0.0F), 0);
    EXPECT_EQ(arith::fp8_scale_exponent(format, INFINITY), 0);
    EXPECT_EQ(arith::fp8_scale_exponent(format, NAN), 0);
    EXPECT_EQ(arith::fp8_scale_exponent(format, 1e-45F), 126);
  }
}

std::vector<std::uint16_t> words_of(const std::vector<float>& values) {
  std::vector<std::uint16_t> words;
  for (const float x : values) words.push_back(arith::bf16_from_fp32(x));
  return words;
}

float dot(const std::vector<float>& a, const std::vector<float>& b, mma::Start start = mma::Start::zero,
          float c = 0) {
  const std::vector<std::uint16_t> left_words = words_of(a);
  const std::vector<std::uint16_t> right_words = words_of(b);
  const auto k = static_cast<int>(a.size());
  mma::Fp8Operand left;
  mma::Fp8Operand right;
  mma::pack_fp8(mma::whole(left_words.data(), k, 1, 1, k), left);
  mma::pack_fp8(mma::whole(right_words.data(), k, 1, 1, k), right);
  mma::multiply_fp8(left, right, start, &c, 1);
  return c;
}

TEST(Fp8Product, IsExactWhereThirteenBitsAreEnough) {
  EXPECT_EQ(dot({1, 2, 3, -4, 0.5F}, {8, 16, -2, 1, 4}), 8.0F + 32 - 6 - 4 + 2);
  EXPECT_EQ(dot({1, 2}, {3, 4}, mma::Start::accumulate, 100), 111.0F);
  EXPECT_EQ(dot({0, 0}, {3, 4}), 0.0F);
}

TEST(Fp8Product, AScaleOfATileMovesNoBit) {
  const std::vector<float> a{1, -3.5F, 0.25F, 7};
  const std::vector<float> b{0.5F, 1.25F, -13, 2};
  const float plain = dot(a, b);
  for (const int e : {-90, -7, 3, 60}) {
    std::vector<float> scaled = a;
    for (float& x : scaled) x = std::ldexp(x, e);
    EXPECT_EQ(dot(scaled, b), std::ldexp(plain, e));
  }
}

TEST(Fp8Product, LosesWhatLiesMoreThanThirteenBitsBelowAndPromotesATileToFp32) {
  // 2^8 * 2^8 beside 2^-1 * 2^2: 15 bits apart, cut off within a step.
  std::vector<float> a{256, 0.5F};
  std::vector<float> b{256, 4};
  EXPECT_EQ(dot(a, b), 65536.0F);
  // The same two products in two tiles: the fp32 sum keeps both.
  EXPECT_EQ(dot({0.5F}, {4}, mma::Start::accumulate, 65536.0F), 65538.0F);
}

// Strides, padding and the chain over k, e4m3 subnormals, zeros and NaNs: against the chip's step called
// element by element.
class Fp8Chain : public ::testing::TestWithParam<int> {};

TEST_P(Fp8Chain, IsThatOfTheChipsSteps) {
  test::RandomBits random(static_cast<std::uint64_t>(GetParam()));
  const auto spread = static_cast<std::uint32_t>(2 + 3 * (GetParam() % 10));  // powers of two in a tile
  constexpr int kRows = 5;
  constexpr int kColumns = 7;
  constexpr int kK = 75;
  std::vector<std::uint16_t> left_words(kRows * kK);
  std::vector<std::uint16_t> right_words(kColumns * kK);
  for (auto* words : {&left_words, &right_words}) {
    for (std::uint16_t& w : *words) {
      w = static_cast<std::uint16_t>((random.bits32() & 0x80ffU) |
                                     ((130U - random.bits32() % spread) << 7U & 0x7f80U));
      if (random.one_in(9)) w = 0;
    }
  }
  const bool with_nan = GetParam() % 5 == 4;
  if (with_nan) left_words[17] = 0x7fc0U;
  mma::Fp8Operand left;
  mma::Fp8Operand right;
  mma::pack_fp8(mma::whole(left_words.data(), 1, kRows, kRows, kK), left);  // K-major memory
  mma::pack_fp8(mma::whole(right_words.data(), kK, 1, kColumns, kK), right);
  std::vector<float> c(kRows * (kColumns + 2), 1.5F);
  mma::multiply_fp8(left, right, mma::Start::accumulate, c.data(), kColumns + 2);
  int nans = 0;
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kColumns; ++n) {
      std::uint32_t chain = 0;
      for (int k = 0; k < 96; k += 32) {
        std::uint8_t a[32] = {};
        std::uint8_t b[32] = {};
        for (int i = 0; i < 32 && k + i < kK; ++i) {
          const auto scaled = [](std::uint16_t word, int e) {
            return arith::e4m3_from_fp32(arith::to_bits(std::ldexp(arith::fp32_from_bf16(word), e)));
          };
          a[i] = scaled(left_words[static_cast<std::size_t>((k + i) * kRows + m)], left.exponent);
          b[i] = scaled(right_words[static_cast<std::size_t>(n * kK + k + i)], right.exponent);
        }
        chain = arith::wgmma_fp8_k32<arith::E4m3, arith::E4m3>(a, b, chain);
      }
      const float tile = std::ldexp(arith::from_bits(chain), -left.exponent - right.exponent);
      const float got = c[static_cast<std::size_t>(m * (kColumns + 2) + n)];
      if (std::isnan(tile)) {
        EXPECT_TRUE(std::isnan(got)) << m << ", " << n;
        ++nans;
      } else {
        EXPECT_EQ(got, 1.5F + tile) << m << ", " << n;
      }
    }
    EXPECT_EQ(c[static_cast<std::size_t>(m * (kColumns + 2) + kColumns)], 1.5F) << "beyond the tile";
  }
  EXPECT_EQ(nans, with_nan ? kColumns : 0);
}

INSTANTIATE_TEST_SUITE_P(Fp8, Fp8Chain, ::testing::Range(0, 40));

}  // namespace
}  // namespace bitattn
