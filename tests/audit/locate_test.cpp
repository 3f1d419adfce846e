// The figures of rows, against their definitions: bit for bit where they are bits, to double rounding where
// they are sums.

#include "audit/locate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "audit/compensated_sum.hpp"
#include "audit/diagnose.hpp"
#include "backends/backend.hpp"
#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "tests/audit/problems.hpp"

namespace {

using namespace bitattn;
using arith::to_bits;

/// Keeps whole matrices of a run, and passes everything on to a RowLocator: what the locator gathered
/// streaming is then taken again from the matrices, in long double and key by key.
class Matrices final : public kernels::Observer {
 public:
  explicit Matrices(const Problem& problem) : problem_(problem), locator_(problem, {true}) {}

  struct Row {
    float row_max = 0, dpsum = 0;
    std::vector<float> running_max;
    std::vector<float> scores, p, dp, ds, ds_cast;
    bool backward = false;
  };

  void forward_block(const kernels::ForwardBlock& block) override {
    locator_.forward_block(block);
    const std::lock_guard lock(mutex_);
    for (int r = 0; r < block.rows; ++r) {
      Row& row = rows_[index(block.id, block.row_begin + r)];
      if (block.first) row.running_max.clear();
      row.running_max.push_back(block.row_max[r]);
    }
  }
  void forward_rows(const kernels::ForwardRows& rows) override {
    locator_.forward_rows(rows);
    const std::lock_guard lock(mutex_);
    for (int r = 0; r < rows.rows; ++r) rows_[index(rows.id, rows.row_begin + r)].row_max = rows.row_max[r];
  }
  void backward_rows(const kernels::BackwardRows& rows) override {
    locator_.backward_rows(rows);
    const std::lock_guard lock(mutex_);
    const SequenceSpan span = problem_.sequence(static_cast<std::size_t>(rows.id.sequence));
    for (int r = 0; r < rows.rows; ++r) {
      Row& row = rows_[index(rows.id, rows.row_begin + r)];
      row.backward = true;
      row.dpsum = rows.dpsum[r];
      const KeyRange range =
          visible_keys(problem_, rows.row_begin + r, static_cast<std::int64_t>(span.q_length),
                       static_cast<std::int64_t>(span.k_length));
      for (std::int64_t j = range.first; j < range.last; ++j) {
        const std::ptrdiff_t at = r * rows.row_stride + j - rows.key_begin;
        row.scores.push_back(rows.s[at]);
        row.p.push_back(rows.p[at]);
        row.dp.push_back(rows.dp[at]);
        row.ds.push_back(rows.ds_softcap[at]);
        row.ds_cast.push_back(arith::fp32_from_bf16(rows.ds_bf16[at]));
      }
    }
  }

  const audit::RowFindings& findings() { return locator_.findings(); }
  std::map<std::size_t, Row> rows_;

