// What emu/arith computes while it is compiled: values that docs/spec/hopper-arithmetic.md states, checked by
// the compiler. The test that runs says only that this file was compiled.

#include <gtest/gtest.h>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/mufu.hpp"
#include "emu/arith/narrow_float.hpp"
#include "emu/arith/tensor_core.hpp"

namespace bitattn::arith {
namespace {

// Section 3: exact powers of two, 1 for tiny arguments of either sign, no subnormal results.
static_assert(mufu::ex2(to_bits(0.0F)) == to_bits(1.0F));
static_assert(mufu::ex2(to_bits(-0x1.fffffep-24F)) == to_bits(1.0F));
static_assert(mufu::ex2(to_bits(10.0F)) == to_bits(1024.0F));
static_assert(mufu::ex2(to_bits(-126.0F)) == kSmallestNormal);
static_assert(mufu::ex2(to_bits(-0x1.f80002p+6F)) == 0U);
static_assert(mufu::ex2(to_bits(128.0F)) == kInfinity);
static_assert(mufu::ex2(kSignBit | kInfinity) == 0U);
static_assert(mufu::ex2(0xffc00001U) == kQuietNan);

// Section 4: lg2(1) is +0; powers of two below 1 are not exact; near 1.
static_assert(mufu::lg2(kOne) == 0U);
static_assert(mufu::lg2(to_bits(2.0F)) == to_bits(1.0F));
static_assert(mufu::lg2(to_bits(0.5F)) == 0xbf7ffffeU);
static_assert(mufu::lg2(kOne + 1U) == 0x3495f600U);
static_assert(mufu::lg2(0x007fffffU) == (kSignBit | kInfinity));
static_assert(mufu::lg2(to_bits(-1.0F)) == kQuietNan);

// Section 5: powers of two are exact, no subnormal results.
static_assert(mufu::rcp(to_bits(0x1p+126F)) == kSmallestNormal);
static_assert(mufu::rcp(to_bits(-0x1.000002p+126F)) == kSignBit);
static_assert(mufu::rcp(to_bits(-4.0F)) == to_bits(-0.25F));
static_assert(mufu::rcp(kSignBit | 1U) == (kSignBit | kInfinity));

// Section 5b.
static_assert(mufu::rsqrt(to_bits(0.0625F)) == to_bits(4.0F));
static_assert(mufu::rsqrt(kSignBit) == (kSignBit | kInfinity));
static_assert(mufu::tanh(0x80000001U) == 0x80000001U);
static_assert(mufu::tanh(to_bits(-8.0F)) == to_bits(-1.0F));

// Section 7: ties to even, NaN, overflow.
static_assert(bf16_from_fp32(0x3f808000U) == 0x3f80U);
static_assert(bf16_from_fp32(0x3f818000U) == 0x3f82U);
static_assert(bf16_from_fp32(0x7f7f8000U) == 0x7f80U);
static_assert(bf16_from_fp32(0xff800001U) == 0x7fffU);
static_assert(to_bits(fp32_from_bf16(0x3f80U)) == kOne);
static_assert(f16_from_fp32(to_bits(65520.0F)) == 0x7c00U);
static_assert(e4m3_from_fp32(kSignBit | kInfinity) == 0xfeU);
static_assert(e5m2_from_fp32(to_bits(1e9F)) == 0x7bU);
static_assert(f16_from_e4m3(0x01U) == f16_from_fp32(to_bits(0x1p-9F)));

// Section 9: -0 < +0, one NaN loses, subnormals are flushed.
static_assert(to_bits(ftz::max(-0.0F, 0.0F)) == 0U);
static_assert(to_bits(ftz::min(0.0F, -0.0F)) == kSignBit);
static_assert(to_bits(ftz::max(from_bits(kQuietNan), -1.0F)) == to_bits(-1.0F));
static_assert(to_bits(ftz::max(from_bits(0x807fffffU), from_bits(0xff800000U))) == kSignBit);
static_assert(to_bits(max(from_bits(0x807fffffU), from_bits(0xff800000U))) == 0x807fffffU);
static_assert(to_bits(ftz::max_nan(1.0F, from_bits(0x7f800001U))) == kQuietNan);

// Section 1: one fused step of sixteen products.
struct Step {
  std::uint16_t a[16] = {}, b[16] = {};
  std::uint32_t c = 0;
  constexpr std::uint32_t run(TensorCoreRule rule = kHopperWide) const { return mma_bf16_k16(a, b, c, rule); }
};
constexpr std::uint16_t kBf16One = 0x3f80U;

constexpr Step kMinusZeros = [] {  // -0 + -0 is +0
  Step s;
  s.a[0] = 0x8000U;
  s.b[0] = kBf16One;
  s.c = kSignBit;
  return s;
}();
static_assert(kMinusZeros.run() == 0U);

constexpr Step kOneAndSmall = [] {  // 1 - 2^-26 is cut off term by term: 2^-26 disappears, 2^-25 takes a unit
  Step s;
  s.a[0] = kBf16One;
  s.b[0] = kBf16One;
  s.a[1] = 0x3280U;  // 2^-26
  s.b[1] = 0xbf80U;  // -1
  return s;
}();
static_assert(kOneAndSmall.run() == kOne);
static_assert(kOneAndSmall.run({26, 23, -133}) == 0x3f7fffffU);

constexpr Step kOverflow = [] {  // infinity and not the largest number; the two products alone are finite
  Step s;
  s.a[0] = s.a[1] = 0x7f7fU;
  s.b[0] = s.b[1] = kBf16One;
  return s;
}();
static_assert(kOverflow.run() == kInfinity);

constexpr Step kZeroTimesInfinity = [] {
  Step s;
  s.a[0] = 0x7f80U;
  return s;
}();
static_assert(kZeroTimesInfinity.run() == kQuietNan);

TEST(Constexpr, ValuesOfThePageHoldAtCompileTime) {
  SUCCEED();
}

}  // namespace
}  // namespace bitattn::arith
