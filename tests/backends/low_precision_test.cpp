// P, dS and products in FP8: what is cast is an FP8 number with the scale that its name says, nothing else of
// the order changes, and remedies work on top.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <tuple>

#include "backends/backend.hpp"
#include "datasets/error.hpp"
#include "datasets/regime.hpp"
#include "emu/arith/bf16.hpp"
#include "emu/arith/fp8_scaling.hpp"
#include "emu/kernels/observer.hpp"

namespace bitattn {
namespace {

using arith::Fp8;

Capture capture_of(const std::string& regime) {
  GenerateOptions options;
  options.regime = regime;
  options.seqlen_q = 150;
  options.seqlen_k = 220;
  options.heads_q = 2;
  options.heads_kv = 1;
  options.head_dim = 64;
  options.causal = true;
  options.seed = 9;
  Capture capture;
  capture.name = regime;
  capture.problem = generate(options);
  return capture;
}

/// Every pair that a tile covers: P (forward), P' and dS before and after their casts, with the place of the
/// tile.
class Casts final : public kernels::Observer {
 public:
  struct Pair {
    float value;
    std::uint16_t word;
    int tile;  ///< of its query and key block
  };
  std::vector<Pair> p, p_backward, ds;
  std::vector<double> row_sums;  ///< of the cast dS and what remedies add
  std::vector<double> row_sizes;

  void forward_block(const kernels::ForwardBlock& block) override {
    const std::scoped_lock lock(mutex_);
    for (int r = 0; r < block.rows; ++r) {
      for (int j = 0; j < block.keys; ++j) {
        const std::ptrdiff_t at = r * block.row_stride + j;
        p.push_back({block.p[at], block.p_bf16[at], 0});
      }
    }
  }
  void backward_rows(const kernels::BackwardRows& rows) override {
    constexpr int kBlockN = 128;  // FlashAttention-3's keys of a tile at head size 64 (4.1)
    const std::scoped_lock lock(mutex_);
    ++strips_;
    for (int r = 0; r < rows.rows; ++r) {
      double sum = rows.added != nullptr ? rows.added[r] : 0;
      double size = 0;
      for (int j = 0; j < rows.keys; ++j) {
        const std::ptrdiff_t at = r * rows.row_stride + j;
        const int tile = strips_ * 1000 + (rows.key_begin + j) / kBlockN;
        p_backward.push_back({rows.p[at], rows.p_bf16[at], tile});
        ds.push_back({rows.ds[at], rows.ds_bf16[at], tile});
        sum += static_cast<double>(arith::fp32_from_bf16(rows.ds_bf16[at]));
        size += std::abs(static_cast<double>(rows.ds[at]));
      }
      row_sums.push_back(sum);
      row_sizes.push_back(size);
    }
  }

