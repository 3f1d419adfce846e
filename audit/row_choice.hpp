#pragma once
// Which query rows a diagnosis looks at: all, the worst N, or a list.

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "datasets/problem.hpp"

namespace bitattn::audit {

/// Rows [first, last] of one or all heads and sequences.
struct RowRange {
  std::optional<std::size_t> sequence, head;
  std::size_t first = 0, last = 0;
};

struct RowChoice {
  std::size_t worst = 0;  ///< the N rows with the largest score-gradient sums; 0 with an empty list: all rows
  std::vector<RowRange> ranges;
  bool all() const { return worst == 0 && ranges.empty(); }
};

/// "12": the 12 worst rows. A list with a comma, a dash or a colon: "5,17", "100-120", "h:i" or "b:h:i" (each
/// with ranges for i); one row alone is "17-17". Throws InputError for anything else.
RowChoice parse_rows(const std::string& text);

/// One query row.
struct RowId {
  std::size_t sequence = 0, head = 0, row = 0;
  std::size_t index = 0;  ///< in a tensor of Problem::row_shape()
};

/// The rows of a choice's ranges that the problem has and that see a key. Throws InputError for a range
/// outside the problem.
std::vector<RowId> chosen_rows(const Problem& problem, const RowChoice& choice);

/// All rows that see a key and have a finite value, by falling magnitude of the value; the first `most` of
/// them.
std::vector<RowId> worst_rows(const Problem& problem, const Fp64Tensor& values, std::size_t most);

}  // namespace bitattn::audit
