// Proves, on a Hopper GPU: the backend gpu:fa3 gives every bit of the emulated FlashAttention-3 kernels,
// intermediates included, and every recorded bit of the real ones; the same bits in every run; and refuses
// what it does not have.

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>

#include "backends/emulator.hpp"
#include "backends/gpu_kernels.hpp"
#include "datasets/error.hpp"
#include "datasets/regime.hpp"
#include "gpu/common/buffer.hpp"
#include "gpu/kernels/bitattn_kernels.h"
#include "tests/backends/goldens.hpp"

namespace bitattn {
namespace {

using test::Difference;

#define SKIP_WITHOUT_HOPPER() \
  if (bitattn_kernels_check_device() != BITATTN_KERNELS_OK) GTEST_SKIP() << bitattn_kernels_message()

RunOptions everything() {
  RunOptions options;
  options.want_accumulators = true;
  return options;
}

/// Every tensor of both results, shapes and bits; returns how many elements were compared.
template <class T>
std::size_t expect_same(const char* name, const Tensor<T>& a, const Tensor<T>& b) {
  EXPECT_EQ(a.shape, b.shape) << name;
  if (a.shape != b.shape) return 0;
  std::size_t differing = 0;
  std::size_t first = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a.data[i], &b.data[i], sizeof(T)) == 0) continue;
    if (differing++ == 0) first = i;
  }
  EXPECT_EQ(differing, 0U) << name << " of " << a.size() << ", first at " << first;
  return a.size();
}

std::size_t expect_same(const Result& a, const Result& b) {
  const Intermediates& x = a.intermediates;
  const Intermediates& y = b.intermediates;
  std::size_t compared = expect_same("out", a.out, b.out);
  compared += expect_same("lse", a.lse, b.lse);
  compared += expect_same("dpsum", x.dpsum, y.dpsum);
  compared += expect_same("lse_log2", x.lse_log2, y.lse_log2);
  compared += expect_same("dq_accum", x.dq_accum, y.dq_accum);
  compared += expect_same("dk_accum", x.dk_accum, y.dk_accum);
  compared += expect_same("dv_accum", x.dv_accum, y.dv_accum);
  compared += expect_same("dq", a.dq, b.dq);
  compared += expect_same("dk", a.dk, b.dk);
  compared += expect_same("dv", a.dv, b.dv);
  return compared;
}

struct Shape {
  std::size_t batch, heads_q, heads_kv, seqlen_q, seqlen_k;
};

Capture generated(const std::string& regime, const Shape& shape, std::size_t head_dim, bool causal,
                  std::uint64_t seed) {
  GenerateOptions options;
  options.regime = regime;
  options.batch = shape.batch;
  options.heads_q = shape.heads_q;
  options.heads_kv = shape.heads_kv;
  options.seqlen_q = shape.seqlen_q;
  options.seqlen_k = shape.seqlen_k;
  options.head_dim = head_dim;
  options.causal = causal;
  options.seed = seed;
  Capture capture;
  capture.name = regime + " b" + std::to_string(shape.batch) + " h" + std::to_string(shape.heads_q) + "/" +
                 std::to_string(shape.heads_kv) + " q" + std::to_string(shape.seqlen_q) + " k" +
                 std::to_string(shape.seqlen_k) + " d" + std::to_string(head_dim) +
                 (causal ? " causal" : " full");
  capture.problem = generate(options);
  return capture;
}

/// Emulates and runs one problem and compares all.
std::size_t expect_emulated_bits(const Capture& capture) {
  SCOPED_TRACE(capture.name);
  const Result emulated = emulator_backend(profile::Profile{})->run(capture, everything());
  const Result run = gpu_kernels_backend()->run(capture, everything());
  return expect_same(emulated, run);
}

class Grid : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(Grid, EveryBitOfTheEmulatorInEveryShape) {
  SKIP_WITHOUT_HOPPER();
  const auto [head_dim, causal] = GetParam();
  const Shape shapes[] = {
      {1, 1, 1, 64, 64},   {1, 1, 1, 1, 1},     {1, 1, 1, 1, 400},   {1, 2, 2, 3, 5},
      {1, 1, 1, 128, 128}, {1, 1, 1, 80, 176},  {2, 1, 1, 176, 192}, {1, 2, 1, 200, 333},
      {1, 1, 1, 333, 457}, {1, 1, 1, 457, 333}, {1, 1, 1, 300, 100}, {2, 4, 2, 257, 255},
      {1, 8, 1, 129, 385}, {1, 3, 3, 512, 512}, {1, 1, 1, 65, 1025}, {1, 2, 2, 1025, 65},
  };
  std::size_t compared = 0;
  std::uint64_t seed = 1;
  for (const Shape& shape : shapes) {
    compared +=
        expect_emulated_bits(generated("normal", shape, static_cast<std::size_t>(head_dim), causal, seed++));
  }
  std::printf("%zu shapes, %zu elements compared\n", std::size(shapes), compared);
}

