#include "reference/fast_attention.hpp"

#include <oneapi/tbb/enumerable_thread_specific.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "reference/fast_head.hpp"
#include "reference/head_inputs.hpp"
#include "reference/pair_counter.hpp"
#include "reference/plain_attention.hpp"

namespace bitattn::reference {
namespace {

constexpr double kMostScore = 0x1p28;  // largest |score * log2 e|

/// Why a head cannot go the fast way; nullptr if it can.
const char* obstacle(const ProblemView& problem, const HeadInputs& inputs) {
  const double scale = std::abs(problem.softmax_scale);
  if (scale > 0x1p100 || (scale != 0 && scale < 0x1p-100)) return "softmax_scale out of range";
  if (problem.softcap > 0) {
    return problem.softcap > 0x1p20 || problem.softcap < 0x1p-20 ? "softcap out of range" : nullptr;
  }
  return inputs.largest_product() * scale * kLog2e * kSlack >= kMostScore ? "scores out of range" : nullptr;
}

/// Working precision for what goes the plain way: kDefaultBits below the largest score.
int plain_bits(const ProblemView& problem, const HeadInputs& inputs) {
  const double largest = inputs.largest_product() * std::abs(problem.softmax_scale);
  const int extra = largest > 1 ? std::ilogb(largest) + 1 : 0;
  return std::min(kDefaultBits + (extra + 63) / 64 * 64, kMaxBits);
}

using Workspaces = tbb::enumerable_thread_specific<Workspace>;

/// Keeps what plain computes of dK and dV; rows of queries go straight on.
class KeepKeys final : public Sink {
 public:
  KeepKeys(const ProblemView& problem, std::size_t keys, int bits, OtherRows& others, Sink& sink)
      : dim_(problem.head_dim), dim_v_(problem.head_dim_v), others_(others), sink_(sink) {
    if (!problem.backward()) return;
    others.dk = make_numbers(keys * dim_, bits);
    others.dv = make_numbers(keys * dim_v_, bits);
    others.dk_bound.assign(keys * dim_, 0.0);
    others.dv_bound.assign(keys * dim_v_, 0.0);
  }
  void query_row(const QueryRow& row) override { sink_.query_row(row); }
  void key_row(const KeyRow& row) override {
    keep(row.dk, row.dk_bound, row.key * dim_, others_.dk, others_.dk_bound);
    keep(row.dv, row.dv_bound, row.key * dim_v_, others_.dv, others_.dv_bound);
  }

 private:
  static void keep(std::span<const Number> from, std::span<const double> from_bound, std::size_t at,
                   std::vector<Number>& to, std::vector<double>& to_bound) {
    for (std::size_t i = 0; i < from.size(); ++i) mpfr_set(raw(to[at + i]), raw(from[i]), MPFR_RNDN);
    std::copy(from_bound.begin(), from_bound.end(), to_bound.begin() + static_cast<std::ptrdiff_t>(at));
  }

  std::size_t dim_, dim_v_;
  OtherRows& others_;
  Sink& sink_;
};

/// A row of kind nan.
void emit_nan_row(const ProblemView& problem, const RowId& id, Sink& sink) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<Number> nans = make_numbers(std::max(problem.head_dim, problem.head_dim_v), kDefaultBits);
  const std::vector<double> bounds(nans.size(), kNan);
  const std::size_t dim = problem.backward() ? problem.head_dim : 0;
  const std::span values(nans);
  const std::span no_claims(bounds);
  sink.query_row({id, values.first(problem.head_dim_v), no_claims.first(problem.head_dim_v), nans.data(),
                  kNan, values.first(dim), no_claims.first(dim)});
}

/// One KV head of one sequence with its query heads: all query tiles, then all key tiles.
class WholeHead {
 public:
  WholeHead(const ProblemView& problem, const Constants& constants, std::size_t sequence, std::size_t head_kv,
            Workspaces& workspaces, PairCounter& counter, Sink& sink)
      : problem_(problem),
        constants_(constants),
        sequence_(problem.sequences[sequence]),
        sequence_index_(sequence),
        head_kv_(head_kv),
        inputs_(problem, sequence, head_kv),
        workspaces_(workspaces),
        counter_(counter),
        sink_(sink) {}

