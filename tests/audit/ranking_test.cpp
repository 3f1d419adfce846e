// The rules of a ranking: what is worse, what counts as one, whose backward goes to FP32 first.

#include "audit/ranking.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace bitattn::audit {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

RankedCapture capture(const std::string& layer, std::int64_t step, double leak,
                      std::vector<double> heads = {}, const std::string& heads_kept = "") {
  RankedCapture made;
  made.name = layer + ".h5";
  made.layer = layer;
  made.step = step;
  made.heads_kept = heads_kept;
  made.recorded = made.reproduced = true;
  made.figures = {leak, 1, 1, 1, 1, 1, 1, 1};
  made.leak_by_head = std::move(heads);
  return made;
}

std::vector<std::string> names(const Ranking& ranking) {
  std::vector<std::string> all;
  for (const RankedLayer& layer : ranking.layers) all.push_back(layer.layer);
  return all;
}

TEST(Ranking, LayersByLeakAtTheirLastStepThenInNaturalOrderUnknownOnesLast) {
  const Ranking ranking = rank({capture("h.10", 2, 5e-3), capture("h.10", 1, 1e-3), capture("h.9", 2, 5e-3),
                                capture("h.2", 2, kUnknown), capture("h.3", 1, 1), capture("h.3", 2, 9e-3)});
  EXPECT_THAT(names(ranking), ElementsAre("h.3", "h.9", "h.10", "h.2"));
  EXPECT_THAT(ranking.fp32_first, ElementsAre("h.3", "h.9", "h.10"));
  EXPECT_EQ(ranking.layers[2].leak_growth, 5);
  EXPECT_TRUE(std::isnan(ranking.layers[1].leak_growth));  // one step
  EXPECT_EQ(ranking.layers[2].steps[0].step, 1);
}

TEST(Ranking, WhatTheCastsCostAnywayNeedsNoRemedy) {
  const Ranking ranking = rank({capture("a", 1, kLeakOfCasts), capture("b", 1, 1e-4)});
  EXPECT_THAT(ranking.fp32_first, IsEmpty());
}

TEST(Ranking, GrowthFromNothingOrFromTheUnknownIsUnknown) {
  const Ranking ranking =
      rank({capture("a", 1, 0), capture("a", 2, 1), capture("b", 1, kUnknown), capture("b", 2, 1)});
  EXPECT_TRUE(std::isnan(ranking.layers[0].leak_growth));
  EXPECT_TRUE(std::isnan(ranking.layers[1].leak_growth));
}

RankedCapture not_finite(RankedCapture capture, std::vector<std::string> tensors) {
  capture.not_finite = std::move(tensors);
  return capture;
}

TEST(Ranking, ALayerThatEndsInNanIsRankedByItsLastKnownLeak) {
  const Ranking ranking =
      rank({capture("a", 1, 1e-3, {1e-3}), capture("a", 2, 8e-3, {8e-3}),
            not_finite(capture("a", 3, kUnknown, {kUnknown}), {"dout", "dq"}),
            not_finite(capture("a", 4, kUnknown, {kUnknown}), {"q", "out", "dout"}), capture("b", 4, 5e-3),
            not_finite(capture("c", 3, kUnknown), {"dq", "v"}), capture("d", 1, kUnknown)});
  EXPECT_THAT(names(ranking), ElementsAre("a", "b", "c", "d"));
  EXPECT_THAT(ranking.fp32_first, ElementsAre("a", "b"));
  const RankedLayer& a = ranking.layers[0];
  EXPECT_EQ(a.ranked_step().step, 2);
  EXPECT_TRUE(a.falls_back());
  EXPECT_EQ(a.leak_growth, 8);
  EXPECT_EQ(a.not_finite, 2U);
  EXPECT_TRUE(a.stays_not_finite);
  EXPECT_EQ(ranking.heads[0].leak, 8e-3);
  EXPECT_FALSE(ranking.layers[1].falls_back());
  EXPECT_FALSE(ranking.layers[1].not_finite.has_value());
  EXPECT_FALSE(ranking.layers[3].falls_back());  // one step, which is not known
  // Of one step the forward comes first: in v of c, not in dout of a.
  ASSERT_TRUE(ranking.not_finite.has_value());
  EXPECT_EQ(ranking.not_finite->step, 3);
  EXPECT_EQ(ranking.not_finite->tensor, "v");
  EXPECT_THAT(ranking.not_finite->layers, ElementsAre("c"));
}

