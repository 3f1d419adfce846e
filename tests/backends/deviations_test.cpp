// Proves: a deviation is what it says. Roundings against the conversions of emu/arith, deviations that the
// profile's fields can say too against the fast path that reads those, every point of the operation order by
// the tensors it moves and those it leaves.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "backends/emulator.hpp"
#include "backends/stages.hpp"
#include "datasets/regime.hpp"
#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/narrow_float.hpp"
#include "emu/kernels/deviant.hpp"
#include "emu/profile/deviation.hpp"
#include "tests/backends/goldens.hpp"

namespace bitattn {
namespace {

using profile::Deviation;
using profile::Format;
using profile::Kind;
using profile::Point;
using profile::Profile;
using profile::Stage;

// --- roundings

float any_float(std::mt19937_64& random) {
  // All exponents, and often the last bits at a tie or beside one.
  auto bits = static_cast<std::uint32_t>(random());
  if (random() % 2 == 0) bits = (bits & ~0xffffU) | 0x8000U | static_cast<std::uint32_t>(random() % 3);
  if (random() % 2 == 0) bits = (bits & 0x807fffffU) | static_cast<std::uint32_t>(100 + random() % 50) << 23U;
  return arith::from_bits(bits);
}

double narrowed(float x, Format format) {
  const Deviation d{Point::score, Kind::narrowed, static_cast<int>(format)};
  return kernels::deviated_value(d, static_cast<double>(x));
}

double of_f16(std::uint16_t w) {
  const int exponent = w >> 10U & 31;
  const int fraction = w & 1023;
  const double magnitude = exponent == 31  ? std::numeric_limits<double>::infinity()
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return (w >> 15U) != 0 ? -magnitude : magnitude;
}

double of_e4m3(std::uint8_t w) {
  return of_f16(arith::f16_from_e4m3(w));
}

double of_e5m2(std::uint8_t w) {
  return of_f16(static_cast<std::uint16_t>(w << 8U));
}

TEST(Deviations, NarrowedAsTheChipConverts) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000000; ++i) {
    const float x = any_float(random);
    if (!std::isfinite(x)) continue;
    const std::uint32_t bits = arith::to_bits(x);
    ASSERT_EQ(narrowed(x, Format::bf16),
              static_cast<double>(arith::fp32_from_bf16(arith::bf16_from_fp32(x))));
    ASSERT_EQ(narrowed(x, Format::fp16), of_f16(arith::f16_from_fp32(bits))) << x;
    ASSERT_EQ(narrowed(x, Format::e4m3), of_e4m3(arith::e4m3_from_fp32(bits))) << x;
    ASSERT_EQ(narrowed(x, Format::e5m2), of_e5m2(arith::e5m2_from_fp32(bits))) << x;
  }
}

TEST(Deviations, OperationsRoundOnceInEveryDirection) {
  std::mt19937_64 random(2);
  const Deviation nearest{Point::ds, Kind::narrowed, profile::kBits + 24};
  const Deviation down{Point::ds, Kind::downward, 0};
  const Deviation up{Point::ds, Kind::upward, 0};
  const Deviation cut{Point::ds, Kind::truncated, 0};
  std::size_t inexact = 0;
  for (int i = 0; i < 1000000; ++i) {
    const float a = any_float(random);
    const float b = any_float(random);
    if (!std::isfinite(a) || !std::isfinite(b) || !std::isfinite(a + b)) continue;
    const kernels::ExactSum s = kernels::exact_sum(static_cast<double>(a), static_cast<double>(b));
    const double lower = kernels::deviated_operation(down, s.high, s.low, false);
    const double upper = kernels::deviated_operation(up, s.high, s.low, false);
    ASSERT_EQ(kernels::deviated_operation(nearest, s.high, s.low, false), static_cast<double>(a + b));
    ASSERT_LE(lower, s.high);
    ASSERT_GE(upper, s.high);
    ASSERT_EQ(kernels::deviated_operation(cut, s.high, s.low, false), s.high < 0 ? upper : lower);
    if (lower == upper) continue;
    ++inexact;
    ASSERT_EQ(static_cast<float>(upper),
              std::nextafter(static_cast<float>(lower), std::numeric_limits<float>::infinity()));
  }
  EXPECT_GT(inexact, 100000U);
}

