#include "cli/page/sections.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "audit/ranking.hpp"
#include "cli/diagnosis_json.hpp"
#include "cli/page/charts.hpp"
#include "cli/page/html.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn::cli::page {

namespace {

/// A cast to BF16 alone, relative RMS (docs/diagnose.md, Errors).
constexpr double kOneCast = 1.7e-3;

bool has_softcap(const Json& one) {
  return number_at(one, "/softcap") > 0;
}

bool with_backward(const Json& one) {
  return !at(one, "/leak").is_null();
}

std::string largest_cause(const Json& one) {
  struct Part {
    const char* key;
    const char* text;
  };
  constexpr std::array<Part, 4> kParts{
      {{"g_minus_d", "D is made of an O that was rounded to BF16, and so misses Σ P′dP (the part G − D)"},
       {"d_p_excess", "Σ P′ is not 1: row-max residue and rounding of LSE (the part D(ΣP′ − 1))"},
       {"eta", "fp32 rounding of dP − D and of its product with P (the part η)"},
       {"beta", "the cast of dS to BF16 (the part β)"}}};
  const Part* largest = nullptr;
  double most = 0;
  for (const Part& part : kParts) {
    const double rms = number_at(one, std::string("/score_gradient_sum/terms/") + part.key + "/rms");
    if (rms > most) {
      most = rms;
      largest = &part;
    }
  }
  return largest == nullptr ? "" : std::string("Largest cause: ") + largest->text + ".";
}

std::string bits_sentence(const Json& one) {
  const Json& bits = at(one, "/against_recorded");
  const std::string backend = text_at(one, "/backend");
  if (bits.is_null()) {
    return "<p class=\"state none\">Nothing was recorded: the figures are those of the emulated kernel " +
           backend + " on these inputs.</p>";
  }
  const std::string elements = figure(one, "/against_recorded/elements", Style::count);
  if (at(bits, "/equal") == true) {
    return "<p class=\"state good\">Bits: every recorded bit is reproduced (" + elements +
           " elements), so what is shown happened in the real kernel.</p>";
  }
  return "<p class=\"state\">Bits: " + figure(one, "/against_recorded/differing_bits", Style::count) +
         " of " + elements + " recorded elements differ, so the figures are those of the emulated kernel " +
         backend + " on the same inputs.</p>";
}

std::string tile(const std::string& hue, const std::string& name, const std::string& big,
                 const std::string& what) {
  return "<div class=\"tile " + hue + "\"><div class=\"name\">" + name + "</div><div class=\"big\">" + big +
         "</div><div class=\"what\">" + what + "</div></div>";
}

std::string place_of_row(const Json& one, const std::string& pointer) {
  if (at(one, pointer).is_null()) return "";
  const bool packed = at(one, "/layout") == "THD";
  return fmt::format("{} {}, head {}, row {}", packed ? "sequence" : "batch",
                     grouped(at(one, pointer + "/b").get<std::size_t>()),
                     at(one, pointer + "/h").get<std::size_t>(),
                     grouped(at(one, pointer + "/i").get<std::size_t>()));
}

std::string mask_text(const Problem& problem) {
  std::string mask = problem.causal ? "causal" : "full mask";
  if (problem.window_left >= 0 || problem.window_right >= 0) {
    mask += fmt::format(", window {}:{}", problem.window_left, problem.window_right);
  }
  return mask;
}

}  // namespace

std::string subject_line(const Json& one, const Problem& problem) {
  std::string text = escaped(printable(problem.text("kernel", "kernel not named")));
  const std::string device = escaped(printable(problem.text("device")));
  if (!device.empty()) text += " on " + device;
  const bool packed = problem.layout == Layout::thd;
  text += " · " + figure(one, "/heads_q", Style::count) + (problem.heads_q == 1 ? " head, " : " heads, ");
  if (packed) {
    text += figure(one, "/batch", Style::count) + " packed sequences, " +
            figure(one, "/total_q", Style::count) + " queries, " + figure(one, "/total_k", Style::count) +
            " keys";
  } else {
    if (problem.batch != 1) text += "batch " + figure(one, "/batch", Style::count) + ", ";
    text += figure(one, "/seqlen_q", Style::count) + " queries, " + figure(one, "/seqlen_k", Style::count) +
            " keys";
  }
  return text + ", head size " + figure(one, "/head_dim", Style::count) + ", " + mask_text(problem);
}

