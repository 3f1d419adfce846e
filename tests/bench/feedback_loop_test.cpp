// The small model of the feedback loop: its own gradient, against finite differences in fp64 with attention
// written straight from the mathematics; and that what is trained is that model, with a kernel's attention.

#include <gtest/gtest.h>

#include <cmath>

#include "bench/feedback_loop/kernel_attention.hpp"
#include "bench/feedback_loop/model.hpp"
#include "bench/feedback_loop/text.hpp"
#include "emu/arith/bf16.hpp"

namespace bitattn::feedback {
namespace {

/// Causal softmax attention in fp64 and its gradient.
class ExactAttention final : public AttentionStep<double> {
 public:
  explicit ExactAttention(const Shape& shape)
      : shape_(shape), scale_(1 / std::sqrt(static_cast<double>(shape.head_dim))) {}

  Matrix<double> forward(const Matrix<double>& q, const Matrix<double>& k, const Matrix<double>& v) override {
    q_ = q;
    k_ = k;
    v_ = v;
    Matrix<double> out(shape_.tokens(), shape_.width());
    for_each_row([&](std::size_t i, std::size_t first, std::size_t column) {
      const std::vector<double> p = probabilities(i, first, column);
      for (std::size_t j = 0; j < p.size(); ++j) {
        for (std::size_t d = column; d < column + shape_.head_dim; ++d)
          out.row(i)[d] += p[j] * v.row(first + j)[d];
      }
    });
    return out;
  }

  void backward(const Matrix<double>& dout, Matrix<double>& dq, Matrix<double>& dk,
                Matrix<double>& dv) override {
    dq = dk = dv = Matrix<double>(shape_.tokens(), shape_.width());
    for_each_row([&](std::size_t i, std::size_t first, std::size_t column) {
      const std::vector<double> p = probabilities(i, first, column);
      std::vector<double> dp(p.size(), 0);
      double mean = 0;
      for (std::size_t j = 0; j < p.size(); ++j) {
        for (std::size_t d = column; d < column + shape_.head_dim; ++d) {
          dp[j] += dout.row(i)[d] * v_.row(first + j)[d];
          dv.row(first + j)[d] += p[j] * dout.row(i)[d];
        }
        mean += p[j] * dp[j];
      }
      for (std::size_t j = 0; j < p.size(); ++j) {
        const double ds = p[j] * (dp[j] - mean) * scale_;
        for (std::size_t d = column; d < column + shape_.head_dim; ++d) {
          dq.row(i)[d] += ds * k_.row(first + j)[d];
          dk.row(first + j)[d] += ds * q_.row(i)[d];
        }
      }
    });
  }

 private:
  /// visit(query, first key, first column of the head)
  template <class Visit>
  void for_each_row(const Visit& visit) const {
    for (std::size_t i = 0; i < shape_.tokens(); ++i) {
      for (std::size_t h = 0; h < shape_.heads; ++h) visit(i, i - i % shape_.length, h * shape_.head_dim);
    }
  }
  std::vector<double> probabilities(std::size_t i, std::size_t first, std::size_t column) const {
    std::vector<double> p(i - first + 1, 0);
    double sum = 0;
    for (std::size_t j = 0; j < p.size(); ++j) {
      double score = 0;
      for (std::size_t d = column; d < column + shape_.head_dim; ++d)
        score += q_.row(i)[d] * k_.row(first + j)[d];
      p[j] = std::exp(score * scale_);
      sum += p[j];
    }
    for (double& x : p) x /= sum;
    return p;
  }

