// Which path an engine takes is visible: ordinary data must go the fast way, and each guard of the fast way
// must stand exactly where its proof (docs/performance.md, emu/mma/simd_layout.hpp) puts it.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "emu/arith/bf16.hpp"
#include "emu/mma/simd_engine.hpp"
#include "tests/emu/arith/random_bits.hpp"

namespace bitattn {
namespace {

using mma::Engine;
using mma::RowCounts;
using mma::Side;

/// 16 products for each of `rows` x `columns` elements; every word of an operand the same unless changed.
struct Product {
  int rows = 1, columns = 1, k = 16;
  std::vector<std::uint16_t> a, b;
  std::vector<float> c;

  Product(float a_value, float b_value, float c_value, int r = 1, int n = 1, int depth = 16)
      : rows(r),
        columns(n),
        k(depth),
        a(static_cast<std::size_t>(r * depth), arith::bf16_from_fp32(a_value)),
        b(static_cast<std::size_t>(n * depth), arith::bf16_from_fp32(b_value)),
        c(static_cast<std::size_t>(r * n), c_value) {}

  /// Runs, compares with the scalar model and says which way the rows went.
  RowCounts run(const Engine& engine, mma::Start start = mma::Start::accumulate) const {
    std::vector<float> results[2] = {c, c};
    const Engine* const both[2] = {&engine, mma::find_engine("scalar")};
    mma::row_counts() = {};
    for (int i = 0; i < 2; ++i) {
      both[i]->multiply(both[i]->packed(mma::whole(a.data(), k, 1, rows, k), Side::left),
                        both[i]->packed(mma::whole(b.data(), k, 1, columns, k), Side::right), start,
                        results[i].data(), columns, arith::kHopperWide);
    }
    EXPECT_EQ(std::memcmp(results[0].data(), results[1].data(), c.size() * sizeof(float)), 0)
        << engine.name();
    return mma::row_counts();
  }
};

enum class Way { add, multiply, careful };

Way way(const RowCounts& counts) {
  EXPECT_EQ(counts.by_add + counts.by_multiply + counts.careful, 1U);
  EXPECT_EQ(counts.scalar, 0U);
  return counts.by_add != 0U ? Way::add : counts.by_multiply != 0U ? Way::multiply : Way::careful;
}

class Paths : public ::testing::TestWithParam<const Engine*> {
 protected:
  static Way way_of(float a, float b, float c) { return way(Product(a, b, c).run(*GetParam())); }
};

TEST_P(Paths, OrdinaryDataGoesTheFastWay) {
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<std::uint16_t>& words, auto&& make) {
    for (std::uint16_t& w : words) w = arith::bf16_from_fp32(make());
  };
  // Scores.
  Product s(0, 0, 0, 128, 128, 128);
  fill(s.a, [&] { return normal(random); });
  fill(s.b, [&] { return normal(random); });
  const RowCounts scores = s.run(*GetParam(), mma::Start::zero);
  EXPECT_GT(scores.by_add, 0U);
  EXPECT_EQ(scores.by_multiply + scores.careful + scores.scalar, 0U);
  // Causal probabilities times values, onto a running sum.
  Product pv(0, 0, 0, 128, 128, 128);
  for (std::size_t i = 0; i < 128; ++i) {
    for (std::size_t j = 0; j <= i; ++j)
      pv.a[i * 128 + j] = arith::bf16_from_fp32(std::exp(2 * normal(random) - 6));
  }
  fill(pv.b, [&] { return normal(random); });
  for (float& c : pv.c) c = normal(random);
  const RowCounts output = pv.run(*GetParam());
  EXPECT_GT(output.by_add, 0U);
  EXPECT_EQ(output.by_multiply + output.careful + output.scalar, 0U);
}

TEST_P(Paths, ProbabilitiesOfPeakyRowsStayFastWhereOthersAreLarge) {
  // Values down to 2^-120 beside a 1 in every step: the exponents that come up prove the step, the smallest
  // alone do not.
  Product pv(0x1p-120F, 0.75F, 0, 4, 64, 32);
  for (std::size_t r = 0; r < 4; ++r) {
    pv.a[r * 32 + 3] = arith::bf16_from_fp32(1.0F);
    pv.a[r * 32 + 20] = arith::bf16_from_fp32(0.5F);
  }
  const RowCounts fast = pv.run(*GetParam());
  EXPECT_EQ(fast.careful + fast.scalar, 0U);
  // Without it in the last step, one row must be looked at closely.
  pv.a[2 * 32 + 3] = pv.a[2 * 32 + 20] = arith::bf16_from_fp32(0x1p-118F);
  const RowCounts mixed = pv.run(*GetParam());
  EXPECT_GT(mixed.careful, 0U);
  EXPECT_LE(mixed.careful, 4U);
}

TEST_P(Paths, LargestProducts) {
  EXPECT_EQ(way_of(0x1p6F, 0x1p10F, 1), Way::add);        // exponents sum up to 16
  EXPECT_EQ(way_of(0x1p7F, 0x1p10F, 1), Way::multiply);   // 17
  EXPECT_EQ(way_of(0x1p40F, 0x1p50F, 1), Way::multiply);  // 90
  EXPECT_EQ(way_of(0x1p41F, 0x1p50F, 1), Way::careful);   // 91
  EXPECT_EQ(way_of(0x1p64F, 0x1p-60F, 1), Way::add);      // exponent field 191, the bytes' last
  EXPECT_EQ(way_of(0x1p65F, 0x1p-60F, 1), Way::careful);
  EXPECT_EQ(way_of(0x1p-60F, 0x1p64F, 1), Way::add);
  EXPECT_EQ(way_of(0x1p-60F, 0x1p65F, 1), Way::careful);
}

TEST_P(Paths, SmallestProducts) {
  EXPECT_EQ(way_of(0x1p-60F, 0x1p-40F, 1), Way::add);  // exponents sum up to -100
  EXPECT_EQ(way_of(0x1p-60F, 0x1p-40F, 0), Way::add);
  EXPECT_EQ(way_of(0x1p-60F, 0x1p-41F, 0), Way::careful);  // -101 and nothing larger in the step
  EXPECT_EQ(way_of(0x1p-60F, 0x1p-41F, 1), Way::add);      // a larger accumulator
  EXPECT_EQ(way_of(0x1p-100F, 0x1p-37F, 1), Way::add);     // below what fp32 and the bytes hold
  EXPECT_EQ(way_of(0x1p-133F, 0x1p-133F, 1), Way::add);    // subnormal operands
}

TEST_P(Paths, Accumulators) {
  const float below_limit = std::nextafter(0x1p25F, 0.0F);
  EXPECT_EQ(way_of(1, 1, below_limit), Way::add);
  EXPECT_EQ(way_of(1, 1, -0x1p25F), Way::multiply);
  EXPECT_EQ(way_of(1, 1, std::nextafter(0x1p112F, 0.0F)), Way::multiply);
  EXPECT_EQ(way_of(1, 1, 0x1p112F), Way::careful);
  EXPECT_EQ(way_of(1, 1, 0x1p-101F), Way::add);
  EXPECT_EQ(way_of(1, 1, std::nextafter(-0x1p-101F, 0.0F)), Way::careful);
  EXPECT_EQ(way_of(1, 1, 0x1p-149F), Way::careful);
  EXPECT_EQ(way_of(1, 1, 0.0F), Way::add);
  EXPECT_EQ(way_of(1, 1, -0.0F), Way::add);
  EXPECT_EQ(way_of(1, 1, INFINITY), Way::careful);
  EXPECT_EQ(way_of(1, 1, NAN), Way::careful);
}

TEST_P(Paths, SumsThatLeave32Bits) {
  const float heaviest = 255.0F / 128;
  const float top = std::nextafter(2.0F, 0.0F);
  EXPECT_EQ(way_of(heaviest, heaviest, top), Way::careful);
  EXPECT_EQ(way_of(249.0F / 128, heaviest, top), Way::careful);  // 4 * 249 = 996
  EXPECT_EQ(way_of(248.0F / 128, heaviest, top), Way::add);
  EXPECT_EQ(way_of(heaviest, 249.0F / 128, top), Way::careful);  // 16 * 249 = 3984
  EXPECT_EQ(way_of(heaviest, 248.0F / 128, top), Way::add);
  // 15 * 255 + 158 = 3983 in each step of the right side is light enough, wherever the 158 is.
  for (std::size_t i = 0; i < 32; ++i) {
    Product p(heaviest, heaviest, top, 1, 1, 32);
    p.b[i] = arith::bf16_from_fp32(158.0F / 128);
    EXPECT_EQ(way(p.run(*GetParam())), Way::careful) << i;  // the other step is heavy still
    p.b[(i + 16) % 32] = arith::bf16_from_fp32(159.0F / 128);
    EXPECT_EQ(way(p.run(*GetParam())), Way::careful) << i;
    p.b[(i + 16) % 32] = arith::bf16_from_fp32(158.0F / 128);
    EXPECT_EQ(way(p.run(*GetParam())), Way::add) << i;
  }
  // On the left side no four neighbours may exceed 995.
  for (std::size_t i = 0; i < 16; ++i) {
    Product p(240.0F / 128, heaviest, top);
    for (std::size_t j = i / 4 * 4; j < i / 4 * 4 + 4; ++j) p.a[j] = arith::bf16_from_fp32(250.0F / 128);
    EXPECT_EQ(way(p.run(*GetParam())), Way::careful) << i;
    p.a[i] = arith::bf16_from_fp32(245.0F / 128);
    EXPECT_EQ(way(p.run(*GetParam())), Way::add) << i;
  }
}

TEST_P(Paths, OnlyRowsAndColumnsWithInfinitiesReachTheScalarModel) {
  Product p(1.5F, 0.5F, 1, 8, 100, 64);
  p.a[3 * 64 + 5] = 0x7f80U;
  p.b[77 * 64 + 60] = 0xff80U;
  p.b[20 * 64 + 1] = 0x7fc0U;  // NaN columns need no model
  const RowCounts counts = p.run(*GetParam());
  EXPECT_EQ(counts.scalar, 99U + 7U);
  EXPECT_EQ(counts.careful, 0U);
  EXPECT_GT(counts.by_add, 0U);
}

#if defined(__x86_64__)
TEST_P(Paths, TheCallersFloatingPointModeIsNeitherUsedNorChanged) {
  const unsigned before = _mm_getcsr();
  Product tiny(0x1p-70F, 0x1.8p-62F, 0x1p-140F, 2, 40, 16);
  for (const unsigned mode :
       {0x1f80U, 0x1f80U | 0x8040U, 0x1f80U | 0x2000U, 0x1f80U | 0x4000U, 0x1f80U | 0xe040U}) {
    _mm_setcsr(mode);
    const RowCounts counts = tiny.run(*GetParam());
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_GT(counts.careful, 0U);
    EXPECT_EQ(after & ~0x3fU, mode & ~0x3fU);
  }
}
#endif

TEST_P(Paths, EnginesServeManyThreads) {
  Product p(1.25F, 0.75F, 1, 33, 90, 80);
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 50; ++n) EXPECT_EQ(p.run(*GetParam()).careful, 0U);
    });
  }
  for (std::thread& t : threads) t.join();
}

INSTANTIATE_TEST_SUITE_P(Engines, Paths,
                         ::testing::ValuesIn(mma::simd_engines().begin(), mma::simd_engines().end()),
                         [](const auto& p) { return std::string(p.param->name()); });

TEST(EngineList, BeginsWithTheModelAndEndsWithTheWidest) {
  const auto engines = mma::engines();
  ASSERT_FALSE(engines.empty());
  EXPECT_EQ(engines.front()->name(), "scalar");
  for (const Engine* engine : engines) EXPECT_EQ(mma::find_engine(engine->name()), engine);
  EXPECT_EQ(mma::find_engine("abacus"), nullptr);
#if defined(__x86_64__)
  EXPECT_EQ(mma::find_engine("avx2") != nullptr, __builtin_cpu_supports("avx2") != 0);
  EXPECT_EQ(mma::find_engine("avx512") != nullptr, __builtin_cpu_supports("avx512bw") != 0);
#endif
}

}  // namespace
}  // namespace bitattn