std::string verdict_sentence(const Json& one) {
  const double rows = number_at(one, "/row_max_residue/rows");
  if (!(rows > 0)) return "No row sees a key with finite scores: nothing can be measured.";
  if (!with_backward(one)) {
    return "Forward only: the softmax exponent of a row’s largest score misses 0 by up to " +
           figure(one, "/row_max_residue/largest") + ".";
  }
  const double leak = number_at(one, "/leak/p_weighted_key");
  const std::string share = figure(one, "/leak/p_weighted_key", Style::share);
  if (!std::isfinite(leak)) return "dQ is zero or not finite, so there is nothing to measure a leak against.";
  if (leak <= audit::kLeakOfCasts) {
    return "Nothing to fix: the leak is " + share + " of |dQ|, within what the BF16 casts cost anyway.";
  }
  const std::string times = number_text(leak / audit::kLeakOfCasts);
  if (leak >= 1) {
    return "Rounding outweighs the gradient: what leaks into dQ is " + share + (leak < 10 ? " of" : "") +
           " |dQ|, where the BF16 casts cost 0.2 %.";
  }
  return "Sums that should be 0 leak " + share + " of |dQ| into dQ, " + times +
         " times what the BF16 casts cost anyway.";
}

std::string head_of(const Json& one) {
  std::string text = "<h1>" + verdict_sentence(one) + "</h1>";
  if (with_backward(one)) {
    const std::string cause = largest_cause(one);
    if (!cause.empty()) text += "<p class=\"lead\">" + cause + "</p>";
  }
  text += bits_sentence(one);
  text += "<div class=\"tiles\">";
  const std::string of =
      at(one, "/leak/relative_to") == "true dq" ? "of |dQ|, the true gradient" : "of |dQ|, as emulated";
  if (with_backward(one)) {
    text += tile("leak", "Leak into dQ", figure(one, "/leak/p_weighted_key", Style::share), of);
    if (!at(one, "/errors/dq").is_null()) {
      text +=
          tile("", "Error of dQ", figure(one, "/errors/dq/before_cast", Style::share),
               "before its last cast, of |dQ|; stored: " + figure(one, "/errors/dq/stored", Style::share));
    }
    text += tile("", "Condition", figure(one, "/condition"), "how much cancels in dQ; 1: nothing");
    text += tile("drift", "Score-gradient sum", figure(one, drift_pointer(one) + "/rms"),
                 "RMS over rows, unit of a score’s gradient; 0 in theory");
  }
  text += tile("residue", "Row-max residue", figure(one, "/row_max_residue/largest"),
               "largest, an exponent of 2; 0 in theory");
  if (!(number_at(one, "/row_max_residue/rows") > 0)) return text + "</div>\n";
  text += tile("", "Rows with a residue", figure(one, "/row_max_residue/nonzero", Style::count),
               "of " + figure(one, "/row_max_residue/rows", Style::count) + "; tied maxima in " +
                   figure(one, "/tied_maxima/rows", Style::count));
  return text + "</div>\n";
}

std::string cause_section(const Json& one) {
  if (!with_backward(one) || !(number_at(one, "/score_gradient_sum/before_cast/rows") > 0)) return "";
  const bool softcap = has_softcap(one);
  const std::string key = "/score_gradient_sum/terms/";
  struct Part {
    const char *name, *label, *remark;
  };
  const std::vector<Part> parts{{"g_minus_d", "G − D", "D has O rounded to BF16"},
                                {"d_p_excess", "D(ΣP′ − 1)", "row-max residue, rounding of LSE"},
                                {"eta", "η", "fp32 rounding of dP − D and of its product"},
                                {"beta", "β", "the cast of dS to BF16"}};
  std::vector<double> values{number_at(one, drift_pointer(one) + "/rms")};
  std::vector<PointRow> rows;
  for (const Part& part : parts) {
    if (softcap && std::string(part.name) == "beta") continue;
    const std::string pointer = key + part.name + "/rms";
    values.push_back(number_at(one, pointer));
    rows.push_back({part.label, std::nullopt, values.back(), figure(one, pointer), part.remark});
  }
  const double total = values.front();
  std::optional<Mark> mark;
  if (total > 0) mark = Mark{total, "the sum itself, " + figure(one, drift_pointer(one) + "/rms")};
  const std::string largest = place_of_row(one, drift_pointer(one) + "/largest_at");
  return section(
      "Which rounding makes the sums",
      "In exact arithmetic the score gradients of a row sum to 0. Here they do not; four roundings make the "
      "sum, "
      "and add up to it row by row. RMS over rows, in the unit of a score’s gradient, on a logarithmic axis.",
      point_chart("drift", DecadeAxis::around(values), rows, mark) +
          (largest.empty() ? ""
                           : "<p class=\"note\">Largest sum: " +
                                 figure(one, drift_pointer(one) + "/largest") + " at " + largest + "." +
                                 (softcap ? " With a softcap the law holds before the multiply by 1 − tanh², "
                                            "so the sum is taken there."
                                          : "") +
                                 "</p>"));
}

