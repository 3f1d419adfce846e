// Two runs: captures are paired by their moments, and the first difference is that of the order in which a
// step makes its tensors.

#include "audit/parting.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "datasets/error.hpp"
#include "tests/audit/problems.hpp"

namespace {

using namespace bitattn;
using audit::Moment;
using audit::RunCapture;
using ::testing::ElementsAre;

Moment moment(std::int64_t step, const std::string& layer, std::int64_t call = 0, std::int64_t rank = 0) {
  return {step, layer, call, rank, true};
}

TEST(Moment, LayersComeInTheirNaturalOrder) {
  const std::vector<std::string> ordered{
      "0",        "2",    "10",    "blocks.2.attn", "blocks.9.attn", "blocks.10.attn", "blocks.10.attn2",
      "blocks.a", "head", "head.1"};
  for (std::size_t i = 0; i < ordered.size(); ++i) {
    for (std::size_t j = 0; j < ordered.size(); ++j) {
      EXPECT_EQ(audit::natural_less(ordered[i], ordered[j]), i < j) << ordered[i] << " " << ordered[j];
    }
  }
  // Different names of one number are different, in one of both orders; numbers may be longer than any
  // integer.
  EXPECT_NE(audit::natural_less("h07", "h7"), audit::natural_less("h7", "h07"));
  EXPECT_TRUE(audit::natural_less("99999999999999999999998", "99999999999999999999999"));
}

TEST(Moment, StepLayerCallAndRankInThisOrder) {
  EXPECT_LT(moment(1, "9"), moment(2, "1"));
  EXPECT_LT(moment(1, "9", 5), moment(1, "10", 0));
  EXPECT_LT(moment(1, "9", 0, 7), moment(1, "9", 1, 0));
  EXPECT_FALSE(moment(1, "9") < moment(1, "9"));
}

TEST(Moment, NumbersAndTextSayTheSame) {
  const Moment numbers =
      audit::moment_of({{"step", std::int64_t{7}}, {"layer", std::int64_t{3}}}, "x", "/g", "x.h5:/g");
  const Moment texts =
      audit::moment_of({{"step", std::string("7")}, {"layer", std::string("3")}}, "x", "/", "");
  const Moment reals = audit::moment_of({{"step", 7.0}, {"layer", 3.0}, {"call", 0.0}}, "x", "/", "");
  EXPECT_EQ(numbers, texts);
  EXPECT_EQ(numbers, reals);
  EXPECT_TRUE(numbers.said);
  EXPECT_THROW(audit::moment_of({{"step", std::string("seven")}}, "x", "/", ""), InputError);
  EXPECT_THROW(audit::moment_of({{"rank", 0.5}}, "x", "/", ""), InputError);
}

TEST(Moment, WithoutALayerTheGroupOrThePlaceTellsCapturesApart) {
  const Moment step = audit::moment_of({{"step", std::int64_t{2}}}, "x", "/h.3", "a.h5:/h.3");
  EXPECT_EQ(step, moment(2, "/h.3"));
  EXPECT_TRUE(step.said);
  const Moment nothing = audit::moment_of({}, "x", "/h.3", "a.h5:/h.3");
  EXPECT_EQ(nothing, moment(0, "a.h5:/h.3"));
  EXPECT_FALSE(nothing.said);
}

TEST(PairRuns, PairsMomentsAndNamesTheOthers) {
  const std::vector<RunCapture> a{
      {"a1", moment(1, "h.10")}, {"a2", moment(1, "h.9")}, {"a3", moment(2, "h.9")}};
  const std::vector<RunCapture> b{
      {"b3", moment(3, "h.9")}, {"b2", moment(1, "h.9")}, {"b1", moment(1, "h.10")}};
  const audit::PairedRuns runs = audit::pair_runs("A", a, "B", b);
  ASSERT_EQ(runs.pairs.size(), 2U);
  EXPECT_EQ(runs.pairs[0].a + runs.pairs[0].b, "a2b2");
  EXPECT_EQ(runs.pairs[1].a + runs.pairs[1].b, "a1b1");
  EXPECT_THAT(runs.only_in_a, ElementsAre("a3"));
  EXPECT_THAT(runs.only_in_b, ElementsAre("b3"));
}

TEST(PairRuns, OneAgainstOneIsAPairWhateverTheySay) {
  EXPECT_TRUE(
      audit::pair_runs("A", {{"a", moment(1, "x")}}, "B", {{"b", moment(1, "x")}}).pairs[0].moment.said);
  EXPECT_FALSE(
      audit::pair_runs("A", {{"a", moment(1, "x")}}, "B", {{"b", moment(2, "y")}}).pairs[0].moment.said);
}

TEST(PairRuns, RefusesTwoOfOneMomentAndNothingInCommon) {
  const std::vector<RunCapture> twice{{"a", moment(1, "x")}, {"b", moment(1, "x")}};
  EXPECT_THROW(audit::pair_runs("A", twice, "B", {{"c", moment(1, "x")}}), InputError);
  const std::vector<RunCapture> two{{"a", moment(1, "x")}, {"b", moment(2, "x")}};
  EXPECT_THROW(audit::pair_runs("A", two, "B", {{"c", moment(3, "x")}}), InputError);
}

/// Layers h.2, h.9 and h.10 of steps 1 and 2, recorded twice; one bit can be turned in the second run.
class Runs : public ::testing::Test {
 protected:
  Runs() {
    for (const std::int64_t step : {1, 2}) {
      for (const char* layer : {"h.2", "h.9", "h.10"}) {
        for (std::map<std::string, Capture>* run : {&a_, &b_}) {
          Capture c;
          c.name = name(run == &a_ ? "a" : "b", step, layer);
          c.problem = test::blank({2, 4, 6, 2, 1, 64});
          test::fill(c.problem, 5);
          c.recorded.backend = "recorded";
          c.recorded.out = Bf16Tensor(c.problem.out_shape(), 0x3f80);
          c.recorded.dq = Bf16Tensor(c.problem.q_shape(), 0x3f80);
          c.recorded.dk = c.recorded.dv = Bf16Tensor(c.problem.k_shape(), 0x3f80);
          c.recorded.lse = Fp32Tensor(c.problem.row_shape(), 1.0F);
          c.recorded.intermediates.dpsum = Fp32Tensor({2, 2, 64}, 1.0F);
          (*run)[c.name] = c;
        }
      }
    }
  }
  static std::string name(const std::string& run, std::int64_t step, const std::string& layer) {
    return run + std::to_string(step) + layer;
  }
  Capture& b(std::int64_t step, const std::string& layer) { return b_.at(name("b", step, layer)); }

