#include "cli/ranking_section.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "cli/diagnosis_json.hpp"
#include "cli/table.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn::cli {

namespace {

using audit::RankedFigures;
using audit::RankedHead;
using audit::RankedLayer;
using audit::RankedStep;
using audit::Ranking;

constexpr std::size_t kLayers = 20;        // lines of LAYERS
constexpr std::size_t kFollowed = 5;       // layers that are followed over steps
constexpr std::size_t kSteps = 12;         // lines of each
constexpr std::size_t kHeads = 10;         // lines of HEADS
constexpr std::size_t kNameColumns = 22;   // of a layer's name in a table of figures
constexpr std::size_t kFirstColumns = 76;  // in BACKWARD IN FP32 FIRST

std::string text_at(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : "";
}

std::string short_number(double x) {
  return std::isnan(x) ? "-" : fmt::format("{:.3g}", x);
}

std::string growth_text(double x) {
  return std::isnan(x) ? "-" : "x" + brief_number(x);
}

std::string step_text(const std::optional<std::int64_t>& step) {
  return step ? std::to_string(*step) : "-";
}

std::string name_text(const std::string& name, std::size_t width) {
  return shortened(printable(name, 4096), width);
}

Table table_of_figures() {
  Table table;
  table.column("layer", true).column("step").column("leak").column("growth").column("dQ error");
  table.column("residue").column("drift").column("|q|").column("|k|").column("logit");
  return table;
}

void add_row(Table& table, const std::string& layer, const RankedStep& step, double growth) {
  const RankedFigures& f = step.figures;
  table.row({layer, step_text(step.step), figure(f.leak), growth_text(growth), figure(f.dq_error),
             figure(f.residue), figure(f.drift), short_number(f.mean_q_norm), short_number(f.mean_k_norm),
             short_number(f.largest_logit)});
}

/// "from step 2 on", "at step 2"; "" where steps have no number.
std::string from_step(const std::optional<std::int64_t>& step, bool stays) {
  if (!step) return "";
  return fmt::format("{} step {}{}", stays ? "from" : "at", *step, stays ? " on" : "");
}

/// "a, b and c", or "a, b and 5 more".
std::string listed(const std::vector<std::string>& names, std::size_t most) {
  std::string text;
  const std::size_t shown = names.size() <= most ? names.size() : most - 1;
  for (std::size_t n = 0; n < shown; ++n) {
    const char* const before = n == 0 ? "" : n + 1 == names.size() ? " and " : ", ";
    text += before + name_text(names[n], 40);
  }
  return shown == names.size() ? text : text + fmt::format(" and {} more", names.size() - shown);
}

std::string not_finite_section(const Ranking& ranking) {
  if (!ranking.not_finite) return "";
  std::string text = "NaN AND INFINITIES\n" + wrapped(not_finite_text(ranking));
  Table table;
  table.column("layer", true).column("first at step").column("first in", true);
  table.column("last step with a known leak").column("", true);
  std::size_t affected = 0;
  for (const RankedLayer& layer : ranking.layers) {
    if (!layer.not_finite || ++affected > kLayers) continue;
    const RankedStep& first = layer.steps[*layer.not_finite];
    const bool known = !std::isnan(layer.ranked_step().figures.leak);
    table.row({name_text(layer.layer, kNameColumns), step_text(first.step), first.not_finite.front(),
               known ? step_text(layer.ranked_step().step) : "none",
               layer.stays_not_finite ? "" : "finite again later"});
  }
  text += table.text();
  if (affected > kLayers) text += fmt::format("  and {} more\n", affected - kLayers);
  return text + "\n";
}

std::string layers_text(const Ranking& ranking, const RankingTerms& terms) {
  const bool back =
      std::any_of(ranking.layers.begin(), ranking.layers.end(), std::mem_fn(&RankedLayer::falls_back));
  std::string text =
      fmt::format("LAYERS   by leak at their last step{}, share of the {} |dQ|; worst first\n",
                  back ? " where it is known" : "", terms.with_reference ? "true" : "emulated");
  Table table = table_of_figures();
  for (std::size_t n = 0; n < std::min(kLayers, ranking.layers.size()); ++n) {
    const RankedLayer& layer = ranking.layers[n];
    add_row(table, name_text(layer.layer, kNameColumns), layer.ranked_step(), layer.leak_growth);
  }
  text += table.text();
  if (ranking.layers.size() > kLayers)
    text += fmt::format("  and {} more\n", ranking.layers.size() - kLayers);
  return text;
}

std::string steps_text(const Ranking& ranking) {
  Table table = table_of_figures();
  bool left_out = false;
  for (std::size_t n = 0; n < std::min(kFollowed, ranking.layers.size()); ++n) {
    const RankedLayer& layer = ranking.layers[n];
    if (layer.steps.size() < 2) continue;
    const double first = layer.steps.front().figures.leak;
    left_out = left_out || layer.steps.size() > kSteps;
    for (const std::size_t s : some_steps(layer.steps.size(), kSteps)) {
      const RankedStep& step = layer.steps[s];
      const double growth = s > 0 && first > 0 ? step.figures.leak / first : std::nan("");
      add_row(table, s == 0 ? name_text(layer.layer, kNameColumns) : "", step, growth);
    }
  }
  if (table.empty()) return "";
  return "\nOVER STEPS   of the layers that leak most\n" + table.text() +
         (left_out ? fmt::format("  {} steps of each; --json has them all.\n", kSteps) : "");
}

std::string heads_text(const Ranking& ranking) {
  if (ranking.heads.empty()) return "";
  Table table;
  table.column("layer", true).column("head").column("leak");
  for (std::size_t n = 0; n < std::min(kHeads, ranking.heads.size()); ++n) {
    const RankedHead& head = ranking.heads[n];
    table.row({name_text(head.layer, kNameColumns), name_text(head.head, kNameColumns), figure(head.leak)});
  }
  std::string text =
      "\nHEADS   by leak at the same steps, share of the layer's |dQ|; worst first\n" + table.text();
  if (ranking.heads.size() > kHeads) text += fmt::format("  and {} more\n", ranking.heads.size() - kHeads);
  return text;
}

std::string first_text(const Ranking& ranking) {
  std::string text = "\nBACKWARD IN FP32 FIRST\n";
  text += wrapped(verdict_text(ranking));
  if (ranking.fp32_first.empty()) return text;
  text += "  In this order:\n";
  Table table;
  table.column("layer", true).column("leak");
  for (std::size_t n = 0; n < ranking.fp32_first.size(); ++n) {
    // The layers are ordered by leak, so these are the first.
    table.row({name_text(ranking.fp32_first[n], kFirstColumns),
               figure(ranking.layers[n].ranked_step().figures.leak)});
  }
  return text + table.text();
}

std::string whose_text(const Ranking& ranking, const RankingTerms& terms) {
  std::string text = "\nWHOSE FIGURES\n";
  const std::string of = " of " + counted(ranking.captures, "capture");
  if (ranking.reproduced > 0) {
    text += wrapped(
        fmt::format("{} gives every recorded bit of {}{}: there the figures are the real kernel's own.",
                    terms.backend, grouped(ranking.reproduced), of));
  }
  const std::string others = emulated_only_text(ranking);
  if (!others.empty()) {
    text += wrapped(fmt::format("In {}{} the figures are what {} has on the same inputs: {}.",
                                grouped(ranking.captures - ranking.reproduced), of, terms.backend, others));
  }
  const std::string left_out = left_out_text(terms);
  if (!left_out.empty()) {
    text += wrapped("Not looked at, as it takes long on many captures: " + left_out + ".");
  }
  return text;
}

Json step_json(const std::optional<std::int64_t>& step) {
  return step ? Json(*step) : Json(nullptr);
}

Json figures_json(const RankedStep& step) {
  const RankedFigures& f = step.figures;
  Json json{{"step", step_json(step.step)},
            {"leak", json_number(f.leak)},
            {"dq_error", json_number(f.dq_error)},
            {"condition", json_number(f.condition)},
            {"residue", json_number(f.residue)},
            {"drift", json_number(f.drift)},
            {"mean_q_norm", json_number(f.mean_q_norm)},
            {"mean_k_norm", json_number(f.mean_k_norm)},
            {"largest_logit", json_number(f.largest_logit)}};
  json["leak_by_head"] = Json::object();
  for (const auto& [head, leak] : step.leak_by_head) json["leak_by_head"][head] = json_number(leak);
  json["not_finite"] = step.not_finite;
  return json;
}

Json not_finite_json(const RankedLayer& layer) {
  if (!layer.not_finite) return nullptr;
  const RankedStep& first = layer.steps[*layer.not_finite];
  return {{"first_step", step_json(first.step)},
          {"first_in", first.not_finite.front()},
          {"to_the_end", layer.stays_not_finite}};
}

}  // namespace

