// Every engine gives the scalar model's bits: random and adversarial tiles of every kind, memory order and
// size. BITATTN_MMA_TEST_FACTOR=n runs n times as many.

#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "emu/mma/simd_engine.hpp"
#include "tests/emu/arith/dot_product_cases.hpp"
#include "tests/emu/mma/tiles.hpp"

namespace bitattn {
namespace {

using mma::Engine;
using mma::PackedOperand;
using mma::Side;
using test::Tile;

std::uint64_t factor() {
  const char* text = std::getenv("BITATTN_MMA_TEST_FACTOR");
  return text == nullptr ? 1U : std::strtoull(text, nullptr, 10);
}

std::vector<std::uint32_t> product(const Engine& engine, const Tile& t, PackedOperand& left,
                                   PackedOperand& right,
                                   const arith::TensorCoreRule& rule = arith::kHopperWide) {
  std::vector<float> c(t.c.size());
  std::memcpy(c.data(), t.c.data(), t.c.size() * sizeof(float));
  engine.pack(t.a, Side::left, left);
  engine.pack(t.b, Side::right, right);
  engine.multiply(left, right, t.start, c.data(), t.ldc, rule);
  std::vector<std::uint32_t> bits(c.size());
  std::memcpy(bits.data(), c.data(), c.size() * sizeof(float));
  return bits;
}

/// Compares all engines with the scalar one; the packed operands are reused from tile to tile as callers do.
class Engines : public ::testing::Test {
 protected:
  Engines() : left_(mma::engines().size()), right_(mma::engines().size()) {}

  /// False and a failure on the first difference.
  bool same(const Tile& t, const std::string& what, const arith::TensorCoreRule& rule = arith::kHopperWide) {
    const auto engines = mma::engines();
    const std::vector<std::uint32_t> expected = product(*engines[0], t, left_[0], right_[0], rule);
    for (std::size_t e = 1; e < engines.size(); ++e) {
      const std::vector<std::uint32_t> got = product(*engines[e], t, left_[e], right_[e], rule);
      for (std::size_t i = 0; i < got.size(); ++i) {
        if (got[i] == expected[i]) continue;
        ADD_FAILURE() << what << ": " << engines[e]->name() << " gives " << std::hex << got[i]
                      << ", the model " << expected[i] << std::dec << " at ("
                      << i / static_cast<std::size_t>(t.ldc) << ", " << i % static_cast<std::size_t>(t.ldc)
                      << ") of " << t.a.rows << " x " << t.b.rows << " x " << t.a.k << " onto " << std::hex
                      << t.c[i] << (t.start == mma::Start::zero ? " (ignored)" : "");
        return false;
      }
    }
    steps_ += static_cast<std::uint64_t>(t.a.rows) * static_cast<std::uint64_t>(t.b.rows) *
              static_cast<std::uint64_t>((t.a.k + 15) / 16);
    return true;
  }

  std::uint64_t steps_ = 0;

