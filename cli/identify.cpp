// bitattn identify: which kernel made these bits?

#include "cli/identify.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "audit/identify.hpp"
#include "cli/capture_list.hpp"
#include "cli/command.hpp"
#include "cli/identification_report.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cli/table.hpp"

namespace bitattn::cli {

namespace {

struct Options {
  std::vector<std::string> files;
  bool without_remedies = false;
};

/// How many captures each kernel made, most first.
std::string summary_text(std::size_t captures, const std::map<std::string, std::size_t>& kinds,
                         std::size_t failed) {
  std::vector<std::pair<std::string, std::size_t>> sorted(kinds.begin(), kinds.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string text = "\nIN ALL   " + counted(captures, "capture") +
                     (failed > 0 ? "; " + counted(failed, "file") + " could not be used" : "") + "\n";
  for (const auto& [kind, count] : sorted) text += wrapped(grouped(count) + "  " + kind);
  return text;
}

int run(const Options& options, const CommonOptions& common) {
  audit::IdentifyOptions how;
  how.with_remedies = !options.without_remedies;
  Progress progress(common.quiet);
  how.progress = [&](const std::string& what, double share) { progress.update(what, share); };
  Json json = Json::array();
  std::size_t captures = 0;
  std::size_t good = 0;
  std::map<std::string, std::size_t> kinds;
  const std::vector<std::string> arguments = expand_folders(options.files);
  const std::size_t failed = for_each_capture(arguments, true, [&](const Capture& capture) {
    progress.subject(capture.name);
    const audit::Identification found = audit::identify(capture, how);
    progress.clear();
    good += identified_exactly(found) ? 1 : 0;
    ++kinds[identification_kind(found)];
    if (common.json) {
      json.push_back(identification_json(found));
    } else {
      print((captures > 0 ? "\n" : "") + identification_report(capture, found));
    }
    ++captures;
  });
  if (common.json) {
    print_json({{"exact", good == captures && failed == 0},
                {"files_failed", failed},
                {"kinds", kinds},
                {"captures", json}});
  } else if (captures > 1) {
    print(summary_text(captures, kinds, failed));
  }
  if (failed > 0) return kBadInput;
  return good == captures ? kHolds : kDoesNotHold;
}

}  // namespace

void add_identify(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command =
      app.add_subcommand("identify",
                         "Which kernel made these bits: the profile, remedy or deviation that gives every "
                         "recorded bit. Exit 0 only if one does");
  add_common_options(*command, common);
  const auto options = std::make_shared<Options>();
  command->add_option("files", options->files, "Captures (FILE.h5, FILE.h5:/group) or folders")->required();
  command->add_flag("--without-remedies", options->without_remedies, "Do not try fa3's remedies");
  command->callback(
      [options, &common, &action] { action = [options, &common] { return run(*options, common); }; });
}

}  // namespace bitattn::cli
