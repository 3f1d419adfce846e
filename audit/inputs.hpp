#pragma once
// What can be said of a problem before anything is computed: sizes of its vectors, the largest logit, NaN and
// infinities.

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "audit/place.hpp"
#include "datasets/result.hpp"

namespace bitattn::audit {

/// Values that are not finite in one tensor.
struct SpecialValues {
  std::string tensor;
  std::size_t nans = 0, infinities = 0;
  std::optional<Place> first;
  std::size_t rows_or_keys = 0;  ///< (sequence, head, row or key) vectors with at least one
  bool of_keys = false;
  std::size_t count() const { return nans + infinities; }
};

/// Means over tokens and heads of the vectors' Euclidean norms; vectors with NaN or infinities left out. NaN
/// where none is left, or no visible pair has a score.
struct InputSummary {
  double mean_q_norm = 0, mean_k_norm = 0, mean_v_norm = 0, mean_dout_norm = 0;
  double largest_mean_key_norm = 0;  ///< over sequences and KV heads, of the mean of all its keys
  double largest_logit = 0;          ///< largest |softmax_scale * q.k| over visible pairs (before a softcap)
  std::size_t logit_sequence = 0, logit_head = 0, logit_row = 0, logit_key = 0;
  std::size_t logit_rows = 0, logit_all_rows = 0;  ///< query rows that were looked at, and all of them
  std::size_t visible_pairs = 0;                   ///< (query, key) pairs, all heads
  std::vector<SpecialValues> specials;             ///< q, k, v, dout: those that hold any
};

/// Above `most_products` multiplications for the largest logit, every n-th query row is looked at, evenly
/// spread.
InputSummary summarize_inputs(const Problem& problem, double most_products = 2e10);

/// NaN and infinities in a result's out, dq (by query rows) and dk, dv (by keys): those tensors that hold
/// any.
std::vector<SpecialValues> special_values(const Problem& problem, const Result& result);

}  // namespace bitattn::audit
