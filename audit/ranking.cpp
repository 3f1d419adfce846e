#include "audit/ranking.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include "audit/moment.hpp"

namespace bitattn::audit {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Larger first, what is not known last.
bool worse(double a, double b) {
  return std::isnan(b) ? !std::isnan(a) : a > b;
}

double worst_of(double a, double b) {
  return worse(b, a) ? b : a;
}

/// A head's number in its layer, of one that is listed in heads_kept.
std::string head_name(const std::string& kept, std::int64_t launch_heads_q) {
  std::int64_t number = 0;
  const char* end = kept.data() + kept.size();
  const auto [at, error] = std::from_chars(kept.data(), end, number);
  if (launch_heads_q < 1 || error != std::errc() || at != end || number < 0) return kept;
  return std::to_string(number % launch_heads_q);
}

/// Numbers of a capture's heads in its layer. heads_kept counts batch element by batch element, so the first
/// ones are one element's.
std::vector<std::string> head_names(const RankedCapture& capture) {
  std::vector<std::string> names;
  const std::string& kept = capture.heads_kept;
  for (std::size_t begin = 0; !kept.empty() && begin <= kept.size();) {
    const std::size_t end = std::min(kept.find(',', begin), kept.size());
    names.push_back(head_name(kept.substr(begin, end - begin), capture.launch_heads_q));
    begin = end + 1;
  }
  const std::size_t heads = capture.leak_by_head.size();
  if (names.size() < heads) {
    names.clear();
    for (std::size_t h = 0; h < heads; ++h) names.push_back(std::to_string(h));
  }
  names.resize(heads);
  return names;
}

void take_worse(double& into, double from) {
  into = worst_of(into, from);
}

void merge(RankedStep& step, const RankedCapture& capture) {
  RankedFigures& into = step.figures;
  const RankedFigures& from = capture.figures;
  take_worse(into.leak, from.leak);
  take_worse(into.dq_error, from.dq_error);
  take_worse(into.condition, from.condition);
  take_worse(into.residue, from.residue);
  take_worse(into.drift, from.drift);
  take_worse(into.mean_q_norm, from.mean_q_norm);
  take_worse(into.mean_k_norm, from.mean_k_norm);
  take_worse(into.largest_logit, from.largest_logit);
}

void merge_heads(RankedStep& step, const RankedCapture& capture) {
  const std::vector<std::string> names = head_names(capture);
  for (std::size_t h = 0; h < names.size(); ++h) {
    const auto known = std::find_if(step.leak_by_head.begin(), step.leak_by_head.end(),
                                    [&](const auto& head) { return head.first == names[h]; });
    if (known == step.leak_by_head.end()) {
      step.leak_by_head.emplace_back(names[h], capture.leak_by_head[h]);
    } else {
      take_worse(known->second, capture.leak_by_head[h]);
    }
  }
}

double growth(const RankedLayer& layer) {
  const double first = layer.steps.front().figures.leak;
  return layer.ranked > 0 && first > 0 ? layer.ranked_step().figures.leak / first : kNan;
}

/// In the order in which attention and its gradient have them.
constexpr std::array<const char*, 8> kPasses{"q", "k", "v", "out", "dout", "dq", "dk", "dv"};

std::size_t pass_of(const std::string& tensor) {
  const auto* found = std::find(kPasses.begin(), kPasses.end(), tensor);
  return static_cast<std::size_t>(found - kPasses.begin());
}

void merge_not_finite(RankedStep& step, const RankedCapture& capture) {
  for (const std::string& tensor : capture.not_finite) {
    auto& known = step.not_finite;
    if (std::find(known.begin(), known.end(), tensor) == known.end()) known.push_back(tensor);
  }
  std::stable_sort(step.not_finite.begin(), step.not_finite.end(),
                   [](const std::string& a, const std::string& b) { return pass_of(a) < pass_of(b); });
}

/// Which step a layer is ranked by, and from which on it is not finite.
void look_over_steps(RankedLayer& layer) {
  layer.ranked = layer.steps.size() - 1;
  for (std::size_t s = 0; s < layer.steps.size(); ++s) {
    if (!std::isnan(layer.steps[s].figures.leak)) layer.ranked = s;
    const bool finite = layer.steps[s].not_finite.empty();
    if (!finite && !layer.not_finite) {
      layer.not_finite = s;
      layer.stays_not_finite = true;
    }
    if (finite) layer.stays_not_finite = false;
  }
  layer.leak_growth = growth(layer);
}

std::optional<FirstNotFinite> first_not_finite(const std::vector<RankedLayer>& layers) {
  std::optional<FirstNotFinite> first;
  for (const RankedLayer& layer : layers) {
    if (!layer.not_finite) continue;
    const RankedStep& step = layer.steps[*layer.not_finite];
    const std::string& tensor = step.not_finite.front();
    const auto key = std::pair(step.step, pass_of(tensor));
    if (!first || key < std::pair(first->step, pass_of(first->tensor))) {
      first = FirstNotFinite{step.step, tensor, {}, true};
    }
    if (key != std::pair(first->step, pass_of(first->tensor))) continue;
    first->layers.push_back(layer.layer);
    first->stays = first->stays && layer.stays_not_finite;
  }
  if (first) std::stable_sort(first->layers.begin(), first->layers.end(), natural_less);
  return first;
}

}  // namespace

