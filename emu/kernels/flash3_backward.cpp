#include "emu/kernels/flash3_backward.hpp"

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "emu/kernels/chip_numbers.hpp"
#include "emu/kernels/remedies/added_to_ds.hpp"
#include "emu/kernels/remedies/centred_keys.hpp"
#include "emu/kernels/remedies/consistent_d.hpp"
#include "emu/kernels/remedies/error_diffusion.hpp"
#include "emu/kernels/remedies/gproj.hpp"
#include "emu/kernels/remedies/heavy_pairs.hpp"
#include "emu/kernels/remedies/in_tile_feedback.hpp"
#include "emu/kernels/remedies/integer_reference.hpp"
#include "emu/kernels/remedies/low_precision.hpp"
#include "emu/kernels/remedies/o_residual.hpp"
#include "emu/kernels/remedies/subtract_first.hpp"
#include "emu/kernels/remedies/top_key.hpp"
#include "emu/kernels/site_numbers.hpp"

namespace bitattn::kernels {

namespace {

using profile::Deviation;
using profile::Point;
using profile::Remedy;
using profile::RemedySet;
using profile::Site;

std::size_t index(std::ptrdiff_t i) {
  return static_cast<std::size_t>(i);
}

/// A KV head's operands, by key block.
template <class Operand>
struct KeySide {
  std::vector<Operand> k;       ///< right operand of Q.K^T
  std::vector<Operand> v;       ///< right operand of dO.V^T
  std::vector<Operand> k_by_d;  ///< right operand of dS.K (columns are head dims)
};

/// dK and dV of one query head in the making: [padded keys][rounded head dim], carried over all query blocks.
template <class Value>
struct KeyGradients {
  std::vector<Value> dk, dv;
};

/// Key blocks [first, last) that visit a query block. They are contiguous under every mask.
struct KeyBlockRange {
  int first = 0, last = 0;
};

KeyBlockRange visiting_key_blocks(const profile::BackwardTiles& tiles, int block_m,
                                  const Sequence& sequence) {
  const int blocks = (sequence.k_length + tiles.block_n - 1) / tiles.block_n;
  KeyBlockRange range{blocks, 0};
  for (int n = 0; n < blocks; ++n) {
    const profile::QueryBlocks visited =
        profile::flash3_query_blocks(tiles, n, sequence.q_length, sequence.k_length);
    if (block_m < visited.first || block_m >= visited.last) continue;
    range.first = std::min(range.first, n);
    range.last = n + 1;
  }
  if (range.last == 0) range.first = 0;
  return range;
}

/// In which forms the remedies of a profile add to dS (emu/kernels/remedies/added_to_ds.hpp).
struct AddedForms {
  explicit AddedForms(const RemedySet& r)
      : row_sum(r.any_of(profile::decides(profile::Decides::row_sum))),
        heavy(r.has(Remedy::heavy_low) || r.has(Remedy::heavy_projection) || r.has(Remedy::uniform_shares)),
        weighted(r.has(Remedy::gproj_weighted)),
        tile_uniform(r.has(Remedy::in_tile_feedback_uniform)),
        pairs(heavy || r.has(Remedy::top_key)),
        pairs_in_dk(heavy),
        shares(r.has(Remedy::gproj) || r.has(Remedy::uniform_shares) || r.has(Remedy::top_key)),
        shares_in_dk(r.has(Remedy::gproj) || r.has(Remedy::uniform_shares)) {}
  bool row_sum;  ///< R is wanted
  bool heavy, weighted, tile_uniform;
  bool pairs, pairs_in_dk, shares, shares_in_dk;
  bool dense() const { return weighted || tile_uniform; }
  bool any() const { return pairs || dense() || shares; }
};

template <class Numbers>
class BackwardSchedule {
  using Value = typename Numbers::Value;
  using Word = typename Numbers::Word;
  using Operand = typename Numbers::Operand;
  using Inputs = BackwardInputsOf<Word, Value>;
  using Outputs = BackwardOutputsOf<Word, Value>;
  using Keys = KeySide<Operand>;
  using Gradients = KeyGradients<Value>;
  using KeySums = remedies::KeySums<Numbers>;
  using AddedToDk = remedies::AddedToDk<Numbers>;
  using Added = remedies::AddedToDs<Value>;
  static constexpr Value kInfinity = std::numeric_limits<Value>::infinity();

 public:
  BackwardSchedule(const profile::Profile& profile, const AttentionInputs& in, const Inputs& forward,
                   const Outputs& out, const Execution& execution)
      : in_(in),
        forward_(forward),
        out_(out),
        execution_(execution),
        remedies_(profile.remedies),
        forms_(profile.remedies),
        low_(profile.remedies),
        tiles_of_loop_(profile::find(profile.deviations, Point::blocks_backward)),
        blocks_of_dkv_(profile::find(profile.deviations, Point::blocks_dkv)),
        blocks_of_dq_(profile::find(profile.deviations, Point::blocks_dq)),
        mask_(profile::find(profile.deviations, Point::mask_backward, Point::mask)),
        head_of_k_(head_map(profile, Point::head_map_backward_k, Point::head_map_backward)),
        head_of_v_(head_map(profile, Point::head_map_backward_v, Point::head_map_backward)),
        head_of_gradients_(head_map(profile, Point::head_map_gradients, Point::head_map_gradients)),
        tiles_(profile::flash3_backward_tiles(in.call, profile)),
        padded_(padded_layout(in, tiles_)),
        numbers_(profile, in.call, execution) {}

  void run() {
    if (remedies_.has(Remedy::centred_keys)) centred_keys_ = remedies::centred_keys(in_);
    if (forms_.row_sum) {
      const std::vector<Word> ones(index(tiles_.block_n), numbers_.cast(Site::ds_cast, Value{1}));
      numbers_.pack(ones.data(), tiles_.block_n, 1, 1, tiles_.block_n, mma::Side::right, ones_);
    }
    if (remedies_.scales_ds_by_tensor()) {
      only_largest_ds_ = true;
      run_kv_heads();
      only_largest_ds_ = false;
    }
    run_kv_heads();
  }

