// The fast reference beside plain MPFR, forward and backward of one head of dimension 128.
//
//   fast/<S>/<mask>/<threads>   the fast reference
//   ratio/<S>/<mask>            both on the same inputs in the same run, on one thread: "x_plain_mpfr" is how
//   many times
//                               faster the fast one is, by processor time. Plain runs at the precision whose
//                               proven bounds are the same: "bits_fast" and "bits_plain" are the least of
//                               log2(largest value / largest bound) over out, dq, dk and dv.

#include <benchmark/benchmark.h>
#include <oneapi/tbb/global_control.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "reference/fast_attention.hpp"
#include "reference/plain_attention.hpp"

namespace bitattn::reference {
namespace {

constexpr std::size_t kDim = 128;

struct Inputs {
  std::vector<std::uint16_t> q, k, v, dout;
  ProblemView view;

  Inputs(std::size_t length, bool causal) {
    std::mt19937_64 random(1);
    std::normal_distribution<double> normal;
    Number x = make_number(64);
    for (auto* words : {&q, &k, &v, &dout}) {
      words->resize(length * kDim);
      for (std::uint16_t& w : *words) {
        mpfr_set_d(raw(x), normal(random), MPFR_RNDN);
        w = round_to_bf16(raw(x));
      }
    }
    const auto tensor = [](const std::vector<std::uint16_t>& words) {
      return TensorView{words.data(), static_cast<std::ptrdiff_t>(kDim), 0};
    };
    view.q = tensor(q);
    view.k = tensor(k);
    view.v = tensor(v);
    view.dout = tensor(dout);
    view.sequences = {{0, length, 0, length}};
    view.head_dim = view.head_dim_v = kDim;
    view.softmax_scale = 1 / std::sqrt(static_cast<double>(kDim));
    view.causal = causal;
  }
};

/// Takes the rows as a user would, in BF16, and keeps what the bounds come to.
class BoundSink final : public Sink {
 public:
  void query_row(const QueryRow& row) override {
    take(out_, row.out, row.out_bound);
    take(dq_, row.dq, row.dq_bound);
  }
  void key_row(const KeyRow& row) override {
    take(dk_, row.dk, row.dk_bound);
    take(dv_, row.dv, row.dv_bound);
  }
  double bits() const { return std::min({out_.bits(), dq_.bits(), dk_.bits(), dv_.bits()}); }

 private:
  struct Extreme {
    double value = 0, bound = 0;
    double bits() const { return std::log2(value / bound); }
  };
  void take(Extreme& extreme, std::span<const Number> values, std::span<const double> bounds) {
    Extreme row;
    for (std::size_t d = 0; d < values.size(); ++d) {
      benchmark::DoNotOptimize(round_to_bf16(raw(values[d])));
      row.value = std::max(row.value, std::abs(round_to_fp64(raw(values[d]))));
      row.bound = std::max(row.bound, bounds[d]);
    }
    const std::lock_guard lock(mutex_);
    extreme.value = std::max(extreme.value, row.value);
    extreme.bound = std::max(extreme.bound, row.bound);
  }

  std::mutex mutex_;
  Extreme out_, dq_, dk_, dv_;
};

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

/// Fused products of forward and backward: scores, P V, dP, dV, dK, dQ.
double products(const Inputs& inputs) {
  return 6.0 * static_cast<double>(kDim) * visible_pairs(inputs.view);
}

void run_fast(benchmark::State& state, std::size_t length, bool causal, std::size_t threads) {
  const tbb::global_control control(tbb::global_control::max_allowed_parallelism, threads);
  const Inputs inputs(length, causal);
  double bits = 0;
  double processor = 0;
  for (auto _ : state) {
    BoundSink sink;
    const double start = processor_seconds();
    fast_attention(inputs.view, {}, sink);
    processor += processor_seconds() - start;
    bits = sink.bits();
  }
  const auto iterations = static_cast<double>(state.iterations());
  state.counters["products/s"] =
      benchmark::Counter(products(inputs) * iterations, benchmark::Counter::kIsRate);
  state.counters["processor_s"] = processor / iterations;
  state.counters["bits_fast"] = bits;
}

void run_ratio(benchmark::State& state, std::size_t length, bool causal) {
  const tbb::global_control control(tbb::global_control::max_allowed_parallelism, 1);
  const Inputs inputs(length, causal);
  double fast = 0;
  double plain = 0;
  double bits_fast = 0;
  double bits_plain = 0;
  for (auto _ : state) {
    BoundSink fast_sink;
    BoundSink plain_sink;
    const double start = processor_seconds();
    fast_attention(inputs.view, {}, fast_sink);
    const double middle = processor_seconds();
    plain_attention(inputs.view, kDefaultBits, {}, plain_sink);
    const double end = processor_seconds();
    fast += middle - start;
    plain += end - middle;
    bits_fast = fast_sink.bits();
    bits_plain = plain_sink.bits();
  }
  state.counters["fast_s"] = fast / static_cast<double>(state.iterations());
  state.counters["plain_s"] = plain / static_cast<double>(state.iterations());
  state.counters["x_plain_mpfr"] = plain / fast;
  state.counters["bits_fast"] = bits_fast;
  state.counters["bits_plain"] = bits_plain;
}

void register_all() {
  for (const bool causal : {false, true}) {
    const std::string mask = causal ? "causal" : "full";
    for (const std::size_t length : {256U, 512U}) {
      benchmark::RegisterBenchmark(
          ("ratio/" + std::to_string(length) + "/" + mask).c_str(),
          [length, causal](benchmark::State& state) { run_ratio(state, length, causal); })
          ->Iterations(1)
          ->Unit(benchmark::kSecond);
    }
    for (const std::size_t length : {512U, 1024U, 2048U}) {
      for (const std::size_t threads : {1U, 2U}) {
        benchmark::RegisterBenchmark(
            ("fast/" + std::to_string(length) + "/" + mask + "/" + std::to_string(threads)).c_str(),
            [length, causal, threads](benchmark::State& state) { run_fast(state, length, causal, threads); })
            ->UseRealTime()
            ->Unit(benchmark::kSecond);
      }
    }
  }
}

}  // namespace
}  // namespace bitattn::reference

int main(int argc, char** argv) {
  bitattn::reference::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
