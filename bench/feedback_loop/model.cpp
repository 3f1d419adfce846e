#include "bench/feedback_loop/model.hpp"

#include <algorithm>
#include <cmath>

#include "datasets/deviate.hpp"
#include "datasets/philox.hpp"

namespace bitattn::feedback {

namespace {

/// Normal deviates of a seed and a stream, the same on every machine.
class Deviates {
 public:
  Deviates(std::uint64_t seed, std::uint32_t stream)
      : key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32U)}, stream_(stream) {}
  float next() {
    const PhiloxCounter words = philox({count_++, 0, 0, stream_}, key_);
    return static_cast<float>(normal_from_word(words[0] | static_cast<std::uint64_t>(words[1]) << 32U));
  }

 private:
  PhiloxKey key_;
  std::uint32_t stream_, count_ = 0;
};

template <class Real>
Parameter<Real> parameter(std::size_t rows, std::size_t columns) {
  const Matrix<Real> zero(rows, columns);
  return {zero, zero, zero, zero};
}

template <class Real>
Parameter<Real> random_parameter(std::size_t rows, std::size_t columns, double scale, Deviates& deviates) {
  Parameter<Real> p = parameter<Real>(rows, columns);
  for (Real& x : p.value.data) x = static_cast<Real>(scale) * static_cast<Real>(deviates.next());
  return p;
}

template <class Real>
Parameter<Real> ones(std::size_t columns) {
  Parameter<Real> p = parameter<Real>(1, columns);
  std::fill(p.value.data.begin(), p.value.data.end(), Real{1});
  return p;
}

/// Groups of `columns` of x over their root mean square; keeps 1/RMS for the backward.
template <class Real>
Matrix<Real> rms_normed(const Matrix<Real>& x, std::size_t columns, std::vector<Real>& inverse) {
  constexpr Real kEpsilon = static_cast<Real>(1e-6);
  Matrix<Real> y = x;
  inverse.assign(x.data.size() / columns, Real{0});
  for (std::size_t g = 0; g < inverse.size(); ++g) {
    Real* group = y.data.data() + g * columns;
    Real squares = 0;
    for (std::size_t d = 0; d < columns; ++d) squares += group[d] * group[d];
    inverse[g] = 1 / std::sqrt(squares / static_cast<Real>(columns) + kEpsilon);
    for (std::size_t d = 0; d < columns; ++d) group[d] *= inverse[g];
  }
  return y;
}

/// dx from dy and the normed y: (dy - y * mean(dy * y)) / RMS.
template <class Real>
Matrix<Real> rms_backward(const Matrix<Real>& dy, const Matrix<Real>& y, std::size_t columns,
                          const std::vector<Real>& inverse) {
  Matrix<Real> dx = dy;
  for (std::size_t g = 0; g < inverse.size(); ++g) {
    Real* d = dx.data.data() + g * columns;
    const Real* unit = y.data.data() + g * columns;
    Real along = 0;
    for (std::size_t c = 0; c < columns; ++c) along += d[c] * unit[c];
    along /= static_cast<Real>(columns);
    for (std::size_t c = 0; c < columns; ++c) d[c] = (d[c] - unit[c] * along) * inverse[g];
  }
  return dx;
}

template <class Real>
void add(const Matrix<Real>& x, Matrix<Real>& sum) {
  for (std::size_t i = 0; i < x.data.size(); ++i) sum.data[i] += x.data[i];
}

/// x_j := x_j * gain_j per column; with the gradients of both.
template <class Real>
void apply_gain(const Matrix<Real>& gain, Matrix<Real>& x) {
  for (std::size_t t = 0; t < x.rows; ++t) {
    for (std::size_t c = 0; c < x.columns; ++c) x.row(t)[c] *= gain.data[c];
  }
}
template <class Real>
Matrix<Real> gain_backward(const Matrix<Real>& dy, const Matrix<Real>& x, Parameter<Real>& gain) {
  Matrix<Real> dx = dy;
  for (std::size_t t = 0; t < dy.rows; ++t) {
    for (std::size_t c = 0; c < dy.columns; ++c) {
      gain.gradient.data[c] += dy.row(t)[c] * x.row(t)[c];
      dx.row(t)[c] *= gain.value.data[c];
    }
  }
  return dx;
}

}  // namespace

