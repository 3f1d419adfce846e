#include "audit/inputs.hpp"

#include <tbb/blocked_range.h>
#include <tbb/parallel_reduce.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "emu/arith/bf16.hpp"

namespace bitattn::audit {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool is_finite(std::uint16_t word) {
  return (word & 0x7f80U) != 0x7f80U;
}
bool is_nan_word(std::uint16_t word) {
  return !is_finite(word) && (word & 0x7fU) != 0;
}
double number(std::uint16_t word) {
  return static_cast<double>(arith::fp32_from_bf16(word));
}

double mean_norm(const Bf16Tensor& tensor) {
  if (tensor.empty() || tensor.size() == 0) return kNan;
  const std::size_t columns = tensor.shape.back();
  double sum = 0;
  std::size_t vectors = 0;
  for (std::size_t at = 0; at < tensor.size(); at += columns) {
    double squares = 0;
    for (std::size_t d = 0; d < columns; ++d)
      squares += number(tensor.data[at + d]) * number(tensor.data[at + d]);
    if (!std::isfinite(squares)) continue;
    sum += std::sqrt(squares);
    ++vectors;
  }
  return vectors == 0 ? kNan : sum / static_cast<double>(vectors);
}

double largest_mean_key_norm(const Problem& problem) {
  double largest = kNan;
  const std::size_t dim = problem.head_dim;
  for (std::size_t b = 0; b < problem.batch; ++b) {
    const SequenceSpan span = problem.sequence(b);
    for (std::size_t h = 0; h < problem.heads_kv; ++h) {
      std::vector<double> mean(dim, 0.0);
      std::size_t keys = 0;
      for (std::size_t j = 0; j < span.k_length; ++j) {
        const std::uint16_t* k = problem.k.data.data() + (span.k_begin + j) * problem.k_stride() + h * dim;
        if (!std::all_of(k, k + dim, is_finite)) continue;
        ++keys;
        for (std::size_t d = 0; d < dim; ++d) mean[d] += number(k[d]);
      }
      double squares = 0;
      for (const double x : mean) squares += x * x;
      if (keys > 0) largest = std::fmax(largest, std::sqrt(squares) / static_cast<double>(keys));
    }
  }
  return largest;
}

struct LargestLogit {
  double value = -1;  ///< below 0: no pair yet whose score is a number
  std::size_t head = 0, row = 0, key = 0;
  /// The larger one; of equals the one that comes first, so that threads change nothing.
  void take(const LargestLogit& other) {
    const bool earlier = other.head != head ? other.head < head
                         : other.row != row ? other.row < row
                                            : other.key < key;
    if (other.value > value || (other.value == value && earlier)) *this = other;
  }
};

/// Logits of one (sequence, KV head): BF16 dot products in fp32, which is plenty for a number of four digits.
LargestLogit largest_of_head(const Problem& problem, const SequenceSpan& span, std::size_t kv_head,
                             std::size_t step) {
  const std::size_t dim = problem.head_dim;
  // Transposed, so that the inner loop runs over keys without a dependency between additions.
  std::vector<float> keys(dim * span.k_length);
  for (std::size_t j = 0; j < span.k_length; ++j) {
    const std::uint16_t* k = problem.k.data.data() + (span.k_begin + j) * problem.k_stride() + kv_head * dim;
    for (std::size_t d = 0; d < dim; ++d) keys[d * span.k_length + j] = arith::fp32_from_bf16(k[d]);
  }
  const std::size_t group = problem.group();
  const std::size_t rows = (span.q_length + step - 1) / step;
  return tbb::parallel_reduce(
      tbb::blocked_range<std::size_t>(0, rows * group, 16), LargestLogit{},
      [&](const tbb::blocked_range<std::size_t>& range, LargestLogit best) {
        std::vector<float> logits;
        for (std::size_t r = range.begin(); r != range.end(); ++r) {
          const std::size_t i = r / group * step;
          const std::size_t head = kv_head * group + r % group;
          const KeyRange visible =
              visible_keys(problem, static_cast<std::int64_t>(i), static_cast<std::int64_t>(span.q_length),
                           static_cast<std::int64_t>(span.k_length));
          if (visible.first >= visible.last) continue;
          const auto first = static_cast<std::size_t>(visible.first);
          const auto last = static_cast<std::size_t>(visible.last);
          logits.assign(last - first, 0.0F);
          const std::uint16_t* q =
              problem.q.data.data() + (span.q_begin + i) * problem.q_stride() + head * dim;
          for (std::size_t d = 0; d < dim; ++d) {
            const float x = arith::fp32_from_bf16(q[d]);
            const float* k = keys.data() + d * span.k_length + first;
            for (std::size_t j = 0; j < logits.size(); ++j) logits[j] += x * k[j];
          }
          for (std::size_t j = 0; j < logits.size(); ++j) {
            const double value = std::abs(static_cast<double>(logits[j]));
            if (value >= best.value) best.take({value, head, i, first + j});
          }
        }
        return best;
      },
      [](LargestLogit a, const LargestLogit& b) {
        a.take(b);
        return a;
      });
}

void find_largest_logit(const Problem& problem, double most_products, InputSummary& summary) {
  const std::size_t step = std::max<std::size_t>(
      1, static_cast<std::size_t>(std::ceil(static_cast<double>(summary.visible_pairs) *
                                            static_cast<double>(problem.head_dim) / most_products)));
  for (std::size_t b = 0; b < problem.batch; ++b) {
    const SequenceSpan span = problem.sequence(b);
    summary.logit_all_rows += span.q_length;
    summary.logit_rows += (span.q_length + step - 1) / step;
    for (std::size_t h = 0; h < problem.heads_kv; ++h) {
      const LargestLogit best = largest_of_head(problem, span, h, step);
      if (best.value < 0) continue;
      const double logit = best.value * problem.softmax_scale;
      if (logit <= summary.largest_logit) continue;
      summary.largest_logit = logit;
      summary.logit_sequence = b;
      summary.logit_head = best.head;
      summary.logit_row = best.row;
      summary.logit_key = best.key;
    }
  }
}

/// A [tokens, heads, columns] tensor.
std::optional<SpecialValues> look_for_specials(const Problem& problem, const std::string& name,
                                               const Bf16Tensor& tensor, bool of_keys) {
  SpecialValues found;
  found.tensor = name;
  found.of_keys = of_keys;
  if (tensor.empty() || tensor.size() == 0) return std::nullopt;
  const std::size_t columns = tensor.shape.back();
  for (std::size_t at = 0; at < tensor.size(); at += columns) {
    bool any = false;
    for (std::size_t d = 0; d < columns; ++d) {
      const std::uint16_t word = tensor.data[at + d];
      if (is_finite(word)) continue;
      ++(is_nan_word(word) ? found.nans : found.infinities);
      any = true;
      if (!found.first) {
        found.first = place_of(problem, tensor.shape, of_keys ? Axes::key_columns : Axes::query_columns, true,
                               TileSizes{}, at + d);
      }
    }
    if (any) ++found.rows_or_keys;
  }
  if (found.count() == 0) return std::nullopt;
  return found;
}

}  // namespace

