#include "audit/errors.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "emu/arith/bf16.hpp"

namespace bitattn::audit {

void ErrorSum::add(double x, double truth) {
  ++elements;
  if (!std::isfinite(x) || !std::isfinite(truth)) {
    ++not_finite;
    return;
  }
  difference2 += (x - truth) * (x - truth);
  truth2 += truth * truth;
}

void ErrorSum::add(const ErrorSum& other) {
  difference2 += other.difference2;
  truth2 += other.truth2;
  elements += other.elements;
  not_finite += other.not_finite;
}

double ErrorSum::relative() const {
  if (elements == not_finite) return std::numeric_limits<double>::quiet_NaN();
  if (difference2 == 0) return 0;
  return truth2 == 0 ? std::numeric_limits<double>::quiet_NaN() : std::sqrt(difference2 / truth2);
}

ErrorsAgainstTruth::ErrorsAgainstTruth(const Problem& problem) : problem_(problem) {
  for (const char* name : {"out", "dq", "dk", "dv"}) {
    TensorErrors errors;
    errors.tensor = name;
    errors.by_head.resize(name[1] == 'k' || name[1] == 'v' ? problem.heads_kv : problem.heads_q);
    tensors_.push_back(std::move(errors));
  }
  true_dq_norm_ = Fp64Tensor(problem.row_shape(), std::numeric_limits<double>::quiet_NaN());
  dq_error_norm_ = true_dq_norm_;
}

namespace {

/// One head's vector of `columns` values.
void add_vector(ErrorPair& sums, const Bf16Tensor& stored, const Fp64Tensor& uncast, std::size_t at,
                const double* exact, std::size_t columns) {
  for (std::size_t d = 0; d < columns; ++d) {
    if (!uncast.empty()) sums.before_cast.add(uncast.data[at + d], exact[d]);
    if (!stored.empty())
      sums.stored.add(static_cast<double>(arith::fp32_from_bf16(stored.data[at + d])), exact[d]);
  }
}

void add_pair(TensorErrors& errors, std::size_t head, const ErrorPair& sums) {
  for (ErrorPair* pair : {&errors.by_head[head], &errors.whole}) {
    pair->before_cast.add(sums.before_cast);
    pair->stored.add(sums.stored);
  }
}

/// A [tokens, heads, columns] tensor of the whole problem against one of a slice whose first head is `first`.
void add_tensor(TensorErrors& errors, const Bf16Tensor& stored, const Fp64Tensor& uncast,
                const Fp64Tensor& truth, std::size_t first) {
  if (truth.empty() || truth.size() == 0 || (stored.empty() && uncast.empty())) return;
  const std::size_t columns = truth.shape.back();
  const std::size_t heads = truth.shape[truth.shape.size() - 2];
  const std::size_t tokens = truth.size() / (heads * columns);
  std::vector<ErrorPair> sums(heads);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t h = 0; h < heads; ++h) {
      add_vector(sums[h], stored, uncast, (t * errors.by_head.size() + first + h) * columns,
                 truth.data.data() + (t * heads + h) * columns, columns);
    }
  }
  for (std::size_t h = 0; h < heads; ++h) add_pair(errors, first + h, sums[h]);
}

}  // namespace

void ErrorsAgainstTruth::add_row_of_head(const Result& result, const double* true_dq, const double* true_lse,
                                         std::size_t sequence, std::size_t head, std::size_t row) {
  const std::size_t index = problem_.row_index(sequence, head, row);
  if (true_lse != nullptr && !result.lse.empty()) {
    const double error = std::abs(static_cast<double>(result.lse.data[index]) - *true_lse);
    if (std::isfinite(error)) largest_lse_error_ = std::fmax(largest_lse_error_, error);
  }
  if (true_dq == nullptr) return;
  const std::size_t token = problem_.sequence(sequence).q_begin + row;
  const double* ours = result.uncast.dq.empty() ? nullptr
                                                : result.uncast.dq.data.data() + token * problem_.q_stride() +
                                                      head * problem_.head_dim;
  double truth2 = 0;
  double error2 = 0;
  for (std::size_t d = 0; d < problem_.head_dim; ++d) {
    truth2 += true_dq[d] * true_dq[d];
    if (ours != nullptr) error2 += (ours[d] - true_dq[d]) * (ours[d] - true_dq[d]);
  }
  true_dq_norm_.data[index] = std::sqrt(truth2);
  if (ours != nullptr) dq_error_norm_.data[index] = std::sqrt(error2);
}

