#include "audit/findings.hpp"

#include <cmath>
#include <limits>

namespace bitattn::audit {

namespace {

std::string findings_group(const std::string& group) {
  return (group == "/" ? "" : group) + "/findings";
}

}  // namespace

std::vector<std::string> row_axes(const Problem& problem) {
  if (problem.layout == Layout::thd) return {"head", "token"};
  return {"batch", "head", "query"};
}

void write_row_findings(CaptureWriter& writer, const std::string& group, const Problem& problem,
                        const RowFindings& rows) {
  const std::vector<std::string> axes = row_axes(problem);
  const auto write = [&](const char* path, const auto& tensor, const char* units, const char* description) {
    writer.write_finding(group, path, tensor, units, description, axes);
  };
  write("row_max", rows.row_max, "raw score (softcap: tanh)",
        "last running maximum m of the row's scores; -inf without a visible key");
  write("row_sum", rows.row_sum, "1", "sum L of the row's exponentials, fp32, as the kernel adds them");
  write("row_max_residue", rows.row_max_residue, "log2",
        "softmax exponent of the row's largest score, fma(m, c, -rn(m*c)) in fp32 with FTZ; 0 in exact "
        "arithmetic, NaN "
        "without a visible key; c is the attribute scale_log2");
  write("largest_block_residue", rows.largest_block_residue, "log2",
        "of the running maxima after each key block, the residue of largest magnitude");
  Fp32Tensor ties(rows.tied_maxima.shape);
  for (std::size_t i = 0; i < ties.size(); ++i) ties.data[i] = static_cast<float>(rows.tied_maxima.data[i]);
  write("tied_maxima", ties, "keys", "visible keys whose score equals the row's maximum");
  if (!rows.block_residues.empty()) {
    std::vector<std::string> block_axes = axes;
    block_axes.emplace_back("key_block");
    writer.write_finding(
        group, "row_max_residue_blocks", rows.block_residues, "log2",
        "residue of the running maximum after each key block, by key block; NaN where the row skips it",
        block_axes);
  }
  writer.write_attributes(findings_group(group), {{"scale_log2", static_cast<double>(rows.scale_log2)}});
  if (problem.dout.empty()) return;
  write("dpsum", rows.dpsum, "gradient of a score", "D = sum_d dO*O as the kernel has it, O rounded to BF16");
  write("lse_log2", rows.lse_log2, "log2", "E = LSE*log2(e) as the backward's exponential reads it");
  write("p_sum_excess", rows.p_sum_excess, "1", "sum_j P' - 1 over the row's visible keys");
  write("score_gradient_sum/before_cast", rows.before_cast, "gradient of a score",
        "sum_j dS over the visible keys, fp32 values before the cast to BF16 (softcap: before its "
        "derivative); 0 in theory");
  write("score_gradient_sum/after_cast", rows.after_cast, "gradient of a score",
        "sum_j BF16(dS) over the visible keys; 0 in theory; NaN with softcap, where no such law holds");
  write("score_gradient_sum/terms/g_minus_d", rows.g_minus_d, "gradient of a score",
        "G - D, G = sum_j P' dP: D made of an O rounded to BF16 and of BF16 numerators");
  write("score_gradient_sum/terms/d_p_excess", rows.d_p_excess, "gradient of a score",
        "D (sum_j P' - 1): row-max residue and rounding of LSE; enters the sum with a minus");
  write("score_gradient_sum/terms/eta", rows.eta, "gradient of a score",
        "fp32 rounding of dP - D and of P (dP - D)");
  write("score_gradient_sum/terms/beta", rows.beta, "gradient of a score", "cast of dS to BF16");
  write("leak", rows.leak, "gradient of a query",
        "norm of softmax_scale * R * (key averaged with the row's P'): what the row sum R puts into dQ");
  write("leak_mean_key", rows.leak_mean_key, "gradient of a query",
        "the same with the plain mean of the row's visible keys, which under-reports");
  write("uncancelled", rows.uncancelled, "gradient of a query",
        "norm of softmax_scale * sum_j |dS| |K_j|: what dQ would be if nothing cancelled");
}

namespace {

Fp64Tensor divided(const Fp64Tensor& a, const Fp64Tensor& b) {
  Fp64Tensor out(a.shape, std::numeric_limits<double>::quiet_NaN());
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (b.data[i] > 0) out.data[i] = a.data[i] / b.data[i];
  }
  return out;
}

/// A figure of every batch element (or packed sequence) and KV head.
void write_witness(CaptureWriter& writer, const std::string& group, const Problem& problem,
                   const Witness& witness) {
  const std::vector<std::string> axes{problem.layout == Layout::thd ? "sequence" : "batch", "kv_head"};
  for (const WitnessOfLaw& law : witness.laws) {
    if (!law.not_checked.empty()) continue;
    const std::string path = std::string("witness/") + law_name(law.law);
    const std::string units = law.law == Law::dk_sum ? "gradient of a key" : "loss";
    const auto write = [&](const char* name, const std::string& unit, const std::string& description,
                           auto figure) {
      Fp64Tensor values({problem.batch, problem.heads_kv}, std::numeric_limits<double>::quiet_NaN());
      for (std::size_t n = 0; n < values.size(); ++n) {
        if (law.heads[n].finite) values.data[n] = figure(law.heads[n]);
      }
      writer.write_finding(group, path + "/" + name, values, unit, description, axes);
    };
    const std::string text = law_text(law.law);
    write("residual", units, "size of what the recorded tensors miss the law by: " + text,
          [](const LawInHead& head) { return head.residual; });
    write("noise", units, "RMS that rounding the stored words to BF16 makes of it",
          [](const LawInHead& head) { return head.noise; });
    write("bound_share", "1",
          "residual over the most that rounding the stored words can make of it (dk_sum: largest over the "
          "columns)",
          [](const LawInHead& head) { return head.bound_share; });
  }
}

}  // namespace

