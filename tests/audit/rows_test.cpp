// Choosing rows, and the truth of single rows.

#include <gtest/gtest.h>

#include <cmath>

#include "audit/diagnose.hpp"
#include "audit/errors.hpp"
#include "audit/row_choice.hpp"
#include "backends/backend.hpp"
#include "datasets/error.hpp"
#include "tests/audit/problems.hpp"

namespace {

using namespace bitattn;
using audit::parse_rows;
using audit::RowChoice;

TEST(RowChoice, ANumberIsTheWorstRows) {
  EXPECT_EQ(parse_rows("12").worst, 12U);
  EXPECT_TRUE(parse_rows("12").ranges.empty());
}

TEST(RowChoice, ListsAndRangesNameRowsHeadsAndSequences) {
  const RowChoice choice = parse_rows("5,100-120,3:7,1:2:0-4");
  ASSERT_EQ(choice.ranges.size(), 4U);
  EXPECT_EQ(choice.worst, 0U);
  EXPECT_EQ(choice.ranges[0].first, 5U);
  EXPECT_EQ(choice.ranges[0].last, 5U);
  EXPECT_FALSE(choice.ranges[0].head);
  EXPECT_EQ(choice.ranges[1].last, 120U);
  EXPECT_EQ(*choice.ranges[2].head, 3U);
  EXPECT_EQ(*choice.ranges[3].sequence, 1U);
  EXPECT_EQ(*choice.ranges[3].head, 2U);
  EXPECT_EQ(parse_rows("17-17").ranges.size(), 1U);
  EXPECT_EQ(parse_rows("17,").ranges.size(), 1U);
}

TEST(RowChoice, RefusesWhatIsNoRow) {
  for (const char* text :
       {"", "0", "x", "3x", "1-2-3", "5-3", "1:2:3:4", ",", "-1", "1,,x", ":", "99999999999999999999"}) {
    EXPECT_THROW(parse_rows(text), InputError) << text;
  }
}

TEST(RowChoice, ChecksRowsAgainstTheProblem) {
  Problem p = test::blank({2, 8, 4, 2, 1, 64});
  p.causal = true;  // bottom right: rows 0..3 see nothing
  EXPECT_EQ(audit::chosen_rows(p, parse_rows("2-5")).size(), 2 * 2 * 2U);
  EXPECT_EQ(audit::chosen_rows(p, parse_rows("1:1:5")).size(), 1U);
  EXPECT_THROW(audit::chosen_rows(p, parse_rows("8-8")), InputError);
  EXPECT_THROW(audit::chosen_rows(p, parse_rows("2:0")), InputError);
  EXPECT_THROW(audit::chosen_rows(p, parse_rows("2:0:0")), InputError);
}

TEST(WorstRows, ComeByFallingMagnitudeAndLeaveOutWhatIsNotFinite) {
  const Problem p = test::blank({1, 4, 4, 1, 1, 64});
  Fp64Tensor values(p.row_shape());
  values.data = {1.0, -3.0, std::nan(""), 2.0};
  const auto rows = audit::worst_rows(p, values, 2);
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0].row, 1U);
  EXPECT_EQ(rows[1].row, 3U);
  EXPECT_EQ(audit::worst_rows(p, values, 10).size(), 3U);
}

/// A row's truth from a problem of its own equals the same row of the whole truth.
void expect_same_truth(const Problem& problem) {
  Capture whole;
  whole.name = "whole";
  whole.problem = problem;
  RunOptions options;
  options.want_uncast = true;
  const auto reference = make_backend("reference");
  const Result truth = reference->run(whole, options);
  for (std::size_t b = 0; b < problem.batch; ++b) {
    const SequenceSpan span = problem.sequence(b);
    for (std::size_t i = 0; i < span.q_length; i += 3) {
      const KeyRange range =
          visible_keys(problem, static_cast<std::int64_t>(i), static_cast<std::int64_t>(span.q_length),
                       static_cast<std::int64_t>(span.k_length));
      if (range.first >= range.last) continue;
      for (std::size_t kv = 0; kv < problem.heads_kv; ++kv) {
        Capture one;
        one.name = "one";
        one.problem = audit::single_row_problem(problem, b, kv, i);
        check_problem(one.problem, "one");
        const Result row = reference->run(one, options);
        for (std::size_t g = 0; g < problem.group(); ++g) {
          const std::size_t h = kv * problem.group() + g;
          EXPECT_EQ(row.uncast.lse.data[g], truth.uncast.lse.data[problem.row_index(b, h, i)]);
          for (std::size_t d = 0; d < problem.head_dim; ++d) {
            const std::size_t at = (span.q_begin + i) * problem.q_stride() + h * problem.head_dim + d;
            ASSERT_EQ(row.uncast.dq.data[g * problem.head_dim + d], truth.uncast.dq.data[at]);
            ASSERT_EQ(row.uncast.out.data[g * problem.head_dim + d], truth.uncast.out.data[at]);
          }
        }
      }
    }
  }
}

TEST(SingleRow, HasTheTruthOfTheWhole) {
  Problem p = test::blank({2, 9, 13, 4, 2, 64});
  test::fill(p, 1);
  p.causal = true;
  expect_same_truth(p);
  p.causal = false;
  p.window_left = 3;
  p.window_right = 2;
  p.softcap = 5;
  expect_same_truth(p);
  Problem packed = test::blank_packed({4, 9}, {7, 3}, {1, 0, 0, 2, 1, 64});
  test::fill(packed, 2);
  packed.causal = true;
  expect_same_truth(packed);
}

TEST(ChosenRows, GiveTheFiguresThatTheWholeDiagnosisGivesForThem) {
  const Capture capture = test::bundled("fa3/d128_full_gqa4x2_s128_late.h5");
  const audit::Diagnosis whole = audit::diagnose(capture, {});
  audit::DiagnoseOptions some;
  some.rows = parse_rows("1:7,40-42,3:100");
  const audit::Diagnosis rows = audit::diagnose(capture, some);
  ASSERT_EQ(rows.chosen.size(), 1 + 3 * 4 + 1U);
  std::size_t with_truth = 0;
  for (std::size_t i = 0; i < rows.dq_norm.size(); ++i)
    with_truth += std::isfinite(rows.dq_norm.data[i]) ? 1 : 0;
  EXPECT_EQ(with_truth, rows.chosen.size());
  for (const audit::RowId& row : rows.chosen) {
    EXPECT_EQ(rows.dq_norm.data[row.index], whole.dq_norm.data[row.index]);
    EXPECT_EQ(rows.dq_error_norm.data[row.index], whole.dq_error_norm.data[row.index]);
  }
  EXPECT_EQ(rows.whole.leak_rows, rows.chosen.size());
  // The truth of dK and dV needs all rows, so there is none.
  EXPECT_EQ(rows.errors[2].whole.stored.elements, 0U);
  EXPECT_EQ(rows.errors[1].whole.stored.elements, rows.chosen.size() * 128);
}

TEST(ChosenRows, TheWorstAreThoseOfTheWorstTable) {
  const Capture capture = test::bundled("fa3/d128_causal_s256_peaky.h5");
  audit::DiagnoseOptions some;
  some.rows = parse_rows("3");
  const audit::Diagnosis d = audit::diagnose(capture, some);
  const auto worst = audit::worst_rows(capture.problem, d.rows.after_cast, 3);
  ASSERT_EQ(d.chosen.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(d.chosen[i].index, worst[i].index);
}

}  // namespace
