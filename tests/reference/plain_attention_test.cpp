// The plain MPFR reference against closed forms, an independent program, finite differences and itself at
// another precision.

#include "reference/plain_attention.hpp"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <atomic>
#include <limits>
#include <memory>
#include <stdexcept>

#include "tests/reference/comparisons.hpp"
#include "tests/reference/support.hpp"

namespace bitattn::reference::testing {
namespace {

using Fixed = boost::multiprecision::number<boost::multiprecision::mpfr_float_backend<100>,
                                            boost::multiprecision::et_off>;

double to_double(const Number& x) {
  return mpfr_get_d(raw(x), MPFR_RNDN);
}

std::unique_ptr<KeepAll> plain(const TestProblem& problem, int bits = kDefaultBits) {
  auto kept = std::make_unique<KeepAll>(problem);
  plain_attention(problem.view(), bits, {}, *kept);
  return kept;
}

TEST(PlainAttention, EqualScoresGiveTheMeanOfTheVisibleValues) {
  TestProblem p;
  p.causal = true;
  p.add_sequence(8, 8);
  p.fill_normal(5);
  std::fill(p.q.begin(), p.q.end(), to_bf16(0));  // every score is 0, whatever the keys
  const auto kept = plain(p);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_NEAR(to_double(kept->lse.value[i]), std::log(static_cast<double>(i + 1)), 1e-15);
    for (std::size_t d = 0; d < p.head_dim_v; ++d) {
      double mean = 0;
      for (std::size_t j = 0; j <= i; ++j) mean += fp64_from_bf16(p.v[j * p.head_dim_v + d]);
      mean /= static_cast<double>(i + 1);
      EXPECT_NEAR(to_double(kept->out.value[i * p.head_dim_v + d]), mean, 1e-15);
    }
  }
}

TEST(PlainAttention, OneVisibleKeyIsCopied) {
  TestProblem p;
  p.window_left = 0;
  p.window_right = 0;
  p.add_sequence(6, 6);
  p.fill_normal(6);
  const auto kept = plain(p);
  for (std::size_t i = 0; i < kept->out.value.size(); ++i) {
    EXPECT_EQ(round_to_bf16(raw(kept->out.value[i])), p.v[i]);
    EXPECT_EQ(to_double(kept->out.value[i]), fp64_from_bf16(p.v[i]));
    EXPECT_EQ(to_double(kept->dv.value[i]), fp64_from_bf16(p.dout[i]));
    EXPECT_EQ(to_double(kept->dq.value[i]), 0);
    EXPECT_EQ(to_double(kept->dk.value[i]), 0);
  }
}

TEST(PlainAttention, TwoKeysAreALogisticFunction) {
  TestProblem p;
  p.add_sequence(1, 2);
  p.fill_normal(7);
  double difference = 0;
  double dp_difference = 0;
  for (std::size_t d = 0; d < p.head_dim; ++d) {
    difference += fp64_from_bf16(p.q[d]) * (fp64_from_bf16(p.k[d]) - fp64_from_bf16(p.k[p.head_dim + d]));
    dp_difference +=
        fp64_from_bf16(p.dout[d]) * (fp64_from_bf16(p.v[d]) - fp64_from_bf16(p.v[p.head_dim + d]));
  }
  const double p0 = 1 / (1 + std::exp(-difference * p.softmax_scale));
  const double ds0 = p0 * (1 - p0) * dp_difference * p.softmax_scale;
  const auto kept = plain(p);
  for (std::size_t d = 0; d < p.head_dim; ++d) {
    const double k0 = fp64_from_bf16(p.k[d]);
    const double k1 = fp64_from_bf16(p.k[p.head_dim + d]);
    const double v0 = fp64_from_bf16(p.v[d]);
    const double v1 = fp64_from_bf16(p.v[p.head_dim + d]);
    EXPECT_NEAR(to_double(kept->out.value[d]), p0 * v0 + (1 - p0) * v1, 1e-14);
    EXPECT_NEAR(to_double(kept->dq.value[d]), ds0 * (k0 - k1), 1e-14);
    EXPECT_NEAR(to_double(kept->dk.value[d]), ds0 * fp64_from_bf16(p.q[d]), 1e-14);
    EXPECT_NEAR(to_double(kept->dk.value[p.head_dim + d]), -ds0 * fp64_from_bf16(p.q[d]), 1e-14);
    EXPECT_NEAR(to_double(kept->dv.value[d]), p0 * fp64_from_bf16(p.dout[d]), 1e-14);
  }
}

TEST(PlainAttention, ZeroValuesGiveZeroOutputsAndScoreGradients) {
  TestProblem p;
  p.add_sequence(5, 9);
  p.fill_normal(8);
  std::fill(p.v.begin(), p.v.end(), std::uint16_t{0});
  const auto kept = plain(p);
  for (const Number& x : kept->out.value) EXPECT_EQ(to_double(x), 0);
  for (const Number& x : kept->dq.value) EXPECT_EQ(to_double(x), 0);
  for (const Number& x : kept->dk.value) EXPECT_EQ(to_double(x), 0);
}

TEST(PlainAttention, RowsAndKeysThatSeeNothing) {
  TestProblem p;
  p.causal = true;
  p.add_sequence(7, 3);  // rows 0 to 3 see no key
  p.fill_normal(9);
  const auto kept = plain(p);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(to_double(kept->lse.value[i]), -std::numeric_limits<double>::infinity());
    for (std::size_t d = 0; d < p.head_dim; ++d) {
      EXPECT_EQ(round_to_bf16(raw(kept->out.value[i * p.head_dim + d])), 0);
      EXPECT_EQ(round_to_bf16(raw(kept->dq.value[i * p.head_dim + d])), 0);
    }
  }
  TestProblem top;
  top.causal = top.top_left = true;
  top.add_sequence(2, 4);  // keys 2 and 3 are seen by nobody
  top.fill_normal(10);
  const auto kept_top = plain(top);
  for (std::size_t i = 2 * top.head_dim; i < 4 * top.head_dim; ++i) {
    EXPECT_EQ(round_to_bf16(raw(kept_top->dk.value[i])), 0);
    EXPECT_EQ(round_to_bf16(raw(kept_top->dv.value[i])), 0);
    EXPECT_LT(kept_top->dv.bound[i], 0x1p-600);
  }
}

