#include "bench/feedback_loop/kernel_attention.hpp"

#include <algorithm>
#include <cmath>

#include "audit/remaining_drift.hpp"
#include "emu/arith/bf16.hpp"

namespace bitattn::feedback {

namespace {

Bf16Tensor cast(const Matrix<float>& x, const std::vector<std::size_t>& shape) {
  Bf16Tensor words(shape);
  std::transform(x.data.begin(), x.data.end(), words.data.begin(),
                 [](float v) { return arith::bf16_from_fp32(v); });
  return words;
}

Matrix<float> widened(const Bf16Tensor& words, std::size_t rows, std::size_t columns) {
  Matrix<float> x(rows, columns);
  std::transform(words.data.begin(), words.data.end(), x.data.begin(),
                 [](std::uint16_t w) { return arith::fp32_from_bf16(w); });
  return x;
}

/// The name without `remedy`; says whether it was there.
bool take_out(std::string& name, const std::string& remedy) {
  const std::string part = "+" + remedy;
  const std::size_t at = name.find(part);
  if (at == std::string::npos) return false;
  const std::size_t end = at + part.size();
  if (end < name.size() && name[end] != '+') return false;
  name.erase(at, part.size());
  return true;
}

}  // namespace

KernelAttention::KernelAttention(const Shape& shape, const std::string& backend) : shape_(shape) {
  std::string name = backend;
  if (take_out(name, "mean-free-keys")) centring_ = KeyCentring::before_the_cast;
  if (take_out(name, "mean-free-keys-bf16")) centring_ = KeyCentring::after_the_cast;
  backend_ = make_backend(name);
  fp32_ = make_backend("fp32");
  Problem& p = capture_.problem;
  capture_.name = "step";
  p.batch = shape.batch;
  p.seqlen_q = p.seqlen_k = shape.length;
  p.heads_q = p.heads_kv = shape.heads;
  p.head_dim = p.head_dim_v = shape.head_dim;
  p.causal = true;
  p.softmax_scale = 1 / std::sqrt(static_cast<double>(shape.head_dim));
}

Matrix<float> KernelAttention::forward(const Matrix<float>& q, const Matrix<float>& k,
                                       const Matrix<float>& v) {
  Problem& p = capture_.problem;
  p.q = cast(q, p.q_shape());
  p.v = cast(v, p.v_shape());
  p.dout = {};
  Matrix<float> keys = k;
  if (centring_ == KeyCentring::after_the_cast) keys = widened(cast(k, p.k_shape()), k.rows, k.columns);
  if (centring_ != KeyCentring::none) centre(shape_.length, keys);
  p.k = cast(keys, p.k_shape());
  RunOptions options;
  options.forward_only = true;
  return widened(backend_->run(capture_, options).out, shape_.tokens(), shape_.width());
}

void KernelAttention::backward(const Matrix<float>& dout, Matrix<float>& dq, Matrix<float>& dk,
                               Matrix<float>& dv) {
  Problem& p = capture_.problem;
  p.dout = cast(dout, p.out_shape());
  result_ = backend_->run(capture_, {});
  dq = widened(result_.dq, shape_.tokens(), shape_.width());
  dk = widened(result_.dk, shape_.tokens(), shape_.width());
  dv = widened(result_.dv, shape_.tokens(), shape_.width());
  if (centring_ != KeyCentring::none) centre(shape_.length, dk);
}

Observed KernelAttention::observe() const {
  const Problem& p = capture_.problem;
  Observed seen;
  const Result fp32 = fp32_->run(capture_, {});
  double error = 0;
  double size = 0;
  for (std::size_t i = 0; i < fp32.dq.size(); ++i) {
    const auto truth = static_cast<double>(arith::fp32_from_bf16(fp32.dq.data[i]));
    const double difference = static_cast<double>(arith::fp32_from_bf16(result_.dq.data[i])) - truth;
    error += difference * difference;
    size += truth * truth;
  }
  seen.dq_error = std::sqrt(error / size);
  audit::RemainingDrift drift(p);
  RunOptions options;
  options.observer = &drift;
  backend_->run(capture_, options);
  if (drift.rows() > 0) {
    seen.drift = std::sqrt(drift.drift_squares() / static_cast<double>(drift.rows()));
    seen.leak = std::sqrt(drift.leak_squares() / size);
  }
  // Sum over a sequence's keys of dK, 0 in theory, against the rounding of the stored words: half a unit in
  // the last place over the root of 3, independent.
  double ratios = 0;
  for (std::size_t b = 0; b < shape_.batch; ++b) {
    for (std::size_t h = 0; h < shape_.heads; ++h) {
      double sums2 = 0;
      double noise2 = 0;
      for (std::size_t d = 0; d < shape_.head_dim; ++d) {
        double sum = 0;
        for (std::size_t t = 0; t < shape_.length; ++t) {
          const std::size_t at = (b * shape_.length + t) * shape_.width() + h * shape_.head_dim + d;
          const auto x = static_cast<double>(arith::fp32_from_bf16(result_.dk.data[at]));
          sum += x;
          if (x == 0) continue;
          const double half_ulp = std::ldexp(1.0, std::ilogb(x) - 8);
          noise2 += half_ulp * half_ulp / 3;
        }
        sums2 += sum * sum;
      }
      if (noise2 > 0) ratios += sums2 / noise2;
    }
  }
  seen.witness = std::sqrt(ratios / static_cast<double>(shape_.batch * shape_.heads));
  return seen;
}

}  // namespace bitattn::feedback
