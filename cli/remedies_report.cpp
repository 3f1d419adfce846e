#include "cli/remedies_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/table.hpp"

namespace bitattn::cli {

namespace {

using audit::RemedyTrial;

constexpr std::size_t kNameColumn = 26;  ///< what a hundred columns leave

std::string share(double x) {
  return fmt::format("{:.1f}%", 100 * x);
}

/// A name without "fa3+", broken after a '+' or ':' into lines that fit the column.
std::vector<std::string> name_lines(const std::string& name, std::size_t width) {
  std::vector<std::string> lines{""};
  std::string rest = name.rfind("fa3+", 0) == 0 ? name.substr(4) : name;
  while (!rest.empty()) {
    const std::size_t end = rest.find_first_of("+:");
    const std::string part = rest.substr(0, end == std::string::npos ? end : end + 1);
    if (!lines.back().empty() && lines.back().size() + part.size() > width) lines.emplace_back("  ");
    lines.back() += part;
    rest.erase(0, part.size());
  }
  return lines;
}

/// What mean-free keys are judged against, and what their cast alone costs.
std::string moved_keys_text(const audit::RemediesReport& report) {
  std::string figures;
  for (const profile::Remedy remedy :
       {profile::Remedy::mean_free_keys, profile::Remedy::mean_free_keys_bf16}) {
    const auto t = std::find_if(report.trials.begin(), report.trials.end(), [&](const RemedyTrial& trial) {
      return trial.remedies.has(remedy) && !trial.other_function && trial.dq_of_inputs.elements > 0;
    });
    if (t == report.trials.end()) continue;
    figures += fmt::format("{}{} into dQ and {} into dK ({})", figures.empty() ? "" : ", ",
                           two_digits(t->dq_of_inputs.relative()), two_digits(t->dk_of_inputs.relative()),
                           profile::info(remedy).name);
  }
  if (figures.empty()) return "";
  return wrapped(
      "Mean-free keys are judged against the truth of the unrounded moved keys, which by softmax's "
      "invariance is that of the capture. In any kernel, fp32 too, the cast of the moved keys alone puts " +
      figures + ".");
}

std::string errors_text(const audit::RemediesReport& report) {
  std::string text =
      "\nERRORS   relative to the truth, before the last cast and as stored; what still drifts and leaks\n";
  Table table;
  table.column("remedy", true).column("dQ").column("stored").column("dK").column("stored");
  table.column("dV").column("stored").column("drift").column("leak");
  for (const RemedyTrial& t : report.trials) {
    if (!t.not_tried.empty()) continue;
    add_trial_row(
        table, t.name + (t.other_function ? " *" : ""), kNameColumn,
        {two_digits(t.dq.relative()), two_digits(t.dq_stored.relative()), two_digits(t.dk.relative()),
         two_digits(t.dk_stored.relative()), two_digits(t.dv.relative()), two_digits(t.dv_stored.relative()),
         two_digits(t.drift), two_digits(t.leak)});
  }
  text += table.text();
  text += wrapped(
      "drift: RMS over rows of the sum of all that dS brings to K, corrections included; leak: what it puts "
      "into dQ, over |dQ|.");
  bool other = false;
  for (const RemedyTrial& t : report.trials) other = other || t.other_function;
  if (other) text += wrapped("* another function: against the truth of the changed problem.");
  text += moved_keys_text(report);
  for (const RemedyTrial& t : report.trials) {
    if (!t.not_tried.empty()) text += wrapped("not tried: " + t.name + ": " + t.not_tried);
  }
  return text;
}

std::string cost_text(const audit::RemediesReport& report) {
  std::string text = "\nCOST   beyond the unmodified kernel, forward and backward together\n";
  Table table;
  table.column("remedy", true).column("ops/pair").column("products").column("in fp32");
  table.column("bytes").column("estimate").column("measured");
  for (const RemedyTrial& t : report.trials) {
    if (t.remedies.empty()) continue;
    const audit::CostOfRemedies& c = t.cost;
    add_trial_row(
        table, t.name, kNameColumn,
        {fmt::format("{:g}", c.forward_ops + c.backward_ops), fmt::format("{:.3g}", c.products),
         fmt::format("{:g}", c.fp32_products), bytes_text(c.bytes), share(c.estimate),
         c.measured_low ? fmt::format("{:.1f}-{}", 100 * *c.measured_low, share(*c.measured_high)) : ""});
  }
  return text + table.text() +
         wrapped(
             "ops/pair: fp32 operations for every visible (query, key) pair; products: on the tensor core, "
             "which has 7; in fp32: without it; estimate: share of the kernel's time on an H200, from the "
             "counts; measured: in a real kernel at 4096 to 8192 keys (docs/remedies.md).");
}

/// What is known against the remedies that were tried, alone or with others.
std::string warnings_text(const audit::RemediesReport& report) {
  std::string text;
  for (const profile::RemedyInfo& i : profile::kRemedies) {
    const bool tried = std::any_of(report.trials.begin(), report.trials.end(),
                                   [&](const RemedyTrial& t) { return t.remedies.has(i.remedy); });
    if (!tried || i.warning.empty()) continue;
    // The first line at the margin of the section, the rest indented below it.
    const std::string lines = wrapped(fmt::format("{}: {}.", i.name, i.warning), 4);
    text += lines.substr(2);
  }
  return text.empty() ? "" : "\nWARNINGS\n" + text;
}

Json pair_json(const audit::ErrorSum& before, const audit::ErrorSum& stored) {
  return {{"before_cast", json_number(before.relative())}, {"stored", json_number(stored.relative())}};
}

}  // namespace

std::string two_digits(double x) {
  if (std::isnan(x)) return "-";
  return x == 0 ? "0" : fmt::format("{:.1e}", x);
}

void add_trial_row(Table& table, const std::string& name, std::size_t width,
                   const std::vector<std::string>& cells) {
  const std::vector<std::string> lines = name_lines(name, width);
  for (std::size_t l = 0; l < lines.size(); ++l) {
    std::vector<std::string> row{lines[l]};
    for (const std::string& cell : cells) row.push_back(l == 0 ? cell : "");
    table.row(row);
  }
}

std::string recommendation(const audit::RemediesReport& report) {
  const RemedyTrial& fp32 = report.trials.back();
  const RemedyTrial& plain = report.trials.front();
  std::string text;
  const std::string goal =
      fmt::format("stored dQ and dK within {:g} times those of fp32 ({} and {})", report.factor,
                  two_digits(fp32.dq_stored.relative()), two_digits(fp32.dk_stored.relative()));
  const auto reached = [&](const RemedyTrial& t) {
    return fmt::format("{:.3g} and {:.3g} times", t.dq_times_fp32, t.dk_times_fp32);
  };
  if (!report.no_yardstick.empty()) {
    return wrapped("None: there is " + report.no_yardstick + ".");
  }
  if (report.plain_is_enough()) {
    return wrapped(fmt::format("None: fa3 as it is has {}: {}.", goal, reached(plain)));
  }
  if (!report.cheapest && !report.cheapest_with_inputs) {
    return wrapped(fmt::format("Nothing that was tried has {}.", goal));
  }
  const auto line = [&](const RemedyTrial& t) {
    const std::string cost =
        t.cost.measured_low
            ? fmt::format("{:.1f}-{} measured", 100 * *t.cost.measured_low, share(*t.cost.measured_high))
            : "about " + share(t.cost.estimate) + " by count";
    return fmt::format("{} ({}; fa3 {}), {} of forward and backward", t.name, reached(t), reached(plain),
                       cost);
  };
  if (report.cheapest) {
    text += wrapped(fmt::format("Cheapest with {}: {}.", goal, line(report.trials[*report.cheapest])));
  }
  if (report.cheapest_with_inputs && report.cheapest_with_inputs != report.cheapest) {
    text += wrapped("With a change in the model: " + line(report.trials[*report.cheapest_with_inputs]) + ".");
  }
  return text;
}

std::string remedies_report(const Capture& capture, const audit::RemediesReport& report) {
  const Problem& p = capture.problem;
  std::string text = fmt::format("{}\n", one_line(report.capture));
  text += fmt::format("  {} queries, {} keys, heads {}:{}, head size {}{}\n", p.total_q(), p.total_k(),
                      p.heads_q, p.heads_kv, p.head_dim, p.causal ? ", causal" : "");
  return text + "\nRECOMMENDATION\n" + recommendation(report) + errors_text(report) + cost_text(report) +
         warnings_text(report);
}

Json remedies_json(const audit::RemediesReport& report) {
  Json json{{"capture", report.capture}, {"factor", report.factor}};
  Json trials = Json::array();
  for (const RemedyTrial& t : report.trials) {
    Json one{{"name", t.name}};
    if (!t.not_tried.empty()) {
      one["not_tried"] = t.not_tried;
    } else {
      one["errors"] = {{"out", pair_json(t.out, t.out_stored)},
                       {"dq", pair_json(t.dq, t.dq_stored)},
                       {"dk", pair_json(t.dk, t.dk_stored)},
                       {"dv", pair_json(t.dv, t.dv_stored)}};
      one["times_fp32"] = {{"dq", json_number(t.dq_times_fp32)}, {"dk", json_number(t.dk_times_fp32)}};
      one["other_function"] = t.other_function;
      if (t.dq_of_inputs.elements > 0) {
        one["of_inputs"] = {{"dq", json_number(t.dq_of_inputs.relative())},
                            {"dk", json_number(t.dk_of_inputs.relative())}};
      }
      one["drift"] = json_number(t.drift);
      one["leak"] = json_number(t.leak);
    }
    const audit::CostOfRemedies& c = t.cost;
    one["cost"] = {{"forward_ops_per_pair", c.forward_ops},
                   {"backward_ops_per_pair", c.backward_ops},
                   {"tensor_core_products", c.products},
                   {"fp32_products", c.fp32_products},
                   {"bytes", c.bytes},
                   {"estimated_share", json_number(c.estimate)}};
    one["cost"]["measured_share"] =
        c.measured_low ? Json{{"low", *c.measured_low}, {"high", *c.measured_high}} : Json(nullptr);
    trials.push_back(one);
  }
  json["trials"] = trials;
  const auto name = [&](const std::optional<std::size_t>& i) {
    return i ? Json(report.trials[*i].name) : Json(nullptr);
  };
  json["no_yardstick"] = report.no_yardstick.empty() ? Json(nullptr) : Json(report.no_yardstick);
  json["cheapest"] = name(report.cheapest);
  json["cheapest_with_inputs"] = name(report.cheapest_with_inputs);
  return json;
}

}  // namespace bitattn::cli