namespace {

/// What remedies do and cost, one element a trial: <group>/findings/remedies.
void write_remedies(CaptureWriter& writer, const std::string& group, const RemediesFinding& finding) {
  Attributes about{{"remedies_not_tried", finding.not_tried}};
  if (finding.report) {
    const std::vector<RemedyTrial>& trials = finding.report->trials;
    const auto write = [&](const char* name, const char* description, auto figure) {
      Fp64Tensor values({trials.size()}, std::numeric_limits<double>::quiet_NaN());
      for (std::size_t t = 0; t < trials.size(); ++t) {
        if (trials[t].not_tried.empty()) values.data[t] = figure(trials[t]);
      }
      writer.write_finding(group, std::string("remedies/") + name, values, "1", description, {"remedy"});
    };
    using T = const RemedyTrial&;
    write("dq_before_cast", "error of dQ before its last cast", [](T t) { return t.dq.relative(); });
    write("dq_stored", "error of the stored dQ", [](T t) { return t.dq_stored.relative(); });
    write("dk_before_cast", "error of dK before its last cast", [](T t) { return t.dk.relative(); });
    write("dk_stored", "error of the stored dK", [](T t) { return t.dk_stored.relative(); });
    write("dv_before_cast", "error of dV before its last cast", [](T t) { return t.dv.relative(); });
    write("dv_stored", "error of the stored dV", [](T t) { return t.dv_stored.relative(); });
    write("leak_left", "what the remaining row sums put into dQ, over |dQ|", [](T t) { return t.leak; });
    write("cost", "share of forward and backward: measured where it was, else by count",
          [](T t) { return t.cost.rank(); });
    std::string names;
    for (const RemedyTrial& t : trials) names += (names.empty() ? "" : ", ") + t.name;
    const auto name = [&](const std::optional<std::size_t>& t) {
      return t ? trials[*t].name : std::string();
    };
    about["remedies"] = names;
    about["remedies_factor"] = finding.report->factor;
    about["cheapest_remedy"] = name(finding.report->cheapest);
    about["cheapest_remedy_with_inputs"] = name(finding.report->cheapest_with_inputs);
    if (finding.kv_head) about["remedies_kv_head"] = static_cast<std::int64_t>(*finding.kv_head);
  }
  writer.write_attributes(findings_group(group), about);
}

}  // namespace

