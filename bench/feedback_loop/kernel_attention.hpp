#pragma once
// One attention call of the model, forward and backward, through a backend: what a training step would get
// from that kernel, bit for bit.

#include <memory>
#include <string>

#include "backends/backend.hpp"
#include "bench/feedback_loop/attention_step.hpp"

namespace bitattn::feedback {

/// What was seen of a backward.
struct Observed {
  double dq_error = 0;  ///< of the stored dQ against fp32 attention of the same q, k, v, dout
  double drift = 0;     ///< RMS over rows of what dS still sums up to
  double leak = 0;      ///< what that puts into dQ, over |dQ| of fp32
  /// |sum_j dK_j|, 0 in theory, as a multiple of what the storage of dK in BF16 explains; RMS over heads.
  double witness = 0;
};

/// Remedies of the inputs that a model applies itself, in fp32, around the cast of its keys.
enum class KeyCentring : std::uint8_t { none, before_the_cast, after_the_cast };

class KernelAttention final : public AttentionStep<float> {
 public:
  /// `backend`: as make_backend takes it; mean-free-keys and mean-free-keys-bf16 in it are done here, before
  /// and after the cast of the keys: a backend sees cast keys only.
  KernelAttention(const Shape& shape, const std::string& backend);

  /// q, k, v are cast to BF16, keys after what the remedies of the inputs do to them.
  Matrix<float> forward(const Matrix<float>& q, const Matrix<float>& k, const Matrix<float>& v) override;
  /// dout is cast to BF16; gradients come back as the kernel stored them, through the centring.
  void backward(const Matrix<float>& dout, Matrix<float>& dq, Matrix<float>& dk, Matrix<float>& dv) override;

  /// Of the last backward.
  Observed observe() const;
  /// The last call: what the backend was given and what it returned.
  const Capture& problem() const { return capture_; }
  const Result& result() const { return result_; }

 private:
  Shape shape_;
  KeyCentring centring_ = KeyCentring::none;
  std::unique_ptr<Backend> backend_, fp32_;
  Capture capture_;
  Result result_;
};

}  // namespace bitattn::feedback
