// Proves: the GPU emulator gives the bits of the CPU emulator, intermediates included, over a grid of shapes,
// masks and regimes, with infinities and NaNs, in a workspace of any size; and the bits that real kernels
// recorded.
//
// Built twice: for a GPU (skipped where there is none), and over a stand-in that runs the same kernels on the
// CPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>

#include "backends/emulator.hpp"
#include "backends/gpu_emulator.hpp"
#include "datasets/error.hpp"
#include "datasets/regime.hpp"
#include "gpu/common/device.hpp"
#include "tests/backends/goldens.hpp"

namespace bitattn {
namespace {

#if defined(BITATTN_STAND_IN)
constexpr bool kOnGpu = false;
#else
constexpr bool kOnGpu = true;
#endif

/// Why there is nothing to run on, or empty.
std::string no_gpu() {
  try {
    gpu::select_device();
    return "";
  } catch (const gpu::Error& error) {
    return error.what();
  }
}

class EmulatorOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = no_gpu(); !why.empty()) GTEST_SKIP() << why;
#if defined(BITATTN_STAND_IN)
    gpu::stand_in::set_memory(std::size_t{1} << 30);
#endif
  }
};

template <class T>
void expect_equal(const char* name, const Tensor<T>& cpu, const Tensor<T>& gpu) {
  ASSERT_EQ(cpu.shape, gpu.shape) << name;
  std::size_t differing = 0;
  std::size_t first = cpu.size();
  for (std::size_t i = cpu.size(); i-- > 0;) {
    if (std::memcmp(&cpu.data[i], &gpu.data[i], sizeof(T)) == 0) continue;
    ++differing;
    first = i;
  }
  EXPECT_EQ(differing, 0U) << name << ": of " << cpu.size() << ", the first at " << first;
}

std::size_t expect_every_bit(const Result& cpu, const Result& gpu) {
  expect_equal("out", cpu.out, gpu.out);
  expect_equal("lse", cpu.lse, gpu.lse);
  expect_equal("dpsum", cpu.intermediates.dpsum, gpu.intermediates.dpsum);
  expect_equal("lse_log2", cpu.intermediates.lse_log2, gpu.intermediates.lse_log2);
  expect_equal("dq_accum", cpu.intermediates.dq_accum, gpu.intermediates.dq_accum);
  expect_equal("dk_accum", cpu.intermediates.dk_accum, gpu.intermediates.dk_accum);
  expect_equal("dv_accum", cpu.intermediates.dv_accum, gpu.intermediates.dv_accum);
  expect_equal("dq", cpu.dq, gpu.dq);
  expect_equal("dk", cpu.dk, gpu.dk);
  expect_equal("dv", cpu.dv, gpu.dv);
  expect_equal("uncast out", cpu.uncast.out, gpu.uncast.out);
  expect_equal("uncast dq", cpu.uncast.dq, gpu.uncast.dq);
  expect_equal("uncast dk", cpu.uncast.dk, gpu.uncast.dk);
  expect_equal("uncast dv", cpu.uncast.dv, gpu.uncast.dv);
  EXPECT_EQ(cpu.dq_order_fixed, gpu.dq_order_fixed);
  EXPECT_EQ(cpu.dkv_order_fixed, gpu.dkv_order_fixed);
  return cpu.out.size() + cpu.lse.size() + cpu.dq.size() + cpu.dk.size() + cpu.dv.size();
}

RunOptions everything() {
  RunOptions options;
  options.want_uncast = true;
  options.want_accumulators = true;
  return options;
}

void expect_equal_to_the_cpu(const Capture& capture, const profile::Profile& profile = {},
                             std::size_t workspace = 0) {
  const Result cpu = emulator_backend(profile)->run(capture, everything());
  const Result gpu = gpu_emulator_backend(profile, workspace)->run(capture, everything());
  expect_every_bit(cpu, gpu);
}

struct Shape {
  const char* regime;
  std::size_t batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim;
  bool causal = false;
  int window_left = -1, window_right = -1;
  double softcap = 0;
};

Capture capture_of(const Shape& shape, std::uint64_t seed) {
  GenerateOptions options;
  options.regime = shape.regime;
  options.batch = shape.batch;
  options.heads_q = shape.heads_q;
  options.heads_kv = shape.heads_kv;
  options.seqlen_q = shape.seqlen_q;
  options.seqlen_k = shape.seqlen_k;
  options.head_dim = shape.head_dim;
  options.causal = shape.causal;
  options.window_left = shape.window_left;
  options.window_right = shape.window_right;
  options.softcap = shape.softcap;
  options.seed = seed;
  Capture capture;
  capture.problem = generate(options);
  capture.name = std::string(shape.regime) + " " + std::to_string(shape.seqlen_q) + "x" +
                 std::to_string(shape.seqlen_k) + " d" + std::to_string(shape.head_dim) +
                 (shape.causal ? " causal" : "");
  return capture;
}

