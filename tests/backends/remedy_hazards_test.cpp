// The hazards that the study of remedies lists (docs/spec/remedies.md, 10), as far as a remedy of that name
// exists here: what happens to rows without keys, to numbers that are not finite, to lists that are full.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <mutex>

#include "backends/backend.hpp"
#include "datasets/regime.hpp"
#include "emu/arith/bf16.hpp"
#include "emu/kernels/chip_numbers.hpp"
#include "emu/kernels/observer.hpp"
#include "emu/kernels/remedies/centred_keys.hpp"
#include "emu/kernels/remedies/heavy_pairs.hpp"
#include "emu/kernels/remedies/o_residual.hpp"
#include "emu/profile/remedies.hpp"

namespace bitattn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Capture generated(const std::string& regime, std::size_t sq, std::size_t sk, std::size_t dim) {
  GenerateOptions options;
  options.regime = regime;
  options.seqlen_q = sq;
  options.seqlen_k = sk;
  options.heads_q = options.heads_kv = 1;
  options.head_dim = dim;
  options.causal = true;
  options.seed = 9;
  Capture capture;
  capture.name = regime;
  capture.problem = generate(options);
  return capture;
}

kernels::ChipNumbers chip_numbers() {
  profile::Call call;
  call.head_dim = call.head_dim_v = 64;
  return {profile::Profile{}, call, kernels::Execution{}};
}

class EveryRemedy : public ::testing::TestWithParam<profile::RemedyInfo> {};

// R1, Lh, O2, C, HP: a row that sees no key has no maximum, no sum, no O, no D, no share; it must stay 0.
TEST_P(EveryRemedy, LeavesRowsWithoutKeysZeroAndEverythingFinite) {
  const Capture capture = generated("normal", 70, 40, 64);  // rows 0 to 29 see nothing
  const Result result = make_backend("fa3+" + std::string(GetParam().name))->run(capture, {});
  const Problem& p = capture.problem;
  for (std::size_t i = 0; i < 30; ++i) {
    EXPECT_EQ(result.lse.data[i], -kInfinity) << "row " << i;
    for (std::size_t d = 0; d < p.head_dim; ++d) {
      EXPECT_EQ(result.out.data[i * p.head_dim + d] & 0x7fffU, 0U) << "row " << i;
      EXPECT_EQ(result.dq.data[i * p.head_dim + d] & 0x7fffU, 0U) << "row " << i;
    }
  }
  for (const Bf16Tensor* tensor : {&result.out, &result.dq, &result.dk, &result.dv}) {
    for (const std::uint16_t word : tensor->data) ASSERT_TRUE(std::isfinite(arith::fp32_from_bf16(word)));
  }
}

INSTANTIATE_TEST_SUITE_P(RemedyHazards, EveryRemedy, ::testing::ValuesIn(profile::kRemedies),
                         [](const ::testing::TestParamInfo<profile::RemedyInfo>& tested) {
                           std::string name;
                           for (const char c : tested.param.name) name += std::isalnum(c) != 0 ? c : '_';
                           return name;
                         });

// R1: p of the maximum lies in (1/2, 1] but for the rounding of m * c: 2^(6e-5) at scores of a thousand.
TEST(RemedyHazards, IntegerReferenceKeepsTheLargestNumeratorBetweenAHalfAndOne) {
  class Largest final : public kernels::Observer {
   public:
    void forward_block(const kernels::ForwardBlock& block) override {
      const std::lock_guard lock(mutex_);
      for (int r = 0; r < block.rows; ++r) {
        for (int j = 0; j < block.keys; ++j) {
          const std::ptrdiff_t at = r * block.row_stride + j;
          if (block.scores[at] != block.row_max[r] || block.row_max[r] == -kInfinity) continue;
          smallest = std::min(smallest, block.p[at]);
          largest = std::max(largest, block.p[at]);
        }
      }
    }
    float smallest = 2, largest = 0;

   private:
    std::mutex mutex_;
  };
  for (const char* regime : {"normal", "late"}) {
    Largest seen;
    RunOptions options;
    options.observer = &seen;
    options.forward_only = true;
    make_backend("fa3+experimental:integer-reference")->run(generated(regime, 200, 200, 128), options);
    EXPECT_GT(seen.smallest, 0.5F * std::exp2(-6e-5F)) << regime;
    EXPECT_LE(seen.largest, std::string(regime) == "late" ? std::exp2(6e-5F) : 1 + 0x1p-23F) << regime;
  }
}

// O2, O1: nothing is kept of an O that is no finite number, nor by o-residual8 where its spacing is too
// small.
TEST(RemedyHazards, NoResidualIsKeptOfAnOThatIsNotFinite) {
  const kernels::ChipNumbers numbers = chip_numbers();
  for (const float y : {kInfinity, -kInfinity, kNaN, 3.4e38F}) {  // the last one's cast is infinite
    EXPECT_EQ(kernels::remedies::o_residual(numbers, y), 0) << y;
    EXPECT_EQ(kernels::remedies::o_residual8(numbers, y), 0) << y;
  }
  EXPECT_EQ(kernels::remedies::o_residual8(numbers, 1.0035F * 0x1p-120F), 0);
  EXPECT_NE(kernels::remedies::o_residual8(numbers, 1.0035F * 0x1p-117F), 0);
  EXPECT_NE(kernels::remedies::o_residual(numbers, 1.001F), 0);
}

// HL, HP: at most sixteen pairs, P' above 1/16 strictly, none of a row of NaN.
TEST(RemedyHazards, AListHoldsSixteenPairsAndNoneThatIsNotANumber) {
  const kernels::ChipNumbers numbers = chip_numbers();
  const auto listed = [&](float p) {
    const std::vector<float> all(20, p);
    const std::vector<float> ds(20, 1.001F);
    const std::vector<std::uint16_t> words(20, arith::bf16_from_fp32(1.001F));
    kernels::remedies::DsRow<kernels::ChipNumbers> row{5, 25, all.data(), ds.data(), words.data(), 0, 0};
    kernels::remedies::AddedToDs<float> added;
    list_heavy_pairs(numbers, true, row, added);
    return added.pairs;
  };
  const auto pairs = listed(0.07F);
  ASSERT_EQ(pairs.size(), 16U);
  for (std::size_t n = 0; n < pairs.size(); ++n) {
    EXPECT_EQ(pairs[n].key, 5 + static_cast<int>(n));
    EXPECT_FLOAT_EQ(pairs[n].value, 1.001F - 1.0F);
  }
  EXPECT_TRUE(listed(0x1p-4F).empty());
  EXPECT_TRUE(listed(kNaN).empty());
}

// C: kappa is of one sequence and one KV head.
TEST(RemedyHazards, KeysAreCentredBySequenceAndHead) {
  kernels::AttentionInputs in;
  in.call.heads_kv = 2;
  in.call.head_dim = 1;
  const std::vector<kernels::Sequence> sequences{{0, 2, 0, 2}, {2, 2, 2, 2}};
  in.sequences = sequences;
  in.total_k = 4;
  std::vector<std::uint16_t> keys;
  for (const float k : {1.0F, -8.0F, 3.0F, -8.0F, 100.0F, 1.0F, 100.0F, -1.0F}) {
    keys.push_back(arith::bf16_from_fp32(k));
  }
  in.k = keys.data();
  std::vector<float> centred;
  for (const std::uint16_t word : kernels::remedies::centred_keys(in)) {
    centred.push_back(arith::fp32_from_bf16(word));
  }
  EXPECT_EQ(centred, (std::vector<float>{-1, 0, 1, 0, 0, 1, 0, -1}));
}

}  // namespace
}  // namespace bitattn