TEST(PlainAttention, AgreesWithANaiveProgramInDoubles) {
  for (auto& [name, p] : varied_problems()) {
    SCOPED_TRACE(name);
    const auto kept = plain(p);
    NaiveAttention<double> naive(p);
    naive.forward();
    naive.backward();
    const auto compare = [](const char* tensor, const Values& a, const std::vector<double>& b) {
      ASSERT_EQ(a.value.size(), b.size());
      for (std::size_t i = 0; i < b.size(); ++i) {
        if (mpfr_inf_p(raw(a.value[i])) != 0) continue;  // lse of an empty row
        ASSERT_NEAR(to_double(a.value[i]), b[i], 1e-12 * (1 + std::abs(b[i]))) << tensor << " " << i;
      }
    };
    compare("out", kept->out, naive.out);
    compare("lse", kept->lse, naive.lse);
    compare("dq", kept->dq, naive.dq);
    compare("dk", kept->dk, naive.dk);
    compare("dv", kept->dv, naive.dv);
  }
}

TEST(PlainAttention, GradientsAreFiniteDifferencesOfTheForward) {
  // Central differences in 100 digits with steps of 1e-30: their own error is below 1e-55.
  for (auto& [name, p] : varied_problems()) {
    SCOPED_TRACE(name);
    const auto kept = plain(p, 300);
    NaiveAttention<Fixed> naive(p);
    const Fixed step("1e-30");
    const auto compare = [&](const char* tensor, std::vector<Fixed>& input, const Values& gradient) {
      // Every element of a problem this small would take minutes; a stride that meets every row and column
      // does.
      for (std::size_t i = 0; i < input.size(); i += 7) {
        const Fixed x = input[i];
        input[i] = x + step;
        const Fixed up = naive.forward();
        input[i] = x - step;
        const Fixed down = naive.forward();
        input[i] = x;
        const Fixed difference = (up - down) / (2 * step) - Fixed(gradient.value[i]);
        ASSERT_LT(abs(difference), Fixed("1e-50")) << tensor << " " << i;
      }
    };
    compare("dq", naive.q, kept->dq);
    compare("dk", naive.k, kept->dk);
    compare("dv", naive.v, kept->dv);
  }
}

TEST(PlainAttention, TwoPrecisionsAgreeWithinTheirBounds) {
  for (auto& [name, p] : varied_problems()) {
    SCOPED_TRACE(name);
    const auto truth = plain(p, 300);
    for (const int bits : {24, 53, 100, 128, 150}) {
      SCOPED_TRACE(bits);
      expect_within_bounds(*plain(p, bits), *truth);
    }
  }
}

