// Blame: the parts that are run are the whole's own rows, the sites' reaches hold, the shares are what their
// definitions say, and a site that was made coarse is named.

#include "audit/blame.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "audit/diagnose.hpp"
#include "audit/shapley.hpp"
#include "backends/backend.hpp"
#include "backends/sites.hpp"
#include "datasets/regime.hpp"
#include "tests/audit/problems.hpp"

namespace {

using namespace bitattn;
using audit::Blamed;
using audit::ErrorShares;
using audit::RowPart;
using audit::SiteShare;
using profile::Profile;
using profile::Site;
using profile::SiteSet;

TEST(Shapley, SplitsKnownGames) {
  // Additive: everyone gets its own.
  const std::vector<double> additive = audit::shapley_values(3, {0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_DOUBLE_EQ(additive[0], 1);
  EXPECT_DOUBLE_EQ(additive[1], 2);
  EXPECT_DOUBLE_EQ(additive[2], 4);
  // One left glove (player 0), two right ones: a pair is worth 1.
  const std::vector<double> gloves = audit::shapley_values(3, {0, 0, 0, 1, 0, 1, 0, 1});
  EXPECT_DOUBLE_EQ(gloves[0], 4.0 / 6);
  EXPECT_DOUBLE_EQ(gloves[1], 1.0 / 6);
  EXPECT_DOUBLE_EQ(gloves[2], 1.0 / 6);
  // Two errors a, b that add up: |a|^2 + <a, b> and |b|^2 + <a, b>.
  const std::vector<double> vectors = audit::shapley_values(2, {0, 9, 4, 9 + 4 + 2 * -1.5});
  EXPECT_DOUBLE_EQ(vectors[0], 7.5);
  EXPECT_DOUBLE_EQ(vectors[1], 2.5);
}

Capture generated(const GenerateOptions& options) {
  Capture capture;
  capture.name = options.regime;
  capture.problem = generate(options);
  return capture;
}

GenerateOptions shape(const std::string& regime, std::size_t sq, std::size_t sk, std::size_t heads_q,
                      std::size_t heads_kv) {
  GenerateOptions options;
  options.regime = regime;
  options.seqlen_q = sq;
  options.seqlen_k = sk;
  options.heads_q = heads_q;
  options.heads_kv = heads_kv;
  options.head_dim = 64;
  options.seed = 11;
  return options;
}

// --- parts

/// Rows of the part against the same rows of the whole, bit by bit; and what they put into dK against a run
/// of the whole in which all other rows have no dout.
void expect_bits_of_the_whole(const Problem& problem, const RowPart& part) {
  Capture whole;
  whole.name = "whole";
  whole.problem = problem;
  Capture cut;
  cut.name = "part";
  cut.problem = audit::part_problem(problem, part);
  check_problem(cut.problem, "part");
  const SiteRuns of_whole(whole, Profile{});
  const SiteRuns of_part(cut, Profile{});
  const SiteForward a = of_whole.forward({});
  const SiteForward b = of_part.forward({});
  const SiteGradients c = of_whole.backward(a, {});
  const SiteGradients d = of_part.backward(b, {});
  const std::size_t group = problem.group();
  const SequenceSpan span = problem.sequence(part.sequence);
  std::size_t rows = 0;
  for (std::size_t i = 0; i < part.rows; ++i) {
    for (std::size_t g = 0; g < group; ++g) {
      if (!part.counts(g, i)) continue;
      ++rows;
      const std::size_t head = part.kv_head * group + g;
      const std::size_t from =
          ((span.q_begin + part.first_row + i) * problem.heads_q + head) * problem.head_dim;
      const std::size_t to = (i * group + g) * problem.head_dim;
      for (std::size_t x = 0; x < problem.head_dim; ++x) {
        ASSERT_EQ(a.out[from + x], b.out[to + x]) << "row " << part.first_row + i;
        ASSERT_EQ(c.dq[from + x], d.dq[to + x]) << "row " << part.first_row + i;
      }
      const std::size_t row = problem.row_index(part.sequence, head, part.first_row + i);
      EXPECT_EQ(a.lse[row], b.lse[g * part.rows + i]);
      EXPECT_EQ(c.score_gradient_sums[row], d.score_gradient_sums[g * part.rows + i]);
    }
  }
  EXPECT_GT(rows, 0U);
}

TEST(RowParts, HaveTheBitsOfTheWhole) {
  GenerateOptions causal = shape("late", 200, 250, 4, 2);
  causal.causal = true;
  GenerateOptions shorter_keys = shape("peaky", 200, 150, 1, 1);
  shorter_keys.causal = true;
  GenerateOptions window = shape("normal", 260, 300, 1, 1);
  window.window_left = 60;
  window.window_right = 0;
  GenerateOptions left_only = shape("normal", 260, 300, 1, 1);
  left_only.window_left = 60;
  const GenerateOptions full = shape("wild", 150, 170, 2, 2);
  for (const GenerateOptions& options : {causal, shorter_keys, window, left_only, full}) {
    SCOPED_TRACE(options.regime + " " + std::to_string(options.seqlen_q));
    const Problem problem = generate(options);
    ASSERT_TRUE(audit::can_cut_rows(problem));
    const Fp64Tensor even(problem.row_shape(), 1.0);
    for (const RowPart& part : audit::worst_parts(problem, even, even, 9000)) {
      expect_bits_of_the_whole(problem, part);
    }
    std::vector<audit::RowId> rows;
    for (const std::size_t i : {std::size_t{149}, std::size_t{70}, std::size_t{72}}) {
      const std::size_t head = problem.heads_q - 1;
      rows.push_back({0, head, i, problem.row_index(0, head, i)});
    }
    const std::vector<RowPart> parts = audit::parts_of_rows(problem, rows, 1e9);
    ASSERT_EQ(parts.size(), 2U);
    std::size_t counted = 0;
    for (const RowPart& part : parts) {
      expect_bits_of_the_whole(problem, part);
      counted += static_cast<std::size_t>(std::count(part.counted.begin(), part.counted.end(), 1));
    }
    EXPECT_EQ(counted, rows.size());
  }
}

TEST(RowParts, PackedSequencesAndWindowsToTheRight) {
  Problem packed = test::blank_packed({70, 130}, {90, 130}, {.heads_q = 4, .heads_kv = 2});
  packed.causal = true;
  test::fill(packed, 3);
  const std::vector<RowPart> parts = audit::whole_parts(packed);
  ASSERT_EQ(parts.size(), 4U);
  for (const RowPart& part : parts) expect_bits_of_the_whole(packed, part);

  GenerateOptions options = shape("normal", 260, 300, 1, 1);
  options.window_left = 60;
  options.window_right = 16;
  const Problem window = generate(options);
  EXPECT_FALSE(audit::can_cut_rows(window));
  const Fp64Tensor even(window.row_shape(), 1.0);
  ASSERT_EQ(audit::worst_parts(window, even, even, 100).size(), 1U);
  const std::vector<RowPart> one = audit::parts_of_rows(window, {{0, 0, 100, 100}}, 100);
  ASSERT_EQ(one.size(), 1U);
  expect_bits_of_the_whole(window, one[0]);
}

TEST(RowParts, WorstFirst) {
  const Problem problem = generate(shape("normal", 256, 256, 3, 3));
  Fp64Tensor badness(problem.row_shape(), 0.01);
  const Fp64Tensor size(problem.row_shape(), 1.0);
  for (std::size_t i = 0; i < 256; ++i) badness.data[problem.row_index(0, 1, i)] = 0.5;
  badness.data[problem.row_index(0, 1, 140)] = 3;
  badness.data[problem.row_index(0, 2, 9)] = std::nan("");
  const std::vector<RowPart> heads = audit::worst_parts(problem, badness, size, 2.5 * 256 * 256);
  ASSERT_EQ(heads.size(), 2U);
  EXPECT_EQ(heads[0].kv_head, 1U);
  EXPECT_EQ(heads[0].rows, 256U);
  const std::vector<RowPart> blocks = audit::worst_parts(problem, badness, size, 64 * 256);
  ASSERT_EQ(blocks.size(), 1U);
  EXPECT_EQ(blocks[0].kv_head, 1U);
  EXPECT_EQ(blocks[0].first_row, 128U);
  EXPECT_EQ(blocks[0].rows, 64U);
}

// --- reach

class Reach : public ::testing::TestWithParam<Site> {};

TEST_P(Reach, WhatASiteCannotReachKeepsItsBits) {
  for (const double softcap : {0.0, 20.0}) {
    GenerateOptions options = shape("late", 70, 300, 4, 2);
    options.causal = true;
    options.softcap = softcap;
    const Capture capture = generated(options);
    const SiteRuns runs(capture, Profile{});
    const audit::BlamedSet reached = audit::reach(GetParam(), Profile{}, capture.problem);
    for (const bool others_exact : {false, true}) {
      SiteSet with = others_exact ? SiteSet::all() : SiteSet{};
      SiteSet without = with;
      with.remove(GetParam());
      without.add(GetParam());
      const SiteForward a = runs.forward(with);
      const SiteForward b = runs.forward(without);
      const SiteGradients c = runs.backward(a, with);
      const SiteGradients d = runs.backward(b, without);
      const auto expect = [&](Blamed tensor, const std::vector<double>& x, const std::vector<double>& y) {
        const auto t = static_cast<std::size_t>(tensor);
        if (reached[t]) return;
        EXPECT_EQ(x, y) << audit::kBlamedNames[t] << ", softcap " << softcap;
      };
      expect(Blamed::out, a.out, b.out);
      expect(Blamed::dq, c.dq, d.dq);
      expect(Blamed::dk, c.dk, d.dk);
      expect(Blamed::dv, c.dv, d.dv);
      expect(Blamed::score_gradient_sum, c.score_gradient_sums, d.score_gradient_sums);
    }
  }
}

std::vector<Site> all_sites() {
  std::vector<Site> sites;
  for (const profile::SiteInfo& info : profile::kSites) sites.push_back(info.site);
  return sites;
}

INSTANTIATE_TEST_SUITE_P(Fa3, Reach, ::testing::ValuesIn(all_sites()),
                         [](const ::testing::TestParamInfo<Site>& tested) {
                           return std::string(profile::name(tested.param));
                         });

TEST(SwitchGroups, DoNotOverlapAndLoseNothing) {
  const Capture capture = generated(shape("normal", 64, 64, 2, 1));
  const auto groups = audit::switch_groups(all_sites(), Profile{}, capture.problem, profile::kSiteCount);
  std::size_t sites = 0;
  for (const auto& group : groups) {
    audit::BlamedSet seen;
    for (const Site site : group) {
      const audit::BlamedSet reached = audit::reach(site, Profile{}, capture.problem);
      EXPECT_TRUE((seen & reached).none());
      seen |= reached;
      ++sites;
    }
  }
  EXPECT_EQ(sites, profile::kSiteCount - 2);  // all but the softcap's
  EXPECT_LT(groups.size(), sites);
}

// --- shares

const ErrorShares& of(const audit::Blame& blame, Blamed tensor) {
  return blame.tensors[static_cast<std::size_t>(tensor)];
}

const SiteShare& share(const ErrorShares& shares, Site site) {
  const auto found = std::find_if(shares.sites.begin(), shares.sites.end(),
                                  [&](const SiteShare& s) { return s.site == site; });
  EXPECT_NE(found, shares.sites.end());
  return *found;
}

void expect_they_add_up(const ErrorShares& s) {
  if (s.error2 == 0) return;
  double sum = s.others_fair;
  for (const SiteShare& site : s.sites) sum += site.grouped() ? 0 : site.fair;
  EXPECT_NEAR(sum, 1, 1e-9) << audit::kBlamedNames[static_cast<std::size_t>(s.tensor)];
}

audit::Blame blame_of(const Capture& capture, const Profile& profile = {}) {
  return audit::blame(capture, EmulatedKernel{profile, {}}, audit::whole_parts(capture.problem), {});
}

TEST(Blame, AddsUpEverywhereAndEqualsTheReferencesErrors) {
  GenerateOptions options = shape("peaky", 130, 150, 4, 2);
  options.batch = 2;
  options.causal = true;
  const Capture capture = generated(options);
  audit::DiagnoseOptions how;
  how.blame = audit::BlameScope::all;
  const audit::Diagnosis d = audit::diagnose(capture, how);
  ASSERT_TRUE(d.blame);
  const audit::Blame& b = *d.blame;
  EXPECT_TRUE(b.whole);
  EXPECT_EQ(b.parts.size(), 4U);
  EXPECT_EQ(b.query_heads.size(), 4U);
  EXPECT_EQ(b.kv_heads.size(), 2U);
  EXPECT_EQ(b.worst_rows.size(), 8U);
  EXPECT_LT(b.left_over, 1e-5);
  for (const ErrorShares& s : b.tensors) expect_they_add_up(s);
  for (const auto* heads : {&b.query_heads, &b.kv_heads}) {
    for (const audit::BlamedHead& head : *heads) {
      for (const ErrorShares& s : head.tensors) expect_they_add_up(s);
    }
  }
  for (const audit::BlamedRow& row : b.worst_rows) {
    for (const ErrorShares& s : row.tensors) expect_they_add_up(s);
  }
  // The same errors as those that the diagnosis found with the reference, tensor by tensor and head by head.
  for (std::size_t t = 0; t < 4; ++t) {
    const audit::ErrorSum& stored = d.errors[t].whole.stored;
    EXPECT_NEAR(b.tensors[t].error2 / stored.difference2, 1, 1e-5) << d.errors[t].tensor;
    EXPECT_NEAR(b.tensors[t].truth2 / stored.truth2, 1, 1e-9) << d.errors[t].tensor;
    EXPECT_EQ(b.tensors[t].elements, stored.elements);
  }
  for (const audit::BlamedHead& head : b.query_heads) {
    EXPECT_NEAR(head.tensors[1].error2 / d.errors[1].by_head[head.head].stored.difference2, 1, 1e-5);
  }
  for (const audit::BlamedHead& head : b.kv_heads) {
    EXPECT_NEAR(head.tensors[0].error2 / d.errors[2].by_head[head.head].stored.difference2, 1, 1e-5);
  }
}

TEST(Blame, OffAloneAndOnAloneAreWhatTheySay) {
  GenerateOptions options = shape("late", 100, 100, 1, 1);
  options.causal = true;
  const Capture capture = generated(options);
  const audit::Blame b = blame_of(capture);
  const SiteRuns runs(capture, Profile{});
  const auto error2 = [&](const SiteSet& exact) {
    const SiteForward truth = runs.forward(SiteSet::all());
    const SiteGradients exactly = runs.backward(truth, SiteSet::all());
    const SiteForward forward = runs.forward(exact);
    const SiteGradients gradients = runs.backward(forward, exact);
    double sum = 0;
    for (std::size_t i = 0; i < gradients.dq.size(); ++i) {
      sum += (gradients.dq[i] - exactly.dq[i]) * (gradients.dq[i] - exactly.dq[i]);
    }
    return sum;
  };
  const double all = error2({});
  EXPECT_NEAR(of(b, Blamed::dq).error2 / all, 1, 1e-12);
  for (const Site site : {Site::dpsum_o_cast, Site::ds_cast, Site::p_cast, Site::dq_cast, Site::exp2}) {
    SCOPED_TRACE(profile::name(site));
    const SiteShare& s = share(of(b, Blamed::dq), site);
    EXPECT_NEAR(s.off_alone, 1 - error2(SiteSet{}.add(site)) / all, 1e-12);
    EXPECT_NEAR(s.on_alone, error2(SiteSet::all().remove(site)) / all, 1e-12);
  }
}

// The closed form knows the cast of dS exactly: without it the row sum is R - beta.
TEST(Blame, ClosedFormOfTheRowSums) {
  GenerateOptions options = shape("late", 200, 200, 2, 2);
  options.causal = true;
  const Capture capture = generated(options);
  audit::DiagnoseOptions how;
  how.blame = audit::BlameScope::all;
  how.reference = "";
  const audit::Diagnosis d = audit::diagnose(capture, how);
  ASSERT_TRUE(d.blame);
  double after2 = 0;
  double before2 = 0;
  for (std::size_t i = 0; i < d.rows.after_cast.size(); ++i) {
    after2 += d.rows.after_cast.data[i] * d.rows.after_cast.data[i];
    const double before = d.rows.after_cast.data[i] - d.rows.beta.data[i];
    before2 += before * before;
  }
  const ErrorShares& sums = of(*d.blame, Blamed::score_gradient_sum);
  // The truth's own sums are 0 to fp64 rounding.
  EXPECT_NEAR(sums.error2 / after2, 1, 1e-6);
  EXPECT_NEAR(share(sums, Site::ds_cast).off_alone, 1 - before2 / after2, 1e-6);
  const audit::SumSplit& form = d.blame->sums_in_closed_form;
  EXPECT_NEAR(form.before + form.eta + form.beta, 1, 1e-9);
  EXPECT_NEAR(d.blame->sums_by_sites.before, form.before, 0.05);
  EXPECT_NEAR(d.blame->sums_by_sites.beta, form.beta, 0.05);
}

TEST(Blame, ForwardOnlyAndRowsWithoutKeys) {
  GenerateOptions options = shape("normal", 120, 70, 1, 1);
  options.causal = true;
  Capture capture = generated(options);
  const audit::Blame both = blame_of(capture);
  EXPECT_EQ(both.rows, 70U);
  capture.problem.dout = {};
  const audit::Blame forward = blame_of(capture);
  ASSERT_EQ(forward.tensors.size(), 1U);
  EXPECT_EQ(forward.tensors[0].sites.front().site, Site::o_cast);
  EXPECT_EQ(forward.tensors[0].error2, both.tensors[0].error2);
  expect_they_add_up(forward.tensors[0]);
}

TEST(Blame, NaNIsLeftOutAndCounted) {
  Capture capture = generated(shape("normal", 64, 64, 1, 1));
  capture.problem.q.data[5 * 64] = 0x7fc0;  // row 5 of out and dq, all of dk and dv
  const audit::Blame b = blame_of(capture);
  EXPECT_EQ(of(b, Blamed::dq).not_finite, 64U);
  EXPECT_EQ(of(b, Blamed::dq).elements, 64U * 64U);
  EXPECT_GT(of(b, Blamed::dq).error2, 0);
  expect_they_add_up(of(b, Blamed::dq));
  EXPECT_EQ(of(b, Blamed::dv).not_finite, 64U * 64U);
  EXPECT_EQ(of(b, Blamed::dv).error2, 0);
}

}  // namespace
