#pragma once
// gproj: the row sum R of the cast dS is taken out evenly over the row's visible keys, in fp32 and outside
// the BF16 operand: the orthogonal projection onto rows that sum to 0. gproj-weighted: the same in proportion
// to P', which is a second pass that replaces D by D + R / sum P'.

#include "emu/kernels/remedies/added_to_ds.hpp"

namespace bitattn::kernels::remedies {

/// share = R * (1/n), n the number of visible keys.
template <class Numbers>
void gproj(const Numbers& numbers, const DsRow<Numbers>& row, AddedToDs<typename Numbers::Value>& added) {
  using Value = typename Numbers::Value;
  const auto site = profile::Site::dq_reduce;
  if (row.first >= row.last) return;
  added.share = numbers.mul(site, row.row_sum, numbers.rcp(site, static_cast<Value>(row.last - row.first)));
}

/// a_j = -(R * (1/sum P')) * P'_j. `added.dense` has room for the row.
template <class Numbers>
void gproj_weighted(const Numbers& numbers, const DsRow<Numbers>& row,
                    AddedToDs<typename Numbers::Value>& added) {
  using Value = typename Numbers::Value;
  const auto site = profile::Site::dq_reduce;
  const bool usable = !(row.p_sum == 0 || row.p_sum != row.p_sum);
  const Value factor = usable ? numbers.mul(site, row.row_sum, numbers.rcp(site, row.p_sum)) : Value{0};
  for (int j = 0; j < row.last - row.first; ++j) added.dense[j] = numbers.mul(site, -factor, row.p[j]);
}

}  // namespace bitattn::kernels::remedies