TEST(Deviations, CastsTakeOneOfTheNeighbours) {
  std::mt19937_64 random(3);
  double up = 0;
  double expected = 0;
  double variance = 0;
  for (int i = 0; i < 200000; ++i) {
    const float x = std::fabs(any_float(random));
    if (!(x > 1e-30F && x < 1e30F)) continue;
    const auto below = static_cast<double>(arith::from_bits(arith::to_bits(x) & 0xffff0000U));
    const auto above = static_cast<double>(arith::from_bits((arith::to_bits(x) & 0xffff0000U) + 0x10000U));
    const auto cast = [&](Kind kind, int parameter = 0) {
      return kernels::deviated_cast({Point::p_word, kind, parameter}, static_cast<double>(x),
                                    static_cast<std::uint64_t>(i));
    };
    ASSERT_EQ(cast(Kind::truncated), below);
    const double share = (static_cast<double>(x) - below) / (above - below);
    ASSERT_EQ(cast(Kind::ties_away), share >= 0.5 ? above : below);
    ASSERT_EQ(cast(Kind::away_from_zero), share > 0 ? above : below);
    const double drawn = cast(Kind::stochastic);
    ASSERT_TRUE(drawn == below || drawn == above);
    up += drawn == above ? 1 : 0;
    expected += share;
    variance += share * (1 - share);
  }
  EXPECT_LT(std::fabs(up - expected), 4 * std::sqrt(variance));
}

TEST(Deviations, PolynomialsApproachExp2) {
  for (int form = 0; form < profile::kPolynomialForms; ++form) {
    double before = 1;
    for (int degree = 2; degree <= 6; ++degree) {
      double worst = 0;
      for (int i = -4000; i <= 0; ++i) {
        const double x = i / 400.0;
        const double y = kernels::deviated_exp2({Point::p, Kind::polynomial, 10 * form + degree}, x);
        worst = std::max(worst, std::fabs(y / std::exp2(x) - 1));
      }
      EXPECT_LT(worst, before) << "form " << form << ", degree " << degree;
      before = std::max(worst, 3e-7);
      if (degree != 3) continue;
      EXPECT_LT(worst, form == 1 ? 0.02 : 2e-3) << "form " << form;
    }
  }
}

// --- against the fast path

Capture capture_of(const std::string& regime, int heads_kv = 2, double softcap = 0) {
  GenerateOptions options;
  options.regime = regime;
  options.seqlen_q = 150;
  options.seqlen_k = 300;
  options.heads_q = 2;
  options.heads_kv = static_cast<std::size_t>(heads_kv);
  options.head_dim = 64;
  options.causal = true;
  options.softcap = softcap;
  options.seed = 5;
  Capture capture;
  capture.name = regime;
  capture.problem = generate(options);
  return capture;
}

Result run_with(const Capture& capture, const std::vector<Deviation>& deviations) {
  Profile profile;
  profile.deviations = deviations;
  return run_stages(profile, capture, {});
}

struct SaidTwice {
  const char* name;
  std::function<void(Profile&)> field;
  std::vector<Deviation> deviations;
};

