#pragma once
// Tiles of BF16 in shared memory as the copy engine lays them and the tensor core reads them.
//
// A tile of `rows` tokens and D columns lies in panels of 64 columns: panel p, row r is 128 bytes at
// (p * rows + r) * 128, and its 16-byte chunks are exchanged by chunk ^= r % 8 (the 128-byte swizzle of both
// units, so that neither a column of chunks nor a row meets a bank twice). Tiles start at multiples of 1024
// bytes.

#include <cstdint>

#include "gpu/kernels/scalar.cuh"

namespace bitattn::gpu {

inline constexpr int kPanelColumns = 64;
inline constexpr int kRowBytes = 128;
inline constexpr int kSwizzleBytes = 1024;  ///< eight rows: the period of the swizzle

/// Byte offset of a 16-byte chunk (columns 8*chunk ... of the panel) in a panel.
__host__ __device__ constexpr int chunk_offset(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

/// The 64 bits that tell the tensor core where an operand lies. Low word: address and leading stride, high
/// word: the other stride and layout 1, the 128-byte swizzle; all in units of 16 bytes. Addresses stay below
/// 2^18, so that steps along an operand are additions to the low word.
__host__ __device__ constexpr std::uint32_t descriptor_low(std::uint32_t address,
                                                           std::uint32_t leading_bytes) {
  return address >> 4 | (leading_bytes >> 4) << 16;
}
inline constexpr std::uint32_t kDescriptorHigh = kSwizzleBytes >> 4 | 1U << 30;

__device__ __forceinline__ std::uint64_t matrix_descriptor(std::uint32_t low) {
  return static_cast<std::uint64_t>(kDescriptorHigh) << 32 | low;
}

/// An operand whose rows are tokens and whose k runs along the columns (K-major). `rows`: of the whole tile.
template <int kRows>
struct ByColumns {
  static constexpr int kTransposed = 0;
  std::uint32_t low;

  /// address: of the first row used, in panel 0.
  __device__ __forceinline__ explicit ByColumns(std::uint32_t address) : low(descriptor_low(address, 16)) {}
  __device__ __forceinline__ std::uint64_t descriptor(int step) const {
    return matrix_descriptor(low +
                             static_cast<std::uint32_t>(step / 4 * (kRows * kRowBytes) + step % 4 * 32) / 16);
  }
};

/// An operand whose rows are columns of the tile and whose k runs along the tokens (MN-major).
template <int kRows>
struct ByTokens {
  static constexpr int kTransposed = 1;
  std::uint32_t low;

  /// address: of row 0 in the first panel used.
  __device__ __forceinline__ explicit ByTokens(std::uint32_t address)
      : low(descriptor_low(address, kRows * kRowBytes)) {}
  __device__ __forceinline__ std::uint64_t descriptor(int step) const {
    return matrix_descriptor(low + static_cast<std::uint32_t>(step * 16 * kRowBytes) / 16);
  }
};

__device__ __forceinline__ int load_word(std::uint32_t address) {
  int v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_word(std::uint32_t address, int v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
// Offsets known at compile time are part of the instruction and cost no register.
template <int kOffset>
__device__ __forceinline__ float2 load_pair(std::uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2 + %3];"
               : "=f"(v.x), "=f"(v.y)
               : "r"(address), "n"(kOffset)
               : "memory");
  return v;
}
template <int kOffset>
__device__ __forceinline__ void store_quad(std::uint32_t address, const float* v) {
  asm volatile("st.shared.v4.f32 [%0 + %5], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3]), "n"(kOffset)
               : "memory");
}

/// Four 8x8 matrices of BF16 from registers to shared memory; each lane names a row (16 bytes) of one of
/// them.
template <int kOffset>
__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b,
                                               std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0 + %5], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
               "r"(b), "r"(c), "r"(d), "n"(kOffset)
               : "memory");
}
/// The same, each matrix transposed on the way.
template <int kOffset>
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t address, std::uint32_t a,
                                                          std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0 + %5], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d), "n"(kOffset)
               : "memory");
}

/// Calls f(Constant<0>), f(Constant<1>), ... f(Constant<kCount - 1>).
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};
template <int kCount, int kFirst = 0, class F>
__device__ __forceinline__ void for_each_constant(const F& f) {
  if constexpr (kFirst < kCount) {
    f(Constant<kFirst>{});
    for_each_constant<kCount, kFirst + 1>(f);
  }
}

/// Stores a warpgroup's accumulators (64 rows), cast to BF16, at rows first_row... of a tile with kRows rows.
template <int kRows, int kColumns>
__device__ __forceinline__ void store_accumulators(std::uint32_t tile, int first_row,
                                                   const float (&d)[kColumns / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int row = first_row + warp * 16 + lane % 16;
  // Chunk 2j + h of a row lies where chunk h does, but for an exclusive or with 2j.
  const std::uint32_t first = tile + static_cast<std::uint32_t>(chunk_offset(row, lane / 16));
  for_each_constant<kColumns / 16>([&](auto constant) {
    constexpr int kPair = decltype(constant)::value;
    const float* x = d + 8 * kPair;
    store_matrices<kPair / 4 * kRows * kRowBytes>(first ^ (kPair % 4 * 32U), bf16_pair(x[0], x[1]),
                                                  bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]),
                                                  bf16_pair(x[6], x[7]));
  });
}

/// Stores a warpgroup's accumulators, already cast, transposed: their 64 rows become columns 64*panel... of a
/// tile whose kRows rows are their columns.
template <int kRows>
__device__ __forceinline__ void store_transposed(std::uint32_t tile, int panel,
                                                 const std::uint32_t (&words)[kRows / 4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int row = lane / 16 * 8 + lane % 8;
  const std::uint32_t first = tile + static_cast<std::uint32_t>(panel) * (kRows * kRowBytes) +
                              static_cast<std::uint32_t>(chunk_offset(row, 2 * warp + lane / 8 % 2));
  for_each_constant<kRows / 16>([&](auto constant) {
    constexpr int kGroups = decltype(constant)::value;  // of 16 rows
    const std::uint32_t* w = words + 4 * kGroups;
    store_matrices_transposed<kGroups * 16 * kRowBytes>(first, w[0], w[1], w[2], w[3]);
  });
}

}  // namespace bitattn::gpu
