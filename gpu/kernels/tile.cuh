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

/// The 64 bits that tell the tensor core where an operand lies: addresses and strides in units of 16 bytes,
/// layout 1 is the 128-byte swizzle.
__host__ __device__ constexpr std::uint64_t matrix_descriptor(std::uint32_t address,
                                                              std::uint32_t leading_bytes,
                                                              std::uint32_t stride_bytes) {
  return (static_cast<std::uint64_t>((address & 0x3ffffU) >> 4)) |
         (static_cast<std::uint64_t>(leading_bytes >> 4) << 16) |
         (static_cast<std::uint64_t>(stride_bytes >> 4) << 32) | (std::uint64_t{1} << 62);
}

/// An operand whose rows are tokens and whose k runs along the columns (K-major). `rows`: of the whole tile.
template <int kRows>
struct ByColumns {
  static constexpr int kTransposed = 0;
  std::uint32_t address;  ///< of the first row used, in panel 0

  __device__ __forceinline__ std::uint64_t descriptor(int step) const {
    const std::uint32_t panel = static_cast<std::uint32_t>(step / 4) * (kRows * kRowBytes);
    return matrix_descriptor(address + panel + static_cast<std::uint32_t>(step % 4) * 32U, 16, kSwizzleBytes);
  }
};

/// An operand whose rows are columns of the tile and whose k runs along the tokens (MN-major).
template <int kRows>
struct ByTokens {
  static constexpr int kTransposed = 1;
  std::uint32_t address;  ///< of row 0 in the first panel used

  __device__ __forceinline__ std::uint64_t descriptor(int step) const {
    return matrix_descriptor(address + static_cast<std::uint32_t>(step) * (16U * kRowBytes),
                             kRows * kRowBytes, kSwizzleBytes);
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
__device__ __forceinline__ float2 load_pair(std::uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_quad(std::uint32_t address, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]),
               "f"(v[3])
               : "memory");
}

/// Four 8x8 matrices of BF16 from registers to shared memory; each lane names a row (16 bytes) of one of
/// them.
__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b,
                                               std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}
/// The same, each matrix transposed on the way.
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t address, std::uint32_t a,
                                                          std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

/// Stores a warpgroup's accumulators (64 rows), cast to BF16, at rows first_row... of a tile with kRows rows.
template <int kRows, int kColumns>
__device__ __forceinline__ void store_accumulators(std::uint32_t tile, int first_row,
                                                   const float (&d)[kColumns / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int row = first_row + warp * 16 + lane % 16;
#pragma unroll
  for (int pair = 0; pair < kColumns / 16; ++pair) {
    const int chunk = 2 * pair + lane / 16;
    const std::uint32_t panel = tile + static_cast<std::uint32_t>(chunk / 8) * (kRows * kRowBytes);
    const float* x = d + 8 * pair;
    store_matrices(panel + static_cast<std::uint32_t>(chunk_offset(row, chunk % 8)), bf16_pair(x[0], x[1]),
                   bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
  }
}

/// Stores a warpgroup's accumulators, already cast, transposed: their 64 rows become columns 64*panel... of a
/// tile whose kRows rows are their columns.
template <int kRows>
__device__ __forceinline__ void store_transposed(std::uint32_t tile, int panel,
                                                 const std::uint32_t (&words)[kRows / 4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int chunk = 2 * warp + lane / 8 % 2;
  const std::uint32_t base = tile + static_cast<std::uint32_t>(panel) * (kRows * kRowBytes);
#pragma unroll
  for (int group = 0; group < kRows / 8; group += 2) {
    const int row = 8 * group + lane / 16 * 8 + lane % 8;
    store_matrices_transposed(base + static_cast<std::uint32_t>(chunk_offset(row, chunk)), words[2 * group],
                              words[2 * group + 1], words[2 * group + 2], words[2 * group + 3]);
  }
}

}  // namespace bitattn::gpu
