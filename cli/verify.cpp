// bitattn verify: does the emulated kernel give every recorded bit?

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>

#include "audit/compare.hpp"
#include "backends/backend.hpp"
#include "cli/capture_list.hpp"
#include "cli/command.hpp"
#include "cli/comparison_report.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cli/table.hpp"
#include "datasets/error.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn::cli {

namespace {

struct Options {
  std::vector<std::string> files;
  std::string backend = "fa3";
};

/// "ok    capture: verdict" with as much of the capture's name as a line holds; in two lines where that is
/// little.
std::string verdict_lines(bool holds, const std::string& capture, const std::string& verdict) {
  constexpr std::size_t kColumns = 100;
  constexpr std::size_t kLeast = 40;  // of a name
  const std::string name = printable(capture, 4096);
  const std::string begin = holds ? "ok    " : "FAIL  ";
  const std::size_t taken = begin.size() + 2 + verdict.size();
  if (taken + std::min(kLeast, name.size()) <= kColumns)
    return begin + shortened(name, kColumns - taken) + ": " + verdict + "\n";
  return begin + shortened(name, kColumns - begin.size() - 1) + ":\n" +
         wrapped(verdict, static_cast<int>(begin.size()));
}

int run(const Options& options, const CommonOptions& common) {
  const std::unique_ptr<Backend> backend = make_backend(options.backend);
  const std::unique_ptr<Backend> recorded = make_backend("recorded");
  const std::vector<std::string> arguments = expand_folders(options.files);
  Progress progress(common.quiet);
  Json json = Json::array();
  std::size_t captures = 0;
  std::size_t good = 0;
  std::size_t elements = 0;
  std::size_t differing = 0;
  std::map<std::string, std::size_t> others;  // that recorded what differs, and how much of it
  const std::size_t failed = for_each_capture(arguments, true, [&](const Capture& capture) {
    progress.subject(capture.name);
    RunOptions run;
    run.want_order_free_parts = true;
    run.progress = [&](double share) { progress.update(options.backend, share); };
    const Result expected = recorded->run(capture, run);
    const Result emulated = backend->run(capture, run);
    progress.clear();
    const audit::Comparison comparison =
        audit::compare_results(capture.name, capture.problem, expected, emulated);
    const bool holds = verified(comparison);
    ++captures;
    good += holds ? 1 : 0;
    elements += comparison.elements();
    differing += comparison.differing();
    const bool other = !holds && recorded_by_another(capture.problem);
    const std::string kernel = capture.problem.text("kernel");
    if (other) ++others[kernel];
    if (common.json) {
      Json one = comparison_json(comparison);
      one["kernel"] = kernel;
      one["verified"] = holds;
      json.push_back(std::move(one));
      return;
    }
    std::string verdict = comparison_verdict(comparison);
    for (const audit::TensorComparison& t : comparison.tensors) {
      if (t.verdict == audit::TensorVerdict::only_in_a)
        verdict += "; " + t.tensor + " is recorded, but not made by " + options.backend;
    }
    print(verdict_lines(holds, capture.name, verdict));
    if (other) {
      print(wrapped(
          fmt::format("Recorded by '{}', which {} does not emulate: no equal bits are to be expected.",
                      printable(kernel, 60), options.backend)));
    }
    const bool details = arguments.size() == 1 || !holds;
    if (details) print(comparison_table(comparison, capture.problem.layout));
  });
  if (common.json) {
    print_json({{"verified", good == captures && failed == 0},
                {"backend", options.backend},
                {"captures_verified", good},
                {"captures_read", captures},
                {"files_failed", failed},
                {"elements", elements},
                {"differing_bits", differing},
                {"recorded_by_others", others},
                {"captures", json}});
  } else if (captures > 1 || failed > 0) {
    print(fmt::format("{} of {} verified: {} elements, {} differing{}\n", grouped(good),
                      counted(captures, "capture"), grouped(elements), grouped(differing),
                      failed > 0 ? "; " + counted(failed, "file") + " could not be used" : ""));
    for (const auto& [kernel, count] : others) {
      print(wrapped(
          fmt::format("{} of those that differ {} recorded by '{}', which {} does not emulate.",
                      grouped(count), count == 1 ? "was" : "were", printable(kernel, 60), options.backend),
          0));
    }
  }
  if (failed > 0) return kBadInput;
  return good == captures ? kHolds : kDoesNotHold;
}

}  // namespace

void add_verify(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command = app.add_subcommand("verify",
                                         "Does the emulated kernel give the recorded bits? Exit 0 only if "
                                         "every recorded tensor is equal in every bit");
  add_common_options(*command, common);
  const auto options = std::make_shared<Options>();
  command->add_option("files", options->files, "Captures (FILE.h5, FILE.h5:/group) or folders")->required();
  command->add_option("-b,--backend", options->backend,
                      "The backend that has to give the bits (default fa3)");
  command->callback(
      [options, &common, &action] { action = [options, &common] { return run(*options, common); }; });
}

}  // namespace bitattn::cli
