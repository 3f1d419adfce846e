// feedback_loop: a small byte-level transformer whose attention is a kernel's, bit for bit, and what its
// rounding does to the gradient and to the run. CSV on standard output.
//
//   feedback_loop train  --text FILE [--backend fa3] [--qk-norm] [--key-shift C] …   figures as training goes
//   feedback_loop replay --text FILE --backend fa3 … --key-shift 0 …   one gradient of a trained model, again
//                                                                       and again with other attention

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "bench/feedback_loop/kernel_attention.hpp"
#include "bench/feedback_loop/model.hpp"
#include "bench/feedback_loop/text.hpp"
#include "datasets/capture_file.hpp"
#include "datasets/error.hpp"

namespace {

using namespace bitattn;
using Model = feedback::Model<float>;
using Matrix = feedback::Matrix<float>;

struct Options {
  feedback::ModelOptions model;
  std::string text, capture;
  std::vector<std::string> backends{"fa3"};
  std::vector<double> shifts{0};
  int steps = 300, every = 20;
  bool sgd = false;
  double rate = 2e-3;
};

/// A backend for each layer.
struct Attentions {
  std::vector<std::unique_ptr<feedback::KernelAttention>> layers;

  Attentions(const feedback::ModelOptions& model, const std::string& backend) {
    for (std::size_t l = 0; l < model.layers; ++l) {
      layers.push_back(std::make_unique<feedback::KernelAttention>(model.shape, backend));
    }
  }
  std::vector<Model::Attention*> pointers() const {
    std::vector<Model::Attention*> all;
    std::transform(layers.begin(), layers.end(), std::back_inserter(all),
                   [](const auto& l) { return l.get(); });
    return all;
  }
  /// The worse layer in each figure; NaN, which a run that has diverged gives, is the worst.
  feedback::Observed observe() const {
    const auto worse = [](double a, double b) { return std::isnan(b) || b > a ? b : a; };
    feedback::Observed worst;
    for (const auto& layer : layers) {
      const feedback::Observed seen = layer->observe();
      worst.dq_error = worse(worst.dq_error, seen.dq_error);
      worst.drift = worse(worst.drift, seen.drift);
      worst.leak = worse(worst.leak, seen.leak);
      worst.witness = worse(worst.witness, seen.witness);
    }
    return worst;
  }
};

void train_step(Model& model, const Options& options, int step) {
  constexpr double kWarmup = 20;
  const double rate = options.rate * std::min(1.0, (step + 1) / kWarmup);
  if (options.sgd) {
    model.update_sgd(rate);
  } else {
    model.update(rate);
  }
}

/// The last attention calls as captures that bitattn reads: problem, and result as the backend gave it.
void write_captures(const Attentions& attentions, const Options& options) {
  CaptureWriter writer(options.capture);
  for (std::size_t l = 0; l < attentions.layers.size(); ++l) {
    const feedback::KernelAttention& layer = *attentions.layers[l];
    Problem problem = layer.problem().problem;
    problem.attributes["kernel"] = "bitattn " + layer.result().backend;
    problem.attributes["source"] = std::string("feedback_loop train");
    problem.attributes["step"] = static_cast<std::int64_t>(options.steps);
    problem.attributes["layer"] = static_cast<std::int64_t>(l);
    problem.attributes["seed"] = static_cast<std::int64_t>(options.model.seed);
    writer.write_capture("/layer_" + std::to_string(l), problem, layer.result());
  }
  writer.commit();
}

void train(const Options& options) {
  const feedback::Shape& shape = options.model.shape;
  const std::vector<std::uint8_t> text = feedback::read_text(options.text, shape.length);
  const Attentions attentions(options.model, options.backends.front());
  Model model(options.model, attentions.pointers());
  // Before the first step keys have about the norm of a row of normal deviates.
  model.shift_keys(options.shifts.front() * std::sqrt(static_cast<double>(shape.head_dim)));
  std::printf(
      "step,loss,gradient_norm,q_norm,k_norm,centred_k_norm,key_bias,key_bias_gradient,dq_error,drift,leak,"
      "witness\n");
  for (int step = 0; step <= options.steps; ++step) {
    const feedback::Batch batch = feedback::draw_batch(text, shape, options.model.seed, step);
    const double loss = model.step(batch.tokens, batch.targets);
    if (step % options.every == 0 || step == options.steps) {
      const feedback::Observed o = attentions.observe();
      std::printf("%d,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g\n", step, loss,
                  model.gradient_norm(), model.mean_q_norm(), model.mean_k_norm(),
                  model.mean_centred_k_norm(), model.key_bias_norm(), model.key_bias_gradient(), o.dq_error,
                  o.drift, o.leak, o.witness);
      std::fflush(stdout);
    }
    if (step < options.steps) train_step(model, options, step);
  }
  if (!options.capture.empty()) write_captures(attentions, options);
}

/// The largest of the layers' |a - b| / |b|.
double worst_distance(const std::vector<Matrix>& a, const std::vector<Matrix>& b) {
  double worst = 0;
  for (std::size_t l = 0; l < a.size(); ++l) {
    Matrix difference = a[l];
    for (std::size_t i = 0; i < difference.data.size(); ++i) difference.data[i] -= b[l].data[i];
    worst = std::max(worst, feedback::norm(difference) / feedback::norm(b[l]));
  }
  return worst;
}

/// Trained with fp32 attention; then one more batch's gradient, with every backend and key shift. Shifts do
/// not change the function: what changes is rounding.
void replay(const Options& options) {
  const feedback::Shape& shape = options.model.shape;
  const std::vector<std::uint8_t> text = feedback::read_text(options.text, shape.length);
  const Attentions fp32(options.model, "fp32");
  Model model(options.model, fp32.pointers());
  for (int step = 0; step < options.steps; ++step) {
    const feedback::Batch batch = feedback::draw_batch(text, shape, options.model.seed, step);
    model.step(batch.tokens, batch.targets);
    train_step(model, options, step);
  }
  const feedback::Batch batch = feedback::draw_batch(text, shape, options.model.seed, options.steps);
  const auto query_gradients = [&](const Model& of) {
    std::vector<Matrix> all;
    for (std::size_t l = 0; l < options.model.layers; ++l) all.push_back(of.query_gradient(l));
    return all;
  };
  model.step(batch.tokens, batch.targets);
  const std::vector<Matrix> unshifted = query_gradients(model);
  const double key_norm = model.mean_k_norm();
  std::printf(
      "key_shift,backend,loss,gradient_norm,gradient_norm_fp32,wq_error,wq_error_unshifted,dq_error,drift,"
      "leak,"
      "witness\n");
  for (const double shift : options.shifts) {
    Model shifted = model;
    shifted.shift_keys(shift * key_norm);
    shifted.set_attention(fp32.pointers());
    shifted.step(batch.tokens, batch.targets);
    const std::vector<Matrix> truth = query_gradients(shifted);
    const double norm_fp32 = shifted.gradient_norm();
    for (const std::string& backend : options.backends) {
      const Attentions attentions(options.model, backend);
      shifted.set_attention(attentions.pointers());
      const double loss = shifted.step(batch.tokens, batch.targets);
      const std::vector<Matrix> gradients = query_gradients(shifted);
      const feedback::Observed o = attentions.observe();
      std::printf("%g,%s,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g\n", shift, backend.c_str(), loss,
                  shifted.gradient_norm(), norm_fp32, worst_distance(gradients, truth),
                  worst_distance(gradients, unshifted), o.dq_error, o.drift, o.leak, o.witness);
      std::fflush(stdout);
    }
  }
}

void add_common_options(CLI::App& command, Options& options) {
  feedback::ModelOptions& model = options.model;
  command.add_option("--text", options.text, "What it learns to continue, byte by byte")->required();
  command.add_option("--seed", model.seed, "Weights, order of the text, directions of the shift");
  command.add_option("--steps", options.steps, "Steps to train")->check(CLI::NonNegativeNumber);
  command.add_option("--rate", options.rate, "Rate after the warm-up")->check(CLI::PositiveNumber);
  command.add_option("--layers", model.layers, "Layers")->check(CLI::PositiveNumber);
  command.add_option("--length", model.shape.length, "Bytes of a sequence")->check(CLI::PositiveNumber);
  command.add_option("--batch", model.shape.batch, "Sequences of a step")->check(CLI::PositiveNumber);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("A small transformer whose attention is a kernel's, bit for bit", "feedback_loop");
  app.require_subcommand(1);
  CLI::App& train_command = *app.add_subcommand("train", "Figures as training goes on");
  add_common_options(train_command, options);
  train_command.add_option("--backend", options.backends, "Attention (bitattn backends lists them)")
      ->expected(1);
  train_command.add_flag("--sgd", options.sgd, "SGD with momentum 0.9 in place of Adam");
  train_command.add_flag("--qk-norm", options.model.qk_norm, "q and k normalised, with a learned gain");
  train_command
      .add_option("--key-shift", options.shifts, "Start with a key bias of this times the mean key norm")
      ->expected(1);
  train_command.add_option("--every", options.every, "Steps between two looks")->check(CLI::PositiveNumber);
  train_command.add_option("--capture", options.capture,
                           "Writes the last step's attention calls here (HDF5)");
  CLI::App& replay_command = *app.add_subcommand("replay", "One gradient, with other attention");
  add_common_options(replay_command, options);
  replay_command.add_option("--backend", options.backends, "Attention, several");
  replay_command.add_option("--key-shift", options.shifts,
                            "Added to all keys, times their mean norm; several");
  CLI11_PARSE(app, argc, argv);
  try {
    if (train_command.parsed()) {
      train(options);
    } else {
      replay(options);
    }
  } catch (const InputError& error) {
    std::fprintf(stderr, "feedback_loop: %s\n", error.what());
    return 2;
  }
  return 0;
}
