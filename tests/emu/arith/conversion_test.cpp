// Conversions to and from the narrow formats against intervals of exact values (narrow_rule.hpp). All 2^32
// inputs are in exhaustive_test.cpp; here are every boundary and, for BF16, every upper half.

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "emu/arith/bf16.hpp"
#include "emu/arith/narrow_float.hpp"
#include "tests/emu/arith/narrow_rule.hpp"
#include "tests/emu/arith/random_bits.hpp"
#include "tests/emu/arith/show.hpp"

namespace bitattn::test {
namespace {

template <class Convert>
void check_boundaries(const NarrowRule& rule, Convert&& convert) {
  Tally tally{rule.name};
  RandomBits random(static_cast<std::uint64_t>(rule.format.exponent_bits));
  for (const NarrowInterval& i : narrow_intervals(rule)) {
    const auto count = [&](std::uint32_t x) {
      const std::uint32_t code = convert(x);
      tally.count(code == i.code, [&] {
        return fmt::format("{} gives {} and not {}", show_fp32(x), show_bits(code, rule.digits()),
                           show_bits(i.code, rule.digits()));
      });
    };
    count(i.first);
    count(i.last);
    for (int n = 0; n < 6; ++n) {
      count(i.first + static_cast<std::uint32_t>(random.bits64() % (std::uint64_t{i.last} - i.first + 1U)));
    }
  }
  print_table("ends and inner points of every interval", {tally});
  EXPECT_EQ(tally.mismatches, 0U) << tally.first;
}

TEST(Conversion, Bf16) {
  check_boundaries(kNarrowBf16, [](std::uint32_t x) { return arith::bf16_from_fp32(x); });
}
TEST(Conversion, F16) {
  check_boundaries(kNarrowF16, [](std::uint32_t x) { return arith::f16_from_fp32(x); });
}
TEST(Conversion, E4m3) {
  check_boundaries(kNarrowE4m3, [](std::uint32_t x) { return arith::e4m3_from_fp32(x); });
}
TEST(Conversion, E5m2) {
  check_boundaries(kNarrowE5m2, [](std::uint32_t x) { return arith::e5m2_from_fp32(x); });
}

TEST(Conversion, Bf16FromEveryUpperHalf) {
  constexpr std::array<std::uint32_t, 12> kLowerHalves{0x0000U, 0x0001U, 0x0002U, 0x3fffU, 0x4000U, 0x7ffeU,
                                                       0x7fffU, 0x8000U, 0x8001U, 0xc000U, 0xfffeU, 0xffffU};
  const auto intervals = narrow_intervals(kNarrowBf16);
  auto interval = intervals.begin();
  Tally from_bits{"bf16_from_fp32(bits)"};
  Tally from_float{"bf16_from_fp32(float)"};
  for (std::uint32_t upper = 0; upper < 0x10000U; ++upper) {
    for (const std::uint32_t lower : kLowerHalves) {
      const std::uint32_t x = upper << 16U | lower;
      while (interval->last < x) ++interval;
      const auto count = [&](Tally& tally, std::uint16_t code) {
        tally.count(code == interval->code,
                    [&] { return fmt::format("{} gives {}", show_fp32(x), show_bf16(code)); });
      };
      count(from_bits, arith::bf16_from_fp32(x));
      count(from_float, arith::bf16_from_fp32(std::bit_cast<float>(x)));
    }
  }
  print_table("every upper half with twelve lower ones", {from_bits, from_float});
  EXPECT_EQ(from_bits.mismatches, 0U) << from_bits.first;
  EXPECT_EQ(from_float.mismatches, 0U) << from_float.first;
}

TEST(Conversion, Bf16ToFp32IsExactAndComesBack) {
  for (std::uint32_t v = 0; v < 0x10000U; ++v) {
    const auto code = static_cast<std::uint16_t>(v);
    const SlowOperand operand = slow_decode(v, kSlowBf16);
    const std::uint32_t wide = arith::fp32_bits_from_bf16(code);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(arith::fp32_from_bf16(code)), wide) << show_bf16(code);
    if (operand.nan) {
      EXPECT_EQ(arith::bf16_from_fp32(wide), arith::kBf16Nan) << show_bf16(code);
      continue;
    }
    EXPECT_EQ(arith::bf16_from_fp32(wide), code) << show_bf16(code);
    if (!operand.infinite) {
      EXPECT_EQ(exact_from_fp32(wide), slow_value(kSlowBf16, v)) << show_bf16(code);
      EXPECT_EQ(wide >> 31U != 0U, operand.negative) << show_bf16(code);
    }
  }
}

}  // namespace
}  // namespace bitattn::test
