#pragma once
// What the small model asks of its attention: one causal call, forward and then backward.

#include "bench/feedback_loop/matrix.hpp"

namespace bitattn::feedback {

struct Shape {
  std::size_t batch = 2, length = 128, heads = 2, head_dim = 32;
  std::size_t tokens() const { return batch * length; }
  std::size_t width() const { return heads * head_dim; }
};

template <class Real>
class AttentionStep {
 public:
  AttentionStep() = default;
  AttentionStep(const AttentionStep&) = delete;
  AttentionStep& operator=(const AttentionStep&) = delete;
  virtual ~AttentionStep() = default;

  /// q, k, v: [tokens, width], head by head. Returns O of the same shape and keeps what backward() needs.
  virtual Matrix<Real> forward(const Matrix<Real>& q, const Matrix<Real>& k, const Matrix<Real>& v) = 0;
  /// Of the last forward().
  virtual void backward(const Matrix<Real>& dout, Matrix<Real>& dq, Matrix<Real>& dk, Matrix<Real>& dv) = 0;
};

}  // namespace bitattn::feedback
