#include "reference/fast_head.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/bound_arithmetic.hpp"
#include "reference/super_accumulator.hpp"
#include "reference/wide_number.hpp"

namespace bitattn::reference {
namespace {

/// values += from [at, at + values), and the bounds; `from` empty: nothing.
void add_others(const std::vector<Number>& from, const std::vector<double>& from_bound, std::size_t at,
                std::vector<Number>& values, std::vector<double>& bounds) {
  for (std::size_t i = 0; i < values.size() && !from.empty(); ++i) {
    mpfr_add(raw(values[i]), raw(values[i]), raw(from[at + i]), MPFR_RNDN);
    bounds[i] =
        (bounds[i] + from_bound[at + i] + std::abs(mpfr_get_d(raw(values[i]), MPFR_RNDA)) * 0x1p-250) *
        kSlack;
  }
}

void set_nan(std::span<Number> values, std::span<double> bounds) {
  for (Number& x : values) mpfr_set_nan(raw(x));
  std::fill(bounds.begin(), bounds.end(), std::numeric_limits<double>::quiet_NaN());
}

}  // namespace

void FastHead::query_tile(std::size_t g, std::span<const std::size_t> rows, Workspace& work,
                          RowState* states_out, Sink& sink) const {
  const bool backward = problem_.backward();
  std::array<RowState, kBlockRows> states;
  std::array<const std::uint16_t*, kBlockRows> q{};
  std::array<const std::uint16_t*, kBlockRows> dout{};
  std::size_t first = sequence_.k_length;
  std::size_t last = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    states[r].keys = visible_keys(problem_, sequence_, rows[r]);
    q[r] = inputs_.q(g).words.row(rows[r]);
    if (backward) dout[r] = inputs_.dout(g).words.row(rows[r]);
    if (states[r].keys.size() == 0) continue;
    first = std::min(first, states[r].keys.first);
    last = std::max(last, states[r].keys.last);
  }
  const std::size_t span = first < last ? last - first : 0;
  work.scores_left.set({q.data(), rows.size()}, problem_.head_dim);
  if (backward) work.dp_left.set({dout.data(), rows.size()}, problem_.head_dim_v);
  work.numerators.resize(kBlockRows * span);
  if (backward) work.dps.resize(kBlockRows * span);
  if (backward && constants_.softcap) work.derivatives.resize(kBlockRows * span);
  work.first_sums.reset(v_rows_);

  // Scores, numerators, their sums and O, chunk by chunk; dP with them.
  std::array<Wide, kBlockRows> sums{};
  std::array<FixedPoint, kBlockRows> largest{};
  std::array<double, kBlockRows> largest_exponent{};
  std::array<double, kBlockRows> largest_argument{};
  for (std::size_t chunk = first / kChunk; chunk * kChunk < last; ++chunk) {
    const std::size_t base = chunk * kChunk;
    const std::size_t begin = std::max(first, base) - base;
    const std::size_t end = std::min(last, base + kChunk) - base;
    work.scores.compute(work.scores_left, k_, problem_.head_dim, chunk, begin, end);
    if (backward) work.dp.compute(work.dp_left, *v_, problem_.head_dim_v, chunk, begin, end);
    for (std::size_t r = 0; r < kBlockRows; ++r) {
      RowState& state = states[r];
      const std::size_t from = std::clamp(state.keys.first, base + begin, base + end);
      const std::size_t to = std::clamp(state.keys.last, base + begin, base + end);
      if (from >= to) {
        work.outer_left.clear_row(r, begin, end);
        continue;
      }
      std::fill(work.line.begin(), work.line.end(), Wide{});
      for (std::size_t j = from; j < to; ++j) {
        const RowScale& left = work.scores_left.scale(r);
        const Wide score = left.broad() || k_.scale(j).broad()
                               ? exact_inner_product(q[r], inputs_.k().words.row(j), problem_.head_dim)
                               : work.scores.get(r, j - base, left, k_.scale(j));
        const Exponent x = exponent_of(constants_, exp2_, score);
        const Wide numerator = exp2_of(exp2_, x.value);
        work.line[j - base] = numerator;
        work.numerators[r * span + j - first] = numerator;
        sums[r] = add(sums[r], numerator);
        largest_exponent[r] = std::max(largest_exponent[r], std::abs(static_cast<double>(x.value.whole)) + 1);
        largest_argument[r] = std::max(largest_argument[r], x.argument);
        if (j == state.keys.first || largest[r] < x.value) {
          largest[r] = x.value;
          state.reference = j;
        }
        if (!backward) continue;
        if (constants_.softcap) work.derivatives[r * span + j - first] = x.derivative;
        const RowScale& dp_left = work.dp_left.scale(r);
        work.dps[r * span + j - first] =
            dp_left.broad() || v_->scale(j).broad()
                ? exact_inner_product(dout[r], inputs_.v().words.row(j), problem_.head_dim_v)
                : work.dp.get(r, j - base, dp_left, v_->scale(j));
      }
      work.outer_left.set_row(r, work.line, {}, v_rows_.row_exponents(chunk), begin, end);
    }
    work.first_sums.add(work.outer_left, chunk, begin, end);
  }

