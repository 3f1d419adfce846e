// Proves: names users type lead to the backends listed, and results do not depend on threads, engine or how a
// call is cut.

#include <gtest/gtest.h>
#include <tbb/global_control.h>

#include "backends/backend.hpp"
#include "backends/emulator.hpp"
#include "datasets/error.hpp"
#include "datasets/regime.hpp"
#include "tests/backends/goldens.hpp"

namespace bitattn {
namespace {

Capture generated(const GenerateOptions& options) {
  Capture capture;
  capture.name = "generated";
  capture.problem = generate(options);
  return capture;
}

GenerateOptions small(const std::string& regime) {
  GenerateOptions options;
  options.regime = regime;
  options.seqlen_q = 150;
  options.seqlen_k = 290;
  options.heads_q = 4;
  options.heads_kv = 2;
  options.head_dim = 64;
  options.causal = true;
  options.seed = 7;
  return options;
}

TEST(Backends, EveryListedNameExists) {
  for (const BackendInfo& info : backends()) {
    const std::string name = info.name.substr(0, info.name.find('['));
    EXPECT_NO_THROW(make_backend(name)) << name;
    EXPECT_FALSE(info.description.empty());
  }
  EXPECT_THROW(make_backend("fa4"), InputError);
  EXPECT_THROW(make_backend("reference:8"), InputError);
}

TEST(Backends, SameBitsForAnyNumberOfThreads) {
  const Capture capture = generated(small("late"));
  for (const char* name : {"fa3", "fp32"}) {
    RunOptions options;
    options.want_accumulators = true;
    options.want_uncast = true;
    const Result many = make_backend(name)->run(capture, options);
    const tbb::global_control one(tbb::global_control::max_allowed_parallelism, 1);
    const Result single = make_backend(name)->run(capture, options);
    const test::Difference d = test::difference(many, single);
    EXPECT_EQ(d.differing, 0U) << name << ": " << d.text;
    EXPECT_GT(d.compared, 0U);
    EXPECT_EQ(many.uncast.dq.data, single.uncast.dq.data);
  }
}

TEST(Backends, AHeadAloneGivesTheBitsItHasAmongOthers) {
  const Capture whole = generated(small("normal"));
  Capture part = whole;
  part.problem = slice_heads(whole.problem, 1, 1);
  const Result all = make_backend("fa3")->run(whole, {});
  const Result one = make_backend("fa3")->run(part, {});
  const Problem& p = whole.problem;
  for (std::size_t i = 0; i < p.seqlen_q; ++i) {
    for (std::size_t h = 0; h < p.group(); ++h) {
      for (std::size_t d = 0; d < p.head_dim; ++d) {
        const std::size_t in_all = (i * p.heads_q + p.group() + h) * p.head_dim + d;
        const std::size_t in_one = (i * p.group() + h) * p.head_dim + d;
        ASSERT_EQ(all.out.data[in_all], one.out.data[in_one]);
        ASSERT_EQ(all.dq.data[in_all], one.dq.data[in_one]);
      }
    }
  }
}

TEST(Backends, Fa3RefusesWhatTheKernelRefuses) {
  Capture capture = generated(small("normal"));
  capture.problem.causal_alignment = CausalAlignment::top_left;
  EXPECT_THROW(make_backend("fa3")->run(capture, {}), InputError);
  capture.problem.causal_alignment = CausalAlignment::bottom_right;
  capture.problem.attributes["num_splits"] = std::int64_t{2};
  EXPECT_THROW(make_backend("fa3")->run(capture, {}), InputError);
}

TEST(Backends, DqInPartsAddsUpToDqWhereTheOrderIsFixed) {
  GenerateOptions options = small("normal");
  options.seqlen_k = 600;
  Capture capture = generated(options);
  capture.problem.deterministic = false;
  RunOptions run;
  run.want_order_free_parts = true;
  run.want_accumulators = true;
  const Result result = make_backend("fa3")->run(capture, run);
  ASSERT_FALSE(result.dq_order_fixed);
  ASSERT_EQ(result.dq_parts.parts, 5U);
  EXPECT_FALSE(result.notes.empty());
  // Ascending order is what the emulator itself takes where none is fixed.
  const std::size_t n = result.intermediates.dq_accum.size();
  for (std::size_t i = 0; i < n; ++i) {
    float sum = 0;
    for (std::size_t part = 0; part < result.dq_parts.parts; ++part) {
      const float value = result.dq_parts.values.data[part * n + i];
      if (value == value) sum += value;
    }
    ASSERT_EQ(sum, result.intermediates.dq_accum.data[i]);
  }
}

TEST(Backends, RecordedIsWhatTheCaptureHolds) {
  Capture capture = generated(small("normal"));
  EXPECT_THROW(make_backend("recorded")->run(capture, {}), InputError);
  capture.recorded = make_backend("fa3")->run(capture, {});
  const Result recorded = make_backend("recorded")->run(capture, {});
  EXPECT_EQ(recorded.out.data, capture.recorded.out.data);
  EXPECT_EQ(recorded.backend, "recorded");
}

}  // namespace
}  // namespace bitattn
