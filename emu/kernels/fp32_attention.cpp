#include "emu/kernels/fp32_attention.hpp"

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32.hpp"

namespace bitattn::kernels {

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int kRowBlock = 192;  // queries whose part of dK and dV is summed on its own
constexpr int kKeyBlock = 64;

std::size_t index(std::ptrdiff_t i) {
  return static_cast<std::size_t>(i);
}

/// A tensor's rows of one head, widened to fp32 once.
std::vector<float> widen(const std::uint16_t* tensor, int token, int tokens, int heads, int head,
                         int columns) {
  std::vector<float> out(index(tokens) * index(columns));
  for (int t = 0; t < tokens; ++t) {
    const std::uint16_t* row = tensor + (static_cast<std::ptrdiff_t>(token + t) * heads + head) * columns;
    for (int d = 0; d < columns; ++d)
      out[index(t) * index(columns) + index(d)] = arith::fp32_from_bf16(row[d]);
  }
  return out;
}

/// The same tensor as [column][token], so that one query meets many keys at once while each sum runs over the
/// columns in order.
std::vector<float> transposed(const std::vector<float>& rows, int columns) {
  const std::size_t tokens = rows.size() / index(columns);
  std::vector<float> out(rows.size());
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t d = 0; d < index(columns); ++d) out[d * tokens + t] = rows[t * index(columns) + d];
  }
  return out;
}

/// out[j] = dot product of `row` with token j, for j in [first, last); columns in ascending order.
void dots(const float* row, const std::vector<float>& by_column, int tokens, int columns, int first, int last,
          float* out) {
  for (int begin = first; begin < last; begin += kKeyBlock) {
    const int end = std::min(last, begin + kKeyBlock);
    std::fill(out + begin, out + end, 0.0F);
    for (int d = 0; d < columns; ++d) {
      const float* column = by_column.data() + static_cast<std::ptrdiff_t>(d) * tokens;
      const float factor = row[d];
      for (int j = begin; j < end; ++j) out[j] += factor * column[j];
    }
  }
}

