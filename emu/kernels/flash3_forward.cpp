#include "emu/kernels/flash3_forward.hpp"

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "emu/kernels/chip_numbers.hpp"
#include "emu/kernels/remedies/integer_reference.hpp"
#include "emu/kernels/remedies/o_residual.hpp"
#include "emu/kernels/remedies/rounded_sum.hpp"
#include "emu/kernels/remedies/shifted_max.hpp"
#include "emu/kernels/remedies/subtract_first.hpp"
#include "emu/kernels/site_numbers.hpp"

namespace bitattn::kernels {

namespace {

using profile::Deviation;
using profile::Point;
using profile::Remedy;
using profile::Site;

/// One (sequence, KV head): everything that its query heads share.
template <class Operand>
struct KeySide {
  std::vector<Operand> k;  ///< per key block, right operand of Q.K^T
  std::vector<Operand> v;  ///< per key block, right operand of P.V (columns are head dims)
};

template <class Numbers>
class ForwardSchedule {
  using Value = typename Numbers::Value;
  using Word = typename Numbers::Word;
  using Operand = typename Numbers::Operand;
  using Sums = typename Numbers::Sums;
  using Outputs = ForwardOutputsOf<Word, Value>;
  using Keys = KeySide<Operand>;
  static constexpr Value kMinusInfinity = -std::numeric_limits<Value>::infinity();

 public:
  ForwardSchedule(const profile::Profile& profile, const AttentionInputs& in, const Outputs& out,
                  const Execution& execution)
      : in_(in),
        out_(out),
        execution_(execution),
        order_(profile.forward),
        remedies_(profile.remedies),
        blocks_(profile::find(profile.deviations, Point::blocks_forward)),
        mask_(profile::find(profile.deviations, Point::mask_forward, Point::mask)),
        head_of_k_(head_map(profile, Point::head_map_forward_k)),
        head_of_v_(head_map(profile, Point::head_map_forward_v)),
        max_tolerance_(
            remedies::shifted_max_tolerance(in.call.softcap > 0 ? in.call.softcap : in.call.softmax_scale)),
        tiles_(profile::flash3_forward_tiles(in.call, profile)),
        numbers_(profile, in.call, execution) {}

  void run() {
    const int units = static_cast<int>(in_.sequences.size()) * in_.call.heads_kv;
    tbb::parallel_for(0, units, [this](int unit) {
      // Isolated, so that a thread that waits inside one KV head does not start another and hold both in
      // memory.
      tbb::this_task_arena::isolate([&] { run_kv_head(unit / in_.call.heads_kv, unit % in_.call.heads_kv); });
    });
  }

 private:
  void run_kv_head(int sequence_index, int kv_head) {
    const Sequence& sequence = in_.sequences[static_cast<std::size_t>(sequence_index)];
    const int group = in_.group();
    if (head_of_k_ != nullptr || head_of_v_ != nullptr) {
      for (int g = 0; g < group; ++g) {
        const int head = kv_head * group + g;
        const int of_k = profile::kv_head_of(head, in_.call.heads_q, in_.call.heads_kv, head_of_k_);
        const int of_v = profile::kv_head_of(head, in_.call.heads_q, in_.call.heads_kv, head_of_v_);
        run_query_heads(sequence_index, kv_head, g, 1, pack_keys(sequence, of_k, of_v));
      }
      return;
    }
    run_query_heads(sequence_index, kv_head, 0, group, pack_keys(sequence, kv_head, kv_head));
  }

  /// Query heads [first_in_group, first_in_group + count) of a KV head.
  void run_query_heads(int sequence_index, int kv_head, int first_in_group, int count, const Keys& keys) {
    const Sequence& sequence = in_.sequences[static_cast<std::size_t>(sequence_index)];
    const int group = in_.group();
    const int packed = tiles_.pack_gqa ? group : 1;
    const int blocks_m = (sequence.q_length * packed + tiles_.block_m - 1) / tiles_.block_m;
    tbb::parallel_for(0, count * blocks_m, [&](int task) {
      const int head_in_group = first_in_group + task / blocks_m;
      const int block_m = task % blocks_m;
      // Queries of this head among the tile's rows. Packed rows are (query, head of the group), heads
      // fastest.
      const int offset = tiles_.pack_gqa ? head_in_group : 0;
      const int first = std::max(0, (block_m * tiles_.block_m - offset + packed - 1) / packed);
      const int last =
          std::min(sequence.q_length, ((block_m + 1) * tiles_.block_m - offset + packed - 1) / packed);
      if (first >= last) return;
      run_rows(sequence_index, kv_head * group + head_in_group, block_m, packed, first, last - first, keys);
    });
  }