audit::RankedCapture ranked_capture(const Json& one) {
  audit::RankedCapture capture;
  capture.name = text_at(one, "capture");
  capture.layer = text_at(one, "layer");
  const auto step = one.find("step");
  if (step != one.end() && step->is_number_integer()) capture.step = step->get<std::int64_t>();
  capture.heads_kept = text_at(one, "heads_kept");
  const auto launched = one.find("launch_heads_q");
  if (launched != one.end() && launched->is_number_integer()) {
    capture.launch_heads_q = launched->get<std::int64_t>();
  }
  capture.kernel = text_at(one, "kernel");
  const auto bits = one.find("against_recorded");
  capture.recorded = bits != one.end() && bits->is_object();
  capture.reproduced = capture.recorded && bits->value("equal", false);
  RankedFigures& f = capture.figures;
  f.leak = number_at(one, "/leak/p_weighted_key");
  f.dq_error = number_at(one, "/dq_error");
  f.condition = number_at(one, "/condition");
  f.residue = number_at(one, "/row_max_residue/largest");
  f.drift = number_at(one, drift_pointer(one) + "/rms");
  f.mean_q_norm = number_at(one, "/norms/mean_q");
  f.mean_k_norm = number_at(one, "/norms/mean_k");
  f.largest_logit = number_at(one, "/largest_logit/value");
  const auto heads = one.find("heads");
  if (heads != one.end() && heads->is_array()) {
    for (const Json& head : *heads) capture.leak_by_head.push_back(number_at(head, "/leak/of_all_heads"));
  }
  for (const char* list : {"not_finite_inputs", "not_finite_outputs"}) {
    const auto tensors = one.find(list);
    if (tensors == one.end() || !tensors->is_array()) continue;
    for (const Json& tensor : *tensors) capture.not_finite.push_back(text_at(tensor, "tensor"));
  }
  return capture;
}

