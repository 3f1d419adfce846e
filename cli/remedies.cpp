// bitattn remedies: what every remedy does to a capture and what it costs, and which one to take.

#include "audit/remedies.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <memory>

#include "cli/capture_list.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cli/remedies_report.hpp"
#include "datasets/error.hpp"

namespace bitattn::cli {

namespace {

struct Options {
  std::string file;
  std::vector<std::string> names;
  bool experimental = false;
  double factor = 1.2;
  unsigned reference_bits = 0;
};

int run(const Options& options, const CommonOptions& common) {
  audit::RemediesOptions how;
  for (const std::string& name : options.names) {
    how.names.push_back(name.rfind("fa3+", 0) == 0 ? name : "fa3+" + name);
  }
  how.experimental = options.experimental;
  how.factor = options.factor;
  if (options.reference_bits > 0) how.reference = "reference:" + std::to_string(options.reference_bits);
  Progress progress(common.quiet);
  how.progress = [&](const std::string& stage, double share) { progress.update(stage, share); };
  Json json = Json::array();
  for_each_capture({options.file}, false, [&](const Capture& capture) {
    progress.subject(capture.name);
    const audit::RemediesReport report = audit::try_remedies(capture, how);
    progress.clear();
    if (common.json) {
      json.push_back(remedies_json(report));
    } else {
      print(remedies_report(capture, report));
    }
  });
  if (common.json) print_json({{"captures", json}});
  return kHolds;
}

}  // namespace

void add_remedies(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command = app.add_subcommand(
      "remedies", "What every remedy does to this capture and what it costs, and which one to take");
  add_common_options(*command, common);
  const auto options = std::make_shared<Options>();
  command->add_option("file", options->file, "A capture, FILE.h5 or FILE.h5:/group; all captures of a file")
      ->required();
  command->add_option("--remedy", options->names,
                      "Only this one, as in gproj or subtract-first+gproj; may be given several times");
  command->add_flag("--experimental", options->experimental, "Also those that are known to hurt somewhere");
  command
      ->add_option("--factor", options->factor,
                   "Good enough: stored dQ and dK within this times the error of fp32 (default 1.2)")
      ->check(CLI::Range(1.0, 1e6))
      ->check([](const std::string& text) {  // a NaN lies outside no range
        return std::isnan(std::strtod(text.c_str(), nullptr)) ? text + " is no number" : std::string();
      });
  command->add_option("--reference-bits", options->reference_bits, "Precision of the truth (default 115)")
      ->check(CLI::Range(53, 4096));
  command->callback(
      [options, &common, &action] { action = [options, &common] { return run(*options, common); }; });
}

}  // namespace bitattn::cli
