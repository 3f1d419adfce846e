// The vectorised row of fused multiply-adds gives the scalar model's bits, for every class of numbers.

#include "emu/kernels/remedies/add_scaled.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "emu/arith/fp32_ftz.hpp"
#include "emu/mma/tile_product.hpp"
#include "tests/emu/arith/random_bits.hpp"

namespace bitattn {
namespace {

float any_number(test::RandomBits& random) {
  const auto of_exponent = [&](int exponent) {
    const std::uint32_t biased = static_cast<std::uint32_t>(exponent + 127) << 23U;
    return arith::from_bits((random.bits32() & 0x807fffffU) | biased);
  };
  constexpr std::uint32_t kSpecial[] = {0U,          0x80000000U, 0x7f800000U, 0xff800000U, 0x7fffffffU,
                                        0xffc00000U, 0x00800000U, 0x007fffffU, 0x80000001U};
  switch (random.between(0, 7)) {
    case 0:
      return arith::from_bits(random.bits32());
    case 1:
      return arith::from_bits(kSpecial[random.between(0, 8)]);
    case 2:
      return of_exponent(random.between(-126, -120));
    case 3:
      return of_exponent(random.between(-70, -56));  // products at the flush threshold
    case 4:
      return of_exponent(random.between(60, 66));
    default:
      return of_exponent(random.between(-12, 8));
  }
}

TEST(AddScaled, EveryEngineGivesTheScalarBits) {
  test::RandomBits random(77);
  std::size_t flushed = 0;
  std::size_t nans = 0;
  for (const mma::Engine* engine : mma::engines()) {
    const kernels::remedies::AddScaled add(profile::Arithmetic{}, engine->name());
    for (int trial = 0; trial < 20000; ++trial) {
      const int n = random.between(1, 70);
      std::vector<float> x(static_cast<std::size_t>(n));
      std::vector<float> sum(x.size());
      const float factor = any_number(random);
      for (std::size_t j = 0; j < x.size(); ++j) {
        x[j] = any_number(random);
        sum[j] = random.between(0, 3) == 0 ? 0.0F : any_number(random);
      }
      std::vector<float> got = sum;
      add(factor, x.data(), got.data(), n);
      for (std::size_t j = 0; j < x.size(); ++j) {
        const float expected = arith::ftz::fma(factor, x[j], sum[j]);
        ASSERT_EQ(arith::to_bits(got[j]), arith::to_bits(expected))
            << engine->name() << ": fma(" << factor << ", " << x[j] << ", " << sum[j] << ')';
        nans += arith::is_nan(arith::to_bits(expected)) ? 1 : 0;
        flushed += expected == 0 && factor != 0 && x[j] != 0 ? 1 : 0;
      }
    }
  }
  EXPECT_GT(flushed, 1000U);
  EXPECT_GT(nans, 1000U);
}

TEST(AddScaled, ProfilesWithoutFlushKeepSubnormals) {
  profile::Arithmetic arithmetic;
  arithmetic.flush_subnormals = false;
  for (const mma::Engine* engine : mma::engines()) {
    const kernels::remedies::AddScaled add(arithmetic, engine->name());
    const std::vector<float> x(20, arith::from_bits(3));
    std::vector<float> sum(20, 0.0F);
    add(2.0F, x.data(), sum.data(), 20);
    for (const float s : sum) EXPECT_EQ(arith::to_bits(s), 6U);
  }
}

}  // namespace
}  // namespace bitattn