  Shape shape_;
  double scale_;
  Matrix<double> q_, k_, v_;
};

ModelOptions small(bool qk_norm) {
  ModelOptions options;
  options.shape = {.batch = 2, .length = 12, .heads = 2, .head_dim = 8};
  options.hidden = 24;
  options.qk_norm = qk_norm;
  options.seed = 7;
  return options;
}

Batch some_batch(const ModelOptions& options) {
  std::vector<std::uint8_t> text;
  for (int i = 0; i < 200; ++i) text.push_back(static_cast<std::uint8_t>((i * i + 3 * i) % 251));
  return draw_batch(text, options.shape, options.seed, 0);
}

class Gradient : public testing::TestWithParam<bool> {};

// For every parameter: the slope of the loss along its gradient, by central differences, is the gradient's
// square.
TEST_P(Gradient, OfEveryParameterIsTheSlopeOfTheLoss) {
  const ModelOptions options = small(GetParam());
  ExactAttention first(options.shape);
  ExactAttention second(options.shape);
  Model<double> model(options, {&first, &second});
  const Batch batch = some_batch(options);
  model.shift_keys(2);
  model.step(batch.tokens, batch.targets);
  std::vector<Parameter<double>*> parameters;
  model.for_each_parameter([&](Parameter<double>& p) { parameters.push_back(&p); });
  ASSERT_EQ(parameters.size(), GetParam() ? 21U : 17U);
  std::size_t checked = 0;
  for (std::size_t n = 0; n < parameters.size(); ++n) {
    const Matrix<double> gradient = parameters[n]->gradient;
    const double length = norm(gradient);
    const bool key_bias = !GetParam() && (n == 9 || n == 16);
    if (key_bias) {  // softmax does not notice it
      EXPECT_LT(length, 1e-14) << "parameter " << n;
      continue;
    }
    ASSERT_GT(length, 1e-6) << "parameter " << n;
    const Matrix<double> value = parameters[n]->value;
    const double step = 1e-5 / length;
    const auto loss_at = [&](double factor) {
      for (std::size_t i = 0; i < value.data.size(); ++i) {
        parameters[n]->value.data[i] = value.data[i] + factor * step * gradient.data[i];
      }
      return model.step(batch.tokens, batch.targets);
    };
    const double slope = (loss_at(1) - loss_at(-1)) / (2 * step);
    parameters[n]->value = value;
    EXPECT_NEAR(slope / (length * length), 1, 1e-5) << "parameter " << n;
    ++checked;
  }
  EXPECT_EQ(checked, GetParam() ? 21U : 15U);
}

INSTANTIATE_TEST_SUITE_P(FeedbackLoop, Gradient, testing::Bool(), [](const auto& instance) {
  return instance.param ? std::string("WithQkNorm") : std::string("WithoutQkNorm");
});

// The fp32 model with a backend's attention has the fp64 model's gradient, to what casting q, k, v, dout and
// the gradients to BF16 costs.
TEST(FeedbackLoop, KernelAttentionGivesTheExactModelsGradientToBf16) {
  for (const char* backend : {"fp32", "fa3", "fa3+mean-free-keys"}) {
    for (const bool qk_norm : {false, true}) {
      const ModelOptions options = small(qk_norm);
      const Batch batch = some_batch(options);
      ExactAttention first(options.shape);
      ExactAttention second(options.shape);
      Model<double> exact(options, {&first, &second});
      KernelAttention first_kernel(options.shape, backend);
      KernelAttention second_kernel(options.shape, backend);
      Model<float> trained(options, {&first_kernel, &second_kernel});
      const double loss = exact.step(batch.tokens, batch.targets);
      EXPECT_NEAR(trained.step(batch.tokens, batch.targets), loss, 1e-3 * loss);
      for (std::size_t l = 0; l < options.layers; ++l) {
        const Matrix<double>& truth = exact.query_gradient(l);
        Matrix<double> difference = truth;
        for (std::size_t i = 0; i < truth.data.size(); ++i) {
          difference.data[i] -= static_cast<double>(trained.query_gradient(l).data[i]);
        }
        EXPECT_LT(norm(difference), 0.03 * norm(truth))
            << backend << ", layer " << l << ", QK-norm " << qk_norm;
      }
    }
  }
}

// What the model gets is the backend's own result for the BF16 words that were cast from its q, k, v and
// dout.
TEST(FeedbackLoop, GradientsAreTheBackendsBits) {
  const ModelOptions options = small(false);
  KernelAttention attention(options.shape, "fa3+gproj");
  Matrix<float> q(options.shape.tokens(), options.shape.width());
  Matrix<float> k = q;
  Matrix<float> v = q;
  Matrix<float> dout = q;
  float x = 0.1F;
  for (Matrix<float>* m : {&q, &k, &v, &dout}) {
    for (float& element : m->data) element = x = 3.9F * x * (1 - x);  // a chaotic sequence in (0, 1)
  }
  const Matrix<float> out = attention.forward(q, k, v);
  Matrix<float> dq;
  Matrix<float> dk;
  Matrix<float> dv;
  attention.backward(dout, dq, dk, dv);
  const Result result = make_backend("fa3+gproj")->run(attention.problem(), {});
  const auto expect_words = [](const Matrix<float>& values, const Bf16Tensor& words) {
    ASSERT_EQ(values.data.size(), words.size());
    for (std::size_t i = 0; i < words.size(); ++i) {
      ASSERT_EQ(arith::bf16_from_fp32(values.data[i]), words.data[i]) << "element " << i;
    }
  };
  expect_words(q, attention.problem().problem.q);
  expect_words(dout, attention.problem().problem.dout);
  expect_words(out, result.out);
  expect_words(dq, result.dq);
  expect_words(dk, result.dk);
  expect_words(dv, result.dv);
}

// Centring before the cast takes a common shift away with its own bits; after the cast they are lost.
TEST(FeedbackLoop, KeysCentredBeforeTheCastForgetAShift) {
  const ModelOptions options = small(false);
  const Batch batch = some_batch(options);
  const auto loss_with = [&](const char* backend, double shift) {
    KernelAttention first(options.shape, backend);
    KernelAttention second(options.shape, backend);
    Model<float> model(options, {&first, &second});
    model.shift_keys(shift);
    return model.step(batch.tokens, batch.targets);
  };
  const double unshifted = loss_with("fa3+mean-free-keys", 0);
  EXPECT_NEAR(loss_with("fa3+mean-free-keys", 1e4), unshifted, 1e-4);
  EXPECT_GT(std::abs(loss_with("fa3+mean-free-keys-bf16", 1e4) - unshifted), 1e-3);
}

TEST(FeedbackLoop, SameSeedSameRun) {
  const ModelOptions options = small(false);
  const auto losses = [&](std::uint64_t seed) {
    ModelOptions seeded = options;
    seeded.seed = seed;
    KernelAttention first(options.shape, "fa3");
    KernelAttention second(options.shape, "fa3");
    Model<float> model(seeded, {&first, &second});
    std::vector<double> all;
    for (int step = 0; step < 4; ++step) {
      const Batch batch = some_batch(seeded);
      all.push_back(model.step(batch.tokens, batch.targets));
      model.update(1e-2);
    }
    return all;
  };
  const std::vector<double> run = losses(1);
  EXPECT_EQ(run, losses(1));
  EXPECT_NE(run, losses(2));
  EXPECT_LT(run.back(), run.front());
}

// A step of SGD is the gradient times the rate, and the next one keeps nine tenths of it.
TEST(FeedbackLoop, SgdStepsAreAsLongAsTheGradientMakesThem) {
  const ModelOptions options = small(false);
  const Batch batch = some_batch(options);
  ExactAttention first(options.shape);
  ExactAttention second(options.shape);
  Model<double> model(options, {&first, &second});
  std::vector<Parameter<double>*> parameters;
  model.for_each_parameter([&](Parameter<double>& p) { parameters.push_back(&p); });
  std::vector<Matrix<double>> velocity;
  for (const Parameter<double>* p : parameters) velocity.emplace_back(p->value.rows, p->value.columns);
  for (int step = 0; step < 3; ++step) {
    model.step(batch.tokens, batch.targets);
    std::vector<Matrix<double>> expected;
    for (std::size_t n = 0; n < parameters.size(); ++n) {
      expected.push_back(parameters[n]->value);
      for (std::size_t i = 0; i < expected[n].data.size(); ++i) {
        double& v = velocity[n].data[i];
        v = 0.9 * v + parameters[n]->gradient.data[i];
        expected[n].data[i] -= 0.01 * v;
      }
    }
    model.update_sgd(0.01);
    for (std::size_t n = 0; n < parameters.size(); ++n) {
      EXPECT_EQ(parameters[n]->value.data, expected[n].data) << "parameter " << n << ", step " << step;
    }
  }
}

// A vector that all keys share makes them longer, not what softmax sees of them.
TEST(FeedbackLoop, CentredKeysHaveTheSameNormAtEveryShift) {
  const ModelOptions options = small(false);
  const Batch batch = some_batch(options);
  const auto norms_with = [&](double shift) {
    ExactAttention first(options.shape);
    ExactAttention second(options.shape);
    Model<double> model(options, {&first, &second});
    model.shift_keys(shift);
    model.step(batch.tokens, batch.targets);
    return std::pair(model.mean_k_norm(), model.mean_centred_k_norm());
  };
  const auto [plain, plain_centred] = norms_with(0);
  const auto [shifted, shifted_centred] = norms_with(20);
  EXPECT_LT(plain_centred, plain);
  EXPECT_NEAR(shifted, 20, plain);
  EXPECT_NEAR(shifted_centred, plain_centred, 1e-9);
}

}  // namespace
}  // namespace bitattn::feedback