void ErrorsAgainstTruth::add_slice(const Result& result, const Result& truth, std::size_t first_kv,
                                   std::size_t count_kv) {
  const std::size_t first_q = first_kv * problem_.group();
  const std::size_t count_q = count_kv * problem_.group();
  const Uncast& exact = truth.uncast;
  add_tensor(tensors_[0], result.out, result.uncast.out, exact.out, first_q);
  add_tensor(tensors_[1], result.dq, result.uncast.dq, exact.dq, first_q);
  add_tensor(tensors_[2], result.dk, result.uncast.dk, exact.dk, first_kv);
  add_tensor(tensors_[3], result.dv, result.uncast.dv, exact.dv, first_kv);
  for (std::size_t b = 0; b < problem_.batch; ++b) {
    const SequenceSpan span = problem_.sequence(b);
    for (std::size_t h = 0; h < count_q; ++h) {
      for (std::size_t i = 0; i < span.q_length; ++i) {
        // Indices of the slice, which has fewer heads.
        const std::size_t slice_row = problem_.layout == Layout::thd
                                          ? h * problem_.total_q() + span.q_begin + i
                                          : (b * count_q + h) * problem_.seqlen_q + i;
        const double* lse = exact.lse.empty() ? nullptr : exact.lse.data.data() + slice_row;
        const double* dq =
            exact.dq.empty() ? nullptr
                             : exact.dq.data.data() + ((span.q_begin + i) * count_q + h) * problem_.head_dim;
        add_row_of_head(result, dq, lse, b, first_q + h, i);
      }
    }
  }
}

void ErrorsAgainstTruth::add_row(const Result& result, const Result& truth, std::size_t sequence,
                                 std::size_t head, std::size_t row) {
  const Uncast& exact = truth.uncast;
  const std::size_t token = problem_.sequence(sequence).q_begin + row;
  const std::size_t g = head % problem_.group();
  const std::size_t dim = problem_.head_dim;
  const std::size_t dim_v = problem_.head_dim_v;
  const double* dq = exact.dq.empty() ? nullptr : exact.dq.data.data() + g * dim;
  add_row_of_head(result, dq, exact.lse.data.data() + g, sequence, head, row);
  ErrorPair out;
  add_vector(out, result.out, result.uncast.out, token * problem_.out_stride() + head * dim_v,
             exact.out.data.data() + g * dim_v, dim_v);
  add_pair(tensors_[0], head, out);
  if (dq == nullptr) return;
  ErrorPair gradient;
  add_vector(gradient, result.dq, result.uncast.dq, token * problem_.q_stride() + head * dim, dq, dim);
  add_pair(tensors_[1], head, gradient);
}

Problem single_row_problem(const Problem& problem, std::size_t sequence, std::size_t kv_head,
                           std::size_t row) {
  const SequenceSpan span = problem.sequence(sequence);
  const KeyRange range =
      visible_keys(problem, static_cast<std::int64_t>(row), static_cast<std::int64_t>(span.q_length),
                   static_cast<std::int64_t>(span.k_length));
  const auto first = static_cast<std::size_t>(range.first);
  const auto keys = static_cast<std::size_t>(range.last - range.first);
  const std::size_t group = problem.group();
  Problem one;
  one.batch = 1;
  one.seqlen_q = 1;
  one.seqlen_k = keys;
  one.heads_q = group;
  one.heads_kv = 1;
  one.head_dim = problem.head_dim;
  one.head_dim_v = problem.head_dim_v;
  one.softmax_scale = problem.softmax_scale;
  one.softcap = problem.softcap;
  const auto copy = [](const Bf16Tensor& from, std::size_t at, std::size_t stride, std::size_t vectors,
                       std::size_t columns, const std::vector<std::size_t>& shape) {
    Bf16Tensor to;
    to.shape = shape;
    to.data.reserve(vectors * columns);
    for (std::size_t j = 0; j < vectors; ++j) {
      const auto begin = from.data.begin() + static_cast<std::ptrdiff_t>(at + j * stride);
      to.data.insert(to.data.end(), begin, begin + static_cast<std::ptrdiff_t>(columns));
    }
    return to;
  };
  const std::size_t token = span.q_begin + row;
  const std::size_t dim = problem.head_dim;
  const std::size_t dim_v = problem.head_dim_v;
  one.q =
      copy(problem.q, token * problem.q_stride() + kv_head * group * dim, 0, 1, group * dim, one.q_shape());
  if (!problem.dout.empty()) {
    one.dout = copy(problem.dout, token * problem.out_stride() + kv_head * group * dim_v, 0, 1, group * dim_v,
                    one.out_shape());
  }
  one.k = copy(problem.k, (span.k_begin + first) * problem.k_stride() + kv_head * dim, problem.k_stride(),
               keys, dim, one.k_shape());
  one.v = copy(problem.v, (span.k_begin + first) * problem.v_stride() + kv_head * dim_v, problem.v_stride(),
               keys, dim_v, one.v_shape());
  return one;
}

}  // namespace bitattn::audit