 private:
  std::size_t index(kernels::HeadId id, int row) const {
    return problem_.row_index(static_cast<std::size_t>(id.sequence), static_cast<std::size_t>(id.head),
                              static_cast<std::size_t>(row));
  }
  const Problem& problem_;
  audit::RowLocator locator_;
  std::mutex mutex_;
};

/// Every figure of every row against its definition.
void expect_definitions(const Capture& capture) {
  const Problem& p = capture.problem;
  Matrices matrices(p);
  RunOptions options;
  options.observer = &matrices;
  const Result result = make_backend("fa3")->run(capture, options);
  const audit::RowFindings& f = matrices.findings();
  const float c = f.scale_log2;
  const bool softcap = p.softcap > 0;
  std::size_t looked_at = 0;
  std::vector<double> leak_dk(p.k.size(), 0.0);
  audit::for_each_row_with_keys(p, [&](std::size_t b, std::size_t h, std::size_t i, std::size_t index) {
    SCOPED_TRACE(std::to_string(b) + " " + std::to_string(h) + " " + std::to_string(i));
    ASSERT_TRUE(matrices.rows_.contains(index));
    const Matrices::Row& row = matrices.rows_[index];
    ++looked_at;
    // The residue, bit for bit: fma(m, c, -rn(m*c)).
    const float m = row.row_max;
    const float residue = arith::ftz::fma(m, c, -arith::ftz::mul(m, c));
    EXPECT_EQ(to_bits(f.row_max.data[index]), to_bits(m));
    EXPECT_EQ(to_bits(f.row_max_residue.data[index]), to_bits(residue));
    float largest = 0;
    for (const float running : row.running_max) {
      largest = std::max(largest, std::abs(audit::row_max_residue(running, c)));
    }
    EXPECT_EQ(std::abs(f.largest_block_residue.data[index]), largest);
    EXPECT_EQ(static_cast<std::size_t>(f.tied_maxima.data[index]),
              static_cast<std::size_t>(std::count(row.scores.begin(), row.scores.end(), m)));
    // The sums, in long double over whole rows.
    long double sp = 0;
    long double g = 0;
    long double before = 0;
    long double after = 0;
    long double exact_ds = 0;
    long double magnitude = 0;
    const long double d = static_cast<long double>(row.dpsum);
    for (std::size_t j = 0; j < row.p.size(); ++j) {
      const auto pj = static_cast<long double>(row.p[j]);
      const auto dp = static_cast<long double>(row.dp[j]);
      sp += pj;
      g += pj * dp;
      before += static_cast<long double>(row.ds[j]);
      after += static_cast<long double>(row.ds_cast[j]);
      exact_ds += static_cast<long double>(row.ds[j]) - pj * (dp - d);
      magnitude += std::abs(pj * dp) + std::abs(pj * d);
    }
    const double tolerance = 0x1p-50 * static_cast<double>(magnitude) + 1e-300;
    EXPECT_NEAR(f.p_sum_excess.data[index], static_cast<double>(sp - 1), 0x1p-50);
    EXPECT_NEAR(f.g_minus_d.data[index], static_cast<double>(g - d), tolerance);
    EXPECT_NEAR(f.d_p_excess.data[index], static_cast<double>(d * (sp - 1)), tolerance);
    EXPECT_NEAR(f.before_cast.data[index], static_cast<double>(before), tolerance);
    EXPECT_NEAR(f.eta.data[index], static_cast<double>(exact_ds), tolerance);
    const double upto_eta = f.g_minus_d.data[index] - f.d_p_excess.data[index] + f.eta.data[index];
    EXPECT_NEAR(f.before_cast.data[index], upto_eta, tolerance);
    if (softcap) {
      EXPECT_TRUE(std::isnan(f.after_cast.data[index]));
      EXPECT_TRUE(std::isnan(f.beta.data[index]));
    } else {
      EXPECT_NEAR(f.after_cast.data[index], static_cast<double>(after), tolerance);
      // The law of docs/spec/fa3-operation-order.md 9.2: the four parts are the sum.
      EXPECT_NEAR(f.after_cast.data[index], upto_eta + f.beta.data[index], tolerance);
    }
    // The leak, from the keys themselves.
    const SequenceSpan span = p.sequence(b);
    const KeyRange range =
        visible_keys(p, static_cast<std::int64_t>(i), static_cast<std::int64_t>(span.q_length),
                     static_cast<std::int64_t>(span.k_length));
    std::vector<double> weighted(p.head_dim, 0.0);
    std::vector<double> mean(p.head_dim, 0.0);
    for (std::size_t j = 0; j < row.p.size(); ++j) {
      const std::size_t token = span.k_begin + static_cast<std::size_t>(range.first) + j;
      const double t = static_cast<double>(row.scores[j]);
      const double weight = static_cast<double>(row.p[j]) * (softcap ? 1 - t * t : 1);
      for (std::size_t x = 0; x < p.head_dim; ++x) {
        const std::size_t at = token * p.k_stride() + h / p.group() * p.head_dim + x;
        const double k = static_cast<double>(arith::fp32_from_bf16(p.k.data[at]));
        const double q = static_cast<double>(
            arith::fp32_from_bf16(p.q.data[(span.q_begin + i) * p.q_stride() + h * p.head_dim + x]));
        const double r = softcap ? f.before_cast.data[index] : f.after_cast.data[index];
        leak_dk[at] += p.softmax_scale * r / static_cast<double>(sp) * weight * q;
        weighted[x] += weight * k;
        mean[x] += k;
      }
    }
    double weighted2 = 0;
    double mean2 = 0;
    for (std::size_t x = 0; x < p.head_dim; ++x) {
      weighted2 += weighted[x] * weighted[x];
      mean2 += mean[x] * mean[x];
    }
    const double drift = std::abs(softcap ? f.before_cast.data[index] : f.after_cast.data[index]);
    const double leak = p.softmax_scale * drift * std::sqrt(weighted2) / static_cast<double>(sp);
    const double mean_leak = p.softmax_scale * drift * std::sqrt(mean2) / static_cast<double>(row.p.size());
    EXPECT_NEAR(f.leak.data[index], leak, 1e-12 * leak);
    EXPECT_NEAR(f.leak_mean_key.data[index], mean_leak, 1e-12 * mean_leak);
  });
  EXPECT_GT(looked_at, 0U);
  double largest = 0;
  for (const double x : leak_dk) largest = std::max(largest, std::abs(x));
  EXPECT_GT(largest, 0);
  for (std::size_t at = 0; at < leak_dk.size(); ++at)
    ASSERT_NEAR(f.leak_dk.data[at], leak_dk[at], 1e-11 * largest);
  // Rows that see nothing have no figures.
  std::size_t without = 0;
  for (std::size_t i = 0; i < f.row_max.size(); ++i) without += std::isinf(f.row_max.data[i]) ? 1 : 0;
  EXPECT_EQ(without + looked_at, f.row_max.size());
}

class LocateGoldens : public ::testing::TestWithParam<const char*> {};

TEST_P(LocateGoldens, EveryFigureIsItsDefinition) {
  expect_definitions(test::bundled(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Bundled, LocateGoldens,
                         ::testing::Values("fa3/d64_full_s64_normal.h5", "fa3/d128_full_s128_late.h5",
                                           "fa3/d128_causal_s256_ties.h5", "fa3/d128_causal_s128_tinygrad.h5",
                                           "fa3/d128_causal_varlen3_normal.h5",
                                           "fa3/d128_full_gqa4x2_s128_late.h5",
                                           "fa3/d128_full_softcap15_s200_normal3.h5",
                                           "fa3/d128_causal_q300_k200_maskedrows.h5",
                                           "fa3/local16x0_q64_k400.h5", "fa3/q1_k400_causal.h5",
                                           "fa3/q3_k5_full.h5", "real-run/step_000783_layer_0.h5"));

TEST(RowMaxResidue, IsTheExactRoundingErrorOfTheProduct) {
  for (const float m : {1.0F, 3.7F, -100.25F, 1234.5F, 1e-20F}) {
    for (const float c : {0.12751743F, 0.1803369F, 1.0F}) {
      const double exact = static_cast<double>(m) * static_cast<double>(c);
      const double rounded = static_cast<double>(m * c);
      EXPECT_EQ(static_cast<double>(audit::row_max_residue(m, c)), exact - rounded);
    }
  }
  EXPECT_EQ(to_bits(audit::row_max_residue(-INFINITY, 0.125F)), 0x7fffffffU)
      << "a row without a key has none";
}

// A power of two as c has no residue in any row; a property of the definition, shown on a whole run.
TEST(RowMaxResidue, IsZeroInEveryRowWhereScaleLog2IsAPowerOfTwo) {
  Capture capture;
  capture.name = "power of two";
  capture.problem = test::blank({1, 64, 64, 2, 1, 64});
  test::fill(capture.problem, 5);
  // softmax_scale so that fp32(fp32(scale) * log2 e) is exactly 2^-3.
  capture.problem.softmax_scale = 0.125 / 1.4426950408889634;
  audit::RowLocator locator(capture.problem, {});
  RunOptions options;
  options.observer = &locator;
  make_backend("fa3")->run(capture, options);
  ASSERT_EQ(locator.findings().scale_log2, 0.125F);
  const audit::RowStatistics s = audit::row_statistics(capture.problem, locator.findings().row_max_residue);
  EXPECT_EQ(s.rows, 128U);
  EXPECT_EQ(s.nonzero, 0U);
  capture.problem.softmax_scale = 0.125;
  audit::RowLocator other(capture.problem, {});
  options.observer = &other;
  make_backend("fa3")->run(capture, options);
  EXPECT_GT(audit::row_statistics(capture.problem, other.findings().row_max_residue).nonzero, 100U);
}

TEST(BlockResidues, AreThoseOfTheRunningMaximum) {
  const Capture capture = test::bundled("fa3/d128_causal_q333_k457_normal.h5");
  audit::RowLocator locator(capture.problem, {true});
  RunOptions options;
  options.observer = &locator;
  options.forward_only = true;
  make_backend("fa3")->run(capture, options);
  const audit::RowFindings& f = locator.findings();
  ASSERT_EQ(f.block_residues.shape, (std::vector<std::size_t>{1, 1, 333, 4}));
  std::size_t seen = 0;
  for (std::size_t i = 0; i < 333; ++i) {
    // Keys are visited right to left, so the block of key 0 comes last: its residue is the row's.
    EXPECT_EQ(to_bits(f.block_residues.data[i * 4]), to_bits(f.row_max_residue.data[i]));
    for (std::size_t n = 0; n < 4; ++n) {
      const float x = f.block_residues.data[i * 4 + n];
      const bool visible_block = n * 128 <= i + 457 - 333;
      EXPECT_EQ(!std::isnan(x), visible_block) << i << " " << n;
      if (!std::isnan(x)) {
        ++seen;
        EXPECT_LE(std::abs(x), std::abs(f.largest_block_residue.data[i]));
      }
    }
  }
  EXPECT_GT(seen, 333U);
}

TEST(CompensatedSum, KeepsWhatCancels) {
  audit::CompensatedSum sum;
  sum.add(1);
  for (int i = 0; i < 1000; ++i) sum.add(1e-20);
  EXPECT_NEAR(sum.minus(1), 1e-17, 1e-30);
  sum.add(-1);
  EXPECT_NEAR(sum.total(), 1e-17, 1e-30);
}

}  // namespace