template <class Real>
Model<Real>::Model(const ModelOptions& options, const std::vector<Attention*>& attention)
    : options_(options) {
  const std::size_t width = options.shape.width();
  Deviates deviates(options.seed, 1);
  embedding_ = random_parameter<Real>(options.vocabulary, width, 1, deviates);
  positions_ = random_parameter<Real>(options.shape.length, width, 0.3, deviates);
  output_ = random_parameter<Real>(width, options.vocabulary, 0.02, deviates);
  const double scale = 1 / std::sqrt(static_cast<double>(width));
  const double hidden_scale = 1 / std::sqrt(static_cast<double>(options.hidden));
  layers_.resize(options.layers);
  for (Layer& layer : layers_) {
    layer.wq = random_parameter<Real>(width, width, scale, deviates);
    layer.wk = random_parameter<Real>(width, width, scale, deviates);
    layer.wv = random_parameter<Real>(width, width, scale, deviates);
    layer.wo = random_parameter<Real>(width, width, scale / 2, deviates);
    layer.w1 = random_parameter<Real>(width, options.hidden, scale, deviates);
    layer.w2 = random_parameter<Real>(options.hidden, width, hidden_scale / 2, deviates);
    layer.key_bias = parameter<Real>(1, width);
    layer.q_gain = ones<Real>(width);
    layer.k_gain = ones<Real>(width);
  }
  set_attention(attention);
}

template <class Real>
void Model<Real>::set_attention(const std::vector<Attention*>& attention) {
  for (std::size_t l = 0; l < layers_.size(); ++l) layers_[l].attention = attention.at(l);
}

template <class Real>
void Model<Real>::shift_keys(double norm_of_shift) {
  Deviates deviates(options_.seed, 2);
  const std::size_t dim = options_.shape.head_dim;
  for (Layer& layer : layers_) {
    for (std::size_t h = 0; h < options_.shape.heads; ++h) {
      std::vector<double> direction(dim);
      double squares = 0;
      for (double& x : direction) {
        x = static_cast<double>(deviates.next());
        squares += x * x;
      }
      Real* bias = layer.key_bias.value.data.data() + h * dim;
      for (std::size_t d = 0; d < dim; ++d) {
        bias[d] += static_cast<Real>(norm_of_shift / std::sqrt(squares) * direction[d]);
      }
    }
  }
}

template <class Real>
Matrix<Real> Model<Real>::layer_forward(Layer& layer, const Matrix<Real>& x) {
  const std::size_t width = options_.shape.width();
  const std::size_t dim = options_.shape.head_dim;
  layer.normed = rms_normed(x, width, layer.inverse_rms);
  layer.q = product(layer.normed, layer.wq.value);
  layer.k = product(layer.normed, layer.wk.value);
  layer.v = product(layer.normed, layer.wv.value);
  for (std::size_t t = 0; t < layer.k.rows; ++t) {
    for (std::size_t c = 0; c < width; ++c) layer.k.row(t)[c] += layer.key_bias.value.data[c];
  }
  if (options_.qk_norm) {
    layer.q_unit = rms_normed(layer.q, dim, layer.q_inverse_rms);
    layer.k_unit = rms_normed(layer.k, dim, layer.k_inverse_rms);
    layer.q = layer.q_unit;
    layer.k = layer.k_unit;
    apply_gain(layer.q_gain.value, layer.q);
    apply_gain(layer.k_gain.value, layer.k);
  }
  layer.attended = layer.attention->forward(layer.q, layer.k, layer.v);
  Matrix<Real> y = product(layer.attended, layer.wo.value);
  add(x, y);
  layer.mlp_normed = rms_normed(y, width, layer.mlp_inverse_rms);
  layer.hidden = product(layer.mlp_normed, layer.w1.value);
  for (Real& h : layer.hidden.data) h = std::max(h, Real{0});
  Matrix<Real> z = product(layer.hidden, layer.w2.value);
  add(y, z);
  return z;
}

