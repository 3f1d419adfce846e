#include "audit/stochastic.hpp"

#include <cmath>
#include <string>
#include <vector>

#include "backends/stages.hpp"
#include "emu/arith/bf16.hpp"
#include "emu/kernels/deviant.hpp"

namespace bitattn::audit {

namespace {

using profile::Deviation;
using profile::Kind;
using profile::Point;
using profile::Profile;

constexpr std::size_t kFewest = 50;       ///< elements below which statistics say nothing
constexpr double kMostDeviations = 4.5;   ///< of a standard normal variable
constexpr double kSpreadTolerance = 0.2;  ///< a simulation's own scatter is a few percent

/// The tensors a cast moves, each kernel run from recorded inputs.
std::vector<std::string> reach(Point point) {
  switch (point) {
    case Point::out_word:
    case Point::p_word:
      return {"out"};
    case Point::dq_word:
      return {"dq"};
    case Point::dk_word:
      return {"dk"};
    case Point::dv_word:
    case Point::pb_word:
      return {"dv", "dv_accum"};
    default:
      return {"dq_accum", "dq", "dk", "dk_accum"};
  }
}

bool reaches(Point point, const std::string& tensor) {
  for (const std::string& name : reach(point)) {
    if (name == tensor) return true;
  }
  return false;
}

struct Words {
  const Bf16Tensor* recorded;
  const Fp64Tensor* uncast;
};

Words words_of(const std::string& tensor, const Result& recorded, const Result& made) {
  if (tensor == "out") return {&recorded.out, &made.uncast.out};
  if (tensor == "dq") return {&recorded.dq, &made.uncast.dq};
  if (tensor == "dk") return {&recorded.dk, &made.uncast.dk};
  return {&recorded.dv, &made.uncast.dv};
}

/// A last cast: each word one of the value's neighbours, rounded up as often as its share says.
std::optional<StochasticFit> fit_last_cast(const Profile& profile, const Capture& unit, Point point) {
  const Result made = run_stages(profile, unit, {});
  StochasticFit fit;
  fit.deviation = {point, Kind::stochastic, 0};
  fit.tensor = reach(point).front();
  const Words words = words_of(fit.tensor, unit.recorded, made);
  if (words.recorded->empty() || words.uncast->size() != words.recorded->size()) return std::nullopt;
  const Deviation down{point, Kind::downward, 0};
  const Deviation up{point, Kind::upward, 0};
  double ups = 0;
  double expected = 0;
  double variance = 0;
  double share_nearer = 0;
  for (std::size_t i = 0; i < words.recorded->size(); ++i) {
    const double x = words.uncast->data[i];
    const auto y = static_cast<double>(arith::fp32_from_bf16(words.recorded->data[i]));
    const double lower = kernels::deviated_cast(down, x, 0);
    const double upper = kernels::deviated_cast(up, x, 0);
    if (lower == upper || !std::isfinite(x)) {
      if (y != x && std::isfinite(x)) ++fit.impossible;
      continue;
    }
    if (y != lower && y != upper) {
      ++fit.impossible;
      continue;
    }
    const double share = (x - lower) / (upper - lower);
    ++fit.elements;
    ups += y == upper ? 1 : 0;
    expected += share;
    variance += share * (1 - share);
    share_nearer += (y == upper) == (share > 0.5) ? 1 : 0;
  }
  if (fit.elements < kFewest || fit.impossible > 0 || variance == 0) return std::nullopt;
  fit.bias = (ups - expected) / std::sqrt(variance);
  // Rounded to the nearer neighbour: always under rounding to nearest, in 3/4 of the elements here.
  const double n = static_cast<double>(fit.elements);
  const double nearer = (share_nearer / n - 0.75) / std::sqrt(0.75 * 0.25 / n);
  fit.spread = (1 - share_nearer / n) / 0.25;
  if (std::fabs(fit.bias) > kMostDeviations || std::fabs(nearer) > 3 * kMostDeviations) return std::nullopt;
  return fit;
}

struct Moments {
  double recorded = 0, simulated = 0;  ///< squared distance from the plain kernel's bits
  double error = 0, error2 = 0;        ///< recorded less exact
  std::size_t moved_recorded = 0, moved_simulated = 0, elements = 0;
};

template <class T, class Value>
void add(Moments& m, const T& recorded, const T& plain, const T& simulated, const T& exact, Value value) {
  if (recorded.empty() || recorded.size() != plain.size()) return;
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    const double r = value(recorded.data[i]);
    const double p = value(plain.data[i]);
    const double s = value(simulated.data[i]);
    const double e = value(exact.data[i]);
    if (!std::isfinite(r) || !std::isfinite(p) || !std::isfinite(s) || !std::isfinite(e)) continue;
    ++m.elements;
    m.moved_recorded += r != p ? 1 : 0;
    m.moved_simulated += s != p ? 1 : 0;
    m.recorded += (r - p) * (r - p);
    m.simulated += (s - p) * (s - p);
    m.error += r - e;
    m.error2 += (r - e) * (r - e);
  }
}

/// An inner cast: the recorded bits lie around the plain kernel's as a simulation of it does.
std::optional<StochasticFit> fit_inner_cast(const Profile& profile, const Capture& unit, Point point) {
  StochasticFit fit;
  fit.deviation = {point, Kind::stochastic, 0};
  Profile stochastic = profile;
  stochastic.deviations = {fit.deviation};
  Profile exact = profile;
  exact.exact.add(*profile::site_of(point));
  const Result plain = run_stages(profile, unit, {});
  const Result simulated = run_stages(stochastic, unit, {});
  const Result without = run_stages(exact, unit, {});
  const auto word = [](std::uint16_t w) { return static_cast<double>(arith::fp32_from_bf16(w)); };
  const auto number = [](float x) { return static_cast<double>(x); };
  bool fits = false;
  for (const std::string& name : reach(point)) {
    Moments m;
    const Result& r = unit.recorded;
    if (name == "out") add(m, r.out, plain.out, simulated.out, without.out, word);
    if (name == "dk") add(m, r.dk, plain.dk, simulated.dk, without.dk, word);
    if (name == "dv") add(m, r.dv, plain.dv, simulated.dv, without.dv, word);
    if (name == "dq" && r.intermediates.dq_accum.empty()) {
      add(m, r.dq, plain.dq, simulated.dq, without.dq, word);
    }
    if (name == "dq_accum") {
      add(m, r.intermediates.dq_accum, plain.intermediates.dq_accum, simulated.intermediates.dq_accum,
          without.intermediates.dq_accum, number);
    }
    if (m.elements == 0) continue;
    if (m.moved_simulated < kFewest || m.moved_recorded < kFewest) return std::nullopt;
    const double spread = m.recorded / m.simulated;
    const double moved = static_cast<double>(m.moved_recorded) / static_cast<double>(m.moved_simulated);
    const double bias = m.error2 == 0 ? 0 : m.error / std::sqrt(m.error2);
    if (std::fabs(spread - 1) > kSpreadTolerance || std::fabs(moved - 1) > kSpreadTolerance / 2 ||
        std::fabs(bias) > kMostDeviations * 2) {
      return std::nullopt;
    }
    if (!fits) {
      fit.tensor = name;
      fit.elements = m.moved_recorded;
      fit.spread = spread;
      fit.bias = bias;
    }
    fits = true;
  }
  if (!fits) return std::nullopt;
  return fit;
}

}  // namespace

std::optional<StochasticFit> fit_stochastic(const Profile& profile, const Capture& unit, Point point,
                                            const Comparison& plain) {
  bool any = false;
  for (const TensorComparison& t : plain.tensors) {
    if (t.verdict != TensorVerdict::differs) continue;
    if (!reaches(point, t.tensor)) return std::nullopt;
    any = true;
  }
  if (!any) return std::nullopt;
  switch (point) {
    case Point::out_word:
    case Point::dq_word:
    case Point::dk_word:
    case Point::dv_word:
      return fit_last_cast(profile, unit, point);
    default:
      return fit_inner_cast(profile, unit, point);
  }
}

}  // namespace bitattn::audit
