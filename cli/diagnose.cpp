// bitattn diagnose: where the row-max residue is not 0, where score-gradient sums drift, how much leaks into
// dQ.

#include "audit/diagnose.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "audit/blame_findings.hpp"
#include "audit/findings.hpp"
#include "audit/ranking.hpp"
#include "backends/backend.hpp"
#include "cli/capture_list.hpp"
#include "cli/capture_queue.hpp"
#include "cli/captures_progress.hpp"
#include "cli/command.hpp"
#include "cli/diagnosis_json.hpp"
#include "cli/diagnosis_report.hpp"
#include "cli/journal.hpp"
#include "cli/output.hpp"
#include "cli/page/html.hpp"
#include "cli/page/page.hpp"
#include "cli/page/ranking.hpp"
#include "cli/progress.hpp"
#include "cli/ranking_section.hpp"
#include "cli/remedies_section.hpp"
#include "datasets/capture_file.hpp"
#include "datasets/error.hpp"
#include "datasets/interrupt.hpp"
#include "datasets/output_file.hpp"

namespace bitattn::cli {

namespace {

struct Options {
  std::vector<std::string> files;
  std::string backend = "fa3", output, page, journal, rows, blame;
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

audit::DiagnoseOptions diagnose_options(const Options& options) {
  audit::DiagnoseOptions how;
  how.backend = options.backend;
  how.reference = options.no_reference         ? ""
                  : options.reference_bits > 0 ? "reference:" + std::to_string(options.reference_bits)
                                               : "reference";
  if (!options.rows.empty()) how.rows = audit::parse_rows(options.rows);
  how.worst_rows = std::min<std::size_t>(options.worst, 16);
  how.block_residues = !options.output.empty();
  return how;
}

/// Diagnoses captures and gathers what is shown of them.
class Diagnosing {
 public:
  Diagnosing(const Options& options, const CommonOptions& common)
      : options_(options),
        common_(common),
        how_(diagnose_options(options)),
        arguments_(expand_folders(options.files)),
        page_(common.command_line),
        bar_(common.quiet) {}

  int run() {
    check_places();
    // Names that are none are told once, not for every capture.
    make_backend(how_.backend);
    names_ = list_all_captures(arguments_, writer_ == nullptr, failed_);
    if (writer_) check_groups();
    one_ = arguments_.size() == 1 && names_.size() == 1 && options_.journal.empty();
    how_.blame = blame_scope(options_.blame, one_);
    // Of many captures nobody reads every recommendation.
    remedies_ = !one_ && options_.remedies == audit::TryRemedies::where_cheap ? audit::TryRemedies::never
                                                                              : options_.remedies;
    if (!options_.journal.empty()) journal_ = std::make_unique<Journal>(options_.journal, settings());
    found_.resize(names_.size());
    std::vector<std::string> stages{"emulation"};
    if (!how_.reference.empty()) stages.emplace_back("reference");
    if (how_.blame != audit::BlameScope::none) stages.emplace_back("blame");
    progress_ = std::make_unique<CapturesProgress>(bar_, names_.size(), stages);
    CaptureWork work;
    work.skip = [this](std::size_t n) { return take_from_journal(n); };
    work.work = [this](std::size_t n, const Capture& capture) { diagnose(n, capture); };
    work.finish = [this](std::size_t n, const std::string& error) { finish(n, error); };
    try {
      work_through(names_, names_.size() > 1 && writer_ == nullptr, work);
    } catch (const Interrupted& interrupted) {
      if (!journal_) throw;
      bar_.clear();
      throw InputError(fmt::format("{}: {} of {} are kept in {}, and the same command goes on from there",
                                   interrupted.what(), grouped(kept_), counted(names_.size(), "capture"),
                                   options_.journal));
    }
    bar_.clear();
    damaged_.finish();
    show();
    return failed_ > 0 ? kBadInput : kHolds;
  }

 private:
  /// What one capture leaves behind until its turn comes.
  struct Found {
    std::string key;  ///< in the journal
    Json one;
    page::Page::Sections sections;
    std::string report;
    std::string remark;  ///< for standard error
  };

  bool with_page() const { return !options_.page.empty(); }

