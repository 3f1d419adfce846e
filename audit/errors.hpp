#pragma once
// How far a result is from the truth: relative errors of whole tensors and of heads, before and after the
// last cast.

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "datasets/result.hpp"

namespace bitattn::audit {

/// |x - truth| / |truth|, Frobenius, gathered piece by piece. Elements that are not finite on either side are
/// counted, not summed.
struct ErrorSum {
  double difference2 = 0, truth2 = 0;
  std::size_t elements = 0, not_finite = 0;
  void add(double x, double truth);
  void add(const ErrorSum& other);
  /// NaN where the truth is all zero and the value is not, or nothing is finite.
  double relative() const;
};

/// Both for one tensor or one head of it.
struct ErrorPair {
  ErrorSum before_cast, stored;
};

struct TensorErrors {
  std::string tensor;  ///< out, dq, dk, dv
  ErrorPair whole;
  std::vector<ErrorPair> by_head;  ///< query heads for out and dq, KV heads for dk and dv
};

/// Errors of a result whose uncast values were kept, against the truth's uncast values of KV heads [first_kv,
/// first_kv + count_kv), the truth being that of slice_heads(problem, first_kv, count_kv). Adds to what
/// `errors` already holds.
class ErrorsAgainstTruth {
 public:
  explicit ErrorsAgainstTruth(const Problem& problem);
  void add_slice(const Result& result, const Result& truth, std::size_t first_kv, std::size_t count_kv);
  /// The same for one query row of one query head: `truth` is that of single_row_problem(). dK and dV get
  /// nothing.
  void add_row(const Result& result, const Result& truth, std::size_t sequence, std::size_t head,
               std::size_t row);

  const std::vector<TensorErrors>& tensors() const { return tensors_; }
  /// Absolute, over rows finite on both sides; NaN where there are none.
  double largest_lse_error() const { return largest_lse_error_; }
  /// |dQ| of the truth, per row: tensor of Problem::row_shape(), NaN where no slice covered it.
  const Fp64Tensor& true_dq_norm() const { return true_dq_norm_; }
  /// |dQ - truth| before the last cast, per row.
  const Fp64Tensor& dq_error_norm() const { return dq_error_norm_; }

 private:
  void add_row_of_head(const Result& result, const double* true_dq, const double* true_lse,
                       std::size_t sequence, std::size_t head, std::size_t row);

  const Problem& problem_;
  std::vector<TensorErrors> tensors_;
  double largest_lse_error_ = std::numeric_limits<double>::quiet_NaN();
  Fp64Tensor true_dq_norm_, dq_error_norm_;
};

/// Query row `row` of the query heads of one KV head and the keys it sees, as a problem of its own: the truth
/// of out, lse and dq of that row costs one row. The row must see a key.
Problem single_row_problem(const Problem& problem, std::size_t sequence, std::size_t kv_head,
                           std::size_t row);

}  // namespace bitattn::audit