/// Few and small, for compute-sanitizer: several blocks of threads on one query block's dQ, groups, ragged
/// ends, rows without keys.
TEST_P(Grid, SmallShapes) {
  SKIP_WITHOUT_HOPPER();
  const auto [head_dim, causal] = GetParam();
  std::uint64_t seed = 50;
  for (const Shape& shape : {Shape{1, 2, 1, 150, 270}, Shape{1, 1, 1, 270, 140}}) {
    expect_emulated_bits(generated("normal", shape, static_cast<std::size_t>(head_dim), causal, seed++));
  }
}

TEST_P(Grid, EveryBitOfTheEmulatorInEveryRegime) {
  SKIP_WITHOUT_HOPPER();
  const auto [head_dim, causal] = GetParam();
  std::size_t compared = 0;
  std::uint64_t seed = 100;
  for (const RegimeInfo& regime : regimes()) {
    compared += expect_emulated_bits(
        generated(regime.name, {1, 2, 1, 400, 417}, static_cast<std::size_t>(head_dim), causal, seed++));
  }
  std::printf("%zu regimes, %zu elements compared\n", regimes().size(), compared);
}

TEST_P(Grid, EveryBitOfTheEmulatorInLongRows) {
  SKIP_WITHOUT_HOPPER();
  const auto [head_dim, causal] = GetParam();
  const std::size_t compared =
      expect_emulated_bits(
          generated("late", {1, 2, 2, 2048, 2048}, static_cast<std::size_t>(head_dim), causal, 7)) +
      expect_emulated_bits(
          generated("normal", {1, 4, 1, 777, 1999}, static_cast<std::size_t>(head_dim), causal, 8));
  std::printf("%zu elements compared\n", compared);
}

/// More key blocks than surely run at once: their blocks of threads start in the order in which they add to
/// dQ.
TEST_P(Grid, EveryBitOfTheEmulatorWithManyKeyBlocks) {
  SKIP_WITHOUT_HOPPER();
  const auto [head_dim, causal] = GetParam();
  const std::size_t compared = expect_emulated_bits(
      generated("normal", {1, 2, 1, 300, 9100}, static_cast<std::size_t>(head_dim), causal, 11));
  std::printf("%zu elements compared\n", compared);
}

TEST_P(Grid, LeftToRightWhereTheKernelFixesNoOrder) {
  SKIP_WITHOUT_HOPPER();
  const auto [head_dim, causal] = GetParam();
  Capture capture = generated("normal", {1, 2, 1, 700, 900}, static_cast<std::size_t>(head_dim), causal, 9);
  capture.problem.deterministic = false;
  expect_emulated_bits(capture);
}

TEST_P(Grid, TheSameBitsInEveryRun) {
  SKIP_WITHOUT_HOPPER();
  const auto [head_dim, causal] = GetParam();
  const Capture capture =
      generated("normal", {2, 8, 4, 1500, 1500}, static_cast<std::size_t>(head_dim), causal, 10);
  const Result first = gpu_kernels_backend()->run(capture, everything());
  for (int i = 0; i < 9; ++i) expect_same(first, gpu_kernels_backend()->run(capture, everything()));
}

TEST_P(Grid, WithoutQueriesOrKeys) {
  SKIP_WITHOUT_HOPPER();
  const auto [head_dim, causal] = GetParam();
  for (const auto& [seqlen_q, seqlen_k] : {std::pair<std::size_t, std::size_t>{5, 0}, {0, 5}}) {
    Capture capture = generated("normal", {1, 4, 2, 5, 5}, static_cast<std::size_t>(head_dim), causal, 12);
    Problem& problem = capture.problem;
    problem.seqlen_q = seqlen_q;
    problem.seqlen_k = seqlen_k;
    for (Bf16Tensor* tensor : {&problem.q, &problem.dout}) *tensor = Bf16Tensor(problem.q_shape(), 0x3f80);
    for (Bf16Tensor* tensor : {&problem.k, &problem.v}) *tensor = Bf16Tensor(problem.k_shape(), 0x3f80);
    expect_emulated_bits(capture);
  }
}