bool is_run(const std::vector<audit::RankedCapture>& captures) {
  return captures.size() > 1 && std::any_of(captures.begin(), captures.end(), [](const auto& capture) {
           return !capture.layer.empty() || capture.step;
         });
}

std::vector<std::size_t> some_steps(std::size_t count, std::size_t most) {
  std::vector<std::size_t> places;
  if (count <= most) {
    for (std::size_t n = 0; n < count; ++n) places.push_back(n);
    return places;
  }
  for (std::size_t n = 0; n < most; ++n) places.push_back(n * (count - 1) / (most - 1));
  return places;
}

std::string not_finite_text(const Ranking& ranking) {
  if (!ranking.not_finite) return "";
  const audit::FirstNotFinite& first = *ranking.not_finite;
  const std::string from = from_step(first.step, first.stays);
  return fmt::format("NaN or infinities{}{}, first in {} of {} ({} of {}).", from.empty() ? "" : " ", from,
                     first.tensor, listed(first.layers, 4), grouped(first.layers.size()),
                     counted(ranking.layers.size(), "layer"));
}

std::string not_finite_text(const RankedLayer& layer) {
  if (!layer.not_finite) return "";
  const RankedStep& first = layer.steps[*layer.not_finite];
  const std::string from = from_step(first.step, layer.stays_not_finite);
  return fmt::format("not finite{}{}, first in {}", from.empty() ? "" : " ", from, first.not_finite.front());
}

