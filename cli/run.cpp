// bitattn run: computes a capture with a backend and stores the result, on request with what the kernel had
// in its hands.

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <memory>

#include "audit/findings.hpp"
#include "audit/locate.hpp"
#include "audit/trace.hpp"
#include "backends/backend.hpp"
#include "backends/device.hpp"
#include "cli/capture_list.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "datasets/error.hpp"

namespace bitattn::cli {

namespace {

struct Options {
  std::string file, backend, output, trace;
};

/// Attributes that tell how the stored outputs came about, in place of those of the capture's own kernel.
void name_the_maker(Problem& problem, const std::string& backend) {
  for (const char* name : {"kernel", "kernel_version", "device"}) {
    const auto found = problem.attributes.find(name);
    if (found == problem.attributes.end()) continue;
    problem.attributes["source_" + std::string(name)] = found->second;
  }
  problem.attributes["kernel"] = "bitattn " + backend;
  problem.attributes["kernel_version"] = BITATTN_VERSION;
  problem.attributes["device"] = device_of(backend);
}

/// Says what a full trace will write, and refuses one that the disk cannot hold even when compressed well.
void announce_full_trace(const std::string& input, const std::string& output, const CommonOptions& common) {
  double bytes = 0;
  for (const ListedCapture& listed : list_attributes(input))
    bytes += audit::full_trace_bytes(read_capture(listed.name).problem);
  if (!common.quiet) {
    warn("--trace=full writes every (query, key) pair: " + bytes_text(bytes) + " before compression, to " +
         output);
  }
  const std::filesystem::path folder = std::filesystem::absolute(output).parent_path();
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(folder, error);
  constexpr double kBestCompression = 20;
  if (!error && bytes / kBestCompression > static_cast<double>(space.available)) {
    throw InputError(output + ": a full trace of " + bytes_text(bytes) + " does not fit the " +
                     bytes_text(static_cast<double>(space.available)) + " that are free there");
  }
}

int run(const Options& options, const CommonOptions& common) {
  if (!options.trace.empty() && options.trace != "rows" && options.trace != "full") {
    throw InputError("--trace=" + options.trace + ": expected --trace or --trace=full");
  }
  const std::unique_ptr<Backend> backend = make_backend(options.backend);
  CaptureWriter writer(parse_capture_name(options.output).file, {options.file});
  if (options.trace == "full") announce_full_trace(options.file, options.output, common);
  Progress progress(common.quiet);
  Json captures = Json::array();
  for_each_capture({options.file}, false, [&](const Capture& capture) {
    const std::string group = output_group(options.output, capture.name, false);
    const Problem& problem = capture.problem;
    audit::RowLocator locator(problem, {!options.trace.empty()});
    std::unique_ptr<audit::FullTrace> full;
    if (options.trace == "full") full = std::make_unique<audit::FullTrace>(problem, writer, group, locator);
    RunOptions run;
    run.want_accumulators = true;
    if (!options.trace.empty()) run.observer = full ? static_cast<kernels::Observer*>(full.get()) : &locator;
    progress.subject(capture.name);
    run.progress = [&](double share) { progress.update(options.backend, share); };
    const Result result = backend->run(capture, run);
    progress.clear();
    if (!options.trace.empty() && std::isnan(locator.findings().scale_log2) && problem.total_q() > 0 &&
        problem.total_k() > 0) {
      throw InputError("--trace: backend " + options.backend +
                       " shows no intermediates, expected an emulated kernel such as fa3");
    }
    Problem stored = problem;
    if (options.backend != "recorded") name_the_maker(stored, result.backend);
    writer.write_capture(group, stored, result);
    if (!options.trace.empty()) audit::write_row_findings(writer, group, problem, locator.findings());
    captures.push_back({{"capture", capture.name}, {"group", group}, {"notes", result.notes}});
    if (!common.quiet) {
      for (const std::string& note : result.notes) warn(capture.name + ": " + note);
    }
  });
  writer.commit();
  if (common.json) {
    print_json({{"written", options.output}, {"backend", options.backend}, {"captures", captures}});
  } else if (!common.quiet) {
    print(
        fmt::format("{}: {} by {}\n", options.output, counted(captures.size(), "capture"), options.backend));
  }
  return kHolds;
}

}  // namespace

void add_run(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command = app.add_subcommand("run", "Computes a capture with a backend and stores the result");
  add_common_options(*command, common);
  const auto options = std::make_shared<Options>();
  command->add_option("file", options->file, "A capture, FILE.h5 or FILE.h5:/group; all captures of a file")
      ->required();
  command->add_option("-b,--backend", options->backend, "Backend (bitattn backends lists them)")->required();
  command->add_option("-o,--output", options->output, "The file to write (OUT.h5 or OUT.h5:/group)")
      ->required();
  command->add_flag("--trace{rows}", options->trace,
                    "Also stores per-row intermediates in /findings; --trace=full every pair's in /trace");
  command->callback(
      [options, &common, &action] { action = [options, &common] { return run(*options, common); }; });
}

}  // namespace bitattn::cli
