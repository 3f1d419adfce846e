#include "audit/unit.hpp"

#include <algorithm>
#include <limits>

#include "backends/attention_inputs.hpp"
#include "emu/kernels/flash3_backward.hpp"
#include "emu/profile/flash3.hpp"

namespace bitattn::audit {

namespace {

profile::Call call_of(const Problem& problem) {
  ProblemViews views;
  view_problem(problem, false, views);
  return views.inputs.call;
}

/// Tokens [begin, begin + count) and heads [first, first + heads) of a [.., tokens, all heads, columns]
/// tensor.
Bf16Tensor tokens_of(const Bf16Tensor& tensor, std::size_t begin, std::size_t count, std::size_t first,
                     std::size_t heads) {
  if (tensor.empty()) return {};
  const std::size_t columns = tensor.shape.back();
  const std::size_t all_heads = tensor.shape[tensor.shape.size() - 2];
  Bf16Tensor out({1, count, heads, columns});
  for (std::size_t t = 0; t < count; ++t) {
    const auto from =
        tensor.data.begin() + static_cast<std::ptrdiff_t>(((begin + t) * all_heads + first) * columns);
    std::copy(from, from + static_cast<std::ptrdiff_t>(heads * columns),
              out.data.begin() + static_cast<std::ptrdiff_t>(t * heads * columns));
  }
  return out;
}

struct PaddedRows {
  Axes axes;
  std::size_t first_row, rows, padded;  ///< rows that are tokens, and padded up
  float padding;                        ///< what the kernel leaves in rows past the sequence
};

Fp32Tensor padded_of(const Problem& whole, const UnitRange& range, const Fp32Tensor& tensor,
                     const TileSizes& tiles, const PaddedRows& what, std::size_t first_head,
                     std::size_t heads) {
  if (tensor.empty()) return {};
  const bool with_columns = what.axes != Axes::padded_query_rows && what.axes != Axes::query_rows;
  const std::size_t columns = with_columns ? tensor.shape.back() : 1;
  std::vector<std::size_t> shape{1, heads, what.padded};
  if (with_columns) shape.push_back(columns);
  Fp32Tensor out(shape, what.padding);
  for (std::size_t h = 0; h < heads; ++h) {
    for (std::size_t r = 0; r < what.rows; ++r) {
      const std::size_t from = index_of(whole, tensor.shape, what.axes, tiles, range.sequence, first_head + h,
                                        what.first_row + r, 0);
      if (from + columns > tensor.size()) return {};
      std::copy_n(tensor.data.begin() + static_cast<std::ptrdiff_t>(from), columns,
                  out.data.begin() + static_cast<std::ptrdiff_t>((h * what.padded + r) * columns));
    }
  }
  return out;
}

}  // namespace

UnitRange whole_unit(const Problem& problem, std::size_t sequence, std::size_t first_kv,
                     std::size_t count_kv) {
  const SequenceSpan span = problem.sequence(sequence);
  return {sequence, first_kv, count_kv, 0, span.q_length, 0, span.k_length};
}

profile::Profile pinned(const profile::Profile& profile, const Problem& whole) {
  const profile::Call call = call_of(whole);
  profile::Profile p = profile;
  p.forward.block_n = profile::flash3_forward_tiles(call, profile).block_n;
  p.backward.block_n = profile::flash3_backward_tiles(call, profile).block_n;
  return p;
}

Unit make_unit(const Capture& capture, const UnitRange& range, bool keep_rows, bool keep_keys) {
  const Problem& whole = capture.problem;
  const SequenceSpan span = whole.sequence(range.sequence);
  const std::size_t group = whole.group();
  const std::size_t first_q = range.first_kv * group;
  const std::size_t heads_q = range.count_kv * group;
  const std::size_t q_rows = range.q_end - range.q_begin;
  const std::size_t k_rows = range.k_end - range.k_begin;
  Unit unit;
  unit.range = range;
  unit.rows = keep_rows;
  unit.keys = keep_keys;
  unit.capture.name = capture.name;
  Problem& p = unit.capture.problem;
  p.batch = 1;
  p.seqlen_q = q_rows;
  p.seqlen_k = k_rows;
  p.heads_q = heads_q;
  p.heads_kv = range.count_kv;
  p.head_dim = whole.head_dim;
  p.head_dim_v = whole.head_dim_v;
  p.softmax_scale = whole.softmax_scale;
  p.causal = whole.causal;
  p.window_left = whole.window_left;
  p.window_right = whole.window_right;
  p.softcap = whole.softcap;
  p.deterministic = whole.deterministic;
  // fa3 aligns to the bottom right; where it runs a top-left problem, the two are the same for the whole, and
  // a cut keeps the whole's bottom right.
  p.causal_alignment = CausalAlignment::bottom_right;
  const std::size_t q_token = span.q_begin + range.q_begin;
  const std::size_t k_token = span.k_begin + range.k_begin;
  const auto of_queries = [&](const Bf16Tensor& t) {
    return tokens_of(t, q_token, q_rows, first_q, heads_q);
  };
  const auto of_keys = [&](const Bf16Tensor& t) {
    return tokens_of(t, k_token, k_rows, range.first_kv, range.count_kv);
  };
  p.q = of_queries(whole.q);
  p.k = of_keys(whole.k);
  p.v = of_keys(whole.v);
  p.dout = of_queries(whole.dout);

  const Result& from = capture.recorded;
  Result& to = unit.capture.recorded;
  to.backend = "recorded";
  // What the part's kernels start from is kept in any case; it is compared only where they give it.
  to.out = of_queries(from.out);
  const TileSizes tiles = tile_sizes(whole);
  to.lse = padded_of(whole, range, from.lse, tiles, {Axes::query_rows, range.q_begin, q_rows, q_rows, 0},
                     first_q, heads_q);
  const profile::BackwardTiles own = profile::flash3_backward_tiles(call_of(p), pinned({}, whole));
  const auto round_up = [](std::size_t n, int block) {
    return (n + static_cast<std::size_t>(block) - 1) / static_cast<std::size_t>(block) *
           static_cast<std::size_t>(block);
  };
  const std::size_t q_padded = round_up(q_rows, own.block_m);
  const std::size_t k_padded = round_up(k_rows, own.block_n);
  const PaddedRows rows{Axes::padded_query_rows, range.q_begin, q_rows, q_padded, 0};
  const Intermediates& kept = from.intermediates;
  to.intermediates.dpsum = padded_of(whole, range, kept.dpsum, tiles, rows, first_q, heads_q);
  PaddedRows of_lse = rows;
  of_lse.padding = std::numeric_limits<float>::infinity();
  to.intermediates.lse_log2 = padded_of(whole, range, kept.lse_log2, tiles, of_lse, first_q, heads_q);
  if (keep_rows) {
    to.dq = of_queries(from.dq);
    PaddedRows of_dq = rows;
    of_dq.axes = Axes::padded_query_columns;
    to.intermediates.dq_accum = padded_of(whole, range, kept.dq_accum, tiles, of_dq, first_q, heads_q);
  }
  if (keep_keys) {
    to.dk = of_keys(from.dk);
    to.dv = of_keys(from.dv);
    const PaddedRows of_k{Axes::padded_key_columns, range.k_begin, k_rows, k_padded, 0};
    to.intermediates.dk_accum =
        padded_of(whole, range, kept.dk_accum, tiles, of_k, range.first_kv, range.count_kv);
    to.intermediates.dv_accum =
        padded_of(whole, range, kept.dv_accum, tiles, of_k, range.first_kv, range.count_kv);
  }
  return unit;
}

void shift_places(const UnitRange& range, const Problem& whole, Comparison& comparison) {
  const auto shift = [&](std::optional<ElementPair>& pair) {
    if (!pair) return;
    Place& place = pair->place;
    const TileSizes tiles = tile_sizes(whole);
    place.sequence = range.sequence;
    place.head += range.first_kv * (place.of_keys ? 1 : whole.group());
    place.row += place.of_keys ? range.k_begin : range.q_begin;
    const int block = place.of_keys         ? tiles.backward_n
                      : place.backward_tile ? tiles.backward_m
                                            : tiles.forward_m;
    if (block > 0) place.tile = static_cast<int>(place.row / static_cast<std::size_t>(block));
  };
  for (TensorComparison& t : comparison.tensors) {
    shift(t.first);
    shift(t.worst);
  }
}

}  // namespace bitattn::audit