TEST(PlainAttention, BoundsAreOfTheSizeOfTheErrors) {
  // A bound that always held because it were huge would prove nothing: here it is within 2^14 of the largest
  // error.
  TestProblem p;
  p.add_sequence(40, 40);
  p.head_dim = p.head_dim_v = 32;
  p.softmax_scale = 0.2;
  p.fill_normal(11);
  const auto low = plain(p, 100);
  const auto truth = plain(p, 300);
  const auto ratio = [](const Values& a, const Values& b) {
    double bound = 0;
    double error = 0;
    for (std::size_t i = 0; i < a.value.size(); ++i) {
      Number difference = make_number(300);
      mpfr_sub(raw(difference), raw(a.value[i]), raw(b.value[i]), MPFR_RNDA);
      bound = std::max(bound, a.bound[i]);
      error = std::max(error, std::abs(to_double(difference)));
    }
    return bound / error;
  };
  for (const double r : {ratio(low->out, truth->out), ratio(low->lse, truth->lse), ratio(low->dq, truth->dq),
                         ratio(low->dk, truth->dk), ratio(low->dv, truth->dv)}) {
    EXPECT_GE(r, 1);
    EXPECT_LE(r, 0x1p14);
  }
}

TEST(PlainAttention, OneVectorAddedToAllKeysChangesNothing) {
  // Whole numbers, so that the shifted keys are BF16 too; the shift moves all scores of a row by one
  // constant.
  TestProblem p;
  p.causal = true;
  p.heads_q = 2;
  p.add_sequence(12, 15);
  std::mt19937_64 engine(12);
  p.fill([&](char, std::size_t) { return static_cast<double>(static_cast<int>(engine() % 9) - 4); });
  TestProblem shifted = p;
  for (std::size_t i = 0; i < p.k.size(); ++i) {
    const double shift = static_cast<double>(i % p.head_dim) * 8 - 30;
    shifted.k[i] = to_bf16(fp64_from_bf16(p.k[i]) + shift);
    ASSERT_EQ(fp64_from_bf16(shifted.k[i]), fp64_from_bf16(p.k[i]) + shift);
  }
  const auto a = plain(p);
  const auto b = plain(shifted);
  expect_within_bounds("out", a->out, b->out);
  expect_within_bounds("dv", a->dv, b->dv);
  expect_within_bounds("dk", a->dk, b->dk);
  expect_within_bounds("dq", a->dq, b->dq);  // the shift times the sum of score gradients, which is 0
}

TEST(PlainAttention, ScoreGradientsOfARowSumToZero) {
  // One more key component that is 1 in every key: dQ's element there is scale * sum_j dS_ij.
  TestProblem p;
  p.window_left = 5;
  p.add_sequence(16, 16);
  p.fill_normal(13);
  for (std::size_t j = 0; j < 16; ++j) p.k[j * p.head_dim] = to_bf16(1);
  const auto kept = plain(p);
  for (std::size_t i = 0; i < 16; ++i) {
    const std::size_t at = i * p.head_dim;
    EXPECT_LE(std::abs(to_double(kept->dq.value[at])), kept->dq.bound[at]);
    EXPECT_LT(kept->dq.bound[at], 1e-33);
  }
}

TEST(PlainAttention, SameBitsForAnyNumberOfThreads) {
  for (auto& [name, p] : varied_problems()) {
    SCOPED_TRACE(name);
    std::unique_ptr<KeepAll> one;
    {
      const tbb::global_control control(tbb::global_control::max_allowed_parallelism, 1);
      one = plain(p);
    }
    const tbb::global_control control(tbb::global_control::max_allowed_parallelism, 4);
    const auto four = plain(p);
    EXPECT_TRUE(same_bits(one->out, four->out) && same_bits(one->lse, four->lse) &&
                same_bits(one->dq, four->dq) && same_bits(one->dk, four->dk) && same_bits(one->dv, four->dv));
  }
}

TEST(PlainAttention, ChosenRowsHaveTheSameBits) {
  for (auto& [name, p] : varied_problems()) {
    SCOPED_TRACE(name);
    const auto all = plain(p);
    std::vector<RowId> rows;
    for (std::size_t b = 0; b < p.sequences.size(); ++b) {
      for (std::size_t i = 0; i < p.sequences[b].q_length; i += 3) {
        for (std::size_t h = 0; h < p.heads_q; h += 2) rows.push_back({b, h, i});
      }
    }
    KeepAll some(p);
    plain_attention_rows(p.view(), rows, kDefaultBits, {}, some);
    for (const RowId& id : rows) {
      const std::size_t at = (p.sequences[id.sequence].q_begin + id.row) * p.heads_q + id.head;
      EXPECT_TRUE(mpfr_equal_p(raw(all->lse.value[at]), raw(some.lse.value[at])));
      for (std::size_t d = 0; d < p.head_dim_v; ++d) {
        EXPECT_TRUE(mpfr_equal_p(raw(all->out.value[at * p.head_dim_v + d]),
                                 raw(some.out.value[at * p.head_dim_v + d])));
      }
      for (std::size_t d = 0; d < p.head_dim; ++d) {
        EXPECT_TRUE(
            mpfr_equal_p(raw(all->dq.value[at * p.head_dim + d]), raw(some.dq.value[at * p.head_dim + d])));
      }
    }
  }
}