  Keys pack_keys(const Sequence& sequence, int head_of_k, int head_of_v) const {
    const profile::Call& call = in_.call;
    const int blocks = (sequence.k_length + tiles_.block_n - 1) / tiles_.block_n;
    Keys keys;
    keys.k.resize(static_cast<std::size_t>(blocks));
    keys.v.resize(static_cast<std::size_t>(blocks));
    tbb::parallel_for(0, blocks, [&](int n) {
      const int token = sequence.k_begin + n * tiles_.block_n;
      const int in_memory = call.varlen ? in_.total_k - token : sequence.k_length - n * tiles_.block_n;
      const int rows = std::min(in_memory, tiles_.block_n);
      const auto i = static_cast<std::size_t>(n);
      numbers_.pack(Point::k_forward,
                    token_rows(in_.k, token, call.heads_kv, head_of_k, call.head_dim, tiles_.block_n, rows),
                    mma::Side::right, keys.k[i]);
      numbers_.pack(
          Point::v_forward,
          token_columns(in_.v, token, call.heads_kv, head_of_v, call.head_dim_v, tiles_.block_n, rows),
          mma::Side::right, keys.v[i]);
    });
    return keys;
  }

  /// Sets the scores of pairs that the step's mask hides to -inf (2.4).
  void apply_mask(Value* scores, int query, int key_begin, int seqlen_q, int seqlen_k, bool test_length,
                  bool test_window) const {
    const profile::ShownKeys shown = profile::shown_keys(tiles_.mask, query, seqlen_q, seqlen_k, mask_);
    for (int j = 0; j < tiles_.block_n; ++j) {
      const int key = key_begin + j;
      bool hidden = test_length && key >= shown.end;
      if (test_window) hidden = hidden || key > shown.last || key < shown.first;
      if (hidden) scores[j] = kMinusInfinity;
    }
  }