 private:
  std::mutex mutex_;
  int strips_ = 0;
};

struct Seen {
  Casts casts;
  Result result;
};
void look(const std::string& backend, const Capture& capture, Seen& seen) {
  RunOptions options;
  options.observer = &seen.casts;
  options.want_uncast = true;
  seen.result = make_backend("fa3+" + backend)->run(capture, options);
}

/// All words are BF16(through_fp8(value)) at the exponent of a tile's, or of all, magnitudes.
void expect_scaled(const std::vector<Casts::Pair>& pairs, Fp8 format, bool by_tile) {
  std::map<int, float> amax;
  for (const Casts::Pair& pair : pairs) {
    float& largest = amax[by_tile ? pair.tile : 0];
    largest = std::max(largest, std::abs(pair.value));
  }
  EXPECT_GT(amax.size(), by_tile ? 3U : 0U);
  std::size_t rounded = 0;
  for (const Casts::Pair& pair : pairs) {
    const int exponent = arith::fp8_scale_exponent(format, amax[by_tile ? pair.tile : 0]);
    const float expected = arith::through_fp8(format, pair.value, exponent);
    ASSERT_EQ(pair.word, arith::bf16_from_fp32(expected)) << pair.value << " at 2^" << exponent;
    ASSERT_EQ(arith::fp32_from_bf16(pair.word), expected) << "a scaled FP8 number is a BF16 number";
    if (pair.word != arith::bf16_from_fp32(pair.value)) ++rounded;
  }
  EXPECT_GT(rounded, pairs.size() / 10);
}

class LowPrecision : public testing::TestWithParam<const char*> {};

TEST_P(LowPrecision, DsIsFp8WithTheScaleOfItsName) {
  const Capture capture = capture_of(GetParam());
  for (const auto& [name, format, by_tile] : {std::tuple{"ds-e4m3", Fp8::e4m3, true},
                                              {"ds-e5m2", Fp8::e5m2, true},
                                              {"ds-e4m3-tensor", Fp8::e4m3, false},
                                              {"ds-e5m2-tensor", Fp8::e5m2, false}}) {
    SCOPED_TRACE(name);
    Seen seen;
    look(std::string("experimental:") + name, capture, seen);
    expect_scaled(seen.casts.ds, format, by_tile);
    // The forward, P' and dV do not know of it.
    const Result plain = make_backend("fa3")->run(capture, {});
    EXPECT_EQ(seen.result.out.data, plain.out.data);
    EXPECT_EQ(seen.result.dv.data, plain.dv.data);
    EXPECT_NE(seen.result.dq.data, plain.dq.data);
    EXPECT_NE(seen.result.dk.data, plain.dk.data);
  }
}

TEST_P(LowPrecision, PIsFp8AtTwoToTheEight) {
  const Capture capture = capture_of(GetParam());
  for (const auto& [name, format] : {std::pair{"p-e4m3", Fp8::e4m3}, {"p-e5m2", Fp8::e5m2}}) {
    Seen seen;
    look(std::string("experimental:") + name, capture, seen);
    for (const auto* pairs : {&seen.casts.p, &seen.casts.p_backward}) {
      ASSERT_FALSE(pairs->empty());
      for (const Casts::Pair& pair : *pairs) {
        ASSERT_EQ(arith::fp32_from_bf16(pair.word), arith::through_fp8(format, pair.value, 8)) << pair.value;
      }
    }
    const Result plain = make_backend("fa3")->run(capture, {});
    EXPECT_EQ(seen.result.lse.data, plain.lse.data);  // the row sum is that of the fp32 P
    EXPECT_NE(seen.result.out.data, plain.out.data);
  }
}

// A projection after the cast leaves a zero sum whatever the cast.
TEST_P(LowPrecision, ProjectionsLeaveAZeroSumOfAnFp8Ds) {
  const Capture capture = capture_of(GetParam());
  for (const char* remedy : {"gproj", "gproj-weighted"}) {
    Seen plain;
    look("experimental:ds-e4m3", capture, plain);
    Seen remedied;
    look(std::string("experimental:ds-e4m3+") + remedy, capture, remedied);
    double before = 0;
    double after = 0;
    double size = 0;
    for (std::size_t i = 0; i < plain.casts.row_sums.size(); ++i) before += std::abs(plain.casts.row_sums[i]);
    for (std::size_t i = 0; i < remedied.casts.row_sums.size(); ++i) {
      after += std::abs(remedied.casts.row_sums[i]);
      size += remedied.casts.row_sizes[i];
    }
    EXPECT_GT(before, 1e-3 * size) << remedy;
    EXPECT_LT(after, 1e-5 * size) << remedy;
  }
}

INSTANTIATE_TEST_SUITE_P(Fa3, LowPrecision, testing::Values("normal", "peaky"));

// Forward products alone leave the backward's own, and the other way round.
TEST(LowPrecisionProducts, ForwardAndBackwardAreApart) {
  const Capture capture = capture_of("normal");
  const Result plain = make_backend("fa3")->run(capture, {});
  const Result forward = make_backend("fa3+experimental:fp8-forward")->run(capture, {});
  const Result backward = make_backend("fa3+experimental:fp8-backward")->run(capture, {});
  const Result both =
      make_backend("fa3+experimental:fp8-forward+experimental:fp8-backward")->run(capture, {});
  EXPECT_NE(forward.out.data, plain.out.data);
  EXPECT_NE(forward.lse.data, plain.lse.data);
  EXPECT_EQ(backward.out.data, plain.out.data);
  EXPECT_EQ(backward.lse.data, plain.lse.data);
  EXPECT_EQ(both.out.data, forward.out.data);
  for (const Result* result : {&forward, &backward, &both}) {
    EXPECT_NE(result->dq.data, plain.dq.data);
    double error = 0;
    double size = 0;
    for (std::size_t i = 0; i < plain.dq.size(); ++i) {
      const auto x = static_cast<double>(arith::fp32_from_bf16(plain.dq.data[i]));
      error += std::pow(static_cast<double>(arith::fp32_from_bf16(result->dq.data[i])) - x, 2);
      size += x * x;
    }
    EXPECT_GT(error, 1e-4 * size);  // 8 bits cost more than 1%
    EXPECT_LT(error, 0.1 * size);   // and it is still the same gradient
  }
}

TEST(LowPrecisionNames, WhatDecidesTheSameIsRefused) {
  for (const char* name :
       {"fa3+experimental:ds-e4m3+experimental:ds-e5m2", "fa3+experimental:ds-e4m3+ds-split",
        "fa3+experimental:p-e4m3+experimental:fp8-forward", "fa3+fp32+experimental:p-e4m3",
        "fa3+experimental:fp8-backward+experimental:ds-e4m3",
        "fa3+fp32-backward+experimental:fp8-backward"}) {
    EXPECT_THROW(make_backend(name), InputError) << name;
  }
}

}  // namespace
}  // namespace bitattn