std::string blame_section(const Json& one) {
  const Json& tensors = at(one, "/blame/tensors");
  if (!tensors.is_object() || tensors.empty()) return "";
  const std::string main = tensors.contains("dq") ? "dq" : "out";
  if (!tensors.contains(main)) return "";
  // Sites that own at least a thousandth of some error, by their share of the main one.
  struct Site {
    std::string name;
    double order = 0;
  };
  constexpr double kLeast = 5e-4;
  std::vector<Site> sites;
  for (const auto& [tensor, shares] : tensors.items()) {
    for (const Json& site : at(shares, "/sites")) {
      const double fair = number_at(site, "/fair");
      const std::string name = site.value("site", "");
      if (!(std::abs(fair) >= kLeast)) continue;
      const double order = std::abs(fair) + (tensor == main ? 1000 : 0);
      const auto known =
          std::find_if(sites.begin(), sites.end(), [&](const Site& s) { return s.name == name; });
      if (known == sites.end()) {
        sites.push_back({name, order});
      } else {
        known->order = std::max(known->order, order);
      }
    }
  }
  std::stable_sort(sites.begin(), sites.end(),
                   [](const Site& a, const Site& b) { return a.order > b.order; });
  const auto pointer_of = [&](const std::string& tensor, const std::string& name) {
    const Json& list = at(tensors, "/" + tensor + "/sites");
    for (std::size_t n = 0; n < list.size(); ++n) {
      if (list[n].value("site", "") == name && !list[n]["fair"].is_null())
        return fmt::format("/blame/tensors/{}/sites/{}/fair", tensor, n);
    }
    return std::string();
  };
  std::vector<SharePart> bars;
  for (const Site& site : sites) {
    const std::string pointer = pointer_of(main, site.name);
    if (pointer.empty() || !(std::abs(number_at(one, pointer)) >= kLeast)) continue;
    bars.push_back({"<code>" + escaped(site.name) + "</code>", number_at(one, pointer),
                    figure(one, pointer, Style::share)});
  }
  const std::string others = "/blame/tensors/" + main + "/others/fair";
  bars.push_back({"all others", number_at(one, others), figure(one, others, Style::share)});
  std::vector<Column> columns{{"site", "left"}};
  for (const auto& [tensor, shares] : tensors.items()) {
    columns.push_back({tensor == "score_gradient_sum" ? "row sums" : escaped(tensor),
                       tensor == "score_gradient_sum" ? "drift" : ""});
  }
  std::vector<std::vector<std::string>> rows;
  for (const Site& site : sites) {
    rows.push_back({"<code>" + escaped(site.name) + "</code>"});
    for (const auto& [tensor, shares] : tensors.items()) {
      const std::string pointer = pointer_of(tensor, site.name);
      rows.back().push_back(pointer.empty() ? "" : figure(one, pointer, Style::share));
    }
  }
  rows.push_back({"|error| / |truth|"});
  for (const auto& [tensor, shares] : tensors.items())
    rows.back().push_back(figure(one, "/blame/tensors/" + tensor + "/relative_error"));
  const bool whole = at(one, "/blame/whole") == true;
  return section(
      std::string("Which rounding site owns the error of ") + (main == "dq" ? "dQ" : "O"),
      "Shares of |error|² of the stored tensor against the truth, by rounding site (Shapley values; "
      "<code>bitattn sites</code> says what each is). A negative share cancels what others do. " +
          (whole ? "Over all " + figure(one, "/blame/rows_looked_at", Style::count) + " rows."
                 : "Over " + figure(one, "/blame/rows_looked_at", Style::count) + " of " +
                       figure(one, "/blame/rows_of_capture", Style::count) + " rows, the worst."),
      share_bars("leak", bars) + table(columns, rows));
}

