// Proves: the fused step that the GPU emulator computes from fp32 multiplies and integer sums gives the bits
// of the model, on all kinds of awkward operands, and takes its fast, low and careful ways where it should.

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>

#include "gpu/emulator/fused_step.hpp"
#include "gpu/probe/dot_products.hpp"
#include "tests/emu/arith/dot_product_cases.hpp"

namespace bitattn::gpu::emulator {
namespace {

using test::CaseKind;

struct Step {
  float a[kStep], b[kStep];
  std::uint16_t a_words[kStep], b_words[kStep];
  std::uint32_t c;
};

template <class Words>
Step step_of(const Words& a, const Words& b, std::uint32_t c) {
  Step step{};
  for (int k = 0; k < kStep; ++k) {
    const auto at = static_cast<std::size_t>(k);
    step.a_words[k] = static_cast<std::uint16_t>(a[at]);
    step.b_words[k] = static_cast<std::uint16_t>(b[at]);
    step.a[k] = arith::from_bits(static_cast<std::uint32_t>(a[at]) << 16U);
    step.b[k] = arith::from_bits(static_cast<std::uint32_t>(b[at]) << 16U);
  }
  step.c = c;
  return step;
}

std::uint32_t model(const Step& step) {
  return arith::mma_bf16_k16(step.a_words, step.b_words, step.c);
}

std::uint32_t ours(const Step& step) {
  return arith::to_bits(whole_step(step.a, step.b, arith::from_bits(step.c)));
}

std::string shown(const Step& step) {
  std::string text;
  char word[16];
  for (const auto& words : {step.a_words, step.b_words}) {
    for (int k = 0; k < kStep; ++k) {
      std::snprintf(word, sizeof word, "%04x ", words[k]);
      text += word;
    }
    text += "| ";
  }
  std::snprintf(word, sizeof word, "%08x", step.c);
  return text + word;
}

TEST(EmulatorStep, EveryKindOfTheTensorCoreTests) {
  constexpr std::uint64_t kCases = 20'000;
  const test::SlowFormat bf16 = test::kSlowBf16;
  for (int kind = 0; kind < test::kCaseKinds; ++kind) {
    for (std::uint64_t n = 0; n < kCases; ++n) {
      const auto made = test::dot_product_case(static_cast<CaseKind>(kind), n, bf16, bf16, kStep);
      const Step step = step_of(made.a, made.b, made.c);
      ASSERT_EQ(ours(step), model(step))
          << test::kCaseKindNames[static_cast<std::size_t>(kind)] << " " << n << ": " << shown(step);
    }
  }
}

TEST(EmulatorStep, EveryKindOfTheProbe) {
  using arith::Bf16;
  namespace p = bitattn::gpu::probe;
  for (std::uint64_t tile = 0; tile < 24 * 400; ++tile) {
    const p::TileShape shape = p::tile_shape<Bf16, Bf16>(tile, kStep);
    for (int line = 0; line < 24; ++line) {
      std::array<std::uint32_t, kStep> a{};
      std::array<std::uint32_t, kStep> b{};
      for (int k = 0; k < kStep; ++k) {
        a[static_cast<std::size_t>(k)] = p::operand_word<Bf16, p::Operand::a>(shape, line, k);
        b[static_cast<std::size_t>(k)] = p::operand_word<Bf16, p::Operand::b>(shape, line, k);
      }
      Step step = step_of(a, b, 0U);
      step.c = p::accumulator_word(shape, line, line, p::needs_products(shape) ? model(step) : 0U);
      ASSERT_EQ(ours(step), model(step)) << "tile " << tile << " line " << line << ": " << shown(step);
    }
  }
}

/// The sum of the terms at the edge of 32 bits: all significands at their largest, the accumulator too.
TEST(EmulatorStep, SumsThatDoNotFit32Bits) {
  test::RandomBits random(7);
  int beyond = 0;
  for (int n = 0; n < 200'000; ++n) {
    const bool negative = random.one_in(2);
    std::array<std::uint32_t, kStep> a{};
    std::array<std::uint32_t, kStep> b{};
    const int e = random.between(40, 200);
    for (std::size_t k = 0; k < kStep; ++k) {
      a[k] =
          static_cast<std::uint32_t>(e) << 7U | static_cast<std::uint32_t>(random.one_in(3) ? 0x7eU : 0x7fU);
      b[k] = (negative ? 0x8000U : 0U) | 127U << 7U |
             static_cast<std::uint32_t>(random.one_in(3) ? 0x7eU : 0x7fU);
    }
    const std::uint32_t c = (negative ? arith::kSignBit : 0U) |
                            static_cast<std::uint32_t>(e + random.between(-2, 0)) << 23U |
                            (0x7fffffU - (random.bits32() >> random.between(9, 31)));
    const Step step = step_of(a, b, c);
    std::int32_t sum = 0;
    const float up = scale_up(e);
    for (int k = 0; k < kStep; ++k) sum += product_term(step.a[k], step.b[k], up);
    std::uint32_t overflow = 0;
    (void)add_accumulator(sum, arith::from_bits(c), up, overflow);
    beyond += overflow >> 31U != 0U ? 1 : 0;
    ASSERT_EQ(ours(step), model(step)) << shown(step);
  }
  EXPECT_GT(beyond, 1000);
}

/// Both edges of the fast path, from both sides.
TEST(EmulatorStep, AlignmentsAroundTheGuards) {
  test::RandomBits random(11);
  std::array<int, 3> ways{};
  for (int n = 0; n < 1'000'000; ++n) {
    const int middle = random.one_in(2) ? random.between(kFloorM - 6, kSmallestM + 3)
                                        : random.between(kLargestM - 4, kLargestM + 8);
    std::array<std::uint32_t, kStep> a{};
    std::array<std::uint32_t, kStep> b{};
    for (std::size_t k = 0; k < kStep; ++k) {
      if (random.one_in(3)) continue;
      const int e = middle + 127 - random.between(0, random.one_in(2) ? 3 : 40);
      const int e_a = std::clamp(e / 2 + random.between(-60, 60), std::max(0, e - 254), std::min(254, e));
      a[k] = (random.bits32() & 0x807fU) | static_cast<std::uint32_t>(e_a) << 7U;
      b[k] = (random.bits32() & 0x807fU) | static_cast<std::uint32_t>(std::clamp(e - e_a, 0, 254)) << 7U;
    }
    std::uint32_t c = random.bits32() & 0x807fffffU;
    const int e_c = middle - random.between(-1, 30);
    c |= static_cast<std::uint32_t>(std::clamp(e_c, 0, 254)) << 23U;
    if (random.one_in(4)) c &= arith::kSignBit;
    const Step step = step_of(a, b, c);
    ASSERT_EQ(ours(step), model(step)) << shown(step);
    std::uint32_t pairs = kNoProducts;
    for (std::size_t k = 0; k < kStep; k += 2) {
      const auto pair = [k](const std::array<std::uint32_t, kStep>& v) {
        return exponent_half(v[k] << 16U) | exponent_half(v[k + 1] << 16U) << 16U;
      };
      pairs = greatest_sum(pair(a), pair(b), pairs);
    }
    const int m = alignment(greatest_of_halves(pairs), arith::from_bits(c));
    ++ways[is_fast(m) ? 0U : m < kSmallestM ? 1U : 2U];
  }
  for (const int count : ways) EXPECT_GT(count, 10'000);
}

/// Random bits in every word: infinities and NaNs among them.
TEST(EmulatorStep, AnyBits) {
  test::RandomBits random(13);
  for (int n = 0; n < 1'000'000; ++n) {
    std::array<std::uint32_t, kStep> a{};
    std::array<std::uint32_t, kStep> b{};
    for (std::size_t k = 0; k < kStep; ++k) {
      a[k] = random.bits32() & 0xffffU;
      b[k] = random.bits32() & 0xffffU;
    }
    const Step step = step_of(a, b, random.bits32());
    ASSERT_EQ(ours(step), model(step)) << shown(step);
  }
}

}  // namespace
}  // namespace bitattn::gpu::emulator
