// Rows gathered into bins, for drawing.

#include "audit/row_bins.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/audit/problems.hpp"

namespace {

using namespace bitattn;

TEST(RowBins, EveryRowIsInOneBinWithItsMagnitude) {
  const Problem problem = test::blank({2, 5, 5, 2, 1, 8});
  Fp64Tensor values(problem.row_shape(), 100.0);
  for (std::size_t b = 0; b < 2; ++b) {
    for (std::size_t i = 0; i < 5; ++i) {
      values.data[problem.row_index(b, 1, i)] = (i % 2 == 0 ? 1 : -1) * static_cast<double>(b * 5 + i);
    }
  }
  const auto rows = audit::bin_rows(problem, values, 1, 100, 2);  // as many bins as rows
  ASSERT_EQ(rows.size(), 10U);
  for (std::size_t n = 0; n < rows.size(); ++n) {
    EXPECT_EQ(rows[n].rows, 1U);
    EXPECT_DOUBLE_EQ(rows[n].smallest, static_cast<double>(n) / 2);
    EXPECT_DOUBLE_EQ(rows[n].largest, static_cast<double>(n) / 2);
    EXPECT_DOUBLE_EQ(rows[n].rms, static_cast<double>(n) / 2);
  }
  const auto bins = audit::bin_rows(problem, values, 1, 3);  // rows 0-3, 4-6, 7-9
  ASSERT_EQ(bins.size(), 3U);
  EXPECT_EQ(bins[0].rows, 4U);
  EXPECT_DOUBLE_EQ(bins[0].smallest, 0);
  EXPECT_DOUBLE_EQ(bins[0].largest, 3);
  EXPECT_DOUBLE_EQ(bins[0].rms, std::sqrt((0.0 + 1 + 4 + 9) / 4));
  EXPECT_EQ(bins[1].rows + bins[2].rows, 6U);
  EXPECT_DOUBLE_EQ(bins[2].largest, 9);
}

TEST(RowBins, RowsWithoutAKeyOrAFigureAreNotDrawn) {
  Problem problem = test::blank({1, 6, 4, 1, 1, 8});
  problem.causal = true;  // rows 0 and 1 see no key
  Fp32Tensor values(problem.row_shape(), 3.0F);
  values.data[0] = std::numeric_limits<float>::quiet_NaN();
  values.data[4] = std::numeric_limits<float>::infinity();
  const auto bins = audit::bin_rows(problem, values, 0, 3);
  ASSERT_EQ(bins.size(), 3U);
  EXPECT_EQ(bins[0].rows, 0U);
  EXPECT_EQ(bins[0].not_finite, 0U);
  EXPECT_TRUE(std::isnan(bins[0].largest));
  EXPECT_EQ(bins[1].rows, 2U);
  EXPECT_EQ(bins[2].rows, 1U);
  EXPECT_EQ(bins[2].not_finite, 1U);
  EXPECT_DOUBLE_EQ(bins[2].rms, 3);
}

TEST(RowBins, PackedSequencesLieSideBySide) {
  const Problem problem = test::blank_packed({2, 3}, {2, 3}, {1, 0, 0, 1, 1, 8});
  Fp64Tensor values(problem.row_shape());
  for (std::size_t n = 0; n < values.size(); ++n) values.data[n] = static_cast<double>(n);
  const auto bins = audit::bin_rows(problem, values, 0, 256);
  ASSERT_EQ(bins.size(), 5U);
  for (std::size_t n = 0; n < bins.size(); ++n) EXPECT_DOUBLE_EQ(bins[n].largest, static_cast<double>(n));
  EXPECT_TRUE(audit::bin_rows(problem, Fp64Tensor(), 0, 256).empty());
}

}  // namespace
