#include "audit/parting.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <utility>

#include "datasets/error.hpp"

namespace bitattn::audit {

namespace {

/// The tensors in the order in which a training step makes them; the first five are of the forward pass.
constexpr std::array<std::string_view, 14> kOrder{"q",        "k",     "v",        "out",      "lse",
                                                  "dout",     "dpsum", "lse_log2", "dv_accum", "dv",
                                                  "dk_accum", "dk",    "dq_accum", "dq"};
constexpr std::size_t kForwardTensors = 5;

bool in_both(const TensorComparison& t) {
  return t.verdict != TensorVerdict::only_in_a && t.verdict != TensorVerdict::only_in_b;
}

const TensorComparison* find(const ComparedPair& pair, std::string_view name) {
  for (const auto* tensors : {&pair.inputs, &pair.results.tensors}) {
    for (const TensorComparison& t : *tensors) {
      if (t.tensor == name) return in_both(t) ? &t : nullptr;
    }
  }
  return nullptr;
}

/// Is the order of adding a tensor's parts open in a backward that is not deterministic? dQ's over key
/// blocks, and over a group's query heads that of dK and dV.
bool has_open_order(std::string_view tensor, const Problem& a, const Problem& b) {
  if (a.deterministic && b.deterministic) return false;
  if (tensor == "dq" || tensor == "dq_accum") return true;
  const bool of_keys = tensor == "dk" || tensor == "dk_accum" || tensor == "dv" || tensor == "dv_accum";
  return of_keys && a.group() > 1;
}

std::map<Moment, std::string> by_moment(const std::string& run, const std::vector<RunCapture>& captures) {
  std::map<Moment, std::string> found;
  for (const RunCapture& capture : captures) {
    const auto [at, is_new] = found.emplace(capture.moment, capture.name);
    if (!is_new) {
      throw InputError(run + ": " + at->second + " and " + capture.name +
                       " are of the same step, layer, call and rank");
    }
  }
  return found;
}

}  // namespace

PairedRuns pair_runs(const std::string& a_name, const std::vector<RunCapture>& a, const std::string& b_name,
                     const std::vector<RunCapture>& b) {
  PairedRuns runs;
  if (a.size() == 1 && b.size() == 1) {
    Moment moment = a.front().moment;
    moment.said = moment.said && moment == b.front().moment;
    runs.pairs.push_back({std::move(moment), a.front().name, b.front().name});
    return runs;
  }
  std::map<Moment, std::string> in_b = by_moment(b_name, b);
  for (const auto& [moment, name] : by_moment(a_name, a)) {
    const auto twin = in_b.find(moment);
    if (twin == in_b.end()) {
      runs.only_in_a.push_back(name);
      continue;
    }
    runs.pairs.push_back({moment, name, twin->second});
    in_b.erase(twin);
  }
  for (const auto& [moment, name] : in_b) runs.only_in_b.push_back(name);
  if (runs.pairs.empty()) {
    const auto said = [](const RunCapture& capture) { return capture.moment.said; };
    const bool all = std::all_of(a.begin(), a.end(), said) && std::all_of(b.begin(), b.end(), said);
    throw InputError(a_name + " and " + b_name + ": no step and layer is in both" +
                     (all ? "" : " (captures that say neither are paired by file and group)"));
  }
  return runs;
}

std::size_t place_in_step(std::string_view tensor) {
  return static_cast<std::size_t>(std::find(kOrder.begin(), kOrder.end(), tensor) - kOrder.begin());
}

ComparedPair compare_pair(const CapturePair& captures, const Capture& a, const Capture& b) {
  const std::string difference = problem_difference(a.problem, b.problem);
  if (!difference.empty()) {
    throw InputError(captures.a + " and " + captures.b + " are not the same problem: " + difference);
  }
  ComparedPair pair;
  pair.captures = captures;
  pair.layout = a.problem.layout;
  pair.inputs = compare_inputs(a.problem, b.problem);
  for (TensorComparison& t : pair.inputs) {
    // Inputs belong to no tile of a kernel.
    if (t.first) t.first->place.tile = -1;
    if (t.worst) t.worst->place.tile = -1;
  }
  pair.results = compare_results(captures.a + " against " + captures.b, a.problem, a.recorded, b.recorded);
  pair.results.a = "a";
  pair.results.b = "b";

  bool unseen = false;
  for (std::size_t i = 0; i < kOrder.size(); ++i) {
    const TensorComparison* tensor = find(pair, kOrder[i]);
    if (tensor == nullptr) {
      // Intermediates are what some kernels leave; without them nothing is missing.
      unseen = unseen || kOrder[i] == "out" || kOrder[i] == "lse" || kOrder[i] == "dout";
      continue;
    }
    if (tensor->verdict != TensorVerdict::differs) continue;
    const bool backward = i >= kForwardTensors;
    const bool input = !backward ? i < 3 : kOrder[i] == "dout";
    pair.partings.push_back(
        {*tensor, input, backward, has_open_order(kOrder[i], a.problem, b.problem), backward && unseen});
  }
  std::stable_partition(pair.partings.begin(), pair.partings.end(),
                        [](const Parting& p) { return p.tensor.first.has_value(); });
  return pair;
}

std::size_t ComparedRuns::differing_pairs() const {
  return static_cast<std::size_t>(
      std::count_if(pairs.begin(), pairs.end(), [](const ComparedPair& p) { return !p.partings.empty(); }));
}

bool ComparedRuns::equal() const {
  const bool any = std::any_of(pairs.begin(), pairs.end(),
                               [](const ComparedPair& p) { return p.results.compared_tensors() > 0; });
  return any && !first && only_in_a.empty() && only_in_b.empty();
}

bool ComparedRuns::given_other_inputs() const {
  return first && pairs[*first].partings.front().input;
}

ComparedRuns compare_runs(const PairedRuns& runs, bool keep_first,
                          const std::function<Capture(const std::string&)>& read) {
  ComparedRuns compared;
  compared.only_in_a = runs.only_in_a;
  compared.only_in_b = runs.only_in_b;
  std::string without_outputs;
  bool any_output = false;
  for (const CapturePair& captures : runs.pairs) {
    Capture a = read(captures.a);
    Capture b = read(captures.b);
    for (const Capture* capture : {&a, &b}) {
      if (without_outputs.empty() && !capture->has_recorded()) without_outputs = capture->name;
    }
    compared.pairs.push_back(compare_pair(captures, a, b));
    const ComparedPair& pair = compared.pairs.back();
    any_output = any_output || pair.results.compared_tensors() > 0;
    if (pair.partings.empty()) continue;
    // Moments come in their order. So the first forward that differs in a step stays the first; where only
    // backwards do, a later layer's comes before those of earlier ones.
    bool is_first = !compared.first;
    if (compared.first) {
      const ComparedPair& best = compared.pairs[*compared.first];
      is_first = best.captures.moment.step == captures.moment.step && best.partings.front().backward;
    }
    if (!is_first) continue;
    compared.first = compared.pairs.size() - 1;
    if (keep_first) {
      compared.first_a = std::move(a);
      compared.first_b = std::move(b);
    }
  }
  if (!any_output && !without_outputs.empty()) {
    throw InputError(without_outputs + ": holds no recorded outputs to compare");
  }
  return compared;
}

}  // namespace bitattn::audit
