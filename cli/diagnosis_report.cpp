#include "cli/diagnosis_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "audit/ranking.hpp"
#include "cli/blame_section.hpp"
#include "cli/capture_header.hpp"
#include "cli/comparison_report.hpp"
#include "cli/diagnosis_json.hpp"
#include "cli/output.hpp"
#include "cli/remedies_section.hpp"
#include "cli/table.hpp"
#include "cli/witness_section.hpp"

namespace bitattn::cli {

namespace {

using audit::Diagnosis;
using audit::RowSummary;

std::string place_text(const Problem& problem, std::size_t index) {
  audit::TileSizes none;
  return audit::place_of(problem, problem.row_shape(), audit::Axes::query_rows, true, none, index)
      .text(problem.layout);
}

/// The largest of the four parts of the row sum, in words.
std::string largest_cause(const RowSummary& s) {
  struct Part {
    double rms;
    const char* text;
  };
  const Part parts[] = {
      {s.g_minus_d.rms, "D is made of an O rounded to BF16 and so misses sum_j P'dP (G - D)"},
      {s.d_p_excess.rms, "sum_j P' misses 1: row-max residue and rounding of LSE (D(sum P' - 1))"},
      {s.eta.rms, "fp32 rounding of dP - D and its product with P (eta)"},
      {s.beta.rms, "the cast of dS to BF16 (beta)"}};
  const Part* largest = std::max_element(std::begin(parts), std::end(parts),
                                         [](const Part& a, const Part& b) { return a.rms < b.rms; });
  return largest->text;
}

/// "1.2% of", "7.8e+03 times".
std::string share_text(double share) {
  return share < 10 ? percent(share) + " of" : brief_number(share) + " times";
}

double dq_error(const Diagnosis& d) {
  return d.errors.empty() ? std::nan("") : d.errors[1].whole.before_cast.relative();
}

/// "1.2%", "7.8e+03 times".
std::string stored_text(const Diagnosis& d) {
  const double error = d.errors[1].whole.stored.relative();
  return error < 10 ? percent(error) : brief_number(error) + " times";
}

/// A remedy other than the kernel as it is.
bool recommends_a_remedy(const audit::RemediesFinding& finding) {
  if (!finding.report || !finding.report->no_yardstick.empty() || finding.report->plain_is_enough())
    return false;
  return finding.report->cheapest || finding.report->cheapest_with_inputs;
}

std::string verdict_text(const Capture& capture, const Diagnosis& d) {
  std::string text = "VERDICT\n";
  if (d.against_recorded) {
    const audit::Comparison& c = *d.against_recorded;
    text += wrapped(fmt::format("{} emulated against recorded: {}.", d.backend, comparison_verdict(c)));
    if (!c.equal()) {
      text += comparison_table(c, capture.problem.layout);
      if (recorded_by_another(capture.problem)) {
        text += wrapped("The capture's kernel is '" + one_line(capture.problem.text("kernel")) + "', which " +
                        d.backend + " does not emulate: the figures below are those of " + d.backend +
                        " on the same inputs.");
      } else {
        text += wrapped(
            "The recorded bits are not those of the emulated kernel, so the figures below are the emulated "
            "kernel's.");
      }
    }
  } else {
    text += wrapped("Nothing was recorded: the figures are those of the emulated kernel " + d.backend +
                    " on these inputs.");
  }
  if (!d.with_backward) {
    text += wrapped("Forward only (no dout): no score gradients to look at.");
    return text;
  }
  if (d.whole.residue.rows == 0)
    return text + wrapped("No row sees a key with finite scores: nothing can be measured.");
  const double error = dq_error(d);
  if (!std::isfinite(d.whole.leak)) {
    return text + wrapped("dQ is zero or not finite, so there is nothing to measure a leak against.");
  }
  std::string share = fmt::format("The score-gradient sums put {} |dQ| into dQ", share_text(d.whole.leak));
  if (d.with_truth && std::isfinite(error)) {
    share += fmt::format("; before its last cast dQ is off by {} its norm in all, as stored by {}",
                         share_text(error), stored_text(d));
  }
  text += wrapped(share + fmt::format(" (condition {}).", brief_number(d.whole.condition)));
  text += wrapped("Largest cause: " + (d.blame ? blame_verdict(*d.blame) : largest_cause(d.whole)) + ".");
  return text;
}

std::string row_max_text(const Capture& capture, const Diagnosis& d) {
  const RowSummary& s = d.whole;
  std::string text =
      "\nROW MAX   softmax exponent of a row's largest score, fma(m, c, -rn(m*c)); 0 in exact arithmetic\n";
  Table table;
  table.column("", true).column("", true);
  const bool any = s.residue.rows > 0;
  table.row({"rows with a residue",
             any ? fmt::format("{} of {}", grouped(s.residue.nonzero), grouped(s.residue.rows))
                 : std::string("-")});
  if (s.residue.rows > 0) {
    table.row({"largest residue", fmt::format("{} at {}", figure(s.residue.largest),
                                              place_text(capture.problem, s.residue.largest_at))});
    table.row({"over all key blocks", figure(s.largest_block_residue)});
    table.row({"largest |m*c|", fmt::format("{:.3g}", s.largest_scaled_max)});
  }
  table.row({"rows with tied maxima",
             any ? fmt::format("{} (up to {} equal)", grouped(s.tied_rows), s.most_ties) : std::string("-")});
  if (d.with_backward) table.row({"sum_j P' - 1, RMS", figure(s.p_sum_excess.rms)});
  return text + table.text();
}

std::string drift_text(const Capture& capture, const Diagnosis& d) {
  const RowSummary& s = d.whole;
  const bool softcap = capture.problem.softcap > 0;
  std::string text = fmt::format(
      "\nSCORE-GRADIENT SUM   sum_j dS over a row's visible keys; 0 in exact arithmetic; {}\n",
      s.before_cast.rows > 0 ? "RMS over " + counted(s.before_cast.rows, "row") : "no row is finite");
  if (softcap) {
    text += wrapped(
        "With a softcap the law holds before the multiply by 1 - tanh^2 only: the sum is taken there, and "
        "none after the cast.");
  }
  Table table;
  table.column("", true).column("").column("", true);
  table.row({"before the cast", figure(s.before_cast.rms),
             s.before_cast.rows > 0 ? "largest " + figure(s.before_cast.largest) + " at " +
                                          place_text(capture.problem, s.before_cast.largest_at)
                                    : ""});
  if (!softcap) {
    table.row({"after the cast to BF16", figure(s.after_cast.rms),
               s.after_cast.rows > 0 ? "largest " + figure(s.after_cast.largest) + " at " +
                                           place_text(capture.problem, s.after_cast.largest_at)
                                     : ""});
  }
  table.row({"  = G - D", figure(s.g_minus_d.rms), "D has O rounded to BF16"});
  table.row({"  - D(sum P' - 1)", figure(s.d_p_excess.rms), "row-max residue, rounding of LSE"});
  table.row({"  + eta", figure(s.eta.rms), "fp32 rounding of dP - D and of P(dP - D)"});
  if (!softcap) table.row({"  + beta", figure(s.beta.rms), "cast of dS to BF16"});
  text += table.text();
  if (s.before_cast.not_finite > 0) {
    text += wrapped(
        fmt::format("{} hold NaN or infinities and are left out.", counted(s.before_cast.not_finite, "row")));
  }
  return text;
}

std::string leak_text(const Diagnosis& d) {
  const RowSummary& s = d.whole;
  std::string text =
      fmt::format("\nLEAK   what the sums put into dQ, |softmax_scale * sum * key|, over |dQ| ({})\n",
                  d.with_truth ? "of the truth" : "emulated, no reference asked for");
  Table table;
  table.column("", true).column("").column("", true);
  table.row({"key averaged with P'", figure(s.leak), ""});
  table.row({"plain mean key", figure(s.leak_mean_key), "under-reports where P' is uneven"});
  table.row({"into dK", figure(d.leak_dk), "|softmax_scale * sum_i (sum * P' * query)| over |dK|"});
  table.row(
      {"condition", figure(s.condition), "|softmax_scale * |dS| * |K|| over |dQ|: how much cancels in dQ"});
  text += table.text();
  if (!d.chosen.empty())
    text += wrapped(fmt::format("Over the {} that were asked for.", counted(s.leak_rows, "row")));
  return text;
}

std::string errors_text(const Diagnosis& d) {
  if (d.errors.empty()) return "";
  std::string text = fmt::format("\nERRORS   |x - truth| / |truth|, Frobenius, against {}\n", d.reference);
  Table table;
  table.column("", true).column("before the last cast").column("as stored").column("", true);
  for (const audit::TensorErrors& errors : d.errors) {
    const audit::ErrorPair& e = errors.whole;
    if (e.stored.elements == 0) continue;
    table.row({errors.tensor, figure(e.before_cast.relative()), figure(e.stored.relative()),
               e.stored.not_finite > 0 ? grouped(e.stored.not_finite) + " not finite, left out" : ""});
  }
  text += table.text();
  return text + fmt::format("  lse at most {} off\n", figure(d.largest_lse_error));
}

std::string heads_text(const Diagnosis& d) {
  if (d.by_head.size() < 2 || !d.with_backward) return "";
  // Worst heads first; of very many, the worst 32.
  std::vector<std::size_t> order(d.by_head.size());
  for (std::size_t h = 0; h < order.size(); ++h) order[h] = h;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const double x = d.by_head[a].leak;
    const double y = d.by_head[b].leak;
    return std::isnan(y) ? !std::isnan(x) : x > y;
  });
  constexpr std::size_t kMost = 32;
  std::string text = "\nBY HEAD   worst first\n";
  Table table;
  table.column("head").column("rows").column("residue").column("tied").column("sum P'-1").column("before");
  table.column("after").column("G - D").column("beta").column("leak").column("cond");
  if (d.with_truth) table.column("dQ error");
  for (std::size_t n = 0; n < std::min(kMost, order.size()); ++n) {
    const RowSummary& s = d.by_head[order[n]];
    std::vector<std::string> cells{std::to_string(order[n]),
                                   grouped(s.residue.rows),
                                   figure(s.residue.largest),
                                   s.residue.rows > 0 ? grouped(s.tied_rows) : "-",
                                   figure(s.p_sum_excess.rms),
                                   figure(s.before_cast.rms),
                                   figure(s.after_cast.rows > 0 ? s.after_cast.rms : std::nan("")),
                                   figure(s.g_minus_d.rms),
                                   figure(s.beta.rows > 0 ? s.beta.rms : std::nan("")),
                                   figure(s.leak),
                                   brief_number(s.condition)};
    if (d.with_truth) cells.push_back(figure(s.dq_error));
    table.row(cells);
  }
  text += table.text();
  if (order.size() > kMost) text += fmt::format("  and {} more\n", order.size() - kMost);
  const bool outweighed =
      std::any_of(d.by_head.begin(), d.by_head.end(), [](const RowSummary& s) { return s.leak > 1; });
  if (outweighed) {
    text += wrapped(
        "A leak above 1 outweighs its head's own dQ. With a cond far above 1 that dQ is a small rest of "
        "terms "
        "that cancel, and may weigh next to nothing beside the other heads'.");
  }
  return text;
}

