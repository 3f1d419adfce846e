#include "reference/fast_attention.hpp"

#include <oneapi/tbb/enumerable_thread_specific.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>

#include "reference/block_sums.hpp"
#include "reference/bound_arithmetic.hpp"
#include "reference/exp2.hpp"
#include "reference/pair_counter.hpp"
#include "reference/plain_attention.hpp"
#include "reference/sliced_operands.hpp"
#include "reference/super_accumulator.hpp"
#include "reference/wide_number.hpp"

namespace bitattn::reference {
namespace {

constexpr mpfr_prec_t kBits = 256;        // of the few MPFR operations a row needs
constexpr double kLn2 = 0.69314718056;    // rounded up
constexpr double kLog2e = 1.44269504089;  // rounded up
constexpr double kMostScore = 0x1p28;     // largest |score * log2 e|

/// What all scores of a problem are multiplied with.
struct Constants {
  bool softcap = false;
  Wide log2_scale;        ///< no softcap: scale * log2 e
  Wide argument_scale;    ///< softcap: 2 log2 e * |scale| / cap
  Wide cap_log2;          ///< softcap: cap * log2 e
  bool flip = false;      ///< softcap with a negative scale
  double cap_log2_error;  ///< softcap: error of the exponent that does not grow with it

  explicit Constants(const ProblemView& problem) : softcap(problem.softcap > 0) {
    Number log2e = make_number(kBits);
    mpfr_const_log2(raw(log2e), MPFR_RNDN);
    mpfr_ui_div(raw(log2e), 1, raw(log2e), MPFR_RNDN);
    Number x = make_number(kBits);
    mpfr_mul_d(raw(x), raw(log2e), problem.softmax_scale, MPFR_RNDN);
    log2_scale = wide_from(raw(x));
    cap_log2_error = 0;
    if (!softcap) return;
    mpfr_abs(raw(x), raw(x), MPFR_RNDN);
    mpfr_div_d(raw(x), raw(x), problem.softcap, MPFR_RNDN);
    mpfr_mul_2ui(raw(x), raw(x), 1, MPFR_RNDN);
    argument_scale = wide_from(raw(x));
    mpfr_mul_d(raw(x), raw(log2e), problem.softcap, MPFR_RNDN);
    cap_log2 = wide_from(raw(x));
    flip = problem.softmax_scale < 0;
    cap_log2_error = problem.softcap * 0x1p-120;
  }
};

/// whole + fraction / 2^128.
struct FixedPoint {
  std::int32_t whole = 0;
  U128 fraction = 0;
  bool operator<(const FixedPoint& b) const {
    return whole != b.whole ? whole < b.whole : fraction < b.fraction;
  }
};

/// x cut to a multiple of 2^-128 (towards zero); |x| < 2^30.
FixedPoint fixed_point(const Wide& x) {
  if (x.zero()) return {};
  FixedPoint f;
  const std::int32_t shift = -x.exponent;  // > 97
  f.whole = shift < 128 ? static_cast<std::int32_t>(x.significand >> static_cast<unsigned>(shift)) : 0;
  f.fraction = shift < 128    ? x.significand << static_cast<unsigned>(128 - shift)
               : shift == 128 ? x.significand
                              : shift_right(x.significand, shift - 128);
  if (!x.negative) return f;
  if (f.fraction == 0) return {-f.whole, 0};
  return {-f.whole - 1, U128{0} - f.fraction};
}

/// 2^x.
Wide exp2_of(const Exp2& exp2, const FixedPoint& x) {
  return {exp2(x.fraction), x.whole - 127, false};
}

/// 1 / d for d in [1, 2], in units of 2^-126 for d and 2^-127 for the result; off by at most 4 units.
U128 reciprocal(U128 d) {
  // Newton's iteration r += r (1 - d r), from 2^-49 to 2^-98 to the last places.
  const double start = 0x1p63 / (static_cast<double>(high_half(d)) * 0x1p-62 + 0x1p-50);
  U128 r = static_cast<U128>(static_cast<std::uint64_t>(start)) << 64U;  // <= 1/d, in units of 2^-127
  for (int i = 0; i < 2; ++i) {
    const U256 dr = full_product(d, r);  // units of 2^-253; d r <= 1
    const U128 dr_high =
        (dr.high << 3U) | (dr.low >> 125U);  // units of 2^-128, 2^128 itself cannot be: r <= 1/d
    const U128 rest = U128{0} - dr_high;     // 1 - d r
    r += high_product(r, rest);
  }
  return r;
}

/// The score's part in the softmax: log2 of the numerator, and with softcap the derivative.
struct Exponent {
  FixedPoint value;
  Wide derivative;      ///< softcap only: 1 - tanh^2
  double argument = 0;  ///< softcap only: log2 of 1 / exp(-2|y|), for the error of the derivative
};

Exponent exponent_of(const Constants& constants, const Exp2& exp2, const Wide& score) {
  if (!constants.softcap) return {fixed_point(multiply(score, constants.log2_scale)), {}, 0};
  // e = exp(-2|y|), tanh|y| = (1 - e) / (1 + e), 1 - tanh^2 = 4 e / (1 + e)^2.
  Wide argument = multiply(score, constants.argument_scale);
  argument.negative = true;
  Wide e;  // 0 where the argument is so large that e vanishes
  if (argument.zero() || argument.top() <= 28) e = exp2_of(exp2, fixed_point(argument));
  const U128 one = U128{1} << 126U;
  const U128 e_fixed = e.zero() ? U128{0} : shift_right(e.significand, -126 - e.exponent);
  const U128 r = reciprocal(one + e_fixed);
  const U256 t = full_product(one - e_fixed, r);         // units of 2^-253
  const U128 tanh_y = (t.high << 2U) | (t.low >> 126U);  // units of 2^-127
  Wide tanh_wide;
  if (tanh_y != 0) {
    const int shift = leading_zeros(tanh_y);
    tanh_wide = {tanh_y << static_cast<unsigned>(shift), -127 - shift, score.negative != constants.flip};
  }
  const int shift = leading_zeros(r);
  const Wide r_wide{r << static_cast<unsigned>(shift), -127 - shift, false};
  Wide h = multiply(multiply(e, r_wide), r_wide);
  h.exponent += 2;
  return {fixed_point(multiply(tanh_wide, constants.cap_log2)), h, e.zero() ? 0 : magnitude(argument)};
}

/// How far 2^exponent can be off, relatively, where |exponent| <= largest.
double numerator_error(const Constants& constants, double largest) {
  const double exponent = largest * 0x1p-125 + constants.cap_log2_error + 0x1p-127;
  return (exponent * kLn2 + Exp2::kRelativeError) * kSlack;
}

/// How far the softcap derivative can be off, relatively, where the argument's log2 is at most `largest`.
double derivative_error(const Constants& constants, double largest) {
  return constants.softcap ? (largest * 0x1p-125 + 0x1p-121) * kSlack : 0;
}

/// What a row of queries leaves for its score gradients.
///
///   P_ij = numerator_ij * inverse_sum        dS_ij = P_ij * ((dP_ij - dP_reference) - d)
///
/// with `reference` the row's largest score, d = sum_j P_ij (dP_ij - dP_reference). So a row with nearly all
/// its weight on one key keeps the small differences that its gradient is made of.
struct RowState {
  KeyRange keys;
  std::size_t reference = 0;
  Wide inverse_sum, dp_reference, d;
  double p_error = 0;           ///< of P, relative
  double numerator_error = 0;   ///< of the numerators, relative
  double derivative_error = 0;  ///< of the softcap derivative, relative
  double d_error = 0;           ///< of d, absolute
  double dp_reference_magnitude = 0, d_magnitude = 0;
};

/// dP - D of one pair and a bound on its error.
struct ScoreGradient {
  Wide value;
  double error;
};
ScoreGradient score_gradient(const RowState& row, std::size_t key, const Wide& dp) {
  Wide difference;
  double error = row.d_error;
  if (key != row.reference) {
    difference = add(dp, negated(row.dp_reference));
    error += (magnitude(dp) + row.dp_reference_magnitude) * 0x1p-126;
  }
  error += (magnitude(difference) + row.d_magnitude) * 0x1p-127;
  return {add(difference, negated(row.d)), error * kSlack};
}

/// weight * gradient [* derivative] and a bound on its error; the weight is off by weight_error, relatively.
struct Weighted {
  Wide value;
  ErrorTerm error;
};
Weighted weighted_gradient(const Wide& weight, double weight_error, const ScoreGradient& g,
                           const Wide* derivative, double derivative_error) {
  Weighted w;
  w.value = multiply(weight, g.value);
  double factor = 1;
  if (derivative != nullptr) {
    w.value = multiply(w.value, *derivative);
    factor = magnitude(*derivative) * (1 + derivative_error);
  }
  const double relative = weight_error + derivative_error + 0x1p-125;
  const double error =
      ((magnitude(g.value) + g.error) * relative + g.error) * fraction(weight) * factor * kSlack;
  if (error >= 0x1p-1022) w.error = {error, weight.top()};
  return w;
}

/// Products of slices of one left block with one chunk of a right operand, as exact inner products.
class InnerBlock {
 public:
  /// Rows of `left` with rows [begin, end) of chunk `chunk` of `right`.
  void compute(const InnerLeft& left, const InnerRight& right, std::size_t width, std::size_t chunk,
               std::size_t begin, std::size_t end) {
    // Whole vectors of 16 columns; the chunk has room for them.
    begin_ = begin / 16 * 16;
    const std::size_t columns = (end - begin_ + 15) / 16 * 16;
    sums_count_ =
        left.slices() == 0 || right.slices(chunk) == 0 ? 0 : left.slices() + right.slices(chunk) - 1;
    totals_.assign(static_cast<std::size_t>(sums_count_) * kBlockRows * kChunk, 0);
    for (int s = 0; s < sums_count_; ++s) {
      std::array<SlicePair, kInnerSlices> pairs{};
      std::size_t count = 0;
      for (int l = 0; l < left.slices() && l <= s; ++l) {
        if (s - l < right.slices(chunk)) pairs[count++] = {left.block(l), right.block(chunk, s - l) + begin_};
      }
      add_exact_products({pairs.data(), count}, width, columns, kChunk,
                         totals_.data() + static_cast<std::size_t>(s) * kBlockRows * kChunk, kChunk);
    }
  }

