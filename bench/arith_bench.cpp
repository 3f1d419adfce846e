// Rates of the scalar arithmetic, one core. items_per_second counts results; for a tensor-core step it counts
// fused products (one a*b inside a step). Each stands beside a peer that a reader knows: the host's own fused
// multiply-add, exp2f, or a plain loop of float multiply-adds, which is not bit-exact.

#include <benchmark/benchmark.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/mufu.hpp"
#include "emu/arith/narrow_float.hpp"
#include "emu/arith/tensor_core.hpp"

namespace {

using namespace bitattn;

constexpr std::size_t kInputs = 4096;

/// Bits of numbers of both signs, exponents -8..7 (where no function takes a short cut), the same in every
/// run.
std::array<std::uint32_t, kInputs> inputs(std::uint32_t seed) {
  std::array<std::uint32_t, kInputs> all{};
  std::uint32_t state = seed;
  for (auto& x : all) {
    state = state * 1664525U + 1013904223U;
    const std::uint32_t r = state ^ state >> 15U;
    x = (r & 0x807fffffU) | (119U + (r >> 24U & 15U)) << 23U;
  }
  return all;
}

template <class Function>
void run_on_bits(benchmark::State& state, Function&& f, std::uint32_t sign_mask = 0xffffffffU) {
  auto in = inputs(1);
  for (auto& x : in) x &= sign_mask;
  std::array<std::uint32_t, kInputs> out{};
  for (auto _ : state) {
    for (std::size_t i = 0; i < kInputs; ++i) out[i] = f(in[i]);
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(static_cast<std::int64_t>(state.iterations() * kInputs));
}

template <class Function>
void run_on_floats(benchmark::State& state, Function&& f) {
  const auto x = inputs(1);
  const auto y = inputs(2);
  const auto z = inputs(3);
  std::array<float, kInputs> a{};
  std::array<float, kInputs> b{};
  std::array<float, kInputs> c{};
  std::array<float, kInputs> out{};
  for (std::size_t i = 0; i < kInputs; ++i) {
    a[i] = std::bit_cast<float>(x[i]);
    b[i] = std::bit_cast<float>(y[i]);
    c[i] = std::bit_cast<float>(z[i]);
  }
  for (auto _ : state) {
    for (std::size_t i = 0; i < kInputs; ++i) out[i] = f(a[i], b[i], c[i]);
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(static_cast<std::int64_t>(state.iterations() * kInputs));
}

void ex2(benchmark::State& state) {
  run_on_bits(state, arith::mufu::ex2);
}
void lg2(benchmark::State& state) {
  run_on_bits(state, arith::mufu::lg2, 0x7fffffffU);
}
void rcp(benchmark::State& state) {
  run_on_bits(state, arith::mufu::rcp);
}
void rsqrt(benchmark::State& state) {
  run_on_bits(state, arith::mufu::rsqrt, 0x7fffffffU);
}
void tanh(benchmark::State& state) {
  run_on_bits(state, arith::mufu::tanh);
}
void peer_exp2f(benchmark::State& state) {
  run_on_bits(state, [](std::uint32_t x) {
    return std::bit_cast<std::uint32_t>(std::exp2(std::bit_cast<float>(x)));
  });
}
BENCHMARK(ex2);
BENCHMARK(lg2);
BENCHMARK(rcp);
BENCHMARK(rsqrt);
BENCHMARK(tanh);
BENCHMARK(peer_exp2f);

void bf16_from_fp32(benchmark::State& state) {
  run_on_bits(state, [](std::uint32_t x) { return std::uint32_t{arith::bf16_from_fp32(x)}; });
}
void e4m3_from_fp32(benchmark::State& state) {
  run_on_bits(state, [](std::uint32_t x) { return std::uint32_t{arith::e4m3_from_fp32(x)}; });
}
BENCHMARK(bf16_from_fp32);
BENCHMARK(e4m3_from_fp32);

void ftz_fma(benchmark::State& state) {
  run_on_floats(state, [](float a, float b, float c) { return arith::ftz::fma(a, b, c); });
}
void ftz_mul(benchmark::State& state) {
  run_on_floats(state, [](float a, float b, float) { return arith::ftz::mul(a, b); });
}
void ftz_add(benchmark::State& state) {
  run_on_floats(state, [](float a, float b, float) { return arith::ftz::add(a, b); });
}
void ftz_max(benchmark::State& state) {
  run_on_floats(state, [](float a, float b, float) { return arith::ftz::max(a, b); });
}
void peer_fmaf(benchmark::State& state) {
  run_on_floats(state, [](float a, float b, float c) { return std::fma(a, b, c); });
}
BENCHMARK(ftz_fma);
BENCHMARK(ftz_mul);
BENCHMARK(ftz_add);
BENCHMARK(ftz_max);
BENCHMARK(peer_fmaf);

/// 128 steps on operands of exponents -8..7, each onto its own accumulator.
template <class Word, int k, class Step>
void run_steps(benchmark::State& state, std::uint32_t (*narrow)(std::uint32_t), Step&& step) {
  constexpr std::size_t kSteps = kInputs / 32;
  const auto x = inputs(1);
  const auto y = inputs(2);
  const auto c = inputs(3);
  std::array<Word, kInputs> a{};
  std::array<Word, kInputs> b{};
  for (std::size_t i = 0; i < kInputs; ++i) {
    a[i] = static_cast<Word>(narrow(x[i]));
    b[i] = static_cast<Word>(narrow(y[i]));
  }
  std::array<std::uint32_t, kSteps> out{};
  for (auto _ : state) {
    for (std::size_t i = 0; i < kSteps; ++i) out[i] = step(&a[32 * i], &b[32 * i], c[i]);
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(static_cast<std::int64_t>(state.iterations() * kSteps * k));
}

std::uint32_t to_bf16(std::uint32_t x) {
  return arith::bf16_from_fp32(x);
}
std::uint32_t to_f16(std::uint32_t x) {
  return arith::f16_from_fp32(x);
}
std::uint32_t to_e4m3(std::uint32_t x) {
  return arith::e4m3_from_fp32(x);
}

void mma_bf16_k16(benchmark::State& state) {
  run_steps<std::uint16_t, 16>(state, to_bf16,
                               [](const std::uint16_t* a, const std::uint16_t* b, std::uint32_t c) {
                                 return arith::mma_bf16_k16(a, b, c);
                               });
}
void mma_f16_k16(benchmark::State& state) {
  run_steps<std::uint16_t, 16>(state, to_f16,
                               [](const std::uint16_t* a, const std::uint16_t* b, std::uint32_t c) {
                                 return arith::mma_f16_k16(a, b, c);
                               });
}
void wgmma_e4m3_k32(benchmark::State& state) {
  run_steps<std::uint8_t, 32>(state, to_e4m3,
                              [](const std::uint8_t* a, const std::uint8_t* b, std::uint32_t c) {
                                return arith::wgmma_fp8_k32<arith::E4m3, arith::E4m3>(a, b, c);
                              });
}
void peer_float_loop_k16(benchmark::State& state) {
  run_steps<std::uint16_t, 16>(state, to_bf16,
                               [](const std::uint16_t* a, const std::uint16_t* b, std::uint32_t c) {
                                 float sum = std::bit_cast<float>(c);
                                 for (int i = 0; i < 16; ++i)
                                   sum += arith::fp32_from_bf16(a[i]) * arith::fp32_from_bf16(b[i]);
                                 return std::bit_cast<std::uint32_t>(sum);
                               });
}
BENCHMARK(mma_bf16_k16);
BENCHMARK(mma_f16_k16);
BENCHMARK(wgmma_e4m3_k32);
BENCHMARK(peer_float_loop_k16);

}  // namespace
