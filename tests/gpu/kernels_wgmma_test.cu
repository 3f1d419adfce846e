// Proves, on a Hopper GPU: the copy engine's tiles, the tensor core's descriptors and the register layouts of
// gpu/kernels are what the kernels take them for, in every operand orientation and width that they use, and
// the products are the emulator's chains, bit for bit.

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "emu/arith/tensor_core.hpp"
#include "gpu/common/buffer.hpp"
#include "gpu/kernels/async.cuh"
#include "gpu/kernels/tensor_map.hpp"
#include "gpu/kernels/wgmma.cuh"

namespace bitattn::gpu {
namespace {

#define SKIP_WITHOUT_HOPPER() \
  if (bitattn_kernels_check_device() != BITATTN_KERNELS_OK) GTEST_SKIP() << bitattn_kernels_message()

/// BF16 words over some 16 binades, zeros and a few subnormals among them.
std::vector<std::uint16_t> random_words(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint16_t> words(count);
  for (auto& word : words) {
    const std::uint32_t r = random();
    const std::uint32_t exponent = r % 64 == 0 ? 0 : 120 + (r >> 8) % 16;
    word = static_cast<std::uint16_t>((r >> 16 & 0x8000U) | exponent << 7 | (r >> 24 & 0x7fU));
    if (r % 61 == 0) word &= 0x8000U;
  }
  return words;
}

/// Loads a tile of kRows tokens and kColumns columns, panel by panel, and waits for it.
template <int kRows, int kColumns>
__device__ void load_tile(std::uint32_t tile, const CUtensorMap* map, std::uint32_t barrier) {
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_done();
    barrier_expect(barrier, kRows * kColumns * 2);
    for (int panel = 0; panel < kColumns / 64; ++panel) {
      copy_box(tile + static_cast<std::uint32_t>(panel * kRows * kRowBytes), map, barrier, panel * 64, 0, 0,
               0);
    }
  }
  __syncthreads();
  barrier_wait(barrier, 0);
}

template <int kCount>
__device__ void write_accumulators(const float (&d)[kCount], float* out, int columns) {
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 32 * 16 + thread % 32 / 4;
  for (int e = 0; e < kCount; ++e) {
    out[(row + e % 4 / 2 * 8) * columns + e / 4 * 8 + 2 * (thread % 4) + e % 2] = d[e];
  }
}

/// D[64][N] = A[first_row + 64][D] . B[N][D]: scores.
template <int kRowsA, int kN, int kD>
__global__ void by_columns(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                           int first_row, float* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ std::uint64_t barriers[2];
  const std::uint32_t tile_a = shared_address(memory);
  const std::uint32_t tile_b = tile_a + kRowsA * kD * 2;
  load_tile<kRowsA, kD>(tile_a, &a, shared_address(barriers));
  load_tile<kN, kD>(tile_b, &b, shared_address(barriers + 1));
  float d[kN / 2];
  wgmma_fence();
  multiply<kN, kD / 16>(d, ByColumns<kRowsA>{tile_a + static_cast<std::uint32_t>(first_row * kRowBytes)},
                        ByColumns<kN>{tile_b});
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  write_accumulators(d, out, kN);
}

/// D[64][N] = C + A[64][K] . B[K][N]: P.V, dV, dK. A and C come as a thread holds them.
template <int kK, int kN>
__global__ void from_registers(const std::uint16_t* a, const __grid_constant__ CUtensorMap b, const float* c,
                               float* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ std::uint64_t barrier;
  const std::uint32_t tile = shared_address(memory);
  load_tile<kK, kN>(tile, &b, shared_address(&barrier));
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 32 * 16 + thread % 32 / 4;
  float held[kK / 2];
  for (int e = 0; e < kK / 2; ++e) {
    held[e] = bf16_low(a[(row + e % 4 / 2 * 8) * kK + e / 4 * 8 + 2 * (thread % 4) + e % 2]);
  }
  std::uint32_t words[kK / 4];
  pack_operand(held, words);
  float d[kN / 2];
  for (int e = 0; e < kN / 2; ++e) {
    d[e] = c[(row + e % 4 / 2 * 8) * kN + e / 4 * 8 + 2 * (thread % 4) + e % 2];
  }
  pin(d);
  wgmma_fence();
  multiply_add<kN, kK / 16>(d, words, ByTokens<kK>{tile});
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  write_accumulators(d, out, kN);
}

/// D[64][N] = A[K][64 * panel ...]^T . B[first_row + N][K]: dQ transposed.
template <int kK, int kRowsB, int kN>
__global__ void by_tokens(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                          int panel, int first_row, float* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ std::uint64_t barriers[2];
  const std::uint32_t tile_a = shared_address(memory);
  const std::uint32_t tile_b = tile_a + kK * 128 * 2;
  load_tile<kK, 128>(tile_a, &a, shared_address(barriers));
  load_tile<kRowsB, kK>(tile_b, &b, shared_address(barriers + 1));
  float d[kN / 2];
  wgmma_fence();
  multiply<kN, kK / 16>(d, ByTokens<kK>{tile_a + static_cast<std::uint32_t>(panel * kK * kRowBytes)},
                        ByColumns<kRowsB>{tile_b + static_cast<std::uint32_t>(first_row * kRowBytes)});
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  write_accumulators(d, out, kN);
}

/// Accumulators 64 x kColumns to a tile, straight (rows first_row ...) or transposed (into panel first_row /
/// 64), then the tile as it lies, row by row of the swizzle's own formula.
template <int kRows, int kColumns, bool kTransposed>
__global__ void stores(const float* in, int first_row, std::uint16_t* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int kHeld = kTransposed ? kRows : kColumns;
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 32 * 16 + thread % 32 / 4;
  float d[kHeld / 2];
  for (int e = 0; e < kHeld / 2; ++e) {
    d[e] = in[(row + e % 4 / 2 * 8) * kHeld + e / 4 * 8 + 2 * (thread % 4) + e % 2];
  }
  if constexpr (kTransposed) {
    std::uint32_t words[kHeld / 4];
    pack_operand(d, words);
    store_transposed<kRows>(shared_address(memory), first_row / 64, words);
  } else {
    store_accumulators<kRows, kColumns>(shared_address(memory), first_row, d);
  }
  __syncthreads();
  for (int i = thread; i < kRows * kColumns; i += 128) {
    const int r = i / kColumns;
    const int column = i % kColumns;
    const int at = column / 64 * kRows * kRowBytes + chunk_offset(r, column % 64 / 8) + column % 8 * 2;
    out[i] = *reinterpret_cast<const std::uint16_t*>(memory + at);
  }
}

CUtensorMap map_of(const Buffer<std::uint16_t>& buffer, int rows, int columns) {
  return kernels_host::tensor_map({buffer.data(), 0, columns, columns}, "test", columns, rows, 1, 1, rows);
}

template <class... Parameters, class... Arguments>
void run_kernel(void (*kernel)(Parameters...), int shared_bytes, Arguments... arguments) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "shared memory");
  kernel<<<1, 128, static_cast<std::size_t>(shared_bytes)>>>(arguments...);
  check(cudaGetLastError(), "launch");
  check(cudaDeviceSynchronize(), "kernel");
}

