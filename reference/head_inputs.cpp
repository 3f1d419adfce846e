#include "reference/head_inputs.hpp"

#include <algorithm>
#include <cmath>

#include "reference/bound_arithmetic.hpp"
#include "reference/number.hpp"
#include "reference/super_accumulator.hpp"

namespace bitattn::reference {
namespace {

Bf16Rows rows_of(const TensorView& tensor, std::size_t begin, std::size_t count, std::size_t head,
                 std::size_t width) {
  if (count == 0) return {nullptr, 0, 0, width};
  return {tensor.row(begin, head), tensor.token_stride, count, width};
}

}  // namespace

InputMatrix::InputMatrix(const Bf16Rows& original) : words(original), spoiled(original.rows, 0) {
  for (std::size_t r = 0; r < original.rows; ++r) {
    double square = 0;
    for (std::size_t d = 0; d < original.width; ++d) {
      const std::uint16_t word = original.row(r)[d];
      if (!Bf16Parts::finite(word)) {
        spoiled[r] = 1;
        finite = false;
        continue;
      }
      const double x = fp64_from_bf16(word);
      largest = std::max(largest, std::abs(x));
      square += x * x;
    }
    largest_norm = std::max(largest_norm, std::sqrt(square) * kSlack);
  }
  if (finite) return;
  copy_.assign(original.rows * original.width, 0);
  for (std::size_t r = 0; r < original.rows; ++r) {
    if (spoiled[r] != 0) continue;
    std::copy_n(original.row(r), original.width,
                copy_.begin() + static_cast<std::ptrdiff_t>(r * original.width));
  }
  words = {copy_.data(), static_cast<std::ptrdiff_t>(original.width), original.rows, original.width};
}

HeadInputs::HeadInputs(const ProblemView& problem, std::size_t sequence, std::size_t head_kv)
    : problem_(problem),
      sequence_(problem.sequences[sequence]),
      head_kv_(head_kv),
      k_(rows_of(problem.k, sequence_.k_begin, sequence_.k_length, head_kv, problem.head_dim)),
      v_(rows_of(problem.v, sequence_.k_begin, sequence_.k_length, head_kv, problem.head_dim_v)),
      finite_(k_.finite && v_.finite) {
  q_.reserve(problem.group());
  dout_.reserve(problem.group());
  for (std::size_t g = 0; g < problem.group(); ++g) {
    const std::size_t head = head_kv * problem.group() + g;
    q_.emplace_back(rows_of(problem.q, sequence_.q_begin, sequence_.q_length, head, problem.head_dim));
    finite_ = finite_ && q_.back().finite;
    largest_q_ = std::max(largest_q_, q_.back().largest);
    largest_product_ = std::max(largest_product_, q_.back().largest_norm * k_.largest_norm * kSlack);
    if (!problem.backward()) continue;
    dout_.emplace_back(
        rows_of(problem.dout, sequence_.q_begin, sequence_.q_length, head, problem.head_dim_v));
    finite_ = finite_ && dout_.back().finite;
    largest_dout_ = std::max(largest_dout_, dout_.back().largest);
  }
}

RowKind HeadInputs::kind(std::size_t g, std::size_t row) const {
  const KeyRange keys = visible_keys(problem_, sequence_, row);
  if (finite_ || keys.size() == 0) return RowKind::finite;
  const bool q_spoiled = q_[g].spoiled[row] != 0;
  const auto any = [&keys](const std::vector<std::uint8_t>& spoiled) {
    return std::any_of(spoiled.begin() + static_cast<std::ptrdiff_t>(keys.first),
                       spoiled.begin() + static_cast<std::ptrdiff_t>(keys.last),
                       [](std::uint8_t s) { return s != 0; });
  };
  if (!q_spoiled && !any(k_.spoiled)) {
    const bool rest = any(v_.spoiled) || (problem_.backward() && dout_[g].spoiled[row] != 0);
    return rest ? RowKind::touched : RowKind::finite;
  }
  // Which scores are infinite or NaN is a matter of their infinities and NaNs alone: doubles, in which no
  // product of finite inputs overflows, tell it exactly.
  const std::uint16_t* const q = problem_.q.row(sequence_.q_begin + row, head_kv_ * problem_.group() + g);
  std::size_t minus_infinities = 0;
  for (std::size_t j = keys.first; j < keys.last; ++j) {
    if (!q_spoiled && k_.spoiled[j] == 0) continue;
    const std::uint16_t* const k = problem_.k.row(sequence_.k_begin + j, head_kv_);
    double score = 0;
    for (std::size_t d = 0; d < problem_.head_dim; ++d) score += fp64_from_bf16(q[d]) * fp64_from_bf16(k[d]);
    score *= problem_.softmax_scale;
    if (std::isnan(score)) return RowKind::nan;
    if (problem_.softcap > 0) continue;  // an infinite score is capped
    if (score > 0) return RowKind::nan;  // exp(infinity - infinity)
    ++minus_infinities;
  }
  return minus_infinities == keys.size() ? RowKind::nan : RowKind::touched;
}

}  // namespace bitattn::reference
