#pragma once
// Attention forward and backward with every operation in MPFR, written straight from the mathematics. Slow
// and simple: the model that everything faster is checked against.
//
//   s_ij = scale * <q_i, k_j>, softcap: s := cap * tanh(s / cap)       P_ij = exp(s_ij - m_i) / sum_j
//   exp(s_ij - m_i) O_i = sum_j P_ij v_j              LSE_i = m_i + log sum_j exp(s_ij - m_i) dP_ij = <dO_i,
//   v_j>               D_i = sum_j P_ij dP_ij dS_ij = P_ij (dP_ij - D_i), softcap: times 1 - tanh^2 dQ_i =
//   scale * sum_j dS_ij k_j    dK_j = scale * sum_i dS_ij q_i   dV_j = sum_i P_ij dO_i
//
// over the visible pairs (i, j) only; dK and dV over all query heads of the group. Masked pairs are not
// touched at all. Infinities and NaNs follow IEEE rules through these formulas, as MPFR gives them.

#include "reference/attention_rows.hpp"

namespace bitattn::reference {

inline constexpr int kMinBits = 24;
inline constexpr int kMaxBits = 4096;
inline constexpr int kDefaultBits = 128;

/// The whole problem at `bits` of precision (kMinBits to kMaxBits, else std::invalid_argument). The same bits
/// come out for any number of threads.
void plain_attention(const ProblemView& problem, int bits, const Progress& progress, Sink& sink);

/// One KV head of one sequence with the query heads of its group. `pairs_done` is told the number of (query,
/// key) pairs finished since the last call. `chosen`, if not null, tells for (query head in the group) *
/// q_length + row whether that row takes part: the others are not handed out, and dK and dV are without them.
void plain_attention_head(const ProblemView& problem, std::size_t sequence, std::size_t head_kv, int bits,
                          const std::function<void(double)>& pairs_done, Sink& sink,
                          const std::vector<bool>* chosen = nullptr);

/// out, lse and dq of chosen rows alone.
void plain_attention_rows(const ProblemView& problem, std::span<const RowId> rows, int bits,
                          const Progress& progress, Sink& sink);

}  // namespace bitattn::reference
