// bitattn info: what is in a capture.

#include <fmt/format.h>

#include <memory>

#include "audit/inputs.hpp"
#include "cli/capture_header.hpp"
#include "cli/capture_list.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"

namespace bitattn::cli {

namespace {

int run(const std::vector<std::string>& files, const CommonOptions& common) {
  Json captures = Json::array();
  bool first = true;
  Progress progress(common.quiet);
  const std::vector<std::string> arguments = expand_folders(files);
  const std::size_t failed = for_each_capture(arguments, true, [&](const Capture& capture) {
    progress.subject(capture.name);
    progress.update("reading", 0);
    const audit::InputSummary inputs = audit::summarize_inputs(capture.problem);
    progress.clear();
    if (common.json) {
      Json json = capture_json(capture, inputs);
      Json attributes = Json::object();
      for (const auto& [name, value] : capture.problem.attributes) {
        std::visit([&, key = name](const auto& v) { attributes[key] = v; }, value);
      }
      json["attributes"] = attributes;
      captures.push_back(std::move(json));
      return;
    }
    print((first ? "" : "\n") + capture_header(capture, inputs));
    first = false;
  });
  if (common.json) print_json({{"captures", captures}});
  return failed > 0 ? kBadInput : kHolds;
}

}  // namespace

void add_info(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command =
      app.add_subcommand("info", "What is in a capture: shapes, mask, scale, norms, recorded outputs");
  add_common_options(*command, common);
  const auto files = std::make_shared<std::vector<std::string>>();
  command->add_option("files", *files, "Captures (FILE.h5, FILE.h5:/group) or folders")->required();
  command->callback([files, &common, &action] { action = [files, &common] { return run(*files, common); }; });
}

}  // namespace bitattn::cli
