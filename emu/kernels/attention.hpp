#pragma once
// Plain-memory views of one attention call, and what running it can be told.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "emu/kernels/observer.hpp"
#include "emu/mma/tile_product.hpp"
#include "emu/profile/flash3.hpp"

namespace bitattn::kernels {

/// Where the tokens of one batch element or packed sequence lie along the token axis.
struct Sequence {
  int q_begin = 0, q_length = 0;
  int k_begin = 0, k_length = 0;
};

/// Inputs: element (token, head, d) of q is q[token * heads_q * head_dim + head * head_dim + d], and so on.
/// Batch elements of a BSHD tensor are sequences of equal length; what lies behind one is not read. Packed
/// sequences (varlen) lie in one tensor, so a tile that sticks out of its sequence reads its neighbour, as
/// the kernels do.
struct AttentionInputs {
  profile::Call call;
  std::span<const Sequence> sequences;
  int total_q = 0, total_k = 0;  ///< tokens in memory
  const std::uint16_t* q = nullptr;
  const std::uint16_t* k = nullptr;
  const std::uint16_t* v = nullptr;
  const std::uint16_t* dout = nullptr;

  int group() const { return call.heads_q / call.heads_kv; }
};

/// How to run, never what to compute.
struct Execution {
  const mma::Engine* engine = nullptr;  ///< nullptr: the fastest one
  Observer* observer = nullptr;
  std::function<void(std::int64_t)>
      advance;  ///< called from any thread with (query, key) pairs done; may throw to cancel
};

/// One tensor's rows from a token on: a tile operand with `rows` rows and `columns` columns that are K of the
/// product. Rows past rows_in_memory read as zero.
mma::MatrixView token_rows(const std::uint16_t* tensor, int token, int heads, int head, int columns, int rows,
                           int rows_in_memory);
/// The same memory the other way round: `columns` rows, and the tokens are K of the product.
mma::MatrixView token_columns(const std::uint16_t* tensor, int token, int heads, int head, int columns,
                              int rows, int rows_in_memory);

/// The tensor-core rule of a profile.
arith::TensorCoreRule tensor_core_rule(const profile::Arithmetic& arithmetic);

}  // namespace bitattn::kernels
