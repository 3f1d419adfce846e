// Proves: the tiles, the packing of query heads and the numbers that the profile derives from a call are
// those with which the real library ran, as its captures say.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "backends/attention_inputs.hpp"
#include "emu/profile/flash3.hpp"
#include "tests/backends/goldens.hpp"

namespace bitattn {
namespace {

void expect_recorded_tiles(const std::vector<std::string>& paths, int& checked) {
  for (const std::string& path : paths) {
    SCOPED_TRACE(path);
    const Capture capture = test::load(path);
    const Problem& problem = capture.problem;
    ProblemViews views;
    view_problem(problem, true, views);
    const profile::Profile fa3;
    const profile::ForwardTiles forward = profile::flash3_forward_tiles(views.inputs.call, fa3);
    const profile::BackwardTiles backward = profile::flash3_backward_tiles(views.inputs.call, fa3);
    const auto expect = [&](const char* attribute, std::int64_t found) {
      const std::int64_t recorded = problem.integer(attribute, -1);
      if (recorded < 0) return;
      EXPECT_EQ(recorded, found) << attribute;
      ++checked;
    };
    expect("fwd_block_m", forward.block_m);
    expect("fwd_block_n", forward.block_n);
    expect("fwd_pack_gqa", forward.pack_gqa ? 1 : 0);
    expect("bwd_block_m", backward.block_m);
    expect("bwd_block_n", backward.block_n);
  }
}

TEST(Fa3Tiles, AreThoseOfTheBundledCaptures) {
  int checked = 0;
  expect_recorded_tiles(test::bundled_captures("fa3"), checked);
  EXPECT_GE(checked, 50);
}

TEST(Fa3Tiles, AreThoseOfTheLargeSet) {
  const std::vector<std::string> paths = test::large_set_captures("fa3");
  if (paths.empty()) GTEST_SKIP() << "BITATTN_GOLDENS is not set";
  int checked = 0;
  expect_recorded_tiles(paths, checked);
  EXPECT_GE(checked, 100);
}

// Table 2.1 of docs/spec/fa3-operation-order.md.
TEST(Fa3Scalars, DefaultScales) {
  struct Row {
    int head_dim;
    std::uint32_t scale, scale_log2;
  };
  for (const Row& row : {Row{64, 0x3E000000, 0x3E38AA3B}, Row{80, 0x3DE4F92E, 0x3E252B5B},
                         Row{96, 0x3DD105EC, 0x3E16C740}, Row{128, 0x3DB504F3, 0x3E0293EE},
                         Row{192, 0x3D93CD3A, 0x3DD53B94}, Row{256, 0x3D800000, 0x3DB8AA3B}}) {
    profile::Call call;
    call.softmax_scale = 1.0 / std::sqrt(static_cast<double>(row.head_dim));
    const profile::Scalars scalars = profile::flash3_scalars(call);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(scalars.softmax_scale), row.scale) << row.head_dim;
    EXPECT_EQ(std::bit_cast<std::uint32_t>(scalars.scale_log2), row.scale_log2) << row.head_dim;
  }
}

// The host drops causal for one query in the forward alone (2.1), and a window as wide as the sequence is
// none.
TEST(Fa3Masks, AreNormalisedAsTheHostDoes) {
  profile::Call call;
  call.head_dim = call.head_dim_v = 128;
  call.heads_q = call.heads_kv = 1;
  call.seqlen_q = 1;
  call.seqlen_k = 400;
  call.causal = true;
  const profile::Profile fa3;
  EXPECT_FALSE(profile::flash3_forward_tiles(call, fa3).mask.causal);
  EXPECT_EQ(profile::flash3_forward_tiles(call, fa3).block_n, 176);
  EXPECT_TRUE(profile::flash3_backward_tiles(call, fa3).mask.causal);
  EXPECT_EQ(profile::flash3_backward_tiles(call, fa3).dq_order, profile::DqOrder::descending);
  call.seqlen_q = 400;
  call.causal = false;
  call.window_left = 399;
  call.window_right = 0;
  EXPECT_TRUE(profile::flash3_forward_tiles(call, fa3).mask.causal);
  call.window_left = 398;
  EXPECT_TRUE(profile::flash3_forward_tiles(call, fa3).mask.local);
  call.window_right = 399;
  call.window_left = 399;
  EXPECT_FALSE(profile::flash3_forward_tiles(call, fa3).mask.causal);
  EXPECT_FALSE(profile::flash3_forward_tiles(call, fa3).mask.local);
}

}  // namespace
}  // namespace bitattn