  /// The inner product of row r and column j of the chunk, exactly.
  Wide get(std::size_t r, std::size_t j, const RowScale& left, const RowScale& right) const {
    if (sums_count_ == 0) return {};
    I128 total = 0;
    for (int s = 0; s < sums_count_; ++s) {
      total = total * (I128{1} << kSliceBits) +
              totals_[(static_cast<std::size_t>(s) * kBlockRows + r) * kChunk + j - begin_];
    }
    return wide_from(total, left.exponent + right.exponent - kSliceBits * (sums_count_ + 1));
  }

 private:
  std::size_t begin_ = 0;
  int sums_count_ = 0;
  std::vector<std::int64_t> totals_;  ///< [sum of slice numbers][kBlockRows][kChunk]
};

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

/// Rows [begin, end) of one head of a tensor.
Bf16Rows rows_of(const TensorView& tensor, std::size_t begin, std::size_t count, std::size_t head,
                 std::size_t width) {
  return {tensor.row(begin, head), tensor.token_stride, count, width};
}

/// The sizes of a matrix's finite elements and rows.
struct Extent {
  double element = 0;  ///< largest magnitude
  double norm = 0;     ///< largest Euclidean norm of a row
  bool finite = true;  ///< no infinity and no NaN

  void include(const Bf16Rows& rows) {
    for (std::size_t r = 0; r < rows.rows; ++r) {
      double square = 0;
      for (std::size_t d = 0; d < rows.width; ++d) {
        const std::uint16_t word = rows.row(r)[d];
        if (!Bf16Parts::finite(word)) {
          finite = false;
          continue;
        }
        const double x = fp64_from_bf16(word);
        element = std::max(element, std::abs(x));
        square += x * x;
      }
      norm = std::max(norm, std::sqrt(square) * kSlack);
    }
  }
};

/// The extents of all that one KV head of a sequence works on.
struct HeadExtents {
  Extent q, k, v, dout;

