#include "cli/blame_section.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/table.hpp"

namespace bitattn::cli {

namespace {

using audit::Blame;
using audit::Blamed;
using audit::ErrorShares;
using audit::SiteShare;
using profile::Site;

/// A share of |error|^2: "97%", "0.4%", "-12%"; "0" where it would round to that.
std::string share_text(double share) {
  if (!std::isfinite(share)) return "-";
  const double x = share * 100;
  if (std::abs(x) < 0.05) return "0";
  if (std::abs(x) >= 10000) return brief_number(share) + "x";
  return std::abs(x) < 10 ? fmt::format("{:.1f}%", x) : fmt::format("{:.0f}%", x);
}

std::string error_text(const ErrorShares& s) {
  const double relative = s.relative();
  return std::isnan(relative) ? "-" : relative == 0 ? "0" : fmt::format("{:.1e}", relative);
}

const ErrorShares* find(const std::vector<ErrorShares>& tensors, Blamed tensor) {
  for (const ErrorShares& s : tensors) {
    if (s.tensor == tensor) return &s;
  }
  return nullptr;
}

/// The tensor that a verdict is about: dQ, or O without a backward.
Blamed main_tensor(const Blame& blame) {
  return find(blame.tensors, Blamed::dq) != nullptr ? Blamed::dq : Blamed::out;
}

std::string description(Site site) {
  return std::string(profile::kSites[static_cast<std::size_t>(site)].description);
}

/// "dpsum_o_cast 97%, ds_cast 1.2%": the sites that own most, at most three, each at least a hundredth.
std::string owners(const ErrorShares& s) {
  std::string text;
  std::size_t shown = 0;
  for (const SiteShare& share : s.sites) {
    if (share.grouped() || share.fair < 0.01 || shown == 3) break;
    text += (text.empty() ? "" : ", ") + std::string(name(share.site)) + " " + share_text(share.fair);
    ++shown;
  }
  if (s.others_fair >= 0.01 && shown < 3) {
    text += (text.empty() ? "" : ", ") + std::string("others ") + share_text(s.others_fair);
  }
  return text.empty() ? "-" : text;
}

std::string scope_text(const Problem& problem, const Blame& blame) {
  std::string text = fmt::format(
      "Shares of |error|^2, error = stored value - truth, that each rounding site of {} owns (Shapley "
      "values; bitattn sites says what they are). ",
      blame.kernel);
  if (blame.whole) {
    text += fmt::format("Over all {}", counted(blame.rows, "row"));
  } else {
    text += fmt::format("Over {} of {}", grouped(blame.rows), counted(blame.rows_of_capture, "row"));
    if (blame.parts.size() == 1) {
      const audit::RowPart& part = blame.parts.front();
      text += fmt::format(" ({}KV head {}, rows {} to {})",
                          problem.batch > 1 ? fmt::format("sequence {}, ", part.sequence) : "", part.kv_head,
                          part.first_row, part.first_row + part.rows - 1);
    } else {
      text += fmt::format(" ({}, worst first)", counted(blame.parts.size(), "part"));
    }
    if (!blame.kv_heads.empty()) text += "; dk and dv: what these rows put into them";
  }
  return wrapped(text + fmt::format("; {}.", counted(blame.runs, "run")));
}

std::string tensors_text(const Blame& blame) {
  // Sites of any column, by their largest share.
  std::vector<std::pair<double, Site>> rows;
  for (const profile::SiteInfo& info : profile::kSites) {
    double most = 0;
    for (const ErrorShares& s : blame.tensors) {
      for (const SiteShare& share : s.sites) {
        if (share.site == info.site && !share.grouped()) most = std::max(most, std::abs(share.fair));
      }
    }
    if (most >= 0.0005) rows.emplace_back(most, info.site);
  }
  std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  Table table;
  table.column("site", true);
  std::vector<std::string> relative{"|error| / |truth|"};
  std::vector<std::string> others{"all others"};
  for (const ErrorShares& s : blame.tensors) {
    table.column(s.tensor == Blamed::score_gradient_sum
                     ? "row sums"
                     : std::string(audit::kBlamedNames[static_cast<std::size_t>(s.tensor)]));
    relative.push_back(error_text(s));
    others.push_back(s.others > 0 && s.error2 > 0 ? share_text(s.others_fair) : "");
  }
  for (const auto& [most, site] : rows) {
    std::vector<std::string> cells{std::string(name(site))};
    for (const ErrorShares& s : blame.tensors) {
      std::string cell;
      for (const SiteShare& share : s.sites) {
        if (share.site == site) cell = share.grouped() ? "" : s.any_finite() ? share_text(share.fair) : "-";
      }
      cells.push_back(cell);
    }
    table.row(cells);
  }
  table.row(others);
  table.row(relative);
  return table.text();
}

/// The first `width` characters, with ".." behind them where some are left off.
std::string beginning(const std::string& text, std::size_t width) {
  return text.size() <= width ? text : text.substr(0, width - 2) + "..";
}

std::string detail_text(const ErrorShares& s) {
  const std::string tensor(audit::kBlamedNames[static_cast<std::size_t>(s.tensor)]);
  if (!(s.error2 > 0)) return "";
  Table table;
  table.column("of " + tensor, true).column("fair").column("off alone").column("on alone").column("", true);
  std::size_t left = s.others;
  double most_off = 0;
  double most_on = 0;
  for (const SiteShare& share : s.sites) {
    if (share.grouped()) {
      most_off = std::max(most_off, std::abs(share.off_alone));
      most_on = std::max(most_on, std::abs(share.on_alone));
    } else if (std::abs(share.fair) < 0.0005) {
      ++left;
    } else {
      table.row({std::string(name(share.site)), share_text(share.fair), share_text(share.off_alone),
                 share_text(share.on_alone), beginning(description(share.site), 44)});
    }
  }
  if (left > 0) {
    table.row({fmt::format("{} others", left), share_text(s.others_fair), "<= " + share_text(most_off),
               "<= " + share_text(most_on), "each of them"});
  }
  return "\n" + table.text();
}

std::string heads_text(const Blame& blame) {
  if (blame.query_heads.size() < 2) return "";
  constexpr std::size_t kMost = 16;
  const bool backward = main_tensor(blame) == Blamed::dq;
  Table table;
  table.column("head").column("error");
  table.column(backward ? "of dq, worst first" : "of out, worst first", true);
  for (std::size_t n = 0; n < std::min(kMost, blame.query_heads.size()); ++n) {
    const audit::BlamedHead& head = blame.query_heads[n];
    const ErrorShares* s = find(head.tensors, main_tensor(blame));
    table.row({std::to_string(head.head), error_text(*s), owners(*s)});
  }
  std::string text = "\n" + table.text();
  if (blame.query_heads.size() > kMost) {
    text += fmt::format("  and {} more\n", blame.query_heads.size() - kMost);
  }
  return text;
}

std::string rows_text(const Problem& problem, const Blame& blame) {
  if (blame.worst_rows.empty()) return "";
  Table table;
  table.column(problem.layout == Layout::thd ? "seq" : "b").column("h").column("i").column("error");
  table.column("of dq in the worst rows, by score-gradient sum", true);
  for (const audit::BlamedRow& row : blame.worst_rows) {
    const ErrorShares* s = find(row.tensors, Blamed::dq);
    table.row({std::to_string(row.row.sequence), std::to_string(row.row.head), std::to_string(row.row.row),
               error_text(*s), owners(*s)});
  }
  return "\n" + table.text();
}

std::string checks_text(const Blame& blame) {
  std::string text;
  const auto split = [](const audit::SumSplit& s) {
    return fmt::format("{}, {}, {}", share_text(s.before), share_text(s.eta), share_text(s.beta));
  };
  if (std::isfinite(blame.sums_in_closed_form.before)) {
    text +=
        wrapped(fmt::format("Row sums in closed form, (G - D) - D(sum P' - 1), eta, beta: {}; by sites (all "
                            "before dP - D; ds_sub "
                            "and ds_mul; ds_cast): {}.",
                            split(blame.sums_in_closed_form), split(blame.sums_by_sites)));
  }
  if (std::isfinite(blame.left_over)) {
    text += wrapped(fmt::format("Left over, of |error of dq before its cast|^2 against the reference: {}.",
                                blame.left_over == 0 ? "0" : fmt::format("{:.0e}", blame.left_over)));
  }
  return text.empty() ? text : "\n" + text;
}

Json shares_json(const ErrorShares& s) {
  Json sites = Json::array();
  for (const SiteShare& share : s.sites) {
    sites.push_back({{"site", name(share.site)},
                     {"fair", json_number(share.fair)},
                     {"off_alone", json_number(share.off_alone)},
                     {"on_alone", json_number(share.on_alone)}});
  }
  return {{"error", json_number(std::sqrt(s.error2))},
          {"relative_error", json_number(s.relative())},
          {"elements", s.elements},
          {"not_finite", s.not_finite},
          {"sites", sites},
          {"others", {{"sites", s.others}, {"fair", json_number(s.others_fair)}}}};
}

Json tensors_json(const std::vector<ErrorShares>& tensors) {
  Json json;
  for (const ErrorShares& s : tensors) {
    json[std::string(audit::kBlamedNames[static_cast<std::size_t>(s.tensor)])] = shares_json(s);
  }
  return json;
}

Json heads_json(const std::vector<audit::BlamedHead>& heads) {
  Json json = Json::array();
  for (const audit::BlamedHead& head : heads) {
    json.push_back({{"h", head.head}, {"tensors", tensors_json(head.tensors)}});
  }
  return json;
}

Json split_json(const audit::SumSplit& s) {
  return {{"before", json_number(s.before)}, {"eta", json_number(s.eta)}, {"beta", json_number(s.beta)}};
}

}  // namespace

std::string blame_verdict(const Blame& blame) {
  const ErrorShares* s = find(blame.tensors, main_tensor(blame));
  const std::string tensor = main_tensor(blame) == Blamed::dq ? "dQ" : "O";
  if (s == nullptr || !(s->error2 > 0)) return "no rounding moves " + tensor + " here";
  if (s->sites.empty() || s->sites.front().grouped() || s->sites.front().fair < s->others_fair) {
    return fmt::format("no single site; {} small ones together own {} of the stored {}'s squared error",
                       s->others, share_text(s->others_fair), tensor);
  }
  const SiteShare& first = s->sites.front();
  return fmt::format("{}, {}: {} of the stored {}'s squared error", name(first.site), description(first.site),
                     share_text(first.fair), tensor);
}

std::string blame_text(const Problem& problem, const Blame& blame) {
  std::string text = "\nBLAME   which rounding sites own the errors\n" + scope_text(problem, blame);
  text += tensors_text(blame);
  if (const ErrorShares* s = find(blame.tensors, main_tensor(blame))) text += detail_text(*s);
  text += heads_text(blame) + rows_text(problem, blame) + checks_text(blame);
  return text;
}

Json blame_json(const Blame& blame) {
  Json json{{"kernel", blame.kernel},
            {"whole", blame.whole},
            {"rows_looked_at", blame.rows},
            {"rows_of_capture", blame.rows_of_capture},
            {"runs", blame.runs}};
  json["parts"] = Json::array();
  for (const audit::RowPart& part : blame.parts) {
    json["parts"].push_back({{"b", part.sequence},
                             {"kv_head", part.kv_head},
                             {"first_row", part.first_row},
                             {"rows", part.rows}});
  }
  json["tensors"] = tensors_json(blame.tensors);
  json["heads"] = heads_json(blame.query_heads);
  json["kv_heads"] = heads_json(blame.kv_heads);
  json["rows"] = Json::array();
  for (const audit::BlamedRow& row : blame.worst_rows) {
    json["rows"].push_back({{"b", row.row.sequence},
                            {"h", row.row.head},
                            {"i", row.row.row},
                            {"tensors", tensors_json(row.tensors)}});
  }
  json["score_gradient_sums"] = {{"in_closed_form", split_json(blame.sums_in_closed_form)},
                                 {"by_sites", split_json(blame.sums_by_sites)}};
  json["left_over"] = json_number(blame.left_over);
  return json;
}

}  // namespace bitattn::cli
