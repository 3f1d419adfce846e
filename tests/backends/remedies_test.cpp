// Proves: what each remedy keeps exactly, what it must never make worse by construction, and that its
// corrections of dQ and dK are those of its definition, recomputed here in fp64 from what the kernel had in
// its hands.

#include <gtest/gtest.h>
#include <tbb/global_control.h>

#include <cmath>
#include <functional>
#include <limits>
#include <mutex>

#include "backends/backend.hpp"
#include "backends/emulator.hpp"
#include "backends/input_remedies.hpp"
#include "backends/sites.hpp"
#include "datasets/error.hpp"
#include "datasets/regime.hpp"
#include "emu/arith/bf16.hpp"
#include "emu/kernels/observer.hpp"
#include "emu/kernels/remedies/centred_keys.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn {
namespace {

using profile::Remedy;
using profile::RemedyInfo;

double widen(std::uint16_t word) {
  return static_cast<double>(arith::fp32_from_bf16(word));
}

/// A shape and mask of the tests, small but with several key blocks.
struct Shape {
  const char* name;
  std::size_t sq, sk, heads_q, heads_kv, dim;
  bool causal;
  int left, right;
};

constexpr Shape kShapes[] = {
    {"CausalMoreKeys", 150, 300, 4, 2, 64, true, -1, -1},
    {"CausalMoreQueries", 300, 170, 1, 1, 128, true, -1, -1},
    {"Full", 130, 290, 2, 2, 128, false, -1, -1},
    {"Local", 260, 330, 2, 1, 64, false, 70, 30},
    {"Wide", 96, 180, 1, 1, 192, true, -1, -1},
};

Capture capture_of(const std::string& regime, const Shape& shape, double softcap = 0, double key_shift = 0) {
  GenerateOptions options;
  options.regime = regime;
  options.seqlen_q = shape.sq;
  options.seqlen_k = shape.sk;
  options.heads_q = shape.heads_q;
  options.heads_kv = shape.heads_kv;
  options.head_dim = shape.dim;
  options.causal = shape.causal;
  options.window_left = shape.left;
  options.window_right = shape.right;
  options.softcap = softcap;
  options.key_shift = key_shift;
  options.seed = 5;
  Capture capture;
  capture.name = regime + " " + shape.name;
  capture.problem = generate(options);
  return capture;
}

/// Two sequences of other lengths in one tensor.
Capture packed_capture(const std::string& regime) {
  Capture capture = capture_of(regime, {"Packed", 220, 310, 2, 1, 64, true, -1, -1});
  Problem& p = capture.problem;
  p.layout = Layout::thd;
  p.batch = 2;
  p.cu_seqlens_q = {0, 90, 220};
  p.cu_seqlens_k = {0, 200, 310};
  p.seqlen_q = 130;
  p.seqlen_k = 200;
  for (Bf16Tensor* t : {&p.q, &p.k, &p.v, &p.dout}) t->shape.erase(t->shape.begin());
  return capture;
}

RunOptions uncast() {
  RunOptions options;
  options.want_uncast = true;
  return options;
}

bool same_outputs(const Result& a, const Result& b) {
  const auto bits = [](const std::vector<float>& x, const std::vector<float>& y) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end(),
                      [](float u, float v) { return arith::to_bits(u) == arith::to_bits(v); });
  };
  return a.out.data == b.out.data && bits(a.lse.data, b.lse.data) && a.dq.data == b.dq.data &&
         a.dk.data == b.dk.data && a.dv.data == b.dv.data;
}

bool moved(const Result& a, const Result& b) {
  return !same_outputs(a, b) || a.uncast.dq.data != b.uncast.dq.data || a.uncast.dk.data != b.uncast.dk.data;
}

// --- names

TEST(RemedyNames, EveryNameIsReadAndComesBack) {
  for (const RemedyInfo& i : profile::kRemedies) {
    EXPECT_EQ(&profile::info(i.remedy), &i) << i.name;
    const profile::RemediedName name = profile::parse_remedies("fa3+" + std::string(i.name));
    EXPECT_EQ(name.base, "fa3");
    EXPECT_TRUE(name.remedies.has(i.remedy));
    EXPECT_EQ(profile::text(name.remedies), i.name);
    EXPECT_EQ(i.experimental, i.name.starts_with("experimental:")) << i.name;
    EXPECT_NE(make_backend("fa3+" + std::string(i.name)), nullptr);
  }
  const profile::RemedySet both = profile::parse_remedies("x+gproj+subtract-first").remedies;
  EXPECT_EQ(both, profile::parse_remedies("x+subtract-first+gproj").remedies);
  EXPECT_EQ(profile::text(both), "subtract-first+gproj");
  EXPECT_TRUE(profile::parse_remedies("fa3").remedies.empty());
}