  HeadExtents(const ProblemView& problem, std::size_t sequence, std::size_t head_kv) {
    const Sequence& s = problem.sequences[sequence];
    k.include(rows_of(problem.k, s.k_begin, s.k_length, head_kv, problem.head_dim));
    v.include(rows_of(problem.v, s.k_begin, s.k_length, head_kv, problem.head_dim_v));
    for (std::size_t g = 0; g < problem.group(); ++g) {
      const std::size_t head = head_kv * problem.group() + g;
      q.include(rows_of(problem.q, s.q_begin, s.q_length, head, problem.head_dim));
      if (problem.backward())
        dout.include(rows_of(problem.dout, s.q_begin, s.q_length, head, problem.head_dim_v));
    }
  }
  bool finite() const { return q.finite && k.finite && v.finite && dout.finite; }
};

/// Why the extents do not allow the fast way; nullptr if they do.
const char* obstacle(const ProblemView& problem, const HeadExtents& extents) {
  if (!extents.finite()) return "infinities or NaNs among the inputs";
  const double scale = std::abs(problem.softmax_scale);
  if (scale > 0x1p100 || (scale != 0 && scale < 0x1p-100)) return "softmax_scale out of range";
  if (problem.softcap > 0) {
    return problem.softcap > 0x1p20 || problem.softcap < 0x1p-20 ? "softcap out of range" : nullptr;
  }
  return extents.q.norm * extents.k.norm * scale * kLog2e * kSlack >= kMostScore ? "scores out of range"
                                                                                 : nullptr;
}

/// Working precision for a head that goes the plain way: kDefaultBits below the largest score.
int plain_bits(const ProblemView& problem, const HeadExtents& extents) {
  const double largest = extents.q.norm * extents.k.norm * std::abs(problem.softmax_scale);
  const int extra = largest > 1 ? std::ilogb(largest) + 1 : 0;
  return std::min(kDefaultBits + (extra + 63) / 64 * 64, kMaxBits);
}

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

/// One KV head of one sequence.
class FastHead {
 public:
  FastHead(const ProblemView& problem, const Constants& constants, const HeadExtents& extents,
           std::size_t sequence, std::size_t head_kv)
      : problem_(problem),
        constants_(constants),
        exp2_(Exp2::instance()),
        sequence_(problem.sequences[sequence]),
        sequence_index_(sequence),
        head_kv_(head_kv),
        k_words_(rows_of(problem.k, sequence_.k_begin, sequence_.k_length, head_kv, problem.head_dim)),
        v_words_(rows_of(problem.v, sequence_.k_begin, sequence_.k_length, head_kv, problem.head_dim_v)),
        k_(k_words_),
        v_rows_(v_words_),
        underflow_(0x1p-900 * (1 + std::abs(problem.softmax_scale)) * (1 + extents.q.element) *
                   (1 + extents.k.element) * (1 + extents.v.element) * (1 + extents.dout.element) *
                   static_cast<double>(problem.head_dim_v)) {
    if (!problem.backward()) return;
    v_.emplace(v_words_);
    k_rows_.emplace(k_words_);
  }