  /// Some queries of one head that share a tile, from the first key block to the outputs.
  void run_rows(int sequence_index, int head, int block_m, int packed, int query_begin, int rows,
                const Keys& keys) {
    const profile::Call& call = in_.call;
    const Sequence& sequence = in_.sequences[static_cast<std::size_t>(sequence_index)];
    const int sq = sequence.q_length;
    const int sk = sequence.k_length;
    const int bn = tiles_.block_n;
    const int dv = call.head_dim_v;
    const profile::KeyBlocks blocks = profile::flash3_key_blocks(tiles_, block_m, sq, sk, packed);

    const auto count = static_cast<std::size_t>(rows);
    std::vector<Value> scores(count * static_cast<std::size_t>(bn));
    std::vector<Value> p(scores.size());
    std::vector<Word> p_words(scores.size());
    std::vector<Value> o(count * static_cast<std::size_t>(dv), Value{0});
    std::vector<Value> row_max(count, kMinusInfinity);
    std::vector<Sums> sums(count);
    std::vector<Sums> rounded_sums(remedies_.has(Remedy::rounded_sum) ? count : 0);
    std::vector<Value> scratch;
    Operand packed_p;
    Operand q;
    numbers_.pack(
        Point::q_forward,
        token_rows(in_.q, sequence.q_begin + query_begin, call.heads_q, head, call.head_dim, rows, rows),
        mma::Side::left, q);

    const bool masked_kernel = tiles_.mask.causal || tiles_.mask.local;
    const bool leftwards = order_.key_blocks == profile::KeyBlockOrder::right_to_left;
    const std::vector<int> order = profile::visited_blocks(blocks.first, blocks.last, leftwards, blocks_);
    bool first = true;
    for (const int n : order) {
      // The kernel's masking steps (2.4): the last block tests the length too; unmasked steps do not look for
      // -inf.
      const bool test_length = n == blocks.last - 1;
      const bool test_window =
          masked_kernel && (test_length || n >= blocks.causal_local_from || n < blocks.unmasked_from);
      const bool check_infinity = first || test_length || test_window;

      numbers_.multiply(Site::score_mma, q, keys.k[static_cast<std::size_t>(n)], mma::Start::zero,
                        scores.data(), bn);
      for (int r = 0; r < rows; ++r) {
        const auto i = static_cast<std::size_t>(r);
        Value* x = scores.data() + static_cast<std::ptrdiff_t>(r) * bn;
        Value* p_row = p.data() + static_cast<std::ptrdiff_t>(r) * bn;
        if (numbers_.softcapped()) numbers_.softcap(x, bn);
        if (test_length || test_window) {
          apply_mask(x, query_begin + r, n * bn, sq, sk, test_length, test_window);
        }
        Word* p_words_row = p_words.data() + static_cast<std::ptrdiff_t>(r) * bn;
        const Value alpha = exponentials(x, p_row, first, check_infinity, row_max[i]);
        numbers_.add_to_row_sums(p_row, bn, first, alpha, sums[i]);
        numbers_.cast_p(p_row, p_words_row, bn);
        if (!rounded_sums.empty()) {
          remedies::add_to_rounded_sums(numbers_, p_words_row, bn, first, alpha, rounded_sums[i], scratch);
        }
        if (!first) numbers_.rescale_output(o.data() + static_cast<std::ptrdiff_t>(r) * dv, dv, alpha);
      }
      if constexpr (kObservable) {
        if (execution_.observer != nullptr) {
          execution_.observer->forward_block({{sequence_index, head},
                                              query_begin,
                                              rows,
                                              n * bn,
                                              bn,
                                              first,
                                              bn,
                                              numbers_.scale_log2(),
                                              scores.data(),
                                              p.data(),
                                              p_words.data(),
                                              row_max.data()});
        }
      }
      numbers_.pack(p_words.data(), bn, 1, rows, bn, mma::Side::left, packed_p);
      numbers_.multiply(Site::pv_mma, packed_p, keys.v[static_cast<std::size_t>(n)],
                        first ? mma::Start::zero : mma::Start::accumulate, o.data(), dv);
      if (execution_.advance) execution_.advance(static_cast<std::int64_t>(rows) * bn);
      first = false;
    }
    finish_rows(sequence_index, head, query_begin, rows, row_max, sums, rounded_sums, o, !order.empty());
  }

  /// Steps 4 to 7 of 2.5 for one row and key block: the running reference `m` (the row max, unless a remedy
  /// takes another), the exponentials, and the factor between this key block and those before, which is
  /// returned.
  Value exponentials(const Value* x, Value* p, bool first, bool check_infinity, Value& m) const {
    const int bn = tiles_.block_n;
    const Value previous = m;
    if (remedies_.has(Remedy::shifted_max)) {
      m = remedies::shifted_max(numbers_, x, bn, previous, max_tolerance_);
    } else {
      m = numbers_.row_max(x, bn, previous);
    }
    const bool guarded = check_infinity && m == kMinusInfinity;
    if (remedies_.has(Remedy::integer_reference)) {
      const Value before = remedies::integer_reference(numbers_, previous);
      const Value reference = guarded ? Value{0} : remedies::integer_reference(numbers_, m);
      numbers_.forward_exponentials(x, p, bn, reference);
      return first ? Value{1} : remedies::integer_rescale_factor(numbers_, before, reference);
    }
    const Value alpha = first ? Value{1} : numbers_.rescale_factor(previous, guarded ? Value{0} : m);
    if (remedies_.has(Remedy::subtract_first)) {
      remedies::subtract_first(numbers_, x, p, bn, guarded ? Value{0} : m);
    } else {
      numbers_.forward_exponentials(x, p, bn, guarded ? Value{0} : numbers_.scaled_max(m));
    }
    return alpha;
  }

