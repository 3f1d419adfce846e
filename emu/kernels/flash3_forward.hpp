#pragma once
// FlashAttention-3 forward (SM90, BF16), in the kernel's operation order.
// Source: docs/spec/fa3-operation-order.md 2; checked against recorded outputs of the real kernels, every
// bit.

#include "emu/kernels/attention.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn::kernels {

/// Outputs, in memory of the caller. Element (token, head, d) of out as of q, with head_dim_v columns.
/// The row statistics of (sequence s, head h, row i) lie at rows[s * heads_q + h] + i.
/// Word, Value: BF16 words and fp32 of the chip, or fp64 twice where rounding sites are switched off.
template <class Word, class Value>
struct ForwardOutputsOf {
  Word* out = nullptr;
  Value* out_uncast = nullptr;  ///< may be nullptr: O before its cast, laid out as out
  Value* lse = nullptr;         ///< natural log; -inf for a row without a visible key
  // What remedies of the backward read; may be nullptr otherwise.
  Value* out_residual = nullptr;  ///< o-residual: what O's cast dropped, as D adds it again; laid out as out
  Value* reference = nullptr;     ///< split statistic: what was subtracted from the row's scores; as lse
  Value* row_sum = nullptr;       ///< split statistic: L; as lse
  std::span<const std::ptrdiff_t> rows;
};
using ForwardOutputs = ForwardOutputsOf<std::uint16_t, float>;

/// Runs the forward over all sequences and heads. Threads through oneTBB: the same bits for any number of
/// them.
void flash3_forward(const profile::Profile& profile, const AttentionInputs& inputs,
                    const ForwardOutputs& outputs, const Execution& execution);

/// The same schedule with the profile's `exact` sites run in fp64. The row max and sums are not shown to
/// observers.
void flash3_forward(const profile::Profile& profile, const AttentionInputs& inputs,
                    const ForwardOutputsOf<double, double>& outputs, const Execution& execution);

}  // namespace bitattn::kernels
