// Two results of one problem: every bit counts, places are right, and what is not compared is counted.

#include "audit/compare.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "backends/backend.hpp"
#include "emu/arith/bf16.hpp"
#include "emu/arith/bits.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "tests/audit/problems.hpp"

namespace {

using namespace bitattn;
using audit::Comparison;
using audit::TensorComparison;
using audit::TensorVerdict;

const TensorComparison& tensor(const Comparison& comparison, const std::string& name) {
  for (const TensorComparison& t : comparison.tensors) {
    if (t.tensor == name) return t;
  }
  throw std::runtime_error("no tensor " + name);
}

/// A result with every tensor of the problem, elements all different.
Result full_result(const Problem& p, const std::string& backend) {
  Result r;
  r.backend = backend;
  const auto numbered = [](const std::vector<std::size_t>& shape) {
    Bf16Tensor t(shape);
    for (std::size_t i = 0; i < t.size(); ++i) t.data[i] = static_cast<std::uint16_t>(0x3f80U + i % 64U);
    return t;
  };
  r.out = numbered(p.out_shape());
  r.dq = numbered(p.q_shape());
  r.dk = numbered(p.k_shape());
  r.dv = numbered(p.v_shape());
  r.lse = Fp32Tensor(p.row_shape(), 1.5F);
  return r;
}

TEST(Compare, EqualResultsAreEqualInEveryTensor) {
  const Problem p = test::blank({2, 5, 7, 4, 2, 64});
  const Comparison c = audit::compare_results("x", p, full_result(p, "a"), full_result(p, "b"));
  EXPECT_TRUE(c.equal());
  EXPECT_EQ(c.compared_tensors(), 5U);
  EXPECT_EQ(c.elements(), 2 * 5 * 4 * 64 * 2 + 2 * 7 * 2 * 64 * 2 + 2 * 4 * 5U);
  EXPECT_EQ(c.differing(), 0U);
  for (const TensorComparison& t : c.tensors) {
    EXPECT_EQ(t.equal_bits, t.elements);
    EXPECT_EQ(t.relative_error, 0);
    EXPECT_FALSE(t.first);
  }
}

TEST(Compare, CountsDifferingBitsUlpsAndPlaces) {
  const Problem p = test::blank({1, 200, 8, 2, 1, 64});
  const Result a = full_result(p, "a");
  Result b = full_result(p, "b");
  const auto at = [&](std::size_t i, std::size_t h, std::size_t d) { return (i * 2 + h) * 64 + d; };
  b.dq.data[at(150, 1, 9)] = static_cast<std::uint16_t>(a.dq.data[at(150, 1, 9)] + 1);
  b.dq.data[at(170, 0, 3)] = static_cast<std::uint16_t>(a.dq.data[at(170, 0, 3)] + 5);
  const Comparison c = audit::compare_results("x", p, a, b);
  EXPECT_FALSE(c.equal());
  EXPECT_EQ(c.differing(), 2U);
  const TensorComparison& dq = tensor(c, "dq");
  EXPECT_EQ(dq.verdict, TensorVerdict::differs);
  EXPECT_EQ(dq.differing_bits, 2U);
  EXPECT_EQ(dq.largest_ulps, 5U);
  ASSERT_TRUE(dq.first && dq.worst);
  EXPECT_EQ(dq.first->place.text(p.layout), "b 0, h 1, i 150, d 9 (backward tile m 1)");
  EXPECT_EQ(dq.worst->place.text(p.layout), "b 0, h 0, i 170, d 3 (backward tile m 1)");
  EXPECT_EQ(dq.worst->ulps, 5U);
  EXPECT_GT(dq.relative_error, 0);
  EXPECT_EQ(tensor(c, "out").verdict, TensorVerdict::equal);
}

TEST(Compare, SignedZerosAndNanPayloadsAreBits) {
  const Problem p = test::blank({1, 2, 2, 1, 1, 64});
  Result a = full_result(p, "a");
  Result b = full_result(p, "b");
  a.out.data[3] = 0x0000;
  b.out.data[3] = 0x8000;
  a.lse.data[0] = arith::from_bits(0x7fffffffU);
  b.lse.data[0] = arith::from_bits(0x7fc00000U);
  a.lse.data[1] = b.lse.data[1] = arith::from_bits(0x7fffffffU);
  const Comparison c = audit::compare_results("x", p, a, b);
  EXPECT_EQ(tensor(c, "out").differing_bits, 1U);
  EXPECT_EQ(tensor(c, "out").largest_ulps, 0U);
  EXPECT_EQ(tensor(c, "lse").differing_bits, 1U);
  EXPECT_EQ(tensor(c, "lse").nan_differences, 1U);
  EXPECT_EQ(tensor(c, "lse").equal_bits, 1U);
  EXPECT_EQ(tensor(c, "lse").worst->ulps, audit::kUlpsOfNan);
}

TEST(Compare, UlpsCountRepresentableNumbersBetween) {
  EXPECT_EQ(audit::ulps_between_bf16(0x3f80, 0x3f81), 1U);
  EXPECT_EQ(audit::ulps_between_bf16(0x0001, 0x8001), 2U);
  EXPECT_EQ(audit::ulps_between_bf16(0x0000, 0x8000), 0U);
  EXPECT_EQ(audit::ulps_between_bf16(0x7f7f, 0x7f80), 1U);
  EXPECT_EQ(audit::ulps_between_fp32(0x3f800000U, 0xbf800000U), 2 * 0x3f800000ULL);
  EXPECT_EQ(audit::ulps_between_fp32(0x7f800000U, 0xff800000U), 2 * 0x7f800000ULL);
}

TEST(Compare, RelativeErrorIsFrobeniusOverFiniteElements) {
  const Problem p = test::blank({1, 1, 1, 1, 1, 64});
  Result a;
  Result b;
  a.backend = "a";
  b.backend = "b";
  a.out = b.out = Bf16Tensor(p.out_shape());
  b.out.data[0] = arith::bf16_from_fp32(3.0F);
  b.out.data[1] = arith::bf16_from_fp32(4.0F);
  a.out.data[0] = arith::bf16_from_fp32(3.0F);
  a.out.data[1] = arith::bf16_from_fp32(4.5F);
  a.out.data[2] = 0x7f80;  // an infinity: a difference in bits, and left out of the norm
  const Comparison c = audit::compare_results("x", p, a, b);
  EXPECT_DOUBLE_EQ(tensor(c, "out").relative_error, 0.1);
  EXPECT_EQ(tensor(c, "out").differing_bits, 2U);
}

TEST(Compare, PlacesThatNoKernelWritesAreCountedNotCompared) {
  const Problem p = test::blank_packed({3, 5}, {3, 5}, {1, 0, 0, 1, 1, 64});
  Result recorded = full_result(p, "recorded");
  Result emulated = full_result(p, "fa3");
  recorded.intermediates.dpsum = Fp32Tensor({1, 136}, 1.0F);
  emulated.intermediates.dpsum = Fp32Tensor({1, 136}, 1.0F);
  emulated.intermediates.dpsum.data[100] = arith::from_bits(0xffffffffU);
  recorded.intermediates.dpsum.data[100] = 77.0F;
  Comparison c = audit::compare_results("x", p, recorded, emulated);
  EXPECT_TRUE(c.equal());
  EXPECT_EQ(tensor(c, "dpsum").not_written, 1U);
  EXPECT_EQ(tensor(c, "dpsum").equal_bits, 135U);
  // The other way round is a difference: the kernel should have written there.
  recorded.intermediates.dpsum.data[5] = arith::from_bits(0xffffffffU);
  c = audit::compare_results("x", p, recorded, emulated);
  EXPECT_EQ(tensor(c, "dpsum").differing_bits, 1U);
  // Of two recorded results both have to hold it.
  emulated.backend = "recorded";
  c = audit::compare_results("x", p, recorded, emulated);
  EXPECT_EQ(tensor(c, "dpsum").differing_bits, 2U);
  // In an output 0xffff is a NaN like any other.
  recorded.out.data[0] = 0xffff;
  c = audit::compare_results("x", p, recorded, emulated);
  EXPECT_EQ(tensor(c, "out").differing_bits, 1U);
}

TEST(Compare, OtherShapesDifferAndMissingTensorsAreNotCompared) {
  const Problem p = test::blank({1, 4, 4, 1, 1, 64});
  Result a = full_result(p, "a");
  Result b = full_result(p, "b");
  a.intermediates.dpsum = Fp32Tensor({1, 1, 128});
  b.intermediates.dpsum = Fp32Tensor({1, 1, 64});
  a.dk = {};
  const Comparison c = audit::compare_results("x", p, a, b);
  EXPECT_EQ(tensor(c, "dpsum").verdict, TensorVerdict::differs);
  EXPECT_EQ(tensor(c, "dpsum").remark, "shape [1, 1, 128] against [1, 1, 64]");
  EXPECT_EQ(tensor(c, "dk").verdict, TensorVerdict::only_in_b);
  EXPECT_FALSE(c.equal());
  EXPECT_FALSE(audit::compare_results("x", p, Result{}, b).equal()) << "nothing in common is not equal";
}

/// dQ of one query over three key blocks whose order is open.
class OpenOrder : public ::testing::Test {
 protected:
  OpenOrder() {
    emulated_.backend = "fa3";
    recorded_.backend = "recorded";
    emulated_.dq_order_fixed = false;
    emulated_.dq_parts.parts = parts_.size();
    emulated_.dq_parts.values = Fp32Tensor({parts_.size(), 1, 1, 128, 64}, arith::from_bits(0xffffffffU));
    const std::size_t stride = 128 * 64;
    for (std::size_t i = 0; i < parts_.size(); ++i)
      emulated_.dq_parts.values.data[i * stride + 7] = parts_[i];
    const float sum = (parts_[0] + parts_[1]) + parts_[2];
    const float other = (parts_[1] + parts_[2]) + parts_[0];
    EXPECT_NE(arith::to_bits(sum), arith::to_bits(other));
    emulated_.intermediates.dq_accum = recorded_.intermediates.dq_accum = Fp32Tensor({1, 1, 128, 64});
    emulated_.intermediates.dq_accum.data[7] = sum;
    recorded_.intermediates.dq_accum.data[7] = other;
    emulated_.dq = recorded_.dq = Bf16Tensor(problem_.q_shape());
    const auto scale = static_cast<float>(problem_.softmax_scale);
    emulated_.dq.data[7] = arith::bf16_from_fp32(arith::ftz::mul(sum, scale));
    recorded_.dq.data[7] = arith::bf16_from_fp32(arith::ftz::mul(other, scale));
  }