template <class Real>
Matrix<Real> Model<Real>::layer_backward(Layer& layer, const Matrix<Real>& dx) {
  const std::size_t width = options_.shape.width();
  const std::size_t dim = options_.shape.head_dim;
  add_transposed_product(layer.hidden, dx, layer.w2.gradient);
  Matrix<Real> dhidden = product_with_transposed(dx, layer.w2.value);
  for (std::size_t i = 0; i < dhidden.data.size(); ++i) {
    if (layer.hidden.data[i] == 0) dhidden.data[i] = 0;
  }
  add_transposed_product(layer.mlp_normed, dhidden, layer.w1.gradient);
  Matrix<Real> dy = rms_backward(product_with_transposed(dhidden, layer.w1.value), layer.mlp_normed, width,
                                 layer.mlp_inverse_rms);
  add(dx, dy);

  add_transposed_product(layer.attended, dy, layer.wo.gradient);
  Matrix<Real> dq;
  Matrix<Real> dk;
  Matrix<Real> dv;
  layer.attention->backward(product_with_transposed(dy, layer.wo.value), dq, dk, dv);
  if (options_.qk_norm) {
    dq = rms_backward(gain_backward(dq, layer.q_unit, layer.q_gain), layer.q_unit, dim, layer.q_inverse_rms);
    dk = rms_backward(gain_backward(dk, layer.k_unit, layer.k_gain), layer.k_unit, dim, layer.k_inverse_rms);
  }
  for (std::size_t t = 0; t < dk.rows; ++t) {
    for (std::size_t c = 0; c < width; ++c) layer.key_bias.gradient.data[c] += dk.row(t)[c];
  }
  Matrix<Real> dnormed = product_with_transposed(dq, layer.wq.value);
  add(product_with_transposed(dk, layer.wk.value), dnormed);
  add(product_with_transposed(dv, layer.wv.value), dnormed);
  add_transposed_product(layer.normed, dq, layer.wq.gradient);
  add_transposed_product(layer.normed, dk, layer.wk.gradient);
  add_transposed_product(layer.normed, dv, layer.wv.gradient);
  Matrix<Real> back = rms_backward(dnormed, layer.normed, width, layer.inverse_rms);
  add(dy, back);
  return back;
}

template <class Real>
double Model<Real>::step(const std::vector<std::uint8_t>& tokens, const std::vector<std::uint8_t>& targets) {
  for_each_parameter(
      [](Parameter<Real>& p) { std::fill(p.gradient.data.begin(), p.gradient.data.end(), Real{0}); });
  const std::size_t width = options_.shape.width();
  Matrix<Real> x(options_.shape.tokens(), width);
  for (std::size_t t = 0; t < x.rows; ++t) {
    const Real* byte = embedding_.value.row(tokens[t]);
    const Real* place = positions_.value.row(t % options_.shape.length);
    for (std::size_t c = 0; c < width; ++c) x.row(t)[c] = byte[c] + place[c];
  }
  for (Layer& layer : layers_) x = layer_forward(layer, x);
  std::vector<Real> inverse;
  const Matrix<Real> last = rms_normed(x, width, inverse);
  Matrix<Real> dlogits = product(last, output_.value);
  double loss = 0;
  const auto count = static_cast<double>(x.rows);
  for (std::size_t t = 0; t < dlogits.rows; ++t) {
    Real* row = dlogits.row(t);
    const Real largest = *std::max_element(row, row + dlogits.columns);
    double sum = 0;
    for (std::size_t c = 0; c < dlogits.columns; ++c) {
      sum += std::exp(static_cast<double>(row[c] - largest));
    }
    loss += std::log(sum) - static_cast<double>(row[targets[t]] - largest);
    for (std::size_t c = 0; c < dlogits.columns; ++c) {
      const double p = std::exp(static_cast<double>(row[c] - largest)) / sum;
      row[c] = static_cast<Real>((p - (c == targets[t] ? 1 : 0)) / count);
    }
  }
  add_transposed_product(last, dlogits, output_.gradient);
  Matrix<Real> dx = rms_backward(product_with_transposed(dlogits, output_.value), last, width, inverse);
  for (std::size_t l = layers_.size(); l-- > 0;) dx = layer_backward(layers_[l], dx);
  for (std::size_t t = 0; t < dx.rows; ++t) {
    Real* byte = embedding_.gradient.row(tokens[t]);
    Real* place = positions_.gradient.row(t % options_.shape.length);
    for (std::size_t c = 0; c < width; ++c) {
      byte[c] += dx.row(t)[c];
      place[c] += dx.row(t)[c];
    }
  }
  return loss / count;
}