  /// What cannot be written is known before the work.
  void check_places() {
    if (!options_.output.empty()) {
      writer_ = std::make_unique<CaptureWriter>(parse_capture_name(options_.output).file, arguments_);
    }
    if (with_page()) {
      const OutputFile place(options_.page, arguments_);
      if (writer_ && same_file(options_.page, parse_capture_name(options_.output).file)) {
        throw InputError(options_.page + ": cannot be both the page and the findings");
      }
    }
    if (options_.journal.empty()) return;
    check_output(options_.journal, arguments_);
    if (with_page() && same_file(options_.journal, options_.page))
      throw InputError(options_.journal + ": cannot be both the page and the journal");
  }

  /// That two captures would be stored in one group is known before the work.
  void check_groups() const {
    std::map<std::string, std::string> taken;
    for (const std::string& name : names_) {
      const std::string group = output_group(options_.output, name, arguments_.size() > 1);
      const auto [other, fresh] = taken.emplace(group, name);
      if (!fresh) {
        throw InputError(fmt::format("{}: {} and {} would both be {}; give them one at a time",
                                     options_.output, other->second, name, group));
      }
    }
  }

  /// All that changes a figure.
  std::string settings() const {
    std::string version = page::version_text();
    // Of a tree with changes of its own, the commit does not say which program it is.
    if (version.find('+') != std::string::npos) {
      std::error_code error;
      const auto built = std::filesystem::last_write_time("/proc/self/exe", error);
      version += fmt::format(" {}", built.time_since_epoch().count());
    }
    return fmt::format("{} -b {} --reference {} --rows {} --worst {} --blame {} --remedies {}", version,
                       how_.backend, how_.reference, options_.rows, options_.worst,
                       static_cast<int>(how_.blame), static_cast<int>(remedies_));
  }

  bool take_from_journal(std::size_t n) {
    if (!journal_) return false;
    Found& found = found_[n];
    found.key = journal_->key(names_[n]);
    Json entry = journal_->find(found.key);
    if (!entry.is_object() || !entry.contains("diagnosis")) return false;
    if (with_page() && shown_on_page(entry["diagnosis"])) {
      if (!entry.contains("page")) return false;
      found.sections = {entry["page"].value("head", ""), entry["page"].value("sections", "")};
    }
    found.one = std::move(entry["diagnosis"]);
    progress_->skip();
    ++kept_;
    return true;
  }

  bool shown_on_page(const Json& one) {
    const std::lock_guard lock(mutex_);
    return page_.shows(number_at(one, "/leak/p_weighted_key"));
  }

  /// Called from any thread, for different captures at once.
  void diagnose(std::size_t n, const Capture& capture) {
    audit::DiagnoseOptions how = how_;
    double done = 0;
    if (one_) {
      bar_.subject(capture.name);
      how.progress = [this](const std::string& stage, double share) { bar_.update(stage, share); };
    } else {
      how.progress = [&](const std::string& stage, double share) {
        progress_->update(capture.name, stage, share, done);
      };
    }
    audit::Diagnosis diagnosis = audit::diagnose(capture, how);
    diagnosis.remedies = audit::find_remedies(capture, diagnosis, remedies_, how.progress);
    if (writer_)
      store(*writer_, output_group(options_.output, capture.name, arguments_.size() > 1), capture, diagnosis);
    Found& found = found_[n];
    if (one_ && !common_.json) {
      found.report = diagnosis_report(capture, diagnosis, options_.worst);
    }
    found.one = diagnosis_json(capture, diagnosis, options_.worst);
    if (capture.problem.attributes.contains("step") && found.one["step"].is_null()) {
      found.remark = capture.name + ": its step, " + one_line(capture.problem.text("step")) +
                     ", is no whole number: ranked as without one";
    }
    Json entry{{"diagnosis", found.one}};
    if (with_page() && shown_on_page(found.one)) {
      found.sections = page::Page::sections(capture, diagnosis, found.one);
      entry["page"] = {{"head", found.sections.head}, {"sections", found.sections.rest}};
    }
    if (journal_) {
      try {
        journal_->add(found.key, entry);
      } catch (const InputError& error) {
        throw std::runtime_error(error.what());  // no fault of this capture, so it ends the run
      }
      ++kept_;
    }
    progress_->finish(done);
  }