  Bf16Rows q_words(std::size_t head) const {
    return rows_of(problem_.q, sequence_.q_begin, sequence_.q_length, head, problem_.head_dim);
  }
  Bf16Rows dout_words(std::size_t head) const {
    return rows_of(problem_.dout, sequence_.q_begin, sequence_.q_length, head, problem_.head_dim_v);
  }

  /// Up to kBlockRows rows of queries of one head. `states`, if not null, receives what the key side needs of
  /// each.
  void query_tile(std::size_t head, std::span<const std::size_t> rows, Workspace& work, RowState* states,
                  Sink& sink) const;

  /// Up to kBlockRows keys from `first`, over all query heads of the group.
  void key_tile(std::size_t first, std::size_t count,
                const std::vector<std::unique_ptr<QueryOperands>>& heads, Workspace& work, Sink& sink) const;

 private:
  void emit(std::size_t head, std::span<const std::size_t> rows, const Workspace& work,
            const std::array<Number, kBlockRows>& inverse_sums, const std::array<Number, kBlockRows>& lses,
            const std::array<RowState, kBlockRows>& states, const std::array<double, kBlockRows>& sum_errors,
            Sink& sink) const;

  const ProblemView& problem_;
  const Constants& constants_;
  const Exp2& exp2_;
  const Sequence& sequence_;
  std::size_t sequence_index_, head_kv_;
  Bf16Rows k_words_, v_words_;
  InnerRight k_;
  OuterRight v_rows_;
  std::optional<InnerRight> v_;
  std::optional<OuterRight> k_rows_;
  double underflow_ = 0;  ///< more than all bounds of an element can lose to underflow of doubles
};

void FastHead::query_tile(std::size_t head, std::span<const std::size_t> rows, Workspace& work,
                          RowState* states_out, Sink& sink) const {
  const bool backward = problem_.backward();
  std::array<RowState, kBlockRows> states;
  std::array<const std::uint16_t*, kBlockRows> q{};
  std::array<const std::uint16_t*, kBlockRows> dout{};
  std::size_t first = sequence_.k_length;
  std::size_t last = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    states[r].keys = visible_keys(problem_, sequence_, rows[r]);
    q[r] = problem_.q.row(sequence_.q_begin + rows[r], head);
    if (backward) dout[r] = problem_.dout.row(sequence_.q_begin + rows[r], head);
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
                               ? exact_inner_product(q[r], k_words_.row(j), problem_.head_dim)
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
                ? exact_inner_product(dout[r], v_words_.row(j), problem_.head_dim_v)
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
    inverse_sums[r] = make_number(kBits);
    lses[r] = make_number(kBits);
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
  if (states_out != nullptr) std::copy_n(states.begin(), rows.size(), states_out);
  emit(head, rows, work, inverse_sums, lses, states, sum_errors, sink);
}

void FastHead::emit(std::size_t head, std::span<const std::size_t> rows, const Workspace& work,
                    const std::array<Number, kBlockRows>& inverse_sums,
                    const std::array<Number, kBlockRows>& lses,
                    const std::array<RowState, kBlockRows>& states,
                    const std::array<double, kBlockRows>& sum_errors, Sink& sink) const {
  const bool backward = problem_.backward();
  std::vector<Number> out = make_numbers(problem_.head_dim_v, kBits);
  std::vector<Number> dq = make_numbers(backward ? problem_.head_dim : 0, kBits);
  std::vector<double> out_bound(out.size());
  std::vector<double> dq_bound(dq.size());
  Number factor = make_number(kBits);
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
                        const std::vector<std::unique_ptr<QueryOperands>>& heads, Workspace& work,
                        Sink& sink) const {
  std::array<const std::uint16_t*, kBlockRows> k{};
  std::array<const std::uint16_t*, kBlockRows> v{};
  for (std::size_t j = 0; j < count; ++j) {
    k[j] = k_words_.row(first + j);
    v[j] = v_words_.row(first + j);
  }
  work.scores_left.set({k.data(), count}, problem_.head_dim);
  work.dp_left.set({v.data(), count}, problem_.head_dim_v);

  const std::size_t dim = problem_.head_dim;
  const std::size_t dim_v = problem_.head_dim_v;
  std::vector<Number> dk = make_numbers(count * dim, kBits);
  std::vector<Number> dv = make_numbers(count * dim_v, kBits);
  std::vector<double> dk_bound(dk.size(), 0.0);
  std::vector<double> dv_bound(dv.size(), 0.0);
  set_zero(dk);
  set_zero(dv);
  Number part = make_number(kBits);
  for (std::size_t g = 0; g < heads.size(); ++g) {
    const QueryOperands& queries = *heads[g];
    const Bf16Rows q = q_words(head_kv_ * problem_.group() + g);
    const Bf16Rows dout = dout_words(head_kv_ * problem_.group() + g);
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
  for (std::size_t j = 0; j < count; ++j) {
    sink.key_row({sequence_index_, head_kv_, first + j, std::span(dk).subspan(j * dim, dim),
                  std::span<const double>(dk_bound).subspan(j * dim, dim),
                  std::span(dv).subspan(j * dim_v, dim_v),
                  std::span<const double>(dv_bound).subspan(j * dim_v, dim_v)});
  }
}

using Workspaces = tbb::enumerable_thread_specific<Workspace>;

/// One KV head of one sequence with its query heads: all query tiles, then all key tiles.
void whole_head(const ProblemView& problem, const Constants& constants, std::size_t b, std::size_t kv,
                Workspaces& workspaces, PairCounter& counter, Sink& sink) {
  const Sequence& sequence = problem.sequences[b];
  const HeadExtents extents(problem, b, kv);
  if (obstacle(problem, extents) != nullptr) {
    const double passes = problem.backward() ? 2 : 1;
    plain_attention_head(
        problem, b, kv, plain_bits(problem, extents), [&](double pairs) { counter(passes * pairs); }, sink);
    return;
  }
  const FastHead head(problem, constants, extents, b, kv);
  std::vector<std::unique_ptr<QueryOperands>> queries;
  const std::size_t query_tiles = (sequence.q_length + kBlockRows - 1) / kBlockRows;
  double pairs_of_head = 0;
  for (std::size_t i = 0; i < sequence.q_length; ++i) {
    pairs_of_head += static_cast<double>(visible_keys(problem, sequence, i).size());
  }
  for (std::size_t g = 0; g < problem.group(); ++g) {
    const std::size_t h = kv * problem.group() + g;
    std::vector<RowState> states(sequence.q_length);
    tbb::parallel_for(std::size_t{0}, query_tiles, [&](std::size_t tile) {
      const std::size_t first = tile * kBlockRows;
      const std::size_t count = std::min(kBlockRows, sequence.q_length - first);
      std::array<std::size_t, kBlockRows> rows{};
      for (std::size_t r = 0; r < count; ++r) rows[r] = first + r;
      head.query_tile(h, {rows.data(), count}, workspaces.local(), &states[first], sink);
      double pairs = 0;
      for (std::size_t r = 0; r < count; ++r) pairs += static_cast<double>(states[first + r].keys.size());
      counter(pairs);
    });
    if (problem.backward()) {
      queries.push_back(
          std::make_unique<QueryOperands>(head.q_words(h), head.dout_words(h), std::move(states)));
    }
  }
  if (!problem.backward()) return;
  const std::size_t key_tiles = (sequence.k_length + kBlockRows - 1) / kBlockRows;
  const double share = pairs_of_head * static_cast<double>(problem.group()) /
                       static_cast<double>(std::max<std::size_t>(1, key_tiles));
  tbb::parallel_for(std::size_t{0}, key_tiles, [&](std::size_t tile) {
    const std::size_t first = tile * kBlockRows;
    head.key_tile(first, std::min(kBlockRows, sequence.k_length - first), queries, workspaces.local(), sink);
    counter(share);
  });
}

}  // namespace

const char* fast_obstacle(const ProblemView& problem, std::size_t sequence, std::size_t head_kv) {
  return obstacle(problem, HeadExtents(problem, sequence, head_kv));
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
        whole_head(problem, constants, i / problem.heads_kv, i % problem.heads_kv, workspaces, counter, sink);
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
    const HeadExtents extents(problem, b, kv);
    if (obstacle(problem, extents) != nullptr) {
      plain_attention_rows(problem, mine, plain_bits(problem, extents), {}, sink);
      counter(static_cast<double>(mine.size()));
      continue;
    }
    const FastHead head(problem, constants, extents, b, kv);
    // Tiles of rows of one query head.
    std::vector<std::span<const RowId>> tiles;
    for (std::size_t i = 0; i < mine.size();) {
      std::size_t count = 0;
      while (count < kBlockRows && i + count < mine.size() && mine[i + count].head == mine[i].head) ++count;
      tiles.push_back(mine.subspan(i, count));
      i += count;
    }
    tbb::parallel_for(std::size_t{0}, tiles.size(), [&](std::size_t t) {
      std::array<std::size_t, kBlockRows> indices{};
      for (std::size_t r = 0; r < tiles[t].size(); ++r) indices[r] = tiles[t][r].row;
      head.query_tile(tiles[t].front().head, {indices.data(), tiles[t].size()}, workspaces.local(), nullptr,
                      sink);
      counter(static_cast<double>(tiles[t].size()));
    });
  }
}

}  // namespace bitattn::reference