const std::vector<SaidTwice>& said_twice() {
  static const int bf16 = static_cast<int>(Format::bf16);
  static const std::vector<SaidTwice> all{
      {"Nothing", [](Profile&) {}, {}},
      {"RowSumRescaleNotFused",
       [](Profile& p) { p.forward.row_sum_rescale_fused = false; },
       {{Point::lane_sum, Kind::unfused, 0}}},
      {"LseFusesTheLogTerm",
       [](Profile& p) { p.forward.lse = profile::LseFusion::log_term; },
       {{Point::lse, Kind::other_fused, 0}}},
      {"DpsumRoundsProduct0",
       [](Profile& p) { p.backward.dpsum = profile::DpsumStart::first_product_rounded; },
       {{Point::dpsum_sum, Kind::other_fused, 0}}},
      {"DqOrderReversed",
       [](Profile& p) { p.backward.dq_order_reversed = true; },
       {{Point::blocks_dq, Kind::reversed, 0}}},
      {"ForwardExponentUnfused",
       [](Profile& p) { p.forward.exponent_fused = false; },
       {{Point::exponent, Kind::unfused, 0}}},
      {"BackwardExponentUnfused",
       [](Profile& p) { p.backward.exponent_fused = false; },
       {{Point::exponent_backward, Kind::unfused, 0}}},
      {"BulkReduceFlushes",
       [](Profile& p) { p.backward.bulk_reduce_flushes = true; },
       {{Point::dq_accum, Kind::flushed, 0}, {Point::dkv_accum, Kind::flushed, 0}}},
      {"Ex2CorrectlyRounded",
       [](Profile& p) { p.arithmetic.ex2 = profile::Function::correctly_rounded; },
       {{Point::p, Kind::correctly_rounded, 0},
        {Point::alpha, Kind::correctly_rounded, 0},
        {Point::p_backward, Kind::correctly_rounded, 0}}},
      {"Lg2CorrectlyRounded",
       [](Profile& p) { p.arithmetic.lg2 = profile::Function::correctly_rounded; },
       {{Point::log_total, Kind::correctly_rounded, 0}}},
      {"RcpCorrectlyRounded",
       [](Profile& p) { p.arithmetic.rcp = profile::Function::correctly_rounded; },
       {{Point::inverse, Kind::correctly_rounded, 0}}},
      {"QuadSumBesideThenAcross",
       [](Profile& p) { p.forward.quad_sum = profile::QuadSum::beside_then_across; },
       {{Point::lane_sum, Kind::other_order, 0}}},
      {"ForwardKeyBlocksLeftToRight",
       [](Profile& p) { p.forward.key_blocks = profile::KeyBlockOrder::left_to_right; },
       {{Point::blocks_forward, Kind::reversed, 0}}},
      {"DsFused", [](Profile& p) { p.backward.ds = profile::DsOrder::fused; }, {{Point::ds, Kind::fused, 0}}},
      {"DsFromTheCastP",
       [](Profile& p) { p.backward.ds_from_cast_p = true; },
       {{Point::p_in_ds, Kind::narrowed, bf16}}},
      {"ForwardBlockN64",
       [](Profile& p) { p.forward.block_n = 64; },
       {{Point::blocks_forward, Kind::block_size, 64}}},
      {"BackwardBlockN64",
       [](Profile& p) { p.backward.block_n = 64; },
       {{Point::blocks_backward, Kind::block_size, 64}}},
  };
  return all;
}

class SaidTwiceTest : public ::testing::TestWithParam<std::size_t> {};

