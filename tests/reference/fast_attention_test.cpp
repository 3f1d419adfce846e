// The fast reference against plain MPFR at twice its precision: no element is off by more than its bound and
// plain's, on every shape and mask, and on inputs made to be hard.

#include "reference/fast_attention.hpp"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <string>

#include "reference/plain_attention.hpp"
#include "tests/reference/comparisons.hpp"
#include "tests/reference/support.hpp"

namespace bitattn::reference::testing {
namespace {

constexpr int kTwice = 256;

std::unique_ptr<KeepAll> fast(const TestProblem& problem) {
  auto kept = std::make_unique<KeepAll>(problem);
  fast_attention(problem.view(), {}, *kept);
  return kept;
}

std::unique_ptr<KeepAll> plain(const TestProblem& problem, int bits = kTwice) {
  auto kept = std::make_unique<KeepAll>(problem);
  plain_attention(problem.view(), bits, {}, *kept);
  return kept;
}

/// Largest bound over largest value.
double relative_bound(const Values& a) {
  double bound = 0;
  double value = 0;
  for (std::size_t i = 0; i < a.value.size(); ++i) {
    if (mpfr_number_p(raw(a.value[i])) == 0) continue;
    bound = std::max(bound, a.bound[i]);
    value = std::max(value, std::abs(to_double(a.value[i])));
  }
  return bound / value;
}

/// Inputs that are hard in one way or another, as the regimes of the captures are. D is small, so that the
/// plain reference stays affordable; lengths reach over two chunks.
std::vector<std::pair<const char*, TestProblem>> hard_problems() {
  std::vector<std::pair<const char*, TestProblem>> all;
  const auto add =
      [&](const char* name, bool causal,
          const std::function<double(std::mt19937_64&, char, std::size_t row, std::size_t d)>& draw,
          std::size_t queries = 40, std::size_t keys = 300) {
        TestProblem p;
        p.head_dim = p.head_dim_v = 12;
        p.softmax_scale = 1 / std::sqrt(12.0);
        p.causal = causal;
        p.add_sequence(queries, keys);
        std::mt19937_64 engine(all.size() + 100);
        p.fill(
            [&](char tensor, std::size_t i) { return draw(engine, tensor, i / p.head_dim, i % p.head_dim); });
        all.emplace_back(name, std::move(p));
      };
  std::normal_distribution<double> normal;
  const auto log_uniform = [](std::mt19937_64& e, double low, double high) {
    const double x = std::exp2(low + (high - low) * static_cast<double>(e() >> 11U) * 0x1p-53);
    return e() % 2 == 0 ? x : -x;
  };
  add(
      "many_queries", true, [&](auto& e, char, std::size_t, std::size_t) { return normal(e); }, 270, 40);
  add("late", true, [&](auto& e, char t, std::size_t, std::size_t d) {
    const double u = d % 2 == 0 ? 1 : -1;
    if (t == 'k') return 40 * u + normal(e);
    if (t == 'q') return 2 * u + normal(e);
    return t == 'v' ? normal(e) - 1 : normal(e) / 1024;
  });
  add("ties", true, [&](auto& e, char t, std::size_t row, std::size_t d) {
    const double u = d % 3 == 0 ? 3 : -2;
    if (t == 'k') return row % 11 == 0 ? 2 * u : normal(e);
    if (t == 'q') return u + normal(e);
    return t == 'v' ? normal(e) - 1.5 : normal(e) + 0.5;
  });
  add("one_key_takes_all", false, [&](auto& e, char t, std::size_t row, std::size_t d) {
    if (t == 'k') return row == 123 ? 60.0 : normal(e);
    return t == 'q' ? 3 + normal(e) * (d == 0 ? 1 : 0.1) : normal(e);
  });
  add("one_key_takes_nothing", false, [&](auto& e, char t, std::size_t row, std::size_t) {
    if (t == 'k') return row == 17 ? -60.0 : normal(e) / 4;
    return t == 'q' ? 3 + normal(e) / 8 : normal(e);
  });
  add("wild", false, [&](auto& e, char t, std::size_t, std::size_t) {
    if (t == 'v') return log_uniform(e, -30, 30);
    return t == 'o' ? log_uniform(e, -40, 20) : log_uniform(e, -20, 6);
  });
  add("wilder", true, [&](auto& e, char t, std::size_t, std::size_t) {
    return t == 'q' || t == 'k' ? log_uniform(e, -80, 6) : log_uniform(e, -133, 120);
  });
  add("tiny_columns", false, [&](auto& e, char t, std::size_t, std::size_t d) {
    return t == 'v' ? std::ldexp(normal(e), -134 + 2 * static_cast<int>(d)) : normal(e) / 8;
  });
  add("tiny_gradients", true, [&](auto& e, char t, std::size_t, std::size_t d) {
    return t == 'o' ? std::ldexp(normal(e), -140 + 2 * static_cast<int>(d)) : normal(e);
  });
  add("large_scores", false, [&](auto& e, char t, std::size_t, std::size_t) {
    return normal(e) * (t == 'q' || t == 'k' ? 1000 : 1);
  });
  add("equal_keys", false, [&](auto& e, char t, std::size_t, std::size_t d) {
    return t == 'k' ? static_cast<double>(d) : normal(e);
  });
  add("equal_values", false, [&](auto& e, char t, std::size_t, std::size_t d) {
    return t == 'v' ? static_cast<double>(d) - 3 : normal(e);
  });
  add("zeros", false, [&](auto& e, char t, std::size_t row, std::size_t) {
    return (row % 3 == 0 && t != 'k') || (t == 'k' && row % 2 == 0) ? 0.0 : normal(e);
  });
  add("one_broad_row", false, [&](auto& e, char t, std::size_t row, std::size_t d) {
    return d == 5 && row == 7 ? std::ldexp(normal(e), -90) : normal(e) * (t == 'o' ? 1e-6 : 1);
  });
  return all;
}

TEST(FastAttention, WithinItsBoundsOnEveryShapeAndMask) {
  for (auto& [name, p] : varied_problems()) {
    SCOPED_TRACE(name);
    const auto kept = fast(p);
    expect_within_bounds(*kept, *plain(p));
    // Well-behaved inputs: the largest bound is far below the largest value.
    for (const Values* v : {&kept->out, &kept->lse, &kept->dq, &kept->dk, &kept->dv}) {
      EXPECT_LE(relative_bound(*v), 0x1p-110);
    }
  }
}

TEST(FastAttention, WithinItsBoundsOnHardInputs) {
  for (auto& [name, p] : hard_problems()) {
    SCOPED_TRACE(name);
    for (std::size_t b = 0; b < p.sequences.size(); ++b) ASSERT_EQ(fast_obstacle(p.view(), b, 0), nullptr);
    expect_within_bounds(*fast(p), *plain(p));
    // The same with softcap: its own exponent, its own derivative.
    TestProblem capped = p;
    capped.softcap = 30;
    expect_within_bounds(*fast(capped), *plain(capped));
  }
}

TEST(FastAttention, KeepsItsDigitsWhereOneKeyTakesAll) {
  // One weight is 1 - 1e-60 or so, and the row's gradient is made of what is missing: relative errors stay
  // small.
  TestProblem p;
  p.add_sequence(20, 30);
  p.fill_normal(21);
  for (std::size_t d = 0; d < p.head_dim; ++d) {
    p.k[3 * p.head_dim + d] = to_bf16(70);
    for (std::size_t i = 0; i < 20; ++i)
      p.q[i * p.head_dim + d] = to_bf16(1 + fp64_from_bf16(p.q[i * p.head_dim + d]) / 8);
  }
  const auto kept = fast(p);
  const auto truth = plain(p, 700);
  for (const auto& [a, b] : {std::pair(&kept->dq, &truth->dq), std::pair(&kept->dk, &truth->dk)}) {
    for (std::size_t i = 0; i < a->value.size(); ++i) {
      const double value = std::abs(to_double(b->value[i]));
      ASSERT_GT(value, 0);
      ASSERT_LT(value, 1e-50);
      ASSERT_LT(a->bound[i], value * 0x1p-90) << i;
    }
  }
  expect_within_bounds(*kept, *truth);
}

TEST(FastAttention, BoundsAreOfTheSizeOfTheErrors) {
  TestProblem p;
  p.head_dim = p.head_dim_v = 32;
  p.softmax_scale = 0.2;
  p.add_sequence(64, 64);
  p.fill_normal(22);
  const auto kept = fast(p);
  const auto truth = plain(p, 400);
  for (const auto& [a, b] : {std::pair(&kept->out, &truth->out), std::pair(&kept->lse, &truth->lse),
                             std::pair(&kept->dq, &truth->dq), std::pair(&kept->dk, &truth->dk),
                             std::pair(&kept->dv, &truth->dv)}) {
    double bound = 0;
    double error = 0;
    Number difference = make_number(400);
    for (std::size_t i = 0; i < a->value.size(); ++i) {
      mpfr_sub(raw(difference), raw(a->value[i]), raw(b->value[i]), MPFR_RNDA);
      bound = std::max(bound, a->bound[i]);
      error = std::max(error, std::abs(to_double(difference)));
    }
    EXPECT_GE(bound, error);
    EXPECT_LE(bound, error * 0x1p12);
  }
}

TEST(FastAttention, OneVectorAddedToAllKeysChangesNothing) {
  TestProblem p;
  p.causal = true;
  p.head_dim_v = 6;
  p.add_sequence(30, 35);
  std::mt19937_64 engine(23);
  p.fill([&](char, std::size_t) { return static_cast<double>(static_cast<int>(engine() % 9) - 4); });
  TestProblem shifted = p;
  for (std::size_t i = 0; i < p.k.size(); ++i) {
    shifted.k[i] = to_bf16(fp64_from_bf16(p.k[i]) + static_cast<double>(i % p.head_dim) * 8 - 30);
  }
  const auto a = fast(p);
  const auto b = fast(shifted);
  expect_within_bounds("out", a->out, b->out);
  expect_within_bounds("dv", a->dv, b->dv);
  expect_within_bounds("dk", a->dk, b->dk);
  expect_within_bounds("dq", a->dq, b->dq);
}

TEST(FastAttention, SameBitsForAnyNumberOfThreads) {
  auto problems = varied_problems();
  for (auto& p : hard_problems()) problems.push_back(std::move(p));
  for (auto& [name, p] : problems) {
    SCOPED_TRACE(name);
    std::unique_ptr<KeepAll> one;
    {
      const tbb::global_control control(tbb::global_control::max_allowed_parallelism, 1);
      one = fast(p);
    }
    const tbb::global_control control(tbb::global_control::max_allowed_parallelism, 4);
    EXPECT_TRUE(same_bits(*one, *fast(p)));
  }
}

TEST(FastAttention, ChosenRowsHaveTheSameBits) {
  auto problems = varied_problems();
  for (auto& p : hard_problems()) problems.push_back(std::move(p));
  for (auto& [name, p] : problems) {
    SCOPED_TRACE(name);
    const auto all = fast(p);
    std::vector<RowId> rows;
    std::mt19937_64 engine(24);
    for (std::size_t b = 0; b < p.sequences.size(); ++b) {
      for (std::size_t h = 0; h < p.heads_q; ++h) {
        for (std::size_t i = 0; i < p.sequences[b].q_length; ++i) {
          if (engine() % 3 == 0) rows.push_back({b, h, i});
        }
      }
    }
    std::shuffle(rows.begin(), rows.end(), engine);
    KeepAll some(p);
    fast_attention_rows(p.view(), rows, {}, some);
    for (const RowId& id : rows) {
      const std::size_t at = (p.sequences[id.sequence].q_begin + id.row) * p.heads_q + id.head;
      ASSERT_TRUE(mpfr_equal_p(raw(all->lse.value[at]), raw(some.lse.value[at])));
      ASSERT_EQ(all->lse.bound[at], some.lse.bound[at]);
      for (std::size_t d = 0; d < p.head_dim_v; ++d) {
        const std::size_t e = at * p.head_dim_v + d;
        ASSERT_TRUE(mpfr_equal_p(raw(all->out.value[e]), raw(some.out.value[e])));
        ASSERT_EQ(all->out.bound[e], some.out.bound[e]);
      }
      for (std::size_t d = 0; d < p.head_dim; ++d) {
        const std::size_t e = at * p.head_dim + d;
        ASSERT_TRUE(mpfr_equal_p(raw(all->dq.value[e]), raw(some.dq.value[e])));
        ASSERT_EQ(all->dq.bound[e], some.dq.bound[e]);
      }
    }
  }
}

/// The same kind of number everywhere, the same infinities, and numbers within the bounds where both claim
/// something.
void expect_same_kinds(const char* name, const Values& a, const Values& b) {
  Number difference = make_number(1300);
  for (std::size_t i = 0; i < a.value.size(); ++i) {
    const mpfr_srcptr x = raw(a.value[i]);
    const mpfr_srcptr y = raw(b.value[i]);
    ASSERT_EQ(mpfr_nan_p(x) != 0, mpfr_nan_p(y) != 0) << name << " " << i;
    ASSERT_EQ(mpfr_inf_p(x) != 0, mpfr_inf_p(y) != 0) << name << " " << i;
    if (mpfr_nan_p(x) != 0 || (mpfr_inf_p(x) != 0 && name != std::string("lse"))) {
      ASSERT_FALSE(std::isfinite(a.bound[i])) << name << " " << i;
    }
    if (mpfr_inf_p(x) != 0) {
      ASSERT_EQ(mpfr_signbit(x), mpfr_signbit(y)) << name << " " << i;
    }
    if (mpfr_number_p(x) == 0 || !std::isfinite(a.bound[i]) || !std::isfinite(b.bound[i])) continue;
    mpfr_sub(raw(difference), x, y, MPFR_RNDA);
    ASSERT_LE(std::abs(to_double(difference)), a.bound[i] + b.bound[i]) << name << " " << i;
  }
}

void expect_same_kinds(const KeepAll& a, const KeepAll& b) {
  expect_same_kinds("out", a.out, b.out);
  expect_same_kinds("lse", a.lse, b.lse);
  expect_same_kinds("dq", a.dq, b.dq);
  expect_same_kinds("dk", a.dk, b.dk);
  expect_same_kinds("dv", a.dv, b.dv);
}

TEST(FastAttention, FallsBackToPlainWhereItMust) {
  struct Case {
    const char* name;
    std::function<void(TestProblem&)> spoil;
  };
  const std::vector<Case> cases{
      {"huge scores",
       [](TestProblem& p) {
         p.q[3] = 0x7e00;
         p.k[3] = 0x7e80;
       }},
      {"huge scale", [](TestProblem& p) { p.softmax_scale = 1e35; }},
      {"tiny scale", [](TestProblem& p) { p.softmax_scale = 1e-35; }},
      {"huge softcap", [](TestProblem& p) { p.softcap = 1e7; }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    TestProblem p;
    p.heads_q = p.heads_kv = 2;
    p.causal = true;
    p.add_sequence(7, 9);
    p.fill_normal(25);
    c.spoil(p);
    EXPECT_NE(fast_obstacle(p.view(), 0, 0), nullptr);
    const auto kept = fast(p);
    expect_same_kinds(*kept, *plain(p, 1200));
    // At a precision that the scores leave digits in.
    for (const double bound : kept->out.bound) EXPECT_LT(bound, 1e-30);
  }
}

TEST(FastAttention, InfinitiesAndNansGoWhereTheFormulasPutThem) {
  std::mt19937_64 engine(27);
  const std::array<std::uint16_t, 4> kinds{0x7fc0, 0x7f80, 0xff80, 0xffff};
  int touched_values = 0;
  for (int round = 0; round < 12; ++round) {
    for (auto& [name, base] : varied_problems()) {
      SCOPED_TRACE(name);
      SCOPED_TRACE(round);
      TestProblem p = base;
      // One, two or many spoiled elements, in one tensor or in all.
      const std::array<std::vector<std::uint16_t>*, 4> tensors{&p.q, &p.k, &p.v, &p.dout};
      const std::size_t count = round % 3 == 2 ? 6 : 1 + static_cast<std::size_t>(round % 3);
      for (std::size_t i = 0; i < count; ++i) {
        auto& words = *tensors[(static_cast<std::size_t>(round) + (round >= 8 ? i : 0)) % 4];
        if (!words.empty()) words[engine() % words.size()] = kinds[engine() % kinds.size()];
      }
      ASSERT_EQ(fast_obstacle(p.view(), 0, 0), nullptr);
      const auto kept = fast(p);
      expect_same_kinds(*kept, *plain(p, 300));
      for (const double bound : kept->dk.bound) touched_values += std::isfinite(bound) ? 0 : 1;
      p.backward = false;
      KeepAll forward(p);
      fast_attention(p.view(), {}, forward);
      KeepAll plain_forward(p);
      plain_attention(p.view(), 300, {}, plain_forward);
      expect_same_kinds("out", forward.out, plain_forward.out);
      expect_same_kinds("lse", forward.lse, plain_forward.lse);
    }
  }
  EXPECT_GT(touched_values, 1000);
}

TEST(FastAttention, ChosenRowsOfASpoiledHeadHaveTheSameBits) {
  TestProblem p;
  p.heads_q = 4;
  p.heads_kv = 2;
  p.causal = true;
  p.add_sequence(20, 24);
  p.fill_normal(28);
  p.k[15 * 2 * p.head_dim + 3] = 0x7fc0;          // key 15 of the first KV head: NaN from row 11 on
  p.v[9 * 2 * p.head_dim + p.head_dim] = 0x7f80;  // key 9 of the second: infinite from row 5 on
  const auto all = fast(p);
  std::vector<RowId> rows;
  for (std::size_t h = 0; h < 4; ++h) {
    for (std::size_t i = 0; i < 20; ++i) rows.push_back({0, h, i});
  }
  KeepAll some(p);
  fast_attention_rows(p.view(), rows, {}, some);
  const auto same = [](const Values& a, const Values& b) {
    for (std::size_t i = 0; i < a.value.size(); ++i) {
      const bool nan = mpfr_nan_p(raw(a.value[i])) != 0;
      ASSERT_EQ(nan, mpfr_nan_p(raw(b.value[i])) != 0);
      if (!nan) {
        ASSERT_TRUE(mpfr_equal_p(raw(a.value[i]), raw(b.value[i])));
      }
    }
  };
  same(all->out, some.out);
  same(all->lse, some.lse);
  same(all->dq, some.dq);
  EXPECT_TRUE(mpfr_number_p(raw(all->lse.value[10 * 4])));
  EXPECT_TRUE(mpfr_nan_p(raw(all->lse.value[11 * 4])));
  EXPECT_TRUE(mpfr_inf_p(raw(all->out.value[(5 * 4 + 2) * p.head_dim])));
}

TEST(FastAttention, ForwardAloneHasTheSameBits) {
  for (auto& [name, p] : varied_problems()) {
    SCOPED_TRACE(name);
    const auto both = fast(p);
    p.backward = false;
    KeepAll forward(p);
    fast_attention(p.view(), {}, forward);
    ASSERT_TRUE(forward.dq.value.empty());
    for (std::size_t i = 0; i < both->out.value.size(); ++i) {
      ASSERT_TRUE(mpfr_equal_p(raw(both->out.value[i]), raw(forward.out.value[i])));
    }
    for (std::size_t i = 0; i < both->lse.value.size(); ++i) {
      ASSERT_TRUE(mpfr_equal_p(raw(both->lse.value[i]), raw(forward.lse.value[i])));
    }
  }
}

TEST(FastAttention, ProgressEndsAtOneAndMayCancel) {
  TestProblem p;
  p.heads_q = p.heads_kv = 2;
  p.causal = true;
  p.add_sequence(70, 50);
  p.fill_normal(26);
  std::atomic<double> largest{0};
  KeepAll kept(p);
  fast_attention(
      p.view(),
      [&](double share) {
        double seen = largest.load();
        while (share > seen && !largest.compare_exchange_weak(seen, share)) {
        }
      },
      kept);
  EXPECT_NEAR(largest.load(), 1.0, 1e-12);
  struct Cancelled {};
  EXPECT_THROW(fast_attention(
                   p.view(), [](double) { throw Cancelled{}; }, kept),
               Cancelled);
}

}  // namespace
}  // namespace bitattn::reference::testing
