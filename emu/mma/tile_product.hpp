#pragma once
// Tile products in tensor-core arithmetic: the one entry point of emu/mma.
//
//   (M,K) x (N,K) -> (M,N):   C[m][n] = chain over k-steps of 16, ascending, of
//                             C[m][n] := fused_step(C[m][n], A[m][k..k+15], B[n][k..k+15])
//
// Every GEMM of a BF16 attention kernel is this chain (docs/spec/fa3-operation-order.md 1.3); which operand
// the chip calls A, its memory order, N and the register or shared-memory source change no bit.
//
// An operand is packed once and used in many products. How, is the engine's business; all engines give the
// same bits.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "emu/arith/tensor_core.hpp"
#include "emu/mma/aligned_allocator.hpp"

namespace bitattn::mma {

/// A BF16 matrix in plain memory. Element (r, k) is data[r * row_stride + k * k_stride] for r <
/// rows_in_memory and k < k_in_memory, and +0 elsewhere up to (rows, k): the zero fill of a tile that sticks
/// out of its tensor.
struct MatrixView {
  const std::uint16_t* data = nullptr;
  std::ptrdiff_t row_stride = 0;
  std::ptrdiff_t k_stride = 1;
  int rows = 0;
  int k = 0;
  int rows_in_memory = 0;
  int k_in_memory = 0;

  std::uint16_t at(int r, int kk) const {
    return r < rows_in_memory && kk < k_in_memory ? data[r * row_stride + kk * k_stride] : std::uint16_t{0};
  }
};

/// A whole matrix: every element is in memory.
inline MatrixView whole(const std::uint16_t* data, std::ptrdiff_t row_stride, std::ptrdiff_t k_stride,
                        int rows, int k) {
  return {data, row_stride, k_stride, rows, k, rows, k};
}

/// Which factor an operand will be: `left` gives the rows of C, `right` its columns.
enum class Side : std::uint8_t { left, right };

/// An operand in the form an engine wants. Made by Engine::pack, reusable as a buffer, valid for that engine
/// only.
struct PackedOperand {
  Side side = Side::left;
  int rows = 0;
  int k = 0;         ///< padded with zeros to a multiple of 16
  bool tame = true;  ///< the engine's own verdict: is its vector path enough? (false: infinities or NaNs)
  std::vector<std::uint16_t>
      words;           ///< [rows][k], k contiguous: the scalar model's form; a SIMD engine keeps it only
                       ///< for an operand with infinities or NaNs, and leaves it empty otherwise
  AlignedWords extra;  ///< the SIMD engines' form (emu/mma/simd_layout.hpp)
};

/// What the accumulator holds before the first step. `zero` is the chip's scale-d = 0 (old contents, NaN too,
/// ignored).
enum class Start : std::uint8_t { zero, accumulate };

/// An engine computes tile products. Engines hold no state and may be used from any number of threads.
class Engine {
 public:
  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  virtual ~Engine() = default;

  virtual std::string_view name() const = 0;
  /// Packs `view` for one side into `out`, whose buffers are reused.
  virtual void pack(const MatrixView& view, Side side, PackedOperand& out) const = 0;
  /// C[m * ldc + n] for m < left.rows, n < right.rows. left.k == right.k. Rules other than the chip's
  /// (arith::kHopperWide) are for tests and may be slow.
  virtual void multiply(const PackedOperand& left, const PackedOperand& right, Start start, float* c,
                        std::ptrdiff_t ldc, const arith::TensorCoreRule& rule) const = 0;

  PackedOperand packed(const MatrixView& view, Side side) const {
    PackedOperand out;
    pack(view, side, out);
    return out;
  }
};

/// The engines of this build that this processor can run, slowest (the scalar model) first.
std::span<const Engine* const> engines();

/// The engine of that name, or nullptr.
const Engine* find_engine(std::string_view name);

/// The fastest engine of this processor; the environment variable BITATTN_ENGINE names another one (throws
/// std::invalid_argument if it does not exist here).
const Engine& default_engine();

}  // namespace bitattn::mma