 private:
  void run_kv_heads() {
    const int units = static_cast<int>(in_.sequences.size()) * in_.call.heads_kv;
    tbb::parallel_for(0, units, [this](int unit) {
      tbb::this_task_arena::isolate([&] { run_kv_head(unit / in_.call.heads_kv, unit % in_.call.heads_kv); });
    });
  }

  void take_largest_ds(float largest) {
    float before = largest_ds_.load();
    while (before < largest && !largest_ds_.compare_exchange_weak(before, largest)) {
    }
  }

  void run_kv_head(int sequence_index, int kv_head) {
    const Sequence& sequence = in_.sequences[index(sequence_index)];
    const int group = in_.group();
    const int blocks_n = (sequence.k_length + tiles_.block_n - 1) / tiles_.block_n;
    const std::size_t size = index(blocks_n) * index(tiles_.block_n) * index(tiles_.head_dim);
    const bool own_keys = head_of_k_ == nullptr && head_of_v_ == nullptr;
    Keys keys;
    if (own_keys) keys = pack_keys(sequence, kv_head, kv_head, blocks_n);
    std::unique_ptr<KeySums> key_sums;
    if (forms_.any()) {
      key_sums = std::make_unique<KeySums>(numbers_, in_, dq_keys(), sequence, kv_head, forms_.shares);
    }
    Gradients summed;
    if (group > 1) {
      summed.dk.assign(size, Value{0});
      summed.dv.assign(size, Value{0});
    }
    // The query heads of a group in ascending order: the order in which the kernel adds their dK and dV
    // (4.5).
    const std::vector<int> heads = query_heads_of(kv_head);
    for (int g = 0; g < static_cast<int>(heads.size()); ++g) {
      const int query_head = heads[index(g)];
      if (!own_keys) {
        keys = pack_keys(sequence, kv_head_of(query_head, head_of_k_), kv_head_of(query_head, head_of_v_),
                         blocks_n);
      }
      Gradients head{std::vector<Value>(size, Value{0}), std::vector<Value>(size, Value{0})};
      run_head(sequence_index, query_head, blocks_n, keys, key_sums.get(), head);
      numbers_.scale_dk(head.dk.data(), static_cast<int>(size));
      if (group == 1) {
        store_key_gradients(sequence, kv_head, head);
        continue;
      }
      if (g < group) {
        keep_part(out_.dk_parts, g, sequence_index, kv_head, head.dk);
        keep_part(out_.dv_parts, g, sequence_index, kv_head, head.dv);
      }
      numbers_.reduce_dkv(summed.dv.data(), head.dv.data(), static_cast<std::ptrdiff_t>(size));
      numbers_.reduce_dkv(summed.dk.data(), head.dk.data(), static_cast<std::ptrdiff_t>(size));
    }
    if (group == 1) return;
    const std::ptrdiff_t first =
        padded_.k_rows[index(sequence_index) * index(in_.call.heads_kv) + index(kv_head)] * tiles_.head_dim;
    if (out_.dk_accum != nullptr) std::copy(summed.dk.begin(), summed.dk.end(), out_.dk_accum + first);
    if (out_.dv_accum != nullptr) std::copy(summed.dv.begin(), summed.dv.end(), out_.dv_accum + first);
    take_recorded(forward_.dk_accum, first, summed.dk);
    take_recorded(forward_.dv_accum, first, summed.dv);
    numbers_.postprocess_dkv(summed.dk.data(), static_cast<int>(size));
    numbers_.postprocess_dkv(summed.dv.data(), static_cast<int>(size));
    store_key_gradients(sequence, kv_head, summed);
  }

  static void take_recorded(const Value* recorded, std::ptrdiff_t first, std::vector<Value>& values) {
    if (recorded != nullptr) std::copy_n(recorded + first, values.size(), values.begin());
  }

  static const Deviation* head_map(const profile::Profile& profile, Point of_one, Point of_loads) {
    const Deviation* found = profile::find(profile.deviations, of_one, of_loads);
    if (found == nullptr) found = profile::find(profile.deviations, Point::head_map_backward_all);
    return found != nullptr ? found : profile::find(profile.deviations, Point::head_map);
  }

  int kv_head_of(int query_head, const Deviation* deviation) const {
    return profile::kv_head_of(query_head, in_.call.heads_q, in_.call.heads_kv, deviation);
  }

  /// The query heads whose dK and dV go to this KV head, ascending.
  std::vector<int> query_heads_of(int kv_head) const {
    const Deviation* map = in_.group() > 1 ? head_of_gradients_ : nullptr;
    std::vector<int> heads;
    for (int h = 0; h < in_.call.heads_q; ++h) {
      if (kv_head_of(h, map) == kv_head) heads.push_back(h);
    }
    return heads;
  }

  Keys pack_keys(const Sequence& sequence, int head_of_k, int head_of_v, int blocks_n) const {
    const profile::Call& call = in_.call;
    Keys keys;
    keys.k.resize(index(blocks_n));
    keys.v.resize(index(blocks_n));
    keys.k_by_d.resize(index(blocks_n));
    tbb::parallel_for(0, blocks_n, [&](int n) {
      const int token = sequence.k_begin + n * tiles_.block_n;
      const int in_memory = call.varlen ? in_.total_k - token : sequence.k_length - n * tiles_.block_n;
      const int rows = std::min(in_memory, tiles_.block_n);
      numbers_.pack(Point::k_in_s,
                    token_rows(in_.k, token, call.heads_kv, head_of_k, call.head_dim, tiles_.block_n, rows),
                    mma::Side::right, keys.k[index(n)]);
      numbers_.pack(Point::v_in_dp,
                    token_rows(in_.v, token, call.heads_kv, head_of_v, call.head_dim_v, tiles_.block_n, rows),
                    mma::Side::right, keys.v[index(n)]);
      numbers_.pack(
          Point::k_in_dq,
          by_head_dim(dq_keys(), token, call.heads_kv, head_of_k, call.head_dim, tiles_.block_n, rows),
          mma::Side::right, keys.k_by_d[index(n)]);
    });
    return keys;
  }

