#include "cli/parting_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "cli/comparison_report.hpp"
#include "cli/identification_report.hpp"
#include "cli/table.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn::cli {

namespace {

using audit::ComparedPair;
using audit::ComparedRuns;
using audit::Moment;
using audit::Parting;

constexpr std::size_t kMostListed = 20;  ///< captures that WHAT DIFFERS shows

std::string moment_text(const Moment& moment) {
  if (!moment.said) return printable(moment.layer);
  std::string text = fmt::format("step {}, layer {}", moment.step, printable(moment.layer));
  if (moment.call != 0) text += fmt::format(", call {}", moment.call);
  if (moment.rank != 0) text += fmt::format(", rank {}", moment.rank);
  return text;
}

/// What a reader learns from which tensor it is.
std::string meaning(const Parting& parting) {
  if (parting.input && parting.backward) {
    return "It is given to the backward: the runs parted above this layer, after its forward.";
  }
  if (parting.input) return "It is given to attention: the runs parted before this layer's attention.";
  std::string text = fmt::format("What the kernel was given is equal{}: the two {} kernels part here.",
                                 parting.unseen_before ? ", as far as both recorded it" : "",
                                 parting.backward ? "backward" : "forward");
  if (parting.open_order) {
    text +=
        " This backward is not deterministic, its parts are added in any order: two runs of one kernel may "
        "part here too.";
  }
  return text;
}

/// The outputs, and of the inputs those that differ, in the order in which a step makes them.
audit::Comparison shown_comparison(const ComparedPair& pair) {
  audit::Comparison shown = pair.results;
  std::vector<audit::TensorComparison> tensors;
  std::copy_if(pair.inputs.begin(), pair.inputs.end(), std::back_inserter(tensors),
               [](const auto& t) { return t.verdict == audit::TensorVerdict::differs; });
  tensors.insert(tensors.end(), shown.tensors.begin(), shown.tensors.end());
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& x, const auto& y) {
    return audit::place_in_step(x.tensor) < audit::place_in_step(y.tensor);
  });
  shown.tensors = std::move(tensors);
  return shown;
}

/// Tensors that were recorded on one side only have no bits to compare.
std::string one_sided_text(const ComparedRuns& runs) {
  std::map<std::string, std::size_t> only_in_a;
  std::map<std::string, std::size_t> only_in_b;
  for (const ComparedPair& pair : runs.pairs) {
    for (const audit::TensorComparison& t : pair.results.tensors) {
      if (t.verdict == audit::TensorVerdict::only_in_a) ++only_in_a[t.tensor];
      if (t.verdict == audit::TensorVerdict::only_in_b) ++only_in_b[t.tensor];
    }
  }
  const auto side = [](const char* name, const std::map<std::string, std::size_t>& tensors) {
    std::string text;
    for (const auto& [tensor, captures] : tensors)
      text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", tensor, counted(captures, "capture"));
    return text.empty() ? text : wrapped(fmt::format("Not compared, as only {} holds them: {}.", name, text));
  };
  return side("a", only_in_a) + side("b", only_in_b);
}

std::string tensors_text(const ComparedPair& pair) {
  const audit::Comparison shown = shown_comparison(pair);
  return wrapped(printable(shown.capture, 8192), 0) +
         wrapped(fmt::format("{} against {}: {}", shown.a, shown.b, comparison_verdict(shown))) +
         comparison_table(shown, pair.layout);
}

std::string first_text(const ComparedPair& pair, bool only_pair) {
  const Parting& parting = pair.partings.front();
  const audit::TensorComparison& t = parting.tensor;
  std::string text = "THE RUNS PART\n";
  if (pair.captures.moment.said || !only_pair) text += wrapped("at " + moment_text(pair.captures.moment));
  if (t.first) {
    text += wrapped(fmt::format("tensor {} at {}", t.tensor, t.first->place.text(pair.layout)));
    text += wrapped(element_values(*t.first, t.bf16, pair.results), 4);
    text += wrapped(
        fmt::format("{} of its {} differ.", grouped(t.differing_bits), counted(t.elements, "element")));
  } else {
    text += wrapped(fmt::format("tensor {}: {}", t.tensor, t.remark));
  }
  return text + wrapped(meaning(parting));
}

std::string followed_text(const char* side, const FollowedKernel& kernel) {
  constexpr int kIndent = 5;
  std::string text = wrapped(kernel.kernel, kIndent);
  text.replace(2, 1, side);
  if (!kernel.found) return text + wrapped("cannot be told: " + printable(kernel.refused, 400), kIndent);
  for (const std::string& line : identification_brief(*kernel.found)) text += wrapped(line, kIndent);
  return text;
}