  // The divisors, and d of every row.
  std::array<Number, kBlockRows> inverse_sums;
  std::array<Number, kBlockRows> lses;
  std::array<double, kBlockRows> sum_errors{};
  for (std::size_t r = 0; r < rows.size(); ++r) {
    RowState& state = states[r];
    inverse_sums[r] = make_number(kRowBits);
    lses[r] = make_number(kRowBits);
    const auto n = static_cast<double>(state.keys.size());
    if (n == 0) {
      mpfr_set_inf(raw(lses[r]), -1);
      continue;
    }
    state.numerator_error = numerator_error(constants_, largest_exponent[r]);
    state.derivative_error = derivative_error(constants_, largest_argument[r]);
    sum_errors[r] = (state.numerator_error + n * 0x1p-127) * kSlack;
    state.p_error = (state.numerator_error + sum_errors[r] + 0x1p-125) * kSlack;
    set_wide(raw(inverse_sums[r]), sums[r]);
    mpfr_log(raw(lses[r]), raw(inverse_sums[r]), MPFR_RNDN);
    mpfr_ui_div(raw(inverse_sums[r]), 1, raw(inverse_sums[r]), MPFR_RNDN);
    state.inverse_sum = wide_from(raw(inverse_sums[r]));
    if (!backward) continue;

    const Wide* const numerators = &work.numerators[r * span];
    const Wide* const dps = &work.dps[r * span];
    state.dp_reference = dps[state.reference - first];
    state.dp_reference_magnitude = magnitude(state.dp_reference);
    Wide sum;
    double terms = 0;       // sum of P |dP - dP_reference|
    double subtracted = 0;  // sum of P (|dP| + |dP_reference|)
    for (std::size_t j = state.keys.first; j < state.keys.last; ++j) {
      if (j == state.reference) continue;
      const Wide& numerator = numerators[j - first];
      const Wide difference = add(dps[j - first], negated(state.dp_reference));
      sum = add(sum, multiply(numerator, difference));
      const double p =
          scaled(fraction(numerator), numerator.top() - sums[r].top() + 1);  // sum >= 2^(top - 1)
      terms += p * magnitude(difference);
      subtracted += p * (magnitude(dps[j - first]) + state.dp_reference_magnitude);
    }
    state.d = multiply(sum, state.inverse_sum);
    state.d_magnitude = magnitude(state.d);
    state.d_error = (terms * (state.p_error + (n + 4) * 0x1p-127) + subtracted * 0x1p-126) * (1 + 0x1p-10);
  }

  // dQ.
  if (backward) {
    work.second_sums.reset(*k_rows_);
    for (std::size_t chunk = first / kChunk; chunk * kChunk < last; ++chunk) {
      const std::size_t base = chunk * kChunk;
      const std::size_t begin = std::max(first, base) - base;
      const std::size_t end = std::min(last, base + kChunk) - base;
      for (std::size_t r = 0; r < kBlockRows; ++r) {
        const RowState& state = states[r];
        const std::size_t from = std::clamp(state.keys.first, base + begin, base + end);
        const std::size_t to = std::clamp(state.keys.last, base + begin, base + end);
        if (from >= to) {
          work.outer_left.clear_row(r, begin, end);
          continue;
        }
        std::fill(work.line.begin(), work.line.end(), Wide{});
        std::fill(work.errors.begin(), work.errors.end(), ErrorTerm{});
        for (std::size_t j = from; j < to; ++j) {
          const std::size_t at = r * span + j - first;
          const Weighted ds = weighted_gradient(
              work.numerators[at], state.numerator_error, score_gradient(state, j, work.dps[at]),
              constants_.softcap ? &work.derivatives[at] : nullptr, state.derivative_error);
          work.line[j - base] = ds.value;
          work.errors[j - base] = ds.error;
        }
        work.outer_left.set_row(r, work.line, work.errors, k_rows_->row_exponents(chunk), begin, end);
      }
      work.second_sums.add(work.outer_left, chunk, begin, end);
    }
  }
  for (std::size_t r = 0; states_out != nullptr && r < rows.size(); ++r) states_out[rows[r]] = states[r];
  emit(head_kv_ * problem_.group() + g, rows, work, inverse_sums, lses, states, sum_errors, sink);
}

