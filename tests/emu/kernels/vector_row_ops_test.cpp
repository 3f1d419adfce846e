// The vectorised row operations give the scalar model's bits: every operation, profile and class of numbers.
// BITATTN_MMA_TEST_FACTOR=n runs n times as many; BITATTN_EXHAUSTIVE=1 tries ex2, tanh and the cast on all
// 2^32 inputs.

#include "emu/kernels/vector_row_ops.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "emu/arith/bf16.hpp"
#include "emu/arith/mufu.hpp"
#include "tests/emu/arith/random_bits.hpp"

namespace bitattn {
namespace {

using kernels::QuadSums;
using kernels::RowOps;
using kernels::VectorRowOps;
using test::RandomBits;

/// Numbers that ask the flush, the NaN and the rounding rules, in rows of one flavour or of all.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : random(seed) {}

  float any() {
    switch (random.between(0, 9)) {
      case 0:
        return arith::from_bits(random.bits32());
      case 1:
        return arith::from_bits(random.bits32() & 0x807fffffU);  // subnormals
      case 2:
        return special();
      case 3:
        return of_exponent(random.between(-127, -120));
      case 4:
        return of_exponent(random.between(-70, -56));  // products at the flush threshold
      case 5:
        return of_exponent(random.between(120, 127));
      default:
        return of_exponent(random.between(-12, 8));
    }
  }
  float ordinary() { return of_exponent(random.between(-12, 8)); }
  float special() {
    constexpr std::uint32_t kValues[] = {0U,          0x80000000U, 0x7f800000U, 0xff800000U,
                                         0x7fffffffU, 0x7f800001U, 0xffc00000U, 0x00800000U,
                                         0x80800000U, 0x007fffffU, 0x00000001U, 0x3f800000U};
    return arith::from_bits(kValues[random.between(0, 11)]);
  }
  float of_exponent(int e) {
    return arith::from_bits((random.bits32() & 0x807fffffU) | static_cast<std::uint32_t>(e + 127) << 23U);
  }
  std::vector<float> row(int n) {
    const bool ordinary_row = random.one_in(2);
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& v : x) v = ordinary_row ? ordinary() : any();
    return x;
  }

  RandomBits random;
};

::testing::AssertionResult same_bits(const std::vector<float>& expected, const std::vector<float>& got) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (arith::to_bits(expected[i]) == arith::to_bits(got[i])) continue;
    return ::testing::AssertionFailure()
           << "element " << i << " of " << expected.size() << ": " << std::hex << arith::to_bits(got[i])
           << ", the model says " << arith::to_bits(expected[i]);
  }
  return ::testing::AssertionSuccess();
}

std::uint64_t factor() {
  const char* text = std::getenv("BITATTN_MMA_TEST_FACTOR");
  return text == nullptr ? 1U : std::strtoull(text, nullptr, 10);
}

/// The chip's profile and each of its decisions that row operations read, turned.
std::vector<profile::Profile> profiles() {
  std::vector<profile::Profile> all(8);
  all[1].forward.exponent_fused = all[1].backward.exponent_fused = false;
  all[2].forward.row_sum_rescale_fused = false;
  all[3].backward.ds = profile::DsOrder::fused;
  all[4].backward.ds_from_cast_p = true;
  all[5].backward.bulk_reduce_flushes = true;
  all[6].arithmetic.flush_subnormals = false;
  all[7].arithmetic.ex2 = profile::Function::correctly_rounded;
  return all;
}

class VectorRows : public ::testing::TestWithParam<std::string> {
 protected:
  /// Calls check(model, vectors, numbers, n) for every profile with rows of many lengths.
  template <class Check>
  void for_rows(std::uint64_t seed, Check&& check) {
    Numbers numbers(seed);
    for (const profile::Profile& profile : profiles()) {
      const RowOps model(profile);
      const VectorRowOps vectors(profile, GetParam());
      for (std::uint64_t i = 0; i < 4000U * factor(); ++i) {
        const int n =
            numbers.random.one_in(2) ? numbers.random.between(1, 70) : 16 * numbers.random.between(1, 12);
        check(model, vectors, numbers, n);
        if (HasFailure()) return;
      }
    }
  }
};

