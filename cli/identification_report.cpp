#include "cli/identification_report.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "audit/inputs.hpp"
#include "cli/capture_header.hpp"
#include "cli/comparison_report.hpp"
#include "cli/table.hpp"

namespace bitattn::cli {

namespace {

using audit::Explanation;
using audit::Identification;

const char* verdict_name(audit::Verdict verdict) {
  switch (verdict) {
    case audit::Verdict::unmodified:
      return "unmodified";
    case audit::Verdict::deviation:
      return "deviation";
    case audit::Verdict::stochastic:
      return "stochastic";
    case audit::Verdict::nothing_fits:
      return "nothing fits";
  }
  return "";
}

std::string site_name(const profile::Deviation& d) {
  return std::string(profile::info(d.point).site);
}

std::string explanation_text(const Explanation& e) {
  std::string text = e.profile;
  for (const profile::Deviation& d : e.deviations) text += "; " + profile::text(d);
  return text;
}

/// The share of a tensor's compared elements that have the plain kernels' bits.
double agreement(const audit::TensorComparison& t) {
  const std::size_t n = t.elements - t.not_written;
  return n == 0 ? 0 : 1 - static_cast<double>(t.differing_bits) / static_cast<double>(n);
}

std::string agreement_text(const audit::Comparison& plain) {
  std::string text;
  for (const audit::TensorComparison& t : plain.tensors) {
    if (t.intermediate || t.verdict == audit::TensorVerdict::only_in_a ||
        t.verdict == audit::TensorVerdict::only_in_b) {
      continue;
    }
    text += fmt::format("{}{} {} ({})", text.empty() ? "" : ", ", t.tensor, percent(agreement(t)),
                        brief_number(t.relative_error));
  }
  return text;
}

std::string verdict_text(const Identification& found) {
  std::string text;
  switch (found.verdict) {
    case audit::Verdict::unmodified:
      text = "flash-attention-3, unmodified (fa3): " + comparison_verdict(found.left) + ".";
      break;
    case audit::Verdict::deviation: {
      const Explanation& e = *found.best;
      const std::string what = e.deviations.empty()       ? "a remedied kernel"
                               : e.deviations.size() == 1 ? "flash-attention-3 with one deviation"
                                                          : "flash-attention-3 with several deviations";
      text = what + ": " + comparison_verdict(found.left) + ".";
      break;
    }
    case audit::Verdict::stochastic:
      text =
          "flash-attention-3 with a cast that is rounded stochastically, by its statistics: no bits can "
          "show it.";
      break;
    case audit::Verdict::nothing_fits:
      text = fmt::format(
          "No profile of flash-attention-3 fits: of {} tried, none gives every recorded bit. Equal bits with "
          "fa3, each kernel run from its recorded inputs (relative error): {}.",
          grouped(found.tried), agreement_text(found.plain));
      break;
  }
  return wrapped(text);
}

std::string stochastic_text(const audit::StochasticFit& fit) {
  if (fit.impossible == 0 &&
      (fit.deviation.point == profile::Point::out_word || fit.deviation.point == profile::Point::dq_word ||
       fit.deviation.point == profile::Point::dk_word || fit.deviation.point == profile::Point::dv_word)) {
    return fmt::format(
        "each of {} inexact words of {} is a neighbour of the value; rounded up {:+.1f} standard deviations "
        "from what is expected; to the farther neighbour {:.2f} times as often as expected",
        grouped(fit.elements), fit.tensor, fit.bias, fit.spread);
  }
  return fmt::format(
      "{} words of {} differ, their squared distance from fa3's {:.2f} times that of a simulation, mean "
      "error "
      "{:+.1f} standard deviations",
      grouped(fit.elements), fit.tensor, fit.spread, fit.bias);
}

Json explanation_json(const Explanation& e) {
  Json deviations = Json::array();
  for (const profile::Deviation& d : e.deviations) {
    deviations.push_back({{"site", site_name(d)},
                          {"what", std::string(profile::info(d.point).what)},
                          {"text", profile::text(d)},
                          {"parameter", d.parameter}});
  }
  return {{"profile", e.profile},
          {"deviations", deviations},
          {"differing_bits", e.differing},
          {"residual", json_number(e.residual)}};
}

}  // namespace

bool identified_exactly(const Identification& found) {
  return found.verdict == audit::Verdict::unmodified || found.verdict == audit::Verdict::deviation;
}

std::string identification_report(const Capture& capture, const Identification& found) {
  std::string text =
      capture_header(capture, audit::summarize_inputs(capture.problem)) + "\nVERDICT\n" + verdict_text(found);
  if (found.best) {
    const Explanation& e = *found.best;
    const bool fits = found.verdict != audit::Verdict::nothing_fits;
    if (!fits) {
      text += wrapped(fmt::format("Nearest: it leaves {} of the difference, {} elements.",
                                  percent(e.residual), grouped(e.differing)));
    }
    text += fmt::format("  profile    {}\n", e.profile);
    for (const profile::Deviation& d : e.deviations) {
      text += fmt::format("  site       {}\n", site_name(d));
      text += wrapped("deviation  " + profile::text(d).substr(site_name(d).size() + 2));
    }
  }
  if (found.stochastic) text += wrapped("evidence   " + stochastic_text(*found.stochastic));
  if (!found.born_in.empty() && found.born) {
    const audit::ElementPair& p = *found.born;
    text += wrapped(fmt::format("born in    {}, first at {}: recorded {:.6g}, fa3 {:.6g}", found.born_in,
                                p.place.text(capture.problem.layout), p.a, p.b));
  }
  if (!found.equals.empty()) {
    text += fmt::format("\nTHE SAME BITS HERE   {} in other words or at later sites\n",
                        counted(found.equals.size(), "deviation"));
    constexpr std::size_t kMost = 8;
    for (std::size_t i = 0; i < std::min(kMost, found.equals.size()); ++i) {
      text += wrapped(explanation_text(found.equals[i]));
    }
    if (found.equals.size() > kMost) {
      text += fmt::format("  and {} more (--json lists all)\n", found.equals.size() - kMost);
    }
  }
  for (const std::string& note : found.notes) text += wrapped(note);
  if (found.verdict != audit::Verdict::unmodified) {
    text += "\nPLAIN fa3   recorded against it, each kernel run from the recorded tensors before it\n";
    text += comparison_table(found.plain, capture.problem.layout);
  }
  return text;
}

std::vector<std::string> identification_brief(const Identification& found) {
  const auto all = [&] {
    return fmt::format("in every recorded bit: {}, {} elements",
                       counted(found.left.compared_tensors(), "tensor"), grouped(found.left.elements()));
  };
  std::vector<std::string> lines;
  switch (found.verdict) {
    case audit::Verdict::unmodified:
      lines = {"follows fa3 " + all()};
      break;
    case audit::Verdict::deviation: {
      const std::size_t n = found.best->deviations.size();
      lines = {"follows " + found.best->profile + (n == 0 ? " " : " with " + counted(n, "deviation") + " ") +
               all()};
      break;
    }
    case audit::Verdict::stochastic:
      lines = {"follows fa3 with a cast rounded stochastically, by its statistics; no bits can show it"};
      break;
    case audit::Verdict::nothing_fits:
      lines = {
          fmt::format("follows no profile in every recorded bit: {} tried; equal bits with fa3, each "
                      "kernel run from its recorded inputs (relative error): {}",
                      grouped(found.tried), agreement_text(found.plain))};
      if (found.best) {
        lines.push_back(fmt::format("nearest: {}, which leaves {} of the difference, {} elements",
                                    found.best->profile, percent(found.best->residual),
                                    grouped(found.best->differing)));
      }
      break;
  }
  if (found.best) {
    for (const profile::Deviation& d : found.best->deviations) lines.push_back(profile::text(d));
  }
  if (!found.equals.empty()) {
    lines.push_back(counted(found.equals.size(), "other deviation") +
                    (found.equals.size() == 1 ? " gives" : " give") + " the same bits here");
  }
  lines.insert(lines.end(), found.notes.begin(), found.notes.end());
  return lines;
}

std::string identification_kind(const Identification& found) {
  switch (found.verdict) {
    case audit::Verdict::unmodified:
      return "fa3, unmodified";
    case audit::Verdict::deviation:
      return explanation_text(*found.best);
    case audit::Verdict::stochastic:
      return "fa3 with a cast rounded stochastically";
    case audit::Verdict::nothing_fits:
      return "no profile fits";
  }
  return "";
}

Json identification_json(const Identification& found) {
  Json json;
  json["capture"] = found.capture;
  json["verdict"] = verdict_name(found.verdict);
  json["exact"] = identified_exactly(found);
  json["best"] = found.best ? explanation_json(*found.best) : Json(nullptr);
  json["equals"] = Json::array();
  for (const Explanation& e : found.equals) json["equals"].push_back(explanation_json(e));
  if (found.stochastic) {
    const audit::StochasticFit& fit = *found.stochastic;
    json["stochastic"] = {{"site", site_name(fit.deviation)}, {"tensor", fit.tensor},
                          {"elements", fit.elements},         {"impossible", fit.impossible},
                          {"bias", json_number(fit.bias)},    {"spread", json_number(fit.spread)}};
  }
  json["born_in"] = found.born_in.empty() ? Json(nullptr) : Json(found.born_in);
  json["born_at"] = found.born ? json_place(found.born->place) : Json(nullptr);
  json["tried"] = found.tried;
  json["notes"] = found.notes;
  json["plain"] = comparison_json(found.plain);
  json["left"] = comparison_json(found.left);
  return json;
}

}  // namespace bitattn::cli