std::string rows_text(const Capture& capture, const Diagnosis& d, std::size_t worst) {
  if (!d.with_backward) return "";
  const std::vector<audit::RowId> rows =
      d.chosen.empty() ? audit::worst_rows(capture.problem, d.drift(capture.problem), worst) : d.chosen;
  if (rows.empty()) return "";
  std::string text = d.chosen.empty() ? "\nWORST ROWS   by score-gradient sum\n" : "\nROWS   as asked for\n";
  Table table;
  table.column(capture.problem.layout == Layout::thd ? "seq" : "b")
      .column("h")
      .column("i")
      .column("m*c")
      .column("residue");
  table.column("ties").column("sum P'-1").column("before").column("after").column("leak/|dQ|").column("cond");
  if (d.with_truth) table.column("dQ error");
  const audit::RowFindings& f = d.rows;
  constexpr std::size_t kMost = 200;
  for (std::size_t n = 0; n < std::min(kMost, rows.size()); ++n) {
    const audit::RowId& row = rows[n];
    const std::size_t i = row.index;
    const double dq = d.dq_norm.data[i];
    const auto share = [dq](double x) { return dq > 0 ? x / dq : std::nan(""); };
    std::vector<std::string> cells{
        std::to_string(row.sequence),
        std::to_string(row.head),
        std::to_string(row.row),
        fmt::format("{:.4g}", static_cast<double>(f.row_max.data[i]) * static_cast<double>(f.scale_log2)),
        figure(static_cast<double>(f.row_max_residue.data[i])),
        std::to_string(f.tied_maxima.data[i]),
        figure(f.p_sum_excess.data[i]),
        figure(f.before_cast.data[i]),
        figure(f.after_cast.data[i]),
        figure(share(f.leak.data[i])),
        brief_number(share(f.uncancelled.data[i]))};
    if (d.with_truth) cells.push_back(figure(share(d.dq_error_norm.data[i])));
    table.row(cells);
  }
  text += table.text();
  if (rows.size() > kMost) text += fmt::format("  and {} more\n", rows.size() - kMost);
  return text;
}