TEST_P(SaidTwiceTest, GivesTheBitsOfTheFastPath) {
  const SaidTwice& tested = said_twice()[GetParam()];
  for (const char* regime : {"normal", "late", "tinygrad"}) {
    for (const int heads_kv : {2, 1}) {
      SCOPED_TRACE(std::string(regime) + ", KV heads " + std::to_string(heads_kv));
      const Capture capture = capture_of(regime, heads_kv);
      Profile profile;
      tested.field(profile);
      RunOptions options;
      options.want_accumulators = true;
      const Result fast = emulator_backend(profile)->run(capture, options);
      const test::Difference d = test::difference(fast, run_with(capture, tested.deviations));
      EXPECT_EQ(d.differing, 0U) << d.text;
      // The fields alone mean the same to the stages.
      const test::Difference by_field = test::difference(fast, run_stages(profile, capture, {}));
      EXPECT_EQ(by_field.differing, 0U) << by_field.text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Fa3, SaidTwiceTest, ::testing::Range<std::size_t>(0, said_twice().size()),
                         [](const ::testing::TestParamInfo<std::size_t>& tested) {
                           return std::string(said_twice()[tested.param].name);
                         });

// --- every point

std::size_t differing(const Result& a, const Result& b, const std::string& tensors) {
  Result x;
  Result y;
  const std::string words = " " + tensors + " ";
  const auto named = [&](const std::string& name) {
    return words.find(" " + name + " ") != std::string::npos;
  };
  const auto take = [&](const char* name, auto member) {
    if (!named(name)) return;
    x.*member = a.*member;
    y.*member = b.*member;
  };
  take("out", &Result::out);
  take("lse", &Result::lse);
  take("dq", &Result::dq);
  take("dk", &Result::dk);
  take("dv", &Result::dv);
  if (named("dpsum")) {
    x.intermediates.dpsum = a.intermediates.dpsum;
    y.intermediates.dpsum = b.intermediates.dpsum;
  }
  if (named("lse_log2")) {
    x.intermediates.lse_log2 = a.intermediates.lse_log2;
    y.intermediates.lse_log2 = b.intermediates.lse_log2;
  }
  if (named("accum")) {
    x.intermediates.dq_accum = a.intermediates.dq_accum;
    y.intermediates.dq_accum = b.intermediates.dq_accum;
    x.intermediates.dk_accum = a.intermediates.dk_accum;
    y.intermediates.dk_accum = b.intermediates.dk_accum;
    x.intermediates.dv_accum = a.intermediates.dv_accum;
    y.intermediates.dv_accum = b.intermediates.dv_accum;
  }
  return test::difference(x, y).differing;
}

/// With everything recorded that the plain kernel gives, a stage's deviation moves that stage's tensors
/// alone.
const char* others_than(Stage stage) {
  switch (stage) {
    case Stage::forward:
      return "dpsum lse_log2 dq dk dv accum";
    case Stage::preprocess:
      return "out lse dk dv accum";
    case Stage::main:
      return "out lse dpsum lse_log2";
    case Stage::postprocess:
      return "out lse dpsum lse_log2 dk dv accum";
    case Stage::both:
      break;
  }
  return "";
}

class EveryPoint : public ::testing::TestWithParam<int> {};

TEST_P(EveryPoint, MovesItsOwnStageAndNoOther) {
  const auto point = static_cast<Point>(GetParam());
  std::size_t moved = 0;
  for (const char* regime : {"normal", "tinygrad"}) {
    for (const double softcap : {0.0, 20.0}) {
      Capture capture = capture_of(regime, softcap > 0 ? 1 : 2, softcap);
      if (profile::info(point).point_class == profile::PointClass::head_map) {
        GenerateOptions options;
        options.regime = regime;
        options.seqlen_q = options.seqlen_k = 100;
        options.heads_q = 4;
        options.heads_kv = 2;
        options.head_dim = 64;
        capture.problem = generate(options);
      }
      const Result plain = run_stages({}, capture, {});
      capture.recorded = plain;
      capture.recorded.backend = "recorded";
      profile::DeviationScope scope;
      scope.masked = scope.several_heads = scope.with_lengths_apart = true;
      scope.softcap = softcap > 0;
      scope.grouped = true;
      scope.key_blocks_forward = scope.key_blocks_backward = scope.query_blocks_backward = 3;
      int tried = 0;
      for (const Deviation& d : deviations_at(point, scope)) {
        SCOPED_TRACE(text(d));
        const Result deviant = run_with(capture, {d});
        moved += differing(plain, deviant, "out lse dpsum lse_log2 dq dk dv accum");
        EXPECT_EQ(differing(plain, deviant, others_than(profile::info(point).stage)), 0U);
        if (moved > 0 && ++tried >= 3) break;
      }
      if (moved > 0) return;
    }
  }
  EXPECT_GT(moved, 0U) << profile::info(point).what;
}

INSTANTIATE_TEST_SUITE_P(Fa3, EveryPoint, ::testing::Range(0, static_cast<int>(profile::kPointCount)));

TEST(Deviations, ReadAsSentences) {
  const int bf16 = static_cast<int>(Format::bf16);
  EXPECT_EQ(profile::text({Point::dpsum_product, Kind::narrowed, bf16}),
            "dpsum: each product dO*O rounded to BF16");
  EXPECT_EQ(profile::text({Point::blocks_dq, Kind::reversed, 0}),
            "block_order: key blocks of dQ in the opposite order");
  EXPECT_EQ(profile::text({Point::c_forward, Kind::ulps, -1}),
            "score_scale: c = softmax_scale*log2(e) -1 ulp");
}

}  // namespace
}  // namespace bitattn