TEST(RemedyNames, WhatMeansNothingIsRefusedInOneLine) {
  for (const char* name :
       {"fa3+", "fa3+nonsense", "fa3+gproj+gproj", "fa3+gproj+gproj-weighted", "fa3+o-residual+o-residual8",
        "fa3+top-key", "fa3+fp32+gproj", "fa3+fp32-backward+consistent-d", "fa3+ds-split+heavy-low",
        "fp32+gproj", "reference+subtract-first", "recorded+qk-norm", "recorded+gproj", "nothing+gproj",
        "fa3++gproj", "+gproj", "fa3+subtract-first+experimental:integer-reference"}) {
    try {
      make_backend(name);
      ADD_FAILURE() << name << " was taken";
    } catch (const InputError& error) {
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
      EXPECT_NE(std::string(error.what()), "");
    }
  }
}

TEST(RemedyNames, AllAreListed) {
  for (const RemedyInfo& i : profile::kRemedies) {
    const auto listed = [&](const BackendInfo& b) { return b.name == "fa3+" + std::string(i.name); };
    EXPECT_EQ(std::count_if(backends().begin(), backends().end(), listed), 1) << i.name;
  }
}

TEST(RemedyNames, ThoseThatHurtSomewhereSaySo) {
  const Capture capture = capture_of("normal", kShapes[4]);
  for (const RemedyInfo& i : profile::kRemedies) {
    const bool hurts = profile::known_to_hurt(i);
    EXPECT_TRUE(!hurts || !i.warning.empty()) << i.name;
    const std::vector<std::string> notes = make_backend("fa3+" + std::string(i.name))->run(capture, {}).notes;
    const auto says = [&](const std::string& note) { return note.starts_with(std::string(i.name) + ": "); };
    EXPECT_EQ(std::count_if(notes.begin(), notes.end(), says), hurts ? 1 : 0) << i.name;
  }
}

// --- every remedy

class EveryRemedy : public ::testing::TestWithParam<RemedyInfo> {
 protected:
  std::string backend() const { return "fa3+" + std::string(GetParam().name); }
};

TEST_P(EveryRemedy, MovesSomeBitOfSomeRegime) {
  for (const char* regime : {"normal", "late", "ties", "peaky"}) {
    const Capture capture = capture_of(regime, kShapes[0]);
    const Result plain = make_backend("fa3")->run(capture, uncast());
    if (moved(plain, make_backend(backend())->run(capture, uncast()))) return;
  }
  ADD_FAILURE() << "nothing reads it";
}

TEST_P(EveryRemedy, ThreadsChangeNoBit) {
  for (const Shape& shape : {kShapes[0], kShapes[3]}) {
    const Capture capture = capture_of("peaky", shape);
    const Result many = make_backend(backend())->run(capture, uncast());
    const tbb::global_control one(tbb::global_control::max_allowed_parallelism, 1);
    EXPECT_FALSE(moved(many, make_backend(backend())->run(capture, uncast()))) << capture.name;
  }
}

TEST_P(EveryRemedy, RunsOverFp64NumbersWithTheSameBits) {
  const RemedyInfo& i = GetParam();
  if (is_input_remedy(i.remedy) || i.remedy == Remedy::fp32 || i.remedy == Remedy::fp32_backward) {
    return;  // nothing that has rounding sites
  }
  profile::Profile profile;
  profile.remedies.add(i.remedy);
  for (const char* regime : {"normal", "late", "peaky"}) {
    const Capture capture = capture_of(regime, kShapes[0]);
    const Result chip = emulator_backend(profile)->run(capture, {});
    EXPECT_TRUE(same_outputs(chip, site_backend(profile)->run(capture, {}))) << regime;
  }
}

TEST_P(EveryRemedy, ASoftcapIsRefusedWhereTheZeroSumIsNeeded) {
  const Capture capture = capture_of("normal", kShapes[0], 20);
  if (GetParam().needs_zero_sum) {
    EXPECT_THROW(make_backend(backend())->run(capture, {}), InputError);
  } else {
    EXPECT_NO_THROW(make_backend(backend())->run(capture, {}));
  }
}

INSTANTIATE_TEST_SUITE_P(Fa3, EveryRemedy, ::testing::ValuesIn(profile::kRemedies),
                         [](const ::testing::TestParamInfo<RemedyInfo>& tested) {
                           std::string name;
                           for (const char c : tested.param.name) name += std::isalnum(c) != 0 ? c : '_';
                           return name;
                         });

// --- corrections of dS

