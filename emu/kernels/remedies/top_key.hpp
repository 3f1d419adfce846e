#pragma once
// experimental:top-key: the row sum R out of dQ alone: R * P'_max at the key of the largest P' (the first of
// several), the rest R * (1 - P'_max) evenly over the visible keys.

#include "emu/kernels/remedies/added_to_ds.hpp"

namespace bitattn::kernels::remedies {

template <class Numbers>
void top_key(const Numbers& numbers, const DsRow<Numbers>& row, AddedToDs<typename Numbers::Value>& added) {
  using Value = typename Numbers::Value;
  const auto site = profile::Site::dq_reduce;
  const int keys = row.last - row.first;
  if (keys <= 0) return;
  int top = 0;
  for (int j = 1; j < keys; ++j) {
    if (row.p[j] > row.p[top]) top = j;
  }
  added.pairs_in_dk = false;
  added.share_in_dk = false;
  added.pairs.push_back({row.first + top, numbers.mul(site, -row.row_sum, row.p[top])});
  const Value rest = numbers.mul(site, row.row_sum, numbers.sub(site, Value{1}, row.p[top]));
  added.share = numbers.mul(site, rest, numbers.rcp(site, static_cast<Value>(keys)));
}

}  // namespace bitattn::kernels::remedies
