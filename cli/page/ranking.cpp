#include "cli/page/ranking.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/page/charts.hpp"
#include "cli/page/html.hpp"
#include "cli/table.hpp"

namespace bitattn::cli::page {

namespace {

constexpr std::size_t kLayers = 32;  // lines of the chart and of the table
constexpr std::size_t kFollowed = 5;
constexpr std::size_t kSteps = 24;
constexpr std::size_t kHeads = 16;
constexpr std::size_t kNameColumns = 32;  // of a layer in the chart, which stands beside its name

std::string layer_pointer(std::size_t layer) {
  return fmt::format("/layers/{}", layer);
}

std::string step_pointer(std::size_t layer, std::size_t step) {
  return fmt::format("/layers/{}/steps/{}", layer, step);
}

std::string step_text(const audit::RankedStep& step) {
  return step.step ? std::to_string(*step.step) : "–";
}

std::string heading(const audit::Ranking& ranked) {
  const std::size_t first = ranked.fp32_first.size();
  std::string text = "<p class=\"kicker\">bitattn diagnose</p>";
  // A run that ends in NaN is told so first: what was measured before it is no all-clear.
  const std::string not_finite = not_finite_text(ranked);
  const std::string verdict = escaped(verdict_text(ranked));
  if (not_finite.empty()) {
    text += "<h1>" + verdict + "</h1>";
  } else {
    text += "<h1>" + escaped(not_finite) + "</h1><p class=\"lead\">" + verdict + "</p>";
  }
  if (first == 0) return text;
  text += "<p class=\"lead\">Layers whose backward should go to FP32 first, in this order: ";
  for (std::size_t n = 0; n < first; ++n) {
    text += (n == 0 ? "<b>" : ", <b>") + escaped(ranked.fp32_first[n]) + "</b>";
  }
  return text + ".</p>";
}

std::string whose(const Json& ranking, const audit::Ranking& ranked, const RankingTerms& terms) {
  std::string text;
  const std::string of = " of " + counted(ranked.captures, "capture") + " ";
  if (ranked.reproduced > 0) {
    text += "<p class=\"state good\">Bits: " + figure(ranking, "/figures_of/recorded_kernel", Style::count) +
            of + "hold what " + escaped(terms.backend) +
            " gives, so what is shown happened in the real kernel.</p>";
  }
  const std::string others = emulated_only_text(ranked);
  if (!others.empty()) {
    text += "<p class=\"state\">In " + figure(ranking, "/figures_of/emulated_kernel", Style::count) + of +
            "the figures are those of the emulated kernel " + escaped(terms.backend) +
            " on the same inputs: " + escaped(others) + ".</p>";
  }
  const std::string left_out = left_out_text(terms);
  if (!left_out.empty()) {
    text +=
        "<p class=\"note\">Not looked at, as it takes long on many captures: " + escaped(left_out) + ".</p>";
  }
  return text;
}

std::string layers(const Json& ranking, const audit::Ranking& ranked, const RankingTerms& terms) {
  std::vector<double> values{audit::kLeakOfCasts};
  std::vector<PointRow> rows;
  for (std::size_t n = 0; n < std::min(kLayers, ranked.layers.size()); ++n) {
    const audit::RankedLayer& layer = ranked.layers[n];
    const audit::RankedStep& last = layer.ranked_step();
    PointRow row;
    row.label = escaped(shortened(layer.layer, kNameColumns));
    row.value = last.figures.leak;
    row.figure = figure(ranking, step_pointer(n, layer.ranked) + "/leak", Style::share);
    row.remark = "step " + step_text(last);
    values.push_back(row.value);
    if (layer.ranked > 0) {
      row.hollow = layer.steps.front().figures.leak;
      values.push_back(*row.hollow);
      row.remark = "steps " + step_text(layer.steps.front()) + " to " + step_text(last) + ", times " +
                   figure(ranking, layer_pointer(n) + "/leak_growth");
    }
    const std::string not_finite = not_finite_text(layer);
    if (!not_finite.empty()) row.remark += "; " + not_finite;
    rows.push_back(std::move(row));
  }
  std::string content =
      point_chart("leak", DecadeAxis::around(values), rows,
                  Mark{audit::kLeakOfCasts, "the BF16 casts anyway, " + share_text(audit::kLeakOfCasts)});
  if (ranked.layers.size() > kLayers)
    content += fmt::format("<p class=\"note\">And {} more.</p>", ranked.layers.size() - kLayers);
  return section("Layers by leak",
                 std::string("What the score-gradient sums put into dQ, share of the ") +
                     (terms.with_reference ? "true" : "emulated") +
                     " |dQ|. Dot: at the layer’s last step where it is known. Ring: at its first.",
                 content);
}

std::vector<Column> figure_columns() {
  return {{"layer", "left"},
          {"step", ""},
          {"leak<br/>of |dQ|", "leak"},
          {"dQ error<br/>of |dQ|", ""},
          {"condition", ""},
          {"residue,<br/>largest", "residue"},
          {"score-gradient<br/>sum, RMS", "drift"},
          {"mean |q|", ""},
          {"mean |k|", ""},
          {"largest<br/>logit", ""}};
}

std::string over_steps(const Json& ranking, const audit::Ranking& ranked) {
  std::vector<std::vector<std::string>> rows;
  bool left_out = false;
  for (std::size_t n = 0; n < std::min(kFollowed, ranked.layers.size()); ++n) {
    const audit::RankedLayer& layer = ranked.layers[n];
    left_out = left_out || layer.steps.size() > kSteps;
    for (const std::size_t s : some_steps(layer.steps.size(), kSteps)) {
      const std::string at = step_pointer(n, s);
      rows.push_back({s == 0 ? escaped(layer.layer) : "", step_text(layer.steps[s]),
                      figure(ranking, at + "/leak", Style::share),
                      figure(ranking, at + "/dq_error", Style::share), figure(ranking, at + "/condition"),
                      figure(ranking, at + "/residue"), figure(ranking, at + "/drift"),
                      figure(ranking, at + "/mean_q_norm"), figure(ranking, at + "/mean_k_norm"),
                      figure(ranking, at + "/largest_logit")});
    }
  }
  return section(
      "Over steps", "Of the layers that leak most.",
      table(figure_columns(), rows) +
          (left_out ? fmt::format("<p class=\"note\">{} steps of each; --json has them all.</p>", kSteps)
                    : ""));
}

std::string heads(const Json& ranking, const audit::Ranking& ranked) {
  if (ranked.heads.empty()) return "";
  std::vector<std::vector<std::string>> rows;
  for (std::size_t n = 0; n < std::min(kHeads, ranked.heads.size()); ++n) {
    rows.push_back({escaped(ranked.heads[n].layer), escaped(ranked.heads[n].head),
                    figure(ranking, fmt::format("/heads/{}/leak", n), Style::share)});
  }
  std::string content =
      table({{"layer", "left"}, {"head", ""}, {"leak<br/>of the layer’s |dQ|", "leak"}}, rows);
  if (ranked.heads.size() > kHeads)
    content += fmt::format("<p class=\"note\">And {} more.</p>", ranked.heads.size() - kHeads);
  return section(
      "Heads by leak",
      "At their layer’s last step with a known leak, as shares of the whole layer’s |dQ|: their squares "
      "add up to the square of the layer’s leak.",
      content);
}

}  // namespace

std::string ranking_introduction(const Json& ranking, const audit::Ranking& ranked,
                                 const RankingTerms& terms) {
  return "<div data-ranking=\"ranking\">" + heading(ranked) + whose(ranking, ranked, terms) +
         layers(ranking, ranked, terms) + over_steps(ranking, ranked) + heads(ranking, ranked) + "</div>\n";
}

}  // namespace bitattn::cli::page