/// What the kernel had in its hands, whole: [head][row][key] of one sequence.
class WholeRows final : public kernels::Observer {
 public:
  struct Head {
    std::vector<double> p, dp, ds, cast;  ///< [row][key]
    std::vector<double> added;            ///< [row]
  };
  explicit WholeRows(const Problem& problem) : problem_(problem) {
    heads.resize(problem.batch * problem.heads_q);
    for (std::size_t b = 0; b < problem.batch; ++b) {
      const SequenceSpan span = problem.sequence(b);
      for (std::size_t h = 0; h < problem.heads_q; ++h) {
        Head& head = heads[b * problem.heads_q + h];
        for (std::vector<double>* x : {&head.p, &head.dp, &head.ds, &head.cast}) {
          x->assign(span.q_length * span.k_length, 0.0);
        }
        head.added.assign(span.q_length, 0.0);
      }
    }
  }
  void backward_rows(const kernels::BackwardRows& rows) override {
    const SequenceSpan span = problem_.sequence(static_cast<std::size_t>(rows.id.sequence));
    Head& head = heads[static_cast<std::size_t>(rows.id.sequence) * problem_.heads_q +
                       static_cast<std::size_t>(rows.id.head)];
    std::call_once(keys_copied_, [&] { dq_keys.assign(rows.dq_keys, rows.dq_keys + problem_.k.size()); });
    for (int r = 0; r < rows.rows; ++r) {
      const auto i = static_cast<std::size_t>(rows.row_begin + r);
      if (rows.added != nullptr) head.added[i] = rows.added[r];
      const KeyRange range =
          visible_keys(problem_, static_cast<std::int64_t>(i), static_cast<std::int64_t>(span.q_length),
                       static_cast<std::int64_t>(span.k_length));
      for (std::int64_t j = range.first; j < range.last; ++j) {
        const std::ptrdiff_t at = r * rows.row_stride + (j - rows.key_begin);
        const std::size_t to = i * span.k_length + static_cast<std::size_t>(j);
        head.p[to] = static_cast<double>(rows.p[at]);
        head.dp[to] = static_cast<double>(rows.dp[at]);
        head.ds[to] = static_cast<double>(rows.ds[at]);
        head.cast[to] = widen(rows.ds_bf16[at]);
      }
    }
  }
  std::vector<Head> heads;
  std::vector<std::uint16_t> dq_keys;  ///< what dS was multiplied with

 private:
  const Problem& problem_;
  std::once_flag keys_copied_;
};

/// One row by the definition: visible keys [first, last), P', dS, its cast; and what a remedy makes of the
/// cast.
struct Row {
  std::size_t first, last;
  const double *p, *ds, *cast;  ///< indexed by key
  double sum() const {
    double s = 0;
    for (std::size_t j = first; j < last; ++j) s += cast[j];
    return s;
  }
};
using Effective = std::function<std::vector<double>(const Row&)>;  ///< effective dS of the visible keys

std::vector<double> cast_of(const Row& row) {
  return {row.cast + row.first, row.cast + row.last};
}

std::vector<double> evenly(const Row& row) {
  std::vector<double> e = cast_of(row);
  const double share = row.sum() / static_cast<double>(e.size());
  for (double& x : e) x -= share;
  return e;
}

std::vector<double> weighted(const Row& row) {
  std::vector<double> e = cast_of(row);
  double total = 0;
  for (std::size_t j = row.first; j < row.last; ++j) total += row.p[j];
  for (std::size_t j = row.first; j < row.last; ++j) e[j - row.first] -= row.sum() / total * row.p[j];
  return e;
}

std::vector<double> heavy(const Row& row, bool low, bool project, bool rest_evenly) {
  std::vector<double> e = cast_of(row);
  double sum = row.sum();
  double listed = 0;
  for (std::size_t j = row.first; j < row.last; ++j) {
    if (row.p[j] <= 1.0 / 16) continue;
    if (low) {
      e[j - row.first] = row.ds[j];
      sum += row.ds[j] - row.cast[j];
    }
    listed += row.p[j];
  }
  for (std::size_t j = row.first; project && j < row.last; ++j) {
    if (row.p[j] > 1.0 / 16) e[j - row.first] -= sum * row.p[j];
    if (rest_evenly) e[j - row.first] -= sum * (1 - listed) / static_cast<double>(e.size());
  }
  return e;
}

std::vector<double> both_words(const Row& row) {
  std::vector<double> e = cast_of(row);
  for (std::size_t j = row.first; j < row.last; ++j) {
    e[j - row.first] += widen(arith::bf16_from_fp32(static_cast<float>(row.ds[j] - row.cast[j])));
  }
  return e;
}

struct Definition {
  const char* name;
  Effective of_dq, of_dk;
};

std::vector<Definition> definitions() {
  const auto heavy_with = [](bool low, bool project, bool rest) -> Effective {
    return [=](const Row& row) { return heavy(row, low, project, rest); };
  };
  return {
      {"gproj", evenly, evenly},
      {"subtract-first+gproj", evenly, evenly},
      {"gproj-weighted", weighted, weighted},
      {"heavy-low", heavy_with(true, false, false), heavy_with(true, false, false)},
      {"heavy-projection", heavy_with(false, true, false), heavy_with(false, true, false)},
      {"heavy-low+heavy-projection", heavy_with(true, true, false), heavy_with(true, true, false)},
      {"experimental:uniform-shares", heavy_with(false, true, true), heavy_with(false, true, true)},
      {"heavy-low+experimental:uniform-shares", heavy_with(true, true, true), heavy_with(true, true, true)},
      {"ds-split", both_words, both_words},
      {"experimental:top-key",
       [](const Row& row) {
         std::vector<double> e = cast_of(row);
         std::size_t top = row.first;
         for (std::size_t j = row.first; j < row.last; ++j) {
           if (row.p[j] > row.p[top]) top = j;
         }
         const double rest = row.sum() * (1 - row.p[top]) / static_cast<double>(e.size());
         for (double& x : e) x -= rest;
         e[top - row.first] -= row.sum() * row.p[top];
         return e;
       },
       cast_of},
      {"centred-keys", cast_of, cast_of},
      {"centred-keys+heavy-low+heavy-projection", heavy_with(true, true, false),
       heavy_with(true, true, false)},
      {"experimental:error-diffusion", cast_of, cast_of},
      {"experimental:in-tile-feedback", cast_of, cast_of},
  };
}