/// What fits the stand-in: seconds in all.
const Shape kSmall[] = {
    {"normal", 1, 1, 1, 64, 64, 64},
    {"normal", 1, 2, 1, 70, 50, 64, true},
    {"late", 2, 1, 1, 33, 150, 40, true},
    {"wild", 1, 2, 2, 96, 96, 64},
    {"peaky", 1, 4, 2, 40, 260, 64, true},
    {"tiny", 1, 1, 1, 50, 70, 96},
    {"tinygrad", 1, 1, 1, 65, 65, 128, true},
    {"normal3", 1, 1, 1, 30, 200, 64, false, -1, -1, 15.0},
    {"ties", 1, 2, 1, 60, 90, 128, false, 20, 8},
    {"normal", 1, 3, 1, 7, 200, 64, true},
    {"normal", 1, 1, 1, 20, 30, 256},
    {"late", 1, 1, 1, 40, 100, 192, true},
    {"normal", 1, 1, 1, 100, 20, 64, true},
};

/// What needs a GPU to run in seconds on its side, and a minute or so on the CPU's.
const Shape kLarge[] = {
    {"normal", 1, 2, 2, 512, 512, 128},
    {"normal", 1, 4, 2, 500, 777, 128, true},
    {"late", 2, 2, 2, 384, 384, 64, true},
    {"late", 1, 2, 1, 640, 640, 64},
    {"wild", 1, 2, 2, 300, 700, 128},
    {"peaky", 1, 8, 1, 129, 1000, 128, true},
    {"ties", 1, 2, 2, 512, 512, 96, true},
    {"tiny", 1, 2, 2, 256, 256, 128},
    {"tinygrad", 1, 2, 2, 256, 256, 128, true},
    {"normal3", 1, 2, 2, 300, 300, 128, true, -1, -1, 30.0},
    {"normal3", 1, 2, 1, 300, 300, 64, true, -1, -1, 50.0},
    {"normal", 1, 2, 2, 600, 600, 128, false, 64, 16},
    {"normal", 1, 2, 2, 600, 400, 64, false, 100, 0},
    {"late", 1, 2, 2, 250, 350, 192, true},
    {"normal", 1, 2, 2, 250, 350, 256, true},
    {"normal", 1, 2, 2, 200, 300, 256},
    {"normal", 1, 16, 2, 24, 900, 128, true},
    {"normal", 3, 2, 2, 100, 1, 128},
    {"normal", 1, 1, 1, 1, 600, 128, true},
    {"normal", 1, 1, 1, 900, 100, 64, true},
    {"normal", 1, 2, 1, 2048, 2048, 128, true},
};

void expect_grid(std::span<const Shape> shapes) {
  std::size_t compared = 0;
  for (const Shape& shape : shapes) {
    const Capture capture = capture_of(shape, 1000 + compared % 97);
    SCOPED_TRACE(capture.name);
    const Result cpu = emulator_backend({})->run(capture, everything());
    const Result gpu = gpu_emulator_backend({})->run(capture, everything());
    compared += expect_every_bit(cpu, gpu);
  }
  std::printf("%zu problems, %zu elements of the outputs\n", shapes.size(), compared);
}

TEST_F(EmulatorOnGpu, SmallGridOfShapes) {
  expect_grid(kSmall);
}

TEST_F(EmulatorOnGpu, GridOfShapes) {
  if (!kOnGpu) GTEST_SKIP() << "the stand-in takes too long for the large shapes";
  expect_grid(kLarge);
}

/// Infinities, NaNs and subnormals among all inputs.
TEST_F(EmulatorOnGpu, SpecialValues) {
  for (const bool causal : {false, true}) {
    Capture capture =
        capture_of({"normal", 1, 2, 1, kOnGpu ? 300U : 80U, kOnGpu ? 333U : 70U, 64, causal}, 5);
    Problem& problem = capture.problem;
    const auto put = [](Bf16Tensor& tensor, std::size_t every, std::uint16_t word) {
      for (std::size_t i = every / 2; i < tensor.size(); i += every) tensor.data[i] = word;
    };
    put(problem.q, 3001, 0x7f80);
    put(problem.k, 4099, 0xff80);
    put(problem.v, 2503, 0x7fc1);
    put(problem.v, 3203, 0x7f80);
    put(problem.dout, 2903, 0xff81);
    put(problem.dout, 707, 0x0001);
    put(problem.q, 501, 0x8003);
    put(problem.k, 401, 0x0040);
    SCOPED_TRACE(causal);
    expect_equal_to_the_cpu(capture);
  }
}

