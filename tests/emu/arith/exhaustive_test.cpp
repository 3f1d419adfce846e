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

}  // namespace
}  // namespace bitattn::test