InputSummary summarize_inputs(const Problem& problem, double most_products) {
  InputSummary summary;
  summary.largest_logit = kNan;
  summary.mean_q_norm = mean_norm(problem.q);
  summary.mean_k_norm = mean_norm(problem.k);
  summary.mean_v_norm = mean_norm(problem.v);
  summary.mean_dout_norm = mean_norm(problem.dout);
  summary.largest_mean_key_norm = largest_mean_key_norm(problem);
  for (std::size_t b = 0; b < problem.batch; ++b) {
    const SequenceSpan span = problem.sequence(b);
    for (std::size_t i = 0; i < span.q_length; ++i) {
      const KeyRange range =
          visible_keys(problem, static_cast<std::int64_t>(i), static_cast<std::int64_t>(span.q_length),
                       static_cast<std::int64_t>(span.k_length));
      if (range.last > range.first) {
        summary.visible_pairs += static_cast<std::size_t>(range.last - range.first) * problem.heads_q;
      }
    }
  }
  find_largest_logit(problem, most_products, summary);
  for (const auto& [name, tensor, of_keys] :
       {std::tuple{"q", &problem.q, false}, std::tuple{"k", &problem.k, true},
        std::tuple{"v", &problem.v, true}, std::tuple{"dout", &problem.dout, false}}) {
    if (auto found = look_for_specials(problem, name, *tensor, of_keys))
      summary.specials.push_back(std::move(*found));
  }
  return summary;
}

std::vector<SpecialValues> special_values(const Problem& problem, const Result& result) {
  std::vector<SpecialValues> all;
  for (const auto& [name, tensor, of_keys] :
       {std::tuple{"out", &result.out, false}, std::tuple{"dq", &result.dq, false},
        std::tuple{"dk", &result.dk, true}, std::tuple{"dv", &result.dv, true}}) {
    if (auto found = look_for_specials(problem, name, *tensor, of_keys)) all.push_back(std::move(*found));
  }
  return all;
}

}  // namespace bitattn::audit
