#pragma once
// FlashAttention-3 backward (SM90, BF16): preprocess, main loop, postprocess, in the kernels' operation order.
// Source: docs/spec/fa3-operation-order.md 3 to 5; checked against recorded outputs of the real kernels, every bit.

#include "emu/kernels/attention.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn::kernels {

/// Where the rows of the padded per-row arrays and accumulators lie (the library's own padding).
struct PaddedLayout {
  std::vector<std::ptrdiff_t> q_rows;  ///< [sequence * heads_q + head]: first row of dpsum, lse_log2, dq_accum
  std::vector<std::ptrdiff_t> k_rows;  ///< [sequence * heads_kv + head]: first row of dk_accum, dv_accum
  std::ptrdiff_t q_padded = 0;         ///< rows of one head (BSHD: of one batch element and head)
  std::ptrdiff_t k_padded = 0;
};
PaddedLayout padded_layout(const AttentionInputs& inputs, const profile::BackwardTiles& tiles);

/// fp32 accumulators kept in parts where the kernel fixes no order of adding them: part i of the accumulator's row r is
/// values[(i * rows + r) * head_dim]. Parts that a row does not have stay untouched.
struct Parts {
  float* values = nullptr;
  std::ptrdiff_t rows = 0;  ///< rows of the whole accumulator
};

struct BackwardInputs {
  const std::uint16_t* out = nullptr;  ///< the forward's O
  const float* lse = nullptr;          ///< the forward's LSE
  std::span<const std::ptrdiff_t> rows;  ///< as in ForwardOutputs
};

/// Outputs in memory of the caller; those that may be nullptr are not kept.
struct BackwardOutputs {
  std::uint16_t *dq = nullptr, *dk = nullptr, *dv = nullptr;
  float *dq_fp32 = nullptr, *dk_fp32 = nullptr, *dv_fp32 = nullptr;  ///< before the last cast; may be nullptr
  float *dpsum = nullptr, *lse_log2 = nullptr;  ///< padded rows; may be nullptr
  float* dq_accum = nullptr;                    ///< padded rows x rounded head dim; may be nullptr
  float *dk_accum = nullptr, *dv_accum = nullptr;  ///< GQA; may be nullptr
  Parts dq_parts, dk_parts, dv_parts;           ///< dk, dv: one part a query head of the group
};

/// The most key blocks that any query row's tile receives dQ from, over all sequences.
int most_key_blocks(const AttentionInputs& inputs, const profile::BackwardTiles& tiles);

/// Runs the backward over all sequences and heads. Where the kernel fixes no order of the parts of dQ (or of the query heads
/// of a group), ascending order is taken. Threads through oneTBB: the same bits for any number of them.
void flash3_backward(const profile::Profile& profile, const AttentionInputs& inputs, const BackwardInputs& forward,
                     const BackwardOutputs& outputs, const Execution& execution);

}  // namespace bitattn::kernels
