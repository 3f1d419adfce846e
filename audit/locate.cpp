#include "audit/locate.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "audit/compensated_sum.hpp"
#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32_ftz.hpp"

namespace bitattn::audit {

namespace {

constexpr std::size_t kStep = 64;  ///< keys between two stored sums
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool is_finite_bf16(std::uint16_t word) {
  return (word & 0x7f80U) != 0x7f80U;
}

double norm(const double* x, std::size_t n) {
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return std::sqrt(sum);
}

/// Part of a row's visible keys that lies in [begin, begin + count), relative to begin.
struct Span {
  int first, last;
};
Span clip(KeyRange range, int begin, int count) {
  const std::int64_t first = std::clamp<std::int64_t>(range.first - begin, 0, count);
  const std::int64_t last = std::clamp<std::int64_t>(range.last - begin, first, count);
  return {static_cast<int>(first), static_cast<int>(last)};
}

/// What one row's sums over its visible keys are made of.
struct RowSums {
  CompensatedSum p, g, before, eta, beta;
};

}  // namespace

float row_max_residue(float m, float scale_log2) {
  const float rounded = arith::ftz::mul(m, scale_log2);
  return arith::ftz::fma(m, scale_log2, arith::from_bits(arith::to_bits(rounded) ^ arith::kSignBit));
}

RowLocator::RowLocator(const Problem& problem, const Options& options)
    : problem_(problem), options_(options), leak_dk_locks_(problem.batch * problem.heads_kv) {
  const std::vector<std::size_t> shape = problem.row_shape();
  const float no_key = -std::numeric_limits<float>::infinity();
  const float undefined = arith::from_bits(arith::kQuietNan);
  RowFindings& f = findings_;
  f.row_max = Fp32Tensor(shape, no_key);
  f.row_sum = Fp32Tensor(shape, 0.0F);
  f.tied_maxima = Tensor<std::uint32_t>(shape);
  for (Fp32Tensor* t : {&f.row_max_residue, &f.largest_block_residue, &f.dpsum, &f.lse_log2}) {
    *t = Fp32Tensor(shape, undefined);
  }
  for (Fp64Tensor* t : {&f.p_sum_excess, &f.before_cast, &f.after_cast, &f.g_minus_d, &f.d_p_excess, &f.eta,
                        &f.beta, &f.leak, &f.leak_mean_key, &f.uncancelled}) {
    *t = Fp64Tensor(shape, kNan);
  }
  if (!problem.dout.empty()) f.leak_dk = Fp64Tensor(problem.k_shape(), 0.0);
  for (std::size_t b = 0; b < problem.batch; ++b) {
    for (std::size_t h = 0; h < problem.heads_kv; ++h) key_sums_.push_back(sum_keys(b, h));
  }
}

RowLocator::KeySums RowLocator::sum_keys(std::size_t sequence, std::size_t kv_head) const {
  const SequenceSpan span = problem_.sequence(sequence);
  const std::size_t dim = problem_.head_dim;
  KeySums keys;
  keys.sums.assign((span.k_length / kStep + 1) * dim, 0.0);
  keys.not_finite.assign(span.k_length + 1, 0);
  std::vector<double> running(dim, 0.0);
  for (std::size_t j = 0; j < span.k_length; ++j) {
    if (j % kStep == 0)
      std::copy(running.begin(), running.end(),
                keys.sums.begin() + static_cast<std::ptrdiff_t>(j / kStep * dim));
    const std::uint16_t* k =
        problem_.k.data.data() + (span.k_begin + j) * problem_.k_stride() + kv_head * dim;
    const bool finite = std::all_of(k, k + dim, is_finite_bf16);
    keys.not_finite[j + 1] = keys.not_finite[j] + (finite ? 0U : 1U);
    if (!finite) continue;
    for (std::size_t d = 0; d < dim; ++d) running[d] += static_cast<double>(arith::fp32_from_bf16(k[d]));
  }
  if (span.k_length % kStep == 0) {
    std::copy(running.begin(), running.end(), keys.sums.end() - static_cast<std::ptrdiff_t>(dim));
  }
  return keys;
}

double RowLocator::mean_key_norm(std::size_t sequence, std::size_t kv_head, KeyRange range) const {
  const KeySums& keys = key_sums_[sequence * problem_.heads_kv + kv_head];
  const auto first = static_cast<std::size_t>(range.first);
  const auto last = static_cast<std::size_t>(range.last);
  if (keys.not_finite[last] != keys.not_finite[first]) return kNan;
  const std::size_t dim = problem_.head_dim;
  const SequenceSpan span = problem_.sequence(sequence);
  std::vector<double> mean(dim, 0.0);
  // The sum up to a key: the last stored one and the keys since.
  const auto add_up_to = [&](std::size_t key, double sign) {
    const std::size_t step = key / kStep;
    for (std::size_t d = 0; d < dim; ++d) mean[d] += sign * keys.sums[step * dim + d];
    for (std::size_t j = step * kStep; j < key; ++j) {
      if (keys.not_finite[j + 1] != keys.not_finite[j]) continue;
      const std::uint16_t* k =
          problem_.k.data.data() + (span.k_begin + j) * problem_.k_stride() + kv_head * dim;
      for (std::size_t d = 0; d < dim; ++d)
        mean[d] += sign * static_cast<double>(arith::fp32_from_bf16(k[d]));
    }
  };
  add_up_to(last, 1.0);
  if (first > 0) add_up_to(first, -1.0);
  return norm(mean.data(), dim) / static_cast<double>(last - first);
}

void RowLocator::allocate_block_residues(std::size_t keys_of_block) {
  std::call_once(block_residues_allocated_, [&] {
    std::vector<std::size_t> shape = problem_.row_shape();
    shape.push_back((problem_.seqlen_k + keys_of_block - 1) / keys_of_block);
    findings_.block_residues = Fp32Tensor(shape, arith::from_bits(arith::kQuietNan));
  });
}

void RowLocator::forward_block(const kernels::ForwardBlock& block) {
  const auto sequence = static_cast<std::size_t>(block.id.sequence);
  const SequenceSpan span = problem_.sequence(sequence);
  if (options_.block_residues) allocate_block_residues(static_cast<std::size_t>(block.keys));
  RowFindings& f = findings_;
  for (int r = 0; r < block.rows; ++r) {
    const int i = block.row_begin + r;
    const std::size_t index =
        problem_.row_index(sequence, static_cast<std::size_t>(block.id.head), static_cast<std::size_t>(i));
    const KeyRange range = visible_keys(problem_, i, static_cast<std::int64_t>(span.q_length),
                                        static_cast<std::int64_t>(span.k_length));
    const float m = block.row_max[r];
    std::uint32_t tied = block.first || f.row_max.data[index] != m ? 0 : f.tied_maxima.data[index];
    const Span keys = clip(range, block.key_begin, block.keys);
    const float* scores = block.scores + r * block.row_stride;
    for (int j = keys.first; j < keys.last; ++j) tied += arith::ftz::in(scores[j]) == m ? 1U : 0U;
    f.row_max.data[index] = m;
    f.tied_maxima.data[index] = tied;
    const float residue = row_max_residue(m, block.scale_log2);
    float& largest = f.largest_block_residue.data[index];
    if (block.first || (!std::isnan(residue) && !(std::abs(largest) >= std::abs(residue)))) largest = residue;
    if (options_.block_residues && keys.first < keys.last) {
      const std::size_t blocks = f.block_residues.shape.back();
      f.block_residues.data[index * blocks + static_cast<std::size_t>(block.key_begin) /
                                                 static_cast<std::size_t>(block.keys)] = residue;
    }
  }
}

void RowLocator::forward_rows(const kernels::ForwardRows& rows) {
  RowFindings& f = findings_;
  std::call_once(scale_known_, [&] { f.scale_log2 = rows.scale_log2; });
  for (int r = 0; r < rows.rows; ++r) {
    const std::size_t index =
        problem_.row_index(static_cast<std::size_t>(rows.id.sequence), static_cast<std::size_t>(rows.id.head),
                           static_cast<std::size_t>(rows.row_begin) + static_cast<std::size_t>(r));
    f.row_max.data[index] = rows.row_max[r];
    f.row_sum.data[index] = rows.row_sum[r];
    f.row_max_residue.data[index] = row_max_residue(rows.row_max[r], rows.scale_log2);
  }
}

void RowLocator::backward_rows(const kernels::BackwardRows& rows) {
  const auto sequence = static_cast<std::size_t>(rows.id.sequence);
  const auto head = static_cast<std::size_t>(rows.id.head);
  const std::size_t kv_head = head / std::max<std::size_t>(1, problem_.group());
  const SequenceSpan span = problem_.sequence(sequence);
  const std::size_t dim = problem_.head_dim;
  const bool softcap = problem_.softcap > 0;
  const auto count = static_cast<std::size_t>(rows.rows);
  RowFindings& f = findings_;

  std::vector<KeyRange> visible(count);
  std::vector<RowSums> sums(count);
  std::vector<double> consistent_d(count, 0.0);
  std::vector<double> drift(count, 0.0);
  std::vector<bool> usable(count, false);           // sees keys, and its sums are finite
  std::vector<double> leaking_q(count * dim, 0.0);  // softmax_scale * R_i / sum_j P' * Q_i
  for (std::size_t r = 0; r < count; ++r) {
    const int i = rows.row_begin + static_cast<int>(r);
    visible[r] = visible_keys(problem_, i, static_cast<std::int64_t>(span.q_length),
                              static_cast<std::int64_t>(span.k_length));
    if (visible[r].first >= visible[r].last) continue;
    const Span keys = clip(visible[r], rows.key_begin, rows.keys);
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(r) * rows.row_stride;
    const double d = static_cast<double>(rows.dpsum[r]);
    RowSums& s = sums[r];
    for (std::ptrdiff_t j = at + keys.first; j < at + keys.last; ++j) {
      const double p = static_cast<double>(rows.p[j]);
      const double dp = static_cast<double>(rows.dp[j]);
      const double ds = static_cast<double>(softcap ? rows.ds_softcap[j] : rows.ds[j]);
      s.p.add(p);
      s.g.add(p * dp);  // exact: two significands of 24 bits
      s.before.add(ds);
      // ds - P (dP - D): the difference as a sum of two doubles without error, the products exact enough for
      // one rounding.
      const double difference = dp - d;
      const double taken = dp - difference;
      const double lost = (dp - (difference + taken)) + (taken - d);
      s.eta.add(std::fma(-p, difference, ds) - p * lost);
      if (!softcap) s.beta.add(static_cast<double>(arith::fp32_from_bf16(rows.ds_bf16[j])) - ds);
    }
    consistent_d[r] = s.g.total() / s.p.total();
    CompensatedSum after = s.before;
    if (!softcap) after.add(s.beta.total());
    drift[r] = after.total();
    const double share = problem_.softmax_scale * drift[r] / s.p.total();
    usable[r] = std::isfinite(share);
    if (!usable[r]) continue;
    const std::uint16_t* q = problem_.q.data.data() +
                             (span.q_begin + static_cast<std::size_t>(i)) * problem_.q_stride() + head * dim;
    for (std::size_t d_q = 0; d_q < dim; ++d_q) {
      leaking_q[r * dim + d_q] = share * static_cast<double>(arith::fp32_from_bf16(q[d_q]));
    }
  }

  // Keys weighted with P', and with |dS|, a chunk of keys at a time.
  std::vector<double> weighted(count * dim, 0.0);
  std::vector<double> magnitudes(count * dim, 0.0);
  std::vector<double> chunk(kStep * dim);
  const std::lock_guard lock(leak_dk_locks_[sequence * problem_.heads_kv + kv_head]);
  std::int64_t begin = rows.keys;
  std::int64_t end = 0;
  for (const KeyRange& range : visible) {
    const Span keys = clip(range, rows.key_begin, rows.keys);
    if (keys.first >= keys.last) continue;
    begin = std::min<std::int64_t>(begin, keys.first);
    end = std::max<std::int64_t>(end, keys.last);
  }
  for (std::int64_t first = begin; first < end; first += static_cast<std::int64_t>(kStep)) {
    const std::int64_t last = std::min(end, first + static_cast<std::int64_t>(kStep));
    for (std::int64_t j = first; j < last; ++j) {
      const std::size_t token = span.k_begin + static_cast<std::size_t>(rows.key_begin + j);
      const std::uint16_t* k = problem_.k.data.data() + token * problem_.k_stride() + kv_head * dim;
      double* row = chunk.data() + static_cast<std::size_t>(j - first) * dim;
      for (std::size_t d = 0; d < dim; ++d) row[d] = static_cast<double>(arith::fp32_from_bf16(k[d]));
    }
    for (std::size_t r = 0; r < count; ++r) {
      if (!usable[r]) continue;
      const Span keys = clip(visible[r], rows.key_begin, rows.keys);
      const std::int64_t from = std::max<std::int64_t>(first, keys.first);
      const std::int64_t to = std::min<std::int64_t>(last, keys.last);
      double* w = weighted.data() + r * dim;
      double* m = magnitudes.data() + r * dim;
      const double* q = leaking_q.data() + r * dim;
      for (std::int64_t j = from; j < to; ++j) {
        const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(r) * rows.row_stride + j;
        double weight = static_cast<double>(rows.p[at]);
        if (softcap) {
          // An error of D enters dS_ij as -P_ij (1 - tanh^2) times it: the key is averaged with that.
          const double t = static_cast<double>(rows.s[at]);
          weight *= 1 - t * t;
        }
        if (weight == 0) continue;
        const double magnitude = std::abs(weight * (static_cast<double>(rows.dp[at]) - consistent_d[r]));
        const double* k = chunk.data() + static_cast<std::size_t>(j - first) * dim;
        const std::size_t token = span.k_begin + static_cast<std::size_t>(rows.key_begin + j);
        double* dk = f.leak_dk.data.data() + token * problem_.k_stride() + kv_head * dim;
        for (std::size_t d = 0; d < dim; ++d) {
          w[d] += weight * k[d];
          m[d] += magnitude * std::abs(k[d]);
          dk[d] += weight * q[d];
        }
      }
    }
  }

  for (std::size_t r = 0; r < count; ++r) {
    if (visible[r].first >= visible[r].last) continue;
    const std::size_t index =
        problem_.row_index(sequence, head, static_cast<std::size_t>(rows.row_begin) + r);
    const RowSums& s = sums[r];
    const double d = static_cast<double>(rows.dpsum[r]);
    f.dpsum.data[index] = rows.dpsum[r];
    f.lse_log2.data[index] = rows.lse_log2[r];
    f.p_sum_excess.data[index] = s.p.minus(1);
    f.before_cast.data[index] = s.before.total();
    f.g_minus_d.data[index] = s.g.minus(d);
    f.d_p_excess.data[index] = d * s.p.minus(1);
    f.eta.data[index] = s.eta.total();
    if (!softcap) {
      f.after_cast.data[index] = drift[r];
      f.beta.data[index] = s.beta.total();
    }
    const double scale = problem_.softmax_scale;
    const double size = std::abs(drift[r]);
    f.leak.data[index] = scale * size * norm(weighted.data() + r * dim, dim) / s.p.total();
    f.leak_mean_key.data[index] = scale * size * mean_key_norm(sequence, kv_head, visible[r]);
    if (usable[r]) f.uncancelled.data[index] = scale * norm(magnitudes.data() + r * dim, dim);
  }
}

namespace {

template <class T>
RowStatistics statistics(const Problem& problem, const Tensor<T>& values, int head) {
  RowStatistics s;
  double squares = 0;
  for_each_row_with_keys(problem, [&](std::size_t, std::size_t h, std::size_t, std::size_t index) {
    if (head >= 0 && h != static_cast<std::size_t>(head)) return;
    const double x = static_cast<double>(values.data[index]);
    if (!std::isfinite(x)) {
      ++s.not_finite;
      return;
    }
    ++s.rows;
    squares += x * x;
    if (x != 0) ++s.nonzero;
    if (std::abs(x) > s.largest || s.rows == 1) {
      s.largest = std::abs(x);
      s.largest_at = index;
    }
  });
  s.rms = s.rows > 0 ? std::sqrt(squares / static_cast<double>(s.rows)) : kNan;
  if (s.rows == 0) s.largest = kNan;
  return s;
}

}  // namespace

RowStatistics row_statistics(const Problem& problem, const Fp64Tensor& values, int head) {
  return statistics(problem, values, head);
}
RowStatistics row_statistics(const Problem& problem, const Fp32Tensor& values, int head) {
  return statistics(problem, values, head);
}

}  // namespace bitattn::audit