 private:
  std::vector<PackedOperand> left_, right_;
};

class EnginesOnTiles : public Engines, public ::testing::WithParamInterface<int> {};

TEST_P(EnginesOnTiles, GiveTheModelsBits) {
  const auto kind = static_cast<test::TileKind>(GetParam());
  test::TileMaker maker(1000U + static_cast<std::uint64_t>(GetParam()));
  const std::uint64_t wanted = 1'000'000U * factor();
  for (int n = 0; steps_ < wanted; ++n) {
    if (!same(maker.make(kind), "tile " + std::to_string(n))) return;
  }
  RecordProperty("fused_steps", std::to_string(steps_));
}

INSTANTIATE_TEST_SUITE_P(Kinds, EnginesOnTiles,
                         ::testing::Range(0, static_cast<int>(test::kTileKindNames.size())),
                         [](const auto& p) {
                           return std::string(test::kTileKindNames[static_cast<std::size_t>(p.param)]);
                         });

/// The arithmetic room's cases, one to a diagonal element of a small tile; beside it rows and columns of
/// other cases.
class EnginesOnCases : public Engines, public ::testing::WithParamInterface<int> {};

TEST_P(EnginesOnCases, GiveTheModelsBits) {
  const auto kind = static_cast<test::CaseKind>(GetParam());
  test::RandomBits random(2000U + static_cast<std::uint64_t>(GetParam()));
  test::detail::CaseMaker maker(test::kSlowBf16, test::kSlowBf16, 16, random);
  const std::uint64_t wanted = 300'000U * factor();
  for (int n = 0; steps_ < wanted; ++n) {
    const int size = random.one_in(2) ? 1 : random.between(2, 6);
    Tile t;
    t.a_memory.resize(static_cast<std::size_t>(size) * 16U);
    t.b_memory.resize(t.a_memory.size());
    t.a = mma::whole(t.a_memory.data(), 16, 1, size, 16);
    t.b = mma::whole(t.b_memory.data(), 16, 1, size, 16);
    t.ldc = size;
    t.start = mma::Start::accumulate;
    t.c.resize(static_cast<std::size_t>(size) * static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < static_cast<std::size_t>(size); ++i) {
      const test::DotProductCase c = maker.make(kind);
      std::copy_n(c.a.begin(), 16, t.a_memory.begin() + static_cast<std::ptrdiff_t>(16 * i));
      std::copy_n(c.b.begin(), 16, t.b_memory.begin() + static_cast<std::ptrdiff_t>(16 * i));
      for (std::size_t j = 0; j < static_cast<std::size_t>(size); ++j)
        t.c[i * static_cast<std::size_t>(size) + j] = c.c;
    }
    if (!same(t, "case " + std::to_string(n))) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, EnginesOnCases, ::testing::Range(0, test::kCaseKinds), [](const auto& p) {
  std::string name = test::kCaseKindNames[static_cast<std::size_t>(p.param)];
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
});

TEST_F(Engines, AgreeOnLongChainsIntoOneAccumulator) {
  // 256 products after products of 16 to 176 each, as dV and dK collect a whole column of tiles.
  test::TileMaker maker(3);
  for (int chain = 0; chain < 12; ++chain) {
    const auto engines = mma::engines();
    std::vector<std::vector<std::uint32_t>> c(engines.size());
    std::vector<PackedOperand> left(engines.size());
    std::vector<PackedOperand> right(engines.size());
    for (int link = 0; link < 256; ++link) {
      test::RandomBits& random = maker.random();
      const int k = 16 * random.between(1, 11);
      const int rows = 3;
      const int columns = 70;
      Tile t;
      const bool probabilities = chain % 2 == 0;
      for (int i = 0; i < rows * k; ++i) {
        const std::uint32_t w =
            static_cast<std::uint32_t>(127 - random.between(0, 12)) << 7U | (random.bits32() & 0x807fU);
        t.a_memory.push_back(static_cast<std::uint16_t>(probabilities ? w & 0x7fffU : w));
      }
      for (int i = 0; i < columns * k; ++i) {
        t.b_memory.push_back(static_cast<std::uint16_t>(
            static_cast<std::uint32_t>(127 + random.between(-5, 1)) << 7U | (random.bits32() & 0x807fU)));
      }
      t.a = mma::whole(t.a_memory.data(), k, 1, rows, k);
      t.b = mma::whole(t.b_memory.data(), 1, columns, columns, k);
      t.ldc = columns;
      t.start = link == 0 ? mma::Start::zero : mma::Start::accumulate;
      for (std::size_t e = 0; e < engines.size(); ++e) {
        if (link == 0) c[e].assign(static_cast<std::size_t>(rows * columns), 0x7fc00000U);
        t.c = c[e];
        c[e] = product(*engines[e], t, left[e], right[e]);
        ASSERT_EQ(c[e], c[0]) << engines[e]->name() << ", link " << link;
      }
    }
  }
}

TEST_F(Engines, FollowOtherRulesThroughTheScalarModel) {
  arith::TensorCoreRule nearest = arith::kHopperWide;
  nearest.round_to_nearest = true;
  arith::TensorCoreRule narrower = arith::kHopperWide;
  narrower.aligned_fraction_bits = 24;
  arith::TensorCoreRule floorless = arith::kHopperWide;
  floorless.exponent_floor = -200;
  test::TileMaker maker(4);
  for (int n = 0; n < 60; ++n) {
    const auto kind = static_cast<test::TileKind>(
        maker.random().between(0, static_cast<int>(test::kTileKindNames.size()) - 1));
    const Tile t = maker.make(kind);
    for (const arith::TensorCoreRule& rule : {nearest, narrower, floorless})
      ASSERT_TRUE(same(t, "rule", rule));
  }
}

TEST_F(Engines, TheTestCanTell) {
  // A rule one bit off differs from the chip's on ordinary tiles: the comparisons above do look at the last
  // bits.
  arith::TensorCoreRule narrower = arith::kHopperWide;
  narrower.aligned_fraction_bits = 24;
  test::TileMaker maker(5);
  const Engine& engine = *mma::engines().back();
  PackedOperand left;
  PackedOperand right;
  int differing = 0;
  for (int n = 0; n < 20; ++n) {
    const Tile t = maker.make(test::TileKind::ordinary);
    if (product(engine, t, left, right) != product(engine, t, left, right, narrower)) ++differing;
  }
  EXPECT_GT(differing, 10);
}

TEST_F(Engines, TakeEmptyOperands) {
  for (const Engine* engine : mma::engines()) {
    for (const auto& [rows, columns, k] : {std::array{0, 3, 16}, std::array{3, 0, 16}, std::array{2, 3, 0}}) {
      const mma::MatrixView a = mma::whole(nullptr, 0, 1, rows, k);
      const mma::MatrixView b = mma::whole(nullptr, 0, 1, columns, k);
      const mma::MatrixView a_in_memory{nullptr, 0, 1, rows, k, 0, 0};
      const mma::MatrixView b_in_memory{nullptr, 0, 1, columns, k, 0, 0};
      const bool empty_memory = rows * k == 0 && columns * k == 0;
      const PackedOperand left = engine->packed(empty_memory ? a : a_in_memory, Side::left);
      const PackedOperand right = engine->packed(empty_memory ? b : b_in_memory, Side::right);
      std::vector<float> c(6, -0.0F);
      engine->multiply(left, right, mma::Start::accumulate, c.data(), 3, arith::kHopperWide);
      for (const float x : c) EXPECT_EQ(arith::to_bits(x), 0x80000000U) << engine->name();
      engine->multiply(left, right, mma::Start::zero, c.data(), 3, arith::kHopperWide);
      for (const float x : c)
        EXPECT_EQ(arith::to_bits(x), rows * columns == 6 ? 0U : 0x80000000U) << engine->name();
    }
  }
}

}  // namespace
}  // namespace bitattn
