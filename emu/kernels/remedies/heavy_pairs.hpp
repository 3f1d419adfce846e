#pragma once
// heavy-low, heavy-projection, experimental:uniform-shares: a row's few pairs with P' above 1/16, listed.
//
//   heavy-low         lo_j = dS_j - BF16(dS_j): what the cast dropped
//   heavy-projection  -R * P'_j, R the row sum of what is multiplied with K (heavy-low's parts included)
//   uniform-shares    heavy-projection, and the rest R * (1 - sum of the listed P') evenly over the visible
//                     keys

#include "emu/kernels/remedies/added_to_ds.hpp"
#include "emu/profile/remedies.hpp"

namespace bitattn::kernels::remedies {

/// Lists the heavy pairs, the first sixteen by key; with `low` their dropped parts, which join the row's sum.
template <class Numbers>
void list_heavy_pairs(const Numbers& numbers, bool low, DsRow<Numbers>& row,
                      AddedToDs<typename Numbers::Value>& added) {
  using Value = typename Numbers::Value;
  const auto site = profile::Site::dq_reduce;
  constexpr auto kMost = static_cast<std::size_t>(1 / profile::kHeavy);
  for (int j = 0; j < row.last - row.first && added.pairs.size() < kMost; ++j) {
    if (!(row.p[j] > static_cast<Value>(profile::kHeavy))) continue;
    const Value dropped = low ? numbers.sub(site, row.ds[j], Numbers::value(row.words[j])) : Value{0};
    added.pairs.push_back({row.first + j, dropped});
    if (low) row.row_sum = numbers.add(site, row.row_sum, dropped);
  }
}

/// The row sum out of the listed pairs; `uniform`: and what is left of it out of all visible keys evenly.
template <class Numbers>
void heavy_projection(const Numbers& numbers, bool low, bool uniform, const DsRow<Numbers>& row,
                      AddedToDs<typename Numbers::Value>& added) {
  using Value = typename Numbers::Value;
  const auto site = profile::Site::dq_reduce;
  Value listed = 0;
  for (auto& pair : added.pairs) {
    const Value p = row.p[pair.key - row.first];
    listed = numbers.add(site, listed, p);
    pair.value = low ? numbers.fma(site, -row.row_sum, p, pair.value) : numbers.mul(site, -row.row_sum, p);
  }
  if (!uniform || row.first >= row.last) return;
  const Value rest = numbers.mul(site, row.row_sum, numbers.sub(site, Value{1}, listed));
  added.share = numbers.mul(site, rest, numbers.rcp(site, static_cast<Value>(row.last - row.first)));
}

}  // namespace bitattn::kernels::remedies