  /// Called in the order of the captures, never twice at once.
  void finish(std::size_t n, const std::string& error) {
    if (!error.empty()) {
      if (writer_ || names_.size() == 1) throw InputError(error);
      bar_.clear();
      damaged_.add(names_[n], error);
      ++failed_;
      return;
    }
    Found found = std::move(found_[n]);
    if (one_ && !common_.json) {
      bar_.clear();
      print(found.report);
    }
    if (!one_ && !found.remark.empty() && !common_.quiet) {
      bar_.clear();
      warn(found.remark);
    }
    lines_.push_back(diagnosis_line(found.one));
    ranked_.push_back(ranked_capture(found.one));
    if (with_page()) {
      const std::lock_guard lock(mutex_);
      page_.add(found.one, std::move(found.sections));
    }
    if (common_.json) json_.push_back(std::move(found.one));
  }

  void show() {
    if (writer_) writer_->commit();
    const bool run = is_run(ranked_);
    const audit::Ranking ranking = run ? audit::rank(ranked_) : audit::Ranking();
    const Json ranked = run ? ranking_json(ranking) : Json();
    const RankingTerms terms{how_.backend, !how_.reference.empty(), how_.blame != audit::BlameScope::none,
                             remedies_ != audit::TryRemedies::never};
    const bool page = with_page() && !page_.empty();
    if (page) {
      if (run) page_.introduce(page::ranking_introduction(ranked, ranking, terms));
      write_text_file(options_.page, page_.html(), arguments_);
    }
    if (common_.json) {
      Json object{{"captures", std::move(json_)}};
      if (run) object["ranking"] = ranked;
      if (writer_) object["written"] = options_.output;
      if (page) object["page"] = options_.page;
      print_json(object);
      return;
    }
    if (!one_ && !lines_.empty()) print(diagnosis_overview(lines_));
    if (!one_) print(causes_overview(lines_));
    if (run) print("\n" + ranking_text(ranking, terms));
    if (writer_ && !common_.quiet)
      print(fmt::format("\nFindings of every row: {} (docs/diagnose.md)\n", options_.output));
    if (page && !common_.quiet) print(fmt::format("\nThe page: {}\n", options_.page));
  }

  const Options& options_;
  const CommonOptions& common_;
  audit::DiagnoseOptions how_;
  audit::TryRemedies remedies_ = audit::TryRemedies::never;
  const std::vector<std::string> arguments_;
  std::vector<std::string> names_;
  bool one_ = false;  ///< the whole report of a single capture
  std::unique_ptr<CaptureWriter> writer_;
  std::unique_ptr<Journal> journal_;
  std::mutex mutex_;  // of page_
  page::Page page_;
  Progress bar_;
  std::unique_ptr<CapturesProgress> progress_;
  std::vector<Found> found_;
  std::vector<DiagnosisLine> lines_;
  std::vector<audit::RankedCapture> ranked_;
  Json json_ = Json::array();
  std::atomic<std::size_t> kept_ = 0;  ///< captures in the journal
  DamagedCaptures damaged_;
  std::size_t failed_ = 0;
};

}  // namespace

void add_diagnose(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command = app.add_subcommand("diagnose",
                                         "Where rounding goes wrong: row-max residue, score-gradient sums, "
                                         "the leak into dQ, errors against the truth");
  add_common_options(*command, common);
  const auto options = std::make_shared<Options>();
  command->add_option("files", options->files, "Captures (FILE.h5, FILE.h5:/group) or folders")->required();
  command->add_option("-b,--backend", options->backend, "The emulated kernel (default fa3)");
  auto* output = command->add_option(
      "-o,--output", options->output,
      "Writes the capture and every row's findings to this HDF5 file (OUT.h5 or OUT.h5:/group)");
  command->add_option("--html", options->page, "Writes a self-contained page to look at to this file");
  command
      ->add_option("--journal", options->journal,
                   "Keeps finished captures in this file, so that the same command goes on where it was "
                   "stopped")
      ->excludes(output);
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
  command->callback([options, &common, &action] {
    action = [options, &common] { return Diagnosing(*options, common).run(); };
  });
}

}  // namespace bitattn::cli