  void run() {
    if (obstacle(problem_, inputs_) != nullptr) {
      run_plain(sink_, nullptr);
      return;
    }
    if (!inputs_.finite()) sort_rows();
    const FastHead head(problem_, constants_, inputs_, sequence_index_, head_kv_);
    std::vector<std::unique_ptr<QueryOperands>> queries;
    for (std::size_t g = 0; g < problem_.group(); ++g) {
      std::vector<RowState> states(sequence_.q_length);
      query_side(head, g, states);
      if (!problem_.backward()) continue;
      queries.push_back(
          std::make_unique<QueryOperands>(inputs_.q(g).words, inputs_.dout(g).words, std::move(states)));
    }
    if (problem_.backward()) key_side(head, queries);
  }

 private:
  void run_plain(Sink& sink, const std::vector<bool>* chosen) {
    const double passes = problem_.backward() ? 2 : 1;
    plain_attention_head(
        problem_, sequence_index_, head_kv_, plain_bits(problem_, inputs_),
        [&](double pairs) { counter_(passes * pairs); }, sink, chosen);
  }

  /// Rows that see an infinity or a NaN: those that it makes NaN throughout are handed out here, the rest go
  /// the plain way.
  void sort_rows() {
    std::vector<bool> touched(problem_.group() * sequence_.q_length, false);
    bool any_touched = false;
    kinds_.assign(touched.size(), RowKind::finite);
    tbb::parallel_for(std::size_t{0}, kinds_.size(), [&](std::size_t i) {
      kinds_[i] = inputs_.kind(i / sequence_.q_length, i % sequence_.q_length);
    });
    for (std::size_t i = 0; i < kinds_.size(); ++i) {
      const std::size_t row = i % sequence_.q_length;
      if (kinds_[i] == RowKind::touched) touched[i] = any_touched = true;
      if (kinds_[i] != RowKind::nan) continue;
      emit_nan_row(problem_, {sequence_index_, head_kv_ * problem_.group() + i / sequence_.q_length, row},
                   sink_);
      const KeyRange keys = visible_keys(problem_, sequence_, row);
      others_.nan.resize(sequence_.k_length, 0);
      std::fill(others_.nan.begin() + static_cast<std::ptrdiff_t>(keys.first),
                others_.nan.begin() + static_cast<std::ptrdiff_t>(keys.last), std::uint8_t{1});
    }
    if (!any_touched) return;
    KeepKeys keep(problem_, sequence_.k_length, plain_bits(problem_, inputs_), others_, sink_);
    run_plain(keep, &touched);
  }

  void query_side(const FastHead& head, std::size_t g, std::vector<RowState>& states) {
    const std::size_t tiles = (sequence_.q_length + kBlockRows - 1) / kBlockRows;
    tbb::parallel_for(std::size_t{0}, tiles, [&](std::size_t tile) {
      const std::size_t end = std::min((tile + 1) * kBlockRows, sequence_.q_length);
      std::array<std::size_t, kBlockRows> rows{};
      std::size_t count = 0;
      for (std::size_t i = tile * kBlockRows; i < end; ++i) {
        if (kinds_.empty() || kinds_[g * sequence_.q_length + i] == RowKind::finite) rows[count++] = i;
      }
      if (count == 0) return;
      head.query_tile(g, {rows.data(), count}, workspaces_.local(), states.data(), sink_);
      double pairs = 0;
      for (std::size_t r = 0; r < count; ++r) pairs += static_cast<double>(states[rows[r]].keys.size());
      counter_(pairs);
    });
  }

  void key_side(const FastHead& head, const std::vector<std::unique_ptr<QueryOperands>>& queries) {
    double pairs = 0;
    for (const auto& operands : queries) {
      for (const RowState& state : operands->states) pairs += static_cast<double>(state.keys.size());
    }
    const std::size_t tiles = (sequence_.k_length + kBlockRows - 1) / kBlockRows;
    tbb::parallel_for(std::size_t{0}, tiles, [&](std::size_t tile) {
      const std::size_t first = tile * kBlockRows;
      head.key_tile(first, std::min(kBlockRows, sequence_.k_length - first), queries, others_,
                    workspaces_.local(), sink_);
      counter_(pairs / static_cast<double>(tiles));
    });
  }