/// Largest |dq - expected| and |dk - expected| of a head over the largest |dS| |K| and |dS| |Q| sums.
void expect_gradients(const Capture& capture, const Definition& definition) {
  SCOPED_TRACE(std::string(definition.name) + ", " + capture.name);
  const Problem& p = capture.problem;
  WholeRows seen(p);
  RunOptions options = uncast();
  options.observer = &seen;
  const Result result = make_backend("fa3+" + std::string(definition.name))->run(capture, options);
  std::vector<double> dk(p.k.size(), 0.0);
  std::vector<double> dk_size(p.k.size(), 0.0);
  double worst_dq = 0;
  double worst_sum = 0;
  for (std::size_t b = 0; b < p.batch; ++b) {
    const SequenceSpan span = p.sequence(b);
    for (std::size_t h = 0; h < p.heads_q; ++h) {
      const WholeRows::Head& head = seen.heads[b * p.heads_q + h];
      for (std::size_t i = 0; i < span.q_length; ++i) {
        const KeyRange range =
            visible_keys(p, static_cast<std::int64_t>(i), static_cast<std::int64_t>(span.q_length),
                         static_cast<std::int64_t>(span.k_length));
        if (range.first >= range.last) continue;
        const std::size_t at = i * span.k_length;
        const Row row{static_cast<std::size_t>(range.first), static_cast<std::size_t>(range.last),
                      head.p.data() + at, head.ds.data() + at, head.cast.data() + at};
        const std::vector<double> q_side = definition.of_dq(row);
        const std::vector<double> k_side = definition.of_dk(row);
        std::vector<double> dq(p.head_dim, 0.0);
        double magnitude = 0;
        double sum = -head.added[i];
        double terms = 0;
        for (std::size_t j = row.first; j < row.last; ++j) terms += std::abs(row.cast[j]);
        const double rounding =
            terms / static_cast<double>(row.last - row.first);  // what a share of R may be off by
        for (std::size_t j = row.first; j < row.last; ++j) {
          const double a = q_side[j - row.first];
          const double on_k = k_side[j - row.first];
          sum += a - row.cast[j];
          const std::size_t key = (span.k_begin + j) * p.k_stride() + h / p.group() * p.head_dim;
          const std::size_t query = (span.q_begin + i) * p.q_stride() + h * p.head_dim;
          double norm = 0;
          for (std::size_t d = 0; d < p.head_dim; ++d) {
            const double k = widen(seen.dq_keys[key + d]);
            const double q = widen(p.q.data[query + d]);
            dq[d] += a * k;
            norm += k * k;
            dk[key + d] += p.softmax_scale * on_k * q;
            dk_size[key + d] +=
                p.softmax_scale * (std::max(std::abs(row.cast[j]), std::abs(on_k)) + rounding) * std::abs(q);
          }
          magnitude += std::abs(row.cast[j]) * std::sqrt(norm);
        }
        worst_sum = std::max(worst_sum, std::abs(sum) / terms);
        for (std::size_t d = 0; d < p.head_dim; ++d) {
          const double got = result.uncast.dq.data[(span.q_begin + i) * p.q_stride() + h * p.head_dim + d];
          worst_dq =
              std::max(worst_dq, std::abs(got - p.softmax_scale * dq[d]) / (p.softmax_scale * magnitude));
        }
      }
    }
  }
  double worst_dk = 0;
  for (std::size_t e = 0; e < dk.size(); ++e) {
    if (dk_size[e] == 0) continue;
    worst_dk = std::max(worst_dk, std::abs(result.uncast.dk.data[e] - dk[e]) / dk_size[e]);
  }
  EXPECT_LT(worst_dq, 1e-6);
  EXPECT_LT(worst_dk, 2e-6);
  EXPECT_LT(worst_sum, 1e-6) << "observers were told of another correction";
}

TEST(Corrections, AreThoseOfTheDefinition) {
  for (const Definition& definition : definitions()) {
    for (const char* regime : {"normal", "peaky", "late"}) {
      for (const Shape& shape : kShapes) expect_gradients(capture_of(regime, shape), definition);
      expect_gradients(packed_capture(regime), definition);
    }
  }
}

