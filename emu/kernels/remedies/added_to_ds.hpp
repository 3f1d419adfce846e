#pragma once
// What remedies add to the cast dS of a row, in fp32 and outside the tensor core: effectively dS~ = dSb + a.
// Three forms, which reach dQ and dK in this order (docs/remedies.md):
//
//   pairs   a of some keys of the row          dQ_i := dQ_i + chain of fma(a_ij, K_j, .) from +0, keys
//   dense   a of every visible key             ascending; dK_j := dK_j + the same chain of fma(a_ij, Q_i, .),
//                                              queries ascending
//   share   -share for every visible key       dQ_i := fma(-share_i, sum of the visible K_j, dQ_i);
//                                              dK_j := dK_j - sum over the rows that see j of share_i Q_i
//
// K_j is what dS is multiplied with (centred, if that remedy is on), Q, K, dQ, dK are not yet scaled. Sums of
// K over a range of keys are differences of prefix sums, sums of share_i Q_i over a range of rows differences
// of suffix sums: O(S D) memory and work.

#include <algorithm>
#include <vector>

#include "emu/arith/bf16.hpp"
#include "emu/kernels/attention.hpp"
#include "emu/profile/sites.hpp"

namespace bitattn::kernels::remedies {

/// A row of dS as remedies see it.
template <class Numbers>
struct DsRow {
  using Value = typename Numbers::Value;
  using Word = typename Numbers::Word;
  int first = 0, last = 0;  ///< its visible keys
  // Of every key from the row's first visible one:
  const Value* p = nullptr;
  const Value* ds = nullptr;
  const Word* words = nullptr;
  Value row_sum = 0;  ///< R: sum of the words (with ds-split of both), where a remedy asked for it
  Value p_sum = 0;    ///< sum of P', where a remedy asked for it
};

template <class Value>
struct AddedToDs {
  struct Pair {
    int key;
    Value value;
  };
  std::vector<Pair> pairs;  ///< keys ascending
  bool pairs_in_dk = true;
  Value* dense = nullptr;  ///< [visible keys]; nullptr: none
  Value share = 0;
  bool share_in_dk = true;
};

/// Which rows of a sequence see a key, as the kernel's mask has it.
struct RowRange {
  int first = 0, last = 0;
};
inline RowRange rows_that_see(const profile::Mask& mask, int key, int seqlen_q, int seqlen_k) {
  const int diagonal = key - (seqlen_k - seqlen_q);
  int first = 0;
  int last = seqlen_q;
  if (mask.causal) first = diagonal;
  if (mask.local) {
    first = diagonal - mask.right;
    last = diagonal + mask.left + 1;
  }
  first = std::clamp(first, 0, seqlen_q);
  return {first, std::clamp(last, first, seqlen_q)};
}

/// What the forms need of a KV head's keys.
template <class Numbers>
class KeySums {
  using Value = typename Numbers::Value;

 public:
  /// `keys`: the tensor that dS is multiplied with, laid out as K.
  KeySums(const Numbers& numbers, const AttentionInputs& in, const std::uint16_t* keys,
          const Sequence& sequence, int kv_head, bool prefix_sums)
      : dim_(in.call.head_dim) {
    const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(in.call.heads_kv) * dim_;
    rows_.resize(static_cast<std::size_t>(sequence.k_length) * static_cast<std::size_t>(dim_));
    if (prefix_sums) sums_.assign(rows_.size() + static_cast<std::size_t>(dim_), Value{0});
    for (int j = 0; j < sequence.k_length; ++j) {
      const std::uint16_t* k = keys + (sequence.k_begin + j) * stride + kv_head * dim_;
      Value* row = rows_.data() + static_cast<std::ptrdiff_t>(j) * dim_;
      for (int d = 0; d < dim_; ++d) row[d] = static_cast<Value>(arith::fp32_from_bf16(k[d]));
      if (!prefix_sums) continue;
      const Value* before = sums_.data() + static_cast<std::ptrdiff_t>(j) * dim_;
      Value* after = sums_.data() + static_cast<std::ptrdiff_t>(j + 1) * dim_;
      for (int d = 0; d < dim_; ++d) after[d] = numbers.add(profile::Site::dq_reduce, before[d], row[d]);
    }
  }
  const Value* row(int key) const { return rows_.data() + static_cast<std::ptrdiff_t>(key) * dim_; }
  /// Sum of the keys before `key`.
  const Value* sum_before(int key) const { return sums_.data() + static_cast<std::ptrdiff_t>(key) * dim_; }