std::string verdict_text(const Ranking& ranking) {
  const auto unknown = static_cast<std::size_t>(
      std::count_if(ranking.layers.begin(), ranking.layers.end(),
                    [](const RankedLayer& l) { return std::isnan(l.ranked_step().figures.leak); }));
  if (unknown == ranking.layers.size()) return "No layer has a leak that is known.";
  const bool back =
      std::any_of(ranking.layers.begin(), ranking.layers.end(), std::mem_fn(&RankedLayer::falls_back));
  const std::size_t n = ranking.fp32_first.size();
  std::string text = n == 0 ? "No layer leaks"
                            : fmt::format("{} of {} {}", grouped(n), counted(ranking.layers.size(), "layer"),
                                          n == 1 ? "leaks" : "leak");
  text += fmt::format(" more into dQ at {} last step {}than the BF16 casts cost anyway (2e-3 of |dQ|)",
                      n <= 1 ? "its" : "their", back ? "with a known leak " : "");
  if (back) text += "; of the steps after it nothing is known";
  if (unknown > 0) text += fmt::format("; of {} no leak is known", counted(unknown, "layer"));
  return text + ".";
}

std::string emulated_only_text(const Ranking& ranking) {
  std::vector<std::string> parts;
  for (const auto& [kernel, count] : ranking.not_reproduced) {
    parts.push_back(fmt::format("{} recorded by {}", grouped(count),
                                kernel.empty() ? "a kernel not named" : printable(kernel, 60)));
  }
  if (ranking.nothing_recorded > 0)
    parts.push_back(grouped(ranking.nothing_recorded) + " with nothing recorded");
  std::string text;
  for (std::size_t n = 0; n < parts.size(); ++n) {
    text += (n == 0 ? "" : n + 1 == parts.size() ? " and " : ", ") + parts[n];
  }
  return text;
}

std::string left_out_text(const RankingTerms& terms) {
  std::string text;
  if (!terms.blame) text += "blame (--blame worst)";
  if (!terms.remedies) text += std::string(text.empty() ? "" : " and ") + "remedies (--remedies)";
  return text;
}

std::string ranking_text(const Ranking& ranking, const RankingTerms& terms) {
  return not_finite_section(ranking) + layers_text(ranking, terms) + steps_text(ranking) +
         heads_text(ranking) + first_text(ranking) + whose_text(ranking, terms);
}

Json ranking_json(const Ranking& ranking) {
  Json json;
  json["layers"] = Json::array();
  for (const RankedLayer& layer : ranking.layers) {
    Json steps = Json::array();
    for (const RankedStep& step : layer.steps) steps.push_back(figures_json(step));
    json["layers"].push_back({{"layer", layer.layer},
                              {"ranked_step", step_json(layer.ranked_step().step)},
                              {"leak_growth", json_number(layer.leak_growth)},
                              {"not_finite", not_finite_json(layer)},
                              {"steps", steps}});
  }
  json["heads"] = Json::array();
  for (const RankedHead& head : ranking.heads) {
    json["heads"].push_back({{"layer", head.layer}, {"head", head.head}, {"leak", json_number(head.leak)}});
  }
  json["fp32_first"] = ranking.fp32_first;
  json["not_finite"] = nullptr;
  if (ranking.not_finite) {
    json["not_finite"] = {{"first_step", step_json(ranking.not_finite->step)},
                          {"first_in", ranking.not_finite->tensor},
                          {"to_the_end", ranking.not_finite->stays},
                          {"layers", ranking.not_finite->layers}};
  }
  Json others = Json::object();
  for (const auto& [kernel, count] : ranking.not_reproduced) others[kernel] = count;
  json["figures_of"] = {{"recorded_kernel", ranking.reproduced},
                        {"emulated_kernel", ranking.captures - ranking.reproduced},
                        {"recorded_by_others", others},
                        {"nothing_recorded", ranking.nothing_recorded}};
  return json;
}

}  // namespace bitattn::cli