/// Sequences of these lengths, packed: tensors without a batch axis, one sequence behind the other.
Capture packed(Shape shape, const std::vector<std::size_t>& q_lengths,
               const std::vector<std::size_t>& k_lengths, std::uint64_t seed) {
  shape.batch = 1;
  shape.seqlen_q = std::accumulate(q_lengths.begin(), q_lengths.end(), std::size_t{0});
  shape.seqlen_k = std::accumulate(k_lengths.begin(), k_lengths.end(), std::size_t{0});
  Capture capture = capture_of(shape, seed);
  Problem& problem = capture.problem;
  capture.name += " packed";
  for (Bf16Tensor* tensor : {&problem.q, &problem.k, &problem.v, &problem.dout}) {
    tensor->shape.erase(tensor->shape.begin());
  }
  const auto offsets = [](const std::vector<std::size_t>& lengths) {
    std::vector<std::int32_t> ends{0};
    for (const std::size_t n : lengths) ends.push_back(ends.back() + static_cast<std::int32_t>(n));
    return ends;
  };
  problem.layout = Layout::thd;
  problem.batch = q_lengths.size();
  problem.seqlen_q = *std::max_element(q_lengths.begin(), q_lengths.end());
  problem.seqlen_k = *std::max_element(k_lengths.begin(), k_lengths.end());
  problem.cu_seqlens_q = offsets(q_lengths);
  problem.cu_seqlens_k = offsets(k_lengths);
  return capture;
}

/// Empty sequences, such without keys or without queries, and such as end within a tile: tiles read into
/// their neighbours there.
TEST_F(EmulatorOnGpu, PackedSequences) {
  const std::size_t n = kOnGpu ? 4 : 1;
  const std::vector<std::size_t> q_lengths{n * 33, 0, n * 5, n * 40, 1, n * 12};
  const std::vector<std::size_t> k_lengths{n * 20, n * 7, n * 50, 0, n * 3, n * 61};
  std::uint64_t seed = 40;
  for (const Shape& shape :
       {Shape{"normal", 1, 2, 2, 0, 0, 64}, Shape{"late", 1, 4, 2, 0, 0, 64, true},
        Shape{"peaky", 1, 2, 1, 0, 0, 128, true}, Shape{"normal", 1, 2, 1, 0, 0, 96, false, 17, 4},
        Shape{"normal3", 1, 2, 2, 0, 0, 128, true, -1, -1, 20.0}}) {
    const Capture capture = packed(shape, q_lengths, k_lengths, ++seed);
    SCOPED_TRACE(capture.name);
    expect_equal_to_the_cpu(capture);
  }
}

TEST_F(EmulatorOnGpu, NoKeysAtAll) {
  for (const std::size_t heads_kv : {2U, 1U}) {
    expect_equal_to_the_cpu(capture_of({"normal", 1, 2, heads_kv, 40, 0, 64, true}, 21));
  }
}

/// Where the kernel fixes no order, both add in the same one.
TEST_F(EmulatorOnGpu, NoFixedOrder) {
  Capture capture = capture_of({"late", 1, 4, 1, 70, kOnGpu ? 700U : 300U, 64, true}, 22);
  capture.problem.deterministic = false;
  expect_equal_to_the_cpu(capture);
}

