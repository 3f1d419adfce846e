// bitattn witness: do the recorded tensors obey the laws of exact gradients, as far as their storage allows?

#include "audit/witness.hpp"

#include <fmt/format.h>

#include <memory>

#include "audit/inputs.hpp"
#include "cli/capture_header.hpp"
#include "cli/capture_list.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cli/table.hpp"
#include "cli/witness_section.hpp"
#include "datasets/error.hpp"

namespace bitattn::cli {

namespace {

int run(const std::vector<std::string>& files, const CommonOptions& common) {
  const std::vector<std::string> arguments = expand_folders(files);
  std::size_t captures = 0;
  if (arguments.size() == 1) captures = list_attributes(arguments[0]).size();
  const bool one = arguments.size() == 1 && captures == 1;
  Progress progress(common.quiet);
  Json json = Json::array();
  std::vector<WitnessLine> lines;
  std::size_t checked = 0;
  std::size_t broken = 0;
  std::string last;
  const std::size_t failed = for_each_capture(arguments, true, [&](const Capture& capture) {
    progress.subject(capture.name);
    progress.update("witness", 0);
    const audit::Witness witness = audit::witness(capture);
    progress.clear();
    last = capture.name;
    checked += witness.any_checked() ? 1 : 0;
    broken += witness.broken() ? 1 : 0;
    if (common.json) {
      Json object{{"capture", capture.name},
                  {"kernel", capture.problem.text("kernel")},
                  {"verdict", witness_verdict(witness)},
                  {"broken", witness.broken()}};
      object["laws"] = witness_json(witness);
      json.push_back(std::move(object));
    } else if (one && witness.any_checked()) {
      print(capture_title(capture) + witness_section(capture, witness) + witness_heads(capture, witness, 32) +
            "\n" + wrapped("Verdict: " + witness_verdict(witness) + ". " + witness_remark(witness)));
    } else {
      lines.push_back({capture.name, witness});
    }
  });
  if (checked == 0 && failed == 0) {
    throw InputError((one ? last : files[0]) +
                     ": nothing to check, expected recorded dk (and q, k, dq), or out and dv (and dout, v)");
  }
  if (common.json) {
    print_json({{"captures_checked", checked},
                {"captures_broken", broken},
                {"files_failed", failed},
                {"captures", json}});
  } else if (!lines.empty()) {
    print(witness_overview(lines));
  }
  if (failed > 0) return kBadInput;
  return broken == 0 ? kHolds : kDoesNotHold;
}

}  // namespace

void add_witness(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command =
      app.add_subcommand("witness",
                         "Do the recorded tensors obey the laws of exact gradients? Runs nothing; exit "
                         "1 if a law is broken beyond what rounding to BF16 can do");
  add_common_options(*command, common);
  const auto files = std::make_shared<std::vector<std::string>>();
  command->add_option("files", *files, "Captures (FILE.h5, FILE.h5:/group) or folders")->required();
  command->callback([files, &common, &action] { action = [files, &common] { return run(*files, common); }; });
}

}  // namespace bitattn::cli