std::string errors_section(const Json& one) {
  if (at(one, "/errors").is_null()) return "";
  std::vector<double> values{kOneCast};
  std::vector<PointRow> rows;
  for (const auto& [tensor, label] :
       {std::pair{"out", "O"}, std::pair{"dq", "dQ"}, std::pair{"dk", "dK"}, std::pair{"dv", "dV"}}) {
    const std::string key = std::string("/errors/") + tensor;
    if (at(one, key).is_null()) continue;
    const double before = number_at(one, key + "/before_cast");
    const double stored = number_at(one, key + "/stored");
    values.insert(values.end(), {before, stored});
    const double left_out = number_at(one, key + "/not_finite");
    rows.push_back(
        {label, before, stored,
         figure(one, key + "/before_cast") + " <span class=\"soft\">→</span> " + figure(one, key + "/stored"),
         left_out > 0 ? figure(one, key + "/not_finite", Style::count) + " not finite, left out" : ""});
  }
  return section("How wrong the tensors are",
                 "|x − truth| / |truth|, Frobenius, against " + text_at(one, "/reference") +
                     ". Ring: before the last cast. Dot: as stored in BF16.",
                 point_chart("plain", DecadeAxis::around(values), rows,
                             Mark{kOneCast, "a BF16 cast alone, " + number_text(kOneCast)}) +
                     "<p class=\"note\">LSE is off by at most " +
                     figure(one, "/errors/lse/largest_absolute") + " (absolute).</p>");
}

namespace {

std::vector<RowTick> row_ticks(const Problem& problem) {
  const auto tokens = static_cast<double>(problem.total_q());
  std::vector<RowTick> ticks;
  if (tokens == 0) return ticks;
  if (problem.batch == 1) {
    const std::size_t last = problem.total_q() - 1;
    constexpr std::size_t kSteps = 4;
    for (std::size_t n = 0; n <= kSteps && (n == 0 || last > 0); ++n) {
      const std::size_t row = last * n / kSteps;
      ticks.push_back(
          {(static_cast<double>(row) + 0.5) / tokens * 100, (n == 0 ? "row " : "") + grouped(row)});
    }
    return ticks;
  }
  const std::size_t step = (problem.batch + 7) / 8;
  for (std::size_t b = 0; b < problem.batch; b += step) {
    ticks.push_back({static_cast<double>(problem.sequence(b).q_begin) / tokens * 100,
                     (problem.layout == Layout::thd ? "sequence " : "batch ") + std::to_string(b)});
  }
  return ticks;
}

/// The head whose dQ has the largest leak; without a backward the one with the largest residue.
std::size_t worst_head(const Json& one) {
  const std::string key = with_backward(one) ? "/leak/p_weighted_key" : "/row_max_residue/largest";
  std::size_t worst = 0;
  double most = -1;
  const Json& heads = at(one, "/heads");
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const double x = number_at(heads[h], key);
    if (x > most) {
      most = x;
      worst = h;
    }
  }
  return worst;
}

struct Quantity {
  std::string hue, title, what, figure_text, figure_key;
  std::vector<std::vector<audit::RowBin>> heads;
  std::vector<audit::RowBin> curve;  ///< of the worst head
};

std::string quantity_html(const Quantity& quantity, const Problem& problem, const Json& one,
                          std::size_t worst) {
  const std::size_t count = quantity.heads.size();
  constexpr std::size_t kMostFigures = 16;
  const bool figures = count > 1 && count <= kMostFigures;
  std::string text = "<h3>" + quantity.title + "</h3><p class=\"note\">" + quantity.what +
                     (figures ? quantity.figure_text : "") + "</p>";
  constexpr std::size_t kMostStrips = 128;
  std::vector<Strip> strips;
  for (std::size_t h = 0; h < std::min(count, kMostStrips); ++h) {
    const std::string key = fmt::format("/heads/{}{}", h, quantity.figure_key);
    strips.push_back({fmt::format("head {}", h),
                      fmt::format("head {}: {}", h, number_text(number_at(one, key))), quantity.heads[h],
                      figures ? figure(one, key) : ""});
  }
  if (count > 1) text += strip_map(quantity.hue, strips);
  if (count > kMostStrips)
    text += fmt::format("<p class=\"note\">Heads 0 to {} of {}.</p>", kMostStrips - 1, count);
  if (count > 1) text += fmt::format("<p class=\"note\">Head {}, the worst:</p>", worst);
  return text + row_profile(quantity.hue, quantity.curve, row_ticks(problem),
                            fmt::format("{}, head {}, over the rows", quantity.title, worst));
}

}  // namespace