TEST_P(VectorRows, HaveLoops) {
  EXPECT_NE(kernels::vector_row_loops(GetParam()), nullptr);
  EXPECT_EQ(kernels::vector_row_loops("scalar"), nullptr);
}

TEST_P(VectorRows, RowMax) {
  for_rows(1, [](const RowOps& model, const VectorRowOps& vectors, Numbers& numbers, int n) {
    std::vector<float> x = numbers.row(n);
    const int flavour = numbers.random.between(0, 4);
    for (float& v : x) {
      if (flavour == 0) v = numbers.special();
      if (flavour == 1) v = -std::fabs(numbers.random.one_in(3) ? numbers.special() : v);
      if (flavour == 2 && numbers.random.one_in(2)) v = -INFINITY;
    }
    const float start = numbers.random.one_in(2) ? -INFINITY : numbers.any();
    EXPECT_TRUE(same_bits({model.row_max(x.data(), n, start)}, {vectors.row_max(x.data(), n, start)}));
  });
}

TEST_P(VectorRows, Exponentials) {
  for_rows(2, [](const RowOps& model, const VectorRowOps& vectors, Numbers& numbers, int n) {
    const std::vector<float> x = numbers.row(n);
    const float c = numbers.random.one_in(2) ? numbers.any() : 0.127517432F;
    // Sometimes a reference that cancels the first product, but for its rounding.
    const float reference = numbers.random.one_in(3) ? x[0] * c : numbers.any();
    std::vector<float> expected(x.size());
    std::vector<float> got(x.size());
    model.forward_exponentials(x.data(), expected.data(), n, c, reference);
    vectors.forward_exponentials(x.data(), got.data(), n, c, reference);
    EXPECT_TRUE(same_bits(expected, got));
    model.backward_exponentials(x.data(), expected.data(), n, c, reference);
    vectors.backward_exponentials(x.data(), got.data(), n, c, reference);
    EXPECT_TRUE(same_bits(expected, got));
  });
}

TEST_P(VectorRows, Softcap) {
  for_rows(10, [](const RowOps& model, const VectorRowOps& vectors, Numbers& numbers, int n) {
    const std::vector<float> x = numbers.row(n);
    const float scale = numbers.random.one_in(2) ? numbers.any() : 0.01F;
    std::vector<float> expected = x;
    std::vector<float> got = x;
    model.softcap(expected.data(), n, scale);
    vectors.softcap(got.data(), n, scale);
    EXPECT_TRUE(same_bits(expected, got));
    expected = got = x;
    std::vector<float> expected_h(x.size());
    std::vector<float> got_h(x.size());
    model.softcap_with_derivative(expected.data(), expected_h.data(), n, scale);
    vectors.softcap_with_derivative(got.data(), got_h.data(), n, scale);
    EXPECT_TRUE(same_bits(expected, got));
    EXPECT_TRUE(same_bits(expected_h, got_h));
  });
}

TEST_P(VectorRows, QuadSums) {
  for_rows(3, [](const RowOps& model, const VectorRowOps& vectors, Numbers& numbers, int n) {
    n = (n + 7) / 8 * 8;
    std::vector<float> p = numbers.row(n);
    if (numbers.random.one_in(2)) {
      for (float& v : p) v = std::fabs(v);
    }
    const bool first = numbers.random.one_in(2);
    const float alpha = numbers.random.one_in(2) ? 0.75F : numbers.any();
    QuadSums expected;
    for (float& l : expected.lane) l = numbers.any();
    QuadSums got = expected;
    model.add_to_quad_sums(p.data(), n, first, alpha, expected);
    vectors.add_to_quad_sums(p.data(), n, first, alpha, got);
    EXPECT_TRUE(same_bits({expected.lane, expected.lane + 4}, {got.lane, got.lane + 4}));
  });
}