/// RMS over rows of |sum of effective dS| over the sum of |dS|.
double remaining_sum(const Capture& capture, const std::string& backend) {
  const Problem& p = capture.problem;
  WholeRows seen(p);
  RunOptions options;
  options.observer = &seen;
  make_backend(backend)->run(capture, options);
  double squares = 0;
  std::size_t rows = 0;
  for (const WholeRows::Head& head : seen.heads) {
    const std::size_t keys = head.cast.size() / head.added.size();
    for (std::size_t i = 0; i < head.added.size(); ++i) {
      double sum = head.added[i];
      double terms = 0;
      for (std::size_t j = 0; j < keys; ++j) {
        sum += head.cast[i * keys + j];
        terms += std::abs(head.cast[i * keys + j]);
      }
      if (terms == 0) continue;
      squares += sum * sum / (terms * terms);
      ++rows;
    }
  }
  return std::sqrt(squares / static_cast<double>(rows));
}

TEST(Gproj, LeavesAZeroSumToFp32Rounding) {
  for (const char* regime : {"normal", "late", "ties", "peaky", "wild"}) {
    for (const Shape& shape : kShapes) {
      const Capture capture = capture_of(regime, shape);
      SCOPED_TRACE(capture.name);
      const double plain = remaining_sum(capture, "fa3");
      for (const char* remedy : {"gproj", "gproj-weighted", "consistent-d+gproj", "heavy-low+gproj"}) {
        const double left = remaining_sum(capture, "fa3+" + std::string(remedy));
        EXPECT_LT(left, 1e-6) << remedy;
        EXPECT_LT(left, plain) << remedy;
      }
    }
  }
}

// --- forward

class Numerators final : public kernels::Observer {
 public:
  void forward_block(const kernels::ForwardBlock& block) override {
    const std::lock_guard lock(mutex_);
    for (int r = 0; r < block.rows; ++r) {
      if (block.row_max[r] == -std::numeric_limits<float>::infinity()) continue;
      for (int j = 0; j < block.keys; ++j) {
        const std::ptrdiff_t at = r * block.row_stride + j;
        largest = std::max(largest, block.p[at]);
        if (block.scores[at] != block.row_max[r]) continue;
        ++maxima;
        if (block.p[at] != 1.0F) ++not_one;
      }
    }
  }
  void backward_rows(const kernels::BackwardRows& rows) override {
    const std::lock_guard lock(mutex_);
    for (int r = 0; r < rows.rows; ++r) {
      double sum = 0;
      for (int j = 0; j < rows.keys; ++j) sum += static_cast<double>(rows.p[r * rows.row_stride + j]);
      if (sum != 0) excess = std::max(excess, std::abs(sum - 1));
    }
  }
  int maxima = 0, not_one = 0;
  float largest = 0;
  double excess = 0;

 private:
  std::mutex mutex_;
};

template <class Check>
void with_numerators(const Capture& capture, const std::string& backend, const Check& check) {
  Numerators seen;
  RunOptions options;
  options.observer = &seen;
  make_backend(backend)->run(capture, options);
  check(seen);
}

TEST(SubtractFirst, TheRowMaxHasExponentZeroAndPSumsToOne) {
  for (const char* regime : {"normal", "late", "ties", "peaky", "wild"}) {
    const Capture capture = capture_of(regime, kShapes[0]);
    SCOPED_TRACE(regime);
    with_numerators(capture, "fa3+subtract-first", [](const Numerators& n) {
      EXPECT_GT(n.maxima, 100);
      EXPECT_EQ(n.not_one, 0);
      EXPECT_LT(n.excess, 1e-6);
    });
  }
  // What it is held against: the plain kernel in the late regime.
  with_numerators(capture_of("late", kShapes[0]), "fa3", [](const Numerators& n) {
    EXPECT_GT(n.not_one, 100);
    EXPECT_GT(n.excess, 1e-5);
  });
}

TEST(ShiftedMax, NoNumeratorIsOneWhereMaximaTie) {
  Capture capture = capture_of("ties", kShapes[2]);
  with_numerators(capture, "fa3", [](const Numerators& n) { EXPECT_GT(n.largest, 0.9F); });
  // Every row's maximum ties when every key comes twice.
  Problem& p = capture.problem;
  const std::size_t key = p.k_stride();
  for (std::size_t j = 0; j + 1 < p.seqlen_k; j += 2) {
    std::copy_n(p.k.data.begin() + static_cast<std::ptrdiff_t>(j * key), key,
                p.k.data.begin() + static_cast<std::ptrdiff_t>((j + 1) * key));
  }
  with_numerators(capture, "fa3+shifted-max", [](const Numerators& n) { EXPECT_LT(n.largest, 0.9F); });
}