std::string kernels_text(const Followed& followed) {
  if (followed.kernels) {
    return "\nWHICH KERNEL   made the bits there, each side by itself; bitattn identify says more\n" +
           followed_text("a", followed.kernels->a) + followed_text("b", followed.kernels->b);
  }
  return "\nWHICH KERNEL\n" + wrapped("Not looked for: " + followed.not_looked_for + ".");
}

std::string differences_text(const ComparedRuns& runs) {
  std::string text = fmt::format("\nWHAT DIFFERS   in {} of {}; share of the elements\n",
                                 runs.differing_pairs(), counted(runs.pairs.size(), "capture"));
  std::size_t listed = 0;
  for (const ComparedPair& pair : runs.pairs) {
    if (pair.partings.empty() || ++listed > kMostListed) continue;
    std::string shares;
    for (const Parting& p : pair.partings) {
      const auto n = static_cast<double>(std::max<std::size_t>(1, p.tensor.elements));
      shares += fmt::format(
          "{}{} {}", shares.empty() ? "" : ", ", p.tensor.tensor,
          p.tensor.first ? percent(static_cast<double>(p.tensor.differing_bits) / n) : "of another shape");
    }
    text += wrapped(moment_text(pair.captures.moment)) + wrapped(shares, 4);
  }
  if (listed > kMostListed) text += fmt::format("  and {} more (--json lists all)\n", listed - kMostListed);
  return text;
}

std::string unpaired_text(const char* side, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  return wrapped(fmt::format("Only in {}: {}, the first {}", side, counted(names.size(), "capture"),
                             printable(names.front(), 4096)),
                 0);
}

Json moment_json(const Moment& moment) {
  return {{"step", moment.step}, {"layer", moment.layer}, {"call", moment.call}, {"rank", moment.rank}};
}

/// Where and when, for a pair of which the runs have several.
Json pair_json(const ComparedPair& pair) {
  Json json = moment_json(pair.captures.moment);
  json["a_capture"] = pair.captures.a;
  json["b_capture"] = pair.captures.b;
  return json;
}

Json first_json(const ComparedPair& pair) {
  const Parting& first = pair.partings.front();
  Json json = pair_json(pair);
  json["tensor"] = tensor_json(first.tensor);
  json["input"] = first.input;
  json["pass"] = first.backward ? "backward" : "forward";
  json["order_open"] = first.open_order;
  json["meaning"] = meaning(first);
  json["differing"] = Json::array();
  for (const Parting& p : pair.partings) json["differing"].push_back(p.tensor.tensor);
  return json;
}

Json followed_json(const FollowedKernel& kernel) {
  if (kernel.found) return identification_json(*kernel.found);
  return {{"refused", kernel.refused}};
}

}  // namespace

std::string parting_report(const ComparedRuns& runs, const Followed& followed) {
  const bool one = runs.pairs.size() == 1 && runs.only_in_a.empty() && runs.only_in_b.empty();
  std::string text = unpaired_text("a", runs.only_in_a) + unpaired_text("b", runs.only_in_b);
  if (!runs.first) {
    if (one) return tensors_text(runs.pairs.front());
    return text + fmt::format("No bit differs in {}.\n", counted(runs.pairs.size(), "capture")) +
           one_sided_text(runs);
  }
  const ComparedPair& pair = runs.pairs[*runs.first];
  text += (text.empty() ? "" : "\n") + first_text(pair, one);
  text += kernels_text(followed);
  if (!one) text += differences_text(runs);
  return text + "\n" + tensors_text(pair);
}

Json parting_json(const ComparedRuns& runs, const Followed& followed) {
  Json comparisons = Json::array();
  for (const ComparedPair& pair : runs.pairs) {
    Json json = pair_json(pair);
    json.update(comparison_json(pair.results));
    json["equal"] = pair.partings.empty() && pair.results.equal();
    json["inputs"] = Json::array();
    for (const audit::TensorComparison& t : pair.inputs) json["inputs"].push_back(tensor_json(t));
    comparisons.push_back(std::move(json));
  }
  Json json;
  json["equal"] = runs.equal();
  json["compared"] = runs.pairs.size();
  json["differing"] = runs.differing_pairs();
  json["only_in_a"] = runs.only_in_a;
  json["only_in_b"] = runs.only_in_b;
  json["first"] = runs.first ? first_json(runs.pairs[*runs.first]) : Json(nullptr);
  json["identified"] = Json(nullptr);
  if (followed.kernels) {
    json["identified"] = {{"a", followed_json(followed.kernels->a)},
                          {"b", followed_json(followed.kernels->b)}};
  }
  json["not_identified"] = followed.not_looked_for.empty() ? Json(nullptr) : Json(followed.not_looked_for);
  json["comparisons"] = std::move(comparisons);
  return json;
}

}  // namespace bitattn::cli
