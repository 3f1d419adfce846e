#include "audit/witness.hpp"

#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "audit/compensated_sum.hpp"
#include "emu/arith/bf16.hpp"

namespace bitattn::audit {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double number(std::uint16_t word) {
  return static_cast<double>(arith::fp32_from_bf16(word));
}

/// How far the value that was rounded to this word can have been from it: half an ulp. Below 2^-126 kernels
/// flush to zero as they store, so there it is 2^-126.
double half_ulp(std::uint16_t word) {
  const int exponent = (word >> 7) & 0xff;
  return exponent == 0 ? 0x1p-126 : std::ldexp(1.0, exponent - 127 - 8);
}

/// Of one sum: its value, the variance that the rounding of its words gives it, and the most it can.
struct RoundedSum {
  CompensatedSum value;
  double variance = 0, least_variance = 0, most = 0;

  /// Adds sign * word * weight; the word was rounded, the weight is exact.
  void add(std::uint16_t word, double weight, double sign) {
    const double x = number(word);
    value.add(sign * x * weight);
    // Uniform within half an ulp: a variance of half^2 / 3.
    const double half = half_ulp(word) * weight;
    variance += half * half / 3;
    const double least = x * weight * 0x1p-9;
    least_variance += least * least / 3;
    most += std::abs(half);
  }
};

double share_of(double residual, double most) {
  return most > 0 ? residual / most : residual == 0 ? 0 : std::numeric_limits<double>::infinity();
}

struct Part {
  SequenceSpan span;
  std::size_t kv_head;
};

void set_not_finite(LawInHead& law) {
  law.finite = false;
  law.residual = law.noise = law.least_noise = law.bound_share = kNan;
}

void look_at_dk(const Problem& problem, const Result& recorded, const Part& part, LawInHead& law) {
  const std::size_t dim = problem.head_dim;
  std::vector<RoundedSum> columns(dim);
  for (std::size_t j = 0; j < part.span.k_length; ++j) {
    const std::uint16_t* dk =
        recorded.dk.data.data() + (part.span.k_begin + j) * problem.k_stride() + part.kv_head * dim;
    for (std::size_t d = 0; d < dim; ++d) columns[d].add(dk[d], 1, 1);
  }
  double residual2 = 0;
  double variance = 0;
  double least_variance = 0;
  for (std::size_t d = 0; d < dim; ++d) {
    const double sum = columns[d].value.total();
    residual2 += sum * sum;
    variance += columns[d].variance;
    least_variance += columns[d].least_variance;
    const double share = share_of(std::abs(sum), columns[d].most);
    if (share > law.bound_share) {
      law.bound_share = share;
      law.column = d;
    }
  }
  if (!std::isfinite(residual2)) return set_not_finite(law);
  law.residual = std::sqrt(residual2);
  law.noise = std::sqrt(variance);
  law.least_noise = std::sqrt(least_variance);
}

/// sum_i a_i.b_i over the query heads of the group minus sum_j c_j.d_j over the keys, of which one factor
/// each was rounded.
struct Balance {
  const Bf16Tensor& query_rounded;
  const Bf16Tensor& query_exact;
  const Bf16Tensor& key_rounded;
  const Bf16Tensor& key_exact;
  std::size_t dim;
};

void look_at_balance(const Problem& problem, const Balance& balance, const Part& part, LawInHead& law) {
  RoundedSum sum;
  const std::size_t group = problem.group();
  const std::size_t dim = balance.dim;
  for (std::size_t i = 0; i < part.span.q_length; ++i) {
    const std::size_t at = ((part.span.q_begin + i) * problem.heads_q + part.kv_head * group) * dim;
    for (std::size_t x = 0; x < group * dim; ++x) {
      sum.add(balance.query_rounded.data[at + x], number(balance.query_exact.data[at + x]), 1);
    }
  }
  for (std::size_t j = 0; j < part.span.k_length; ++j) {
    const std::size_t at = ((part.span.k_begin + j) * problem.heads_kv + part.kv_head) * dim;
    for (std::size_t d = 0; d < dim; ++d) {
      sum.add(balance.key_rounded.data[at + d], number(balance.key_exact.data[at + d]), -1);
    }
  }
  law.residual = std::abs(sum.value.total());
  if (!std::isfinite(law.residual)) return set_not_finite(law);
  law.noise = std::sqrt(sum.variance);
  law.least_noise = std::sqrt(sum.least_variance);
  law.bound_share = share_of(law.residual, sum.most);
}

template <class Look>
void look_everywhere(const Problem& problem, WitnessOfLaw& witness, const Look& look) {
  witness.heads.resize(problem.batch * problem.heads_kv);
  tbb::parallel_for(std::size_t{0}, witness.heads.size(), [&](std::size_t n) {
    LawInHead& law = witness.heads[n];
    law.sequence = n / problem.heads_kv;
    law.kv_head = n % problem.heads_kv;
    look(Part{problem.sequence(law.sequence), law.kv_head}, law);
  });
}

/// "" or "not recorded: dq, dk".
std::string missing(std::initializer_list<std::pair<const char*, const Bf16Tensor*>> tensors) {
  std::string names;
  for (const auto& [name, tensor] : tensors) {
    if (tensor->empty()) names += (names.empty() ? "not recorded: " : ", ") + std::string(name);
  }
  return names;
}

double over(double residual, double noise) {
  return residual == 0 ? 0 : residual / noise;
}

double pooled(const std::vector<LawInHead>& heads, double LawInHead::*noise) {
  double residual2 = 0;
  double noise2 = 0;
  std::size_t finite = 0;
  for (const LawInHead& head : heads) {
    if (!head.finite) continue;
    ++finite;
    residual2 += head.residual * head.residual;
    noise2 += head.*noise * (head.*noise);
  }
  return finite == 0 ? kNan : over(std::sqrt(residual2), std::sqrt(noise2));
}

template <class Key>
const LawInHead* largest_by(const std::vector<LawInHead>& heads, const Key& key) {
  const LawInHead* largest = nullptr;
  for (const LawInHead& head : heads) {
    if (head.finite && (largest == nullptr || key(head) > key(*largest))) largest = &head;
  }
  return largest;
}

}  // namespace

