#include "backends/reference.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <mutex>

#include "datasets/error.hpp"
#include "reference/fast_attention.hpp"
#include "reference/plain_attention.hpp"

namespace bitattn {

namespace {

/// Finished rows into the tensors of a result; every row has its own place, so no lock is needed.
class ResultSink final : public reference::Sink {
 public:
  ResultSink(const Problem& problem, bool backward, bool want_uncast, Result& result)
      : problem_(problem), uncast_(want_uncast), result_(result) {
    result.out = Bf16Tensor(problem.out_shape());
    result.lse = Fp32Tensor(problem.row_shape(), -std::numeric_limits<float>::infinity());
    if (backward) {
      result.dq = Bf16Tensor(problem.q_shape());
      result.dk = Bf16Tensor(problem.k_shape());
      result.dv = Bf16Tensor(problem.v_shape());
    }
    if (!want_uncast) return;
    result.uncast.out = Fp64Tensor(result.out.shape);
    result.uncast.lse = Fp64Tensor(result.lse.shape, -std::numeric_limits<double>::infinity());
    if (!backward) return;
    result.uncast.dq = Fp64Tensor(result.dq.shape);
    result.uncast.dk = Fp64Tensor(result.dk.shape);
    result.uncast.dv = Fp64Tensor(result.dv.shape);
  }

  void query_row(const reference::QueryRow& row) override {
    const std::size_t token = problem_.sequence(row.id.sequence).q_begin + row.id.row;
    const std::size_t at = token * problem_.heads_q + row.id.head;
    keep(row.out, row.out_bound, at * problem_.head_dim_v, result_.out, result_.uncast.out, out_);
    keep(row.dq, row.dq_bound, at * problem_.head_dim, result_.dq, result_.uncast.dq, dq_);
    const std::size_t lse_at = problem_.row_index(row.id.sequence, row.id.head, row.id.row);
    result_.lse.data[lse_at] = reference::round_to_fp32(reference::raw(*row.lse));
    if (uncast_) result_.uncast.lse.data[lse_at] = reference::round_to_fp64(reference::raw(*row.lse));
  }

  void key_row(const reference::KeyRow& row) override {
    const std::size_t token = problem_.sequence(row.sequence).k_begin + row.key;
    const std::size_t at = token * problem_.heads_kv + row.head_kv;
    keep(row.dk, row.dk_bound, at * problem_.head_dim, result_.dk, result_.uncast.dk, dk_);
    keep(row.dv, row.dv_bound, at * problem_.head_dim_v, result_.dv, result_.uncast.dv, dv_);
  }

  /// How good the result is, for whoever reads it.
  void note_bounds(bool backward) const {
    note("out", out_);
    if (!backward) return;
    note("dq", dq_);
    note("dk", dk_);
    note("dv", dv_);
  }

 private:
  /// What the proven bounds of a tensor come to.
  struct Quality {
    double bound = 0;           ///< the largest
    double value = 0;           ///< the largest magnitude
    std::size_t undecided = 0;  ///< BF16 words that the bound leaves open between two neighbours
    std::size_t unbounded = 0;  ///< elements without a claim
  };

  void keep(std::span<const reference::Number> values, std::span<const double> bounds, std::size_t at,
            Bf16Tensor& words, Fp64Tensor& uncast, Quality& quality) {
    Quality row;
    for (std::size_t d = 0; d < values.size(); ++d) {
      const mpfr_srcptr value = reference::raw(values[d]);
      words.data[at + d] = reference::round_to_bf16(value);
      const double nearest = reference::round_to_fp64(value);
      if (uncast_) uncast.data[at + d] = nearest;
      if (!std::isfinite(nearest) || !std::isfinite(bounds[d])) {
        ++row.unbounded;
        continue;
      }
      row.bound = std::max(row.bound, bounds[d]);
      row.value = std::max(row.value, std::abs(nearest));
      if (!reference::bf16_decided(value, bounds[d])) ++row.undecided;
    }
    const std::lock_guard lock(mutex_);
    quality.bound = std::max(quality.bound, row.bound);
    quality.value = std::max(quality.value, row.value);
    quality.undecided += row.undecided;
    quality.unbounded += row.unbounded;
  }

  void note(const char* tensor, const Quality& quality) const {
    std::array<char, 160> text{};
    std::snprintf(text.data(), text.size(),
                  "%s: proven error at most %.2g, largest value %.2g; BF16 words left open: %zu", tensor,
                  quality.bound, quality.value, quality.undecided);
    std::string line = text.data();
    if (quality.unbounded > 0) line += "; without a claim: " + std::to_string(quality.unbounded);
    result_.notes.push_back(std::move(line));
  }

