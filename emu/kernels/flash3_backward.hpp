#pragma once
// FlashAttention-3 backward (SM90, BF16): preprocess, main loop, postprocess, in the kernels' operation
// order. Source: docs/spec/fa3-operation-order.md 3 to 5; checked against recorded outputs of the real
// kernels, every bit.

#include "emu/kernels/attention.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn::kernels {

/// Where the rows of the padded per-row arrays and accumulators lie (the library's own padding).
struct PaddedLayout {
  std::vector<std::ptrdiff_t>
      q_rows;  ///< [sequence * heads_q + head]: first row of dpsum, lse_log2, dq_accum
  std::vector<std::ptrdiff_t> k_rows;  ///< [sequence * heads_kv + head]: first row of dk_accum, dv_accum
  std::ptrdiff_t q_padded = 0;         ///< rows of one head (BSHD: of one batch element and head)
  std::ptrdiff_t k_padded = 0;
};
PaddedLayout padded_layout(const AttentionInputs& inputs, const profile::BackwardTiles& tiles);

/// fp32 accumulators kept in parts where the kernel fixes no order of adding them: part i of the
/// accumulator's row r is values[(i * rows + r) * head_dim]. Parts that a row does not have stay untouched.
template <class Value>
struct Parts {
  Value* values = nullptr;
  std::ptrdiff_t rows = 0;  ///< rows of the whole accumulator
};

/// Word, Value: BF16 words and fp32 of the chip, or fp64 twice where rounding sites are switched off.
template <class Word, class Value>
struct BackwardInputsOf {
  const Word* out = nullptr;          ///< the forward's O
  const Value* out_uncast = nullptr;  ///< O before its cast; needed only where the site dpsum_o_cast is exact
  const Value* lse = nullptr;         ///< the forward's LSE
  // What remedies need, as the forward left it (ForwardOutputs); nullptr otherwise.
  const Value *out_residual = nullptr, *reference = nullptr, *row_sum = nullptr;
  std::span<const std::ptrdiff_t> rows;  ///< as in ForwardOutputs
  /// Recorded intermediates that take the place of what the earlier kernels give here, laid out as in
  /// BackwardOutputs; nullptr: computed ones are used.
  const Value *dpsum = nullptr, *lse_log2 = nullptr;
  const Value *dq_accum = nullptr, *dk_accum = nullptr, *dv_accum = nullptr;
};
using BackwardInputs = BackwardInputsOf<std::uint16_t, float>;

/// Outputs in memory of the caller; those that may be nullptr are not kept.
template <class Word, class Value>
struct BackwardOutputsOf {
  Word *dq = nullptr, *dk = nullptr, *dv = nullptr;
  Value *dq_uncast = nullptr, *dk_uncast = nullptr,
        *dv_uncast = nullptr;                      ///< before the last cast; may be nullptr
  Value *dpsum = nullptr, *lse_log2 = nullptr;     ///< padded rows; may be nullptr
  Value* dq_accum = nullptr;                       ///< padded rows x rounded head dim; may be nullptr
  Value *dk_accum = nullptr, *dv_accum = nullptr;  ///< GQA; may be nullptr
  /// Per row, laid out as lse: sum over the visible keys of dS as its products take it (softcap: before the
  /// derivative's multiply), in fp64; 0 in theory. May be nullptr.
  double* ds_sums = nullptr;
  Parts<Value> dq_parts, dk_parts, dv_parts;  ///< dk, dv: one part a query head of the group
};
using BackwardOutputs = BackwardOutputsOf<std::uint16_t, float>;

/// The most key blocks that any query row's tile receives dQ from, over all sequences.
int most_key_blocks(const AttentionInputs& inputs, const profile::BackwardTiles& tiles);

/// Runs the backward over all sequences and heads. Where the kernel fixes no order of the parts of dQ (or of
/// the query heads of a group), ascending order is taken. Threads through oneTBB: the same bits for any
/// number of them.
void flash3_backward(const profile::Profile& profile, const AttentionInputs& inputs,
                     const BackwardInputs& forward, const BackwardOutputs& outputs,
                     const Execution& execution);

/// The same schedule with the profile's `exact` sites run in fp64.
void flash3_backward(const profile::Profile& profile, const AttentionInputs& inputs,
                     const BackwardInputsOf<double, double>& forward,
                     const BackwardOutputsOf<double, double>& outputs, const Execution& execution);

}  // namespace bitattn::kernels
