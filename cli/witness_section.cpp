#include "cli/witness_section.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/table.hpp"

namespace bitattn::cli {

namespace {

using audit::LawInHead;
using audit::Witness;
using audit::WitnessOfLaw;

/// "1 head", "3 of 8 heads": a head here is a KV head of one batch element or sequence.
std::string heads_text(std::size_t some, std::size_t all) {
  return some == all ? counted(all, "head") : fmt::format("{} of {}", grouped(some), counted(all, "head"));
}

std::string verdict_of(const WitnessOfLaw& law) {
  if (!law.not_checked.empty()) return law.not_checked;
  const std::size_t finite = law.finite();
  std::string text;
  if (law.broken() > 0) {
    text = "broken in " + heads_text(law.broken(), law.heads.size());
  } else if (finite > 0) {
    text = "holds";
  }
  if (finite < law.heads.size()) {
    text += (text.empty() ? "" : "; ") + std::string("NaN or infinities in ") +
            heads_text(law.heads.size() - finite, law.heads.size());
  }
  return text;
}

/// The largest over the laws, NaN where none was checked.
double farthest_share(const Witness& witness) {
  double farthest = std::nan("");
  for (const WitnessOfLaw& law : witness.laws) {
    const LawInHead* head = law.farthest();
    if (head != nullptr && !(head->bound_share <= farthest)) farthest = head->bound_share;
  }
  return farthest;
}

/// Two digits, or as many more as tell on which side of 1 a share of the bound is.
std::string bound_text(double share) {
  std::string text = brief_number(share);
  const auto side = [](double x) { return std::abs(x - 1) < 1e-9 ? 0 : x > 1 ? 1 : -1; };
  for (int digits = 3; std::isfinite(share) && side(std::stod(text)) != side(share); ++digits) {
    text = fmt::format("{:.{}g}", share, digits);
  }
  return text;
}

Json head_json(audit::Law law, const LawInHead& head) {
  Json json{{"b", head.sequence},
            {"kv_head", head.kv_head},
            {"residual", json_number(head.residual)},
            {"noise", json_number(head.noise)},
            {"multiple", json_number(head.multiple())},
            {"multiple_of_least_noise", json_number(head.multiple_of_least())},
            {"bound_share", json_number(head.bound_share)}};
  if (law == audit::Law::dk_sum) json["d"] = head.column;
  json["verdict"] = !head.finite ? "not finite" : head.broken() ? "broken" : "holds";
  return json;
}

}  // namespace

std::string witness_section(const Capture& capture, const Witness& witness) {
  if (!capture.has_recorded()) return "";
  std::string text =
      "\nWITNESS   laws of exact gradients in the recorded tensors alone; noise: rounding to BF16 as "
      "stored\n";
  Table table;
  table.column("law", true).column("x noise").column("largest").column("of bound").column("", true);
  for (const WitnessOfLaw& law : witness.laws) {
    const LawInHead* largest = law.largest();
    table.row({audit::law_text(law.law), brief_number(law.multiple()),
               largest != nullptr ? brief_number(largest->multiple()) : "-",
               largest != nullptr ? bound_text(law.farthest()->bound_share) : "-", verdict_of(law)});
  }
  return text + table.text();
}

std::string witness_heads(const Capture& capture, const Witness& witness, std::size_t most) {
  struct Row {
    audit::Law law;
    const LawInHead* head;
  };
  std::vector<Row> rows;
  for (const WitnessOfLaw& law : witness.laws) {
    for (const LawInHead& head : law.heads) rows.push_back({law.law, &head});
  }
  if (rows.size() <= witness.laws.size()) return "";
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    if (!b.head->finite) return a.head->finite;
    return a.head->finite && a.head->bound_share > b.head->bound_share;
  });
  std::string text = "\nBY HEAD   nearest to its bound, or farthest beyond it, first\n";
  Table table;
  table.column(capture.problem.layout == Layout::thd ? "seq" : "b").column("kv head").column("law", true);
  table.column("residual").column("noise").column("x noise").column("of bound").column("", true);
  for (std::size_t n = 0; n < std::min(most, rows.size()); ++n) {
    const LawInHead& head = *rows[n].head;
    table.row({std::to_string(head.sequence), std::to_string(head.kv_head), audit::law_text(rows[n].law),
               brief_number(head.residual), brief_number(head.noise),
               brief_number(head.finite ? head.multiple() : std::nan("")), bound_text(head.bound_share),
               !head.finite                        ? "NaN or infinities"
               : !head.broken()                    ? ""
               : rows[n].law == audit::Law::dk_sum ? fmt::format("broken, d {}", head.column)
                                                   : "broken"});
  }
  text += table.text();
  if (rows.size() > most) text += fmt::format("  and {} more\n", grouped(rows.size() - most));
  return text;
}

