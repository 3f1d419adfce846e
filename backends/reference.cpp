#include "backends/reference.hpp"

#include <charconv>
#include <limits>

#include "datasets/error.hpp"
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
    keep(row.out, at * problem_.head_dim_v, result_.out, result_.uncast.out);
    keep(row.dq, at * problem_.head_dim, result_.dq, result_.uncast.dq);
    const std::size_t lse_at = problem_.row_index(row.id.sequence, row.id.head, row.id.row);
    result_.lse.data[lse_at] = reference::round_to_fp32(reference::raw(*row.lse));
    if (uncast_) result_.uncast.lse.data[lse_at] = reference::round_to_fp64(reference::raw(*row.lse));
  }

  void key_row(const reference::KeyRow& row) override {
    const std::size_t token = problem_.sequence(row.sequence).k_begin + row.key;
    const std::size_t at = token * problem_.heads_kv + row.head_kv;
    keep(row.dk, at * problem_.head_dim, result_.dk, result_.uncast.dk);
    keep(row.dv, at * problem_.head_dim_v, result_.dv, result_.uncast.dv);
  }

 private:
  void keep(std::span<const reference::Number> values, std::size_t at, Bf16Tensor& words,
            Fp64Tensor& uncast) const {
    for (std::size_t d = 0; d < values.size(); ++d) {
      words.data[at + d] = reference::round_to_bf16(reference::raw(values[d]));
      if (uncast_) uncast.data[at + d] = reference::round_to_fp64(reference::raw(values[d]));
    }
  }

  const Problem& problem_;
  bool uncast_;
  Result& result_;
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
  ReferenceBackend(std::string name, int bits) : name_(std::move(name)), bits_(bits) {}
  std::string name() const override { return name_; }

  Result run(const Capture& capture, const RunOptions& options) const override {
    const Problem& problem = capture.problem;
    const bool backward = !options.forward_only && !problem.dout.empty();
    Result result;
    result.backend = name_;
    ResultSink sink(problem, backward, options.want_uncast, result);
    reference::plain_attention(view(problem, backward), bits_, options.progress, sink);
    return result;
  }

 private:
  std::string name_;
  int bits_;
};

}  // namespace

std::unique_ptr<Backend> reference_backend(const std::string& name) {
  const std::size_t colon = name.find(':');
  if (colon == std::string::npos) return std::make_unique<ReferenceBackend>(name, reference::kDefaultBits);
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
