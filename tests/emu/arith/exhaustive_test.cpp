// All 2^32 inputs of the special functions (against the digests that an H200 gave) and of the conversions
// (against the intervals of their rule). Label `exhaustive`: minutes, not part of the plain run.

#include <gtest/gtest.h>

#include <numeric>

#include "emu/arith/bf16.hpp"
#include "emu/arith/narrow_float.hpp"
#include "tests/emu/arith/sweep.hpp"

namespace bitattn::test {
namespace {

void sweep(const SweptFunction& function) {
  std::vector<std::uint32_t> blocks(512);
  std::iota(blocks.begin(), blocks.end(), 0U);
  EXPECT_EQ(differing_digests(function, blocks, true), "");
  fmt::print("{}: 4294967296 inputs in 512 digests\n", function.name);
}

TEST(Exhaustive, Ex2) {
  sweep(kSweptFunctions[0]);
}
TEST(Exhaustive, Lg2) {
  sweep(kSweptFunctions[1]);
}
TEST(Exhaustive, Rcp) {
  sweep(kSweptFunctions[2]);
}
TEST(Exhaustive, Rsqrt) {
  sweep(kSweptFunctions[3]);
}
TEST(Exhaustive, Tanh) {
  sweep(kSweptFunctions[4]);
}

TEST(Exhaustive, Bf16FromBits) {
  EXPECT_EQ(differing_conversions(kNarrowBf16, [](std::uint32_t x) { return arith::bf16_from_fp32(x); }), "");
}
TEST(Exhaustive, Bf16FromFloat) {
  EXPECT_EQ(differing_conversions(kNarrowBf16,
                                  [](std::uint32_t x) { return arith::bf16_from_fp32(arith::from_bits(x)); }),
            "");
}
TEST(Exhaustive, F16) {
  EXPECT_EQ(differing_conversions(kNarrowF16, [](std::uint32_t x) { return arith::f16_from_fp32(x); }), "");
}
TEST(Exhaustive, E4m3) {
  EXPECT_EQ(differing_conversions(kNarrowE4m3, [](std::uint32_t x) { return arith::e4m3_from_fp32(x); }), "");
}
TEST(Exhaustive, E5m2) {
  EXPECT_EQ(differing_conversions(kNarrowE5m2, [](std::uint32_t x) { return arith::e5m2_from_fp32(x); }), "");
}

// The sweep itself must be able to fail, and name what fails.
TEST(Exhaustive, AWrongConversionIsNamed) {
  const std::string text = differing_conversions(kNarrowBf16, [](std::uint32_t x) {
    const bool cut_off = x >= 0x3f80c000U && x <= 0x3f80ffffU;
    return cut_off ? x >> 16U : arith::bf16_from_fp32(x);
  });
  EXPECT_EQ(text,
            "bf16: inputs 0x3f80c000 (0x1.018p+0) .. 0x3f80ffff (0x1.01fffep+0) differ; the first gives "
            "0x3f80 and not "
            "0x3f81\nbf16: 16384 inputs differ in all\n");
}

}  // namespace
}  // namespace bitattn::test
