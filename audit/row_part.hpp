#pragma once
// Parts of a capture that are small enough to be run again and again: some consecutive rows of the query
// heads of one KV head, as a problem of its own in which every row gets the bits it has in the whole.

#include <cstddef>
#include <vector>

#include "audit/row_choice.hpp"
#include "datasets/problem.hpp"

namespace bitattn::audit {

/// Rows [first_row, first_row + rows) of one sequence, all query heads of one KV head.
struct RowPart {
  std::size_t sequence = 0, kv_head = 0;
  std::size_t first_row = 0, rows = 0;
  /// [query head of the group * rows + row], 1: this row counts; empty: all do. Rows that do not count are
  /// there because a kernel takes another order for one row alone; their dout is set to zero, so that they
  /// put nothing into dK and dV.
  std::vector<char> counted;

  bool counts(std::size_t head_of_group, std::size_t row) const {
    return counted.empty() || counted[head_of_group * rows + row] != 0;
  }
};

/// The part as a problem: one sequence, one KV head; its row r is row first_row + r. With finite inputs out,
/// lse, dQ and the score-gradient sums of its rows have the bits of the whole (but for packed sequences that
/// are shorter than their window, which take other tiles alone); dK and dV hold what these rows put into
/// them.
Problem part_problem(const Problem& problem, const RowPart& part);

/// Can rows be cut out of this problem's sequences at all? Not under a window that looks to the right, whose
/// tiles depend on the sequence's length.
bool can_cut_rows(const Problem& problem);

/// (query, key) pairs that the part's rows see, over the heads of the group.
double visible_pairs(const Problem& problem, const RowPart& part);

/// Every row of every head: one part a sequence and KV head.
std::vector<RowPart> whole_parts(const Problem& problem);

/// Parts worth looking at, worst first, with up to about `most_pairs` visible pairs (at least one part): KV
/// heads by badness^2 over size^2, summed over their rows; of a worst head that does not fit, the blocks of
/// 64 rows with the most badness^2. `badness`, `size`: tensors of row_shape(); rows without a finite value
/// count for nothing.
std::vector<RowPart> worst_parts(const Problem& problem, const Fp64Tensor& badness, const Fp64Tensor& size,
                                 double most_pairs);

/// The rows asked for, in as few parts as they need, in the order given, until `most_pairs` are reached (at
/// least one part). Where rows cannot be cut out, whole sequences in which only those rows count.
std::vector<RowPart> parts_of_rows(const Problem& problem, const std::vector<RowId>& rows, double most_pairs);

}  // namespace bitattn::audit