/// The emulator's chain for one element: products of a(k) and b(k), k ascending in steps of 16.
template <class A, class B>
std::uint32_t chain(std::uint32_t c, int k, const A& a, const B& b) {
  for (int step = 0; step < k; step += 16) {
    std::uint16_t x[16];
    std::uint16_t y[16];
    for (int i = 0; i < 16; ++i) {
      x[i] = a(step + i);
      y[i] = b(step + i);
    }
    c = arith::mma_bf16_k16(x, y, c);
  }
  return c;
}

template <class Expected>
void expect_all(const std::vector<float>& out, int columns, const Expected& expected) {
  int wrong = 0;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < columns; ++j) {
      const std::uint32_t want = expected(i, j);
      const std::uint32_t got = arith::to_bits(out[static_cast<std::size_t>(i * columns + j)]);
      if (want != got && ++wrong <= 3)
        ADD_FAILURE() << "element " << i << ", " << j << ": " << got << " != " << want;
    }
  }
  EXPECT_EQ(wrong, 0) << "of " << 64 * columns;
}

template <int kRowsA, int kN, int kD>
void test_by_columns(int first_row) {
  SCOPED_TRACE("N " + std::to_string(kN) + " D " + std::to_string(kD));
  const auto a = random_words(kRowsA * kD, kN);
  const auto b = random_words(kN * kD, kN + 1);
  Buffer<std::uint16_t> gpu_a, gpu_b;
  gpu_a.upload(a, "a");
  gpu_b.upload(b, "b");
  Buffer<float> out(64 * kN);
  run_kernel(by_columns<kRowsA, kN, kD>, (kRowsA + kN) * kD * 2, map_of(gpu_a, kRowsA, kD),
             map_of(gpu_b, kN, kD), first_row, out.data());
  expect_all(out.download("out"), kN, [&](int i, int j) {
    return chain(
        0, kD, [&](int k) { return a[static_cast<std::size_t>((first_row + i) * kD + k)]; },
        [&](int k) { return b[static_cast<std::size_t>(j * kD + k)]; });
  });
}

