#pragma once
// Tile products in tensor-core arithmetic on any GPU: one block of threads, 64 x 64 elements of C, a chain of
// fused steps over K. The bits are those of emu/mma.
//
// Both operands go through shared memory one step of 16 at a time, as fp32 values and as pairs of exponents,
// k by k with the lines of a tile side by side. Each thread owns 4 x 4 elements and keeps them in registers
// over the whole chain.

#include <cuda_runtime.h>

#include <cstdint>

#include "gpu/emulator/fused_step.hpp"

namespace bitattn::gpu::emulator {

inline constexpr int kTile = 64;  ///< rows and columns of C that a block computes
inline constexpr int kThreads = 256;
inline constexpr int kOwn = 4;                 ///< rows and columns of C that a thread owns
inline constexpr int kLoaders = kThreads / 2;  ///< threads that fetch one operand
inline constexpr int kBlocksPerMultiprocessor = 3;

/// Memory that holds T, aligned for it.
template <class T>
__device__ inline T* as(void* memory) {
  return static_cast<T*>(memory);
}
template <class T>
__device__ inline const T* as(const void* memory) {
  return static_cast<const T*>(memory);
}

/// An operand in memory: `lines` rows of A (or columns of B) of `depth` elements; what lies beyond reads as
/// +0. Neighbours along k are adjacent in memory, or neighbouring lines are (`by_line`).
struct OperandView {
  const std::uint16_t* data = nullptr;
  std::int64_t stride = 0;  ///< from line to line, or from k to k where lines are adjacent
  int lines = 0;
  int depth = 0;  ///< a multiple of 8 where k is adjacent; `lines` one of 4 where lines are
  int group = 1;  ///< k adjacent: line l is l / group strides and l % group group strides away
  std::int64_t group_stride = 0;
};

/// What a tile's fetch of one step holds in a thread's registers: 8 words.
struct Fetched {
  std::uint32_t words[4];
};

/// Operands whose k are adjacent: a thread fetches 8 of the 16 k of one line.
struct AdjacentK {
  __device__ static Fetched fetch(const OperandView& view, int first_line, int first_k, int loader) {
    const int line = first_line + loader % kTile;
    const int k = first_k + loader / kTile * 8;
    Fetched f{};
    if (line >= view.lines || k >= view.depth) return f;
    const std::int64_t offset = view.group == 1
                                    ? line * view.stride
                                    : line / view.group * view.stride + line % view.group * view.group_stride;
    const uint4 v = *as<uint4>(view.data + offset + k);
    f.words[0] = v.x;
    f.words[1] = v.y;
    f.words[2] = v.z;
    f.words[3] = v.w;
    return f;
  }
  __device__ static void store(const Fetched& f, float (*values)[kTile], std::uint32_t (*exponents)[kTile],
                               int loader) {
    const int line = loader % kTile;
    const int k = loader / kTile * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t even = f.words[i] << 16U;
      const std::uint32_t odd = f.words[i] & 0xffff0000U;
      values[k + 2 * i][line] = arith::from_bits(even);
      values[k + 2 * i + 1][line] = arith::from_bits(odd);
      exponents[k / 2 + i][line] = exponent_half(even) | exponent_half(odd) << 16U;
    }
  }
};

/// Operands whose lines are adjacent: a thread fetches two k of 4 lines.
struct AdjacentLines {
  __device__ static Fetched fetch(const OperandView& view, int first_line, int first_k, int loader) {
    const int line = first_line + loader % (kTile / 4) * 4;
    const int k = first_k + loader / (kTile / 4) * 2;
    Fetched f{};
    if (line >= view.lines) return f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (k + i >= view.depth) continue;
      const uint2 v = *as<uint2>(view.data + (k + i) * view.stride + line);
      f.words[2 * i] = v.x;
      f.words[2 * i + 1] = v.y;
    }
    return f;
  }
  __device__ static void store(const Fetched& f, float (*values)[kTile], std::uint32_t (*exponents)[kTile],
                               int loader) {
    const int line = loader % (kTile / 4) * 4;
    const int k = loader / (kTile / 4) * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t shift = i % 2 == 0 ? 16U : 0U;
      const std::uint32_t even = f.words[i / 2] << shift & 0xffff0000U;
      const std::uint32_t odd = f.words[2 + i / 2] << shift & 0xffff0000U;
      values[k][line + i] = arith::from_bits(even);
      values[k + 1][line + i] = arith::from_bits(odd);
      exponents[k / 2][line + i] = exponent_half(even) | exponent_half(odd) << 16U;
    }
  }
};

