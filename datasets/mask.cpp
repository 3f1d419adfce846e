// Which keys a query sees: causal masks and windows as the mathematics has them, for both alignments.

#include <algorithm>

#include "datasets/problem.hpp"

namespace bitattn {

bool visible(const Problem& problem, std::int64_t i, std::int64_t j, std::int64_t sq, std::int64_t sk) {
  if (i < 0 || i >= sq) return false;
  const KeyRange range = visible_keys(problem, i, sq, sk);
  return range.first <= j && j < range.last;
}

KeyRange visible_keys(const Problem& problem, std::int64_t i, std::int64_t sq, std::int64_t sk) {
  // The key that stands on the diagonal of row i.
  const std::int64_t diagonal = problem.causal_alignment == CausalAlignment::bottom_right ? i + sk - sq : i;
  const std::int64_t right = problem.causal ? 0 : problem.window_right;
  const std::int64_t left = problem.window_left;
  KeyRange range{0, sk};
  if (left >= 0) range.first = std::max<std::int64_t>(0, diagonal - left);
  if (right >= 0) range.last = std::min<std::int64_t>(sk, diagonal + right + 1);
  return range;
}

}  // namespace bitattn