template <int kK, int kN>
void test_from_registers() {
  SCOPED_TRACE("K " + std::to_string(kK) + " N " + std::to_string(kN));
  const auto a = random_words(64 * kK, kK);
  const auto b = random_words(kK * kN, kK + 1);
  std::vector<float> c(64 * kN);
  const auto c_words = random_words(64 * kN, kK + 2);
  for (std::size_t i = 0; i < c.size(); ++i)
    c[i] = arith::from_bits(static_cast<std::uint32_t>(c_words[i]) << 16U);
  Buffer<std::uint16_t> gpu_a, gpu_b;
  Buffer<float> gpu_c, out(64 * kN);
  gpu_a.upload(a, "a");
  gpu_b.upload(b, "b");
  gpu_c.upload(c, "c");
  run_kernel(from_registers<kK, kN>, kK * kN * 2, gpu_a.data(), map_of(gpu_b, kK, kN), gpu_c.data(),
             out.data());
  expect_all(out.download("out"), kN, [&](int i, int j) {
    return chain(
        arith::to_bits(c[static_cast<std::size_t>(i * kN + j)]), kK,
        [&](int k) { return a[static_cast<std::size_t>(i * kK + k)]; },
        [&](int k) { return b[static_cast<std::size_t>(k * kN + j)]; });
  });
}

template <int kRowsB, int kN>
void test_by_tokens(int panel, int first_row) {
  constexpr int kK = 128;
  SCOPED_TRACE("N " + std::to_string(kN) + " panel " + std::to_string(panel));
  const auto a = random_words(kK * 128, kN);
  const auto b = random_words(kRowsB * kK, kN + 1);
  Buffer<std::uint16_t> gpu_a, gpu_b;
  gpu_a.upload(a, "a");
  gpu_b.upload(b, "b");
  Buffer<float> out(64 * kN);
  run_kernel(by_tokens<kK, kRowsB, kN>, (kK * 128 + kRowsB * kK) * 2, map_of(gpu_a, kK, 128),
             map_of(gpu_b, kRowsB, kK), panel, first_row, out.data());
  expect_all(out.download("out"), kN, [&](int i, int j) {
    return chain(
        0, kK, [&](int k) { return a[static_cast<std::size_t>(k * 128 + 64 * panel + i)]; },
        [&](int k) { return b[static_cast<std::size_t>((first_row + j) * kK + k)]; });
  });
}

template <int kRows, int kColumns, bool kTransposed>
void test_stores(int first_row) {
  constexpr int kHeld = kTransposed ? kRows : kColumns;
  SCOPED_TRACE("rows " + std::to_string(kRows) + " columns " + std::to_string(kColumns));
  const auto words = random_words(64 * kHeld, kRows);
  std::vector<float> values(words.size());
  for (std::size_t i = 0; i < words.size(); ++i) {
    values[i] = arith::from_bits(static_cast<std::uint32_t>(words[i]) << 16U);
  }
  Buffer<float> in;
  in.upload(values, "in");
  Buffer<std::uint16_t> out(kRows * kColumns);
  run_kernel(stores<kRows, kColumns, kTransposed>, kRows * kColumns * 2, in.data(), first_row, out.data());
  const auto got = out.download("out");
  int wrong = 0;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < kHeld; ++j) {
      const int r = kTransposed ? j : first_row + i;
      const int column = kTransposed ? first_row + i : j;
      wrong += got[static_cast<std::size_t>(r * kColumns + column)] !=
               words[static_cast<std::size_t>(i * kHeld + j)];
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(KernelsWgmma, ScoresOfTheForward) {
  SKIP_WITHOUT_HOPPER();
  test_by_columns<128, 176, 128>(0);
  test_by_columns<128, 128, 128>(64);
  test_by_columns<128, 192, 64>(64);
  test_by_columns<192, 128, 64>(128);
}

TEST(KernelsWgmma, ScoresOfTheBackward) {
  SKIP_WITHOUT_HOPPER();
  test_by_columns<128, 80, 128>(64);
  test_by_columns<128, 64, 128>(0);
}

TEST(KernelsWgmma, OperandFromRegisters) {
  SKIP_WITHOUT_HOPPER();
  test_from_registers<176, 128>();
  test_from_registers<128, 128>();
  test_from_registers<192, 64>();
  test_from_registers<128, 64>();
  test_from_registers<80, 128>();
  test_from_registers<64, 128>();
}

TEST(KernelsWgmma, QueryGradientTransposed) {
  SKIP_WITHOUT_HOPPER();
  test_by_tokens<80, 80>(0, 0);
  test_by_tokens<80, 80>(1, 0);
  test_by_tokens<64, 64>(1, 0);
  test_by_tokens<128, 64>(0, 64);
}

TEST(KernelsWgmma, StoresToTiles) {
  SKIP_WITHOUT_HOPPER();
  test_stores<128, 128, false>(64);
  test_stores<192, 64, false>(128);
  test_stores<80, 128, true>(64);
  test_stores<64, 128, true>(0);
  test_stores<128, 128, true>(64);
}

}  // namespace
}  // namespace bitattn::gpu
