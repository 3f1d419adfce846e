#include "backends/attention_inputs.hpp"

#include <algorithm>
#include <limits>

#include "datasets/error.hpp"

namespace bitattn {

profile::Call profile_call(const Problem& problem) {
  profile::Call call;
  call.head_dim = static_cast<int>(problem.head_dim);
  call.head_dim_v = static_cast<int>(problem.head_dim_v);
  call.heads_q = static_cast<int>(problem.heads_q);
  call.heads_kv = static_cast<int>(problem.heads_kv);
  call.seqlen_q = static_cast<int>(problem.seqlen_q);
  call.seqlen_k = static_cast<int>(problem.seqlen_k);
  call.varlen = problem.layout == Layout::thd;
  call.softmax_scale = problem.softmax_scale;
  call.causal = problem.causal;
  call.window_left = problem.window_left;
  call.window_right = problem.window_right;
  call.softcap = problem.softcap;
  call.deterministic = problem.deterministic;
  return call;
}

void view_problem(const Problem& problem, bool with_dout, ProblemViews& views) {
  constexpr std::size_t kMost = std::numeric_limits<int>::max() / 4;
  if (problem.total_q() > kMost || problem.total_k() > kMost) {
    throw InputError("more tokens than the emulator can index: " + std::to_string(problem.total_q()) +
                     " queries, " + std::to_string(problem.total_k()) + " keys");
  }
  kernels::AttentionInputs& in = views.inputs;
  in.call = profile_call(problem);
  views.sequences.clear();
  views.rows.clear();
  for (std::size_t b = 0; b < problem.batch; ++b) {
    const SequenceSpan span = problem.sequence(b);
    views.sequences.push_back({static_cast<int>(span.q_begin), static_cast<int>(span.q_length),
                               static_cast<int>(span.k_begin), static_cast<int>(span.k_length)});
    for (std::size_t h = 0; h < problem.heads_q; ++h) {
      views.rows.push_back(static_cast<std::ptrdiff_t>(problem.row_index(b, h, 0)));
    }
  }
  in.sequences = views.sequences;
  in.total_q = static_cast<int>(problem.total_q());
  in.total_k = static_cast<int>(problem.total_k());
  in.q = problem.q.data.data();
  in.k = problem.k.data.data();
  in.v = problem.v.data.data();
  in.dout = with_dout ? problem.dout.data.data() : nullptr;
}

PairProgress::PairProgress(const Problem& problem, int passes, const RunOptions& options)
    : report_(options.progress) {
  if (!report_) return;
  double pairs = 0;
  for (std::size_t b = 0; b < problem.batch; ++b) {
    const SequenceSpan span = problem.sequence(b);
    const auto sq = static_cast<std::int64_t>(span.q_length);
    const auto sk = static_cast<std::int64_t>(span.k_length);
    for (std::int64_t i = 0; i < sq; ++i) {
      const KeyRange range = visible_keys(problem, i, sq, sk);
      pairs += static_cast<double>(std::max<std::int64_t>(0, range.last - range.first));
    }
  }
  total_ = std::max(1.0, pairs * static_cast<double>(problem.heads_q) * passes);
}

std::function<void(std::int64_t)> PairProgress::callback() {
  if (!report_) return {};
  // Tiles on a mask's edge hold hidden pairs too, so the count may run past the whole: never report more than
  // all.
  return [this](std::int64_t pairs) { report_(std::min(1.0, static_cast<double>(done_ += pairs) / total_)); };
}

Fp64Tensor widened(const std::vector<float>& values, const std::vector<std::size_t>& shape) {
  Fp64Tensor out;
  out.shape = shape;
  out.data.assign(values.begin(), values.end());
  return out;
}

}  // namespace bitattn