TEST(ShiftedMax, UnderflowsWhereATiedLogitExceeds87) {
  Capture capture = capture_of("normal", kShapes[2]);
  Problem& p = capture.problem;
  // Two equal keys that every query sees with a logit of 100 or more.
  const double norm = 100 * std::sqrt(static_cast<double>(p.head_dim));
  for (std::uint16_t& x : p.q.data) x = arith::bf16_from_fp32(1.0F);
  for (std::size_t j = 0; j < 2; ++j) {
    for (std::size_t e = 0; e < p.k_stride(); ++e) {
      p.k.data[j * p.k_stride() + e] =
          arith::bf16_from_fp32(static_cast<float>(norm / static_cast<double>(p.head_dim)));
    }
  }
  const Result result = make_backend("fa3+shifted-max")->run(capture, {});
  EXPECT_TRUE(std::all_of(result.out.data.begin(), result.out.data.end(),
                          [](std::uint16_t x) { return (x & 0x7fffU) == 0; }));
  EXPECT_TRUE(
      std::all_of(result.lse.data.begin(), result.lse.data.end(), [](float x) { return x < -1e30F; }));
}

TEST(IntegerReference, TheLargestNumeratorIsNotOne) {
  with_numerators(capture_of("normal", kShapes[0]), "fa3+experimental:integer-reference",
                  [](const Numerators& n) {
                    EXPECT_LE(n.largest, 1.0F);
                    EXPECT_GT(n.largest, 0.5F);
                    EXPECT_GT(n.not_one, n.maxima / 2);
                    EXPECT_LT(n.excess, 1e-6);
                  });
}

TEST(RoundedSum, ReproducesWhatAllValuesShareAndLeavesTheBackwardsP) {
  Capture capture = capture_of("normal", kShapes[0]);
  for (std::uint16_t& v : capture.problem.v.data) v = arith::bf16_from_fp32(1.0F);
  const auto largest_error = [&](const std::string& backend) {
    const Result result = make_backend(backend)->run(capture, uncast());
    double worst = 0;
    for (const double x : result.uncast.out.data) worst = std::max(worst, std::abs(x - 1));
    return worst;
  };
  EXPECT_GT(largest_error("fa3"), 1e-4);
  EXPECT_LT(largest_error("fa3+rounded-sum"), 1e-6);

  const Capture other = capture_of("peaky", kShapes[0]);
  const Result plain = make_backend("fa3")->run(other, {});
  const Result rounded = make_backend("fa3+rounded-sum")->run(other, {});
  EXPECT_EQ(plain.lse.data, rounded.lse.data);
  EXPECT_EQ(plain.dv.data, rounded.dv.data);
  EXPECT_NE(plain.out.data, rounded.out.data);
}

// --- where D comes from

/// Largest |D - sum_j P'_j dP_j / sum_j P'_j| over |P'dP|, from what the backward had in its hands.
double inconsistency_of_d(const Capture& capture, const std::string& backend) {
  class Seen final : public kernels::Observer {
   public:
    void backward_rows(const kernels::BackwardRows& rows) override {
      const std::lock_guard lock(mutex);
      for (int r = 0; r < rows.rows; ++r) {
        double g = 0;
        double size = 0;
        double total = 0;
        for (int j = 0; j < rows.keys; ++j) {
          const std::ptrdiff_t at = r * rows.row_stride + j;
          const double term = static_cast<double>(rows.p[at]) * static_cast<double>(rows.dp[at]);
          g += term;
          size += std::abs(term);
          total += static_cast<double>(rows.p[at]);
        }
        if (size == 0) continue;
        worst = std::max(worst, std::abs(static_cast<double>(rows.dpsum[r]) - g / total) / size);
      }
    }
    double worst = 0;
    std::mutex mutex;
  } seen;
  RunOptions options;
  options.observer = &seen;
  make_backend(backend)->run(capture, options);
  return seen.worst;
}

TEST(ConsistentD, IsTheRatioOfTheBackwardsOwnSums) {
  for (const char* regime : {"normal", "late", "ties", "peaky"}) {
    for (const Shape& shape : kShapes) {
      const Capture capture = capture_of(regime, shape);
      SCOPED_TRACE(capture.name);
      EXPECT_LT(inconsistency_of_d(capture, "fa3+consistent-d"), 1e-6);
      EXPECT_GT(inconsistency_of_d(capture, "fa3"), 1e-5);
    }
  }
}

TEST(OResidual, ChangesNoBitOfO) {
  for (const char* regime : {"normal", "late", "ties", "peaky", "wild", "tiny"}) {
    const Capture capture = capture_of(regime, kShapes[0]);
    const Result plain = make_backend("fa3")->run(capture, {});
    for (const char* remedy : {"o-residual", "o-residual8"}) {
      const Result kept = make_backend("fa3+" + std::string(remedy))->run(capture, {});
      EXPECT_EQ(plain.out.data, kept.out.data) << regime << ' ' << remedy;
      EXPECT_EQ(plain.lse.data, kept.lse.data) << regime << ' ' << remedy;
      EXPECT_EQ(plain.dv.data, kept.dv.data) << regime << ' ' << remedy;
    }
  }
}

