#include "emu/kernels/flash3_forward.hpp"

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32.hpp"
#include "emu/kernels/row_ops.hpp"

namespace bitattn::kernels {

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLn2 = arith::from_bits(0x3f317218U);

/// One (sequence, KV head): everything that its query heads share.
struct KeySide {
  std::vector<mma::PackedOperand> k;  ///< per key block, right operand of Q.K^T
  std::vector<mma::PackedOperand> v;  ///< per key block, right operand of P.V (columns are head dims)
};

class ForwardSchedule {
 public:
  ForwardSchedule(const profile::Profile& profile, const AttentionInputs& in, const ForwardOutputs& out,
                  const Execution& execution)
      : in_(in),
        out_(out),
        execution_(execution),
        engine_(execution.engine != nullptr ? *execution.engine : mma::default_engine()),
        rule_(tensor_core_rule(profile.arithmetic)),
        order_(profile.forward),
        tiles_(profile::flash3_forward_tiles(in.call, profile)),
        scalars_(profile::flash3_scalars(in.call)),
        row_(profile) {}

  void run() {
    const int units = static_cast<int>(in_.sequences.size()) * in_.call.heads_kv;
    tbb::parallel_for(0, units, [this](int unit) {
      // Isolated, so that a thread that waits inside one KV head does not start another and hold both in memory.
      tbb::this_task_arena::isolate([&] { run_kv_head(unit / in_.call.heads_kv, unit % in_.call.heads_kv); });
    });
  }

 private:
  void run_kv_head(int sequence_index, int kv_head) {
    const Sequence& sequence = in_.sequences[static_cast<std::size_t>(sequence_index)];
    const int group = in_.group();
    const KeySide keys = pack_keys(sequence, kv_head);
    const int packed = tiles_.pack_gqa ? group : 1;
    const int blocks_m = (sequence.q_length * packed + tiles_.block_m - 1) / tiles_.block_m;
    tbb::parallel_for(0, group * blocks_m, [&](int task) {
      const int head_in_group = task / blocks_m;
      const int block_m = task % blocks_m;
      // Queries of this head among the tile's rows. Packed rows are (query, head of the group), heads fastest.
      const int offset = tiles_.pack_gqa ? head_in_group : 0;
      const int first = std::max(0, (block_m * tiles_.block_m - offset + packed - 1) / packed);
      const int last = std::min(sequence.q_length, ((block_m + 1) * tiles_.block_m - offset + packed - 1) / packed);
      if (first >= last) return;
      run_rows(sequence_index, kv_head * group + head_in_group, block_m, packed, first, last - first, keys);
    });
  }

  KeySide pack_keys(const Sequence& sequence, int kv_head) const {
    const profile::Call& call = in_.call;
    const int blocks = (sequence.k_length + tiles_.block_n - 1) / tiles_.block_n;
    KeySide keys;
    keys.k.resize(static_cast<std::size_t>(blocks));
    keys.v.resize(static_cast<std::size_t>(blocks));
    tbb::parallel_for(0, blocks, [&](int n) {
      const int token = sequence.k_begin + n * tiles_.block_n;
      const int in_memory =
          call.varlen ? in_.total_k - token : sequence.k_length - n * tiles_.block_n;
      const int rows = std::min(in_memory, tiles_.block_n);
      const auto i = static_cast<std::size_t>(n);
      engine_.pack(token_rows(in_.k, token, call.heads_kv, kv_head, call.head_dim, tiles_.block_n, rows),
                   mma::Side::right, keys.k[i]);
      engine_.pack(token_columns(in_.v, token, call.heads_kv, kv_head, call.head_dim_v, tiles_.block_n, rows),
                   mma::Side::right, keys.v[i]);
    });
    return keys;
  }