std::string specials_report(const Capture& capture, const Diagnosis& d) {
  if (d.inputs.specials.empty() && d.specials.empty()) return "";
  std::string text = "\nNaN AND INFINITIES   where they enter, and how far they spread\n";
  std::vector<audit::SpecialValues> all = d.inputs.specials;
  all.insert(all.end(), d.specials.begin(), d.specials.end());
  return text + specials_text(all, capture.problem.layout);
}

/// What the figures say, in sentences; thresholds against the casts' own 2e-3 (docs/spec/measured-facts.md).
std::string meaning_text(const Capture& capture, const Diagnosis& d) {
  if (!d.with_backward || d.whole.residue.rows == 0) return "";
  const RowSummary& s = d.whole;
  std::string text = "\nWHAT IT MEANS\n";
  const double sum = capture.problem.softcap > 0 ? s.before_cast.rms : s.after_cast.rms;
  if (sum > 0) {
    text += wrapped(fmt::format(
        "The residue reaches the sums only through D(sum P' - 1), {} of them{}.",
        percent(s.d_p_excess.rms / sum),
        s.tied_rows > 0
            ? fmt::format("; in {} with tied maxima it also decides which way the halves in O are rounded",
                          counted(s.tied_rows, "row"))
            : ""));
  }
  const double error = dq_error(d);
  if (!std::isfinite(s.leak)) {
    text += wrapped("dQ is zero or not finite, so a leak has nothing to be measured against.");
  } else if (s.leak <= audit::kLeakOfCasts) {
    text +=
        wrapped(std::string("The leak is within what the BF16 casts cost anyway (about 2e-3 of dQ): nothing "
                            "has to be done about "
                            "it.") +
                (recommends_a_remedy(d.remedies) ? " What REMEDIES names brings the stored gradients, with "
                                                   "all their roundings, near those of fp32 attention."
                                                 : ""));
  } else {
    text += wrapped(fmt::format(
        "The leak is {} times what the BF16 casts cost anyway (about 2e-3 of dQ){}.",
        brief_number(s.leak / audit::kLeakOfCasts),
        d.with_truth && error > 0
            ? fmt::format(", as large as {} of the whole error of dQ", percent(std::min(1.0, s.leak / error)))
            : ""));
    if (s.leak_mean_key > 0.5 * s.leak) {
      text += wrapped(
          "The keys share a direction, and the leak lies along it: centring the keys over the sequence "
          "before "
          "attention (the same function) removes most of it without touching the kernel.");
    } else {
      text += wrapped(
          "The leak lies along the keys that P' favours, not along the mean key: subtracting a mean would "
          "not help; "
          "D from the unrounded O, or taking the sum out in proportion to P', does.");
    }
  }
  if (s.condition > 100) {
    text += wrapped(fmt::format(
        "The true dQ is a near-total cancellation (condition {}): read its relative error beside that.",
        brief_number(s.condition)));
  }
  return text;
}

}  // namespace

