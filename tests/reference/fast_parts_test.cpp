// The parts of the fast reference, each against MPFR or plain integers: what is claimed exact is exact, and
// what is claimed bounded stays within its bound.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "reference/block_sums.hpp"
#include "reference/exact_products.hpp"
#include "reference/exp2.hpp"
#include "reference/sliced_operands.hpp"
#include "reference/super_accumulator.hpp"
#include "reference/wide.hpp"
#include "reference/wide_number.hpp"
#include "tests/reference/comparisons.hpp"

namespace bitattn::reference::testing {
namespace {

constexpr mpfr_prec_t kPlenty = 2000;

Number exact(const Wide& x) {
  Number n = make_number(kPlenty);
  set_wide(raw(n), x);
  return n;
}

Number exact(std::uint16_t word) {
  Number n = make_number(kPlenty);
  set_bf16(raw(n), word);
  return n;
}

double absolute(const Number& x) {
  return std::abs(mpfr_get_d(raw(x), MPFR_RNDA));
}

/// Significands of all kinds: random, few bits, all ones, powers of two.
Wide random_wide(std::mt19937_64& engine, int exponent_range) {
  U128 m = (static_cast<U128>(engine()) << 64U) | engine();
  switch (engine() % 4) {
    case 0:
      m = U128{1} << (engine() % 128);
      break;
    case 1:
      m = ~U128{0} << (engine() % 128);
      break;
    case 2:
      m = (U128{1} << 127U) | (m >> (engine() % 128));
      break;
    default:
      break;
  }
  if (m == 0) m = 1;
  const int exponent =
      static_cast<int>(engine() % static_cast<std::uint64_t>(2 * exponent_range + 1)) - exponent_range;
  Wide w = wide_from(static_cast<I128>(m >> 2U) + 1, exponent);
  w.negative = engine() % 2 == 0;
  return w;
}

/// Finite BF16 words with exponents spread over `range` below `top`; some zeros, some subnormals.
std::uint16_t random_word(std::mt19937_64& engine, int top, int range) {
  if (engine() % 16 == 0) return static_cast<std::uint16_t>((engine() % 2) << 15U);
  const int field =
      std::max(0, 127 + top - static_cast<int>(engine() % static_cast<std::uint64_t>(range + 1)));
  return static_cast<std::uint16_t>((engine() % 2) << 15U | static_cast<std::uint64_t>(field) << 7U |
                                    engine() % 128);
}

TEST(Wide, ArithmeticStaysWithinItsError) {
  std::mt19937_64 engine(1);
  Number difference = make_number(kPlenty);
  for (int i = 0; i < 200000; ++i) {
    const Wide a = random_wide(engine, i % 2 == 0 ? 3 : 140);
    const Wide b = random_wide(engine, i % 2 == 0 ? 3 : 140);
    const Number x = exact(a);
    const Number y = exact(b);

    const Wide product = multiply(a, b);
    ASSERT_EQ(high_half(product.significand) >> 63U, 1U);
    mpfr_mul(raw(difference), raw(x), raw(y), MPFR_RNDN);
    const double size = absolute(difference);
    mpfr_sub(raw(difference), raw(difference), raw(exact(product)), MPFR_RNDN);
    ASSERT_LE(absolute(difference), size * 0x1p-127);

    const Wide sum = add(a, b);
    mpfr_add(raw(difference), raw(x), raw(y), MPFR_RNDN);
    const double largest = std::max({absolute(x), absolute(y), absolute(difference)});
    mpfr_sub(raw(difference), raw(difference), raw(exact(sum)), MPFR_RNDN);
    ASSERT_LE(absolute(difference), largest * 0x1p-127);
    if (!sum.zero()) {
      ASSERT_EQ(high_half(sum.significand) >> 63U, 1U);
    }

    ASSERT_GE(magnitude(a), absolute(x) * (1 - 0x1p-52));
    ASSERT_LE(magnitude(a), absolute(x) * (1 + 0x1p-49));
    const Wide back = wide_from(raw(x));
    ASSERT_TRUE(back.significand == a.significand && back.exponent == a.exponent &&
                back.negative == a.negative);
  }
  EXPECT_TRUE(add(wide_from(5, 3), wide_from(-5, 3)).zero());
  EXPECT_TRUE(multiply(Wide{}, wide_from(1, 0)).zero());
}

TEST(Wide, MagnitudeIsAnUpperBound) {
  std::mt19937_64 engine(2);
  for (int i = 0; i < 100000; ++i) {
    const Wide a = random_wide(engine, 500);
    ASSERT_LE(mpfr_cmp_d(raw(exact({a.significand, a.exponent, false})), magnitude(a)), 0);
  }
}

TEST(Exp2, NeverTooLargeAndHardlyTooSmall) {
  const Exp2& exp2 = Exp2::instance();
  std::mt19937_64 engine(3);
  Number x = make_number(400);
  Number value = make_number(400);
  double worst = 0;
  const auto check = [&](U128 fraction) {
    const U128 result = exp2(fraction);
    ASSERT_EQ(high_half(result) >> 63U, 1U);
    set_wide(
        raw(x), fraction == 0 ? Wide{} : [&] {
          const int shift = leading_zeros(fraction);
          return Wide{fraction << static_cast<unsigned>(shift), -128 - shift, false};
        }());
    mpfr_exp2(raw(x), raw(x), MPFR_RNDN);
    set_wide(raw(value), {result, -127, false});
    mpfr_sub(raw(value), raw(x), raw(value), MPFR_RNDN);
    ASSERT_GE(mpfr_sgn(raw(value)), 0);
    mpfr_div(raw(value), raw(value), raw(x), MPFR_RNDN);
    worst = std::max(worst, to_double(value));
  };
  for (int i = 0; i < 100000; ++i) check((static_cast<U128>(engine()) << 64U) | engine());
  // Every table entry at both ends of its interval, with the others at theirs.
  for (const unsigned low_bit : {121U, 114U, 107U}) {
    for (unsigned entry = 0; entry < 128; ++entry) {
      const U128 here = static_cast<U128>(entry) << low_bit;
      check(here);
      check(here + (U128{1} << low_bit) - 1);
      check(~(U128{127} << low_bit) | here);
    }
  }
  check(0);
  check(1);
  check(~U128{0});
  EXPECT_LE(worst, Exp2::kRelativeError);
  EXPECT_GE(worst, Exp2::kRelativeError / 16);  // the bound is no fantasy
}

TEST(SuperAccumulator, IsTheExactInnerProduct) {
  std::mt19937_64 engine(4);
  Number sum = make_number(kPlenty);
  for (int round = 0; round < 3000; ++round) {
    const std::size_t n = 1 + engine() % 40;
    const int range = round % 3 == 0 ? 4 : round % 3 == 1 ? 80 : 260;
    const int top = round % 3 == 2 ? 127 : static_cast<int>(engine() % 20) - 10;
    std::vector<std::uint16_t> a(n);
    std::vector<std::uint16_t> b(n);
    for (std::size_t d = 0; d < n; ++d) {
      a[d] = random_word(engine, top, range);
      b[d] = random_word(engine, top, range);
    }
    // Cancellation down to nothing or to one small product.
    for (std::size_t d = 1; d < n && round % 2 == 0; d += 2) {
      a[d] = a[d - 1];
      b[d] = static_cast<std::uint16_t>(b[d - 1] ^ 0x8000U);
    }
    mpfr_set_zero(raw(sum), 1);
    for (std::size_t d = 0; d < n; ++d)
      mpfr_fma(raw(sum), raw(exact(a[d])), raw(exact(b[d])), raw(sum), MPFR_RNDN);
    const Wide result = exact_inner_product(a.data(), b.data(), n);
    Number cut = make_number(128);
    mpfr_set(raw(cut), raw(sum), MPFR_RNDZ);
    ASSERT_TRUE(mpfr_equal_p(raw(cut), raw(exact(result)))) << round;
  }
}

TEST(ExactProducts, AgreeWithIntegers) {
  std::mt19937_64 engine(5);
  constexpr std::int64_t kLargest = (1 << kSliceBits) - 1;
  for (int round = 0; round < 30; ++round) {
    const std::size_t depth = round == 0 ? 1 : 1 + engine() % 700;
    const std::size_t columns = 16 * (1 + engine() % 5);
    const std::size_t stride = columns + 16 * (engine() % 2);
    const std::size_t count = 1 + engine() % 4;
    std::vector<std::vector<double>> a(count, std::vector<double>(depth * kBlockRows));
    std::vector<std::vector<float>> b(count, std::vector<float>(depth * stride));
    const auto draw = [&] {  // the largest slices of one sign come close to 2^53
      if (round % 3 == 0) return kLargest;
      return static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(2 * kLargest + 1)) - kLargest;
    };
    for (auto& v : a) {
      for (double& x : v) x = static_cast<double>(draw());
    }
    for (auto& v : b) {
      for (float& x : v) x = static_cast<float>(draw());
    }
    std::vector<SlicePair> pairs;
    for (std::size_t p = 0; p < count; ++p) pairs.push_back({a[p].data(), b[p].data()});
    std::vector<std::int64_t> expected(kBlockRows * columns, 7);
    for (std::size_t p = 0; p < count; ++p) {
      for (std::size_t k = 0; k < depth; ++k) {
        for (std::size_t r = 0; r < kBlockRows; ++r) {
          const auto left = static_cast<std::int64_t>(a[p][k * kBlockRows + r]);
          for (std::size_t c = 0; c < columns; ++c) {
            expected[r * columns + c] += left * static_cast<std::int64_t>(b[p][k * stride + c]);
          }
        }
      }
    }
    for (const AddExactProducts multiply_add : exact_product_engines()) {
      std::vector<std::int64_t> sums(kBlockRows * columns, 7);
      multiply_add(pairs, depth, columns, stride, sums.data(), columns);
      ASSERT_EQ(sums, expected);
    }
  }
}

TEST(SlicedOperands, InnerSlicesAddUpToTheWords) {
  std::mt19937_64 engine(6);
  for (const int range : {0, 10, 14, 15, 35, 36, 37, 38, 100, 250}) {
    const std::size_t rows = 300;
    const std::size_t width = 21;
    std::vector<std::uint16_t> words(rows * width);
    for (auto& w : words) w = random_word(engine, 100, range);
    for (std::size_t d = 0; d < width; ++d) words[7 * width + d] = 0;  // a row of zeros
    const InnerRight right({words.data(), static_cast<std::ptrdiff_t>(width), rows, width});
    InnerLeft left;
    for (std::size_t r = 0; r < rows; ++r) {
      const std::uint16_t* const row = &words[r * width];
      left.set({&row, 1}, width);
      ASSERT_EQ(left.scale(0).exponent, right.scale(r).exponent);
      ASSERT_EQ(left.scale(0).broad(), right.scale(r).broad());
      const std::size_t chunk = r / kChunk;
      for (std::size_t d = 0; d < width; ++d) {
        double from_left = 0;
        double from_right = 0;
        for (int m = 0; m < left.slices(); ++m) {
          from_left += std::ldexp(left.block(m)[d * kBlockRows], -kSliceBits * (m + 1));
        }
        for (int m = 0; m < right.slices(chunk); ++m) {
          from_right += std::ldexp(static_cast<double>(right.block(chunk, m)[d * kChunk + r % kChunk]),
                                   -kSliceBits * (m + 1));
        }
        const double expected =
            right.scale(r).broad() ? 0 : std::ldexp(fp64_from_bf16(row[d]), -right.scale(r).exponent);
        ASSERT_EQ(from_left, expected);
        ASSERT_EQ(from_right, expected);
      }
    }
    // 7 random bits below the leading one: up to 8 + range bits, exact to 44.
    if (range > 100) {
      EXPECT_TRUE(right.scale(0).broad());
    } else if (range <= 36) {
      for (std::size_t r = 0; r < rows; ++r) EXPECT_FALSE(right.scale(r).broad());
    }
  }
}

TEST(SlicedOperands, OuterSlicesAddUpToTheWordsBelowTheirExponents) {
  std::mt19937_64 engine(7);
  for (const int range : {0, 12, 40, 100, 250}) {
    const std::size_t rows = 300;
    const std::size_t width = 21;
    std::vector<std::uint16_t> words(rows * width);
    for (std::size_t i = 0; i < words.size(); ++i) {
      // Columns of very different size on top of the range.
      words[i] = random_word(engine, 100 - static_cast<int>(i % width) * 4, range);
    }
    const OuterRight right({words.data(), static_cast<std::ptrdiff_t>(width), rows, width});
    ASSERT_EQ(right.columns(), 32U);
    Number sum = make_number(kPlenty);
    Number slice = make_number(kPlenty);
    for (std::size_t r = 0; r < rows; ++r) {
      const std::size_t chunk = r / kChunk;
      for (std::size_t d = 0; d < right.columns(); ++d) {
        mpfr_set_zero(raw(sum), 1);
        for (int m = 0; m < right.slices(chunk); ++m) {
          const auto bits = static_cast<double>(right.block(chunk, m)[(r % kChunk) * right.columns() + d]);
          ASSERT_LT(std::abs(bits), std::ldexp(1.0, kSliceBits));
          mpfr_set_d(raw(slice), bits, MPFR_RNDN);
          mpfr_mul_2si(raw(slice), raw(slice), -kSliceBits * (m + 1), MPFR_RNDN);
          mpfr_add(raw(sum), raw(sum), raw(slice), MPFR_RNDN);
        }
        if (d >= width) {
          ASSERT_EQ(mpfr_sgn(raw(sum)), 0);
          continue;
        }
        const int exponent = right.row_exponents(chunk)[r % kChunk] + right.column_exponent(d);
        mpfr_mul_2si(raw(sum), raw(sum), exponent, MPFR_RNDN);
        mpfr_sub(raw(sum), raw(sum), raw(exact(words[r * width + d])), MPFR_RNDN);
        const double lost = absolute(sum);
        ASSERT_LE(lost, std::ldexp(1.0, exponent - kSliceBits * OuterRight::kMaxSlices));
        if (range <= 40) {
          ASSERT_EQ(lost, 0);
        }
      }
    }
  }
}

TEST(BlockSums, StayWithinTheirBound) {
  std::mt19937_64 engine(8);
  const std::array<int, 4> steps{150, -150, 4, -4};
  for (int round = 0; round < 48; ++round) {
    const std::size_t rows = 1 + engine() % 600;
    const std::size_t width = 1 + engine() % 6;
    const int word_range = std::vector<int>{6, 30, 250}[round % 3];
    const int wide_range = std::vector<int>{3, 60, 400}[round / 3 % 3];
    std::vector<std::uint16_t> words(rows * width);
    for (auto& w : words) w = random_word(engine, 60, word_range);
    const OuterRight right({words.data(), static_cast<std::ptrdiff_t>(width), rows, width});

    // The numbers that are summed, what they ought to be, and the claimed errors of the first.
    std::vector<Wide> a(kBlockRows * rows);
    std::vector<Number> truth(a.size());
    std::vector<ErrorTerm> errors(a.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      truth[i] = make_number(kPlenty);
      mpfr_set_zero(raw(truth[i]), 1);
      if (engine() % 8 == 0) continue;
      // Blocks of very different size, so that the common exponent rises and falls.
      a[i] = random_wide(engine, wide_range);
      a[i].exponent += static_cast<int>(i % rows / kChunk) * steps[round % 4];
      set_wide(raw(truth[i]), a[i]);
      if (engine() % 2 == 0) {
        errors[i] = {0.75, a[i].top() - static_cast<int>(engine() % 140)};
        Number off = make_number(kPlenty);
        mpfr_set_d(raw(off), (engine() % 2 == 0 ? 0.75 : -0.75), MPFR_RNDN);
        mpfr_mul_2si(raw(off), raw(off), errors[i].power, MPFR_RNDN);
        mpfr_add(raw(truth[i]), raw(truth[i]), raw(off), MPFR_RNDN);
      }
    }

    BlockSums sums;
    sums.reset(right);
    OuterLeft left;
    std::vector<Wide> line(kChunk);
    std::vector<ErrorTerm> line_errors(kChunk);
    for (std::size_t base = 0; base < rows; base += kChunk) {
      const std::size_t begin = base == 0 ? std::min<std::size_t>(3, rows) : 0;
      const std::size_t end = std::min(kChunk, rows - base);
      for (std::size_t r = 0; r < kBlockRows; ++r) {
        if (r == 5) {
          left.clear_row(r, begin, end);
          continue;
        }
        std::fill(line.begin(), line.end(), Wide{});
        std::fill(line_errors.begin(), line_errors.end(), ErrorTerm{});
        for (std::size_t k = begin; k < end; ++k) {
          line[k] = a[r * rows + base + k];
          line_errors[k] = errors[r * rows + base + k];
        }
        left.set_row(r, line, line_errors, right.row_exponents(base / kChunk), begin, end);
      }
      sums.add(left, base / kChunk, begin, end);
    }

    Number expected = make_number(kPlenty);
    Number size = make_number(kPlenty);
    Number term = make_number(kPlenty);
    Number result = make_number(192);
    for (std::size_t r = 1; r < kBlockRows; r += 4) {  // 5, which is empty, among them
      for (std::size_t d = 0; d < width; ++d) {
        mpfr_set_zero(raw(expected), 1);
        mpfr_set_zero(raw(size), 1);
        for (std::size_t k = 3; k < rows && r != 5; ++k) {
          mpfr_mul(raw(term), raw(truth[r * rows + k]), raw(exact(words[k * width + d])), MPFR_RNDN);
          mpfr_add(raw(expected), raw(expected), raw(term), MPFR_RNDN);
          mpfr_mul(raw(term), raw(exact(a[r * rows + k])), raw(exact(words[k * width + d])), MPFR_RNDN);
          mpfr_abs(raw(term), raw(term), MPFR_RNDN);
          mpfr_add(raw(size), raw(size), raw(term), MPFR_RNDN);
        }
        sums.get(raw(result), r, d);
        mpfr_sub(raw(expected), raw(expected), raw(result), MPFR_RNDN);
        mpfr_mul_2si(raw(expected), raw(expected), -sums.exponent(r, d), MPFR_RNDN);
        mpfr_mul_2si(raw(size), raw(size), -sums.exponent(r, d), MPFR_RNDN);
        ASSERT_LE(absolute(expected), sums.error(r) * (1 + 0x1p-20)) << round << " " << r << " " << d;
        ASSERT_LE(absolute(size), sums.magnitude(r) * (1 + 0x1p-20));
      }
    }
  }
}

}  // namespace
}  // namespace bitattn::reference::testing