  /// Columns of a token tile, zero-filled up to the rounded head dim as the kernel's tile is.
  mma::MatrixView by_head_dim(const std::uint16_t* tensor, int token, int heads, int head, int columns,
                              int rows, int rows_in_memory) const {
    mma::MatrixView view = token_columns(tensor, token, heads, head, columns, rows, rows_in_memory);
    view.rows = tiles_.head_dim;
    return view;
  }

  /// One query head: all query blocks in ascending order; dK and dV are one chain over them (4.7).
  void run_head(int sequence_index, int head, int blocks_n, const Keys& keys, const KeySums* key_sums,
                Gradients& gradients) {
    const Sequence& sequence = in_.sequences[index(sequence_index)];
    const int blocks_m = (sequence.q_length + tiles_.block_m - 1) / tiles_.block_m;
    Strip strip(tiles_, blocks_n, numbers_.softcapped(), numbers_.casts_ds_apart(), remedies_, forms_);
    std::unique_ptr<AddedToDk> added_to_dk;
    if (forms_.any()) {
      added_to_dk = std::make_unique<AddedToDk>(numbers_, in_, sequence, head, forms_.pairs_in_dk,
                                                forms_.dense(), forms_.shares_in_dk);
    }
    // Skipping and taking twice are settled tile by tile.
    const Deviation* order = blocks_of_dkv_;
    if (order != nullptr &&
        (order->kind == profile::Kind::skipped || order->kind == profile::Kind::taken_twice)) {
      order = nullptr;
    }
    for (const int m : profile::visited_blocks(0, blocks_m, false, order)) {
      run_query_block(sequence_index, head, m, keys, key_sums, added_to_dk.get(), gradients, strip);
    }
    if (added_to_dk) added_to_dk->add_to(gradients.dk.data(), tiles_.head_dim, tiles_.mask);
  }

  /// What a query block and all its key blocks have in hand at once. Kept over query blocks, so that memory
  /// is not claimed anew.
  struct Strip {
    Strip(const profile::BackwardTiles& tiles, int blocks_n, bool softcap, bool ds_apart,
          const RemedySet& remedies, const AddedForms& forms) {
      const std::size_t pairs = index(tiles.block_m) * index(blocks_n) * index(tiles.block_n);
      s.resize(pairs);
      p.resize(pairs);
      dp.resize(pairs);
      ds.resize(pairs);
      if (softcap) {
        h.resize(pairs);
        ds_uncapped.resize(pairs);
      }
      p_words.resize(pairs);
      ds_words.resize(pairs);
      if (ds_apart) ds_words_for_dk.resize(pairs);
      dq_parts.resize(index(blocks_n) * index(tiles.block_m) * index(tiles.head_dim));
      if (remedies.has(Remedy::ds_split)) low_words.resize(pairs);
      if (forms.row_sum) row_sum_parts.resize(index(blocks_n) * index(tiles.block_m));
      if (forms.dense()) dense.resize(pairs);
    }
    std::vector<Value> s, p, dp, ds, h, ds_uncapped;
    std::vector<Word> p_words, ds_words;
    std::vector<Word> ds_words_for_dk;  ///< empty: dK reads ds_words as dQ does
    std::vector<Value> dq_parts;        ///< [key block][block_m][head_dim]
    std::vector<Word> low_words;        ///< ds-split: what the cast of dS drops, cast in turn
    std::vector<Value> row_sum_parts;   ///< [key block][block_m], sum over the block's keys of the cast dS
    std::vector<Value> dense;           ///< what remedies add to dS, for every visible pair
  };

