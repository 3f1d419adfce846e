#include "cli/diagnosis_json.hpp"

#include <cmath>
#include <optional>
#include <string>
#include <variant>

#include "audit/moment.hpp"
#include "cli/blame_section.hpp"
#include "cli/capture_header.hpp"
#include "cli/comparison_report.hpp"
#include "cli/remedies_section.hpp"
#include "cli/witness_section.hpp"

namespace bitattn::cli {

namespace {

Json statistics_json(const Problem& problem, const audit::RowStatistics& s) {
  Json json{{"rows", s.rows}, {"nonzero", s.nonzero}, {"not_finite", s.not_finite}};
  json["rms"] = s.rows > 0 ? json_number(s.rms) : Json(nullptr);
  json["largest"] = s.rows > 0 ? json_number(s.largest) : Json(nullptr);
  if (s.rows > 0) {
    json["largest_at"] = json_place(
        audit::place_of(problem, problem.row_shape(), audit::Axes::query_rows, true, {}, s.largest_at));
  }
  return json;
}

Json summary_json(const Problem& problem, const audit::Diagnosis& d, const audit::RowSummary& s) {
  Json json;
  Json residue = statistics_json(problem, s.residue);
  residue["largest_over_key_blocks"] = json_number(s.largest_block_residue);
  residue["largest_scaled_max"] = json_number(s.largest_scaled_max);
  json["row_max_residue"] = residue;
  json["tied_maxima"] = {{"rows", s.tied_rows}, {"most", s.most_ties}};
  if (!d.with_backward) return json;
  json["p_sum_excess"] = statistics_json(problem, s.p_sum_excess);
  json["score_gradient_sum"] = {{"before_cast", statistics_json(problem, s.before_cast)},
                                {"after_cast", statistics_json(problem, s.after_cast)},
                                {"terms",
                                 {{"g_minus_d", statistics_json(problem, s.g_minus_d)},
                                  {"d_p_excess", statistics_json(problem, s.d_p_excess)},
                                  {"eta", statistics_json(problem, s.eta)},
                                  {"beta", statistics_json(problem, s.beta)}}}};
  json["leak"] = {{"p_weighted_key", json_number(s.leak)},
                  {"mean_key", json_number(s.leak_mean_key)},
                  {"rows", s.leak_rows},
                  {"relative_to", d.with_truth ? "true dq" : "emulated dq"}};
  json["condition"] = json_number(s.condition);
  if (d.with_truth) json["dq_error"] = json_number(s.dq_error);
  return json;
}

Json error_json(const audit::ErrorPair& e) {
  return {{"before_cast", json_number(e.before_cast.relative())},
          {"stored", json_number(e.stored.relative())},
          {"elements", e.stored.elements},
          {"not_finite", e.stored.not_finite}};
}

Json row_json(const audit::Diagnosis& d, const audit::RowId& row) {
  const audit::RowFindings& f = d.rows;
  const std::size_t i = row.index;
  const double dq = d.dq_norm.data[i];
  const auto share = [dq](double x) { return dq > 0 ? json_number(x / dq) : Json(nullptr); };
  Json json{{"b", row.sequence}, {"h", row.head}, {"i", row.row}};
  json["row_max"] = json_number(static_cast<double>(f.row_max.data[i]));
  json["scaled_max"] =
      json_number(static_cast<double>(f.row_max.data[i]) * static_cast<double>(f.scale_log2));
  json["row_max_residue"] = json_number(static_cast<double>(f.row_max_residue.data[i]));
  json["tied_maxima"] = f.tied_maxima.data[i];
  json["p_sum_excess"] = json_number(f.p_sum_excess.data[i]);
  json["before_cast"] = json_number(f.before_cast.data[i]);
  json["after_cast"] = json_number(f.after_cast.data[i]);
  json["terms"] = {{"g_minus_d", json_number(f.g_minus_d.data[i])},
                   {"d_p_excess", json_number(f.d_p_excess.data[i])},
                   {"eta", json_number(f.eta.data[i])},
                   {"beta", json_number(f.beta.data[i])}};
  json["leak"] = json_number(f.leak.data[i]);
  json["leak_share"] = share(f.leak.data[i]);
  json["leak_mean_key_share"] = share(f.leak_mean_key.data[i]);
  json["condition"] = share(f.uncancelled.data[i]);
  json["dq_norm"] = json_number(dq);
  if (d.with_truth) json["dq_error"] = share(d.dq_error_norm.data[i]);
  return json;
}

/// An attribute as text, null where it is absent or empty.
Json attribute_json(const Problem& problem, const char* name) {
  const std::string text = problem.text(name);
  return text.empty() ? Json(nullptr) : Json(text);
}

}  // namespace

Json diagnosis_json(const Capture& capture, const audit::Diagnosis& d, std::size_t worst) {
  const Problem& problem = capture.problem;
  Json json = capture_json(capture, d.inputs);
  json["layer"] = attribute_json(problem, "layer");
  const std::optional<std::int64_t> step = audit::whole_number(problem.attributes, "step");
  json["step"] = step ? Json(*step) : Json(nullptr);
  json["heads_kept"] = attribute_json(problem, "heads_kept");
  const std::int64_t launched = problem.integer("launch_heads_q", 0);
  json["launch_heads_q"] = launched > 0 ? Json(launched) : Json(nullptr);
  json["backend"] = d.backend;
  json["against_recorded"] = d.against_recorded ? comparison_json(*d.against_recorded) : Json(nullptr);
  json["witness"] = d.witness ? witness_json(*d.witness) : Json(nullptr);
  json["scale_log2"] = json_number(static_cast<double>(d.rows.scale_log2));
  json.update(summary_json(problem, d, d.whole));
  if (d.with_backward) {
    json["leak"]["into_dk"] = json_number(d.leak_dk);
    Json heads = Json::array();
    for (const double share : d.leak_dk_by_head) heads.push_back(json_number(share));
    json["leak"]["into_dk_by_kv_head"] = heads;
  }
  json["reference"] = d.with_truth ? Json(d.reference) : Json(nullptr);
  if (!d.errors.empty()) {
    Json errors;
    for (const audit::TensorErrors& e : d.errors) {
      if (e.whole.stored.elements == 0) continue;
      errors[e.tensor] = error_json(e.whole);
      Json heads = Json::array();
      for (const audit::ErrorPair& head : e.by_head) heads.push_back(error_json(head));
      errors[e.tensor]["heads"] = heads;
    }
    errors["lse"] = {{"largest_absolute", json_number(d.largest_lse_error)}};
    json["errors"] = errors;
  }
  json["heads"] = Json::array();
  for (std::size_t h = 0; h < d.by_head.size(); ++h) {
    Json head{{"h", h}};
    head.update(summary_json(problem, d, d.by_head[h]));
    if (d.with_backward) {
      head["leak"]["of_all_heads"] =
          d.whole.dq_norm > 0 ? json_number(d.by_head[h].leak_norm / d.whole.dq_norm) : Json(nullptr);
    }
    json["heads"].push_back(head);
  }
  json["rows"] = Json::array();
  if (d.with_backward) {
    const std::vector<audit::RowId> rows =
        d.chosen.empty() ? audit::worst_rows(problem, d.drift(problem), worst) : d.chosen;
    for (const audit::RowId& row : rows) json["rows"].push_back(row_json(d, row));
  }
  json["remedies"] = remedies_section_json(d.remedies);
  if (d.blame) json["blame"] = blame_json(*d.blame);
  json["not_finite_outputs"] = specials_json(d.specials);
  json["notes"] = d.notes;
  return json;
}

std::string drift_pointer(const Json& one) {
  return number_at(one, "/softcap") > 0 ? "/score_gradient_sum/before_cast"
                                        : "/score_gradient_sum/after_cast";
}

}  // namespace bitattn::cli