 private:
  int dim_;
  std::vector<Value> rows_, sums_;
};

/// Adds what was added to a row's dS to its dQ, before that is scaled.
template <class Numbers>
void add_to_dq(const Numbers& numbers, const KeySums<Numbers>& keys,
               const AddedToDs<typename Numbers::Value>& added, int first, int last, int dim,
               typename Numbers::Value* dq) {
  using Value = typename Numbers::Value;
  const auto site = profile::Site::dq_reduce;
  std::vector<Value> sum(static_cast<std::size_t>(dim));
  const auto add_sum = [&] {
    for (int d = 0; d < dim; ++d) dq[d] = numbers.add(site, dq[d], sum[static_cast<std::size_t>(d)]);
  };
  if (!added.pairs.empty()) {
    std::fill(sum.begin(), sum.end(), Value{0});
    for (const auto& pair : added.pairs)
      numbers.add_scaled(site, pair.value, keys.row(pair.key), sum.data(), dim);
    add_sum();
  }
  if (added.dense != nullptr) {
    std::fill(sum.begin(), sum.end(), Value{0});
    for (int j = first; j < last; ++j) {
      numbers.add_scaled(site, added.dense[j - first], keys.row(j), sum.data(), dim);
    }
    add_sum();
  }
  if (added.share != 0) {
    const Value* upper = keys.sum_before(last);
    const Value* lower = keys.sum_before(first);
    for (int d = 0; d < dim; ++d) sum[static_cast<std::size_t>(d)] = numbers.sub(site, upper[d], lower[d]);
    numbers.add_scaled(site, -added.share, sum.data(), dq, dim);
  }
}

/// The same for dK of one query head, gathered row by row and added when all rows are done.
template <class Numbers>
class AddedToDk {
  using Value = typename Numbers::Value;
  static constexpr profile::Site kSite = profile::Site::dk_mma;

 public:
  AddedToDk(const Numbers& numbers, const AttentionInputs& in, const Sequence& sequence, int head, bool pairs,
            bool dense, bool shares)
      : numbers_(numbers), dim_(in.call.head_dim), sq_(sequence.q_length), sk_(sequence.k_length) {
    const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(in.call.heads_q) * dim_;
    q_.resize(size(sq_));
    for (int i = 0; i < sq_; ++i) {
      const std::uint16_t* q = in.q + (sequence.q_begin + i) * stride + head * dim_;
      for (int d = 0; d < dim_; ++d)
        q_[size(i) + static_cast<std::size_t>(d)] = static_cast<Value>(arith::fp32_from_bf16(q[d]));
    }
    if (pairs) pairs_.assign(size(sk_), Value{0});
    if (dense) dense_.assign(size(sk_), Value{0});
    if (shares) shares_.assign(static_cast<std::size_t>(sq_), Value{0});
  }

  /// Rows in ascending order, one at a time.
  void add_pairs_and_share(int row, const AddedToDs<Value>& added) {
    if (added.pairs_in_dk) {
      for (const auto& pair : added.pairs) {
        numbers_.add_scaled(kSite, pair.value, q_.data() + size(row), pairs_.data() + size(pair.key), dim_);
      }
    }
    if (added.share_in_dk && !shares_.empty()) shares_[static_cast<std::size_t>(row)] = added.share;
  }
  /// One key of one row; rows in ascending order, keys from any thread.
  void add_dense(int row, int key, Value value) {
    numbers_.add_scaled(kSite, value, q_.data() + size(row), dense_.data() + size(key), dim_);
  }

  /// dk: [keys][stride], not yet scaled.
  void add_to(Value* dk, std::ptrdiff_t stride, const profile::Mask& mask) const {
    const std::vector<Value> below = suffix_sums();
    for (int j = 0; j < sk_; ++j) {
      Value* row = dk + j * stride;
      for (const std::vector<Value>* sums : {&pairs_, &dense_}) {
        if (sums->empty()) continue;
        const Value* x = sums->data() + size(j);
        for (int d = 0; d < dim_; ++d) row[d] = numbers_.add(kSite, row[d], x[d]);
      }
      if (below.empty()) continue;
      const RowRange range = rows_that_see(mask, j, sq_, sk_);
      const Value* from = below.data() + size(range.first);
      const Value* to = below.data() + size(range.last);
      for (int d = 0; d < dim_; ++d) {
        row[d] = numbers_.sub(kSite, row[d], numbers_.sub(kSite, from[d], to[d]));
      }
    }
  }

 private:
  std::size_t size(int rows) const { return static_cast<std::size_t>(rows) * static_cast<std::size_t>(dim_); }

  /// [i]: sum over rows from i on of share * Q.
  std::vector<Value> suffix_sums() const {
    if (shares_.empty()) return {};
    std::vector<Value> sums(size(sq_ + 1), Value{0});
    for (int i = sq_ - 1; i >= 0; --i) {
      std::copy_n(sums.begin() + static_cast<std::ptrdiff_t>(size(i + 1)), dim_,
                  sums.begin() + static_cast<std::ptrdiff_t>(size(i)));
      numbers_.add_scaled(kSite, shares_[static_cast<std::size_t>(i)], q_.data() + size(i),
                          sums.data() + size(i), dim_);
    }
    return sums;
  }

  const Numbers& numbers_;
  int dim_, sq_, sk_;
  std::vector<Value> q_, pairs_, dense_, shares_;
};

}  // namespace bitattn::kernels::remedies
