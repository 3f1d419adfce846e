#pragma once
// Attention in plain fp32: what a kernel without a narrow cast would give. Every product, sum and exponential
// in fp32 (IEEE, subnormals kept), the row max subtracted before scaling, nothing rounded to BF16 before the
// last cast. The order of
// sums is ours: dot products over head dims, the row sum and dQ over keys ascending; O over keys descending,
// as the kernels walk them; dK and dV over queries ascending, in blocks of 192.

#include <utility>

#include "emu/kernels/flash3_backward.hpp"
#include "emu/kernels/flash3_forward.hpp"

namespace bitattn::kernels {

/// The visible keys [first, last) of query i of a sequence with these lengths.
using VisibleKeys = std::function<std::pair<int, int>(int query, int seqlen_q, int seqlen_k)>;

/// Forward and, if inputs.dout is given, backward. Only out, out_fp32, lse of `forward` and dq, dk, dv and
/// their fp32 forms of `backward` are filled in. Threads through oneTBB: the same bits for any number of
/// them.
void fp32_attention(const AttentionInputs& inputs, const VisibleKeys& visible, const ForwardOutputs& forward,
                    const BackwardOutputs& backward, const Execution& execution);

}  // namespace bitattn::kernels