std::string rows_map_section(const Capture& capture, const audit::Diagnosis& d, const Json& one) {
  const Problem& problem = capture.problem;
  constexpr std::size_t kBins = 256;
  constexpr std::size_t kCurveBins = 96;
  const std::size_t tokens = problem.total_q();
  if (tokens == 0 || !(number_at(one, "/row_max_residue/rows") > 0)) return "";
  std::vector<Quantity> quantities;
  quantities.push_back({"residue",
                        "Row-max residue",
                        "The softmax exponent of the row’s largest score; 0 in exact arithmetic. Unit: log₂.",
                        " Figure: the largest.",
                        "/row_max_residue/largest",
                        {},
                        {}});
  if (with_backward(one)) {
    quantities.push_back({"drift",
                          "Score-gradient sum",
                          std::string("Σⱼ dS over the row’s visible keys, ") +
                              (has_softcap(one) ? "before" : "after") +
                              " the cast; 0 in exact arithmetic. Unit: a score’s gradient.",
                          " Figure: the RMS.",
                          drift_pointer(one) + "/rms",
                          {},
                          {}});
    quantities.push_back(
        {"leak",
         "Leak into dQ",
         "|softmax_scale · sum · key averaged with P′|, over the RMS of |dQ| of the head’s rows.",
         " Figure: the RMS, the head’s share of |dQ|.",
         "/leak/p_weighted_key",
         {},
         {}});
  }
  const std::size_t worst = worst_head(one);
  const auto bin = [&](Quantity& quantity, const auto& values, std::size_t h, double unit) {
    quantity.heads.push_back(audit::bin_rows(problem, values, h, kBins, unit));
    if (h == worst) quantity.curve = audit::bin_rows(problem, values, h, kCurveBins, unit);
  };
  for (std::size_t h = 0; h < problem.heads_q; ++h) {
    bin(quantities[0], d.rows.row_max_residue, h, 1);
    if (!with_backward(one)) continue;
    bin(quantities[1], d.drift(problem), h, 1);
    bin(quantities[2], d.rows.leak, h, audit::row_statistics(problem, d.dq_norm, static_cast<int>(h)).rms);
  }
  std::string intro = problem.batch == 1
                          ? ""
                          : (problem.layout == Layout::thd ? "Packed sequences" : "Batch elements") +
                                std::string(" stand side by side. ");
  const auto bins_text = [&](std::size_t bins) {
    return bins == tokens ? std::string("every row")
                          : fmt::format("{} rows in {} bins of about {}", grouped(tokens), bins,
                                        number_text(static_cast<double>(tokens) / static_cast<double>(bins)));
  };
  if (problem.heads_q > 1) {
    intro += "Strips: one a head, " + bins_text(quantities[0].heads[0].size()) +
             ", coloured by the largest magnitude of a bin. ";
  }
  intro += "Curve: " + bins_text(quantities[0].curve.size()) +
           "; smallest to largest magnitude of a bin, and its RMS as a line, on a logarithmic axis.";
  std::string content;
  for (const Quantity& quantity : quantities) content += quantity_html(quantity, problem, one, worst);
  return section("Where along the rows", intro, content);
}

std::string heads_section(const Json& one) {
  const Json& heads = at(one, "/heads");
  if (heads.size() < 2 || !with_backward(one)) return "";
  std::vector<std::size_t> order(heads.size());
  for (std::size_t h = 0; h < order.size(); ++h) order[h] = h;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const double x = number_at(heads[a], "/leak/p_weighted_key");
    const double y = number_at(heads[b], "/leak/p_weighted_key");
    return std::isnan(y) ? !std::isnan(x) : x > y;
  });
  constexpr std::size_t kMost = 32;
  const bool truth = !at(one, "/reference").is_null();
  std::vector<Column> columns{{"head", "left"},
                              {"rows", ""},
                              {"residue<br/>largest", "residue"},
                              {"rows with<br/>ties", ""},
                              {"ΣP′ − 1<br/>RMS", ""},
                              {"sum<br/>RMS", "drift"},
                              {"G − D<br/>RMS", ""},
                              {"β<br/>RMS", ""},
                              {"leak<br/>of |dQ|", "leak"},
                              {"condition", ""}};
  if (truth) columns.push_back({"dQ error<br/>of |dQ|", ""});
  std::vector<std::vector<std::string>> rows;
  for (std::size_t n = 0; n < std::min(kMost, order.size()); ++n) {
    const std::string key = fmt::format("/heads/{}", order[n]);
    rows.push_back(
        {figure(one, key + "/h", Style::count), figure(one, key + "/row_max_residue/rows", Style::count),
         figure(one, key + "/row_max_residue/largest"), figure(one, key + "/tied_maxima/rows", Style::count),
         figure(one, key + "/p_sum_excess/rms"), figure(one, key + drift_pointer(one) + "/rms"),
         figure(one, key + "/score_gradient_sum/terms/g_minus_d/rms"),
         figure(one, key + "/score_gradient_sum/terms/beta/rms"), figure(one, key + "/leak/p_weighted_key"),
         figure(one, key + "/condition")});
    if (truth) rows.back().push_back(figure(one, key + "/dq_error"));
  }
  return section("Heads",
                 order.size() > kMost ? fmt::format("Worst leak first, {} of {}.", kMost, order.size())
                                      : "Worst leak first.",
                 table(columns, rows));
}