TEST(OResidual, BringsDNearerToTheUnroundedO) {
  // D against rowsum(dO . y), y the output before its cast, in fp64.
  const auto error_of_d = [](const Capture& capture, const std::string& backend) {
    const Problem& p = capture.problem;
    const Result result = make_backend(backend)->run(capture, uncast());
    const Fp32Tensor& dpsum = result.intermediates.dpsum;
    const std::size_t padded = dpsum.shape.back();
    double error = 0;
    for (std::size_t h = 0; h < p.heads_q; ++h) {
      for (std::size_t i = 0; i < p.seqlen_q; ++i) {
        double d = 0;
        for (std::size_t e = 0; e < p.head_dim_v; ++e) {
          const std::size_t at = i * p.out_stride() + h * p.head_dim_v + e;
          d += result.uncast.out.data[at] * widen(p.dout.data[at]);
        }
        const double got = static_cast<double>(dpsum.data[h * padded + i]);
        error += (got - d) * (got - d);
      }
    }
    return std::sqrt(error);
  };
  for (const char* regime : {"normal", "late", "ties", "peaky"}) {
    const Capture capture = capture_of(regime, kShapes[0]);
    const double plain = error_of_d(capture, "fa3");
    EXPECT_LT(error_of_d(capture, "fa3+o-residual"), plain / 200) << regime;
    EXPECT_LT(error_of_d(capture, "fa3+o-residual8"), plain / 100) << regime;
  }
}

// --- keys

TEST(CentredKeys, NeverEnlargesACoordinateAndItsShiftIsExact) {
  std::size_t active = 0;
  for (const char* regime : {"normal", "late", "ties", "peaky", "wild", "opposed-sink"}) {
    for (const double shift : {0.0, 3.0, 100.0}) {
      const Capture capture = capture_of(regime, kShapes[0], 0, shift);
      const Problem& p = capture.problem;
      kernels::AttentionInputs in;
      in.call.heads_kv = static_cast<int>(p.heads_kv);
      in.call.head_dim = static_cast<int>(p.head_dim);
      const std::vector<kernels::Sequence> sequences{
          {0, static_cast<int>(p.seqlen_q), 0, static_cast<int>(p.seqlen_k)}};
      in.sequences = sequences;
      in.total_k = static_cast<int>(p.total_k());
      in.k = p.k.data.data();
      const std::vector<std::uint16_t> centred = kernels::remedies::centred_keys(in);
      for (std::size_t column = 0; column < p.k_stride(); ++column) {
        const double kappa = widen(p.k.data[column]) - widen(centred[column]);
        if (kappa != 0) ++active;
        for (std::size_t j = 0; j < p.seqlen_k; ++j) {
          const double k = widen(p.k.data[j * p.k_stride() + column]);
          const double c = widen(centred[j * p.k_stride() + column]);
          ASSERT_LE(std::abs(c), std::abs(k));
          ASSERT_EQ(k - c, kappa);  // fp64 holds the difference of two BF16 numbers so near exactly
        }
      }
    }
  }
  EXPECT_GT(active, 500U);
}

TEST(CentredKeys, AreNotFoundAmongKeysOfBothSignsOrFarApart) {
  const auto centre = [](std::vector<float> keys) {
    std::vector<std::uint16_t> words;
    for (const float k : keys) words.push_back(arith::bf16_from_fp32(k));
    return widen(kernels::remedies::key_centre(words.data(), 1, static_cast<int>(words.size())));
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(centre({1, 2, 3}), 2);
  EXPECT_EQ(centre({-1, -2, -3}), -2);
  EXPECT_EQ(centre({1, 4}), 2);  // at the limit: only 2 is within a factor of 2 of both
  EXPECT_EQ(centre({1, 4.0625F}), 0);
  EXPECT_EQ(centre({1, -1}), 0);
  EXPECT_EQ(centre({1, 0}), 0);
  EXPECT_EQ(centre({1, kInfinity}), 0);
  EXPECT_EQ(centre({kInfinity, kInfinity}), 0);
  EXPECT_EQ(centre({1, std::numeric_limits<float>::quiet_NaN()}), 0);
  EXPECT_EQ(centre({1e-39F, 1e-39F}), 0);  // subnormal: flushed
  EXPECT_EQ(centre({}), 0);
}

TEST(CentredKeys, ChangeDqAlone) {
  const Capture capture = capture_of("late", kShapes[0]);
  const Result plain = make_backend("fa3")->run(capture, {});
  const Result centred = make_backend("fa3+centred-keys")->run(capture, {});
  EXPECT_EQ(plain.out.data, centred.out.data);
  EXPECT_EQ(plain.dk.data, centred.dk.data);
  EXPECT_EQ(plain.dv.data, centred.dv.data);
  EXPECT_NE(plain.dq.data, centred.dq.data);
}

// --- fp32, and the inputs

TEST(Fp32Backward, HasTheKernelsForwardAndFp32sGradients) {
  const Capture capture = capture_of("late", kShapes[0]);
  const Result plain = make_backend("fa3")->run(capture, {});
  const Result fp32 = make_backend("fp32")->run(capture, {});
  const Result mixed = make_backend("fa3+fp32-backward")->run(capture, {});
  EXPECT_EQ(mixed.out.data, plain.out.data);
  EXPECT_EQ(mixed.lse.data, plain.lse.data);
  EXPECT_EQ(mixed.dq.data, fp32.dq.data);
  EXPECT_EQ(mixed.dk.data, fp32.dk.data);
  EXPECT_EQ(mixed.dv.data, fp32.dv.data);
  EXPECT_TRUE(same_outputs(fp32, make_backend("fa3+fp32")->run(capture, {})));
}

double relative_error(const std::vector<double>& x, const std::vector<double>& truth) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    error += (x[i] - truth[i]) * (x[i] - truth[i]);
    norm += truth[i] * truth[i];
  }
  return std::sqrt(error / norm);
}

