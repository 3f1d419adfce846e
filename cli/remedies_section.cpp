#include "cli/remedies_section.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>

#include "cli/remedies_report.hpp"
#include "cli/table.hpp"

namespace bitattn::cli {

namespace {

using audit::RemedyTrial;

/// What most people ask about first; the recommended ones join them.
constexpr const char* kAlwaysShown[] = {"fa3", "fa3+subtract-first", "fa3+gproj", "fa3+o-residual8",
                                        "fa3+mean-free-keys"};

std::string times(double error_over_fp32) {
  return std::isnan(error_over_fp32) ? "-" : fmt::format("{:.3g}", error_over_fp32);
}

std::string cost(const audit::CostOfRemedies& c) {
  if (c.rank() == 0) return "";
  if (c.measured_low) return fmt::format("{:.1f}-{:.1f}%", 100 * *c.measured_low, 100 * *c.measured_high);
  return fmt::format("about {:.3g}%", 100 * c.estimate);
}

std::vector<const RemedyTrial*> shown(const audit::RemediesReport& report) {
  std::vector<const RemedyTrial*> trials;
  for (std::size_t t = 0; t < report.trials.size(); ++t) {
    const RemedyTrial& trial = report.trials[t];
    const bool always = std::any_of(std::begin(kAlwaysShown), std::end(kAlwaysShown),
                                    [&](const char* name) { return trial.name == name; });
    const bool recommended = report.cheapest == t || report.cheapest_with_inputs == t;
    const bool yardstick = t + 1 == report.trials.size();
    if (trial.not_tried.empty() && (always || recommended || yardstick)) trials.push_back(&trial);
  }
  return trials;
}

}  // namespace

void add_remedies_options(CLI::App& command, audit::TryRemedies& whether) {
  auto* always = command.add_flag_callback(
      "--remedies", [&whether] { whether = audit::TryRemedies::always; },
      "Tries remedies on all heads, however long it takes (without it: where a run is small)");
  command
      .add_flag_callback(
          "--no-remedies", [&whether] { whether = audit::TryRemedies::never; }, "Tries no remedies")
      ->excludes(always);
}

std::string remedies_section(const audit::RemediesFinding& finding) {
  if (!finding.report) {
    if (finding.not_tried == "not asked for") return "";
    return "\nREMEDIES\n" + wrapped("Not tried: " + finding.not_tried + ".");
  }
  const audit::RemediesReport& report = *finding.report;
  std::string text =
      "\nREMEDIES   errors of the stored dQ and dK, and those over the errors of fp32 attention\n";
  text += recommendation(report);
  Table table;
  table.column("", true).column("dQ").column("/ fp32").column("dK").column("/ fp32").column("leak left");
  table.column("cost");
  for (const RemedyTrial* t : shown(report)) {
    add_trial_row(
        table, t->name, 36,
        {two_digits(t->dq_stored.relative()), times(t->dq_times_fp32), two_digits(t->dk_stored.relative()),
         times(t->dk_times_fp32), two_digits(t->leak), cost(t->cost)});
  }
  text += table.text();
  const auto tried = std::count_if(report.trials.begin(), report.trials.end(),
                                   [](const RemedyTrial& t) { return t.not_tried.empty(); });
  std::string how = fmt::format("{} were tried; bitattn remedies shows them all.", tried);
  if (finding.kv_head) {
    how = fmt::format("Tried on KV head {} alone, which has the largest leak: {}. ", *finding.kv_head,
                      finding.why_one_head) +
          how;
  }
  return text + wrapped(how);
}

Json remedies_section_json(const audit::RemediesFinding& finding) {
  if (!finding.report) return {{"not_tried", finding.not_tried}};
  Json json = remedies_json(*finding.report);
  json.erase("capture");
  json["kv_head"] = finding.kv_head ? Json(*finding.kv_head) : Json(nullptr);
  return json;
}

}  // namespace bitattn::cli