  /// Sets the scores of pairs that the step's mask hides to -inf (2.4).
  void apply_mask(float* scores, int query, int key_begin, int seqlen_q, int seqlen_k, bool test_length,
                  bool test_window) const {
    const int diagonal = query + seqlen_k - seqlen_q;
    const profile::Mask& mask = tiles_.mask;
    for (int j = 0; j < tiles_.block_n; ++j) {
      const int key = key_begin + j;
      bool hidden = test_length && key >= seqlen_k;
      if (test_window) {
        hidden = hidden || key > diagonal + (mask.local ? mask.right : 0) || (mask.local && key < diagonal - mask.left);
      }
      if (hidden) scores[j] = kMinusInfinity;
    }
  }

  /// Some queries of one head that share a tile, from the first key block to the outputs.
  void run_rows(int sequence_index, int head, int block_m, int packed, int query_begin, int rows, const KeySide& keys) {
    const profile::Call& call = in_.call;
    const Sequence& sequence = in_.sequences[static_cast<std::size_t>(sequence_index)];
    const int sq = sequence.q_length;
    const int sk = sequence.k_length;
    const int bn = tiles_.block_n;
    const int dv = call.head_dim_v;
    const float c = scalars_.scale_log2;
    const profile::KeyBlocks blocks = profile::flash3_key_blocks(tiles_, block_m, sq, sk, packed);

    const auto count = static_cast<std::size_t>(rows);
    std::vector<float> scores(count * static_cast<std::size_t>(bn));
    std::vector<float> p(scores.size());
    std::vector<std::uint16_t> p_bf16(scores.size());
    std::vector<float> o(count * static_cast<std::size_t>(dv), 0.0F);
    std::vector<float> row_max(count, kMinusInfinity);
    std::vector<QuadSums> sums(count);
    mma::PackedOperand packed_p;
    const mma::PackedOperand q =
        engine_.packed(token_rows(in_.q, sequence.q_begin + query_begin, call.heads_q, head, call.head_dim, rows, rows),
                       mma::Side::left);

    const bool masked_kernel = tiles_.mask.causal || tiles_.mask.local;
    const bool leftwards = order_.key_blocks == profile::KeyBlockOrder::right_to_left;
    const int visits = std::max(0, blocks.last - blocks.first);
    for (int visit = 0; visit < visits; ++visit) {
      const int n = leftwards ? blocks.last - 1 - visit : blocks.first + visit;
      const bool first = visit == 0;
      // The kernel's masking steps (2.4): the last block tests the length too; unmasked steps do not look for -inf.
      const bool test_length = n == blocks.last - 1;
      const bool test_window =
          masked_kernel && (test_length || n >= blocks.causal_local_from || n < blocks.unmasked_from);
      const bool check_infinity = first || test_length || test_window;

      const mma::PackedOperand& k = keys.k[static_cast<std::size_t>(n)];
      engine_.multiply(q, k, mma::Start::zero, scores.data(), bn, rule_);
      for (int r = 0; r < rows; ++r) {
        const auto i = static_cast<std::size_t>(r);
        float* x = scores.data() + static_cast<std::ptrdiff_t>(r) * bn;
        float* p_row = p.data() + static_cast<std::ptrdiff_t>(r) * bn;
        if (scalars_.softcap_scale != 0) row_.softcap(x, bn, scalars_.softcap_scale);
        if (test_length || test_window) {
          apply_mask(x, query_begin + r, n * bn, sq, sk, test_length, test_window);
        }
        const float previous = row_max[i];
        const float m = row_.row_max(x, bn, previous);
        row_max[i] = m;
        const bool guarded = check_infinity && m == kMinusInfinity;
        float alpha = 1.0F;
        if (!first) {
          const float reference = guarded ? 0.0F : m;
          alpha = row_.ops.ex2(row_.ops.mul(row_.ops.sub(previous, reference), c));
        }
        const float scaled_max = guarded ? 0.0F : row_.ops.mul(m, c);
        row_.forward_exponentials(x, p_row, bn, c, scaled_max);
        row_.add_to_quad_sums(p_row, bn, first, alpha, sums[i]);
        row_.cast(p_row, p_bf16.data() + static_cast<std::ptrdiff_t>(r) * bn, bn);
        if (!first) row_.scale(o.data() + static_cast<std::ptrdiff_t>(r) * dv, dv, alpha);
      }
      if (execution_.observer != nullptr) {
        execution_.observer->forward_block({{sequence_index, head}, query_begin, rows, n * bn, bn, first, bn, c,
                                            scores.data(), p.data(), p_bf16.data(), row_max.data()});
      }
      engine_.pack(mma::whole(p_bf16.data(), bn, 1, rows, bn), mma::Side::left, packed_p);
      engine_.multiply(packed_p, keys.v[static_cast<std::size_t>(n)], first ? mma::Start::zero : mma::Start::accumulate,
                       o.data(), dv, rule_);
      if (execution_.advance) execution_.advance(static_cast<std::int64_t>(rows) * bn);
    }
    finish_rows(sequence_index, head, query_begin, rows, row_max, sums, o, visits > 0);
  }