  audit::ComparedRuns compare() {
    std::vector<RunCapture> a;
    std::vector<RunCapture> b;
    for (const std::int64_t step : {1, 2}) {
      for (const char* layer : {"h.10", "h.2", "h.9"}) {
        a.push_back({name("a", step, layer), moment(step, layer)});
        b.push_back({name("b", step, layer), moment(step, layer)});
      }
    }
    reads_ = 0;
    return audit::compare_runs(audit::pair_runs("A", a, "B", b), true, [&](const std::string& of) {
      ++reads_;
      return of[0] == 'a' ? a_.at(of) : b_.at(of);
    });
  }
  static std::string first_of(const audit::ComparedRuns& runs) {
    if (!runs.first) return "none";
    const audit::ComparedPair& pair = runs.pairs[*runs.first];
    return std::to_string(pair.captures.moment.step) + " " + pair.captures.moment.layer + " " +
           pair.partings.front().tensor.tensor;
  }

  std::map<std::string, Capture> a_, b_;
  std::size_t reads_ = 0;
};

TEST_F(Runs, EqualOnesPartNowhere) {
  const audit::ComparedRuns runs = compare();
  EXPECT_TRUE(runs.equal());
  EXPECT_EQ(first_of(runs), "none");
  EXPECT_EQ(runs.pairs.size(), 6U);
  EXPECT_EQ(reads_, 12U);
  EXPECT_FALSE(runs.first_a);
}

TEST_F(Runs, TheBackwardOfALaterLayerComesFirst) {
  b(1, "h.2").recorded.dq.data[0] ^= 1U;
  b(1, "h.9").recorded.dq.data[0] ^= 1U;
  b(1, "h.9").recorded.dv.data[3] ^= 1U;
  b(2, "h.10").recorded.out.data[0] ^= 1U;
  const audit::ComparedRuns runs = compare();
  EXPECT_EQ(first_of(runs), "1 h.9 dv");
  EXPECT_EQ(runs.differing_pairs(), 3U);
  EXPECT_FALSE(runs.equal());
  ASSERT_TRUE(runs.first_b);
  EXPECT_EQ(runs.first_a->name, "a1h.9");
  EXPECT_EQ(runs.first_b->name, "b1h.9");
  const audit::Parting& dv = runs.pairs[*runs.first].partings.front();
  EXPECT_TRUE(dv.backward);
  EXPECT_FALSE(dv.input || dv.open_order || dv.unseen_before);
  EXPECT_EQ(dv.tensor.first->place.text(Layout::bshd), "b 0, h 0, j 0, d 3 (backward tile n 0)");
}

TEST_F(Runs, TheForwardOfAStepComesBeforeItsBackward) {
  b(1, "h.10").recorded.dq.data[0] ^= 1U;
  b(1, "h.2").recorded.dq.data[0] ^= 1U;
  b(1, "h.9").recorded.lse.data[1] = 2;
  b(1, "h.10").recorded.out.data[1] ^= 1U;
  EXPECT_EQ(first_of(compare()), "1 h.9 lse");
}

TEST_F(Runs, WhatWasGivenComesBeforeWhatWasMade) {
  b(2, "h.2").recorded.out.data[0] ^= 1U;
  b(2, "h.2").problem.v.data[0] ^= 1U;
  b(2, "h.9").problem.q.data[0] ^= 1U;
  audit::ComparedRuns runs = compare();
  EXPECT_EQ(first_of(runs), "2 h.2 v");
  EXPECT_TRUE(runs.pairs[*runs.first].partings.front().input);
  EXPECT_EQ(runs.pairs[*runs.first].partings.front().tensor.first->place.tile, -1);
  b(1, "h.9").problem.dout.data[0] ^= 1U;
  b(1, "h.9").recorded.intermediates.dpsum.data[0] = 2;
  runs = compare();
  EXPECT_EQ(first_of(runs), "1 h.9 dout");
  EXPECT_TRUE(runs.pairs[*runs.first].partings.front().input);
  EXPECT_TRUE(runs.pairs[*runs.first].partings.front().backward);
}

TEST_F(Runs, IntermediatesOfOtherTilesComeLast) {
  b(1, "h.2").recorded.intermediates.dpsum = Fp32Tensor({2, 2, 128}, 1.0F);
  EXPECT_EQ(first_of(compare()), "1 h.2 dpsum");
  b(1, "h.2").recorded.dk.data[0] ^= 1U;
  const audit::ComparedRuns runs = compare();
  EXPECT_EQ(first_of(runs), "1 h.2 dk");
  EXPECT_EQ(runs.pairs[*runs.first].partings.size(), 2U);
}

TEST_F(Runs, WhatWasNotRecordedIsSaid) {
  a_.at("a1h.2").recorded.lse = {};
  b(1, "h.2").recorded.dq.data[0] ^= 1U;
  EXPECT_TRUE(compare().pairs[0].partings.front().unseen_before);
}

TEST_F(Runs, OpenOrdersAreSaid) {
  b(1, "h.2").problem.deterministic = false;
  b(1, "h.2").recorded.dq.data[0] ^= 1U;
  b(1, "h.2").recorded.dk.data[0] ^= 1U;
  b(1, "h.2").recorded.intermediates.dpsum.data[0] = 2;
  const audit::ComparedRuns runs = compare();
  const std::vector<audit::Parting>& found = runs.pairs[0].partings;
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(found[0].tensor.tensor, "dpsum");
  EXPECT_FALSE(found[0].open_order);
  EXPECT_TRUE(found[1].open_order) << "two query heads add to dK";
  EXPECT_TRUE(found[2].open_order);
}

TEST_F(Runs, ADoutThatOneRunDidNotRecordIsNoDifference) {
  b(1, "h.2").problem.dout = {};
  EXPECT_TRUE(compare().equal());
}

TEST_F(Runs, OtherProblemsAreRefused) {
  b(1, "h.2").problem.softcap = 15;
  EXPECT_THROW(compare(), InputError);
}

TEST_F(Runs, WithoutAnyOutputThereIsNothingToCompare) {
  b(1, "h.2").recorded = {};
  EXPECT_TRUE(compare().equal()) << "its inputs are compared";
  for (auto& [name, capture] : b_) capture.recorded = {};
  EXPECT_THROW(compare(), InputError);
}

}  // namespace