Ranking rank(const std::vector<RankedCapture>& captures) {
  Ranking ranking;
  ranking.captures = captures.size();
  std::map<std::string, std::map<std::optional<std::int64_t>, RankedStep>> by_layer;
  for (const RankedCapture& capture : captures) {
    if (capture.reproduced) {
      ++ranking.reproduced;
    } else if (!capture.recorded) {
      ++ranking.nothing_recorded;
    } else {
      ++ranking.not_reproduced[capture.kernel];
    }
    auto& steps = by_layer[capture.layer.empty() ? capture.name : capture.layer];
    const auto [at, is_new] = steps.try_emplace(capture.step);
    RankedStep& step = at->second;
    if (is_new) {
      step.step = capture.step;
      step.figures = capture.figures;
    } else {
      merge(step, capture);
    }
    merge_heads(step, capture);
    merge_not_finite(step, capture);
  }
  for (auto& [name, steps] : by_layer) {
    RankedLayer layer;
    layer.layer = name;
    for (auto& [number, step] : steps) layer.steps.push_back(std::move(step));
    look_over_steps(layer);
    ranking.layers.push_back(std::move(layer));
  }
  ranking.not_finite = first_not_finite(ranking.layers);
  const auto leak_of = [](const RankedLayer& layer) { return layer.ranked_step().figures.leak; };
  std::stable_sort(ranking.layers.begin(), ranking.layers.end(),
                   [&](const RankedLayer& a, const RankedLayer& b) {
                     if (worse(leak_of(a), leak_of(b)) || worse(leak_of(b), leak_of(a))) {
                       return worse(leak_of(a), leak_of(b));
                     }
                     return natural_less(a.layer, b.layer);
                   });
  for (const RankedLayer& layer : ranking.layers) {
    for (const auto& [head, leak] : layer.ranked_step().leak_by_head)
      ranking.heads.push_back({layer.layer, head, leak});
    if (leak_of(layer) > kLeakOfCasts) ranking.fp32_first.push_back(layer.layer);
  }
  std::stable_sort(ranking.heads.begin(), ranking.heads.end(), [](const RankedHead& a, const RankedHead& b) {
    if (worse(a.leak, b.leak) || worse(b.leak, a.leak)) return worse(a.leak, b.leak);
    if (a.layer != b.layer) return natural_less(a.layer, b.layer);
    return natural_less(a.head, b.head);
  });
  return ranking;
}

}  // namespace bitattn::audit
