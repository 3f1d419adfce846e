#pragma once
// rounded-sum: O is normalised by the sum of the rounded p, so that it is a mean of V's rows whose weights
// sum to 1. LSE, and with it the backward's P, stay with the sum of the unrounded p.

#include <vector>

namespace bitattn::kernels::remedies {

/// Adds one key block's rounded p to the row's four partial sums, in the order of the plain sums.
template <class Numbers>
void add_to_rounded_sums(const Numbers& numbers, const typename Numbers::Word* p_words, int n, bool first,
                         typename Numbers::Value alpha, typename Numbers::Sums& sums,
                         std::vector<typename Numbers::Value>& scratch) {
  scratch.resize(static_cast<std::size_t>(n));
  for (int j = 0; j < n; ++j) scratch[static_cast<std::size_t>(j)] = Numbers::value(p_words[j]);
  numbers.add_to_row_sums(scratch.data(), n, first, alpha, sums);
}

}  // namespace bitattn::kernels::remedies
