// Witnesses: the laws hold for the rounded truth, their noise is that of rounding, and on recorded kernels
// they show what the kernel's own rounding adds.

#include "audit/witness.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "backends/backend.hpp"
#include "emu/arith/bf16.hpp"
#include "tests/audit/problems.hpp"

namespace {

using namespace bitattn;
using audit::Law;

std::uint16_t word(float x) {
  return arith::bf16_from_fp32(x);
}

const audit::WitnessOfLaw& of(const audit::Witness& witness, Law law) {
  return witness.laws.at(static_cast<std::size_t>(law));
}

Capture with_truth(Problem problem) {
  Capture capture{"truth", std::move(problem), {}};
  capture.recorded = make_backend("reference")->run(capture, {});
  return capture;
}

TEST(Witness, FiguresOfAHandMadeCapture) {
  Capture c{"hand made", test::blank({1, 2, 2, 1, 1, 64}), {}};
  c.recorded.dk = Bf16Tensor(c.problem.k_shape());
  c.recorded.dq = Bf16Tensor(c.problem.q_shape());
  c.problem.q.data[3] = word(2.0F);
  c.problem.k.data[64 + 5] = word(-8.0F);
  c.recorded.dq.data[3] = word(1.5F);         // ulp 2^-7, so half an ulp is 2^-8
  c.recorded.dk.data[5] = word(3.0F);         // half an ulp 2^-7
  c.recorded.dk.data[64 + 5] = word(-0.25F);  // half an ulp 2^-10
  const audit::Witness w = audit::witness(c);
  EXPECT_EQ(of(w, Law::out_dv_balance).not_checked, "not recorded: out, dv");
  EXPECT_TRUE(w.any_checked());

  ASSERT_EQ(of(w, Law::dk_sum).heads.size(), 1U);
  const audit::LawInHead& sum = of(w, Law::dk_sum).heads[0];
  EXPECT_DOUBLE_EQ(sum.residual, 2.75);
  EXPECT_DOUBLE_EQ(sum.noise, std::sqrt((0x1p-14 + 0x1p-20) / 3));
  EXPECT_DOUBLE_EQ(sum.least_noise, std::sqrt((3.0 * 3.0 + 0.25 * 0.25) * 0x1p-18 / 3));
  EXPECT_DOUBLE_EQ(sum.bound_share, 2.75 / (0x1p-7 + 0x1p-10));
  EXPECT_EQ(sum.column, 5U);
  EXPECT_TRUE(sum.broken());

  const audit::LawInHead& balance = of(w, Law::dq_dk_balance).heads[0];  // q.dq = 3, k.dk = 2
  EXPECT_DOUBLE_EQ(balance.residual, 1.0);
  EXPECT_DOUBLE_EQ(balance.noise, std::sqrt((0x1p-14 + 0x1p-14) / 3));  // 2 * 2^-8, 8 * 2^-10
  EXPECT_DOUBLE_EQ(balance.bound_share, 1.0 / (0x1p-7 + 0x1p-7));
}

TEST(Witness, WordsBelowTheSmallestNormalMayHaveBeenFlushed) {
  Capture c{"tiny", test::blank({1, 2, 2, 1, 1, 64}), {}};
  c.recorded.dk = Bf16Tensor(c.problem.k_shape());
  c.recorded.dk.data[0] = 0x0001U;
  const audit::LawInHead& sum = audit::witness(c).laws[0].heads[0];
  EXPECT_DOUBLE_EQ(sum.residual, 0x1p-133);
  EXPECT_DOUBLE_EQ(sum.noise, std::sqrt(128.0 / 3) * 0x1p-126);
  EXPECT_DOUBLE_EQ(sum.bound_share, 0x1p-133 / 0x1p-125);
}

/// Truth, correctly rounded: never broken, and the noise is what there is.
TEST(Witness, TheRoundedTruthObeysEveryLaw) {
  std::vector<Problem> problems;
  problems.push_back(test::blank({2, 70, 90, 4, 2, 64}));
  problems.back().causal = true;
  problems.push_back(test::blank({1, 120, 100, 2, 1, 40}));  // 20 rows see no key
  problems.back().causal = true;
  problems.push_back(test::blank({1, 96, 96, 2, 2, 64}));
  problems.back().window_left = 20;
  problems.back().window_right = 5;
  problems.push_back(test::blank({1, 80, 80, 1, 1, 128}));
  problems.back().softcap = 3;
  problems.push_back(test::blank_packed({33, 70, 1}, {40, 70, 9}, {1, 0, 0, 2, 1, 64}));
  std::uint64_t seed = 1;
  for (Problem& problem : problems) {
    test::fill(problem, ++seed);
    const bool softcap = problem.softcap > 0;
    const Capture capture = with_truth(problem);
    const audit::Witness w = audit::witness(capture);
    EXPECT_FALSE(w.broken());
    for (const audit::WitnessOfLaw& law : w.laws) {
      if (law.law == Law::dk_sum && softcap) {
        EXPECT_EQ(law.not_checked, "no law with a softcap");
        continue;
      }
      ASSERT_EQ(law.heads.size(), problem.batch * problem.heads_kv);
      EXPECT_LT(law.farthest()->bound_share, 0.7) << audit::law_text(law.law);
      EXPECT_LT(law.largest()->multiple(), 3.5) << audit::law_text(law.law);
      // The vector law has head_dim figures in each head, so its pooled multiple is near 1.
      if (law.law == Law::dk_sum) {
        EXPECT_NEAR(law.multiple(), 1, 0.2);
      }
    }
  }
}

TEST(Witness, AWrongGradientBreaksALaw) {
  Problem problem = test::blank({1, 64, 64, 2, 1, 64});
  test::fill(problem, 7);
  const Capture truth = with_truth(problem);
  const auto broken = [&](auto change) {
    Capture wrong = truth;
    change(wrong);
    const audit::Witness w = audit::witness(wrong);
    std::string laws;
    for (const audit::WitnessOfLaw& law : w.laws)
      laws += law.broken() > 0 ? std::string(audit::law_name(law.law)) + " " : "";
    return laws;
  };
  EXPECT_EQ(broken([](Capture&) {}), "");
  // One key's gradient lost.
  EXPECT_EQ(
      broken([](Capture& c) { std::fill_n(c.recorded.dk.data.begin() + 20 * 64, 64, std::uint16_t{0}); }),
      "dk_sum ");
  // Everything of dQ twice as large.
  EXPECT_EQ(broken([](Capture& c) {
              for (std::uint16_t& x : c.recorded.dq.data) x = static_cast<std::uint16_t>(x + 0x80U);
            }),
            "dq_dk_balance ");
  // The sign of dV.
  EXPECT_EQ(broken([](Capture& c) {
              for (std::uint16_t& x : c.recorded.dv.data) x = static_cast<std::uint16_t>(x ^ 0x8000U);
            }),
            "out_dv_balance ");
}

/// The bound is reached, not passed, by words that were all rounded the same way from a sum of 0.
TEST(Witness, TheBoundIsWhatRoundingCanDo) {
  Capture c{"worst", test::blank({1, 1, 515, 1, 1, 8}), {}};
  c.recorded.dk = Bf16Tensor(c.problem.k_shape());
  // 256 values just below 1 + 3/2 * 2^-7, all rounded to 1 + 2^-7, and 259 of -1, which BF16 holds: they sum
  // to 0.
  for (std::size_t j = 0; j < 515; ++j) c.recorded.dk.data[j * 8] = j < 256 ? word(1 + 0x1p-7F) : word(-1.0F);
  const audit::LawInHead& sum = audit::witness(c).laws[0].heads[0];
  EXPECT_FALSE(sum.broken());
  EXPECT_GT(sum.bound_share, 0.3);
  EXPECT_GT(sum.multiple(), 5);  // the noise takes the roundings for independent, which these are not
}

TEST(Witness, NaNAndInfinitiesLeaveTheirHeadOut) {
  Problem problem = test::blank({2, 20, 20, 2, 2, 64});
  test::fill(problem, 9);
  Capture c = with_truth(problem);
  c.recorded.dk.data[64] = 0x7f80U;  // b 0, kv head 1
  const audit::Witness w = audit::witness(c);
  EXPECT_FALSE(w.broken());
  EXPECT_EQ(of(w, Law::dk_sum).finite(), 3U);
  EXPECT_FALSE(of(w, Law::dk_sum).heads[1].finite);
  EXPECT_TRUE(std::isnan(of(w, Law::dk_sum).heads[1].residual));
  EXPECT_EQ(of(w, Law::dq_dk_balance).finite(), 3U);
  EXPECT_EQ(of(w, Law::out_dv_balance).finite(), 4U);
  EXPECT_TRUE(std::isfinite(of(w, Law::dk_sum).multiple()));
  const audit::Witness special = audit::witness(test::bundled("fa3/special_causal_s200.h5"));
  EXPECT_FALSE(special.broken());
  EXPECT_EQ(of(special, Law::dk_sum).finite(), 0U);
  EXPECT_TRUE(std::isnan(of(special, Law::dk_sum).multiple()));
}

TEST(Witness, NothingRecordedIsNothingChecked) {
  const Capture c{"problem", test::blank({}), {}};
  const audit::Witness w = audit::witness(c);
  EXPECT_FALSE(w.any_checked());
  EXPECT_FALSE(w.broken());
  EXPECT_EQ(of(w, Law::dq_dk_balance).not_checked, "not recorded: dq, dk");
}

/// docs/witness.md, its table; computed independently with NumPy in float64.
TEST(Witness, FiguresOfTheBundledCaptures) {
  struct Expected {
    const char* file;
    double dk_sum, least;  // multiple of the noise, of the least noise
    bool broken;
  };
  const Expected all[] = {
      {"fa3/d64_full_s64_normal.h5", 1.96, 2.9, false},
      {"fa3/d128_causal_q333_k457_normal.h5", 1.93, 2.8, false},
      {"fa3/d128_local64x16_s320_normal.h5", 1.97, 2.9, false},
      {"fa3/d256_full_s100_normal.h5", 2.18, 3.2, false},
      {"fa3/d128_full_s128_late.h5", 4.12, 6.1, true},
      {"fa3/d64_causal_s256_late.h5", 2.59, 3.8, true},
      {"fa3/d96_causal_s256_late.h5", 4.59, 6.7, false},
      {"fa3/d192_causal_s192_late.h5", 2.58, 3.8, true},
      {"fa3/d128_causal_s256_peaky.h5", 16.87, 25, true},
      {"real-run/step_000783_layer_0.h5", 6.79, 10, true},
  };
  for (const Expected& expected : all) {
    const audit::Witness w = audit::witness(test::bundled(expected.file));
    EXPECT_NEAR(of(w, Law::dk_sum).multiple(), expected.dk_sum, 0.006) << expected.file;
    EXPECT_NEAR(of(w, Law::dk_sum).multiple_of_least() / expected.least, 1, 0.03) << expected.file;
    EXPECT_EQ(of(w, Law::dk_sum).broken() > 0, expected.broken) << expected.file;
    // The other two see no drift: a row's sum enters both sides alike.
    for (const Law law : {Law::dq_dk_balance, Law::out_dv_balance}) {
      EXPECT_LT(of(w, law).multiple(), 3) << expected.file;
      EXPECT_EQ(of(w, law).broken(), 0U) << expected.file;
    }
  }
}

}  // namespace
