#pragma once
// What the reference is given: views of plain memory and the numbers of one attention call. Nothing here
// computes.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bitattn::reference {

/// BF16 words; element (token, head, d) is data[token * token_stride + head * head_stride + d].
struct TensorView {
  const std::uint16_t* data = nullptr;
  std::ptrdiff_t token_stride = 0;
  std::ptrdiff_t head_stride = 0;

  const std::uint16_t* row(std::size_t token, std::size_t head) const {
    return data + static_cast<std::ptrdiff_t>(token) * token_stride +
           static_cast<std::ptrdiff_t>(head) * head_stride;
  }
};

/// Where one batch element or packed sequence lies along the token axis, in tokens.
struct Sequence {
  std::size_t q_begin = 0, q_length = 0;
  std::size_t k_begin = 0, k_length = 0;
};

struct ProblemView {
  TensorView q, k;     ///< head_dim wide
  TensorView v, dout;  ///< head_dim_v wide; dout.data == nullptr: forward only
  std::vector<Sequence> sequences;
  std::size_t heads_q = 1, heads_kv = 1;
  std::size_t head_dim = 0, head_dim_v = 0;
  double softmax_scale = 1;  ///< exact as given
  double softcap = 0;        ///< exact as given; 0: none
  bool causal = false;
  bool top_left = false;                    ///< masks aligned to the top left; else to the bottom right
  int window_left = -1, window_right = -1;  ///< -1: no limit

  bool backward() const { return dout.data != nullptr; }
  std::size_t group() const { return heads_q / heads_kv; }  ///< query heads to one KV head
};

/// Throws std::invalid_argument where the numbers of `problem` do not fit each other.
void check(const ProblemView& problem);

/// The visible keys of query row `row` of a sequence: [first, last), empty if first == last.
struct KeyRange {
  std::size_t first = 0, last = 0;
  std::size_t size() const { return last - first; }
  bool contains(std::size_t key) const { return first <= key && key < last; }
};
KeyRange visible_keys(const ProblemView& problem, const Sequence& sequence, std::size_t row);

/// All visible (query, key) pairs, over sequences and query heads.
double visible_pairs(const ProblemView& problem);

/// One row of queries.
struct RowId {
  std::size_t sequence = 0, head = 0, row = 0;
};

}  // namespace bitattn::reference
