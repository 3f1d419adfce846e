#include "audit/find_remedies.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "audit/diagnose.hpp"

namespace bitattn::audit {

namespace {

/// Fused products of one forward and backward of the kernel: 7 for every pair and column.
double products_of_a_run(const Problem& problem) {
  return cost_of(problem, {}).pairs * 7 * static_cast<double>(problem.head_dim);
}

/// The KV head whose query heads have the largest leak.
std::size_t worst_kv_head(const Problem& problem, const Diagnosis& diagnosis) {
  std::size_t worst = 0;
  double largest = -1;
  for (std::size_t h = 0; h < diagnosis.by_head.size(); ++h) {
    const double leak = diagnosis.by_head[h].leak;
    if (std::isnan(leak) || leak <= largest) continue;
    largest = leak;
    worst = h / problem.group();
  }
  return worst;
}

std::string in_billions(double products) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2g", products / 1e9);
  return text;
}

/// Why remedies cannot be judged here; "": they can.
std::string obstacle(const Diagnosis& diagnosis) {
  if (!diagnosis.with_backward) return "the capture has no dout, so there are no gradients to judge";
  if (diagnosis.backend != "fa3")
    return "remedies change fa3, and this is a diagnosis of " + diagnosis.backend;
  if (!diagnosis.anything_finite()) return nothing_finite_text(diagnosis);
  return "";
}

}  // namespace

RemediesFinding find_remedies(const Capture& capture, const Diagnosis& diagnosis, TryRemedies whether,
                              const std::function<void(const std::string& stage, double share)>& progress,
                              double most_products) {
  const Problem& problem = capture.problem;
  RemediesFinding finding;
  finding.not_tried = whether == TryRemedies::never ? "not asked for" : obstacle(diagnosis);
  if (finding.not_tried.empty() && whether == TryRemedies::where_cheap) {
    const double products = products_of_a_run(problem);
    const auto heads = static_cast<double>(std::max<std::size_t>(1, problem.heads_kv));
    const std::string size = "a run takes " + in_billions(products) +
                             " billion fused products, and more than " + in_billions(most_products) +
                             " are tried only with --remedies";
    if (!diagnosis.with_truth) {
      finding.not_tried = "without the reference there is nothing to judge them by; --remedies computes it";
    } else if (!diagnosis.chosen.empty()) {
      finding.not_tried = "rows were asked for, and remedies are judged by all; --remedies tries them";
    } else if (products <= most_products) {
      finding.not_tried = "";
    } else if (problem.heads_kv > 1 && products / heads <= most_products) {
      finding.kv_head = worst_kv_head(problem, diagnosis);
      finding.why_one_head = size;
    } else {
      finding.not_tried = size;
    }
  }
  if (!finding.not_tried.empty()) return finding;
  RemediesOptions options;
  options.names = usual_trials(false);
  options.names.erase(std::remove_if(options.names.begin(), options.names.end(), is_other_function),
                      options.names.end());
  options.kv_head = finding.kv_head;
  if (diagnosis.with_truth) options.reference = diagnosis.reference;
  options.progress = progress;
  finding.report = try_remedies(capture, options);
  return finding;
}

}  // namespace bitattn::audit
