// Fused products a second of every engine on the tile products of an attention kernel, and the ratio to the
// scalar model in the same run.
//
//   multiply/<engine>/<shape>   operands packed beforehand
//   whole/<engine>/<shape>      the left operand (a fresh tile of P or dS) packed each time, as a schedule
//   does pack/<engine>/<how>         one 128 x 128 operand
//
// "products/s" is per second of one thread's processor time, so that a busy machine does not change it;
// "x_scalar" is against the scalar engine on the same shape.

#include <benchmark/benchmark.h>

#include <cmath>
#include <ctime>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emu/arith/bf16.hpp"
#include "emu/mma/tile_product.hpp"

namespace bitattn {
namespace {

using mma::Engine;
using mma::MatrixView;
using mma::Side;

constexpr int kTile = 128;

enum class Values { normal, probabilities, causal_probabilities, gradients };

/// A 128 x 128 tile in memory order.
std::vector<std::uint16_t> tile(Values values) {
  std::mt19937_64 random(static_cast<unsigned>(values) + 1U);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> words(std::size_t{kTile} * kTile);
  for (int i = 0; i < kTile; ++i) {
    for (int j = 0; j < kTile; ++j) {
      float v = normal(random);
      if (values == Values::probabilities || values == Values::causal_probabilities) v = std::exp(v - 3.0F);
      if (values == Values::causal_probabilities && j > i) v = 0;
      if (values == Values::gradients) v *= std::exp(normal(random) - 6.0F);
      words[static_cast<std::size_t>(i * kTile + j)] = arith::bf16_from_fp32(v);
    }
  }
  return words;
}

/// One of the GEMMs of attention, at D = 128 and tiles of 128.
struct Shape {
  const char* name;
  Values left;
  bool left_transposed;  ///< the view's contiguous direction is its rows
  Values right;
  bool right_transposed;
  mma::Start start;
};

constexpr Shape kShapes[] = {
    {"S=QK'", Values::normal, false, Values::normal, false, mma::Start::zero},
    {"O+=PV", Values::probabilities, false, Values::normal, true, mma::Start::accumulate},
    {"O+=PV_diagonal", Values::causal_probabilities, false, Values::normal, true, mma::Start::accumulate},
    {"dP=dOV'", Values::normal, false, Values::normal, false, mma::Start::zero},
    {"dV+=P'dO", Values::probabilities, true, Values::normal, true, mma::Start::accumulate},
    {"dK+=dS'Q", Values::gradients, true, Values::normal, true, mma::Start::accumulate},
    {"dQ+=dSK", Values::gradients, false, Values::normal, true, mma::Start::accumulate},
};

MatrixView view(const std::vector<std::uint16_t>& words, bool transposed) {
  return mma::whole(words.data(), transposed ? 1 : kTile, transposed ? kTile : 1, kTile, kTile);
}

constexpr double kProducts = double{kTile} * kTile * kTile;

/// Rate of the scalar engine, measured once for each shape.
double scalar_rate(const Shape& shape) {
  static std::map<std::string, double> known;
  if (const auto found = known.find(shape.name); found != known.end()) return found->second;
  const Engine& engine = *mma::find_engine("scalar");
  const auto left = tile(shape.left);
  const auto right = tile(shape.right);
  const auto packed_left = engine.packed(view(left, shape.left_transposed), Side::left);
  const auto packed_right = engine.packed(view(right, shape.right_transposed), Side::right);
  std::vector<float> c(std::size_t{kTile} * kTile);
  const std::clock_t begin = std::clock();
  int n = 0;
  double seconds = 0;
  for (; seconds < 0.1; ++n) {
    engine.multiply(packed_left, packed_right, shape.start, c.data(), kTile, arith::kHopperWide);
    seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  }
  return known[shape.name] = n * kProducts / seconds;
}

void report(benchmark::State& state, const Shape& shape) {
  const double products = static_cast<double>(state.iterations()) * kProducts;
  state.counters["products/s"] = benchmark::Counter(products, benchmark::Counter::kIsRate);
  state.counters["x_scalar"] = benchmark::Counter(products / scalar_rate(shape), benchmark::Counter::kIsRate);
}

void multiply(benchmark::State& state, const Engine& engine, const Shape& shape, bool pack_each_time) {
  const auto left = tile(shape.left);
  const auto right = tile(shape.right);
  auto packed_left = engine.packed(view(left, shape.left_transposed), Side::left);
  const auto packed_right = engine.packed(view(right, shape.right_transposed), Side::right);
  std::vector<float> c(std::size_t{kTile} * kTile);
  for (auto _ : state) {
    if (pack_each_time) engine.pack(view(left, shape.left_transposed), Side::left, packed_left);
    engine.multiply(packed_left, packed_right, shape.start, c.data(), kTile, arith::kHopperWide);
    benchmark::DoNotOptimize(c.data());
  }
  report(state, shape);
}

void pack(benchmark::State& state, const Engine& engine, Side side, bool transposed) {
  const auto words = tile(Values::normal);
  mma::PackedOperand out;
  for (auto _ : state) {
    engine.pack(view(words, transposed), side, out);
    benchmark::DoNotOptimize(out.extra.data());
  }
}

void register_all() {
  for (const Shape& shape : kShapes) scalar_rate(shape);  // before any thread asks
  for (const Engine* engine : mma::engines()) {
    const std::string name(engine->name());
    for (const Shape& shape : kShapes) {
      for (const bool whole : {false, true}) {
        if (whole && name == "scalar") continue;
        benchmark::RegisterBenchmark(
            ((whole ? "whole/" : "multiply/") + name + "/" + shape.name).c_str(),
            [engine, &shape, whole](benchmark::State& state) { multiply(state, *engine, shape, whole); })
            ->Threads(1)
            ->Threads(2);
      }
    }
    for (const Side side : {Side::left, Side::right}) {
      for (const bool transposed : {false, true}) {
        const std::string how = std::string(side == Side::left ? "left" : "right") +
                                (transposed ? "_rows_contiguous" : "_k_contiguous");
        benchmark::RegisterBenchmark(
            ("pack/" + name + "/" + how).c_str(),
            [engine, side, transposed](benchmark::State& state) { pack(state, *engine, side, transposed); });
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
