#pragma once
// FlashAttention-3 forward (SM90, BF16), in the kernel's operation order.
// Source: docs/spec/fa3-operation-order.md 2; checked against recorded outputs of the real kernels, every bit.

#include "emu/kernels/attention.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn::kernels {

/// Outputs, in memory of the caller. Element (token, head, d) of out as of q, with head_dim_v columns.
/// The row statistics of (sequence s, head h, row i) lie at rows[s * heads_q + h] + i.
struct ForwardOutputs {
  std::uint16_t* out = nullptr;
  float* out_fp32 = nullptr;               ///< may be nullptr: O before its cast, laid out as out
  float* lse = nullptr;                    ///< natural log; -inf for a row without a visible key
  std::span<const std::ptrdiff_t> rows;
};

/// Runs the forward over all sequences and heads. Threads through oneTBB: the same bits for any number of them.
void flash3_forward(const profile::Profile& profile, const AttentionInputs& inputs, const ForwardOutputs& outputs,
                    const Execution& execution);

}  // namespace bitattn::kernels