void FastHead::emit(std::size_t head, std::span<const std::size_t> rows, const Workspace& work,
                    const std::array<Number, kBlockRows>& inverse_sums,
                    const std::array<Number, kBlockRows>& lses,
                    const std::array<RowState, kBlockRows>& states,
                    const std::array<double, kBlockRows>& sum_errors, Sink& sink) const {
  const bool backward = problem_.backward();
  std::vector<Number> out = make_numbers(problem_.head_dim_v, kRowBits);
  std::vector<Number> dq = make_numbers(backward ? problem_.head_dim : 0, kRowBits);
  std::vector<double> out_bound(out.size());
  std::vector<double> dq_bound(dq.size());
  Number factor = make_number(kRowBits);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::fill(out_bound.begin(), out_bound.end(), 0.0);
    std::fill(dq_bound.begin(), dq_bound.end(), 0.0);
    set_zero(out);
    set_zero(dq);
    double lse_bound = 0;
    if (states[r].keys.size() > 0) {
      // numerator / sum: the bound of the numerator over the sum, and the sum's own relative error.
      const auto divide = [&](const BlockSums& sums, double error, double scale, std::vector<Number>& values,
                              std::vector<double>& bounds) {
        mpfr_mul_d(raw(factor), raw(inverse_sums[r]), scale, MPFR_RNDN);
        const Wide& inverse = states[r].inverse_sum;
        for (std::size_t d = 0; d < values.size(); ++d) {
          sums.get(raw(values[d]), r, d);
          mpfr_mul(raw(values[d]), raw(values[d]), raw(factor), MPFR_RNDN);
          const double numerator = scaled(error * fraction(inverse), inverse.top() + sums.exponent(r, d));
          bounds[d] =
              (numerator * std::abs(scale) * (1 + sum_errors[r]) +
               std::abs(mpfr_get_d(raw(values[d]), MPFR_RNDA)) * (sum_errors[r] * kSlack + 0x1p-250)) *
                  kSlack +
              underflow_;
        }
      };
      divide(work.first_sums,
             work.first_sums.error(r) + states[r].numerator_error * work.first_sums.magnitude(r), 1.0, out,
             out_bound);
      if (backward) divide(work.second_sums, work.second_sums.error(r), problem_.softmax_scale, dq, dq_bound);
      lse_bound =
          (sum_errors[r] * kSlack + std::abs(mpfr_get_d(raw(lses[r]), MPFR_RNDA)) * 0x1p-250) * kSlack;
    }
    sink.query_row({{sequence_index_, head, rows[r]}, out, out_bound, &lses[r], lse_bound, dq, dq_bound});
  }
}

