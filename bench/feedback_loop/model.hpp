#pragma once
// A byte-level transformer small enough to train on a CPU in minutes: pre-norm, ReLU, learned positions, no
// RoPE. The model is fp32 throughout (fp64 in its gradient check); attention is whatever it is given. Keys
// have a bias common to all of them: softmax does not notice it, so in theory its gradient is 0.

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/feedback_loop/attention_step.hpp"

namespace bitattn::feedback {

struct ModelOptions {
  Shape shape;
  std::size_t layers = 2, vocabulary = 256, hidden = 256;
  bool qk_norm = false;  ///< q and k of every head divided by their RMS, times a learned gain
  std::uint64_t seed = 0;
};

/// A parameter, its gradient and the optimizer's memory: Adam's two moments, or the velocity of SGD in the
/// first.
template <class Real>
struct Parameter {
  Matrix<Real> value, gradient, first, second;
};

template <class Real>
class Model {
 public:
  using Attention = AttentionStep<Real>;

  /// `attention`: one for each layer, kept alive by the caller.
  Model(const ModelOptions& options, const std::vector<Attention*>& attention);

  /// Mean cross entropy of the next byte; fills every gradient. tokens, targets: [batch * length].
  double step(const std::vector<std::uint8_t>& tokens, const std::vector<std::uint8_t>& targets);
  /// One step of Adam (beta 0.9 and 0.95, epsilon 1e-8).
  void update(double rate);
  /// One step of SGD with momentum 0.9: a step as long as the gradient makes it.
  void update_sgd(double rate);

  /// Other attention from here on.
  void set_attention(const std::vector<Attention*>& attention);
  /// Adds one vector of this norm, in a random direction, to all keys of each head.
  void shift_keys(double norm);

  double gradient_norm() const;      ///< of all parameters
  double key_bias_norm() const;      ///< root of the summed squares over layers
  double key_bias_gradient() const;  ///< the same of its gradient, 0 in theory without qk_norm
  double mean_q_norm() const;        ///< of the last step, over tokens, heads and layers
  double mean_k_norm() const;
  /// The same of keys less their mean over the sequence: what softmax sees of them.
  double mean_centred_k_norm() const;
  /// Gradient of the query projection of a layer: where a wrong dQ goes.
  const Matrix<Real>& query_gradient(std::size_t layer) const { return layers_[layer].wq.gradient; }

  /// visit(Parameter&) for every one.
  template <class Visit>
  void for_each_parameter(const Visit& visit) {
    visit_parameters(*this, visit);
  }

 private:
  struct Layer {
    Parameter<Real> wq, wk, wv, wo, w1, w2, key_bias, q_gain, k_gain;
    Attention* attention = nullptr;
    // Of the last step, for its backward.
    Matrix<Real> normed, q, k, v, q_unit, k_unit, attended, mlp_normed, hidden;
    std::vector<Real> inverse_rms, mlp_inverse_rms, q_inverse_rms, k_inverse_rms;
  };

  template <class Self, class Visit>
  static void visit_parameters(Self& self, const Visit& visit) {
    visit(self.embedding_);
    visit(self.positions_);
    visit(self.output_);
    for (auto& l : self.layers_) {
      for (auto* p : {&l.wq, &l.wk, &l.wv, &l.wo, &l.w1, &l.w2, &l.key_bias}) visit(*p);
      if (!self.options_.qk_norm) continue;
      visit(l.q_gain);
      visit(l.k_gain);
    }
  }
  Matrix<Real> layer_forward(Layer& layer, const Matrix<Real>& x);
  Matrix<Real> layer_backward(Layer& layer, const Matrix<Real>& dx);

  ModelOptions options_;
  Parameter<Real> embedding_, positions_, output_;
  std::vector<Layer> layers_;
  int steps_ = 0;
};

}  // namespace bitattn::feedback