/// The C interface over tensors that lie head by head (BHSD), each token with a gap behind it: the same bits
/// as token by token.
TEST_P(Grid, TheSameBitsInAnyLayout) {
  SKIP_WITHOUT_HOPPER();
  const auto [head_dim, causal] = GetParam();
  const Capture capture =
      generated("normal", {2, 4, 2, 200, 333}, static_cast<std::size_t>(head_dim), causal, 13);
  const Problem& problem = capture.problem;
  const Result expected = gpu_kernels_backend()->run(capture, {});
  const std::size_t pitch = problem.head_dim + 8;

  struct Spread {
    gpu::Buffer<std::uint16_t> memory;
    std::size_t tokens, heads;
  };
  const auto index = [&](const Spread& s, std::size_t b, std::size_t token, std::size_t h) {
    return ((b * s.heads + h) * s.tokens + token) * pitch;
  };
  const auto spread = [&](const Bf16Tensor* from, std::size_t tokens, std::size_t heads) {
    Spread s{{}, tokens, heads};
    std::vector<std::uint16_t> words(problem.batch * tokens * heads * pitch, 0x7fff);
    for (std::size_t i = 0; from != nullptr && i < from->size(); ++i) {
      const std::size_t row = i / problem.head_dim;
      words[index(s, row / heads / tokens, row / heads % tokens, row % heads) + i % problem.head_dim] =
          from->data[i];
    }
    s.memory.upload(words, "test");
    return s;
  };
  const auto view = [&](const Spread& s) {
    const auto row = static_cast<std::int64_t>(pitch);
    const auto head = static_cast<std::int64_t>(s.tokens) * row;
    return BitattnTensor{s.memory.data(), static_cast<std::int64_t>(s.heads) * head, row, head};
  };
  const auto expect_spread = [&](const char* name, const Bf16Tensor& want, const Spread& s) {
    const std::vector<std::uint16_t> words = s.memory.download(name);
    std::size_t differing = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const std::size_t row = i / problem.head_dim;
      const std::size_t at = index(s, row / s.heads / s.tokens, row / s.heads % s.tokens, row % s.heads);
      differing += words[at + i % problem.head_dim] != want.data[i] ? 1 : 0;
      if (i % problem.head_dim == 0)
        differing += words[at + problem.head_dim] != 0x7fff ? 1 : 0;  // the gap is untouched
    }
    EXPECT_EQ(differing, 0U) << name;
  };

  const Spread q = spread(&problem.q, problem.seqlen_q, problem.heads_q);
  const Spread k = spread(&problem.k, problem.seqlen_k, problem.heads_kv);
  const Spread v = spread(&problem.v, problem.seqlen_k, problem.heads_kv);
  const Spread dout = spread(&problem.dout, problem.seqlen_q, problem.heads_q);
  const Spread out = spread(nullptr, problem.seqlen_q, problem.heads_q);
  const Spread dq = spread(nullptr, problem.seqlen_q, problem.heads_q);
  const Spread dk = spread(nullptr, problem.seqlen_k, problem.heads_kv);
  const Spread dv = spread(nullptr, problem.seqlen_k, problem.heads_kv);
  gpu::Buffer<float> lse(expected.lse.size(), "lse");
  BitattnCall call{};
  call.batch = static_cast<std::int32_t>(problem.batch);
  call.seqlen_q = static_cast<std::int32_t>(problem.seqlen_q);
  call.seqlen_k = static_cast<std::int32_t>(problem.seqlen_k);
  call.heads_q = static_cast<std::int32_t>(problem.heads_q);
  call.heads_kv = static_cast<std::int32_t>(problem.heads_kv);
  call.head_dim = head_dim;
  call.softmax_scale = problem.softmax_scale;
  call.causal = causal ? 1 : 0;
  gpu::Buffer<unsigned char> workspace(bitattn_kernels_backward_workspace(&call), "workspace");
  ASSERT_EQ(bitattn_kernels_forward(&call, view(q), view(k), view(v), view(out), lse.data(), nullptr),
            BITATTN_KERNELS_OK)
      << bitattn_kernels_message();
  EXPECT_EQ(
      bitattn_kernels_backward(&call, view(q), view(k), view(v), view(out), lse.data(), view(dout), view(dq),
                               view(dk), view(dv), workspace.data(), workspace.size() - 1, nullptr, nullptr),
      BITATTN_KERNELS_SMALL_WORKSPACE);
  ASSERT_EQ(
      bitattn_kernels_backward(&call, view(q), view(k), view(v), view(out), lse.data(), view(dout), view(dq),
                               view(dk), view(dv), workspace.data(), workspace.size(), nullptr, nullptr),
      BITATTN_KERNELS_OK)
      << bitattn_kernels_message();
  expect_spread("out", expected.out, out);
  expect_spread("dq", expected.dq, dq);
  expect_spread("dk", expected.dk, dk);
  expect_spread("dv", expected.dv, dv);
}

INSTANTIATE_TEST_SUITE_P(KernelsFa3, Grid, ::testing::Combine(::testing::Values(128, 64), ::testing::Bool()),
                         [](const ::testing::TestParamInfo<std::tuple<int, bool>>& tested) {
                           return "D" + std::to_string(std::get<0>(tested.param)) +
                                  (std::get<1>(tested.param) ? "Causal" : "Full");
                         });

