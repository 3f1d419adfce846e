// bitattn identify: which kernel made these bits?

#include "cli/identify.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "audit/identify.hpp"
#include "audit/inputs.hpp"
#include "cli/capture_header.hpp"
#include "cli/capture_list.hpp"
#include "cli/command.hpp"
#include "cli/comparison_report.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cli/table.hpp"

namespace bitattn::cli {

namespace {

using audit::Explanation;
using audit::Identification;

struct Options {
  std::vector<std::string> files;
  bool without_remedies = false;
};

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

bool holds(const Identification& found) {
  return found.verdict == audit::Verdict::unmodified || found.verdict == audit::Verdict::deviation;
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

std::string report(const Capture& capture, const Identification& found) {
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

Json identification_json(const Identification& found) {
  Json json;
  json["capture"] = found.capture;
  json["verdict"] = verdict_name(found.verdict);
  json["exact"] = holds(found);
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

int run(const Options& options, const CommonOptions& common) {
  audit::IdentifyOptions how;
  how.with_remedies = !options.without_remedies;
  Progress progress(common.quiet);
  how.progress = [&](const std::string& what, double share) { progress.update(what, share); };
  Json json = Json::array();
  std::size_t captures = 0;
  std::size_t good = 0;
  const std::vector<std::string> arguments = expand_folders(options.files);
  const std::size_t failed = for_each_capture(arguments, true, [&](const Capture& capture) {
    progress.subject(capture.name);
    const Identification found = audit::identify(capture, how);
    progress.clear();
    good += holds(found) ? 1 : 0;
    if (common.json) {
      json.push_back(identification_json(found));
    } else {
      print((captures > 0 ? "\n" : "") + report(capture, found));
    }
    ++captures;
  });
  if (common.json) {
    print_json({{"exact", good == captures && failed == 0}, {"files_failed", failed}, {"captures", json}});
  }
  if (failed > 0) return kBadInput;
  return good == captures ? kHolds : kDoesNotHold;
}

}  // namespace

void add_identify(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command =
      app.add_subcommand("identify",
                         "Which kernel made these bits: the profile, remedy or deviation that gives every "
                         "recorded bit. Exit 0 only if one does");
  add_common_options(*command, common);
  const auto options = std::make_shared<Options>();
  command->add_option("files", options->files, "Captures (FILE.h5, FILE.h5:/group) or folders")->required();
  command->add_flag("--without-remedies", options->without_remedies, "Do not try fa3's remedies");
  command->callback(
      [options, &common, &action] { action = [options, &common] { return run(*options, common); }; });
}

}  // namespace bitattn::cli