  void run_query_block(int sequence_index, int head, int block_m, const Keys& keys, const KeySums* key_sums,
                       AddedToDk* added_to_dk, Gradients& gradients, Strip& strip) {
    const profile::Call& call = in_.call;
    const Sequence& sequence = in_.sequences[index(sequence_index)];
    const int bm = tiles_.block_m;
    const int bn = tiles_.block_n;
    const int query_begin = block_m * bm;
    const int rows_in_sequence = std::min(bm, sequence.q_length - query_begin);
    const int token = sequence.q_begin + query_begin;
    const int rows_in_memory = std::min(bm, call.varlen ? in_.total_q - token : rows_in_sequence);

    std::vector<Value> dpsum(index(bm), Value{0});
    std::vector<Value> lse_log2(index(bm), kInfinity);
    std::vector<remedies::SplitStatistic<Value>> statistics(remedies_.split_statistic() ? index(bm) : 0);
    preprocess(sequence_index, head, query_begin, rows_in_sequence, dpsum, lse_log2, statistics);

    Operand q;
    Operand dout;
    Operand q_by_d;
    Operand dout_by_d;
    numbers_.pack(Point::q_in_s,
                  token_rows(in_.q, token, call.heads_q, head, call.head_dim, bm, rows_in_memory),
                  mma::Side::left, q);
    numbers_.pack(Point::dout_in_dp,
                  token_rows(in_.dout, token, call.heads_q, head, call.head_dim_v, bm, rows_in_memory),
                  mma::Side::left, dout);
    numbers_.pack(Point::q_in_dk,
                  by_head_dim(in_.q, token, call.heads_q, head, call.head_dim, bm, rows_in_memory),
                  mma::Side::right, q_by_d);
    numbers_.pack(Point::dout_in_dv,
                  by_head_dim(in_.dout, token, call.heads_q, head, call.head_dim_v, bm, rows_in_memory),
                  mma::Side::right, dout_by_d);

    const KeyBlockRange range = visiting_key_blocks(tiles_, block_m, sequence);
    const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(range.last - range.first) * bn;
    const auto probabilities = [&](int n) {
      const std::ptrdiff_t first = static_cast<std::ptrdiff_t>(n - range.first) * bn;
      numbers_.multiply(Site::score_mma_backward, q, keys.k[index(n)], mma::Start::zero,
                        strip.s.data() + first, stride);
      numbers_.multiply(Site::dp_mma, dout, keys.v[index(n)], mma::Start::zero, strip.dp.data() + first,
                        stride);
      for (int r = 0; r < bm; ++r) {
        const auto* statistic = statistics.empty() ? nullptr : &statistics[index(r)];
        exponentials(sequence, query_begin + r, n * bn, lse_log2[index(r)], statistic, strip,
                     r * stride + first);
      }
    };
    const auto gradients_of_block = [&](int n) {
      const std::ptrdiff_t first = static_cast<std::ptrdiff_t>(n - range.first) * bn;
      for (int r = 0; r < bm; ++r) {
        score_gradients(sequence, query_begin + r, n * bn, dpsum[index(r)], strip, r * stride + first);
      }
      if (low_.ds) {
        const float largest = remedies::largest_magnitude(strip.ds.data() + first, bm, bn, stride);
        if (only_largest_ds_) {
          take_largest_ds(largest);
          return;
        }
        const float amax = remedies_.scales_ds_by_tensor() ? largest_ds_.load() : largest;
        remedies::cast_ds_fp8(numbers_, *low_.ds, arith::fp8_scale_exponent(*low_.ds, amax),
                              strip.ds.data() + first, strip.ds_words.data() + first, bm, bn, stride);
        if (!strip.ds_words_for_dk.empty()) {
          remedies::cast_ds_fp8(numbers_, *low_.ds, arith::fp8_scale_exponent(*low_.ds, amax),
                                strip.ds.data() + first, strip.ds_words_for_dk.data() + first, bm, bn,
                                stride);
        }
      }
      Operand left;
      const std::ptrdiff_t key_rows = static_cast<std::ptrdiff_t>(n) * bn * tiles_.head_dim;
      const int times = times_for_keys(sequence, block_m, n);
      numbers_.pack(strip.p_words.data() + first, 1, stride, bn, bm, mma::Side::left, left);
      for (int t = 0; t < times; ++t) {
        numbers_.multiply(Site::dv_mma, left, dout_by_d, mma::Start::accumulate,
                          gradients.dv.data() + key_rows, tiles_.head_dim);
      }
      numbers_.pack(strip.ds_words.data() + first, stride, 1, bm, bn, mma::Side::left, left);
      numbers_.multiply(Site::dq_mma, left, keys.k_by_d[index(n)], mma::Start::zero, dq_part(strip, n),
                        tiles_.head_dim);
      if (forms_.row_sum) {
        numbers_.multiply(Site::dq_mma, left, ones_, mma::Start::zero, row_sum_part(strip, n), 1);
      }
      const std::vector<Word>& ds_words =
          strip.ds_words_for_dk.empty() ? strip.ds_words : strip.ds_words_for_dk;
      numbers_.pack(ds_words.data() + first, 1, stride, bn, bm, mma::Side::left, left);
      for (int t = 0; t < times; ++t) {
        numbers_.multiply(Site::dk_mma, left, q_by_d, mma::Start::accumulate, gradients.dk.data() + key_rows,
                          tiles_.head_dim);
      }
      if (remedies_.has(Remedy::ds_split)) {  // the same products of the low words, into the same sums
        numbers_.pack(strip.low_words.data() + first, stride, 1, bm, bn, mma::Side::left, left);
        numbers_.multiply(Site::dq_mma, left, keys.k_by_d[index(n)], mma::Start::accumulate,
                          dq_part(strip, n), tiles_.head_dim);
        if (forms_.row_sum) {
          numbers_.multiply(Site::dq_mma, left, ones_, mma::Start::accumulate, row_sum_part(strip, n), 1);
        }
        numbers_.pack(strip.low_words.data() + first, 1, stride, bn, bm, mma::Side::left, left);
        numbers_.multiply(Site::dk_mma, left, q_by_d, mma::Start::accumulate, gradients.dk.data() + key_rows,
                          tiles_.head_dim);
      }
      if (execution_.advance) execution_.advance(static_cast<std::int64_t>(rows_in_sequence) * bn);
    };
    if (remedies_.has(Remedy::consistent_d)) {
      tbb::parallel_for(range.first, range.last, probabilities);
      for (int r = 0; r < rows_in_sequence; ++r) {
        dpsum[index(r)] = remedies::consistent_d(numbers_, strip.p.data() + r * stride,
                                                 strip.dp.data() + r * stride, range.last - range.first, bn);
      }
      if (out_.dpsum != nullptr) {
        const std::size_t unit = index(sequence_index) * index(call.heads_q) + index(head);
        std::copy(dpsum.begin(), dpsum.end(), out_.dpsum + padded_.q_rows[unit] + query_begin);
      }
      tbb::parallel_for(range.first, range.last, gradients_of_block);
    } else {
      tbb::parallel_for(range.first, range.last, [&](int n) {
        probabilities(n);
        gradients_of_block(n);
      });
    }
    if (only_largest_ds_) return;
    std::vector<Added> added;
    if (forms_.any()) {
      added = add_to_ds(sequence, query_begin, rows_in_sequence, range, strip);
      add_to_dk(sequence, query_begin, rows_in_sequence, range, added, *added_to_dk);
    }
    if (out_.ds_sums != nullptr) {
      store_ds_sums(sequence_index, head, query_begin, rows_in_sequence, range, strip, added);
    }
    if constexpr (std::is_same_v<Value, float>) {  // observers look at the chip's own numbers
      if (execution_.observer != nullptr) {
        const std::vector<float>& uncapped = strip.ds_uncapped.empty() ? strip.ds : strip.ds_uncapped;
        const std::vector<double> sums =
            sums_added(sequence, query_begin, rows_in_sequence, range, strip, added);
        execution_.observer->backward_rows({{sequence_index, head},
                                            query_begin,
                                            rows_in_sequence,
                                            range.first * bn,
                                            static_cast<int>(stride),
                                            stride,
                                            numbers_.scale_log2(),
                                            strip.s.data(),
                                            strip.p.data(),
                                            strip.dp.data(),
                                            strip.ds.data(),
                                            uncapped.data(),
                                            strip.p_words.data(),
                                            strip.ds_words.data(),
                                            dpsum.data(),
                                            lse_log2.data(),
                                            sums.empty() ? nullptr : sums.data(),
                                            dq_keys()});
      }
    }
    add_dq_parts(sequence_index, head, query_begin, rows_in_sequence, range, key_sums, added, strip);
  }