void write_findings(CaptureWriter& writer, const std::string& group, const Problem& problem,
                    const Diagnosis& diagnosis) {
  write_row_findings(writer, group, problem, diagnosis.rows);
  const RowSummary& whole = diagnosis.whole;
  Attributes summary{{"backend", diagnosis.backend},
                     {"rows", static_cast<std::int64_t>(whole.residue.rows)},
                     {"rows_with_residue", static_cast<std::int64_t>(whole.residue.nonzero)},
                     {"largest_residue", whole.residue.largest},
                     {"largest_scaled_max", whole.largest_scaled_max},
                     {"rows_with_tied_maxima", static_cast<std::int64_t>(whole.tied_rows)}};
  if (diagnosis.against_recorded) {
    summary["recorded_elements"] = static_cast<std::int64_t>(diagnosis.against_recorded->elements());
    summary["recorded_elements_differing"] =
        static_cast<std::int64_t>(diagnosis.against_recorded->differing());
  }
  write_remedies(writer, group, diagnosis.remedies);
  if (diagnosis.witness) write_witness(writer, group, problem, *diagnosis.witness);
  if (!diagnosis.with_backward) {
    writer.write_attributes(findings_group(group), summary);
    return;
  }
  const std::vector<std::string> axes = row_axes(problem);
  std::vector<std::string> key_axes = axes;
  key_axes.back() = problem.layout == Layout::thd ? "key_token" : "key";
  key_axes[key_axes.size() - 2] = "kv_head";
  writer.write_finding(
      group, "leak_dk", diagnosis.leak_dk_norm, "gradient of a key",
      "norm of softmax_scale * sum_i R_i P'_ij / (sum_j P'_ij) Q_i: what the row sums put into dK, by key",
      key_axes);
  summary["leak_dk"] = diagnosis.leak_dk;
  const char* of = diagnosis.with_truth ? "the true dQ" : "the emulated dQ before its last cast";
  writer.write_finding(group, "dq_norm", diagnosis.dq_norm, "gradient of a query",
                       std::string("norm of ") + of, axes);
  writer.write_finding(group, "leak_share", divided(diagnosis.rows.leak, diagnosis.dq_norm), "1",
                       std::string("leak over the norm of ") + of, axes);
  writer.write_finding(group, "condition", divided(diagnosis.rows.uncancelled, diagnosis.dq_norm), "1",
                       std::string("uncancelled over the norm of ") + of + ": how much cancels", axes);
  if (diagnosis.with_truth) {
    writer.write_finding(group, "dq_error", diagnosis.dq_error_norm, "gradient of a query",
                         "norm of dQ before its last cast minus the true dQ", axes);
    for (const TensorErrors& errors : diagnosis.errors) {
      summary["relative_error_" + errors.tensor + "_before_cast"] = errors.whole.before_cast.relative();
      summary["relative_error_" + errors.tensor + "_stored"] = errors.whole.stored.relative();
    }
    summary["reference"] = diagnosis.reference;
  }
  summary["score_gradient_sum_before_cast_rms"] = whole.before_cast.rms;
  if (problem.softcap == 0) summary["score_gradient_sum_after_cast_rms"] = whole.after_cast.rms;
  summary["leak"] = whole.leak;
  summary["leak_mean_key"] = whole.leak_mean_key;
  summary["condition"] = whole.condition;
  writer.write_attributes(findings_group(group), summary);
}

}  // namespace bitattn::audit
