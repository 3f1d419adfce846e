// bitattn compare: two backends on one problem, or two recorded files of the same problems, tensor by tensor.

#include "audit/compare.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <memory>

#include "backends/backend.hpp"
#include "cli/capture_list.hpp"
#include "cli/command.hpp"
#include "cli/comparison_report.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cli/table.hpp"
#include "datasets/error.hpp"

namespace bitattn::cli {

namespace {

namespace fs = std::filesystem;

struct Options {
  std::vector<std::string> files;
  std::string a, b;
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

/// Captures of a file by group ("" for the root).
std::map<std::string, std::string> captures_by_group(const std::string& name) {
  std::map<std::string, std::string> captures;
  for (const std::string& capture : list_captures(name))
    captures[parse_capture_name(capture).group] = capture;
  return captures;
}

void compare_recorded(const std::string& first, const std::string& second, Report& report) {
  const auto in_a = captures_by_group(first);
  const auto in_b = captures_by_group(second);
  std::vector<std::pair<std::string, std::string>> pairs;
  if (in_a.size() == 1 && in_b.size() == 1) {
    pairs.emplace_back(in_a.begin()->second, in_b.begin()->second);
  } else {
    for (const auto& [group, name] : in_a) {
      const auto found = in_b.find(group);
      if (found == in_b.end())
        throw InputError(second + ": has no capture " + (group.empty() ? "/" : group) + ", which " + first +
                         " has");
      pairs.emplace_back(name, found->second);
    }
    for (const auto& [group, name] : in_b) {
      if (!in_a.contains(group))
        throw InputError(first + ": has no capture " + (group.empty() ? "/" : group) + ", which " + second +
                         " has");
    }
  }
  for (const auto& [name_a, name_b] : pairs) {
    const Capture a = read_capture(name_a);
    const Capture b = read_capture(name_b);
    for (const Capture* capture : {&a, &b}) {
      if (!capture->has_recorded())
        throw InputError(capture->name + ": holds no recorded outputs to compare");
    }
    const std::string difference = audit::problem_difference(a.problem, b.problem);
    if (!difference.empty())
      throw InputError(name_a + " and " + name_b + " are not the same problem: " + difference);
    Result first_result = a.recorded;
    Result second_result = b.recorded;
    first_result.backend = second_result.backend = "recorded";
    audit::Comparison comparison =
        audit::compare_results(name_a + " against " + name_b, a.problem, first_result, second_result);
    comparison.a = "a";
    comparison.b = "b";
    report.add(comparison, a.problem.layout);
  }
}

/// Two files, or two folders whose files bear the same names.
int compare_files(const Options& options, const CommonOptions& common) {
  Report report(common);
  const std::string& first = options.files[0];
  const std::string& second = options.files[1];
  if (!fs::is_directory(first) && !fs::is_directory(second)) {
    compare_recorded(first, second, report);
    return report.finish(0);
  }
  if (!fs::is_directory(first) || !fs::is_directory(second)) {
    throw InputError("compare takes two files or two folders, found one of each: " + first + ", " + second);
  }
  std::size_t failed = 0;
  for (const std::string& name : expand_folders({first})) {
    try {
      compare_recorded(name, (fs::path(second) / fs::relative(name, first)).string(), report);
    } catch (const InputError& error) {
      warn(error.what());
      ++failed;
    }
  }
  for (const std::string& name : expand_folders({second})) {
    const fs::path twin = fs::path(first) / fs::relative(name, second);
    if (fs::exists(twin)) continue;
    warn(twin.string() + ": does not exist, but " + name + " does");
    ++failed;
  }
  return report.finish(failed);
}

int run(const Options& options, const CommonOptions& common) {
  if (!options.a.empty() && !options.b.empty()) return compare_backends(options, common);
  if (!options.a.empty() || !options.b.empty()) {
    throw InputError("compare takes both -a and -b for two backends, or neither for two files");
  }
  if (options.files.size() != 2) {
    throw InputError("compare takes -a BACKEND -b BACKEND, or two files; found " +
                     counted(options.files.size(), "file") + " and no backend");
  }
  return compare_files(options, common);
}

}  // namespace

void add_compare(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command = app.add_subcommand(
      "compare", "Two backends on one problem, or two recorded files, bit by bit; exit 1 if a bit differs");
  add_common_options(*command, common);
  const auto options = std::make_shared<Options>();
  command->add_option("files", options->files, "FILE with -a and -b, or A.h5 B.h5; folders too")->required();
  command->add_option("-a", options->a, "First backend (bitattn backends lists them)");
  command->add_option("-b", options->b, "Second backend");
  command->callback(
      [options, &common, &action] { action = [options, &common] { return run(*options, common); }; });
}

}  // namespace bitattn::cli