std::string diagnosis_report(const Capture& capture, const Diagnosis& d, std::size_t worst) {
  std::string text = capture_header(capture, d.inputs) + "\n" + verdict_text(capture, d);
  for (const std::string& note : d.notes) text += wrapped(note + ".");
  text += specials_report(capture, d);
  if (d.witness) text += witness_section(capture, *d.witness);
  text += row_max_text(capture, d);
  if (d.with_backward) text += drift_text(capture, d) + leak_text(d);
  text += errors_text(d);
  text += heads_text(d);
  text += rows_text(capture, d, worst);
  if (d.blame) text += blame_text(capture.problem, *d.blame);
  if (!d.blame_not_run.empty()) text += "\nBLAME\n" + wrapped("Not run: " + d.blame_not_run + ".");
  text += remedies_section(d.remedies);
  text += meaning_text(capture, d);
  return text;
}

namespace {

/// "dpsum_o_cast 70%", "many small ones", "" where blame was not run.
std::string largest_site(const Json& one) {
  const Json& tensors = at(one, "/blame/tensors");
  const Json& shares = at(tensors, tensors.contains("dq") ? "/dq" : "/out");
  if (!shares.is_object()) return "";
  const Json& others = at(shares, "/others/fair");
  double largest = others.is_number() ? others.get<double>() : 0;
  std::string text = largest > 0 ? "many small ones" : "none";
  for (const Json& site : at(shares, "/sites")) {
    const Json& fair = at(site, "/fair");
    if (!fair.is_number() || fair.get<double>() <= largest) continue;
    largest = fair.get<double>();
    text = fmt::format("{} {}", site.value("site", ""), percent(largest));
  }
  return text;
}

/// "o-residual+rounded-sum+ds-split, about 20%", "none needed", "" where none was tried.
std::string cheapest_remedy(const Json& one) {
  const Json& remedies = at(one, "/remedies");
  const Json& trials = at(remedies, "/trials");
  if (!trials.is_array()) return "";
  const Json& cheapest =
      at(remedies, at(remedies, "/cheapest").is_string() ? "/cheapest" : "/cheapest_with_inputs");
  if (!cheapest.is_string()) return "none of those tried";
  const auto name = cheapest.get<std::string>();
  if (name == "fa3") return "none needed";
  const auto trial =
      std::find_if(trials.begin(), trials.end(), [&](const Json& t) { return t.value("name", "") == name; });
  if (trial == trials.end()) return "";
  const Json& measured = at(*trial, "/cost/measured_share");
  const Json& estimated = at(*trial, "/cost/estimated_share");
  std::string cost;
  if (measured.is_object()) {
    cost = ", up to " + percent(measured.value("high", 0.0));
  } else if (estimated.is_number()) {
    cost = ", about " + percent(estimated.get<double>());
  }
  const std::string fa3 = "fa3+";
  std::string text = name.rfind(fa3, 0) == 0 ? name.substr(fa3.size()) : name;
  constexpr std::size_t kNameColumns = 32;
  if (text.size() > kNameColumns) text = text.substr(0, kNameColumns - 2) + "..";
  return text + cost;
}

void sort_worst_first(std::vector<DiagnosisLine>& lines) {
  std::stable_sort(lines.begin(), lines.end(), [](const DiagnosisLine& a, const DiagnosisLine& b) {
    return std::isnan(b.leak) ? !std::isnan(a.leak) : a.leak > b.leak;
  });
}

}  // namespace

