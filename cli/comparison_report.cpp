#include "cli/comparison_report.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cli/table.hpp"

namespace bitattn::cli {

namespace {

using audit::TensorComparison;
using audit::TensorVerdict;

bool compared(const TensorComparison& t) {
  return t.verdict != TensorVerdict::only_in_a && t.verdict != TensorVerdict::only_in_b;
}

std::string ulps_text(const TensorComparison& t) {
  if (t.differing_bits == 0) return "0";
  std::string text = t.differing_bits > t.nan_differences ? grouped(t.largest_ulps) : "";
  if (t.nan_differences > 0) text += text.empty() ? "NaN" : ", NaN";
  return text;
}

std::string value_text(double value, std::uint32_t bits, bool bf16) {
  return fmt::format("{:.6g} (0x{:0{}x})", value, bits, bf16 ? 4 : 8);
}

}  // namespace

std::string element_values(const audit::ElementPair& pair, bool bf16, const audit::Comparison& comparison) {
  std::string text = fmt::format("{} {}, {} {}", comparison.a, value_text(pair.a, pair.a_bits, bf16),
                                 comparison.b, value_text(pair.b, pair.b_bits, bf16));
  if (pair.ulps != audit::kUlpsOfNan) text += fmt::format(", {} ulp", grouped(pair.ulps));
  return text;
}

namespace {

std::string pair_text(const char* which, const audit::ElementPair& pair, bool bf16, Layout layout,
                      const audit::Comparison& comparison) {
  return fmt::format("      {} at {}\n        {}\n", which, pair.place.text(layout),
                     element_values(pair, bf16, comparison));
}

const char* verdict_name(TensorVerdict verdict) {
  switch (verdict) {
    case TensorVerdict::equal:
      return "equal";
    case TensorVerdict::differs:
      return "differs";
    case TensorVerdict::order_not_compared:
      return "order not fixed, not compared";
    case TensorVerdict::only_in_a:
      return "only in a";
    case TensorVerdict::only_in_b:
      return "only in b";
  }
  return "";
}

Json pair_json(const audit::ElementPair& pair, bool bf16) {
  const auto bits = [bf16](std::uint32_t b) { return fmt::format("0x{:0{}x}", b, bf16 ? 4 : 8); };
  return {{"place", json_place(pair.place)},
          {"a", json_number(pair.a)},
          {"b", json_number(pair.b)},
          {"a_bits", bits(pair.a_bits)},
          {"b_bits", bits(pair.b_bits)},
          {"ulps", pair.ulps == audit::kUlpsOfNan ? Json(nullptr) : Json(pair.ulps)}};
}

}  // namespace

std::string comparison_table(const audit::Comparison& comparison, Layout layout) {
  Table table;
  table.column("tensor", true)
      .column("elements")
      .column("equal bits")
      .column("differing")
      .column("largest ulp");
  table.column("rel. error").column("", true);
  std::string places;
  for (const TensorComparison& t : comparison.tensors) {
    if (!compared(t)) {
      table.row({t.tensor, grouped(t.elements), "", "", "", "",
                 "only in " + (t.verdict == TensorVerdict::only_in_a ? comparison.a : comparison.b)});
      continue;
    }
    std::string remark = t.remark;
    const auto note = [&remark](const std::string& text) { remark += (remark.empty() ? "" : "; ") + text; };
    if (t.equal_in_one_order > 0) note(grouped(t.equal_in_one_order) + " equal to one order of the parts");
    if (t.order_not_compared > 0) note(grouped(t.order_not_compared) + " of open order");
    if (t.not_written > 0) note(grouped(t.not_written) + " never written");
    table.row({t.tensor, grouped(t.elements), grouped(t.equal_bits), grouped(t.differing_bits), ulps_text(t),
               brief_number(t.relative_error), remark});
    if (!t.first) continue;
    places += fmt::format("    {}\n", t.tensor) + pair_text("first", *t.first, t.bf16, layout, comparison);
    if (t.worst && t.differing_bits > 1) places += pair_text("worst", *t.worst, t.bf16, layout, comparison);
  }
  std::string text = table.text(2);
  if (!places.empty()) text += "  where\n" + places;
  return text;
}

std::string comparison_verdict(const audit::Comparison& comparison) {
  if (comparison.compared_tensors() == 0) return "nothing to compare: no tensor is in both";
  std::size_t open = 0;
  std::string differing;
  for (const TensorComparison& t : comparison.tensors) {
    open += t.order_not_compared;
    if (t.verdict == TensorVerdict::differs) {
      differing += fmt::format("{}{} {}", differing.empty() ? "" : ", ", t.tensor, grouped(t.differing_bits));
    }
  }
  std::string text;
  if (differing.empty()) {
    text = fmt::format("every bit equal: {}, {} elements", counted(comparison.compared_tensors(), "tensor"),
                       grouped(comparison.elements()));
  } else {
    text = fmt::format("{} of {} elements differ ({})", grouped(comparison.differing()),
                       grouped(comparison.elements()), differing);
  }
  if (open > 0) text += fmt::format("; order not fixed, not compared: {} elements", grouped(open));
  return text;
}

Json tensor_json(const TensorComparison& t) {
  Json json;
  json["tensor"] = t.tensor;
  json["verdict"] = verdict_name(t.verdict);
  json["elements"] = t.elements;
  if (compared(t)) {
    json["equal_bits"] = t.equal_bits;
    json["differing_bits"] = t.differing_bits;
    json["equal_to_one_order"] = t.equal_in_one_order;
    json["order_not_compared"] = t.order_not_compared;
    json["not_written"] = t.not_written;
    json["nan_differences"] = t.nan_differences;
    json["largest_ulp_distance"] = t.largest_ulps;
    json["relative_error"] = json_number(t.relative_error);
    json["first"] = t.first ? pair_json(*t.first, t.bf16) : Json(nullptr);
    json["worst"] = t.worst ? pair_json(*t.worst, t.bf16) : Json(nullptr);
  }
  if (!t.remark.empty()) json["remark"] = t.remark;
  return json;
}

Json comparison_json(const audit::Comparison& comparison) {
  Json tensors = Json::array();
  for (const TensorComparison& t : comparison.tensors) tensors.push_back(tensor_json(t));
  return {{"capture", comparison.capture},
          {"a", comparison.a},
          {"b", comparison.b},
          {"equal", comparison.equal()},
          {"elements", comparison.elements()},
          {"differing_bits", comparison.differing()},
          {"tensors", tensors}};
}

bool recorded_by_another(const Problem& problem) {
  const std::string kernel = problem.text("kernel");
  return !kernel.empty() && kernel.rfind("flash-attention-3", 0) != 0;
}

bool verified(const audit::Comparison& comparison) {
  return comparison.equal() &&
         std::none_of(comparison.tensors.begin(), comparison.tensors.end(),
                      [](const audit::TensorComparison& t) {
                        return t.verdict == audit::TensorVerdict::only_in_a;  // a: recorded
                      });
}

}  // namespace bitattn::cli