TEST_P(VectorRows, Cast) {
  for_rows(4, [](const RowOps& model, const VectorRowOps& vectors, Numbers& numbers, int n) {
    const std::vector<float> x = numbers.row(n);
    std::vector<std::uint16_t> expected(x.size() + 1, 0x1234U);
    std::vector<std::uint16_t> got = expected;
    model.cast(x.data(), expected.data(), n);
    vectors.cast(x.data(), got.data(), n);
    EXPECT_EQ(expected, got);
  });
}

TEST_P(VectorRows, Products) {
  for_rows(5, [](const RowOps& model, const VectorRowOps& vectors, Numbers& numbers, int n) {
    const std::vector<float> x = numbers.row(n);
    const std::vector<float> y = numbers.row(n);
    const float by = numbers.any();
    std::vector<float> expected(x.size());
    std::vector<float> got(x.size());
    model.multiply(x.data(), y.data(), expected.data(), n);
    vectors.multiply(x.data(), y.data(), got.data(), n);
    EXPECT_TRUE(same_bits(expected, got));
    model.scaled(x.data(), expected.data(), n, by);
    vectors.scaled(x.data(), got.data(), n, by);
    EXPECT_TRUE(same_bits(expected, got));
    got = x;  // in place, as outputs are rescaled
    vectors.scale(got.data(), n, by);
    EXPECT_TRUE(same_bits(expected, got));
  });
}

TEST_P(VectorRows, ProductsAtTheFlushThreshold) {
  // Exponents sum up to -127 or -126: products on both sides of 2^-126 - 2^-151, where only some are flushed.
  Numbers numbers(6);
  const RowOps model{profile::Profile()};
  const VectorRowOps vectors(profile::Profile(), GetParam());
  int smallest_normal = 0;
  for (std::uint64_t i = 0; i < 20'000U * factor(); ++i) {
    constexpr int kRow = 64;
    std::vector<float> x(kRow);
    std::vector<float> y(kRow);
    for (int j = 0; j < kRow; ++j) {
      const int e = numbers.random.between(-100, -30);
      const auto k = static_cast<std::size_t>(j);
      x[k] = numbers.of_exponent(e);
      y[k] = numbers.of_exponent(-127 - e);
      if (numbers.random.one_in(2)) {  // 2^-126 over x, to the nearest
        y[k] = std::ldexp(1.0F / (x[k] * 0x1p63F), -63);
        y[k] = arith::from_bits(arith::to_bits(y[k]) +
                                static_cast<std::uint32_t>(numbers.random.between(-2, 2)));
      }
    }
    std::vector<float> expected(kRow);
    std::vector<float> got(kRow);
    model.multiply(x.data(), y.data(), expected.data(), kRow);
    vectors.multiply(x.data(), y.data(), got.data(), kRow);
    ASSERT_TRUE(same_bits(expected, got));
    for (const float v : expected) smallest_normal += std::fabs(v) == 0x1p-126F ? 1 : 0;
  }
  EXPECT_GT(smallest_normal, 1000);
}

TEST_P(VectorRows, ScoreGradient) {
  for_rows(7, [](const RowOps& model, const VectorRowOps& vectors, Numbers& numbers, int n) {
    const std::vector<float> p = numbers.row(n);
    const std::vector<float> dp = numbers.row(n);
    const float dpsum = numbers.random.one_in(3) ? dp[0] : numbers.any();
    std::vector<float> expected(p.size());
    std::vector<float> got(p.size());
    model.score_gradient(p.data(), dp.data(), expected.data(), n, dpsum);
    vectors.score_gradient(p.data(), dp.data(), got.data(), n, dpsum);
    EXPECT_TRUE(same_bits(expected, got));
  });
}

TEST_P(VectorRows, ReduceAdd) {
  for_rows(8, [](const RowOps& model, const VectorRowOps& vectors, Numbers& numbers, int n) {
    std::vector<float> expected = numbers.row(n);
    std::vector<float> got = expected;
    std::vector<float> part = numbers.row(n);
    for (std::size_t i = 0; i < part.size(); ++i) {
      if (numbers.random.one_in(4))
        part[i] = -std::nextafter(expected[i], 0.0F);  // a subnormal difference, if small
    }
    const bool by_atomics = numbers.random.one_in(2);
    model.reduce_add(expected.data(), part.data(), n, by_atomics);
    vectors.reduce_add(got.data(), part.data(), n, by_atomics);
    EXPECT_TRUE(same_bits(expected, got));
  });
}