  /// Normalisation, LSE and the cast of O (2.7). A tile without key blocks writes O = 0 and LSE = -inf.
  void finish_rows(int sequence_index, int head, int query_begin, int rows, const std::vector<Value>& row_max,
                   const std::vector<Sums>& sums, const std::vector<Sums>& rounded_sums,
                   std::vector<Value>& o, bool visited) const {
    const profile::Call& call = in_.call;
    const Sequence& sequence = in_.sequences[static_cast<std::size_t>(sequence_index)];
    const int dv = call.head_dim_v;
    const std::ptrdiff_t row_offset =
        out_.rows[static_cast<std::size_t>(sequence_index) * static_cast<std::size_t>(call.heads_q) +
                  static_cast<std::size_t>(head)];
    std::vector<Value> totals(static_cast<std::size_t>(rows), Value{0});
    for (int r = 0; r < rows; ++r) {
      const auto i = static_cast<std::size_t>(r);
      const Value total = visited ? numbers_.total(sums[i]) : Value{0};
      totals[i] = total;
      const bool usable = is_usable(total);
      Value inverse = usable ? numbers_.inverse(total) : Value{0};
      if (!rounded_sums.empty()) {
        const Value rounded = visited ? numbers_.total(rounded_sums[i]) : Value{0};
        inverse = is_usable(rounded) ? numbers_.inverse(rounded) : Value{0};
      }
      // Without any key in the whole call the host fills in +inf and runs no kernel (2.8).
      const Value without_keys = in_.total_k == 0 ? -kMinusInfinity : kMinusInfinity;
      const Value lse = usable ? log_sum_exp(row_max[i], total) : without_keys;
      out_.lse[row_offset + query_begin + r] = lse;
      if (remedies_.split_statistic()) {
        const bool integer = remedies_.has(Remedy::integer_reference);
        out_.reference[row_offset + query_begin + r] =
            integer ? remedies::integer_reference(numbers_, row_max[i]) : row_max[i];
        out_.row_sum[row_offset + query_begin + r] = total;
      }
      Value* o_row = o.data() + static_cast<std::ptrdiff_t>(r) * dv;
      if (visited) numbers_.normalise(o_row, dv, inverse);
      const std::ptrdiff_t element =
          (static_cast<std::ptrdiff_t>(sequence.q_begin + query_begin + r) * call.heads_q + head) * dv;
      numbers_.cast_output(o_row, out_.out + element, dv);
      if (out_.out_uncast != nullptr) std::copy(o_row, o_row + dv, out_.out_uncast + element);
      if (remedies_.keeps_residual()) {
        const bool eight = remedies_.has(Remedy::o_residual8);
        std::transform(o_row, o_row + dv, out_.out_residual + element, [&](Value y) {
          return eight ? remedies::o_residual8(numbers_, y) : remedies::o_residual(numbers_, y);
        });
      }
    }
    if constexpr (kObservable) {
      if (execution_.observer != nullptr) {
        execution_.observer->forward_rows({{sequence_index, head},
                                           query_begin,
                                           rows,
                                           numbers_.scale_log2(),
                                           row_max.data(),
                                           totals.data()});
      }
    }
  }

  Value log_sum_exp(Value m, Value total) const {
    if (!remedies_.has(Remedy::integer_reference)) return numbers_.log_sum_exp(m, total);
    return remedies::integer_log_sum_exp(numbers_, remedies::integer_reference(numbers_, m), total);
  }

  static const Deviation* head_map(const profile::Profile& profile, Point of_one) {
    const Deviation* found = profile::find(profile.deviations, of_one, Point::head_map_forward);
    return found != nullptr ? found : profile::find(profile.deviations, Point::head_map);
  }

  static bool is_usable(Value total) { return !(total == 0 || total != total); }

  /// Observers look at the chip's own numbers.
  static constexpr bool kObservable = std::is_same_v<Value, float>;

  const AttentionInputs& in_;
  const Outputs& out_;
  const Execution& execution_;
  profile::Forward order_;
  profile::RemedySet remedies_;
  const Deviation *blocks_, *mask_, *head_of_k_, *head_of_v_;  ///< nullptr: as the kernel does
  float max_tolerance_;
  profile::ForwardTiles tiles_;
  Numbers numbers_;
};

}  // namespace

void flash3_forward(const profile::Profile& profile, const AttentionInputs& inputs,
                    const ForwardOutputs& outputs, const Execution& execution) {
  ForwardSchedule<ChipNumbers>(profile, inputs, outputs, execution).run();
}

void flash3_forward(const profile::Profile& profile, const AttentionInputs& inputs,
                    const ForwardOutputsOf<double, double>& outputs, const Execution& execution) {
  ForwardSchedule<SiteNumbers>(profile, inputs, outputs, execution).run();
}

}  // namespace bitattn::kernels