TEST(Ranking, NanThatGoesAwayIsTold) {
  const Ranking ranking =
      rank({capture("a", 1, 1e-3), not_finite(capture("a", 2, kUnknown), {"dout"}), capture("a", 3, 2e-3),
            capture("h.10", 2, 1e-3), not_finite(capture("h.10", 2, kUnknown), {"dout"})});
  EXPECT_EQ(ranking.layers[0].ranked_step().step, 3);
  EXPECT_FALSE(ranking.layers[0].stays_not_finite);
  EXPECT_TRUE(ranking.layers[1].stays_not_finite);
  EXPECT_EQ(ranking.layers[1].steps[0].figures.leak, 1e-3);  // of another rank
  EXPECT_THAT(ranking.not_finite->layers, ElementsAre("a", "h.10"));
  EXPECT_FALSE(ranking.not_finite->stays);
}

TEST(Ranking, RanksOfALayerAndStepCountAsTheWorst) {
  RankedCapture first = capture("a", 2, 1e-3, {1e-3, 4e-3}, "4,7");
  RankedCapture second = capture("a", 2, 9e-3, {9e-3, 1e-3}, "4,7");
  first.figures.largest_logit = 50;
  second.figures.residue = kUnknown;
  const Ranking ranking = rank({first, second});
  ASSERT_EQ(ranking.layers.size(), 1U);
  ASSERT_EQ(ranking.layers[0].steps.size(), 1U);
  EXPECT_EQ(ranking.layers[0].steps[0].figures.leak, 9e-3);
  EXPECT_EQ(ranking.layers[0].steps[0].figures.largest_logit, 50);
  EXPECT_EQ(ranking.layers[0].steps[0].figures.residue, 1);
  EXPECT_THAT(ranking.layers[0].steps[0].leak_by_head, ElementsAre(Pair("4", 9e-3), Pair("7", 4e-3)));
  ASSERT_EQ(ranking.heads.size(), 2U);
  EXPECT_EQ(ranking.heads[0].head, "4");
  EXPECT_EQ(ranking.heads[1].leak, 4e-3);
}

TEST(Ranking, RanksThatKeptDifferentHeadsGiveAllOfThem) {
  const Ranking ranking = rank({capture("a", 1, 1, {0.1}, "0"), capture("a", 1, 1, {0.2}, "1")});
  EXPECT_THAT(ranking.layers[0].steps[0].leak_by_head, ElementsAre(Pair("0", 0.1), Pair("1", 0.2)));
}

TEST(Ranking, HeadsKeptOfALaterBatchElementHaveTheirNumbersInTheLayer) {
  RankedCapture late = capture("a", 1, 1, {0.1, 0.2}, "5,7");
  late.launch_heads_q = 4;
  RankedCapture named = capture("a", 1, 1, {0.3, 0.4}, "3,last");
  named.launch_heads_q = 4;
  const Ranking ranking = rank({late, named});
  EXPECT_THAT(ranking.layers[0].steps[0].leak_by_head,
              ElementsAre(Pair("1", 0.1), Pair("3", 0.3), Pair("last", 0.4)));
}

TEST(Ranking, HeadsKeptOfSeveralBatchElementsAreNamedOnce) {
  const Ranking ranking = rank({capture("a", 1, 1, {0.1, 0.2}, "3,5,3,5")});
  EXPECT_THAT(ranking.layers[0].steps[0].leak_by_head, ElementsAre(Pair("3", 0.1), Pair("5", 0.2)));
  // A list that is too short names none of them.
  const Ranking other = rank({capture("a", 1, 1, {0.1, 0.2}, "3")});
  EXPECT_THAT(other.layers[0].steps[0].leak_by_head, ElementsAre(Pair("0", 0.1), Pair("1", 0.2)));
}

TEST(Ranking, CapturesThatNameNoLayerAreOneEach) {
  RankedCapture x = capture("", 1, 1e-3);
  RankedCapture y = capture("", 1, 2e-2);
  x.name = "x.h5";
  y.name = "y.h5";
  y.step.reset();
  const Ranking ranking = rank({x, y});
  EXPECT_THAT(names(ranking), ElementsAre("y.h5", "x.h5"));
  EXPECT_FALSE(ranking.layers[0].steps[0].step.has_value());
}

TEST(Ranking, SaysWhoseFiguresTheyAre) {
  RankedCapture other = capture("a", 1, 1);
  other.kernel = "pytorch-flash";
  other.reproduced = false;
  RankedCapture bare = capture("b", 1, 1);
  bare.recorded = bare.reproduced = false;
  const Ranking ranking = rank({other, bare, capture("c", 1, 1)});
  EXPECT_EQ(ranking.captures, 3U);
  EXPECT_EQ(ranking.reproduced, 1U);
  EXPECT_EQ(ranking.nothing_recorded, 1U);
  EXPECT_THAT(ranking.not_reproduced, ElementsAre(Pair("pytorch-flash", 1U)));
}

TEST(Ranking, NothingIsRankedAsNothing) {
  const Ranking ranking = rank({});
  EXPECT_THAT(ranking.layers, IsEmpty());
  EXPECT_THAT(ranking.fp32_first, IsEmpty());
}

}  // namespace
}  // namespace bitattn::audit