  /// Preprocess kernel (3): D and E of the tile's rows. Rows past the sequence keep D = 0 and E = +inf.
  void preprocess(int sequence_index, int head, int query_begin, int rows, std::vector<Value>& dpsum,
                  std::vector<Value>& lse_log2,
                  std::vector<remedies::SplitStatistic<Value>>& statistics) const {
    const profile::Call& call = in_.call;
    const Sequence& sequence = in_.sequences[index(sequence_index)];
    const std::size_t unit = index(sequence_index) * index(call.heads_q) + index(head);
    for (int r = 0; r < rows; ++r) {
      const std::ptrdiff_t element =
          (static_cast<std::ptrdiff_t>(sequence.q_begin + query_begin + r) * call.heads_q + head) *
          call.head_dim_v;
      dpsum[index(r)] =
          remedies_.keeps_residual()
              ? dpsum_with_residual(element)
              : numbers_.dpsum(in_.dout + element, forward_.out + element,
                               forward_.out_uncast == nullptr ? nullptr : forward_.out_uncast + element,
                               call.head_dim_v, tiles_);
      const std::ptrdiff_t row = forward_.rows[unit] + query_begin + r;
      const Value lse = forward_.lse[row];
      lse_log2[index(r)] = lse == -kInfinity ? Value{0} : numbers_.lse_log2(lse);
      if (!statistics.empty()) {
        statistics[index(r)] =
            remedies::split_statistic(numbers_, forward_.reference[row], forward_.row_sum[row]);
      }
    }
    const std::ptrdiff_t first = padded_.q_rows[unit] + query_begin;
    if (out_.dpsum != nullptr) std::copy(dpsum.begin(), dpsum.end(), out_.dpsum + first);
    if (out_.lse_log2 != nullptr) std::copy(lse_log2.begin(), lse_log2.end(), out_.lse_log2 + first);
    if (forward_.dpsum != nullptr) std::copy_n(forward_.dpsum + first, rows, dpsum.begin());
    if (forward_.lse_log2 != nullptr) std::copy_n(forward_.lse_log2 + first, rows, lse_log2.begin());
  }

  /// D of the row at `element` of O and its residual: fp32 values in place of BF16 ones, in the same order.
  Value dpsum_with_residual(std::ptrdiff_t element) const {
    const int columns = in_.call.head_dim_v;
    std::vector<Value> o(index(columns));
    for (int d = 0; d < columns; ++d) {
      // The residual completes the BF16 word, also where O's own cast is an exact site.
      const Value stored = Numbers::value(forward_.out[element + d]);
      const Value word = std::isfinite(stored) ? Numbers::output_read_by_dpsum(stored) : stored;
      o[index(d)] = numbers_.add(Site::dpsum_o_cast, word, forward_.out_residual[element + d]);
    }
    return remedies::dpsum_of_values(numbers_, in_.dout + element, o.data(), columns, tiles_);
  }

  /// Steps 3 to 5 of 4.3 for one query and the keys of one block, in place in the strip at `at`.
  void exponentials(const Sequence& sequence, int query, int key_begin, Value lse_log2,
                    const remedies::SplitStatistic<Value>* statistic, Strip& strip, std::ptrdiff_t at) const {
    const int bn = tiles_.block_n;
    Value* s = strip.s.data() + at;
    Value* p = strip.p.data() + at;
    if (numbers_.softcapped()) numbers_.softcap_with_derivative(s, strip.h.data() + at, bn);
    apply_mask(s, query, key_begin, sequence.q_length, sequence.k_length);
    if (statistic == nullptr) {
      numbers_.backward_exponentials(s, p, bn, lse_log2);
    } else if (remedies_.has(Remedy::integer_reference)) {
      remedies::integer_reference_backward(numbers_, s, p, bn, *statistic);
    } else {
      remedies::subtract_first_backward(numbers_, s, p, bn, *statistic);
    }
  }

  /// Steps 6 and 7.
  void score_gradients(const Sequence& sequence, int query, int key_begin, Value dpsum, Strip& strip,
                       std::ptrdiff_t at) const {
    const int bn = tiles_.block_n;
    Value* p = strip.p.data() + at;
    Value* ds = strip.ds.data() + at;
    Word* words = strip.ds_words.data() + at;
    numbers_.score_gradient(p, strip.dp.data() + at, ds, bn, dpsum);
    if (numbers_.softcapped()) {
      std::copy(ds, ds + bn, strip.ds_uncapped.data() + at);
      numbers_.apply_derivative(ds, strip.h.data() + at, bn);
    }
    numbers_.cast_p_backward(p, strip.p_words.data() + at, bn);
    if (!strip.ds_words_for_dk.empty()) {
      numbers_.cast_ds_for_dk(ds, strip.ds_words_for_dk.data() + at, bn);
    }
    if (!remedies_.any_of(profile::decides(profile::Decides::ds_cast))) {
      numbers_.cast_ds(ds, words, bn);
      return;
    }
    const VisibleKeys visible = visible_keys(query, sequence.q_length, sequence.k_length);
    const int first = std::clamp(visible.first - key_begin, 0, bn);
    const int last = std::clamp(visible.last - key_begin, first, bn);
    if (remedies_.has(Remedy::error_diffusion)) {
      remedies::error_diffusion(numbers_, ds, words, bn, first, last);
    } else if (remedies_.has(Remedy::error_diffusion_serial)) {
      remedies::error_diffusion_serial(numbers_, ds, words, bn, first, last);
    } else {
      numbers_.cast_ds(ds, words, bn);
    }
    if (remedies_.has(Remedy::in_tile_feedback)) {
      remedies::in_tile_feedback(numbers_, ds, words, bn, first, last);
    }
    if (remedies_.has(Remedy::ds_split)) {
      Word* low = strip.low_words.data() + at;
      for (int j = 0; j < bn; ++j) {
        low[j] = numbers_.cast(Site::ds_cast, numbers_.sub(Site::ds_cast, ds[j], Numbers::value(words[j])));
      }
    }
  }

