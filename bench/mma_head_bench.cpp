// A whole head, forward and backward, against the bare tile products in the same run.
//
//   head/<engine>/<direction>/S:<tokens>/causal:<0|1>/cores:<n>
//
// "products/s" counts the fused products of all tiles that the schedule visits, a core ("cores" of them work)
// and second of wall time. "share" is that over what the same engine does of bare products alone, the
// operands packed beforehand, on as many cores at once: what softmax, casts, sums, packing and memory leave
// of it.

#include <benchmark/benchmark.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emu/arith/bf16.hpp"
#include "emu/kernels/flash3_backward.hpp"
#include "emu/kernels/flash3_forward.hpp"
#include "emu/mma/tile_product.hpp"

namespace bitattn {
namespace {

constexpr int kHeadDim = 128;

std::vector<std::uint16_t> normal_words(std::size_t n, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> words(n);
  for (std::uint16_t& w : words) w = arith::bf16_from_fp32(normal(random));
  return words;
}

/// Processor time of all threads so far, in seconds.
double processor_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

/// Bare products a second and core: 128 x 128 x 128, the median of some rounds on all `cores` at once.
double bare_rate(const mma::Engine& engine, int cores) {
  constexpr int kTile = 128;
  constexpr int kRepeats = 200;
  const auto a = normal_words(std::size_t{kTile} * kTile, 1);
  const auto b = normal_words(std::size_t{kTile} * kTile, 2);
  const auto left = engine.packed(mma::whole(a.data(), kTile, 1, kTile, kTile), mma::Side::left);
  const auto right = engine.packed(mma::whole(b.data(), kTile, 1, kTile, kTile), mma::Side::right);
  const int repeats = engine.name() == "scalar" ? 2 : kRepeats;
  std::vector<double> rates;
  for (int round = 0; round < 7; ++round) {
    const double begin = processor_seconds();
    tbb::parallel_for(
        0, cores,
        [&](int) {
          std::vector<float> c(std::size_t{kTile} * kTile);
          for (int i = 0; i < repeats; ++i) {
            engine.multiply(left, right, mma::Start::zero, c.data(), kTile, arith::kHopperWide);
          }
        },
        tbb::static_partitioner());
    rates.push_back(cores * repeats * double{kTile} * kTile * kTile / (processor_seconds() - begin));
  }
  std::nth_element(rates.begin(), rates.begin() + 3, rates.end());
  return rates[3];
}

/// One head and all its outputs.
struct Head {
  profile::Call call;
  std::vector<kernels::Sequence> sequences;
  std::vector<std::uint16_t> q, k, v, dout, out, dq, dk, dv;
  std::vector<float> lse;
  std::vector<std::ptrdiff_t> rows{0};

  Head(int tokens, bool causal) {
    call.head_dim = call.head_dim_v = kHeadDim;
    call.heads_q = call.heads_kv = 1;
    call.seqlen_q = call.seqlen_k = tokens;
    call.softmax_scale = 0.08838834764831845;
    call.causal = causal;
    sequences.push_back({0, tokens, 0, tokens});
    const auto n = static_cast<std::size_t>(tokens) * kHeadDim;
    q = normal_words(n, 1);
    k = normal_words(n, 2);
    v = normal_words(n, 3);
    dout = normal_words(n, 4);
    for (auto* tensor : {&out, &dq, &dk, &dv}) tensor->resize(n);
    lse.resize(static_cast<std::size_t>(tokens));
  }

  kernels::AttentionInputs inputs() const {
    kernels::AttentionInputs in;
    in.call = call;
    in.sequences = sequences;
    in.total_q = in.total_k = call.seqlen_q;
    in.q = q.data();
    in.k = k.data();
    in.v = v.data();
    in.dout = dout.data();
    return in;
  }

  void forward(const kernels::Execution& execution) {
    kernels::ForwardOutputs outputs;
    outputs.out = out.data();
    outputs.lse = lse.data();
    outputs.rows = rows;
    kernels::flash3_forward(profile::Profile(), inputs(), outputs, execution);
  }

  void backward(const kernels::Execution& execution) {
    kernels::BackwardInputs forward_outputs;
    forward_outputs.out = out.data();
    forward_outputs.lse = lse.data();
    forward_outputs.rows = rows;
    kernels::BackwardOutputs outputs;
    outputs.dq = dq.data();
    outputs.dk = dk.data();
    outputs.dv = dv.data();
    kernels::flash3_backward(profile::Profile(), inputs(), forward_outputs, outputs, execution);
  }
};

enum class Direction { forward, backward, both };

void head(benchmark::State& state, const mma::Engine& engine, Direction direction, int tokens, bool causal,
          int cores) {
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism,
                                  static_cast<std::size_t>(cores));
  const double bare = bare_rate(engine, cores);
  Head problem(tokens, causal);
  std::atomic<std::int64_t> pairs{0};
  kernels::Execution forward;
  forward.engine = &engine;
  kernels::Execution backward = forward;
  forward.advance = [&](std::int64_t n) { pairs += 2 * n; };   // GEMMs of the forward
  backward.advance = [&](std::int64_t n) { pairs += 5 * n; };  // and the backward
  if (direction == Direction::backward) problem.forward({&engine, nullptr, nullptr});
  const double begin = processor_seconds();
  for (auto _ : state) {
    if (direction != Direction::backward) problem.forward(forward);
    if (direction != Direction::forward) problem.backward(backward);
  }
  const double products = static_cast<double>(pairs.load()) * kHeadDim;
  const double rate = products / (processor_seconds() - begin);
  state.counters["products/s"] = rate;
  state.counters["share"] = rate / bare;
  state.counters["speed"] = benchmark::Counter(products, benchmark::Counter::kIsRate);
}

void register_all() {
  constexpr std::pair<Direction, const char*> kDirections[] = {
      {Direction::forward, "forward"}, {Direction::backward, "backward"}, {Direction::both, "both"}};
  for (const mma::Engine* engine : mma::engines()) {
    const bool scalar = engine->name() == "scalar";
    for (const auto& [direction, name] : kDirections) {
      for (const int tokens : {512, 4096}) {
        if (scalar && tokens > 512) continue;
        for (const bool causal : {false, true}) {
          for (const int cores : {1, 2}) {
            const std::string full = "head/" + std::string(engine->name()) + "/" + name +
                                     "/S:" + std::to_string(tokens) + "/causal:" + std::to_string(causal) +
                                     "/cores:" + std::to_string(cores);
            benchmark::RegisterBenchmark(full.c_str(),
                                         [=, d = direction](benchmark::State& state) {
                                           head(state, *engine, d, tokens, causal, cores);
                                         })
                ->UseRealTime()
                ->Unit(benchmark::kMillisecond);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace bitattn

int main(int argc, char** argv) {
  bitattn::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
