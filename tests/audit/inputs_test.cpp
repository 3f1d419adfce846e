// What is said of the inputs: norms, the largest logit, NaN and infinities.

#include "audit/inputs.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "audit/diagnose.hpp"
#include "emu/arith/bf16.hpp"
#include "tests/audit/problems.hpp"

namespace {

using namespace bitattn;

TEST(Inputs, NormsAndLargestLogitOfAHandMadeProblem) {
  Problem p = test::blank({1, 2, 2, 1, 1, 64});
  const auto word = [](float x) { return arith::bf16_from_fp32(x); };
  p.q.data[0] = word(3.0F);  // q_0 = (3, 4, 0, …)
  p.q.data[1] = word(4.0F);
  p.k.data[64] = word(-2.0F);  // k_1 = (-2, 0, …)
  const audit::InputSummary s = audit::summarize_inputs(p);
  EXPECT_DOUBLE_EQ(s.mean_q_norm, 2.5);
  EXPECT_DOUBLE_EQ(s.mean_k_norm, 1.0);
  EXPECT_DOUBLE_EQ(s.largest_mean_key_norm, 1.0);
  EXPECT_DOUBLE_EQ(s.largest_logit, 6.0 / 8);
  EXPECT_EQ(s.logit_row, 0U);
  EXPECT_EQ(s.logit_key, 1U);
  EXPECT_EQ(s.visible_pairs, 4U);
  p.causal = true;  // now row 0 does not see key 1
  EXPECT_DOUBLE_EQ(audit::summarize_inputs(p).largest_logit, 0.0);
  EXPECT_EQ(audit::summarize_inputs(p).visible_pairs, 3U);
}

TEST(Inputs, WhereNothingIsFiniteThereAreNoFigures) {
  Problem p = test::blank({1, 3, 3, 1, 1, 64});
  for (std::uint16_t& x : p.q.data) x = 0x7fc0U;
  const audit::InputSummary s = audit::summarize_inputs(p);
  EXPECT_TRUE(std::isnan(s.mean_q_norm));
  EXPECT_DOUBLE_EQ(s.mean_k_norm, 0.0);
  EXPECT_TRUE(std::isnan(s.largest_logit));
  for (std::uint16_t& x : p.k.data) x = 0x7f80U;
  EXPECT_TRUE(std::isnan(audit::summarize_inputs(p).largest_mean_key_norm));
  const audit::InputSummary none = audit::summarize_inputs(test::blank({1, 3, 0, 1, 1, 64}));
  EXPECT_TRUE(std::isnan(none.largest_logit));
  EXPECT_TRUE(std::isnan(none.largest_mean_key_norm));
  EXPECT_EQ(none.visible_pairs, 0U);
}

TEST(Inputs, LargeProblemsAreSampledAndSaySo) {
  Problem p = test::blank({1, 100, 100, 2, 1, 64});
  test::fill(p, 1);
  const audit::InputSummary all = audit::summarize_inputs(p);
  EXPECT_EQ(all.logit_rows, 100U);
  const audit::InputSummary some = audit::summarize_inputs(p, 100.0 * 100 * 2 * 64 / 4);
  EXPECT_EQ(some.logit_rows, 25U);
  EXPECT_EQ(some.logit_all_rows, 100U);
  EXPECT_LE(some.largest_logit, all.largest_logit);
  EXPECT_GT(some.largest_logit, 0);
}

TEST(Inputs, SpecialValuesAreCountedPlacedAndFollowed) {
  const Capture capture = test::bundled("fa3/special_causal_s200.h5");
  audit::DiagnoseOptions options;
  options.reference = "";
  const audit::Diagnosis d = audit::diagnose(capture, options);
  ASSERT_EQ(d.inputs.specials.size(), 4U);
  EXPECT_EQ(d.inputs.specials[0].tensor, "q");
  EXPECT_EQ(d.inputs.specials[0].nans, 1U);
  EXPECT_EQ(d.inputs.specials[0].infinities, 1U);
  EXPECT_EQ(d.inputs.specials[0].rows_or_keys, 2U);
  EXPECT_EQ(d.inputs.specials[0].first->row, 50U);
  EXPECT_TRUE(d.against_recorded->equal());
  // How far they spread is counted in the emulated outputs, which are the recorded ones.
  for (const auto& [tensor, words] :
       {std::pair{"out", &capture.recorded.out}, std::pair{"dq", &capture.recorded.dq},
        std::pair{"dk", &capture.recorded.dk}, std::pair{"dv", &capture.recorded.dv}}) {
    std::size_t rows = 0;
    std::size_t values = 0;
    for (std::size_t at = 0; at < words->size(); at += 128) {
      std::size_t here = 0;
      for (std::size_t i = 0; i < 128; ++i) here += (words->data[at + i] & 0x7f80U) == 0x7f80U ? 1 : 0;
      rows += here > 0 ? 1 : 0;
      values += here;
    }
    bool found = values == 0;
    for (const audit::SpecialValues& s : d.specials) {
      if (s.tensor != tensor) continue;
      found = true;
      EXPECT_EQ(s.count(), values) << tensor;
      EXPECT_EQ(s.rows_or_keys, rows) << tensor;
    }
    EXPECT_TRUE(found) << tensor;
  }
  // Rows whose sums are not finite are left out of the root mean squares, and said so.
  EXPECT_GT(d.whole.before_cast.not_finite, 0U);
  EXPECT_EQ(d.whole.before_cast.rows + d.whole.before_cast.not_finite, 200U);
  EXPECT_GT(d.whole.residue.rows, 0U);
  EXPECT_TRUE(std::isfinite(d.whole.residue.rms));
  // Nor do they spoil what the finite rows put into dK.
  for (const double x : d.leak_dk_norm.data) ASSERT_TRUE(std::isfinite(x));
}

}  // namespace