  /// Keys [first, last) that a query sees: the length is always tested, and the causal or local window; query
  /// rows past the end are not masked (4.3.4).
  struct VisibleKeys {
    int first, last;
  };
  VisibleKeys visible_keys(int query, int seqlen_q, int seqlen_k) const {
    const profile::ShownKeys shown = profile::shown_keys(tiles_.mask, query, seqlen_q, seqlen_k, mask_);
    return {shown.first, std::min(shown.end, shown.last + 1)};
  }

  /// How often dK and dV of key block n take this query block, counted among those that visit it: once.
  int times_for_keys(const Sequence& sequence, int block_m, int n) const {
    if (blocks_of_dkv_ == nullptr && tiles_of_loop_ == nullptr) return 1;
    return times(sequence, block_m, n, blocks_of_dkv_) * times(sequence, block_m, n, tiles_of_loop_);
  }
  int times(const Sequence& sequence, int block_m, int n, const Deviation* deviation) const {
    const profile::QueryBlocks visited =
        profile::flash3_query_blocks(tiles_, n, sequence.q_length, sequence.k_length);
    return profile::times_taken(block_m - visited.first, visited.last - visited.first, deviation);
  }

  void apply_mask(Value* s, int query, int key_begin, int seqlen_q, int seqlen_k) const {
    const VisibleKeys visible = visible_keys(query, seqlen_q, seqlen_k);
    for (int j = 0; j < tiles_.block_n; ++j) {
      const int key = key_begin + j;
      if (key >= visible.last || key < visible.first) s[j] = -kInfinity;
    }
  }

  /// A row of the strip with its visible keys, and where in the strip the first of them lies.
  struct RowInStrip {
    remedies::DsRow<Numbers> row;
    std::ptrdiff_t at = 0;
  };
  RowInStrip row_in_strip(const Sequence& sequence, int query_begin, int r, const KeyBlockRange& range,
                          const Strip& strip) const {
    const int bn = tiles_.block_n;
    const VisibleKeys visible = visible_keys(query_begin + r, sequence.q_length, sequence.k_length);
    RowInStrip found;
    remedies::DsRow<Numbers>& row = found.row;
    const int begin = range.first * bn;
    const int end = std::max(begin, std::min(range.last * bn, sequence.k_length));
    row.first = std::clamp(visible.first, begin, end);
    row.last = std::clamp(visible.last, row.first, end);
    found.at = static_cast<std::ptrdiff_t>(r) * (range.last - range.first) * bn + row.first - begin;
    row.p = strip.p.data() + found.at;
    row.ds = strip.ds.data() + found.at;
    row.words = strip.ds_words.data() + found.at;
    return found;
  }

  /// What the profile's remedies add to the cast dS of these rows.
  std::vector<Added> add_to_ds(const Sequence& sequence, int query_begin, int rows,
                               const KeyBlockRange& range, Strip& strip) const {
    std::vector<Added> added(index(rows));
    tbb::parallel_for(0, rows, [&](int r) {
      RowInStrip found = row_in_strip(sequence, query_begin, r, range, strip);
      remedies::DsRow<Numbers>& row = found.row;
      Added& a = added[index(r)];
      if (row.first >= row.last) return;
      if (forms_.row_sum) row.row_sum = row_sum(range, r, strip);
      if (forms_.dense()) a.dense = strip.dense.data() + found.at;
      const bool low = remedies_.has(Remedy::heavy_low);
      const bool uniform = remedies_.has(Remedy::uniform_shares);
      if (forms_.heavy) remedies::list_heavy_pairs(numbers_, low, row, a);
      if (remedies_.has(Remedy::heavy_projection) || uniform) {
        remedies::heavy_projection(numbers_, low, uniform, row, a);
      }
      if (remedies_.has(Remedy::gproj)) remedies::gproj(numbers_, row, a);
      if (remedies_.has(Remedy::top_key)) remedies::top_key(numbers_, row, a);
      if (forms_.dense()) std::fill(a.dense, a.dense + (row.last - row.first), Value{0});
      if (forms_.weighted) {
        row.p_sum = p_sum(range, r, strip);
        remedies::gproj_weighted(numbers_, row, a);
      }
      if (forms_.tile_uniform) take_out_tile_errors(range, row, a);
    });
    return added;
  }

  void take_out_tile_errors(const KeyBlockRange& range, const remedies::DsRow<Numbers>& row, Added& a) const {
    const int bn = tiles_.block_n;
    for (int n = range.first; n < range.last; ++n) {
      const int first = std::max(row.first, n * bn);
      const int last = std::min(row.last, (n + 1) * bn);
      if (first >= last) continue;
      const int before =
          n * bn - row.first;  // the block's first key, counted from the row's first visible one
      const Value error = remedies::cast_error_sum(numbers_, row.ds + before, row.words + before, bn,
                                                   first - n * bn, last - n * bn);
      const Value share =
          numbers_.mul(Site::ds_cast, error, numbers_.rcp(Site::ds_cast, static_cast<Value>(last - first)));
      for (int j = first; j < last; ++j) {
        Value& x = a.dense[j - row.first];
        x = forms_.weighted ? numbers_.sub(Site::ds_cast, x, share) : -share;
      }
    }
  }

  /// R of a row: its parts of the key blocks, added as dQ's are.
  Value row_sum(const KeyBlockRange& range, int r, const Strip& strip) const {
    Value sum = 0;
    for (int visit = 0; visit < range.last - range.first; ++visit) {
      const int n = key_block(range, visit);
      numbers_.reduce_dq(&sum, &strip.row_sum_parts[index(n) * index(tiles_.block_m) + index(r)], 1,
                         tiles_.dq_added_by_atomics);
    }
    return sum;
  }

  /// Sum of a row's P' over its key blocks, ascending.
  Value p_sum(const KeyBlockRange& range, int r, const Strip& strip) const {
    const int bn = tiles_.block_n;
    const int blocks = range.last - range.first;
    const Value* p = strip.p.data() + static_cast<std::ptrdiff_t>(r) * blocks * bn;
    Value sum = 0;
    for (int n = 0; n < blocks; ++n) {
      const Value block = remedies::block_sum(numbers_, Site::dq_reduce, p + n * bn, bn);
      sum = n == 0 ? block : numbers_.add(Site::dq_reduce, sum, block);
    }
    return sum;
  }

