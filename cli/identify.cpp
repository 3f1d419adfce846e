// bitattn identify: which kernel made these bits?

#include "cli/identify.hpp"

#include <memory>

#include "audit/identify.hpp"
#include "cli/capture_list.hpp"
#include "cli/command.hpp"
#include "cli/identification_report.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"

namespace bitattn::cli {

namespace {

struct Options {
  std::vector<std::string> files;
  bool without_remedies = false;
};

int run(const Options& options, const CommonOptions& common) {
  audit::IdentifyOptions how;
  how.with_remedies = !options.without_remedies;
  Progress progress(common.quiet);
  how.progress = [&](const std::string& what, double share) { progress.update(what, share); };
  Json json = Json::array();
  std::size_t captures = 0;
  std::size_t good = 0;
  const std::vector<std::string> arguments = expand_folders(options.files);
  const std::size_t failed = for_each_capture(arguments, true, [&](const Capture& capture) {
    progress.subject(capture.name);
    const audit::Identification found = audit::identify(capture, how);
    progress.clear();
    good += identified_exactly(found) ? 1 : 0;
    if (common.json) {
      json.push_back(identification_json(found));
    } else {
      print((captures > 0 ? "\n" : "") + identification_report(capture, found));
    }
    ++captures;
  });
  if (common.json) {
    print_json({{"exact", good == captures && failed == 0}, {"files_failed", failed}, {"captures", json}});
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