/// One step of both operands, twice: one is read while the other is filled.
struct TileMemory {
  alignas(16) float a[2][kStep][kTile];
  alignas(16) float b[2][kStep][kTile];
  alignas(16) std::uint32_t a_exponents[2][kStep / 2][kTile];
  alignas(16) std::uint32_t b_exponents[2][kStep / 2][kTile];
};

/// Which rows and columns of the tile a thread owns: a warp has 16 x 32, in 4 x 8 threads.
struct OwnPlace {
  int row, column;
  __device__ OwnPlace() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    row = warp / 2 * 16 + lane / 8 * kOwn;
    column = warp % 2 * 32 + lane % 8 * kOwn;
  }
};

using Accumulators = float[kOwn][kOwn];

/// One element outside the fast path. `a` and `b` point at the element's row and column in the current step.
__device__ inline float careful_element(const float* a, const float* b, float c, arith::TensorCoreRule rule,
                                        bool chip_rule) {
  std::uint32_t pairs = kNoProducts;
  for (int k = 0; k < kStep; k += 2) {
    const auto pair = [k](const float* v) {
      return exponent_half(arith::to_bits(v[k * kTile])) | exponent_half(arith::to_bits(v[(k + 1) * kTile]))
                                                               << 16U;
    };
    pairs = greatest_sum(pair(a), pair(b), pairs);
  }
  const int products = greatest_of_halves(pairs);
  if (!has_products(products)) return idle_step(c);
  return careful_step(a, kTile, b, kTile, c, alignment(products, c), rule, chip_rule);
}

__device__ inline void four(const float* from, float (&to)[kOwn]) {
  const float4 v = *as<float4>(from);
  to[0] = v.x;
  to[1] = v.y;
  to[2] = v.z;
  to[3] = v.w;
}
__device__ inline void four(const std::uint32_t* from, std::uint32_t (&to)[kOwn]) {
  const uint4 v = *as<uint4>(from);
  to[0] = v.x;
  to[1] = v.y;
  to[2] = v.z;
  to[3] = v.w;
}

/// One fused step of a thread's elements.
__device__ inline void tile_step(const TileMemory& memory, int buffer, const OwnPlace& own,
                                 arith::TensorCoreRule rule, bool chip_rule, Accumulators& c) {
  std::uint32_t pairs[kOwn][kOwn];
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
#pragma unroll
    for (int q = 0; q < kOwn; ++q) pairs[r][q] = kNoProducts;
  }
  // Loops over k are unrolled by 8 and no further: a body that outgrows the instruction cache costs more than
  // its jumps.
#pragma unroll 8
  for (int k = 0; k < kStep / 2; ++k) {
    std::uint32_t a[kOwn];
    std::uint32_t b[kOwn];
    four(&memory.a_exponents[buffer][k][own.row], a);
    four(&memory.b_exponents[buffer][k][own.column], b);
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
      for (int q = 0; q < kOwn; ++q) pairs[r][q] = greatest_sum(a[r], b[q], pairs[r][q]);
    }
  }
  // Alignment of every element. Outside the fast path's guards `up` is of no account.
  float up[kOwn][kOwn];
  int lowest = kLargestM;
  int highest = kSmallestM;
  int most_products = 0;
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      const int products = greatest_of_halves(pairs[r][q]);
      const int m = max(products - 127, exponent_field(c[r][q]));
      most_products = max(most_products, products);
      lowest = min(lowest, m);
      highest = max(highest, m);
      up[r][q] = scale_up(m);
    }
  }
  if (__any_sync(0xffffffffU, has_products(most_products)) == 0) {
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
      for (int q = 0; q < kOwn; ++q) c[r][q] = idle_step(c[r][q]);
    }
    return;
  }
  // Which elements are outside? None, as a rule; those without products on an accumulator of zero are as good
  // as inside.
  std::uint32_t careful = 0;
  if (lowest < kSmallestM || highest > kLargestM || !chip_rule) {
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
      for (int q = 0; q < kOwn; ++q) {
        const int products = greatest_of_halves(pairs[r][q]);
        const int m = max(products - 127, exponent_field(c[r][q]));
        if (m >= kSmallestM && m <= kLargestM && chip_rule) continue;
        if (!has_products(products) && c[r][q] == 0.0F) {
          up[r][q] = 1.0F;
        } else {
          careful |= 1U << (r * kOwn + q);
        }
      }
    }
  }
  std::int32_t sum[kOwn][kOwn] = {};