  // 1.00390625 lies half way between two BF16 values, so the lost half ulps of one order decide the cast.
  std::vector<float> parts_{0x1.01p0F, 0x1p-24F, 0x1p-24F};
  Problem problem_ = test::blank({1, 1, 384, 1, 1, 64});
  Result emulated_, recorded_;
};

TEST_F(OpenOrder, AnElementPassesIfOneOrderGivesIt) {
  EXPECT_NE(emulated_.dq.data[7], recorded_.dq.data[7]);
  const Comparison c = audit::compare_results("x", problem_, recorded_, emulated_);
  EXPECT_TRUE(c.equal());
  EXPECT_EQ(tensor(c, "dq_accum").equal_in_one_order, 1U);
  EXPECT_EQ(tensor(c, "dq").equal_in_one_order, 1U);
  EXPECT_EQ(tensor(c, "dq").remark, "order not fixed, equal to one order");
}

TEST_F(OpenOrder, AnElementFailsIfNoneDoes) {
  recorded_.intermediates.dq_accum.data[7] = std::nextafter(recorded_.intermediates.dq_accum.data[7], 2.0F);
  recorded_.dq.data[7] = static_cast<std::uint16_t>(recorded_.dq.data[7] + 1);
  const Comparison c = audit::compare_results("x", problem_, recorded_, emulated_);
  EXPECT_EQ(tensor(c, "dq_accum").differing_bits, 1U);
  EXPECT_EQ(tensor(c, "dq").differing_bits, 1U);
  EXPECT_FALSE(c.equal());
}

TEST_F(OpenOrder, WithAFixedOrderTheSameBitsDiffer) {
  emulated_.dq_order_fixed = true;
  EXPECT_FALSE(audit::compare_results("x", problem_, recorded_, emulated_).equal());
}

TEST_F(OpenOrder, WithoutPartsItIsListedAndDecidesNothing) {
  emulated_.dq_parts = {};
  emulated_.out = recorded_.out = Bf16Tensor(problem_.out_shape());
  Comparison c = audit::compare_results("x", problem_, recorded_, emulated_);
  EXPECT_TRUE(c.equal()) << "the verdict is that of the other tensors";
  EXPECT_EQ(tensor(c, "dq").verdict, TensorVerdict::order_not_compared);
  EXPECT_EQ(tensor(c, "dq").order_not_compared, 1U);
  EXPECT_EQ(tensor(c, "dq").remark, "order not fixed, not compared");
  recorded_.out.data[0] = 1;
  c = audit::compare_results("x", problem_, recorded_, emulated_);
  EXPECT_FALSE(c.equal());
}

TEST_F(OpenOrder, TwoRecordedResultsAreComparedBitByBit) {
  emulated_.backend = "recorded";
  EXPECT_FALSE(audit::compare_results("x", problem_, recorded_, emulated_).equal());
}

// A group's query heads, added into dK and dV in any order.
TEST(OpenGroupOrder, HoldsForDkAndDv) {
  const Problem p = test::blank({1, 8, 8, 3, 1, 64});
  Result emulated;
  Result recorded;
  emulated.backend = "fa3";
  recorded.backend = "recorded";
  emulated.dkv_order_fixed = false;
  const std::vector<float> parts{0x1.01p0F, 0x1p-24F, 0x1p-24F};
  for (OrderFreeParts* of : {&emulated.dk_parts, &emulated.dv_parts}) {
    of->parts = 3;
    of->values = Fp32Tensor({3, 1, 1, 128, 64}, 0.0F);
    for (std::size_t i = 0; i < 3; ++i) of->values.data[i * 128 * 64 + 2 * 64 + 5] = parts[i];
  }
  const auto word = [](float x) { return arith::bf16_from_fp32(x); };
  emulated.dk = emulated.dv = recorded.dk = recorded.dv = Bf16Tensor(p.k_shape());
  emulated.dk.data[2 * 64 + 5] = emulated.dv.data[2 * 64 + 5] = word((parts[0] + parts[1]) + parts[2]);
  recorded.dk.data[2 * 64 + 5] = recorded.dv.data[2 * 64 + 5] = word((parts[1] + parts[2]) + parts[0]);
  ASSERT_NE(emulated.dk.data[2 * 64 + 5], recorded.dk.data[2 * 64 + 5]);
  const Comparison c = audit::compare_results("x", p, recorded, emulated);
  EXPECT_TRUE(c.equal());
  EXPECT_EQ(tensor(c, "dk").equal_in_one_order, 1U);
  EXPECT_EQ(tensor(c, "dv").equal_in_one_order, 1U);
}

TEST(ProblemDifference, NamesWhatDiffers) {
  const Problem a = test::blank({1, 4, 4, 1, 1, 64});
  EXPECT_EQ(audit::problem_difference(a, a), "");
  Problem b = a;
  b.k.data[3] = 0x8000;
  b.dout = {};
  EXPECT_EQ(audit::problem_difference(a, b), "");
  b = a;
  b.softmax_scale = 0.5;
  EXPECT_EQ(audit::problem_difference(a, b), "softmax_scale is 0.125 against 0.5");
  b = a;
  b.window_right = 0;
  EXPECT_EQ(audit::problem_difference(a, b), "window_right is -1 against 0");
  b.causal_alignment = CausalAlignment::top_left;
  Problem causal = a;
  causal.causal = true;
  EXPECT_EQ(audit::problem_difference(a, causal), "one is causal, the other is not");
  EXPECT_EQ(audit::problem_difference(causal, b), "") << "one mask, said in two ways";
  causal = test::blank({1, 5, 4, 1, 1, 64});
  causal.causal = true;
  b = causal;
  b.causal_alignment = CausalAlignment::top_left;
  EXPECT_EQ(audit::problem_difference(causal, b), "causal_alignment differs");
  b = test::blank({1, 5, 4, 1, 1, 64});
  EXPECT_EQ(audit::problem_difference(a, b), "q has shape [1, 4, 1, 64] against [1, 5, 1, 64]");
}

TEST(CompareInputs, CountsAndPlaces) {
  const Problem a = test::blank({1, 4, 4, 1, 1, 64});
  Problem b = a;
  b.k.data[67] = 0x8000;
  b.dout = {};
  const std::vector<TensorComparison> inputs = audit::compare_inputs(a, b);
  ASSERT_EQ(inputs.size(), 4U);
  EXPECT_EQ(inputs[0].verdict, TensorVerdict::equal);
  EXPECT_EQ(inputs[1].tensor, "k");
  EXPECT_EQ(inputs[1].verdict, TensorVerdict::differs);
  EXPECT_EQ(inputs[1].differing_bits, 1U);
  EXPECT_EQ(inputs[1].first->place.row, 1U);
  EXPECT_EQ(inputs[1].first->place.column, 3U);
  EXPECT_TRUE(inputs[1].first->place.of_keys);
  EXPECT_EQ(inputs[3].verdict, TensorVerdict::only_in_a);
}

// Head size 256 has no deterministic backward. With four key blocks a run of the real kernel is one order of
// the parts; the emulator's own parts, added the other way round, stand in for it here.
TEST(OpenOrderOfARealKernel, AnotherOrderOfTheEmulatorsPartsPasses) {
  Capture capture;
  capture.name = "d256";
  capture.problem = test::blank({1, 96, 300, 1, 1, 256});
  test::fill(capture.problem, 3);
  const std::unique_ptr<Backend> fa3 = make_backend("fa3");
  RunOptions options;
  options.want_order_free_parts = true;
  options.want_accumulators = true;
  const Result emulated = fa3->run(capture, options);
  ASSERT_FALSE(emulated.dq_order_fixed);
  ASSERT_EQ(emulated.dq_parts.parts, 4U);
  Result other = emulated;
  other.backend = "recorded";
  other.dq_parts = {};
  const std::size_t stride = emulated.intermediates.dq_accum.size();
  std::size_t changed = 0;
  for (std::size_t i = 0; i < stride; ++i) {
    float sum = 0;
    for (std::size_t part = 4; part-- > 0;) {
      const float x = emulated.dq_parts.values.data[part * stride + i];
      if (arith::to_bits(x) != 0xffffffffU) sum = arith::ftz::add(sum, x);
    }
    if (arith::to_bits(emulated.intermediates.dq_accum.data[i]) == 0xffffffffU) continue;
    changed += arith::to_bits(sum) != arith::to_bits(emulated.intermediates.dq_accum.data[i]) ? 1 : 0;
    other.intermediates.dq_accum.data[i] = sum;
  }
  ASSERT_GT(changed, 100U);
  Comparison c = audit::compare_results("x", capture.problem, other, emulated);
  EXPECT_TRUE(c.equal());
  EXPECT_EQ(tensor(c, "dq_accum").equal_in_one_order, changed);
  // One bit that no order gives is found among them.
  other.intermediates.dq_accum.data[1000] *= 1.5F;
  c = audit::compare_results("x", capture.problem, other, emulated);
  EXPECT_EQ(tensor(c, "dq_accum").differing_bits, 1U);
}

}  // namespace