DiagnosisLine diagnosis_line(const Json& one) {
  DiagnosisLine line;
  line.capture = one.value("capture", "");
  const Json& bits = one.at("against_recorded");
  line.recorded = bits.is_null() ? "-"
                  : bits.at("equal") == true
                      ? "equal"
                      : grouped(bits.at("differing_bits").get<std::size_t>()) + " differ";
  line.rows = one.at("row_max_residue").at("rows").get<std::size_t>();
  line.largest_residue = number_at(one, "/row_max_residue/largest");
  line.drift = number_at(one, drift_pointer(one) + "/rms");
  line.leak = number_at(one, "/leak/p_weighted_key");
  line.condition = number_at(one, "/condition");
  line.dq_error = number_at(one, "/errors/dq/before_cast");
  line.site = largest_site(one);
  line.remedy = cheapest_remedy(one);
  return line;
}

std::string causes_overview(std::vector<DiagnosisLine> lines) {
  const auto any = [&lines](std::string DiagnosisLine::*what) {
    return std::any_of(lines.begin(), lines.end(),
                       [what](const DiagnosisLine& l) { return !(l.*what).empty(); });
  };
  const bool blame = any(&DiagnosisLine::site);
  const bool remedies = any(&DiagnosisLine::remedy);
  if (!blame && !remedies) return "";
  sort_worst_first(lines);
  Table table;
  table.column("capture", true);
  if (blame) table.column("most of dQ's error", true);
  if (remedies) table.column("cheapest remedy", true);
  for (const DiagnosisLine& line : lines) {
    std::vector<std::string> cells{shortened(line.capture, 26)};
    if (blame) cells.push_back(line.site.empty() ? "-" : line.site);
    if (remedies) cells.push_back(line.remedy.empty() ? "-" : line.remedy);
    table.row(cells);
  }
  return fmt::format("\n{}   --html and --json have all of it\n", !remedies ? "BLAME"
                                                                  : !blame  ? "REMEDIES"
                                                                            : "BLAME AND REMEDIES") +
         table.text();
}