/// Shapes that nobody chose: any head size, group, mask, length, regime.
TEST_F(EmulatorOnGpu, DrawnShapes) {
  std::mt19937 random(7);
  const auto draw = [&random](std::size_t least, std::size_t most) {
    return least + random() % (most - least + 1);
  };
  const std::size_t longest = kOnGpu ? 400 : 90;
  const int count = kOnGpu ? 150 : 16;
  std::size_t packed_ones = 0;
  for (int i = 0; i < count; ++i) {
    const std::vector<RegimeInfo>& all = regimes();
    Shape shape{};
    shape.regime = all[draw(0, all.size() - 1)].name.c_str();
    shape.batch = draw(1, 2);
    shape.heads_kv = draw(1, 2);
    shape.heads_q = shape.heads_kv * draw(1, 3);
    shape.seqlen_q = draw(1, longest);
    shape.seqlen_k = draw(1, longest);
    shape.head_dim = 8 * draw(1, kOnGpu ? 32 : 16);
    shape.causal = draw(0, 1) == 1;
    if (draw(0, 2) == 0) shape.window_left = static_cast<int>(draw(0, longest));
    if (draw(0, 2) == 0) shape.window_right = static_cast<int>(draw(0, longest));
    if (draw(0, 3) == 0) shape.softcap = static_cast<double>(draw(1, 40));
    const std::uint64_t seed = 100 + static_cast<std::uint64_t>(i);
    const bool is_packed = draw(0, 2) == 0;
    packed_ones += is_packed ? 1 : 0;
    Capture capture = is_packed ? packed(shape, {draw(0, longest), draw(1, longest), draw(0, 40)},
                                         {draw(1, longest), draw(0, longest), draw(0, 40)}, seed)
                                : capture_of(shape, seed);
    capture.problem.deterministic = draw(0, 3) != 0;
    SCOPED_TRACE(capture.name + " draw " + std::to_string(i) + ", window " +
                 std::to_string(shape.window_left) + " " + std::to_string(shape.window_right) + ", softcap " +
                 std::to_string(shape.softcap) + ", heads " + std::to_string(shape.heads_q) + " to " +
                 std::to_string(shape.heads_kv));
    expect_equal_to_the_cpu(capture);
    if (HasFatalFailure()) return;
  }
  EXPECT_GE(packed_ones, 3U);
  std::printf("%d problems, %zu of them packed\n", count, packed_ones);
}

/// A workspace so small that every key block and tile goes alone gives the same bits.
TEST_F(EmulatorOnGpu, AnyWorkspace) {
  const Capture capture =
      capture_of({"late", 1, 4, 2, kOnGpu ? 700U : 150U, kOnGpu ? 700U : 300U, 64, true}, 9);
  const Result cpu = emulator_backend({})->run(capture, everything());
  for (const std::size_t workspace : {std::size_t{1}, std::size_t{3} << 20, std::size_t{200} << 20}) {
    SCOPED_TRACE(workspace);
    const Result gpu = gpu_emulator_backend({}, workspace)->run(capture, everything());
    expect_every_bit(cpu, gpu);
  }
}

/// Other decisions of a profile than the kernel's own are followed too, each as the CPU emulator follows it.
TEST_F(EmulatorOnGpu, EveryDecisionOfAProfile) {
  const Capture capture = capture_of({"late", 1, 2, 1, 70, 200, 64, true}, 11);
  const Capture subnormal = capture_of({"tinygrad", 1, 2, 1, 70, 150, 64, true}, 12);
  using profile::Profile;
  const auto with = [](auto&& change) {
    Profile profile;
    change(profile);
    return profile;
  };
  const Profile profiles[] = {
      with([](Profile& p) { p.arithmetic.flush_subnormals = false; }),
      with([](Profile& p) { p.arithmetic.tensor_core_fraction_bits = 24; }),
      with([](Profile& p) { p.arithmetic.tensor_core_rounds_to_nearest = true; }),
      with([](Profile& p) { p.forward.block_n = 64; }),
      with([](Profile& p) { p.forward.key_blocks = profile::KeyBlockOrder::left_to_right; }),
      with([](Profile& p) { p.forward.exponent_fused = false; }),
      with([](Profile& p) { p.forward.row_sum_rescale_fused = false; }),
      with([](Profile& p) { p.forward.quad_sum = profile::QuadSum::beside_then_across; }),
      with([](Profile& p) { p.forward.lse = profile::LseFusion::log_term; }),
      with([](Profile& p) { p.backward.block_n = 64; }),
      with([](Profile& p) { p.backward.exponent_fused = false; }),
      with([](Profile& p) { p.backward.dpsum = profile::DpsumStart::first_product_rounded; }),
      with([](Profile& p) { p.backward.ds = profile::DsOrder::fused; }),
      with([](Profile& p) { p.backward.ds_from_cast_p = true; }),
      with([](Profile& p) { p.backward.dq_order_reversed = true; }),
      with([](Profile& p) { p.backward.bulk_reduce_flushes = true; }),
  };
  for (std::size_t i = 0; i < std::size(profiles); ++i) {
    SCOPED_TRACE(i);
    expect_equal_to_the_cpu(capture, profiles[i]);
    if (i == 0 || i + 1 == std::size(profiles)) expect_equal_to_the_cpu(subnormal, profiles[i]);
    if (HasFatalFailure()) return;
  }
}

