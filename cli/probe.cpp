// bitattn probe: does this GPU's arithmetic follow the model? A table of units, cases and mismatches.

#include "cli/command.hpp"
#include "datasets/error.hpp"

#if defined(BITATTN_WITH_CUDA)

#include <fmt/format.h>

#include <memory>

#include "cli/output.hpp"
#include "cli/table.hpp"
#include "gpu/probe/probe.hpp"

namespace bitattn::cli {

namespace {

using gpu::probe::Mismatch;
using gpu::probe::Report;
using gpu::probe::SelfTest;
using gpu::probe::Unit;
using gpu::probe::Verdict;

struct Options {
  double share = 1;
};

const char* verdict_text(Verdict verdict) {
  switch (verdict) {
    case Verdict::follows:
      return "follows";
    case Verdict::differs:
      return "DIFFERS";
    default:
      return "untested";
  }
}

std::string hex(std::uint32_t bits) {
  return fmt::format("{:08x}", bits);
}

/// One or two lines: the bits of the inputs (of a dot product: of a row of A, of a column of B, and c), then
/// both results.
std::string mismatch_text(const Mismatch& mismatch) {
  std::string inputs;
  for (const std::uint32_t word : mismatch.inputs) {
    if (!inputs.empty()) inputs += " ";
    inputs += mismatch.inputs.size() > 3 && &word != &mismatch.inputs.back() ? fmt::format("{:x}", word)
                                                                             : hex(word);
  }
  return fmt::format("case {}: {} -> chip {}, model {}", mismatch.index, inputs, hex(mismatch.chip),
                     hex(mismatch.model));
}

Json device_json(const gpu::Device& device) {
  return {{"name", device.name},
          {"compute_capability", fmt::format("{}.{}", device.major, device.minor)},
          {"multiprocessors", device.multiprocessors},
          {"memory_bytes", device.memory},
          {"uuid", device.uuid},
          {"driver_cuda", device.driver},
          {"built_with_cuda", device.runtime}};
}

Json report_json(const Report& report) {
  Json units = Json::array();
  for (const Unit& unit : report.units) {
    Json entry{{"group", unit.group},           {"unit", unit.name},
               {"inputs", unit.inputs},         {"cases", unit.cases},
               {"mismatches", unit.mismatches}, {"verdict", verdict_text(unit.verdict)},
               {"seconds", unit.seconds}};
    if (!unit.note.empty()) entry["note"] = unit.note;
    if (unit.first) {
      Json inputs = Json::array();
      for (const std::uint32_t word : unit.first->inputs) inputs.push_back(hex(word));
      entry["first_mismatch"] = {{"case", unit.first->index},
                                 {"inputs", inputs},
                                 {"chip", hex(unit.first->chip)},
                                 {"model", hex(unit.first->model)}};
    }
    units.push_back(entry);
  }
  Json self_tests = Json::array();
  for (const SelfTest& test : report.self_tests) {
    self_tests.push_back({{"wrong_rule", test.name},
                          {"cases", test.cases},
                          {"mismatches", test.mismatches},
                          {"noticed", test.noticed()}});
  }
  return {{"device", device_json(report.device)},
          {"units", units},
          {"self_tests", self_tests},
          {"dot_products", report.dot_products()},
          {"holds", report.holds()}};
}

std::string report_text(const Report& report) {
  std::string text = report.device.text() + "\n\n";
  Table table;
  table.column("unit", true).column("cases").column("mismatches").column("", true).column("inputs", true);
  std::string group;
  std::string remarks;
  std::size_t differing = 0;
  std::size_t untested = 0;
  for (const Unit& unit : report.units) {
    if (unit.group != group) table.row({unit.group, "", "", "", ""});
    group = unit.group;
    if (unit.verdict == Verdict::untested) {
      ++untested;
      table.row({"  " + unit.name, "-", "-", verdict_text(unit.verdict), unit.note});
      continue;
    }
    if (unit.verdict == Verdict::differs) ++differing;
    table.row({"  " + unit.name, grouped(unit.cases), grouped(unit.mismatches), verdict_text(unit.verdict),
               unit.inputs});
    if (unit.first) remarks += fmt::format("  {}, {}\n", unit.name, mismatch_text(*unit.first));
  }
  text += table.text(0);
  if (!remarks.empty()) text += "\nFirst mismatches:\n" + remarks;
  Table wrong;
  wrong.column("deliberately wrong rule", true).column("cases").column("mismatches").column("", true);
  for (const SelfTest& test : report.self_tests) {
    wrong.row({test.name, grouped(test.cases), grouped(test.mismatches),
               test.noticed() ? "noticed" : "NOT NOTICED"});
  }
  text += "\n" + wrong.text(0);
  text += fmt::format("\n{} units, {} untested, {} tensor-core dot products compared\n{}\n",
                      report.units.size(), untested, grouped(report.dot_products()),
                      differing > 0    ? fmt::format("{} units do not follow the model", differing)
                      : report.holds() ? "every tested unit follows the model in every bit"
                                       : "but a wrong rule went unnoticed");
  return text;
}

int run(const Options& options, const CommonOptions& common) {
  gpu::probe::Options probe;
  probe.share = options.share;
  if (!common.quiet && !common.json) {
    probe.progress = [](const std::string& unit) { warn("probe: " + unit); };
  }
  const Report report = gpu::probe::run(probe);
  if (common.json) {
    print_json(report_json(report));
  } else {
    print(report_text(report));
  }
  return report.holds() ? kHolds : kDoesNotHold;
}

}  // namespace

void add_probe(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command =
      app.add_subcommand("probe", "Compares this GPU's arithmetic with the model, bit by bit");
  add_common_options(*command, common);
  const auto options = std::make_shared<Options>();
  command
      ->add_option("--share", options->share, "Share of the random cases to run; what is exhaustive stays so")
      ->check(CLI::Range(1e-6, 100.0))
      ->capture_default_str();
  command->callback(
      [options, &common, &action] { action = [options, &common] { return run(*options, common); }; });
}

}  // namespace bitattn::cli

#else

namespace bitattn::cli {

void add_probe(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command =
      app.add_subcommand("probe", "Compares this GPU's arithmetic with the model, bit by bit");
  add_common_options(*command, common);
  command->callback([&action] {
    action = []() -> int { throw InputError("probe: this bitattn was built without CUDA"); };
  });
}

}  // namespace bitattn::cli

#endif
