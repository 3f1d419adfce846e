// Proves, without a GPU: the probe's operands ask what their kinds say, and are such that every wrong rule
// for the tensor core shows. A probe whose cases cannot tell would find no mismatch on any chip.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "gpu/probe/dot_products.hpp"
#include "gpu/probe/operands.hpp"

namespace bitattn::gpu::probe {
namespace {

using arith::Bf16;
using arith::E4m3;
using arith::E5m2;
using arith::F16;
using arith::TensorCoreRule;

constexpr int kRows = 16;
constexpr int kColumns = 8;

/// Calls `look(kind, a, b, c)` for every dot product of `tiles` tiles.
template <class A, class B, class Word>
void every_product(std::uint64_t tiles, int k,
                   const std::function<void(Kind, const Word*, const Word*, std::uint32_t)>& look) {
  for (std::uint64_t tile = 0; tile < tiles; ++tile) {
    const TileShape shape = tile_shape<A, B>(tile, k);
    std::vector<Word> a(static_cast<std::size_t>(kRows * k));
    std::vector<Word> b(static_cast<std::size_t>(kColumns * k));
    for (int i = 0; i < kRows * k; ++i) {
      a[static_cast<std::size_t>(i)] = static_cast<Word>(operand_word<A, Operand::a>(shape, i / k, i % k));
    }
    for (int i = 0; i < kColumns * k; ++i) {
      b[static_cast<std::size_t>(i)] = static_cast<Word>(operand_word<B, Operand::b>(shape, i / k, i % k));
    }
    for (int i = 0; i < kRows * kColumns; ++i) {
      const Word* row = a.data() + i / kColumns * k;
      const Word* column = b.data() + i % kColumns * k;
      const std::uint32_t products =
          needs_products(shape) ? chain<A, B>(row, column, k, 1, 0U, arith::kHopperWide) : 0U;
      look(shape.kind, row, column, accumulator_word(shape, i / kColumns, i % kColumns, products));
    }
  }
}

template <class A, class B, class Word>
std::uint64_t disagreements(std::uint64_t tiles, int k, TensorCoreRule right, TensorCoreRule wrong) {
  std::uint64_t count = 0;
  every_product<A, B, Word>(tiles, k, [&](Kind, const Word* a, const Word* b, std::uint32_t c) {
    if (arith::fused_step<A, B>(a, b, k, c, right) != arith::fused_step<A, B>(a, b, k, c, wrong)) ++count;
  });
  return count;
}

TEST(ProbeCases, WrongRulesAreNoticed) {
  constexpr std::uint64_t kTiles = 24 * 60;
  const TensorCoreRule right = arith::kHopperWide;
  const std::array<TensorCoreRule, 6> wrong{
      {{24, 23, -133}, {26, 23, -133}, {25, 22, -133}, {25, 23, -133, true}, {25, 23, -134}, {25, 23, -132}}};
  for (const TensorCoreRule& rule : wrong) {
    SCOPED_TRACE(testing::Message() << rule.aligned_fraction_bits << " " << rule.result_fraction_bits << " "
                                    << rule.exponent_floor << " " << rule.round_to_nearest);
    EXPECT_GT((disagreements<Bf16, Bf16, std::uint16_t>(kTiles, 16, right, rule)), 0U);
  }
  EXPECT_GT((disagreements<F16, F16, std::uint16_t>(kTiles, 16, right, {24, 23, -133})), 0U);
  EXPECT_GT((disagreements<E4m3, E4m3, std::uint8_t>(240, 32, arith::kHopperFp8, {14, 13, -133})), 0U);
  EXPECT_GT((disagreements<E5m2, E5m2, std::uint8_t>(240, 32, arith::kHopperFp8, {12, 13, -133})), 0U);
  EXPECT_GT((disagreements<E4m3, E5m2, std::uint8_t>(240, 32, arith::kHopperFp8, {13, 12, -133})), 0U);
}

/// Two groups of 8 in place of one of 16 (what an older chip does).
TEST(ProbeCases, TwoGroupsOfEightAreNoticed) {
  std::uint64_t differing = 0;
  every_product<Bf16, Bf16, std::uint16_t>(
      24 * 10, 16, [&](Kind, const std::uint16_t* a, const std::uint16_t* b, std::uint32_t c) {
        const std::uint32_t half = arith::mma_bf16_k8(a, b, c);
        if (arith::mma_bf16_k8(a + 8, b + 8, half) != arith::mma_bf16_k16(a, b, c)) ++differing;
      });
  EXPECT_GT(differing, 0U);
}

TEST(ProbeCases, EveryKindIsWhatItsNameSays) {
  constexpr std::uint64_t kTiles = 24 * 40;
  std::array<std::uint64_t, kKinds> cases{};
  std::array<std::uint64_t, kKinds> nans{};
  std::array<std::uint64_t, kKinds> infinities{};
  std::array<std::uint64_t, kKinds> zeros{};
  std::array<std::uint64_t, kKinds> subnormals{};
  std::array<std::uint64_t, kKinds> zero_operands{};
  std::array<std::uint64_t, kKinds> huge_products{};
  every_product<Bf16, Bf16, std::uint16_t>(
      kTiles, 16, [&](Kind kind, const std::uint16_t* a, const std::uint16_t* b, std::uint32_t c) {
        const auto at = static_cast<std::size_t>(kind);
        const std::uint32_t result = arith::mma_bf16_k16(a, b, c);
        ++cases[at];
        nans[at] += arith::is_nan(result) ? 1U : 0U;
        infinities[at] += arith::is_infinite(result) ? 1U : 0U;
        zeros[at] += result == 0U ? 1U : 0U;
        subnormals[at] += (result & arith::kInfinity) == 0U && result << 1U != 0U ? 1U : 0U;
        for (int i = 0; i < 16; ++i) {
          zero_operands[at] += (a[i] & 0x7fffU) == 0U ? 1U : 0U;
          huge_products[at] += Bf16::exponent(a[i]) + Bf16::exponent(b[i]) > 127 ? 1U : 0U;
        }
      });
  const auto share = [&](const std::array<std::uint64_t, kKinds>& count, Kind kind) {
    const auto at = static_cast<std::size_t>(kind);
    return static_cast<double>(count[at]) / static_cast<double>(cases[at]);
  };
  for (const std::uint64_t n : cases) EXPECT_EQ(n, kTiles / kKinds * kRows * kColumns);
  EXPECT_GT(share(nans, Kind::infinities_and_nans), 0.1);
  EXPECT_GT(share(infinities, Kind::infinities_and_nans), 0.05);
  EXPECT_GT(share(nans, Kind::random_all), 0.02);
  EXPECT_GT(share(nans, Kind::one_special), 0.005);
  EXPECT_GT(share(infinities, Kind::one_special), 0.05);
  EXPECT_GT(share(infinities, Kind::overflow), 0.1);
  EXPECT_LT(share(infinities, Kind::overflow), 0.95);
  EXPECT_GT(share(subnormals, Kind::underflow), 0.3);
  EXPECT_GT(share(subnormals, Kind::underflow_few), 0.1);
  EXPECT_GT(share(subnormals, Kind::exponent_floor), 0.5);
  EXPECT_GT(share(zeros, Kind::underflow_few), 0.05);
  EXPECT_GT(share(zeros, Kind::c_cancels), 0.01);
  EXPECT_GT(share(zero_operands, Kind::zeros_of_both_signs), 8.0);
  EXPECT_EQ(share(zero_operands, Kind::zeros_only), 16.0);
  // Products too large for fp32 that cancel are no overflow.
  EXPECT_EQ(share(infinities, Kind::beyond_fp32), 0.0);
  EXPECT_GT(share(huge_products, Kind::beyond_fp32), 8.0);
  for (const Kind kind :
       {Kind::narrow_exponents, Kind::medium_exponents, Kind::attention_like, Kind::random_finite}) {
    EXPECT_EQ(share(nans, kind), 0.0);
  }
}

TEST(ProbeCases, PairsCancelToTheAccumulator) {
  for (std::uint64_t tile = 8; tile < 24 * 20; tile += 24) {
    const TileShape shape = tile_shape<Bf16, Bf16>(tile, 16);
    ASSERT_EQ(shape.kind, Kind::cancelling_pairs);
    std::uint16_t a[16];
    std::uint16_t b[16];
    for (int k = 0; k < 16; ++k) {
      a[k] = static_cast<std::uint16_t>(operand_word<Bf16, Operand::a>(shape, 3, k));
      b[k] = static_cast<std::uint16_t>(operand_word<Bf16, Operand::b>(shape, 5, k));
    }
    EXPECT_EQ(arith::mma_bf16_k16(a, b, 0U), 0U);
  }
}

TEST(ProbeCases, OperandsOfScalarOperationsCoverTheBoundaries) {
  std::set<std::uint32_t> values;
  for (std::uint32_t i = 0; i < kBoundaryValues; ++i) values.insert(boundary_value(i));
  EXPECT_EQ(values.size(), kBoundaryValues);
  for (const std::uint32_t v : {0U, 0x80000000U, 1U, 0x7fffffU, 0x800000U, 0x3f800000U, 0x7f7fffffU,
                                0x7f800000U, 0xff800000U, 0x7f800001U, 0x7fffffffU, 0xffc00000U}) {
    EXPECT_EQ(values.count(v), 1U) << std::hex << v;
  }
  // Products around the smallest normal number, where the two flush rules part: 2^-126 - 2^-151 and above.
  std::uint64_t at_the_edge = 0;
  std::uint64_t cancelled = 0;
  for (std::uint64_t i = 0; i < (1U << 20U); ++i) {
    const Operands o = random_operands(i);
    const double product =
        static_cast<double>(arith::from_bits(o.a)) * static_cast<double>(arith::from_bits(o.b));
    if (std::abs(product) < 0x1p-126 && std::abs(product) >= 0x1p-126 - 0x1p-151) ++at_the_edge;
    const double sum = product + static_cast<double>(arith::from_bits(o.c));
    if (i % 8 == 5 && std::abs(sum) < std::abs(product) * 0x1p-20) ++cancelled;
  }
  EXPECT_GT(cancelled, (1U << 17U) / 2);
  RecordProperty("products_at_the_flush_edge", static_cast<int>(at_the_edge));
}

}  // namespace
}  // namespace bitattn::gpu::probe