void FastHead::key_tile(std::size_t first, std::size_t count,
                        const std::vector<std::unique_ptr<QueryOperands>>& heads, const OtherRows& others,
                        Workspace& work, Sink& sink) const {
  std::array<const std::uint16_t*, kBlockRows> k{};
  std::array<const std::uint16_t*, kBlockRows> v{};
  for (std::size_t j = 0; j < count; ++j) {
    k[j] = inputs_.k().words.row(first + j);
    v[j] = inputs_.v().words.row(first + j);
  }
  work.scores_left.set({k.data(), count}, problem_.head_dim);
  work.dp_left.set({v.data(), count}, problem_.head_dim_v);

  const std::size_t dim = problem_.head_dim;
  const std::size_t dim_v = problem_.head_dim_v;
  std::vector<Number> dk = make_numbers(count * dim, kRowBits);
  std::vector<Number> dv = make_numbers(count * dim_v, kRowBits);
  std::vector<double> dk_bound(dk.size(), 0.0);
  std::vector<double> dv_bound(dv.size(), 0.0);
  set_zero(dk);
  set_zero(dv);
  Number part = make_number(kRowBits);
  for (std::size_t g = 0; g < heads.size(); ++g) {
    const QueryOperands& queries = *heads[g];
    const Bf16Rows& q = inputs_.q(g).words;
    const Bf16Rows& dout = inputs_.dout(g).words;
    work.first_sums.reset(queries.q_rows);
    work.second_sums.reset(queries.dout_rows);
    bool any = false;
    for (std::size_t base = 0; base < sequence_.q_length; base += kChunk) {
      const std::size_t chunk = base / kChunk;
      const std::size_t in_chunk = std::min(kChunk, sequence_.q_length - base);
      // Rows of the chunk that see any of these keys.
      std::size_t begin = kChunk;
      std::size_t end = 0;
      for (std::size_t i = 0; i < in_chunk; ++i) {
        const KeyRange& keys = queries.states[base + i].keys;
        if (keys.size() == 0 || keys.first >= first + count || keys.last <= first) continue;
        begin = std::min(begin, i);
        end = i + 1;
      }
      if (begin >= end) continue;
      any = true;
      work.scores.compute(work.scores_left, queries.q, dim, chunk, begin, end);
      work.dp.compute(work.dp_left, queries.dout, dim_v, chunk, begin, end);
      for (std::size_t j = 0; j < kBlockRows; ++j) {
        if (j >= count) {
          work.outer_left.clear_row(j, begin, end);
          work.second_left.clear_row(j, begin, end);
          continue;
        }
        std::fill(work.line.begin(), work.line.end(), Wide{});
        std::fill(work.second_line.begin(), work.second_line.end(), Wide{});
        std::fill(work.errors.begin(), work.errors.end(), ErrorTerm{});
        std::fill(work.second_errors.begin(), work.second_errors.end(), ErrorTerm{});
        const RowScale& k_scale = work.scores_left.scale(j);
        const RowScale& v_scale = work.dp_left.scale(j);
        for (std::size_t i = begin; i < end; ++i) {
          const RowState& state = queries.states[base + i];
          if (!state.keys.contains(first + j)) continue;
          const RowScale& q_scale = queries.q.scale(base + i);
          const Wide score = k_scale.broad() || q_scale.broad()
                                 ? exact_inner_product(q.row(base + i), k[j], dim)
                                 : work.scores.get(j, i, k_scale, q_scale);
          const Exponent x = exponent_of(constants_, exp2_, score);
          const Wide p = multiply(exp2_of(exp2_, x.value), state.inverse_sum);
          const RowScale& dout_scale = queries.dout.scale(base + i);
          const Wide dp = v_scale.broad() || dout_scale.broad()
                              ? exact_inner_product(dout.row(base + i), v[j], dim_v)
                              : work.dp.get(j, i, v_scale, dout_scale);
          const Weighted ds =
              weighted_gradient(p, state.p_error, score_gradient(state, first + j, dp),
                                constants_.softcap ? &x.derivative : nullptr, state.derivative_error);
          work.line[i] = ds.value;
          work.errors[i] = ds.error;
          work.second_line[i] = p;
          work.second_errors[i] = {fraction(p) * state.p_error, p.zero() ? 0 : p.top()};
        }
        work.outer_left.set_row(j, work.line, work.errors, queries.q_rows.row_exponents(chunk), begin, end);
        work.second_left.set_row(j, work.second_line, work.second_errors,
                                 queries.dout_rows.row_exponents(chunk), begin, end);
      }
      work.first_sums.add(work.outer_left, chunk, begin, end);
      work.second_sums.add(work.second_left, chunk, begin, end);
    }
    if (!any) continue;
    // Heads of a group are added in MPFR, in order.
    const auto take = [&](const BlockSums& sums, std::size_t width, std::vector<Number>& values,
                          std::vector<double>& bounds) {
      for (std::size_t j = 0; j < count; ++j) {
        for (std::size_t d = 0; d < width; ++d) {
          Number& value = values[j * width + d];
          sums.get(raw(part), j, d);
          mpfr_add(raw(value), raw(value), raw(part), MPFR_RNDN);
          bounds[j * width + d] += scaled(sums.error(j), sums.exponent(j, d)) +
                                   std::abs(mpfr_get_d(raw(value), MPFR_RNDA)) * 0x1p-250;
        }
      }
    };
    take(work.first_sums, dim, dk, dk_bound);
    take(work.second_sums, dim_v, dv, dv_bound);
  }
  const double scale = std::abs(problem_.softmax_scale);
  for (std::size_t i = 0; i < dk.size(); ++i) {
    mpfr_mul_d(raw(dk[i]), raw(dk[i]), problem_.softmax_scale, MPFR_RNDN);
    dk_bound[i] =
        (dk_bound[i] * scale + std::abs(mpfr_get_d(raw(dk[i]), MPFR_RNDA)) * 0x1p-250) * kSlack + underflow_;
  }
  for (double& b : dv_bound) b = b * kSlack + underflow_;
  add_others(others.dk, others.dk_bound, first * dim, dk, dk_bound);
  add_others(others.dv, others.dv_bound, first * dim_v, dv, dv_bound);
  for (std::size_t j = 0; j < count && !others.nan.empty(); ++j) {
    if (others.nan[first + j] == 0) continue;
    set_nan(std::span(dk).subspan(j * dim, dim), std::span(dk_bound).subspan(j * dim, dim));
    set_nan(std::span(dv).subspan(j * dim_v, dim_v), std::span(dv_bound).subspan(j * dim_v, dim_v));
  }
  for (std::size_t j = 0; j < count; ++j) {
    sink.key_row({sequence_index_, head_kv_, first + j, std::span(dk).subspan(j * dim, dim),
                  std::span<const double>(dk_bound).subspan(j * dim, dim),
                  std::span(dv).subspan(j * dim_v, dim_v),
                  std::span<const double>(dv_bound).subspan(j * dim_v, dim_v)});
  }
}

}  // namespace bitattn::reference