/// Recorded bits of the real kernels, where the kernels here have the shape.
void expect_recorded_bits(const std::vector<std::string>& paths) {
  std::size_t compared = 0;
  std::size_t run = 0;
  for (const std::string& path : paths) {
    SCOPED_TRACE(path);
    const Capture capture = test::load(path);
    const Problem& problem = capture.problem;
    const bool supported = (problem.head_dim == 64 || problem.head_dim == 128) && problem.softcap == 0 &&
                           problem.window_left < 0 && problem.window_right < 0 &&
                           problem.layout == Layout::bshd;
    if (!supported) {
      EXPECT_THROW(gpu_kernels_backend()->run(capture, {}), InputError);
      continue;
    }
    const Difference d = test::difference(capture.recorded, gpu_kernels_backend()->run(capture, {}));
    EXPECT_EQ(d.differing, 0U) << d.text;
    compared += d.compared;
    ++run;
  }
  EXPECT_GE(run, 1U);
  std::printf("%zu captures (%zu of other kinds refused), %zu elements compared\n", run, paths.size() - run,
              compared);
}

TEST(KernelsFa3Goldens, EveryBitOfTheBundledCaptures) {
  SKIP_WITHOUT_HOPPER();
  if (test::bundled_captures("fa3").empty()) {
    GTEST_SKIP() << "away from the checkout: the captures are where BITATTN_GOLDENS says";
  }
  expect_recorded_bits(test::bundled_captures("fa3"));
  expect_recorded_bits(test::bundled_captures("real-run"));
}

TEST(KernelsFa3Goldens, EveryBitOfTheLargeSet) {
  SKIP_WITHOUT_HOPPER();
  if (test::large_set_captures("fa3").empty()) GTEST_SKIP() << "BITATTN_GOLDENS is not set";
  for (const char* folder : {"fa3", "fa3-corners", "real-run"}) {  // a bundle has no fa3-corners
    const std::vector<std::string> paths = test::large_set_captures(folder);
    if (!paths.empty()) expect_recorded_bits(paths);
  }
}

TEST(KernelsFa3, RefusesInOneLine) {
  const auto message = [](const Capture& capture) -> std::string {
    try {
      gpu_kernels_backend()->run(capture, {});
    } catch (const InputError& error) {
      return error.what();
    }
    return "not refused";
  };
  Capture capture = generated("normal", {1, 1, 1, 16, 16}, 96, false, 1);
  EXPECT_NE(message(capture).find("head dim 96, the kernels have 64 and 128"), std::string::npos)
      << message(capture);
  capture = generated("normal", {1, 1, 1, 16, 16}, 64, false, 1);
  capture.problem.softcap = 30;
  EXPECT_NE(message(capture).find("softcap is not supported"), std::string::npos) << message(capture);
  capture.problem.softcap = 0;
  capture.problem.window_left = 3;
  EXPECT_NE(message(capture).find("a local window is not supported"), std::string::npos) << message(capture);
  if (bitattn_kernels_check_device() == BITATTN_KERNELS_OK) return;
  capture.problem.window_left = -1;
  EXPECT_NE(message(capture).find("gpu:fa3: "), std::string::npos) << message(capture);
}

TEST(KernelsFa3, TheInterfaceReportsCodes) {
  BitattnCall call{};
  call.batch = call.heads_q = call.heads_kv = 1;
  call.seqlen_q = call.seqlen_k = 64;
  call.head_dim = 128;
  EXPECT_EQ(bitattn_kernels_padded_q(&call), 80);
  EXPECT_EQ(bitattn_kernels_padded_k(&call), 128);
  const BitattnTensor nowhere{nullptr, 0, 128, 128};
  SKIP_WITHOUT_HOPPER();
  EXPECT_EQ(bitattn_kernels_forward(&call, nowhere, nowhere, nowhere, nowhere, nullptr, nullptr),
            BITATTN_KERNELS_UNSUPPORTED);
  EXPECT_STREQ(bitattn_kernels_message(), "out: no memory");
  float* const lse = reinterpret_cast<float*>(std::uintptr_t{256});  // never followed: the checks come first
  const BitattnTensor crooked{reinterpret_cast<void*>(std::uintptr_t{264}), 0, 128, 128};
  EXPECT_EQ(bitattn_kernels_forward(&call, crooked, crooked, crooked, crooked, lse, nullptr),
            BITATTN_KERNELS_MISALIGNED);
  call.head_dim = 96;
  EXPECT_EQ(bitattn_kernels_forward(&call, crooked, crooked, crooked, crooked, lse, nullptr),
            BITATTN_KERNELS_UNSUPPORTED);
}

}  // namespace
}  // namespace bitattn