float dot(const float* a, const float* b, int n) {
  float sum = 0;
  for (int d = 0; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

void add_scaled(float* sum, const float* row, float factor, int n) {
  for (int d = 0; d < n; ++d) sum[d] += factor * row[d];
}

/// exp in fp32: the fp64 exponential rounded once.
float exp_fp32(float x) {
  return static_cast<float>(std::exp(static_cast<double>(x)));
}

class Fp32Schedule {
 public:
  Fp32Schedule(const AttentionInputs& in, const VisibleKeys& visible, const ForwardOutputs& forward,
               const BackwardOutputs& backward, const Execution& execution)
      : in_(in),
        visible_(visible),
        forward_(forward),
        backward_(backward),
        execution_(execution),
        scale_(static_cast<float>(in.call.softmax_scale)),
        cap_(static_cast<float>(in.call.softcap)) {}

  void run() {
    const int units = static_cast<int>(in_.sequences.size()) * in_.call.heads_kv;
    tbb::parallel_for(0, units, [this](int unit) {
      tbb::this_task_arena::isolate([&] { run_kv_head(unit / in_.call.heads_kv, unit % in_.call.heads_kv); });
    });
  }

 private:
  /// What the rows of a block share between their own pass and the pass over keys.
  struct RowBlock {
    int first = 0, rows = 0;
    std::vector<float> p, ds;  ///< [row][key]
    std::vector<std::pair<int, int>> keys;
  };

  /// One KV head's keys and values, by token and by column.
  struct KeySide {
    std::vector<float> k, v, k_by_column, v_by_column;
  };

  void run_kv_head(int sequence_index, int kv_head) {
    const profile::Call& call = in_.call;
    const Sequence& sequence = in_.sequences[index(sequence_index)];
    const int sk = sequence.k_length;
    KeySide keys;
    keys.k = widen(in_.k, sequence.k_begin, sk, call.heads_kv, kv_head, call.head_dim);
    keys.v = widen(in_.v, sequence.k_begin, sk, call.heads_kv, kv_head, call.head_dim_v);
    keys.k_by_column = transposed(keys.k, call.head_dim);
    keys.v_by_column = transposed(keys.v, call.head_dim_v);
    std::vector<float> dk(keys.k.size(), 0.0F);
    std::vector<float> dv(keys.v.size(), 0.0F);
    const bool with_backward = in_.dout != nullptr;
    RowBlock block;
    block.p.resize(index(kRowBlock) * index(sk));
    block.ds.resize(block.p.size());
    block.keys.resize(kRowBlock);
    for (int g = 0; g < in_.group(); ++g) {
      const int head = kv_head * in_.group() + g;
      const int sq = sequence.q_length;
      const std::vector<float> q = widen(in_.q, sequence.q_begin, sq, call.heads_q, head, call.head_dim);
      const std::vector<float> dout =
          with_backward ? widen(in_.dout, sequence.q_begin, sq, call.heads_q, head, call.head_dim_v)
                        : std::vector<float>();
      for (block.first = 0; block.first < sq; block.first += kRowBlock) {
        block.rows = std::min(kRowBlock, sq - block.first);
        tbb::parallel_for(0, block.rows,
                          [&](int r) { run_row(sequence_index, head, block, r, q, keys, dout); });
        if (with_backward) {
          tbb::parallel_for(0, (sk + kKeyBlock - 1) / kKeyBlock, [&](int n) {
            add_key_gradients(block, n * kKeyBlock, std::min(sk, (n + 1) * kKeyBlock), q, dout, dk, dv, sk);
          });
        }
        if (execution_.advance) execution_.advance(static_cast<std::int64_t>(block.rows) * sk);
      }
    }
    if (!with_backward) return;
    for (float& x : dk) x *= scale_;
    store(dk, backward_.dk, backward_.dk_uncast, sequence.k_begin, sk, call.heads_kv, kv_head, call.head_dim);
    store(dv, backward_.dv, backward_.dv_uncast, sequence.k_begin, sk, call.heads_kv, kv_head,
          call.head_dim_v);
  }

  /// One query row: scores, softmax, O and LSE; then P, dS and dQ.
  void run_row(int sequence_index, int head, RowBlock& block, int r, const std::vector<float>& q,
               const KeySide& keys, const std::vector<float>& dout) const {
    const profile::Call& call = in_.call;
    const Sequence& sequence = in_.sequences[index(sequence_index)];
    const int dim = call.head_dim;
    const int dim_v = call.head_dim_v;
    const int sk = sequence.k_length;
    const int query = block.first + r;
    const auto [first, last] = visible_(query, sequence.q_length, sk);
    block.keys[index(r)] = {first, std::max(first, last)};
    float* p = block.p.data() + static_cast<std::ptrdiff_t>(r) * sk;
    float* ds = block.ds.data() + static_cast<std::ptrdiff_t>(r) * sk;

    std::vector<float> capped;  // tanh of the softcap, for its derivative
    if (cap_ != 0) capped.assign(index(sk), 0.0F);
    dots(q.data() + static_cast<std::ptrdiff_t>(query) * dim, keys.k_by_column, sk, dim, first, last, p);
    float m = kMinusInfinity;
    for (int j = first; j < last; ++j) {
      if (cap_ != 0) {
        capped[index(j)] = static_cast<float>(std::tanh(static_cast<double>(p[j] * (scale_ / cap_))));
        p[j] = capped[index(j)];
      }
      m = std::fmax(m, p[j]);
    }
    const float factor = cap_ != 0 ? cap_ : scale_;
    float total = 0;
    for (int j = first; j < last; ++j) {
      p[j] = exp_fp32((p[j] - m) * factor);
      total += p[j];
    }
    std::vector<float> o(index(dim_v), 0.0F);
    for (int j = last - 1; j >= first; --j) {
      p[j] = p[j] / total;
      add_scaled(o.data(), keys.v.data() + static_cast<std::ptrdiff_t>(j) * dim_v, p[j], dim_v);
    }
    const std::ptrdiff_t row =
        forward_.rows[index(sequence_index) * index(call.heads_q) + index(head)] + query;
    forward_.lse[row] =
        first < last ? m * factor + static_cast<float>(std::log(static_cast<double>(total))) : kMinusInfinity;
    store(o, forward_.out, forward_.out_uncast, sequence.q_begin + query, 1, call.heads_q, head, dim_v);
    if (in_.dout == nullptr) return;

    const float* g = dout.data() + static_cast<std::ptrdiff_t>(query) * dim_v;
    const float d = dot(g, o.data(), dim_v);
    std::vector<float> dq(index(dim), 0.0F);
    dots(g, keys.v_by_column, sk, dim_v, first, last, ds);
    for (int j = first; j < last; ++j) {
      ds[j] = p[j] * (ds[j] - d);
      if (cap_ != 0) ds[j] *= 1.0F - capped[index(j)] * capped[index(j)];
      add_scaled(dq.data(), keys.k.data() + static_cast<std::ptrdiff_t>(j) * dim, ds[j], dim);
    }
    for (float& x : dq) x *= scale_;
    store(dq, backward_.dq, backward_.dq_uncast, sequence.q_begin + query, 1, call.heads_q, head, dim);
  }

  /// dK and dV of some keys gain what the block's queries give them, summed over the block first.
  void add_key_gradients(const RowBlock& block, int key_begin, int key_end, const std::vector<float>& q,
                         const std::vector<float>& dout, std::vector<float>& dk, std::vector<float>& dv,
                         int sk) const {
    const int dim = in_.call.head_dim;
    const int dim_v = in_.call.head_dim_v;
    std::vector<float> part_k(index(dim));
    std::vector<float> part_v(index(dim_v));
    for (int j = key_begin; j < key_end; ++j) {
      std::fill(part_k.begin(), part_k.end(), 0.0F);
      std::fill(part_v.begin(), part_v.end(), 0.0F);
      for (int r = 0; r < block.rows; ++r) {
        const auto [first, last] = block.keys[index(r)];
        if (j < first || j >= last) continue;
        const std::ptrdiff_t query = block.first + r;
        const std::size_t pair = index(r) * index(sk) + index(j);
        add_scaled(part_v.data(), dout.data() + query * dim_v, block.p[pair], dim_v);
        add_scaled(part_k.data(), q.data() + query * dim, block.ds[pair], dim);
      }
      for (int d = 0; d < dim; ++d) dk[index(j) * index(dim) + index(d)] += part_k[index(d)];
      for (int d = 0; d < dim_v; ++d) dv[index(j) * index(dim_v) + index(d)] += part_v[index(d)];
    }
  }

  static void store(const std::vector<float>& values, std::uint16_t* words, float* fp32, int token,
                    int tokens, int heads, int head, int columns) {
    for (int t = 0; t < tokens; ++t) {
      const std::ptrdiff_t to = (static_cast<std::ptrdiff_t>(token + t) * heads + head) * columns;
      for (int d = 0; d < columns; ++d) {
        const float x = values[index(t) * index(columns) + index(d)];
        words[to + d] = arith::bf16_from_fp32(x);
        if (fp32 != nullptr) fp32[to + d] = arith::canonical(x);
      }
    }
  }

  const AttentionInputs& in_;
  const VisibleKeys& visible_;
  const ForwardOutputs& forward_;
  const BackwardOutputs& backward_;
  const Execution& execution_;
  float scale_;
  float cap_;
};

}  // namespace

void fp32_attention(const AttentionInputs& inputs, const VisibleKeys& visible, const ForwardOutputs& forward,
                    const BackwardOutputs& backward, const Execution& execution) {
  Fp32Schedule(inputs, visible, forward, backward, execution).run();
}

}  // namespace bitattn::kernels