TEST(PlainAttention, InfinitiesAndNansStayWhereTheFormulasPutThem) {
  constexpr std::uint16_t kNan = 0x7fc0;
  constexpr std::uint16_t kInf = 0x7f80;
  TestProblem p;
  p.causal = true;
  p.add_sequence(6, 6);
  p.fill_normal(14);
  p.k[4 * p.head_dim] = kNan;  // key 4 is masked for rows 0 to 3
  const auto kept = plain(p);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(mpfr_nan_p(raw(kept->lse.value[i])) != 0, i >= 4) << i;
    EXPECT_EQ(mpfr_nan_p(raw(kept->out.value[i * p.head_dim])) != 0, i >= 4) << i;
    EXPECT_EQ(mpfr_nan_p(raw(kept->dq.value[i * p.head_dim])) != 0, i >= 4) << i;
    EXPECT_TRUE(mpfr_nan_p(raw(kept->dk.value[i * p.head_dim])))
        << i;  // rows 4 and 5 see every key but the last
  }

  TestProblem
      values;  // an infinite value: O is infinite in its column alone, the gradients of the scores are NaN
  values.add_sequence(2, 3);
  values.fill_normal(15);
  values.v[1] = kInf;
  const auto kept_values = plain(values);
  EXPECT_TRUE(mpfr_inf_p(raw(kept_values->out.value[1])));
  EXPECT_TRUE(mpfr_number_p(raw(kept_values->out.value[0])));
  EXPECT_TRUE(mpfr_number_p(raw(kept_values->lse.value[0])));
  EXPECT_TRUE(mpfr_nan_p(raw(kept_values->dq.value[0])));

  // All kinds at random places: it must end, and claim nothing where something is not finite.
  std::mt19937_64 engine(16);
  for (auto& [name, base] : varied_problems()) {
    TestProblem wild = base;
    for (auto* words : {&wild.q, &wild.k, &wild.v, &wild.dout}) {
      if (words->empty()) continue;
      (*words)[engine() % words->size()] = kInf;
      (*words)[engine() % words->size()] = kInf | 0x8000U;
      if (engine() % 2 == 0) (*words)[engine() % words->size()] = kNan;
    }
    const auto kept_wild = plain(wild, 64);
    for (std::size_t i = 0; i < kept_wild->dk.value.size(); ++i) {
      if (mpfr_number_p(raw(kept_wild->dk.value[i])) == 0) {
        EXPECT_FALSE(std::isfinite(kept_wild->dk.bound[i])) << name;
      }
    }
  }
}

TEST(PlainAttention, ProgressEndsAtOneAndMayCancel) {
  TestProblem p;
  p.add_sequence(64, 20);
  p.fill_normal(17);
  std::atomic<double> last{0};
  KeepAll kept(p);
  plain_attention(
      p.view(), 64, [&](double share) { last = share; }, kept);
  EXPECT_EQ(last.load(), 1.0);
  struct Cancelled {};
  EXPECT_THROW(plain_attention(
                   p.view(), 64, [](double) { throw Cancelled{}; }, kept),
               Cancelled);
}

TEST(PlainAttention, RefusesWhatDoesNotFit) {
  TestProblem p;
  p.add_sequence(2, 2);
  p.fill_normal(18);
  KeepAll kept(p);
  EXPECT_THROW(plain_attention(p.view(), 23, {}, kept), std::invalid_argument);
  EXPECT_THROW(plain_attention(p.view(), 4097, {}, kept), std::invalid_argument);
  p.heads_q = 3;
  p.heads_kv = 2;
  EXPECT_THROW(plain_attention(p.view(), 128, {}, kept), std::invalid_argument);
}

TEST(PlainAttention, ForwardAloneHasTheSameBits) {
  TestProblem p;
  p.add_sequence(9, 9);
  p.fill_normal(19);
  const auto both = plain(p);
  p.backward = false;
  const auto forward = plain(p);
  EXPECT_TRUE(same_bits(both->out, forward->out) && same_bits(both->lse, forward->lse));
  EXPECT_TRUE(forward->dq.value.empty() && forward->dk.value.empty());
}

}  // namespace
}  // namespace bitattn::reference::testing