#pragma unroll 8
  for (int k = 0; k < kStep; ++k) {
    float a[kOwn];
    float b[kOwn];
    four(&memory.a[buffer][k][own.row], a);
    four(&memory.b[buffer][k][own.column], b);
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
      for (int q = 0; q < kOwn; ++q) sum[r][q] += product_term(a[r], b[q], up[r][q]);
    }
  }
  std::uint32_t overflow = 0;  // its sign: did any sum not fit?
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
#pragma unroll
    for (int q = 0; q < kOwn; ++q) sum[r][q] = add_accumulator(sum[r][q], c[r][q], up[r][q], overflow);
  }
  if (overflow >> 31U != 0U) careful = 0xffffU;
  // The elements outside, one after the other: an array that a loop may index.
  float outside[kOwn * kOwn];
  if (careful != 0U) {
#pragma unroll
    for (int i = 0; i < kOwn * kOwn; ++i) outside[i] = c[i / kOwn][i % kOwn];
#pragma unroll 1
    for (std::uint32_t left = careful; left != 0U; left &= left - 1U) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      outside[i] = careful_element(&memory.a[buffer][0][own.row + i / kOwn],
                                   &memory.b[buffer][0][own.column + i % kOwn], outside[i], rule, chip_rule);
    }
  }
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      const int i = r * kOwn + q;
      c[r][q] = (careful >> i & 1U) != 0U ? outside[i] : finish_step(sum[r][q], scale_down_from_up(up[r][q]));
    }
  }
}

/// C := chain over `steps` steps of 16 from C, for the tile of C that begins at (row, column) of the product.
/// All threads of the block call this together. `rule`: what the steps do; other rules than the chip's (for
/// tests) are slow.
template <class Left, class Right>
__device__ void tile_product(TileMemory& memory, const OperandView& left, int row, const OperandView& right,
                             int column, int steps, arith::TensorCoreRule rule, bool chip_rule,
                             Accumulators& c) {
  const OwnPlace own;
  const bool loads_left = threadIdx.x < kLoaders;
  const int loader = static_cast<int>(threadIdx.x) % kLoaders;
  const auto fetch = [&](int step) {
    return loads_left ? Left::fetch(left, row, step * kStep, loader)
                      : Right::fetch(right, column, step * kStep, loader);
  };
  const auto store = [&](const Fetched& f, int buffer) {
    if (loads_left) {
      Left::store(f, memory.a[buffer], memory.a_exponents[buffer], loader);
    } else {
      Right::store(f, memory.b[buffer], memory.b_exponents[buffer], loader);
    }
  };
  if (steps == 0) return;
  __syncthreads();  // an earlier product of this block may still be reading
  store(fetch(0), 0);
  __syncthreads();
  for (int step = 0; step < steps; ++step) {
    const bool more = step + 1 < steps;
    Fetched next{};
    if (more) next = fetch(step + 1);
    tile_step(memory, step % 2, own, rule, chip_rule, c);
    if (more) store(next, (step + 1) % 2);
    __syncthreads();
  }
}

/// Calls `visit(r, j, element)` for the thread's elements inside a product of rows x columns, whose tile
/// begins at (row, column); r and j count from the product's first row and column.
template <class Visit>
__device__ void for_own_elements(const OwnPlace& own, int row, int column, int rows, int columns,
                                 Accumulators& c, Visit&& visit) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      const int r = row + own.row + i;
      const int j = column + own.column + q;
      if (r < rows && j < columns) visit(r, j, c[i][q]);
    }
  }
}

}  // namespace bitattn::gpu::emulator