  const Problem& problem_;
  bool uncast_;
  Result& result_;
  std::mutex mutex_;
  Quality out_, dq_, dk_, dv_;
};

reference::ProblemView view(const Problem& problem, bool backward) {
  const auto tensor = [](const Bf16Tensor& t, std::size_t stride, std::size_t dim) {
    return reference::TensorView{t.data.data(), static_cast<std::ptrdiff_t>(stride),
                                 static_cast<std::ptrdiff_t>(dim)};
  };
  reference::ProblemView p;
  p.q = tensor(problem.q, problem.q_stride(), problem.head_dim);
  p.k = tensor(problem.k, problem.k_stride(), problem.head_dim);
  p.v = tensor(problem.v, problem.v_stride(), problem.head_dim_v);
  if (backward) p.dout = tensor(problem.dout, problem.out_stride(), problem.head_dim_v);
  for (std::size_t b = 0; b < problem.batch; ++b) {
    const SequenceSpan s = problem.sequence(b);
    p.sequences.push_back({s.q_begin, s.q_length, s.k_begin, s.k_length});
  }
  p.heads_q = problem.heads_q;
  p.heads_kv = problem.heads_kv;
  p.head_dim = problem.head_dim;
  p.head_dim_v = problem.head_dim_v;
  p.softmax_scale = problem.softmax_scale;
  p.softcap = problem.softcap;
  p.causal = problem.causal;
  p.top_left = problem.causal_alignment == CausalAlignment::top_left;
  p.window_left = problem.window_left;
  p.window_right = problem.window_right;
  return p;
}

class ReferenceBackend final : public Backend {
 public:
  /// bits 0: the fast reference; else every operation in MPFR.
  ReferenceBackend(std::string name, int bits) : name_(std::move(name)), bits_(bits) {}
  std::string name() const override { return name_; }

  Result run(const Capture& capture, const RunOptions& options) const override {
    const Problem& problem = capture.problem;
    const bool backward = !options.forward_only && !problem.dout.empty();
    Result result;
    result.backend = name_;
    ResultSink sink(problem, backward, options.want_uncast, result);
    const reference::ProblemView inputs = view(problem, backward);
    if (bits_ == 0) {
      reference::fast_attention(inputs, options.progress, sink);
    } else {
      reference::plain_attention(inputs, bits_, options.progress, sink);
    }
    sink.note_bounds(backward);
    return result;
  }

 private:
  std::string name_;
  int bits_;
};

/// Chosen rows to their places in a vector.
class RowsSink final : public reference::Sink {
 public:
  RowsSink(const Problem& problem, std::vector<ReferenceRow>& rows) : problem_(problem), rows_(rows) {
    for (std::size_t i = 0; i < rows.size(); ++i) places_[key(rows[i].name)].push_back(i);
  }

  void query_row(const reference::QueryRow& row) override {
    ReferenceRow values;
    values.name = {row.id.sequence, row.id.head, row.id.row};
    const auto take = [](std::span<const reference::Number> from, std::vector<double>& to) {
      to.resize(from.size());
      for (std::size_t d = 0; d < from.size(); ++d) to[d] = reference::round_to_fp64(reference::raw(from[d]));
    };
    take(row.out, values.out);
    take(row.dq, values.dq);
    values.out_bound.assign(row.out_bound.begin(), row.out_bound.end());
    values.dq_bound.assign(row.dq_bound.begin(), row.dq_bound.end());
    values.lse = reference::round_to_fp64(reference::raw(*row.lse));
    values.lse_bound = row.lse_bound;
    // A row that was asked for twice is computed twice, by whichever thread; both write the same, in turn.
    const std::lock_guard lock(mutex_);
    for (const std::size_t place : places_.at(key(values.name))) rows_[place] = values;
  }

 private:
  std::size_t key(const RowName& name) const {
    return problem_.row_index(name.sequence, name.head, name.row);
  }

  const Problem& problem_;
  std::vector<ReferenceRow>& rows_;
  std::map<std::size_t, std::vector<std::size_t>> places_;
  std::mutex mutex_;
};

}  // namespace

std::vector<ReferenceRow> reference_rows(const Problem& problem, std::span<const RowName> rows,
                                         const std::function<void(double)>& progress) {
  std::vector<ReferenceRow> result(rows.size());
  std::vector<reference::RowId> ids;
  ids.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const RowName& name = rows[i];
    if (name.sequence >= problem.batch || name.head >= problem.heads_q ||
        name.row >= problem.sequence(name.sequence).q_length) {
      throw InputError("no row " + std::to_string(name.row) + " of query head " + std::to_string(name.head) +
                       " in sequence " + std::to_string(name.sequence));
    }
    result[i].name = name;
    ids.push_back({name.sequence, name.head, name.row});
  }
  RowsSink sink(problem, result);
  reference::fast_attention_rows(view(problem, !problem.dout.empty()), ids, progress, sink);
  return result;
}

std::unique_ptr<Backend> reference_backend(const std::string& name) {
  const std::size_t colon = name.find(':');
  if (colon == std::string::npos) return std::make_unique<ReferenceBackend>(name, 0);
  int bits = 0;
  const char* const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + colon + 1, end, bits);
  if (error != std::errc{} || stop != end || bits < reference::kMinBits || bits > reference::kMaxBits) {
    throw InputError("'" + name + "': the precision of the reference is a number of bits from " +
                     std::to_string(reference::kMinBits) + " to " + std::to_string(reference::kMaxBits));
  }
  return std::make_unique<ReferenceBackend>(name, bits);
}

}  // namespace bitattn