std::string worst_rows_section(const Json& one, bool chosen) {
  const Json& list = at(one, "/rows");
  if (list.empty()) return "";
  constexpr std::size_t kMost = 100;
  const bool truth = !at(one, "/reference").is_null();
  const bool packed = at(one, "/layout") == "THD";
  std::vector<Column> columns{{packed ? "seq." : "batch", "left"},
                              {"head", ""},
                              {"row", ""},
                              {"m·c", ""},
                              {"residue", "residue"},
                              {"equal<br/>maxima", ""},
                              {"ΣP′ − 1", ""},
                              {"sum before<br/>the cast", "drift"},
                              {"sum after<br/>the cast", "drift"},
                              {"leak<br/>of its |dQ|", "leak"},
                              {"condition", ""}};
  if (truth) columns.push_back({"dQ error<br/>of its |dQ|", ""});
  std::vector<std::vector<std::string>> rows;
  for (std::size_t n = 0; n < std::min(kMost, list.size()); ++n) {
    const std::string key = fmt::format("/rows/{}", n);
    rows.push_back({figure(one, key + "/b", Style::count), figure(one, key + "/h", Style::count),
                    figure(one, key + "/i", Style::count), figure(one, key + "/scaled_max"),
                    figure(one, key + "/row_max_residue"), figure(one, key + "/tied_maxima", Style::count),
                    figure(one, key + "/p_sum_excess"), figure(one, key + "/before_cast"),
                    figure(one, key + "/after_cast"), figure(one, key + "/leak_share"),
                    figure(one, key + "/condition")});
    if (truth) rows.back().push_back(figure(one, key + "/dq_error"));
  }
  std::string intro = chosen ? "As asked for." : "By the magnitude of the score-gradient sum.";
  intro += " m·c is the scaled row max (log₂); leak and error are relative to the row’s own |dQ|.";
  if (list.size() > kMost) intro += fmt::format(" The first {} of {}.", kMost, list.size());
  return section(chosen ? "Rows" : "Worst rows", intro, table(columns, rows));
}

std::string specials_section(const Json& one) {
  std::vector<std::vector<std::string>> rows;
  for (const char* list : {"/not_finite_inputs", "/not_finite_outputs"}) {
    const Json& tensors = at(one, list);
    for (std::size_t n = 0; n < tensors.size(); ++n) {
      const std::string key = fmt::format("{}/{}", list, n);
      const bool keys = tensors[n].contains("keys");
      rows.push_back(
          {text_at(one, key + "/tensor"), figure(one, key + "/nan", Style::count),
           figure(one, key + "/infinite", Style::count),
           figure(one, key + (keys ? "/keys" : "/rows"), Style::count) + (keys ? " keys" : " query rows")});
    }
  }
  if (rows.empty()) return "";
  return section("NaN and infinities",
                 "Where they enter, and how far they spread. What is not finite is left out of every figure.",
                 table({{"tensor", "left"}, {"NaN", ""}, {"infinite", ""}, {"in", ""}}, rows));
}

std::string bits_section(const Json& one) {
  const Json& tensors = at(one, "/against_recorded/tensors");
  if (tensors.empty()) return "";
  std::vector<std::vector<std::string>> rows;
  bool places = false;
  for (std::size_t n = 0; n < tensors.size(); ++n) {
    const std::string key = fmt::format("/against_recorded/tensors/{}", n);
    std::string first;
    if (!at(one, key + "/first").is_null()) {
      const Json& place = at(one, key + "/first/place");
      for (const auto& [axis, index] : place.items()) {
        if (index.is_number() && axis != "tile")
          first += fmt::format("{}{} {}", first.empty() ? "" : ", ", escaped(axis), index.dump());
      }
      first += ": " + text_at(one, key + "/first/a_bits") + " recorded, " +
               text_at(one, key + "/first/b_bits") + " emulated";
      places = true;
    }
    std::string remark = text_at(one, key + "/remark");
    if (remark.empty() && at(one, key + "/equal_bits").is_null()) remark = text_at(one, key + "/verdict");
    rows.push_back({text_at(one, key + "/tensor"), figure(one, key + "/elements", Style::count),
                    figure(one, key + "/equal_bits", Style::count),
                    figure(one, key + "/differing_bits", Style::count),
                    figure(one, key + "/largest_ulp_distance", Style::count),
                    figure(one, key + "/relative_error"), first.empty() ? remark : first});
  }
  return section("Bits against the recorded tensors", "",
                 table({{"tensor", "left"},
                        {"elements", ""},
                        {"equal bits", ""},
                        {"differing", ""},
                        {"largest<br/>distance, ulp", ""},
                        {"relative<br/>difference", ""},
                        {places ? "first difference" : "", "left"}},
                       rows));
}

