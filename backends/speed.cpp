#include "backends/speed.hpp"

#include <tbb/global_control.h>

#include <algorithm>
#include <cstdint>
#include <ctime>

#include "backends/attention_inputs.hpp"
#include "backends/backend.hpp"
#include "datasets/regime.hpp"
#include "emu/kernels/flash3_backward.hpp"
#include "emu/kernels/flash3_forward.hpp"
#include "emu/mma/tile_product.hpp"

namespace bitattn {

namespace {

constexpr int kHeadDim = 128;
constexpr int kTile = 128;

double processor_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

Capture one_head(int tokens, bool causal) {
  GenerateOptions options;
  options.seqlen_q = options.seqlen_k = static_cast<std::size_t>(tokens);
  options.head_dim = kHeadDim;
  options.causal = causal;
  Capture capture;
  capture.name = "one head";
  capture.problem = generate(options);
  return capture;
}

/// Bare products of one engine, operands packed beforehand: the median of some rounds.
double bare_rate(const mma::Engine& engine, double seconds_a_round) {
  const Problem problem = one_head(kTile, false).problem;
  const auto view = [](const Bf16Tensor& tensor) {
    return mma::whole(tensor.data.data(), kHeadDim, 1, kTile, kHeadDim);
  };
  const mma::PackedOperand left = engine.packed(view(problem.q), mma::Side::left);
  const mma::PackedOperand right = engine.packed(view(problem.k), mma::Side::right);
  std::vector<float> c(std::size_t{kTile} * kTile);
  std::vector<double> rates;
  for (int round = 0; round < 5; ++round) {
    const double begin = processor_seconds();
    double products = 0;
    double elapsed = 0;
    while (elapsed < seconds_a_round) {
      for (int i = 0; i < 8; ++i) {
        engine.multiply(left, right, mma::Start::zero, c.data(), kTile, arith::kHopperWide);
        products += static_cast<double>(kTile) * kTile * kHeadDim;
      }
      elapsed = processor_seconds() - begin;
    }
    rates.push_back(products / elapsed);
  }
  std::nth_element(rates.begin(), rates.begin() + 2, rates.end());
  return rates[2];
}

/// A head's fused products, forward (2 products a pair and head dim) and backward (5), over its processor
/// time.
double head_rate(int tokens, double least_seconds) {
  const Capture capture = one_head(tokens, true);
  ProblemViews views;
  view_problem(capture.problem, true, views);
  const std::size_t n = capture.problem.q.size();
  std::vector<std::uint16_t> out(n);
  std::vector<std::uint16_t> dq(n);
  std::vector<std::uint16_t> dk(n);
  std::vector<std::uint16_t> dv(n);
  std::vector<float> lse(static_cast<std::size_t>(tokens));
  kernels::ForwardOutputs forward;
  forward.out = out.data();
  forward.lse = lse.data();
  forward.rows = views.rows;
  kernels::BackwardInputs between;
  between.out = out.data();
  between.lse = lse.data();
  between.rows = views.rows;
  kernels::BackwardOutputs backward;
  backward.dq = dq.data();
  backward.dk = dk.data();
  backward.dv = dv.data();

  std::int64_t products = 0;
  kernels::Execution forward_run;
  forward_run.advance = [&products](std::int64_t pairs) { products += 2 * pairs * kHeadDim; };
  kernels::Execution backward_run;
  backward_run.advance = [&products](std::int64_t pairs) { products += 5 * pairs * kHeadDim; };
  const double begin = processor_seconds();
  double elapsed = 0;
  while (elapsed < least_seconds) {
    kernels::flash3_forward(profile::Profile{}, views.inputs, forward, forward_run);
    kernels::flash3_backward(profile::Profile{}, views.inputs, between, backward, backward_run);
    elapsed = processor_seconds() - begin;
  }
  return static_cast<double>(products) / elapsed;
}

double backend_seconds(const std::string& name, const Capture& capture) {
  const std::unique_ptr<Backend> backend = make_backend(name);
  const double begin = processor_seconds();
  backend->run(capture, {});
  return processor_seconds() - begin;
}

}  // namespace

Speed measure_speed(bool quick, const std::function<void(const std::string&, double)>& progress) {
  const tbb::global_control one_core(tbb::global_control::max_allowed_parallelism, 1);
  const std::vector<int> head_tokens =
      quick ? std::vector<int>{1024, 4096} : std::vector<int>{512, 1024, 2048, 4096, 8192};
  const std::vector<int> reference_tokens = quick ? std::vector<int>{256} : std::vector<int>{256, 512};
  const std::size_t steps = mma::engines().size() + head_tokens.size() + reference_tokens.size();
  std::size_t done = 0;
  const auto next = [&](const std::string& what) {
    if (progress) progress(what, static_cast<double>(done) / static_cast<double>(steps));
    ++done;
  };

  Speed speed;
  for (const mma::Engine* engine : mma::engines()) {
    next("engine " + std::string(engine->name()));
    const double rate = bare_rate(*engine, quick ? 0.1 : 0.5);
    const double scalar = speed.engines.empty() ? rate : speed.engines.front().products_per_second;
    speed.engines.push_back({std::string(engine->name()), rate, rate / scalar});
  }
  for (const int tokens : head_tokens) {
    next("a head of " + std::to_string(tokens));
    // The bare rate is taken anew beside each head, so that both see the same clock.
    const double bare = bare_rate(mma::default_engine(), 0.1);
    const double rate = head_rate(tokens, quick ? 0.3 : 1.0);
    speed.kernels.push_back({tokens, rate, rate / bare});
  }
  for (const int tokens : reference_tokens) {
    next("the truth of " + std::to_string(tokens));
    const Capture capture = one_head(tokens, false);
    const double fast = backend_seconds("reference", capture);
    const double plain = backend_seconds("reference:128", capture);
    speed.references.push_back({tokens, fast, plain, plain / fast});
  }
  return speed;
}

}  // namespace bitattn