  /// Normalisation, LSE and the cast of O (2.7). A tile without key blocks writes O = 0 and LSE = -inf.
  void finish_rows(int sequence_index, int head, int query_begin, int rows, const std::vector<float>& row_max,
                   const std::vector<QuadSums>& sums, std::vector<float>& o, bool visited) const {
    const profile::Call& call = in_.call;
    const Sequence& sequence = in_.sequences[static_cast<std::size_t>(sequence_index)];
    const int dv = call.head_dim_v;
    const float c_ln2 = row_.ops.mul(scalars_.scale_log2, kLn2);
    const std::ptrdiff_t row_offset =
        out_.rows[static_cast<std::size_t>(sequence_index) * static_cast<std::size_t>(call.heads_q) +
                  static_cast<std::size_t>(head)];
    std::vector<float> totals(static_cast<std::size_t>(rows), 0.0F);
    for (int r = 0; r < rows; ++r) {
      const auto i = static_cast<std::size_t>(r);
      const float total = visited ? row_.total(sums[i]) : 0.0F;
      totals[i] = total;
      const bool usable = !(total == 0 || total != total);
      const float inverse = usable ? row_.ops.rcp(total) : 0.0F;
      // Without any key in the whole call the host fills in +inf and runs no kernel (2.8).
      float lse = in_.total_k == 0 ? -kMinusInfinity : kMinusInfinity;
      if (usable) {
        const float log_total = row_.ops.lg2(total);
        lse = order_.lse == profile::LseFusion::max_term
                  ? row_.ops.fma(c_ln2, row_max[i], row_.ops.mul(log_total, kLn2))
                  : row_.ops.fma(log_total, kLn2, row_.ops.mul(c_ln2, row_max[i]));
      }
      out_.lse[row_offset + query_begin + r] = lse;
      float* o_row = o.data() + static_cast<std::ptrdiff_t>(r) * dv;
      if (visited) row_.scale(o_row, dv, inverse);
      const std::ptrdiff_t element =
          (static_cast<std::ptrdiff_t>(sequence.q_begin + query_begin + r) * call.heads_q + head) * dv;
      row_.cast(o_row, out_.out + element, dv);
      if (out_.out_fp32 != nullptr) std::copy(o_row, o_row + dv, out_.out_fp32 + element);
    }
    if (execution_.observer != nullptr) {
      execution_.observer->forward_rows({{sequence_index, head}, query_begin, rows, scalars_.scale_log2,
                                         row_max.data(), totals.data()});
    }
  }

  const AttentionInputs& in_;
  const ForwardOutputs& out_;
  const Execution& execution_;
  const mma::Engine& engine_;
  arith::TensorCoreRule rule_;
  profile::Forward order_;
  profile::ForwardTiles tiles_;
  profile::Scalars scalars_;
  RowOps row_;
};

}  // namespace

void flash3_forward(const profile::Profile& profile, const AttentionInputs& inputs, const ForwardOutputs& outputs,
                    const Execution& execution) {
  ForwardSchedule(profile, inputs, outputs, execution).run();
}

}  // namespace bitattn::kernels
