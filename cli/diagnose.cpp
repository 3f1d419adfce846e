// bitattn diagnose: where the row-max residue is not 0, where score-gradient sums drift, how much leaks into
// dQ.

#include "audit/diagnose.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "audit/blame_findings.hpp"
#include "audit/findings.hpp"
#include "cli/capture_list.hpp"
#include "cli/command.hpp"
#include "cli/diagnosis_json.hpp"
#include "cli/diagnosis_report.hpp"
#include "cli/output.hpp"
#include "cli/page/page.hpp"
#include "cli/progress.hpp"
#include "cli/remedies_section.hpp"
#include "datasets/capture_file.hpp"
#include "datasets/error.hpp"
#include "datasets/output_file.hpp"

namespace bitattn::cli {

namespace {

struct Options {
  std::vector<std::string> files;
  std::string backend = "fa3", output, page, rows, blame;
  std::size_t worst = 8;
  unsigned reference_bits = 0;
  bool no_reference = false;
  audit::TryRemedies remedies = audit::TryRemedies::where_cheap;
};

/// Problem and recorded result, and below it the findings.
void store(CaptureWriter& writer, const std::string& group, const Capture& capture,
           const audit::Diagnosis& diagnosis) {
  writer.write_capture(group, capture.problem, capture.recorded);
  audit::write_findings(writer, group, capture.problem, diagnosis);
  if (diagnosis.blame) audit::write_blame(writer, group, capture.problem, *diagnosis.blame);
}

/// Over many captures blame would take long: there it is run where asked for.
audit::BlameScope blame_scope(const std::string& text, bool one_capture) {
  if (text == "all") return audit::BlameScope::all;
  if (text == "worst" || (text.empty() && one_capture)) return audit::BlameScope::worst;
  return audit::BlameScope::none;
}

int run(const Options& options, const CommonOptions& common) {
  audit::DiagnoseOptions how;
  how.backend = options.backend;
  how.reference = options.no_reference         ? ""
                  : options.reference_bits > 0 ? "reference:" + std::to_string(options.reference_bits)
                                               : "reference";
  if (!options.rows.empty()) how.rows = audit::parse_rows(options.rows);
  how.worst_rows = std::min<std::size_t>(options.worst, 16);
  how.block_residues = !options.output.empty();

  const std::vector<std::string> arguments = expand_folders(options.files);
  std::unique_ptr<CaptureWriter> writer;
  if (!options.output.empty()) {
    writer = std::make_unique<CaptureWriter>(parse_capture_name(options.output).file, arguments);
  }
  if (!options.page.empty()) {
    // A page that could not be written is known before the work.
    const OutputFile place(options.page, arguments);
    if (options.page == parse_capture_name(options.output).file) {
      throw InputError(options.page + ": cannot be both the page and the findings");
    }
  }
  page::Page page(common.command_line);
  std::size_t captures = 0;
  if (arguments.size() == 1) captures = list_captures(arguments[0]).size();
  const bool one = arguments.size() == 1 && captures == 1;
  // Of many captures nobody reads every recommendation.
  const audit::TryRemedies remedies = !one && options.remedies == audit::TryRemedies::where_cheap
                                          ? audit::TryRemedies::never
                                          : options.remedies;
  how.blame = blame_scope(options.blame, one);
  Progress progress(common.quiet);
  how.progress = [&](const std::string& stage, double share) { progress.update(stage, share); };
  Json json = Json::array();
  std::vector<DiagnosisLine> lines;
  const bool go_on = writer == nullptr;
  const std::size_t failed = for_each_capture(arguments, go_on, [&](const Capture& capture) {
    progress.subject(capture.name);
    audit::Diagnosis diagnosis = audit::diagnose(capture, how);
    diagnosis.remedies = audit::find_remedies(capture, diagnosis, remedies, how.progress);
    progress.clear();
    if (writer) store(*writer, output_group(capture.name, arguments.size() > 1), capture, diagnosis);
    const Json figures =
        common.json || !options.page.empty() ? diagnosis_json(capture, diagnosis, options.worst) : Json();
    if (!options.page.empty()) page.add(capture, diagnosis, figures);
    if (common.json) {
      json.push_back(figures);
    } else if (one) {
      print(diagnosis_report(capture, diagnosis, options.worst));
    } else {
      lines.push_back(diagnosis_line(capture, diagnosis));
    }
  });
  if (writer) writer->commit();
  const bool with_page = !options.page.empty() && !page.empty();
  if (with_page) write_text_file(options.page, page.html(), arguments);
  if (common.json) {
    Json object{{"captures", json}};
    if (writer) object["written"] = options.output;
    if (with_page) object["page"] = options.page;
    print_json(object);
  } else {
    if (!lines.empty()) print(diagnosis_overview(lines));
    if (writer && !common.quiet)
      print(fmt::format("\nFindings of every row: {} (docs/diagnose.md)\n", options.output));
    if (with_page && !common.quiet) print(fmt::format("\nThe page: {}\n", options.page));
  }
  return failed > 0 ? kBadInput : kHolds;
}

}  // namespace

void add_diagnose(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command = app.add_subcommand("diagnose",
                                         "Where rounding goes wrong: row-max residue, score-gradient sums, "
                                         "the leak into dQ, errors against the truth");
  add_common_options(*command, common);
  const auto options = std::make_shared<Options>();
  command->add_option("files", options->files, "Captures (FILE.h5, FILE.h5:/group) or folders")->required();
  command->add_option("-b,--backend", options->backend, "The emulated kernel (default fa3)");
  command->add_option("-o,--output", options->output,
                      "Writes the capture and every row's findings to this HDF5 file");
  command->add_option("--html", options->page, "Writes a self-contained page to look at to this file");
  command->add_option(
      "--rows", options->rows,
      "Truth and table for these rows only: N worst rows, or a list as in 5,100-120,h:i,b:h:i");
  command->add_option("--worst", options->worst, "Rows in the table of worst rows (default 8)")
      ->check(CLI::Range(0, 10000));
  command
      ->add_option("--blame", options->blame,
                   "How much of it blame looks at: none, worst (heads or rows; default for one capture), all")
      ->check(CLI::IsMember({"none", "worst", "all"}));
  auto* bits =
      command->add_option("--reference-bits", options->reference_bits, "Precision of the truth (default 128)")
          ->check(CLI::Range(53, 65536));
  command
      ->add_flag("--no-reference", options->no_reference,
                 "No truth: leaks relative to the emulated dQ, no errors")
      ->excludes(bits);
  add_remedies_options(*command, options->remedies);
  command->callback(
      [options, &common, &action] { action = [options, &common] { return run(*options, common); }; });
}

}  // namespace bitattn::cli