TEST(MeanFreeKeys, AreTheSameFunction) {
  // Keys whose mean is a BF16 number, 16, and that lie near it: centring them rounds nothing, and the truth
  // must not move beyond its own precision.
  Capture capture = capture_of("normal", kShapes[0]);
  Problem& p = capture.problem;
  for (std::size_t j = 0; j < p.seqlen_k; ++j) {
    for (std::size_t e = 0; e < p.k_stride(); ++e) {
      const std::size_t pair = j / 2 * 2 * p.k_stride() + e;  // the keys of a pair lie on two sides of 16
      const bool above = ((pair * 2654435761U >> 7U) & 1U) == j % 2;
      p.k.data[j * p.k_stride() + e] = arith::bf16_from_fp32(above ? 17.0F : 15.0F);
    }
  }
  const Result truth = make_backend("reference")->run(capture, uncast());
  for (const char* remedy : {"mean-free-keys", "mean-free-keys-bf16"}) {
    const Result moved_keys = make_backend("reference+" + std::string(remedy))->run(capture, uncast());
    EXPECT_LT(relative_error(moved_keys.uncast.out.data, truth.uncast.out.data), 1e-13) << remedy;
    EXPECT_LT(relative_error(moved_keys.uncast.dq.data, truth.uncast.dq.data), 1e-13) << remedy;
    EXPECT_LT(relative_error(moved_keys.uncast.dk.data, truth.uncast.dk.data), 1e-13) << remedy;
    EXPECT_LT(relative_error(moved_keys.uncast.dv.data, truth.uncast.dv.data), 1e-13) << remedy;
  }
  // And what it is for: shifted keys, where the plain kernel's dQ is all error.
  const Capture shifted = capture_of("normal", kShapes[0], 0, 100);
  const Result of_shifted = make_backend("reference")->run(shifted, uncast());
  const Result plain = make_backend("fa3")->run(shifted, uncast());
  const Result centred = make_backend("fa3+mean-free-keys")->run(shifted, uncast());
  EXPECT_LT(relative_error(centred.uncast.dq.data, of_shifted.uncast.dq.data),
            relative_error(plain.uncast.dq.data, of_shifted.uncast.dq.data) / 20);
}

TEST(QkNorm, NormalisesToRootMeanSquareOneAndAGainGivesTheMeanBack) {
  const Capture capture = capture_of("late", kShapes[0]);
  const auto rms = [](const Bf16Tensor& x, std::size_t dim) {
    std::vector<double> out;
    for (std::size_t at = 0; at < x.size(); at += dim) {
      double squares = 0;
      for (std::size_t d = 0; d < dim; ++d) squares += widen(x.data[at + d]) * widen(x.data[at + d]);
      out.push_back(std::sqrt(squares / static_cast<double>(dim)));
    }
    return out;
  };
  const Problem& p = capture.problem;
  const Problem normed = remedy_inputs(p, profile::RemedySet().add(Remedy::qk_norm));
  for (const Bf16Tensor* x : {&normed.q, &normed.k}) {
    for (const double r : rms(*x, p.head_dim)) EXPECT_NEAR(r, 1, 2e-3);
  }
  const Problem gained = remedy_inputs(p, profile::RemedySet().add(Remedy::qk_norm_gain));
  for (std::size_t h = 0; h < p.heads_kv; ++h) {
    double before = 0;
    const std::vector<double> of_all = rms(p.k, p.head_dim);
    const std::vector<double> after = rms(gained.k, p.head_dim);
    for (std::size_t t = 0; t < p.seqlen_k; ++t) before += of_all[t * p.heads_kv + h];
    before /= static_cast<double>(p.seqlen_k);
    for (std::size_t t = 0; t < p.seqlen_k; ++t) {
      EXPECT_NEAR(after[t * p.heads_kv + h] / before, 1, 3e-3);
    }
  }
  EXPECT_EQ(normed.v.data, p.v.data);
  EXPECT_EQ(normed.dout.data, p.dout.data);
}

}  // namespace
}  // namespace bitattn
