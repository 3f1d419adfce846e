#pragma once
// A problem as the plain-memory views that emu takes, and the progress of a run.

#include <atomic>
#include <vector>

#include "backends/backend.hpp"
#include "emu/kernels/attention.hpp"

namespace bitattn {

/// Owns what AttentionInputs only views. Keep it alive as long as the views.
struct ProblemViews {
  std::vector<kernels::Sequence> sequences;
  std::vector<std::ptrdiff_t>
      rows;  ///< first element of (sequence, query head) in a tensor of Problem::row_shape()
  kernels::AttentionInputs inputs;
};

/// What the kernel's choices (tiles, order) depend on.
profile::Call profile_call(const Problem& problem);

/// Views of `problem`; with_dout: the backward is wanted. Throws InputError where a length does not fit the
/// emulator's int.
void view_problem(const Problem& problem, bool with_dout, ProblemViews& views);

/// Turns (query, key) pairs done into a share of the whole, at most 1. Safe to call from any thread.
class PairProgress {
 public:
  PairProgress(const Problem& problem, int passes, const RunOptions& options);
  /// The callback for kernels::Execution; empty if nobody listens.
  std::function<void(std::int64_t)> callback();

 private:
  std::function<void(double)> report_;
  double total_ = 1;
  std::atomic<std::int64_t> done_{0};
};

/// Widens fp32 values before their cast to Result::uncast form.
Fp64Tensor widened(const std::vector<float>& values, const std::vector<std::size_t>& shape);

}  // namespace bitattn
