#pragma once
// The fast reference for one KV head of one sequence, tile by tile.

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "reference/attention_rows.hpp"
#include "reference/block_sums.hpp"
#include "reference/head_inputs.hpp"
#include "reference/inner_block.hpp"
#include "reference/score_gradient.hpp"
#include "reference/sliced_operands.hpp"
#include "reference/softmax_exponent.hpp"

namespace bitattn::reference {

/// Scratch of one thread.
struct Workspace {
  InnerLeft scores_left, dp_left;
  InnerBlock scores, dp;
  OuterLeft outer_left;
  BlockSums first_sums, second_sums;
  std::vector<Wide> numerators, dps, derivatives;  ///< [kBlockRows][keys of the tile]
  std::array<Wide, kChunk> line{};
  std::array<Wide, kChunk> second_line{};
  std::array<ErrorTerm, kChunk> errors{};
  std::array<ErrorTerm, kChunk> second_errors{};
  OuterLeft second_left;
};

/// The query side of one head, for key tiles.
struct QueryOperands {
  InnerRight q, dout;
  OuterRight q_rows, dout_rows;
  std::vector<RowState> states;

  QueryOperands(const Bf16Rows& q_matrix, const Bf16Rows& dout_matrix, std::vector<RowState> row_states)
      : q(q_matrix),
        dout(dout_matrix),
        q_rows(q_matrix),
        dout_rows(dout_matrix),
        states(std::move(row_states)) {}
};

/// What rows that do not go the fast way give to dK and dV of a KV head.
struct OtherRows {
  std::vector<Number> dk, dv;  ///< [key][dim]; empty: nothing
  std::vector<double> dk_bound, dv_bound;
  std::vector<std::uint8_t> nan;  ///< [key]: a row of kind nan sees it; empty: none
};

/// One KV head of one sequence.
class FastHead {
 public:
  FastHead(const ProblemView& problem, const Constants& constants, const HeadInputs& inputs,
           std::size_t sequence, std::size_t head_kv)
      : problem_(problem),
        constants_(constants),
        exp2_(Exp2::instance()),
        inputs_(inputs),
        sequence_(problem.sequences[sequence]),
        sequence_index_(sequence),
        head_kv_(head_kv),
        k_(inputs.k().words),
        v_rows_(inputs.v().words),
        underflow_(0x1p-900 * (1 + std::abs(problem.softmax_scale)) * (1 + inputs.largest_q()) *
                   (1 + inputs.k().largest) * (1 + inputs.v().largest) * (1 + inputs.largest_dout()) *
                   static_cast<double>(problem.head_dim_v)) {
    if (!problem.backward()) return;
    v_.emplace(inputs.v().words);
    k_rows_.emplace(inputs.k().words);
  }

  /// Up to kBlockRows rows of finite kind of query head `g` of the group. `states`, if not null, receives at
  /// [row] what the key side needs of each.
  void query_tile(std::size_t g, std::span<const std::size_t> rows, Workspace& work, RowState* states,
                  Sink& sink) const;

  /// Up to kBlockRows keys from `first`, over the rows of all query heads of the group that have a state with
  /// keys. `others` is added: what other rows give to these keys.
  void key_tile(std::size_t first, std::size_t count,
                const std::vector<std::unique_ptr<QueryOperands>>& heads, const OtherRows& others,
                Workspace& work, Sink& sink) const;

 private:
  void emit(std::size_t head, std::span<const std::size_t> rows, const Workspace& work,
            const std::array<Number, kBlockRows>& inverse_sums, const std::array<Number, kBlockRows>& lses,
            const std::array<RowState, kBlockRows>& states, const std::array<double, kBlockRows>& sum_errors,
            Sink& sink) const;

  const ProblemView& problem_;
  const Constants& constants_;
  const Exp2& exp2_;
  const HeadInputs& inputs_;
  const Sequence& sequence_;
  std::size_t sequence_index_, head_kv_;
  InnerRight k_;
  OuterRight v_rows_;
  std::optional<InnerRight> v_;
  std::optional<OuterRight> k_rows_;
  double underflow_ = 0;  ///< more than all bounds of an element can lose to underflow of doubles
};

}  // namespace bitattn::reference