std::string witness_remark(const Witness& witness) {
  if (witness.laws[0].broken() == 0) return "";
  return "A kernel that computes in BF16 inside breaks sum_j dK_j = 0 without any bug in it; bitattn "
         "diagnose "
         "says which rounding it is.";
}

std::string witness_verdict(const Witness& witness) {
  if (!witness.any_checked()) return "nothing to check: the tensors of no law were recorded";
  std::string broken;
  std::size_t finite = 0;
  std::size_t checked = 0;
  for (const WitnessOfLaw& law : witness.laws) {
    checked += law.not_checked.empty() ? 1 : 0;
    finite += law.finite();
    if (law.broken() == 0) continue;
    broken += fmt::format("{}{} in {}", broken.empty() ? "broken: " : ", ", audit::law_text(law.law),
                          heads_text(law.broken(), law.heads.size()));
  }
  if (!broken.empty()) return broken;
  if (finite == 0) return "nothing to judge: the tensors hold NaN or infinities in every head";
  return checked == 3 ? "every law holds" : fmt::format("{} of 3 laws can be checked; they hold", checked);
}

Json witness_json(const Witness& witness) {
  Json json = Json::object();
  for (const WitnessOfLaw& law : witness.laws) {
    Json one{{"law", audit::law_text(law.law)}};
    one["verdict"] = !law.not_checked.empty() ? "not checked"
                     : law.broken() > 0       ? "broken"
                     : law.finite() > 0       ? "holds"
                                              : "not finite";
    one["not_checked"] = law.not_checked.empty() ? Json(nullptr) : Json(law.not_checked);
    one["multiple"] = json_number(law.multiple());
    one["multiple_of_least_noise"] = json_number(law.multiple_of_least());
    const LawInHead* farthest = law.farthest();
    one["bound_share"] = farthest != nullptr ? json_number(farthest->bound_share) : Json(nullptr);
    one["broken"] = law.broken();
    one["not_finite"] = law.heads.size() - law.finite();
    one["heads"] = Json::array();
    for (const LawInHead& head : law.heads) one["heads"].push_back(head_json(law.law, head));
    json[audit::law_name(law.law)] = std::move(one);
  }
  return json;
}

std::string witness_overview(std::vector<WitnessLine> lines) {
  std::stable_sort(lines.begin(), lines.end(), [](const WitnessLine& a, const WitnessLine& b) {
    const double x = farthest_share(a.witness);
    const double y = farthest_share(b.witness);
    return std::isnan(y) ? !std::isnan(x) : x > y;
  });
  Table table;
  table.column("capture", true).column("dK sum").column("dQ, dK").column("out, dV").column("of bound");
  table.column("", true);
  for (const WitnessLine& line : lines) {
    const Witness& w = line.witness;
    table.row({shortened(line.capture, 44), brief_number(w.laws[0].multiple()),
               brief_number(w.laws[1].multiple()), brief_number(w.laws[2].multiple()),
               bound_text(farthest_share(w)),
               !w.any_checked()                ? "nothing recorded"
               : w.broken()                    ? "broken"
               : std::isnan(farthest_share(w)) ? "NaN"
                                               : "holds"});
  }
  std::string remark;
  for (const WitnessLine& line : lines) {
    if (remark.empty()) remark = witness_remark(line.witness);
  }
  return table.text(0) + "\n" +
         wrapped(
             "Farthest beyond its bound first. dK sum: sum_j dK_j = 0; dQ, dK: sum_i q.dq = sum_j k.dk; out, "
             "dV: sum_i "
             "out.dout = sum_j v.dv; each as a multiple of the noise that rounding the stored words to BF16 "
             "makes. of "
             "bound: share of the most that this rounding can make; above 1 a law is broken "
             "(docs/witness.md). " +
                 remark,
             0);
}

}  // namespace bitattn::cli