const char* law_name(Law law) {
  switch (law) {
    case Law::dk_sum:
      return "dk_sum";
    case Law::dq_dk_balance:
      return "dq_dk_balance";
    case Law::out_dv_balance:
      return "out_dv_balance";
  }
  return "";
}

const char* law_text(Law law) {
  switch (law) {
    case Law::dk_sum:
      return "sum_j dK_j = 0";
    case Law::dq_dk_balance:
      return "sum_i q.dq = sum_j k.dk";
    case Law::out_dv_balance:
      return "sum_i out.dout = sum_j v.dv";
  }
  return "";
}

double LawInHead::multiple() const {
  return over(residual, noise);
}

double LawInHead::multiple_of_least() const {
  return over(residual, least_noise);
}

double WitnessOfLaw::multiple() const {
  return pooled(heads, &LawInHead::noise);
}

double WitnessOfLaw::multiple_of_least() const {
  return pooled(heads, &LawInHead::least_noise);
}

const LawInHead* WitnessOfLaw::largest() const {
  return largest_by(heads, [](const LawInHead& head) { return head.multiple(); });
}

const LawInHead* WitnessOfLaw::farthest() const {
  return largest_by(heads, [](const LawInHead& head) { return head.bound_share; });
}

std::size_t WitnessOfLaw::broken() const {
  return static_cast<std::size_t>(
      std::count_if(heads.begin(), heads.end(), [](const LawInHead& head) { return head.broken(); }));
}

std::size_t WitnessOfLaw::finite() const {
  return static_cast<std::size_t>(
      std::count_if(heads.begin(), heads.end(), [](const LawInHead& head) { return head.finite; }));
}

bool Witness::any_checked() const {
  return std::any_of(laws.begin(), laws.end(), [](const WitnessOfLaw& w) { return w.not_checked.empty(); });
}

bool Witness::broken() const {
  return std::any_of(laws.begin(), laws.end(), [](const WitnessOfLaw& w) { return w.broken() > 0; });
}

Witness witness(const Capture& capture) {
  const Problem& problem = capture.problem;
  const Result& recorded = capture.recorded;
  Witness all;
  WitnessOfLaw& dk_sum = all.laws[0];
  dk_sum.law = Law::dk_sum;
  dk_sum.not_checked = problem.softcap > 0 ? "no law with a softcap" : missing({{"dk", &recorded.dk}});
  if (dk_sum.not_checked.empty()) {
    look_everywhere(problem, dk_sum,
                    [&](const Part& part, LawInHead& law) { look_at_dk(problem, recorded, part, law); });
  }
  WitnessOfLaw& dq_dk = all.laws[1];
  dq_dk.law = Law::dq_dk_balance;
  dq_dk.not_checked = missing({{"dq", &recorded.dq}, {"dk", &recorded.dk}});
  if (dq_dk.not_checked.empty()) {
    const Balance balance{recorded.dq, problem.q, recorded.dk, problem.k, problem.head_dim};
    look_everywhere(problem, dq_dk,
                    [&](const Part& part, LawInHead& law) { look_at_balance(problem, balance, part, law); });
  }
  WitnessOfLaw& out_dv = all.laws[2];
  out_dv.law = Law::out_dv_balance;
  out_dv.not_checked = missing({{"dout", &problem.dout}, {"out", &recorded.out}, {"dv", &recorded.dv}});
  if (out_dv.not_checked.empty()) {
    const Balance balance{recorded.out, problem.dout, recorded.dv, problem.v, problem.head_dim_v};
    look_everywhere(problem, out_dv,
                    [&](const Part& part, LawInHead& law) { look_at_balance(problem, balance, part, law); });
  }
  return all;
}

}  // namespace bitattn::audit