std::string diagnosis_overview(std::vector<DiagnosisLine> lines) {
  sort_worst_first(lines);
  Table table;
  table.column("capture", true)
      .column("rows")
      .column("bits")
      .column("residue")
      .column("sum")
      .column("leak/|dQ|");
  table.column("cond").column("dQ error");
  // So that lines with many differing bits too fit in 100 columns.
  std::size_t longest = 5;
  for (const DiagnosisLine& line : lines) longest = std::max(longest, line.recorded.size());
  const std::size_t name_columns = 47 - std::min<std::size_t>(longest, 27);
  for (const DiagnosisLine& line : lines) {
    table.row({shortened(line.capture, name_columns), grouped(line.rows), line.recorded,
               figure(line.largest_residue), figure(line.drift), figure(line.leak),
               brief_number(line.condition), figure(line.dq_error)});
  }
  return table.text(0) + "\n" +
         wrapped(
             "Worst leak first. bits: emulated against recorded. residue: largest exponent of a row's "
             "largest score "
             "(should be 0). sum: score-gradient sum, RMS over rows (should be 0). leak: what the sums put "
             "into dQ. "
             "cond: how much cancels in dQ. A leak above about 2e-3 is more than the BF16 casts cost anyway; "
             "bitattn "
             "diagnose on one capture says more.",
             0);
}

}  // namespace bitattn::cli
