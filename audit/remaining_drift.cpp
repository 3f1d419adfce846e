#include "audit/remaining_drift.hpp"

#include <cmath>
#include <vector>

#include "audit/compensated_sum.hpp"
#include "emu/arith/bf16.hpp"

namespace bitattn::audit {

void RemainingDrift::backward_rows(const kernels::BackwardRows& rows) {
  const auto sequence = static_cast<std::size_t>(rows.id.sequence);
  const SequenceSpan span = problem_.sequence(sequence);
  const std::size_t dim = problem_.head_dim;
  const std::size_t kv_head = static_cast<std::size_t>(rows.id.head) / problem_.group();
  const std::uint16_t* keys = rows.dq_keys;
  const bool softcap = problem_.softcap > 0;
  Sums part;
  std::vector<double> weighted(dim);
  for (int r = 0; r < rows.rows; ++r) {
    const KeyRange range =
        visible_keys(problem_, rows.row_begin + r, static_cast<std::int64_t>(span.q_length),
                     static_cast<std::int64_t>(span.k_length));
    if (range.first >= range.last) continue;
    CompensatedSum sum;
    double total = 0;
    std::fill(weighted.begin(), weighted.end(), 0.0);
    for (std::int64_t j = range.first; j < range.last; ++j) {
      const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(r) * rows.row_stride + (j - rows.key_begin);
      // With softcap the law holds before the multiply by 1 - tanh^2, that is for no BF16 number.
      sum.add(softcap ? static_cast<double>(rows.ds_softcap[at])
                      : static_cast<double>(arith::fp32_from_bf16(rows.ds_bf16[at])));
      double weight = static_cast<double>(rows.p[at]);
      if (softcap) {
        const double t = static_cast<double>(rows.s[at]);
        weight *= 1 - t * t;
      }
      total += static_cast<double>(rows.p[at]);
      if (weight == 0) continue;
      const std::uint16_t* k =
          keys + (span.k_begin + static_cast<std::size_t>(j)) * problem_.k_stride() + kv_head * dim;
      for (std::size_t d = 0; d < dim; ++d) {
        weighted[d] += weight * static_cast<double>(arith::fp32_from_bf16(k[d]));
      }
    }
    if (rows.added != nullptr && !softcap) sum.add(rows.added[r]);
    const double drift = sum.total();
    double key2 = 0;
    for (const double x : weighted) key2 += x * x;
    const double leak = problem_.softmax_scale * drift / total;
    if (!std::isfinite(drift) || !std::isfinite(leak * leak * key2)) continue;
    ++part.rows;
    part.drift2 += drift * drift;
    part.leak2 += leak * leak * key2;
  }
  const std::lock_guard lock(mutex_);
  parts_[{rows.id.sequence, rows.id.head, rows.row_begin}] = part;
}

RemainingDrift::Sums RemainingDrift::sums() const {
  Sums all;
  for (const auto& [place, part] : parts_) {
    all.rows += part.rows;
    all.drift2 += part.drift2;
    all.leak2 += part.leak2;
  }
  return all;
}

}  // namespace bitattn::audit
