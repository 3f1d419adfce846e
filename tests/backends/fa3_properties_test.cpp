// Properties that the emulated kernel must have whatever the inputs are.

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <numbers>

#include "backends/backend.hpp"
#include "datasets/regime.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/kernels/observer.hpp"

namespace bitattn {
namespace {

/// Row-max residue by its definition: the exponent of the row's largest score, which should be 0.
float residue(float m, float c) {
  const float product = arith::ftz::mul(m, c);
  return arith::ftz::fma(m, c, arith::from_bits(arith::to_bits(product) ^ arith::kSignBit));
}

class ResidueCounter final : public kernels::Observer {
 public:
  void forward_rows(const kernels::ForwardRows& rows) override {
    for (int r = 0; r < rows.rows; ++r) {
      if (rows.row_max[r] == -std::numeric_limits<float>::infinity()) continue;
      ++seen;
      if (residue(rows.row_max[r], rows.scale_log2) != 0) ++nonzero;
    }
  }
  void forward_block(const kernels::ForwardBlock& block) override {
    // The same number decides the numerator of the row's largest score: ex2 of the residue.
    for (int r = 0; r < block.rows; ++r) {
      const float m = block.row_max[r];
      if (m == -std::numeric_limits<float>::infinity()) continue;
      for (int j = 0; j < block.keys; ++j) {
        if (block.scores[r * block.row_stride + j] != m) continue;
        const std::uint32_t expected = arith::mufu::ex2(arith::to_bits(residue(m, block.scale_log2)));
        if (arith::to_bits(block.p[r * block.row_stride + j]) != expected) ++wrong_numerators;
      }
    }
  }
  std::atomic<int> seen{0}, nonzero{0}, wrong_numerators{0};
};

Capture capture_of(const std::string& regime, double softmax_scale) {
  GenerateOptions options;
  options.regime = regime;
  options.seqlen_q = options.seqlen_k = 300;
  options.heads_q = options.heads_kv = 2;
  options.causal = true;
  options.seed = 11;
  Capture capture;
  capture.name = regime;
  capture.problem = generate(options);
  if (softmax_scale != 0) capture.problem.softmax_scale = softmax_scale;
  return capture;
}

class EveryRegime : public ::testing::TestWithParam<std::string> {};

// scale * log2(e) a power of two: m*c is exact, so no row has a residue.
TEST_P(EveryRegime, APowerOfTwoScaleHasNoRowMaxResidue) {
  const double scale = 0.125 * std::numbers::ln2;
  const auto as_fp32 = static_cast<float>(scale);
  ASSERT_EQ(static_cast<float>(static_cast<double>(as_fp32) * std::numbers::log2e), 0.125F);
  ResidueCounter counter;
  RunOptions run;
  run.observer = &counter;
  run.forward_only = true;
  make_backend("fa3")->run(capture_of(GetParam(), scale), run);
  EXPECT_EQ(counter.seen, 600);
  EXPECT_EQ(counter.nonzero, 0);
  EXPECT_EQ(counter.wrong_numerators, 0);
}

// And with the usual scale nearly every row has one: the property above is not true of everything.
TEST_P(EveryRegime, TheUsualScaleLeavesResidues) {
  ResidueCounter counter;
  RunOptions run;
  run.observer = &counter;
  run.forward_only = true;
  make_backend("fa3")->run(capture_of(GetParam(), 0), run);
  EXPECT_EQ(counter.seen, 600);
  EXPECT_GT(counter.nonzero, 300);
  EXPECT_EQ(counter.wrong_numerators, 0);
}

std::vector<std::string> regime_names() {
  std::vector<std::string> names;
  for (const RegimeInfo& info : regimes()) names.push_back(info.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Fa3, EveryRegime, ::testing::ValuesIn(regime_names()),
                         [](const ::testing::TestParamInfo<std::string>& tested) {
                           std::string name = tested.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace bitattn