std::string witness_section(const Json& one) {
  const Json& laws = at(one, "/witness");
  if (!laws.is_object()) return "";
  std::vector<PointRow> rows;
  std::vector<double> values{1};
  const auto label = [](const std::string& law) {
    return law == "dk_sum"          ? "Σⱼ dKⱼ = 0"
           : law == "dq_dk_balance" ? "Σᵢ q·dq = Σⱼ k·dk"
                                    : "Σᵢ out·dout = Σⱼ v·dv";
  };
  for (const auto& [name, law] : laws.items()) {
    const std::string key = "/witness/" + name;
    if (!law["not_checked"].is_null()) {
      rows.push_back({label(name), std::nullopt, 0, "–", text_at(law, "/not_checked")});
      continue;
    }
    values.push_back(number_at(one, key + "/multiple"));
    const double broken = number_at(law, "/broken");
    const std::string share = figure(one, key + "/bound_share");
    std::string remark =
        broken > 0 ? "broken: " + share + " times its bound" : "holds: " + share + " of its bound";
    if (law["verdict"] == "not finite") remark = "NaN or infinities";
    if (law["heads"].size() > 1 && broken > 0) {
      remark +=
          fmt::format(" ({} of {} heads)", figure(one, key + "/broken", Style::count), law["heads"].size());
    }
    rows.push_back({label(name), std::nullopt, values.back(), figure(one, key + "/multiple"), remark});
  }
  return section("Witnesses in the recorded tensors",
                 "Laws that exact gradients obey, seen in what was recorded, without running anything. What "
                 "each is missed by, as a "
                 "multiple of the noise that rounding to BF16 for storing makes; the bound is the most that "
                 "this rounding can do.",
                 point_chart("plain", DecadeAxis::around(values), rows, Mark{1, "storage noise"}));
}

std::string remedies_section(const Json& one) {
  const Json& trials = at(one, "/remedies/trials");
  const std::string not_tried = text_at(one, "/remedies/not_tried");
  if (trials.empty()) {
    if (not_tried.empty() || not_tried == "not asked for") return "";
    return section("Remedies", "", "<p>Not tried: " + not_tried + ".</p>");
  }
  const Json& cheapest = at(one, "/remedies/cheapest");
  const Json& inputs = at(one, "/remedies/cheapest_with_inputs");
  std::vector<std::vector<std::string>> rows;
  for (std::size_t n = 0; n < trials.size(); ++n) {
    const std::string key = fmt::format("/remedies/trials/{}", n);
    if (at(one, key + "/errors").is_null()) continue;
    const Json& name = trials[n].at("name");
    const bool chosen = name == cheapest || (!inputs.is_null() && name == inputs);
    std::string measured;
    if (!at(one, key + "/cost/measured_share").is_null()) {
      measured = figure(one, key + "/cost/measured_share/low", Style::share) + " to " +
                 figure(one, key + "/cost/measured_share/high", Style::share);
    }
    rows.push_back({(chosen ? "<b>" : "") + ("<code>" + text_at(one, key + "/name") + "</code>") +
                        (chosen ? "</b>" : ""),
                    figure(one, key + "/errors/dq/stored"), figure(one, key + "/times_fp32/dq"),
                    figure(one, key + "/errors/dk/stored"), figure(one, key + "/times_fp32/dk"),
                    figure(one, key + "/leak"), figure(one, key + "/cost/estimated_share", Style::share),
                    measured});
  }
  const std::string goal =
      "stored dQ and dK within " + figure(one, "/remedies/factor") + " times the errors of fp32 attention";
  std::string advice;
  if (at(one, "/remedies/no_yardstick").is_string()) {
    advice = "No recommendation: there is " + text_at(one, "/remedies/no_yardstick") + ".";
  } else if (cheapest == "fa3") {
    advice = "None is needed: the kernel as it is keeps " + goal + ".";
  } else if (cheapest.is_string() && number_at(one, "/leak/p_weighted_key") <= audit::kLeakOfCasts) {
    advice = "The leak needs none. Of those that keep " + goal + ", the cheapest is <code>" +
             text_at(one, "/remedies/cheapest") + "</code>.";
  } else if (cheapest.is_string()) {
    advice =
        "Take <code>" + text_at(one, "/remedies/cheapest") + "</code>: the cheapest that keeps " + goal + ".";
  } else {
    advice = "Nothing inside the kernel that was tried keeps " + goal + ".";
  }
  if (inputs.is_string() && inputs != cheapest) {
    advice += " With a change of the model’s inputs: <code>" +
              text_at(one, "/remedies/cheapest_with_inputs") + "</code>.";
  }
  std::string note =
      "Cost: share of forward and backward, estimated from counts, and measured in a real kernel where it "
      "was.";
  if (at(one, "/remedies/kv_head").is_number()) {
    note += " Tried on KV head " + figure(one, "/remedies/kv_head", Style::count) +
            " alone, which has the largest leak.";
  }
  return section(
      "Remedies",
      "Each in the emulated kernel, on this capture: errors |x − truth| / |truth| of the stored gradients.",
      "<p class=\"lead\">" + advice + "</p>" +
          table({{"kernel", "left"},
                 {"dQ error", ""},
                 {"over<br/>fp32’s", ""},
                 {"dK error", ""},
                 {"over<br/>fp32’s", ""},
                 {"leak left<br/>of |dQ|", "leak"},
                 {"cost,<br/>estimated", ""},
                 {"cost,<br/>measured", ""}},
                rows) +
          "<p class=\"note\">" + note + "</p>");
}

