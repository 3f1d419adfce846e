// Problems: masks against their definition, head slices, and what check_problem refuses.

#include "datasets/problem.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "datasets/error.hpp"

namespace bitattn {
namespace {

using ::testing::HasSubstr;

/// The mask written down once more, condition by condition.
bool visible_by_definition(const Problem& p, std::int64_t i, std::int64_t j, std::int64_t sq,
                           std::int64_t sk) {
  if (i < 0 || i >= sq || j < 0 || j >= sk) return false;
  const std::int64_t offset = p.causal_alignment == CausalAlignment::bottom_right ? sk - sq : 0;
  if (p.causal && j > i + offset) return false;
  if (p.window_right >= 0 && j > i + offset + p.window_right) return false;
  if (p.window_left >= 0 && j < i + offset - p.window_left) return false;
  return true;
}

TEST(Mask, EqualsItsDefinitionForAllSmallProblems) {
  std::size_t cases = 0;
  for (const CausalAlignment alignment : {CausalAlignment::bottom_right, CausalAlignment::top_left}) {
    for (const bool causal : {false, true}) {
      for (const int left : {-1, 0, 1, 3, 100}) {
        for (const int right : {-1, 0, 2, 100}) {
          Problem p;
          p.causal_alignment = alignment;
          p.causal = causal;
          p.window_left = left;
          p.window_right = right;
          for (std::int64_t sq = 0; sq <= 6; ++sq) {
            for (std::int64_t sk = 0; sk <= 7; ++sk) {
              for (std::int64_t i = 0; i < sq; ++i) {
                const KeyRange range = visible_keys(p, i, sq, sk);
                for (std::int64_t j = -1; j <= sk; ++j) {
                  const bool expected = visible_by_definition(p, i, j, sq, sk);
                  ASSERT_EQ(visible(p, i, j, sq, sk), expected) << i << " " << j << " of " << sq << "x" << sk;
                  ASSERT_EQ(range.first <= j && j < range.last, expected);
                  ++cases;
                }
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(cases, 10000U);
}

TEST(Mask, RowsOutsideTheProblemSeeNothing) {
  const Problem p;
  EXPECT_FALSE(visible(p, -1, 0, 4, 4));
  EXPECT_FALSE(visible(p, 4, 0, 4, 4));
  EXPECT_TRUE(visible(p, 3, 0, 4, 4));
}

TEST(Mask, LimitsAtTheEdgeOfInt) {
  Problem p;
  p.window_left = p.window_right = std::numeric_limits<int>::max();
  EXPECT_TRUE(visible(p, 0, 9, 10, 10));
  EXPECT_TRUE(visible(p, 9, 0, 10, 10));
}

Bf16Tensor counted(const std::vector<std::size_t>& shape, std::uint16_t first) {
  Bf16Tensor tensor(shape);
  std::iota(tensor.data.begin(), tensor.data.end(), first);
  return tensor;
}

Problem small_problem() {
  Problem p;
  p.batch = 2;
  p.seqlen_q = 3;
  p.seqlen_k = 4;
  p.heads_q = 4;
  p.heads_kv = 2;
  p.head_dim = 8;
  p.head_dim_v = 6;
  p.softmax_scale = 0.25;
  p.q = counted(p.q_shape(), 0);
  p.k = counted(p.k_shape(), 1000);
  p.v = counted(p.v_shape(), 2000);
  p.dout = counted(p.out_shape(), 3000);
  return p;
}

Problem packed_problem() {
  Problem p = small_problem();
  p.layout = Layout::thd;
  p.cu_seqlens_q = {0, 5, 5, 7};
  p.cu_seqlens_k = {0, 0, 6, 8};
  p.batch = 3;
  p.seqlen_q = 5;
  p.seqlen_k = 6;
  p.q = counted({7, 4, 8}, 0);
  p.k = counted({8, 2, 8}, 1000);
  p.v = counted({8, 2, 6}, 2000);
  p.dout = counted({7, 4, 6}, 3000);
  return p;
}

TEST(Problem, ShapesAndSpansOfBothLayouts) {
  const Problem p = small_problem();
  check_problem(p, "here");
  EXPECT_EQ(p.q_shape(), (std::vector<std::size_t>{2, 3, 4, 8}));
  EXPECT_EQ(p.k_shape(), (std::vector<std::size_t>{2, 4, 2, 8}));
  EXPECT_EQ(p.v_shape(), (std::vector<std::size_t>{2, 4, 2, 6}));
  EXPECT_EQ(p.out_shape(), (std::vector<std::size_t>{2, 3, 4, 6}));
  EXPECT_EQ(p.row_shape(), (std::vector<std::size_t>{2, 4, 3}));
  EXPECT_EQ(p.row_index(1, 2, 1), 1U * 12 + 2U * 3 + 1);
  EXPECT_EQ(p.sequence(1).q_begin, 3U);
  EXPECT_EQ(p.sequence(1).k_begin, 4U);
  EXPECT_EQ(p.group(), 2U);

  const Problem packed = packed_problem();
  check_problem(packed, "here");
  EXPECT_EQ(packed.row_shape(), (std::vector<std::size_t>{4, 7}));
  EXPECT_EQ(packed.row_index(2, 3, 1), 3U * 7 + 5 + 1);
  EXPECT_EQ(packed.sequence(1).q_length, 0U);
  EXPECT_EQ(packed.sequence(1).k_begin, 0U);
  EXPECT_EQ(packed.sequence(1).k_length, 6U);
  EXPECT_EQ(packed.total_q(), 7U);
}

TEST(SliceHeads, KeepsExactlyTheHeadsOfTheKvHeadsAskedFor) {
  for (const Problem& p : {small_problem(), packed_problem()}) {
    const Problem slice = slice_heads(p, 1, 1);
    check_problem(slice, "slice");
    EXPECT_EQ(slice.heads_q, 2U);
    EXPECT_EQ(slice.heads_kv, 1U);
    for (std::size_t t = 0; t < p.total_q(); ++t) {
      for (std::size_t h = 0; h < 2; ++h) {
        for (std::size_t d = 0; d < 8; ++d) {
          ASSERT_EQ(slice.q.data[(t * 2 + h) * 8 + d], p.q.data[(t * 4 + h + 2) * 8 + d]);
        }
        for (std::size_t d = 0; d < 6; ++d) {
          ASSERT_EQ(slice.dout.data[(t * 2 + h) * 6 + d], p.dout.data[(t * 4 + h + 2) * 6 + d]);
        }
      }
    }
    for (std::size_t t = 0; t < p.total_k(); ++t) {
      for (std::size_t d = 0; d < 8; ++d) ASSERT_EQ(slice.k.data[t * 8 + d], p.k.data[(t * 2 + 1) * 8 + d]);
      for (std::size_t d = 0; d < 6; ++d) ASSERT_EQ(slice.v.data[t * 6 + d], p.v.data[(t * 2 + 1) * 6 + d]);
    }
  }
}

TEST(SliceHeads, SaysWhatItWasCutFrom) {
  Problem p = small_problem();
  p.attributes["heads_q"] = std::int64_t{4};
  const Problem all = slice_heads(p, 0, 2);
  EXPECT_FALSE(all.attributes.contains("launch_heads_q"));
  const Problem slice = slice_heads(p, 1, 1);
  EXPECT_EQ(slice.integer("launch_batch", 0), 2);
  EXPECT_EQ(slice.integer("launch_heads_q", 0), 4);
  EXPECT_EQ(slice.integer("launch_heads_kv", 0), 2);
  EXPECT_EQ(slice.integer("heads_q", 0), 2);
  EXPECT_EQ(slice.text("heads_kept"), "2,3,6,7");
  // A slice of what is a part already keeps the numbers of the launch.
  p.attributes["launch_heads_q"] = std::int64_t{54};
  p.attributes["heads_kept"] = std::string("0,1,7,53,54,55,61,107");
  const Problem again = slice_heads(p, 1, 1);
  EXPECT_EQ(again.integer("launch_heads_q", 0), 54);
  EXPECT_EQ(again.text("heads_kept"), "7,53,61,107");
}

TEST(SliceHeads, RefusesHeadsThatAreNotThere) {
  const Problem p = small_problem();
  EXPECT_THROW(slice_heads(p, 2, 1), InputError);
  EXPECT_THROW(slice_heads(p, 1, 2), InputError);
  EXPECT_THROW(slice_heads(p, 0, 0), InputError);
  EXPECT_THROW(slice_heads(p, 1, std::numeric_limits<std::size_t>::max()), InputError);
}

template <class Change>
std::string refusal(Problem p, Change change) {
  change(p);
  try {
    check_problem(p, "FILE.h5");
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(CheckProblem, NamesTensorFoundAndExpected) {
  EXPECT_THAT(refusal(small_problem(),
                      [](Problem& p) {
                        p.k.shape = {2, 4, 2, 7};
                      }),
              HasSubstr("FILE.h5: tensor k has shape [2, 4, 2, 7], expected [2, 4, 2, 8]"));
  EXPECT_THAT(refusal(small_problem(), [](Problem& p) { p.v.shape = {2, 5, 2, 6}; }), HasSubstr("tensor v"));
  EXPECT_THAT(refusal(small_problem(),
                      [](Problem& p) {
                        p.dout.shape = {2, 3, 4, 8};
                      }),
              HasSubstr("tensor dout"));
  EXPECT_THAT(refusal(small_problem(),
                      [](Problem& p) {
                        p.q.shape = {3, 4, 8};
                      }),
              HasSubstr("4 axes for layout BSHD"));
  EXPECT_THAT(refusal(small_problem(), [](Problem& p) { p.q.data.pop_back(); }),
              HasSubstr("holds 191 values"));
  EXPECT_THAT(refusal(small_problem(), [](Problem& p) { p.heads_kv = 3; }),
              HasSubstr("multiple of the KV heads"));
  EXPECT_THAT(refusal(small_problem(), [](Problem& p) { p.heads_kv = 0; }),
              HasSubstr("multiple of the KV heads"));
  EXPECT_THAT(refusal(small_problem(), [](Problem& p) { p.head_dim = 257; }),
              HasSubstr("is 257, expected 1 to 256"));
  EXPECT_THAT(refusal(small_problem(), [](Problem& p) { p.head_dim_v = 0; }),
              HasSubstr("is 0, expected 1 to 256"));
  EXPECT_THAT(refusal(small_problem(), [](Problem& p) { p.batch = 0; }), HasSubstr("batch is 0"));
  EXPECT_THAT(refusal(small_problem(), [](Problem& p) { p.softmax_scale = 0; }),
              HasSubstr("softmax_scale is 0"));
  EXPECT_THAT(refusal(small_problem(), [](Problem& p) { p.softmax_scale = -1; }),
              HasSubstr("softmax_scale is -1"));
  EXPECT_THAT(refusal(small_problem(),
                      [](Problem& p) { p.softmax_scale = std::numeric_limits<double>::quiet_NaN(); }),
              HasSubstr("softmax_scale is nan"));
  EXPECT_THAT(
      refusal(small_problem(), [](Problem& p) { p.softcap = std::numeric_limits<double>::infinity(); }),
      HasSubstr("softcap is inf"));
  EXPECT_THAT(refusal(small_problem(), [](Problem& p) { p.softcap = -3; }), HasSubstr("softcap is -3"));
  EXPECT_THAT(refusal(small_problem(), [](Problem& p) { p.window_left = -2; }),
              HasSubstr("window_left is -2"));
  EXPECT_THAT(refusal(small_problem(),
                      [](Problem& p) {
                        p.cu_seqlens_q = {0, 3};
                      }),
              HasSubstr("with layout THD only"));
}

TEST(CheckProblem, NamesWhatIsWrongWithPackedSequences) {
  EXPECT_THAT(refusal(packed_problem(), [](Problem& p) { p.cu_seqlens_q = {}; }), HasSubstr("has 0 entries"));
  EXPECT_THAT(refusal(packed_problem(),
                      [](Problem& p) {
                        p.cu_seqlens_q = {1, 5, 5, 7};
                      }),
              HasSubstr("[0] is 1"));
  EXPECT_THAT(refusal(packed_problem(),
                      [](Problem& p) {
                        p.cu_seqlens_q = {0, 5, 4, 7};
                      }),
              HasSubstr("[2] is 4"));
  EXPECT_THAT(refusal(packed_problem(),
                      [](Problem& p) {
                        p.cu_seqlens_q = {0, 5, 5, 8};
                      }),
              HasSubstr("ends at 8"));
  EXPECT_THAT(refusal(packed_problem(),
                      [](Problem& p) {
                        p.cu_seqlens_q = {0, 5, 7};
                      }),
              HasSubstr("expected 4"));
  EXPECT_THAT(refusal(packed_problem(), [](Problem& p) { p.seqlen_k = 8; }),
              HasSubstr("expected the longest"));
}

TEST(CheckProblem, NoDoutAndNoKeysAreAllowed) {
  EXPECT_EQ(refusal(small_problem(), [](Problem& p) { p.dout = {}; }), "accepted");
  EXPECT_EQ(refusal(small_problem(),
                    [](Problem& p) {
                      p.seqlen_k = 0;
                      p.k = Bf16Tensor(p.k_shape());
                      p.v = Bf16Tensor(p.v_shape());
                    }),
            "accepted");
}

TEST(Attributes, AsTextAndNumber) {
  Problem p;
  p.attributes = {{"a", std::int64_t{-7}}, {"b", 0.1}, {"c", std::string("text")}};
  EXPECT_EQ(p.text("a"), "-7");
  EXPECT_EQ(p.text("b"), "0.1");
  EXPECT_EQ(p.text("c"), "text");
  EXPECT_EQ(p.text("d", "none"), "none");
  EXPECT_EQ(p.integer("a", 0), -7);
  EXPECT_EQ(p.integer("c", 5), 5);
}

}  // namespace
}  // namespace bitattn
