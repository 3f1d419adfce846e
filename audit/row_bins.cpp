#include "audit/row_bins.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace bitattn::audit {

namespace {

template <class T>
std::vector<RowBin> bins_of(const Problem& problem, const Tensor<T>& values, std::size_t head,
                            std::size_t bins, double unit) {
  const std::size_t tokens = problem.total_q();
  std::vector<RowBin> all(std::min(bins, tokens));
  if (all.empty() || values.empty()) return {};
  std::vector<double> squares(all.size(), 0.0);
  for_each_row_with_keys(problem, [&](std::size_t b, std::size_t h, std::size_t i, std::size_t index) {
    if (h != head) return;
    const std::size_t at = (problem.sequence(b).q_begin + i) * all.size() / tokens;
    RowBin& bin = all[at];
    const double x = std::abs(static_cast<double>(values.data[index])) / unit;
    if (!std::isfinite(x)) {
      ++bin.not_finite;
      return;
    }
    bin.smallest = bin.rows == 0 ? x : std::min(bin.smallest, x);
    bin.largest = std::max(bin.largest, x);
    squares[at] += x * x;
    ++bin.rows;
  });
  for (std::size_t at = 0; at < all.size(); ++at) {
    RowBin& bin = all[at];
    if (bin.rows > 0) {
      bin.rms = std::sqrt(squares[at] / static_cast<double>(bin.rows));
    } else {
      bin.smallest = bin.largest = bin.rms = std::numeric_limits<double>::quiet_NaN();
    }
  }
  return all;
}

}  // namespace

std::vector<RowBin> bin_rows(const Problem& problem, const Fp64Tensor& values, std::size_t head,
                             std::size_t bins, double unit) {
  return bins_of(problem, values, head, bins, unit);
}

std::vector<RowBin> bin_rows(const Problem& problem, const Fp32Tensor& values, std::size_t head,
                             std::size_t bins, double unit) {
  return bins_of(problem, values, head, bins, unit);
}

}  // namespace bitattn::audit
