#include "reference/plain_attention.hpp"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "reference/bound_arithmetic.hpp"
#include "reference/pair_counter.hpp"

namespace bitattn::reference {
namespace {

constexpr mpfr_rnd_t kNearest = MPFR_RNDN;

/// The larger, and NaN if either is NaN.
double max_or_nan(double a, double b) {
  return b <= a ? a : b;
}

/// |x| rounded away from zero.
double magnitude(mpfr_srcptr x) {
  return std::abs(mpfr_get_d(x, MPFR_RNDA));
}

/// The last step of every bound: rounding of the doubles it was summed in, and their underflow.
double finished(double bound) {
  return bound * kSlack + 0x1p-1000;
}

/// A BF16 matrix of `rows` x `width`: as numbers of 8 bits (exact, and the fastest factor in products of two
/// inputs), of the working precision (the fastest factor in products with computed numbers), and as
/// magnitudes.
struct Operand {
  std::size_t width = 0;
  std::vector<Number> exact, wide;
  std::vector<double> magnitudes;

  Operand(std::size_t rows, std::size_t columns, mpfr_prec_t bits)
      : width(columns),
        exact(make_numbers(rows * columns, 8)),
        wide(make_numbers(rows * columns, bits)),
        magnitudes(rows * columns) {}

  void set_row(std::size_t row, const std::uint16_t* words) {
    for (std::size_t d = 0; d < width; ++d) {
      const std::size_t at = row * width + d;
      set_bf16(raw(exact[at]), words[d]);
      set_bf16(raw(wide[at]), words[d]);
      magnitudes[at] = std::abs(fp64_from_bf16(words[d]));
    }
  }
  double largest() const {
    double m = 0;
    for (const double x : magnitudes) {
      if (std::isfinite(x)) m = std::max(m, x);
    }
    return m;
  }
};

/// sum := <a, b>, a chain of fused multiply-adds from +0. Returns sum |a||b|.
double inner_product(mpfr_ptr sum, const Operand& a, std::size_t a_row, const Operand& b, std::size_t b_row) {
  const std::size_t a0 = a_row * a.width;
  const std::size_t b0 = b_row * b.width;
  double magnitudes = 0;
  mpfr_set_zero(sum, 1);
  for (std::size_t d = 0; d < a.width; ++d) {
    mpfr_fma(sum, raw(a.exact[a0 + d]), raw(b.exact[b0 + d]), sum, kNearest);
    magnitudes += a.magnitudes[a0 + d] * b.magnitudes[b0 + d];
  }
  return magnitudes * kSlack;
}

/// sums[d] := sums[d] + factor * row[d], and the same for the bounds with their weight.
void accumulate(Number* sums, double* bounds, mpfr_srcptr factor, double weight, const Operand& b,
                std::size_t row) {
  const Number* numbers = &b.wide[row * b.width];
  const double* magnitudes = &b.magnitudes[row * b.width];
  for (std::size_t d = 0; d < b.width; ++d) {
    mpfr_fma(raw(sums[d]), factor, raw(numbers[d]), raw(sums[d]), kNearest);
    bounds[d] += weight * magnitudes[d];
  }
}

/// Scratch for one row of queries: its P and dS over the visible keys, with what one unit of a factor's
/// magnitude adds to the error bound of the sums that they enter.
struct RowBuffers {
  KeyRange keys;
  std::vector<Number> p, ds;
  std::vector<double> p_weight, ds_weight;

  /// Room for `count` keys.
  void reserve(std::size_t count, mpfr_prec_t bits, bool backward) {
    if (p.size() >= count) return;
    p = make_numbers(count, bits);
    p_weight.assign(count, 0);
    if (!backward) return;
    ds = make_numbers(count, bits);
    ds_weight.assign(count, 0);
  }
};

/// One KV head of one sequence.
class PlainHead {
 public:
  PlainHead(const ProblemView& problem, std::size_t sequence, std::size_t head_kv, int bits)
      : problem_(problem),
        sequence_(problem.sequences[sequence]),
        sequence_index_(sequence),
        head_kv_(head_kv),
        bits_(bits),
        u_(unit_roundoff(bits)),
        k_(sequence_.k_length, problem.head_dim, bits),
        v_(sequence_.k_length, problem.head_dim_v, bits) {
    for (std::size_t j = 0; j < sequence_.k_length; ++j) {
      k_.set_row(j, problem.k.row(sequence_.k_begin + j, head_kv));
      v_.set_row(j, problem.v.row(sequence_.k_begin + j, head_kv));
    }
    largest_v_ = v_.largest();
  }

