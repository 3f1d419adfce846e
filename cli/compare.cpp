// bitattn compare: two backends on one problem, tensor by tensor, or two recorded runs to where they part.

#include "audit/compare.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <optional>

#include "audit/identify.hpp"
#include "audit/parting.hpp"
#include "backends/backend.hpp"
#include "cli/capture_header.hpp"
#include "cli/capture_list.hpp"
#include "cli/command.hpp"
#include "cli/comparison_report.hpp"
#include "cli/output.hpp"
#include "cli/parting_report.hpp"
#include "cli/progress.hpp"
#include "cli/table.hpp"
#include "datasets/error.hpp"

namespace bitattn::cli {

namespace {

namespace fs = std::filesystem;

struct Options {
  std::vector<std::string> files;
  std::string a, b;
  bool no_identify = false;
};

/// What has been compared so far, and how it is shown.
class Report {
 public:
  explicit Report(const CommonOptions& common) : common_(common) {}

  void add(const audit::Comparison& comparison, Layout layout) {
    all_equal_ = all_equal_ && comparison.equal();
    if (common_.json) {
      json_.push_back(comparison_json(comparison));
      return;
    }
    print((shown_ ? "\n" : "") + comparison.capture + "\n" +
          wrapped(
              fmt::format("{} against {}: {}", comparison.a, comparison.b, comparison_verdict(comparison))) +
          comparison_table(comparison, layout));
    shown_ = true;
  }
  int finish(std::size_t failed) {
    if (common_.json) print_json({{"equal", all_equal_ && failed == 0}, {"comparisons", json_}});
    if (failed > 0) return kBadInput;
    return all_equal_ ? kHolds : kDoesNotHold;
  }

 private:
  const CommonOptions& common_;
  Json json_ = Json::array();
  bool shown_ = false;
  bool all_equal_ = true;
};

int compare_backends(const Options& options, const CommonOptions& common) {
  const std::unique_ptr<Backend> a = make_backend(options.a);
  const std::unique_ptr<Backend> b = make_backend(options.b);
  Report report(common);
  Progress progress(common.quiet);
  const std::size_t failed =
      for_each_capture(expand_folders(options.files), true, [&](const Capture& capture) {
        progress.subject(capture.name);
        RunOptions run;
        run.want_order_free_parts = true;
        const auto result_of = [&](const Backend& backend) {
          run.progress = [&](double share) { progress.update(backend.name(), share); };
          return backend.run(capture, run);
        };
        const Result first = result_of(*a);
        const Result second = result_of(*b);
        progress.clear();
        report.add(audit::compare_results(capture.name, capture.problem, first, second),
                   capture.problem.layout);
      });
  return report.finish(failed);
}

/// The captures of a run: a file (all of it or a group) or a folder.
std::vector<audit::RunCapture> captures_of_run(const std::string& run) {
  const bool folder = fs::is_directory(run);
  std::vector<audit::RunCapture> captures;
  for (const std::string& file : expand_folders({run})) {
    // Captures that say neither step nor layer are told apart by where they lie in their run.
    const std::string inside = folder ? fs::relative(file, run).string() : "";
    for (ListedCapture& listed : list_attributes(file)) {
      const std::string place = inside.empty()        ? listed.group
                                : listed.group == "/" ? inside
                                                      : inside + ":" + listed.group;
      captures.push_back(
          {listed.name, audit::moment_of(listed.attributes, listed.name, listed.group, place)});
    }
  }
  return captures;
}

FollowedKernel identified(const Capture& capture, Progress& progress) {
  FollowedKernel kernel;
  kernel.kernel = kernel_text(capture.problem);
  progress.subject(capture.name);
  audit::IdentifyOptions how;
  how.progress = [&](const std::string& what, double share) { progress.update(what, share); };
  try {
    kernel.found = audit::identify(capture, how);
  } catch (const InputError& error) {
    kernel.refused = error.what();
  }
  return kernel;
}

int compare_two_runs(const Options& options, const CommonOptions& common) {
  const std::string& a = options.files[0];
  const std::string& b = options.files[1];
  const audit::PairedRuns paired = audit::pair_runs(a, captures_of_run(a), b, captures_of_run(b));
  Progress progress(common.quiet);
  std::size_t read = 0;
  const audit::ComparedRuns runs =
      audit::compare_runs(paired, !options.no_identify, [&](const std::string& name) {
        progress.subject(name);
        progress.update("comparing",
                        static_cast<double>(read++) / static_cast<double>(2 * paired.pairs.size()));
        return read_capture(name);
      });
  Followed followed;
  if (runs.given_other_inputs()) {
    followed.not_looked_for =
        "what attention was given differs already, so no kernel explains it; bitattn identify says which "
        "kernel made a capture";
  } else if (runs.first && options.no_identify) {
    followed.not_looked_for = "--no-identify";
  } else if (runs.first) {
    followed.kernels = {identified(*runs.first_a, progress), identified(*runs.first_b, progress)};
  }
  progress.clear();
  if (common.json) {
    print_json(parting_json(runs, followed));
  } else {
    print(parting_report(runs, followed));
  }
  return runs.equal() ? kHolds : kDoesNotHold;
}

int run(const Options& options, const CommonOptions& common) {
  if (!options.a.empty() && !options.b.empty()) return compare_backends(options, common);
  if (!options.a.empty() || !options.b.empty()) {
    throw InputError("compare takes both -a and -b for two backends, or neither for two runs");
  }
  if (options.files.size() != 2) {
    throw InputError("compare takes -a BACKEND -b BACKEND, or two files or folders; found " +
                     counted(options.files.size(), "file") + " and no backend");
  }
  return compare_two_runs(options, common);
}

}  // namespace

void add_compare(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command = app.add_subcommand("compare",
                                         "Two backends on one problem, or two recorded runs to where they "
                                         "part, bit by bit; exit 1 if a bit differs");
  add_common_options(*command, common);
  const auto options = std::make_shared<Options>();
  command
      ->add_option("files", options->files, "FILE with -a and -b, or two files or folders of captures: A B")
      ->required();
  command->add_option("-a", options->a, "First backend (bitattn backends lists them)");
  command->add_option("-b", options->b, "Second backend");
  command->add_flag("--no-identify", options->no_identify,
                    "Two runs: do not look for the kernel that each follows where they part");
  command->callback(
      [options, &common, &action] { action = [options, &common] { return run(*options, common); }; });
}

}  // namespace bitattn::cli