  const ProblemView& problem_;
  const Constants& constants_;
  const Sequence& sequence_;
  std::size_t sequence_index_, head_kv_;
  HeadInputs inputs_;
  Workspaces& workspaces_;
  PairCounter& counter_;
  Sink& sink_;
  std::vector<RowKind> kinds_;  ///< [query head of the group][row]; empty: all finite
  OtherRows others_;
};

}  // namespace

const char* fast_obstacle(const ProblemView& problem, std::size_t sequence, std::size_t head_kv) {
  return obstacle(problem, HeadInputs(problem, sequence, head_kv));
}

void fast_attention(const ProblemView& problem, const Progress& progress, Sink& sink) {
  check(problem);
  const Constants constants(problem);
  const double passes = problem.backward() ? 2 : 1;
  PairCounter counter(visible_pairs(problem) * passes, progress);
  Workspaces workspaces;
  const std::size_t heads = problem.sequences.size() * problem.heads_kv;
  // Heads are worked on side by side as long as they are small, so that neither memory nor idle threads grow.
  constexpr std::size_t kTokensAtOnce = 8192;
  for (std::size_t begin = 0; begin < heads;) {
    std::size_t end = begin;
    for (std::size_t tokens = 0; end < heads && (end == begin || tokens < kTokensAtOnce); ++end) {
      const Sequence& sequence = problem.sequences[end / problem.heads_kv];
      tokens += sequence.q_length * problem.group() + sequence.k_length;
    }
    tbb::parallel_for(begin, end, [&](std::size_t i) {
      tbb::this_task_arena::isolate([&] {
        WholeHead(problem, constants, i / problem.heads_kv, i % problem.heads_kv, workspaces, counter, sink)
            .run();
      });
    });
    begin = end;
  }
}

void fast_attention_rows(const ProblemView& problem, std::span<const RowId> rows, const Progress& progress,
                         Sink& sink) {
  check(problem);
  const Constants constants(problem);
  std::vector<RowId> order(rows.begin(), rows.end());
  const auto kv_of = [&](const RowId& id) { return std::pair(id.sequence, id.head / problem.group()); };
  std::stable_sort(order.begin(), order.end(), [&](const RowId& a, const RowId& b) {
    return std::pair(kv_of(a), a.head) < std::pair(kv_of(b), b.head);
  });
  PairCounter counter(static_cast<double>(order.size()), progress);
  Workspaces workspaces;
  for (std::size_t begin = 0; begin < order.size();) {
    std::size_t end = begin;
    while (end < order.size() && kv_of(order[end]) == kv_of(order[begin])) ++end;
    const auto [b, kv] = kv_of(order[begin]);
    const std::span<const RowId> mine(order.data() + begin, end - begin);
    begin = end;
    const HeadInputs inputs(problem, b, kv);
    // Rows by kind, as in the whole head.
    std::vector<RowId> fast;
    std::vector<RowId> plain;
    for (const RowId& id : mine) {
      const RowKind kind = obstacle(problem, inputs) != nullptr
                               ? RowKind::touched
                               : inputs.kind(id.head % problem.group(), id.row);
      if (kind == RowKind::nan) {
        emit_nan_row(problem, id, sink);
      } else {
        (kind == RowKind::finite ? fast : plain).push_back(id);
      }
    }
    if (!plain.empty()) plain_attention_rows(problem, plain, plain_bits(problem, inputs), {}, sink);
    counter(static_cast<double>(mine.size() - fast.size()));
    if (fast.empty()) continue;
    const FastHead head(problem, constants, inputs, b, kv);
    // Tiles of rows of one query head.
    std::vector<std::span<const RowId>> tiles;
    for (std::size_t i = 0; i < fast.size();) {
      std::size_t count = 0;
      while (count < kBlockRows && i + count < fast.size() && fast[i + count].head == fast[i].head) ++count;
      tiles.push_back(std::span<const RowId>(fast).subspan(i, count));
      i += count;
    }
    tbb::parallel_for(std::size_t{0}, tiles.size(), [&](std::size_t t) {
      std::array<std::size_t, kBlockRows> indices{};
      for (std::size_t r = 0; r < tiles[t].size(); ++r) indices[r] = tiles[t][r].row;
      head.query_tile(tiles[t].front().head % problem.group(), {indices.data(), tiles[t].size()},
                      workspaces.local(), nullptr, sink);
      counter(static_cast<double>(tiles[t].size()));
    });
  }
}

}  // namespace bitattn::reference