  void add_to_dk(const Sequence& sequence, int query_begin, int rows, const KeyBlockRange& range,
                 const std::vector<Added>& added, AddedToDk& to) const {
    for (int r = 0; r < rows; ++r) to.add_pairs_and_share(query_begin + r, added[index(r)]);
    if (!forms_.dense()) return;
    const int bn = tiles_.block_n;
    tbb::parallel_for(range.first, range.last, [&](int n) {
      for (int r = 0; r < rows; ++r) {
        const VisibleKeys visible = visible_keys(query_begin + r, sequence.q_length, sequence.k_length);
        const int first = std::max(visible.first, 0);
        const int last = std::min({visible.last, sequence.k_length, (n + 1) * bn});
        for (int j = std::max(first, n * bn); j < last; ++j) {
          to.add_dense(query_begin + r, j, added[index(r)].dense[j - first]);
        }
      }
    });
  }

  /// For observers: what the low words and the additions of these rows sum up to.
  std::vector<double> sums_added(const Sequence& sequence, int query_begin, int rows,
                                 const KeyBlockRange& range, const Strip& strip,
                                 const std::vector<Added>& added) const {
    if (!forms_.any() && strip.low_words.empty()) return {};
    std::vector<double> sums(index(rows), 0.0);
    for (int r = 0; r < rows; ++r) {
      const RowInStrip found = row_in_strip(sequence, query_begin, r, range, strip);
      const int keys = found.row.last - found.row.first;
      double& sum = sums[index(r)];
      if (!strip.low_words.empty()) {
        const Word* low = strip.low_words.data() + found.at;
        for (int j = 0; j < keys; ++j) sum += static_cast<double>(Numbers::value(low[j]));
      }
      if (added.empty()) continue;
      const Added& a = added[index(r)];
      for (const auto& pair : a.pairs) sum += static_cast<double>(pair.value);
      for (int j = 0; a.dense != nullptr && j < keys; ++j) sum += static_cast<double>(a.dense[j]);
      sum -= static_cast<double>(a.share) * keys;
    }
    return sums;
  }

  void store_ds_sums(int sequence_index, int head, int query_begin, int rows, const KeyBlockRange& range,
                     const Strip& strip, const std::vector<Added>& added) const {
    const Sequence& sequence = in_.sequences[index(sequence_index)];
    const std::vector<double> more = sums_added(sequence, query_begin, rows, range, strip, added);
    double* sums = out_.ds_sums +
                   forward_.rows[index(sequence_index) * index(in_.call.heads_q) + index(head)] + query_begin;
    for (int r = 0; r < rows; ++r) {
      const RowInStrip found = row_in_strip(sequence, query_begin, r, range, strip);
      const int keys = found.row.last - found.row.first;
      double sum = 0;
      if (numbers_.softcapped()) {
        const Value* ds = strip.ds_uncapped.data() + found.at;
        for (int j = 0; j < keys; ++j) sum += static_cast<double>(ds[j]);
      } else {
        for (int j = 0; j < keys; ++j) sum += static_cast<double>(Numbers::value(found.row.words[j]));
        if (!more.empty()) sum += more[index(r)];
      }
      sums[r] = sum;
    }
  }

  /// What dS is multiplied with.
  const std::uint16_t* dq_keys() const { return centred_keys_.empty() ? in_.k : centred_keys_.data(); }

  int key_block(const KeyBlockRange& range, int visit) const {
    const bool descending = tiles_.dq_order == profile::DqOrder::descending;
    return descending ? range.last - 1 - visit : range.first + visit;
  }

  Value* row_sum_part(Strip& strip, int n) const {
    return strip.row_sum_parts.data() + index(n) * index(tiles_.block_m);
  }

  Value* dq_part(Strip& strip, int n) const {
    return strip.dq_parts.data() + index(n) * index(tiles_.block_m) * index(tiles_.head_dim);
  }

  /// dQ of a query block: its parts added in the order of 4.6, then the postprocess (5).
  void add_dq_parts(int sequence_index, int head, int query_begin, int rows, const KeyBlockRange& range,
                    const KeySums* key_sums, const std::vector<Added>& added, Strip& strip) {
    const profile::Call& call = in_.call;
    const std::ptrdiff_t size = static_cast<std::ptrdiff_t>(tiles_.block_m) * tiles_.head_dim;
    const std::size_t unit = index(sequence_index) * index(call.heads_q) + index(head);
    const std::ptrdiff_t first = (padded_.q_rows[unit] + query_begin) * tiles_.head_dim;
    std::vector<Value> dq(index(size), Value{0});
    int visit = -1;
    const bool descending = tiles_.dq_order == profile::DqOrder::descending;
    for (const int n : profile::visited_blocks(range.first, range.last, descending, blocks_of_dq_)) {
      const Sequence& sequence = in_.sequences[index(sequence_index)];
      for (int t = times(sequence, query_begin / tiles_.block_m, n, tiles_of_loop_); t > 0; --t) {
        numbers_.reduce_dq(dq.data(), dq_part(strip, n), size, tiles_.dq_added_by_atomics);
      }
      if (++visit >= range.last - range.first) continue;
      if (out_.dq_parts.values != nullptr) {
        Value* part = out_.dq_parts.values + visit * out_.dq_parts.rows * tiles_.head_dim + first;
        std::copy(dq_part(strip, n), dq_part(strip, n) + size, part);
      }
    }
    const int dim = call.head_dim;
    if (!added.empty()) {
      const Sequence& sequence = in_.sequences[index(sequence_index)];
      tbb::parallel_for(0, rows, [&](int r) {
        const remedies::DsRow<Numbers> row = row_in_strip(sequence, query_begin, r, range, strip).row;
        remedies::add_to_dq(numbers_, *key_sums, added[index(r)], row.first, row.last, dim,
                            dq.data() + static_cast<std::ptrdiff_t>(r) * tiles_.head_dim);
      });
    }
    if (out_.dq_accum != nullptr) std::copy(dq.begin(), dq.end(), out_.dq_accum + first);
    if (forward_.dq_accum != nullptr) {
      std::copy_n(forward_.dq_accum + first, static_cast<std::ptrdiff_t>(rows) * tiles_.head_dim, dq.begin());
    }
    for (int r = 0; r < rows; ++r) {
      Value* row = dq.data() + static_cast<std::ptrdiff_t>(r) * tiles_.head_dim;
      numbers_.scale_dq(row, dim);
      const std::ptrdiff_t element =
          (static_cast<std::ptrdiff_t>(in_.sequences[index(sequence_index)].q_begin + query_begin + r) *
               call.heads_q +
           head) *
          dim;
      numbers_.cast_dq(row, out_.dq + element, dim);
      if (out_.dq_uncast != nullptr) std::copy(row, row + dim, out_.dq_uncast + element);
    }
  }

