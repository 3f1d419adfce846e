#pragma once
// experimental:in-tile-feedback and -uniform: the sum of the cast errors of dS over one (row, key block) is
// taken out again, of the largest dS or of all keys evenly. The block's sum itself is not 0 and must not be
// made so.

#include <cmath>
#include <vector>

#include "emu/kernels/remedies/block_sums.hpp"

namespace bitattn::kernels::remedies {

/// sum_j (BF16(dS_j) - dS_j) over the visible keys [first, last) of one key block of a row.
template <class Numbers>
typename Numbers::Value cast_error_sum(const Numbers& numbers, const typename Numbers::Value* ds,
                                       const typename Numbers::Word* words, int n, int first, int last) {
  const auto site = profile::Site::ds_cast;
  std::vector<typename Numbers::Value> errors(static_cast<std::size_t>(n), 0);
  for (int j = first; j < last; ++j) {
    errors[static_cast<std::size_t>(j)] = numbers.sub(site, Numbers::value(words[j]), ds[j]);
  }
  return block_sum(numbers, site, errors.data(), n);
}

/// Takes it from the word of largest magnitude, the first of several, which is cast again.
template <class Numbers>
void in_tile_feedback(const Numbers& numbers, const typename Numbers::Value* ds,
                      typename Numbers::Word* words, int n, int first, int last) {
  if (first >= last) return;
  const auto site = profile::Site::ds_cast;
  const auto error = cast_error_sum(numbers, ds, words, n, first, last);
  int largest = first;
  for (int j = first; j < last; ++j) {
    if (std::abs(Numbers::value(words[j])) > std::abs(Numbers::value(words[largest]))) largest = j;
  }
  words[largest] = numbers.cast(site, numbers.sub(site, Numbers::value(words[largest]), error));
}

}  // namespace bitattn::kernels::remedies