TEST_F(EmulatorOnGpu, RefusesWhatItDoesNotHave) {
  const Capture capture = capture_of({"normal", 1, 1, 1, 16, 16, 64}, 1);
  profile::Profile rounded;
  rounded.arithmetic.ex2 = profile::Function::correctly_rounded;
  EXPECT_THROW(gpu_emulator_backend(rounded)->run(capture, {}), InputError);
  profile::Profile exact;
  exact.exact = profile::SiteSet::all();
  EXPECT_THROW(gpu_emulator_backend(exact)->run(capture, {}), InputError);
}

void expect_recorded_bits(const std::vector<std::string>& paths, std::size_t most_elements) {
  std::size_t compared = 0;
  std::size_t captures = 0;
  for (const std::string& path : paths) {
    SCOPED_TRACE(path);
    const Capture capture = test::load(path);
    // Pairs times columns: what the stand-in can do in seconds.
    if (capture.problem.total_q() * capture.problem.seqlen_k * capture.problem.head_dim *
            capture.problem.heads_q >
        most_elements) {
      continue;
    }
    const Result gpu = gpu_emulator_backend({})->run(capture, {});
    // Where the kernel fixes no order of its parts, dQ (dK, dV) may be any of several.
    Result recorded = capture.recorded;
    if (!gpu.dq_order_fixed) {
      recorded.dq = {};
      recorded.intermediates.dq_accum = {};
    }
    if (!gpu.dkv_order_fixed) {
      recorded.dk = {};
      recorded.dv = {};
      recorded.intermediates.dk_accum = {};
      recorded.intermediates.dv_accum = {};
    }
    const test::Difference d = test::difference(recorded, gpu);
    EXPECT_EQ(d.differing, 0U) << d.text;
    EXPECT_GE(d.compared, capture.recorded.out.size());
    compared += d.compared;
    ++captures;
  }
  EXPECT_GE(captures, 1U);
  std::printf("%zu captures, %zu recorded elements\n", captures, compared);
}

constexpr std::size_t kMostElements = kOnGpu ? std::numeric_limits<std::size_t>::max() : 4'000'000;

TEST_F(EmulatorOnGpu, RecordedBitsOfTheBundledCaptures) {
  std::vector<std::string> paths = test::bundled_captures("fa3");
  if (paths.empty()) GTEST_SKIP() << "away from the checkout: the captures are where BITATTN_GOLDENS says";
  if (kOnGpu) {
    for (const std::string& path : test::bundled_captures("real-run")) paths.push_back(path);
  }
  expect_recorded_bits(paths, kMostElements);
}

class EmulatorOnGpuLargeSet : public EmulatorOnGpu, public ::testing::WithParamInterface<const char*> {};

TEST_P(EmulatorOnGpuLargeSet, RecordedBits) {
  const std::vector<std::string> paths = test::large_set_captures(GetParam());
  if (paths.empty()) GTEST_SKIP() << "BITATTN_GOLDENS is not set";
  if (!kOnGpu) GTEST_SKIP() << "the stand-in takes too long for the large set";
  expect_recorded_bits(paths, kMostElements);
}

INSTANTIATE_TEST_SUITE_P(EmulatorOnGpu, EmulatorOnGpuLargeSet,
                         ::testing::Values("fa3", "fa3-corners", "real-run"),
                         [](const ::testing::TestParamInfo<const char*>& tested) {
                           std::string name = tested.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

#if defined(BITATTN_STAND_IN)

/// Too little memory is one line that says what was wanted and what there is.
TEST_F(EmulatorOnGpu, TooLittleMemory) {
  const Capture capture = capture_of({"normal", 1, 1, 1, 64, 64, 64}, 1);
  for (const std::size_t memory : {std::size_t{10'000}, std::size_t{100'000}, std::size_t{150'000}}) {
    gpu::stand_in::set_memory(memory);
    try {
      gpu_emulator_backend({})->run(capture, {});
      ADD_FAILURE() << memory << " bytes are enough?";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("too little GPU memory"), std::string::npos) << error.what();
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    }
  }
}

/// What is kept grows with the rows, not with the pairs: twice the length, about twice the memory.
TEST_F(EmulatorOnGpu, MemoryGrowsWithTheLength) {
  std::size_t peaks[2] = {};
  for (const int i : {0, 1}) {
    const std::size_t length = i == 0 ? 256 : 512;
    gpu::stand_in::set_memory(std::size_t{1} << 30);
    RunOptions options;
    gpu_emulator_backend({}, 1)->run(capture_of({"normal", 1, 1, 1, length, length, 64, true}, 1), options);
    peaks[i] = gpu::stand_in::peak_memory();
  }
  EXPECT_LT(static_cast<double>(peaks[1]), 2.2 * static_cast<double>(peaks[0]));
}

#endif

}  // namespace
}  // namespace bitattn
