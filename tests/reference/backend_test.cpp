// The reference as a backend: layouts, masks, names, notes, rows; and the outputs of real kernels, which are
// close to it.

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <random>

#include "backends/reference.hpp"
#include "datasets/capture_file.hpp"
#include "datasets/error.hpp"
#include "reference/problem_view.hpp"
#include "tests/reference/support.hpp"

namespace bitattn {
namespace {

using reference::testing::NaiveAttention;
using reference::testing::TestProblem;

/// A problem of the data sets with the memory of a test problem: one sequence is BSHD with batch 1, more are
/// THD.
Capture capture_of(const TestProblem& p) {
  Capture capture;
  Problem& problem = capture.problem;
  const bool packed = p.sequences.size() > 1;
  problem.layout = packed ? Layout::thd : Layout::bshd;
  problem.batch = p.sequences.size();
  for (const reference::Sequence& s : p.sequences) {
    problem.seqlen_q = std::max(problem.seqlen_q, s.q_length);
    problem.seqlen_k = std::max(problem.seqlen_k, s.k_length);
  }
  problem.heads_q = p.heads_q;
  problem.heads_kv = p.heads_kv;
  problem.head_dim = p.head_dim;
  problem.head_dim_v = p.head_dim_v;
  if (packed) {
    problem.cu_seqlens_q = {0};
    problem.cu_seqlens_k = {0};
    for (const reference::Sequence& s : p.sequences) {
      problem.cu_seqlens_q.push_back(static_cast<std::int32_t>(s.q_begin + s.q_length));
      problem.cu_seqlens_k.push_back(static_cast<std::int32_t>(s.k_begin + s.k_length));
    }
    problem.q.shape = {p.tokens_q(), p.heads_q, p.head_dim};
    problem.k.shape = {p.tokens_k(), p.heads_kv, p.head_dim};
  }
  problem.q = Bf16Tensor(problem.q_shape());
  problem.k = Bf16Tensor(problem.k_shape());
  problem.v = Bf16Tensor(problem.v_shape());
  problem.dout = Bf16Tensor(problem.out_shape());
  problem.q.data = p.q;
  problem.k.data = p.k;
  problem.v.data = p.v;
  problem.dout.data = p.dout;
  problem.softmax_scale = p.softmax_scale;
  problem.softcap = p.softcap;
  problem.causal = p.causal;
  problem.window_left = p.window_left;
  problem.window_right = p.window_right;
  problem.causal_alignment = p.top_left ? CausalAlignment::top_left : CausalAlignment::bottom_right;
  return capture;
}

TEST(ReferenceBackend, AgreesWithANaiveProgramInDoublesInEveryLayout) {
  for (auto& [name, p] : reference::testing::varied_problems()) {
    const Capture capture = capture_of(p);
    NaiveAttention<double> naive(p);
    naive.forward();
    naive.backward();
    for (const char* const backend : {"reference", "reference:80"}) {
      SCOPED_TRACE(std::string(name) + " " + backend);
      RunOptions options;
      options.want_uncast = true;
      const Result result = reference_backend(backend)->run(capture, options);
      EXPECT_EQ(result.backend, backend);
      EXPECT_EQ(result.notes.size(), 4U);
      const auto compare = [](const Bf16Tensor& words, const Fp64Tensor& values,
                              const std::vector<double>& expected) {
        ASSERT_EQ(values.data.size(), expected.size());
        ASSERT_EQ(values.shape, words.shape);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          ASSERT_NEAR(values.data[i], expected[i], 1e-12 * (1 + std::abs(expected[i])));
          ASSERT_NEAR(reference::fp64_from_bf16(words.data[i]), values.data[i],
                      std::abs(values.data[i]) * 0x1p-8 + 0x1p-133);
        }
      };
      compare(result.out, result.uncast.out, naive.out);
      compare(result.dq, result.uncast.dq, naive.dq);
      compare(result.dk, result.uncast.dk, naive.dk);
      compare(result.dv, result.uncast.dv, naive.dv);
      for (std::size_t b = 0; b < p.sequences.size(); ++b) {
        for (std::size_t h = 0; h < p.heads_q; ++h) {
          for (std::size_t i = 0; i < p.sequences[b].q_length; ++i) {
            const std::size_t at = capture.problem.row_index(b, h, i);
            if (std::isinf(result.uncast.lse.data[at])) {
              ASSERT_LT(result.lse.data[at], 0);  // a row without keys
              continue;
            }
            ASSERT_NEAR(result.uncast.lse.data[at], naive.lse[(p.sequences[b].q_begin + i) * p.heads_q + h],
                        1e-12);
            ASSERT_EQ(result.lse.data[at], static_cast<float>(result.uncast.lse.data[at]));
          }
        }
      }
    }
  }
}

TEST(ReferenceBackend, SeesTheKeysThatTheDataSetsSayAreVisible) {
  std::mt19937_64 engine(1);
  for (int round = 0; round < 2000; ++round) {
    TestProblem p;
    p.add_sequence(engine() % 9, engine() % 9);
    p.causal = engine() % 2 == 0;
    p.top_left = engine() % 2 == 0;
    p.window_left = static_cast<int>(engine() % 6) - 1;
    p.window_right = static_cast<int>(engine() % 6) - 1;
    const Capture capture = capture_of(p);
    const auto sq = static_cast<std::int64_t>(p.sequences[0].q_length);
    const auto sk = static_cast<std::int64_t>(p.sequences[0].k_length);
    for (std::int64_t i = 0; i < sq; ++i) {
      const reference::KeyRange keys =
          reference::visible_keys(p.view(), p.sequences[0], static_cast<std::size_t>(i));
      for (std::int64_t j = 0; j < sk; ++j) {
        ASSERT_EQ(keys.contains(static_cast<std::size_t>(j)), visible(capture.problem, i, j, sq, sk));
      }
    }
  }
}

TEST(ReferenceBackend, NamesAndPrecisions) {
  EXPECT_EQ(reference_backend("reference")->name(), "reference");
  EXPECT_EQ(reference_backend("reference:24")->name(), "reference:24");
  EXPECT_EQ(reference_backend("reference:4096")->name(), "reference:4096");
  for (const char* const name : {"reference:", "reference:23", "reference:4097", "reference:-1",
                                 "reference:128x", "reference:1e3", "reference:99999999999999999999"}) {
    EXPECT_THROW(reference_backend(name), InputError) << name;
  }
}

TEST(ReferenceBackend, ForwardAlone) {
  TestProblem p;
  p.add_sequence(5, 7);
  p.fill_normal(2);
  Capture capture = capture_of(p);
  RunOptions options;
  options.forward_only = true;
  const Result asked = reference_backend("reference")->run(capture, options);
  EXPECT_TRUE(asked.dq.empty() && asked.dk.empty() && asked.dv.empty());
  EXPECT_TRUE(asked.uncast.out.empty());
  capture.problem.dout = Bf16Tensor();
  const Result without = reference_backend("reference")->run(capture, RunOptions{});
  EXPECT_TRUE(without.dq.empty());
  EXPECT_EQ(asked.out.data, without.out.data);
}

TEST(ReferenceBackend, NothingToCompute) {
  TestProblem p;
  p.add_sequence(0, 3);
  p.fill_normal(3);
  const Result no_queries = reference_backend("reference")->run(capture_of(p), RunOptions{});
  EXPECT_TRUE(no_queries.out.data.empty());
  TestProblem keyless;
  keyless.add_sequence(3, 0);
  keyless.fill_normal(3);
  const Result no_keys = reference_backend("reference")->run(capture_of(keyless), RunOptions{});
  for (const std::uint16_t word : no_keys.out.data) EXPECT_EQ(word, 0);
  for (const float lse : no_keys.lse.data) EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
}

TEST(ReferenceRows, AreTheRowsOfTheBackend) {
  for (auto& [name, p] : reference::testing::varied_problems()) {
    SCOPED_TRACE(name);
    const Capture capture = capture_of(p);
    RunOptions options;
    options.want_uncast = true;
    const Result whole = reference_backend("reference")->run(capture, options);
    std::vector<RowName> names;
    for (std::size_t b = p.sequences.size(); b-- > 0;) {
      for (std::size_t i = 0; i < p.sequences[b].q_length; i += 2) {
        names.push_back({b, i % p.heads_q, i});
        if (i % 3 == 0) names.push_back(names.back());  // twice is no error
      }
    }
    const std::vector<ReferenceRow> rows = reference_rows(capture.problem, names);
    ASSERT_EQ(rows.size(), names.size());
    for (std::size_t n = 0; n < rows.size(); ++n) {
      const auto& [b, h, i] = names[n];
      EXPECT_TRUE(rows[n].name.sequence == b && rows[n].name.head == h && rows[n].name.row == i);
      const std::size_t at = (p.sequences[b].q_begin + i) * p.heads_q + h;
      ASSERT_EQ(rows[n].lse, whole.uncast.lse.data[capture.problem.row_index(b, h, i)]);
      ASSERT_EQ(rows[n].out.size(), p.head_dim_v);
      ASSERT_EQ(rows[n].dq.size(), p.head_dim);
      for (std::size_t d = 0; d < p.head_dim_v; ++d) {
        ASSERT_EQ(rows[n].out[d], whole.uncast.out.data[at * p.head_dim_v + d]);
        ASSERT_LT(rows[n].out_bound[d], 1e-30);
      }
      for (std::size_t d = 0; d < p.head_dim; ++d) {
        ASSERT_EQ(rows[n].dq[d], whole.uncast.dq.data[at * p.head_dim + d]);
        ASSERT_LT(rows[n].dq_bound[d], 1e-30);
      }
    }
  }
  TestProblem p;
  p.add_sequence(2, 2);
  p.fill_normal(4);
  const Capture capture = capture_of(p);
  for (const RowName& name : {RowName{1, 0, 0}, RowName{0, 1, 0}, RowName{0, 0, 2}}) {
    EXPECT_THROW(reference_rows(capture.problem, std::span(&name, 1)), InputError);
  }
}

TEST(ReferenceBackend, IsCloseToWhatKernelsRecorded) {
  // Each rounds P, dS and the outputs to BF16: a fraction of a percent, where the gradient does not cancel.
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(BITATTN_BUNDLED_GOLDENS)) {
    if (entry.path().extension() != ".h5") continue;
    for (const std::string& name : list_captures(entry.path().string())) {
      const Capture capture = read_capture(name);
      const Problem& problem = capture.problem;
      if (!capture.has_recorded() || problem.total_q() * problem.total_k() > 300 * 300) continue;
      SCOPED_TRACE(name);
      RunOptions options;
      options.want_uncast = true;
      const Result truth = reference_backend("reference")->run(capture, options);
      const auto error = [](const Bf16Tensor& recorded, const Fp64Tensor& exact) {
        double difference = 0;
        double norm = 0;
        for (std::size_t i = 0; i < recorded.data.size(); ++i) {
          const double x = reference::fp64_from_bf16(recorded.data[i]);
          if (!std::isfinite(x) || !std::isfinite(exact.data[i])) continue;
          difference += (x - exact.data[i]) * (x - exact.data[i]);
          norm += exact.data[i] * exact.data[i];
        }
        return norm == 0 ? 0 : std::sqrt(difference / norm);
      };
      ASSERT_EQ(capture.recorded.out.shape, truth.out.shape);
      EXPECT_LT(error(capture.recorded.out, truth.uncast.out), 5e-3);
      EXPECT_LT(error(capture.recorded.dv, truth.uncast.dv), 5e-3);
      if (problem.text("regime").starts_with("normal")) {
        EXPECT_LT(error(capture.recorded.dq, truth.uncast.dq), 6e-3);
        EXPECT_LT(error(capture.recorded.dk, truth.uncast.dk), 6e-3);
      }
      ++files;
    }
  }
  EXPECT_GE(files, 3U);
}

}  // namespace
}  // namespace bitattn
