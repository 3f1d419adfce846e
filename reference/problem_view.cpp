#include "reference/problem_view.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace bitattn::reference {

void check(const ProblemView& problem) {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
  };
  for (const Sequence& sequence : problem.sequences) {
    require(sequence.q_length == 0 || problem.q.data != nullptr, "reference: q is needed");
    require(sequence.k_length == 0 || (problem.k.data != nullptr && problem.v.data != nullptr),
            "reference: k and v are needed");
  }
  require(problem.heads_kv > 0 && problem.heads_q % problem.heads_kv == 0,
          "reference: heads_q must be a multiple of heads_kv");
  require(problem.head_dim > 0 && problem.head_dim_v > 0, "reference: head sizes must be positive");
  require(std::isfinite(problem.softmax_scale), "reference: softmax_scale must be finite");
  require(std::isfinite(problem.softcap) && problem.softcap >= 0,
          "reference: softcap must be finite and not negative");
}

KeyRange visible_keys(const ProblemView& problem, const Sequence& sequence, std::size_t row) {
  const auto keys = static_cast<std::int64_t>(sequence.k_length);
  const auto queries = static_cast<std::int64_t>(sequence.q_length);
  // The key on the diagonal of this row.
  const std::int64_t diagonal = static_cast<std::int64_t>(row) + (problem.top_left ? 0 : keys - queries);
  std::int64_t first = 0;
  std::int64_t last = keys;
  if (problem.causal) last = std::min(last, diagonal + 1);
  if (problem.window_right >= 0) last = std::min(last, diagonal + problem.window_right + 1);
  if (problem.window_left >= 0) first = std::max(first, diagonal - problem.window_left);
  if (first >= last) return {};
  return {static_cast<std::size_t>(first), static_cast<std::size_t>(last)};
}

double visible_pairs(const ProblemView& problem) {
  double pairs = 0;
  for (const Sequence& sequence : problem.sequences) {
    for (std::size_t i = 0; i < sequence.q_length; ++i) {
      pairs += static_cast<double>(visible_keys(problem, sequence, i).size());
    }
  }
  return pairs * static_cast<double>(problem.heads_q);
}

}  // namespace bitattn::reference