  /// Query rows [row, row + count) of a head, as operands.
  struct Queries {
    Operand q, dout;
  };
  Queries load_queries(std::size_t head, std::size_t first, std::size_t count) const {
    Queries rows{Operand(count, problem_.head_dim, bits_),
                 Operand(problem_.backward() ? count : 0, problem_.head_dim_v, bits_)};
    for (std::size_t r = 0; r < count; ++r) {
      rows.q.set_row(r, problem_.q.row(sequence_.q_begin + first + r, head));
      if (problem_.backward()) rows.dout.set_row(r, problem_.dout.row(sequence_.q_begin + first + r, head));
    }
    return rows;
  }

  /// Everything of one row of queries; P and dS stay in `buffers`.
  void query_row(std::size_t head, std::size_t row, const Queries& queries, std::size_t r,
                 RowBuffers& buffers, Sink& sink) const;

  /// dK and dV of the whole KV head.
  void all(const std::function<void(double)>& pairs_done, Sink& sink, const std::vector<bool>* chosen) const;

 private:
  double score(mpfr_ptr z, mpfr_ptr scaled, const Queries& queries, std::size_t r, std::size_t key) const;

  const ProblemView& problem_;
  const Sequence& sequence_;
  std::size_t sequence_index_, head_kv_;
  mpfr_prec_t bits_;
  double u_;
  Operand k_, v_;
  double largest_v_ = 0;
};

/// z := the score after softcap, scaled := before it. Returns |scale| * sum |q||k|.
double PlainHead::score(mpfr_ptr z, mpfr_ptr scaled, const Queries& queries, std::size_t r,
                        std::size_t key) const {
  const double magnitudes = inner_product(scaled, queries.q, r, k_, key);
  mpfr_mul_d(scaled, scaled, problem_.softmax_scale, kNearest);
  if (problem_.softcap > 0) {
    mpfr_div_d(z, scaled, problem_.softcap, kNearest);
    mpfr_tanh(z, z, kNearest);
    mpfr_mul_d(z, z, problem_.softcap, kNearest);
  } else {
    mpfr_set(z, scaled, kNearest);
  }
  return magnitudes * std::abs(problem_.softmax_scale);
}

void PlainHead::query_row(std::size_t head, std::size_t row, const Queries& queries, std::size_t r,
                          RowBuffers& buffers, Sink& sink) const {
  const bool backward = problem_.backward();
  const bool softcap = problem_.softcap > 0;
  const std::size_t n = buffers.keys.size();
  const std::size_t first = buffers.keys.first;
  const auto count = static_cast<double>(n);

  std::vector<Number> out = make_numbers(problem_.head_dim_v, bits_);
  std::vector<Number> dq = make_numbers(backward ? problem_.head_dim : 0, bits_);
  std::vector<double> out_bound(out.size(), 0.0);
  std::vector<double> dq_bound(dq.size(), 0.0);
  Number lse = make_number(bits_);
  double lse_bound = 0;
  set_zero(out);
  set_zero(dq);
  if (n == 0) {
    mpfr_set_inf(raw(lse), -1);
    sink.query_row({{sequence_index_, head, row}, out, out_bound, &lse, 0, dq, dq_bound});
    return;
  }

  // Scores, and their largest.
  std::vector<Number> h = make_numbers(backward && softcap ? n : 0, bits_);
  Number scaled = make_number(bits_);
  Number largest = make_number(bits_);
  double score_magnitude = 0;
  for (std::size_t j = 0; j < n; ++j) {
    Number& z = buffers.p[j];
    score_magnitude = max_or_nan(score_magnitude, score(raw(z), raw(scaled), queries, r, first + j));
    if (!h.empty()) {
      mpfr_div_d(raw(h[j]), raw(scaled), problem_.softcap, kNearest);
      mpfr_sech(raw(h[j]), raw(h[j]), kNearest);
      mpfr_sqr(raw(h[j]), raw(h[j]), kNearest);
    }
    if (j == 0) {
      mpfr_set(raw(largest), raw(z), kNearest);
    } else {
      mpfr_max(raw(largest), raw(largest), raw(z), kNearest);
    }
  }

  // Softmax. buffers.p: scores, then numerators, then P.
  Number sum = make_number(bits_);
  mpfr_set_zero(raw(sum), 1);
  double farthest = 0;
  for (std::size_t j = 0; j < n; ++j) {
    mpfr_ptr w = raw(buffers.p[j]);
    mpfr_sub(w, w, raw(largest), kNearest);
    farthest = max_or_nan(farthest, magnitude(w));
    mpfr_exp(w, w, kNearest);
    mpfr_add(raw(sum), raw(sum), w, kNearest);
  }
  Number log_sum = make_number(bits_);
  mpfr_log(raw(log_sum), raw(sum), kNearest);
  mpfr_add(raw(lse), raw(largest), raw(log_sum), kNearest);
  for (std::size_t j = 0; j < n; ++j) mpfr_div(raw(buffers.p[j]), raw(buffers.p[j]), raw(sum), kNearest);

  // How far P can be off (docs/reference.md, "Plain").
  const double score_error = gamma_factor(static_cast<double>(problem_.head_dim) + 4, u_) * score_magnitude;
  const double w_relative = (std::expm1((score_error + u_ * farthest) * kSlack) * (1 + u_) + u_) * kSlack;
  const double sum_relative = (w_relative + gamma_factor(count, u_) * (1 + w_relative)) * kSlack;
  const double p_relative =
      sum_relative < 1 ? (w_relative + u_ + w_relative * u_ + sum_relative) / (1 - sum_relative) * kSlack
                       : std::numeric_limits<double>::infinity();
  const double p_error = reciprocal_factor(p_relative);  // |P' - P| <= p_error * P', P' the computed one
  lse_bound =
      sum_relative < 1
          ? finished(-std::log1p(-sum_relative) + u_ * (magnitude(raw(log_sum)) + magnitude(raw(lse))))
          : std::numeric_limits<double>::infinity();

  // O.
  const double tiny = 0x1p-800 * (1 + largest_v_);
  const double out_factor = p_error + gamma_factor(count, u_);
  for (std::size_t j = 0; j < n; ++j) {
    const double weight = out_factor * magnitude(raw(buffers.p[j])) + (1 + out_factor) * tiny;
    accumulate(out.data(), out_bound.data(), raw(buffers.p[j]), weight, v_, first + j);
  }
  for (double& b : out_bound) b = finished(b);

  if (backward) {
    // dP, D.
    Number d = make_number(bits_);
    mpfr_set_zero(raw(d), 1);
    std::vector<double> dp_magnitude(n);
    double d_magnitude = 0;
    double largest_dout = 0;
    for (std::size_t e = 0; e < problem_.head_dim_v; ++e) {
      largest_dout = max_or_nan(largest_dout, queries.dout.magnitudes[r * problem_.head_dim_v + e]);
    }
    for (std::size_t j = 0; j < n; ++j) {
      mpfr_ptr dp = raw(buffers.ds[j]);
      dp_magnitude[j] = inner_product(dp, queries.dout, r, v_, first + j);
      mpfr_fma(raw(d), raw(buffers.p[j]), dp, raw(d), kNearest);
      d_magnitude += magnitude(raw(buffers.p[j])) * dp_magnitude[j];
    }
    const double dp_relative = gamma_factor(static_cast<double>(problem_.head_dim_v), u_);
    const double row_tiny =
        tiny * (1 + largest_dout) * static_cast<double>(problem_.head_dim_v) * (1 + count);
    const double d_error = (dp_relative + p_error + gamma_factor(count, u_) * (1 + dp_relative)) *
                           (d_magnitude + row_tiny) * kSlack;
    const double h_relative =
        softcap ? std::expm1(2 * score_error / problem_.softcap + 3 * u_ * kSlack) * kSlack : 0;
    const double h_error = reciprocal_factor(h_relative);

    // dS, dQ. The weights count the roundings of the longest sum that dS and P enter, dK's and dV's.
    const auto rows = static_cast<double>(problem_.group() * sequence_.q_length);
    const double ds_rounding = gamma_factor(std::max(count, rows) + 1, u_);
    const double p_rounding = gamma_factor(rows, u_);
    for (std::size_t j = 0; j < n; ++j) {
      mpfr_ptr ds = raw(buffers.ds[j]);
      const double p = magnitude(raw(buffers.p[j]));
      mpfr_sub(ds, ds, raw(d), kNearest);
      const double g = magnitude(ds);
      const double g_error = dp_relative * dp_magnitude[j] + d_error + u_ * g * kSlack;
      mpfr_mul(ds, raw(buffers.p[j]), ds, kNearest);
      double ds_error = p * (g_error + p_error * (g + g_error) + u_ * g) * kSlack;
      if (softcap) {
        const double before = magnitude(ds);
        mpfr_mul(ds, ds, raw(h[j]), kNearest);
        ds_error = magnitude(raw(h[j])) * (ds_error + (before + ds_error) * h_error + u_ * before) * kSlack;
      }
      buffers.ds_weight[j] =
          ds_error + ds_rounding * magnitude(ds) + (1 + p_error + h_error + ds_rounding) * row_tiny;
      buffers.p_weight[j] = (p_error + p_rounding) * p + (1 + p_error + p_rounding) * tiny;
      accumulate(dq.data(), dq_bound.data(), ds, buffers.ds_weight[j], k_, first + j);
    }
    for (std::size_t e = 0; e < dq.size(); ++e) {
      mpfr_mul_d(raw(dq[e]), raw(dq[e]), problem_.softmax_scale, kNearest);
      dq_bound[e] = finished(dq_bound[e] * std::abs(problem_.softmax_scale));
    }
  }
  sink.query_row({{sequence_index_, head, row}, out, out_bound, &lse, lse_bound, dq, dq_bound});
}

void PlainHead::all(const std::function<void(double)>& pairs_done, Sink& sink,
                    const std::vector<bool>* chosen) const {
  const bool backward = problem_.backward();
  const std::size_t keys = sequence_.k_length;
  const std::size_t dim = problem_.head_dim;
  const std::size_t dim_v = problem_.head_dim_v;
  std::vector<Number> dk = make_numbers(backward ? keys * dim : 0, bits_);
  std::vector<Number> dv = make_numbers(backward ? keys * dim_v : 0, bits_);
  std::vector<double> dk_bound(dk.size(), 0.0);
  std::vector<double> dv_bound(dv.size(), 0.0);
  set_zero(dk);
  set_zero(dv);

  // Tiles of rows: first every row by itself, then every key takes up the tile's rows in ascending order. So
  // the order of every sum is fixed whatever the number of threads, and only a tile's P and dS stand in
  // memory.
  const auto threads = static_cast<std::size_t>(tbb::this_task_arena::max_concurrency());
  const std::size_t tile = std::max<std::size_t>(16, 2 * threads);
  std::vector<RowBuffers> buffers(tile);
  for (std::size_t g = 0; g < problem_.group(); ++g) {
    const std::size_t head = head_kv_ * problem_.group() + g;
    for (std::size_t begin = 0; begin < sequence_.q_length; begin += tile) {
      const std::size_t rows = std::min(tile, sequence_.q_length - begin);
      const auto takes_part = [&](std::size_t r) {
        return chosen == nullptr || (*chosen)[g * sequence_.q_length + begin + r];
      };
      bool any = false;
      for (std::size_t r = 0; r < rows; ++r) any = any || takes_part(r);
      if (!any) continue;
      const Queries queries = load_queries(head, begin, rows);
      KeyRange span{keys, 0};
      double pairs = 0;
      for (std::size_t r = 0; r < rows; ++r) {
        RowBuffers& b = buffers[r];
        b.keys = takes_part(r) ? visible_keys(problem_, sequence_, begin + r) : KeyRange{};
        b.reserve(b.keys.size(), bits_, backward);
        pairs += static_cast<double>(b.keys.size());
        if (b.keys.size() == 0) continue;
        span.first = std::min(span.first, b.keys.first);
        span.last = std::max(span.last, b.keys.last);
      }
      tbb::this_task_arena::isolate([&] {
        tbb::parallel_for(std::size_t{0}, rows, [&](std::size_t r) {
          if (takes_part(r)) query_row(head, begin + r, queries, r, buffers[r], sink);
        });
        if (!backward || span.first >= span.last) return;
        tbb::parallel_for(span.first, span.last, [&](std::size_t j) {
          for (std::size_t r = 0; r < rows; ++r) {
            const RowBuffers& b = buffers[r];
            if (!b.keys.contains(j)) continue;
            const std::size_t at = j - b.keys.first;
            accumulate(&dv[j * dim_v], &dv_bound[j * dim_v], raw(b.p[at]), b.p_weight[at], queries.dout, r);
            accumulate(&dk[j * dim], &dk_bound[j * dim], raw(b.ds[at]), b.ds_weight[at], queries.q, r);
          }
        });
      });
      pairs_done(pairs);
    }
  }
  if (!backward) return;
  tbb::this_task_arena::isolate([&] {
    tbb::parallel_for(std::size_t{0}, keys, [&](std::size_t j) {
      for (std::size_t e = 0; e < dim; ++e) {
        mpfr_ptr x = raw(dk[j * dim + e]);
        mpfr_mul_d(x, x, problem_.softmax_scale, kNearest);
        dk_bound[j * dim + e] = finished(dk_bound[j * dim + e] * std::abs(problem_.softmax_scale));
      }
      for (std::size_t e = 0; e < dim_v; ++e) dv_bound[j * dim_v + e] = finished(dv_bound[j * dim_v + e]);
      sink.key_row({sequence_index_, head_kv_, j, std::span(dk).subspan(j * dim, dim),
                    std::span<const double>(dk_bound).subspan(j * dim, dim),
                    std::span(dv).subspan(j * dim_v, dim_v),
                    std::span<const double>(dv_bound).subspan(j * dim_v, dim_v)});
    });
  });
}

void check_bits(int bits) {
  if (bits < kMinBits || bits > kMaxBits) {
    throw std::invalid_argument("reference: precision of " + std::to_string(bits) + " bits, expected " +
                                std::to_string(kMinBits) + " to " + std::to_string(kMaxBits));
  }
}

}  // namespace

void plain_attention_head(const ProblemView& problem, std::size_t sequence, std::size_t head_kv, int bits,
                          const std::function<void(double)>& pairs_done, Sink& sink,
                          const std::vector<bool>* chosen) {
  check_bits(bits);
  PlainHead(problem, sequence, head_kv, bits).all(pairs_done, sink, chosen);
}

void plain_attention(const ProblemView& problem, int bits, const Progress& progress, Sink& sink) {
  check(problem);
  check_bits(bits);
  PairCounter counter(visible_pairs(problem), progress);
  tbb::parallel_for(std::size_t{0}, problem.sequences.size() * problem.heads_kv, [&](std::size_t i) {
    plain_attention_head(
        problem, i / problem.heads_kv, i % problem.heads_kv, bits, [&](double pairs) { counter(pairs); },
        sink);
  });
}

void plain_attention_rows(const ProblemView& problem, std::span<const RowId> rows, int bits,
                          const Progress& progress, Sink& sink) {
  check(problem);
  check_bits(bits);
  // Rows of one KV head together, so that its K and V are loaded once.
  std::vector<RowId> order(rows.begin(), rows.end());
  const auto head_of = [&](const RowId& id) {
    return id.sequence * problem.heads_kv + id.head / problem.group();
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](const RowId& a, const RowId& b) { return head_of(a) < head_of(b); });
  std::atomic<std::size_t> done{0};
  for (std::size_t begin = 0; begin < order.size();) {
    std::size_t end = begin;
    while (end < order.size() && head_of(order[end]) == head_of(order[begin])) ++end;
    const PlainHead head(problem, order[begin].sequence, order[begin].head / problem.group(), bits);
    tbb::parallel_for(begin, end, [&](std::size_t i) {
      const RowId& id = order[i];
      RowBuffers buffers;
      buffers.keys = visible_keys(problem, problem.sequences[id.sequence], id.row);
      buffers.reserve(buffers.keys.size(), bits, problem.backward());
      head.query_row(id.head, id.row, head.load_queries(id.head, id.row, 1), 0, buffers, sink);
      if (progress) progress(static_cast<double>(++done) / static_cast<double>(order.size()));
    });
    begin = end;
  }
}

}  // namespace bitattn::reference