TEST_P(VectorRows, FunctionsOfOneNumberOnAllOfThem) {
  // fma(x, 1, -0) is x, but for the flush that ex2 does itself.
  const bool all = std::getenv("BITATTN_EXHAUSTIVE") != nullptr;
  const std::uint64_t step = all ? 1 : 499;
  const VectorRowOps vectors(profile::Profile(), GetParam());
  constexpr int kRow = 4096;
  std::vector<float> x(kRow);
  std::vector<float> p(kRow);
  std::vector<float> t(kRow);
  std::vector<std::uint16_t> words(kRow);
  for (std::uint64_t first = 0; first < std::uint64_t{1} << 32U; first += kRow * step) {
    for (std::uint64_t j = 0; j < kRow; ++j)
      x[j] = arith::from_bits(static_cast<std::uint32_t>(first + j * step));
    vectors.forward_exponentials(x.data(), p.data(), kRow, 1.0F, 0.0F);
    vectors.cast(x.data(), words.data(), kRow);
    t = x;
    vectors.softcap(t.data(), kRow, 1.0F);  // x * 1 is x, but for the flush
    for (std::size_t j = 0; j < kRow; ++j) {
      ASSERT_EQ(arith::to_bits(p[j]), arith::mufu::ex2(arith::to_bits(x[j])))
          << std::hex << arith::to_bits(x[j]);
      ASSERT_EQ(words[j], arith::bf16_from_fp32(x[j])) << std::hex << arith::to_bits(x[j]);
      ASSERT_EQ(arith::to_bits(t[j]), arith::mufu::tanh(arith::flush(arith::to_bits(x[j]))))
          << std::hex << arith::to_bits(x[j]);
    }
  }
  // Where attention lives: every exponent in [-30, 0] at a finer step.
  for (std::uint32_t bits = 0xb0000000U; bits < 0xc1f00000U; bits += all ? kRow : kRow * 16U) {
    for (std::uint32_t j = 0; j < kRow; ++j) x[j] = arith::from_bits(bits + j);
    vectors.forward_exponentials(x.data(), p.data(), kRow, 1.0F, 0.0F);
    for (std::size_t j = 0; j < kRow; ++j) {
      ASSERT_EQ(arith::to_bits(p[j]), arith::mufu::ex2(arith::to_bits(x[j])))
          << std::hex << arith::to_bits(x[j]);
    }
  }
}

#if defined(__x86_64__)
TEST_P(VectorRows, TheCallersFloatingPointModeIsNeitherUsedNorChanged) {
  const unsigned before = _mm_getcsr();
  Numbers numbers(9);
  const std::vector<float> x = numbers.row(96);
  const std::vector<float> y = numbers.row(96);
  const VectorRowOps vectors(profile::Profile(), GetParam());
  std::vector<float> results[2];
  for (const unsigned mode : {0x1f80U, 0x1f80U | 0xe040U}) {
    std::vector<float> got(96 * 4);
    std::copy(x.begin(), x.end(), got.begin() + 288);
    _mm_setcsr(mode);
    vectors.multiply(x.data(), y.data(), got.data(), 96);
    vectors.forward_exponentials(x.data(), got.data() + 96, 96, 0.3F, y[0]);
    vectors.score_gradient(x.data(), y.data(), got.data() + 192, 96, y[1]);
    vectors.reduce_add(got.data() + 288, y.data(), 96, false);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after & ~0x3fU, mode);
    results[mode == 0x1f80U ? 0 : 1] = got;
  }
  EXPECT_TRUE(same_bits(results[0], results[1]));
}
#endif

std::vector<std::string> supported() {
  std::vector<std::string> names;
  for (const char* name : {"avx2", "avx512"}) {
    if (kernels::vector_row_loops(name) != nullptr) names.emplace_back(name);
  }
  return names;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(VectorRows);
INSTANTIATE_TEST_SUITE_P(Engines, VectorRows, ::testing::ValuesIn(supported()),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace bitattn