template <class Real>
void Model<Real>::update(double rate) {
  constexpr double kBeta1 = 0.9;
  constexpr double kBeta2 = 0.95;
  ++steps_;
  const double correction1 = 1 - std::pow(kBeta1, steps_);
  const double correction2 = 1 - std::pow(kBeta2, steps_);
  for_each_parameter([&](Parameter<Real>& p) {
    for (std::size_t i = 0; i < p.value.data.size(); ++i) {
      const auto g = static_cast<double>(p.gradient.data[i]);
      const double m = kBeta1 * static_cast<double>(p.first.data[i]) + (1 - kBeta1) * g;
      const double v = kBeta2 * static_cast<double>(p.second.data[i]) + (1 - kBeta2) * g * g;
      p.first.data[i] = static_cast<Real>(m);
      p.second.data[i] = static_cast<Real>(v);
      p.value.data[i] -= static_cast<Real>(rate * (m / correction1) / (std::sqrt(v / correction2) + 1e-8));
    }
  });
}

template <class Real>
void Model<Real>::update_sgd(double rate) {
  constexpr double kMomentum = 0.9;
  for_each_parameter([&](Parameter<Real>& p) {
    for (std::size_t i = 0; i < p.value.data.size(); ++i) {
      const double v =
          kMomentum * static_cast<double>(p.first.data[i]) + static_cast<double>(p.gradient.data[i]);
      p.first.data[i] = static_cast<Real>(v);
      p.value.data[i] -= static_cast<Real>(rate * v);
    }
  });
}

template <class Real>
double Model<Real>::gradient_norm() const {
  double squares = 0;
  visit_parameters(*this, [&](const Parameter<Real>& p) { squares += std::pow(norm(p.gradient), 2); });
  return std::sqrt(squares);
}

template <class Real>
double Model<Real>::key_bias_norm() const {
  double squares = 0;
  for (const Layer& layer : layers_) squares += std::pow(norm(layer.key_bias.value), 2);
  return std::sqrt(squares);
}

template <class Real>
double Model<Real>::key_bias_gradient() const {
  double squares = 0;
  for (const Layer& layer : layers_) squares += std::pow(norm(layer.key_bias.gradient), 2);
  return std::sqrt(squares);
}

template <class Real>
double Model<Real>::mean_q_norm() const {
  double sum = 0;
  for (const Layer& layer : layers_) sum += mean_vector_norm(layer.q, options_.shape.head_dim);
  return sum / static_cast<double>(layers_.size());
}

template <class Real>
double Model<Real>::mean_k_norm() const {
  double sum = 0;
  for (const Layer& layer : layers_) sum += mean_vector_norm(layer.k, options_.shape.head_dim);
  return sum / static_cast<double>(layers_.size());
}

template <class Real>
double Model<Real>::mean_centred_k_norm() const {
  double sum = 0;
  for (const Layer& layer : layers_) {
    Matrix<Real> keys = layer.k;
    centre(options_.shape.length, keys);
    sum += mean_vector_norm(keys, options_.shape.head_dim);
  }
  return sum / static_cast<double>(layers_.size());
}

template class Model<float>;
template class Model<double>;

}  // namespace bitattn::feedback