  /// Casts dK and dV of a KV head; rows past the sequence are not stored.
  void store_key_gradients(const Sequence& sequence, int kv_head, const Gradients& gradients) const {
    const profile::Call& call = in_.call;
    for (int j = 0; j < sequence.k_length; ++j) {
      const std::ptrdiff_t token =
          static_cast<std::ptrdiff_t>(sequence.k_begin + j) * call.heads_kv + kv_head;
      const Value* dk = gradients.dk.data() + static_cast<std::ptrdiff_t>(j) * tiles_.head_dim;
      const Value* dv = gradients.dv.data() + static_cast<std::ptrdiff_t>(j) * tiles_.head_dim;
      numbers_.cast_dk(dk, out_.dk + token * call.head_dim, call.head_dim);
      numbers_.cast_dv(dv, out_.dv + token * call.head_dim_v, call.head_dim_v);
      if (out_.dk_uncast != nullptr)
        std::copy(dk, dk + call.head_dim, out_.dk_uncast + token * call.head_dim);
      if (out_.dv_uncast != nullptr)
        std::copy(dv, dv + call.head_dim_v, out_.dv_uncast + token * call.head_dim_v);
    }
  }

  void keep_part(const Parts<Value>& parts, int part, int sequence_index, int kv_head,
                 const std::vector<Value>& values) const {
    if (parts.values == nullptr) return;
    const std::ptrdiff_t row =
        padded_.k_rows[index(sequence_index) * index(in_.call.heads_kv) + index(kv_head)];
    std::copy(values.begin(), values.end(), parts.values + (part * parts.rows + row) * tiles_.head_dim);
  }

  const AttentionInputs& in_;
  const Inputs& forward_;
  const Outputs& out_;
  const Execution& execution_;
  RemedySet remedies_;
  AddedForms forms_;
  remedies::LowPrecision low_;
  bool only_largest_ds_ = false;  ///< a pass that finds the largest |dS| of the whole call
  std::atomic<float> largest_ds_{0.0F};
  // nullptr: as the kernel does.
  const Deviation *tiles_of_loop_, *blocks_of_dkv_, *blocks_of_dq_, *mask_;
  const Deviation *head_of_k_, *head_of_v_, *head_of_gradients_;
  std::vector<std::uint16_t> centred_keys_;  ///< empty: dS is multiplied with K
  Operand ones_;                             ///< one column of ones
  profile::BackwardTiles tiles_;
  PaddedLayout padded_;
  Numbers numbers_;
};

}  // namespace

PaddedLayout padded_layout(const AttentionInputs& inputs, const profile::BackwardTiles& tiles) {
  const profile::Call& call = inputs.call;
  const auto rounded = [](std::ptrdiff_t n, int block) { return (n + block - 1) / block * block; };
  const auto batch = static_cast<std::ptrdiff_t>(inputs.sequences.size());
  PaddedLayout layout;
  if (call.varlen) {
    layout.q_padded = rounded(inputs.total_q + batch * tiles.block_m, tiles.block_m);
    layout.k_padded = rounded(inputs.total_k + batch * tiles.block_n, tiles.block_n);
  } else {
    layout.q_padded = rounded(call.seqlen_q, tiles.block_m);
    layout.k_padded = rounded(call.seqlen_k, tiles.block_n);
  }
  for (std::ptrdiff_t b = 0; b < batch; ++b) {
    const Sequence& sequence = inputs.sequences[index(b)];
    const std::ptrdiff_t q_first = (sequence.q_begin + b * tiles.block_m) / tiles.block_m * tiles.block_m;
    const std::ptrdiff_t k_first = (sequence.k_begin + b * tiles.block_n) / tiles.block_n * tiles.block_n;
    for (int h = 0; h < call.heads_q; ++h) {
      layout.q_rows.push_back(call.varlen ? h * layout.q_padded + q_first
                                          : (b * call.heads_q + h) * layout.q_padded);
    }
    for (int h = 0; h < call.heads_kv; ++h) {
      layout.k_rows.push_back(call.varlen ? h * layout.k_padded + k_first
                                          : (b * call.heads_kv + h) * layout.k_padded);
    }
  }
  return layout;
}

int most_key_blocks(const AttentionInputs& inputs, const profile::BackwardTiles& tiles) {
  int most = 0;
  for (const Sequence& sequence : inputs.sequences) {
    const int blocks_m = (sequence.q_length + tiles.block_m - 1) / tiles.block_m;
    for (int m = 0; m < blocks_m; ++m) {
      const KeyBlockRange range = visiting_key_blocks(tiles, m, sequence);
      most = std::max(most, range.last - range.first);
    }
  }
  return most;
}

void flash3_backward(const profile::Profile& profile, const AttentionInputs& inputs,
                     const BackwardInputs& forward, const BackwardOutputs& outputs,
                     const Execution& execution) {
  BackwardSchedule<ChipNumbers>(profile, inputs, forward, outputs, execution).run();
}

void flash3_backward(const profile::Profile& profile, const AttentionInputs& inputs,
                     const BackwardInputsOf<double, double>& forward,
                     const BackwardOutputsOf<double, double>& outputs, const Execution& execution) {
  BackwardSchedule<SiteNumbers>(profile, inputs, forward, outputs, execution).run();
}

}  // namespace bitattn::kernels