std::string provenance_section(const Json& one, const Problem& problem) {
  std::string list;
  const auto add = [&list](const std::string& name, const std::string& html) {
    if (!html.empty()) list += "<dt>" + name + "</dt><dd>" + html + "</dd>";
  };
  const auto joined = [&](const char* pointer) {
    std::string text;
    for (const Json& item : at(one, pointer)) {
      if (item.is_string()) text += (text.empty() ? "" : ", ") + escaped(item.get<std::string>());
    }
    return text;
  };
  const bool packed = problem.layout == Layout::thd;
  add("Capture", "<span class=\"mono\">" + text_at(one, "/capture") + "</span>");
  std::string kernel = escaped(printable(problem.text("kernel", "not named")));
  if (!problem.text("kernel_version").empty())
    kernel += ", " + escaped(printable(problem.text("kernel_version")));
  add("Recorded by", kernel);
  add("Device", escaped(printable(problem.text("device"))));
  add("Recorded", joined("/recorded"));
  add("Shape", (packed ? figure(one, "/batch", Style::count) + " packed sequences, " +
                             figure(one, "/total_q", Style::count) + " queries and " +
                             figure(one, "/total_k", Style::count) + " keys in all"
                       : "batch " + figure(one, "/batch", Style::count) + ", " +
                             figure(one, "/seqlen_q", Style::count) + " queries, " +
                             figure(one, "/seqlen_k", Style::count) + " keys") +
                   ", " + figure(one, "/heads_q", Style::count) + " query heads over " +
                   figure(one, "/heads_kv", Style::count) + " KV heads, head size " +
                   figure(one, "/head_dim", Style::count));
  add("Mask", mask_text(problem) + ", aligned " + text_at(one, "/causal_alignment"));
  add("softmax_scale", shortest_text(problem.softmax_scale));
  if (problem.softcap > 0) add("Softcap", shortest_text(problem.softcap));
  std::string origin;
  for (const char* name : {"regime", "seed", "step", "layer", "heads_kept"}) {
    const std::string value = problem.text(name);
    if (!value.empty())
      origin += (origin.empty() ? "" : ", ") + std::string(name) + " " + escaped(printable(value));
  }
  add("From", origin);
  add("Inputs", "mean |q| " + figure(one, "/norms/mean_q") + ", mean |k| " + figure(one, "/norms/mean_k") +
                    ", |mean key| up to " + figure(one, "/norms/largest_mean_key") + ", largest logit " +
                    figure(one, "/largest_logit/value"));
  add("Emulated kernel", text_at(one, "/backend"));
  add("Truth", at(one, "/reference").is_null() ? "none asked for" : text_at(one, "/reference"));
  add("Notes", joined("/notes"));
  return section("What this is", "", "<dl>" + list + "</dl>");
}

}  // namespace bitattn::cli::page
