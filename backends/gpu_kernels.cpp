#include "backends/gpu_kernels.hpp"

#include <string>

#include "backends/attention_inputs.hpp"
#include "backends/fa3_support.hpp"
#include "datasets/error.hpp"
#include "emu/profile/flash3.hpp"
#include "gpu/common/buffer.hpp"
#include "gpu/kernels/bitattn_kernels.h"

namespace bitattn {

namespace {

void check_status(int status, const std::string& name) {
  if (status != BITATTN_KERNELS_OK) throw InputError(name + ": gpu:fa3: " + bitattn_kernels_message());
}

/// Refuses what the kernels do not have; what FlashAttention-3 itself refuses has been refused before.
BitattnCall supported_call(const Capture& capture) {
  check_fa3_supports(capture);
  const Problem& problem = capture.problem;
  const auto refuse = [&](const std::string& why) {
    throw InputError(capture.name + ": gpu:fa3 cannot run this: " + why);
  };
  if (problem.layout == Layout::thd) refuse("packed sequences (varlen) are not supported");
  if (problem.head_dim != 64 && problem.head_dim != 128) {
    refuse("head dim " + std::to_string(problem.head_dim) + ", the kernels have 64 and 128");
  }
  if (problem.head_dim_v != problem.head_dim) {
    refuse("head dim " + std::to_string(problem.head_dim_v) + " of v, the kernels want that of q, " +
           std::to_string(problem.head_dim));
  }
  if (problem.softcap > 0) refuse("softcap is not supported");
  ProblemViews views;
  view_problem(problem, false, views);
  const profile::Mask forward = profile::flash3_forward_tiles(views.inputs.call, profile::Profile{}).mask;
  const profile::Mask backward = profile::flash3_backward_tiles(views.inputs.call, profile::Profile{}).mask;
  if (forward.local || backward.local) refuse("a local window is not supported");
  BitattnCall call{};
  call.batch = static_cast<std::int32_t>(problem.batch);
  call.seqlen_q = static_cast<std::int32_t>(problem.seqlen_q);
  call.seqlen_k = static_cast<std::int32_t>(problem.seqlen_k);
  call.heads_q = static_cast<std::int32_t>(problem.heads_q);
  call.heads_kv = static_cast<std::int32_t>(problem.heads_kv);
  call.head_dim = static_cast<std::int32_t>(problem.head_dim);
  call.softmax_scale = problem.softmax_scale;
  call.causal = backward.causal ? 1 : 0;  // the forward's rule for one query is the kernels' own
  call.dq_left_to_right = problem.deterministic ? 0 : 1;
  return call;
}

/// Everything of one call on the GPU.
class Run {
 public:
  Run(const Capture& capture, const RunOptions& options)
      : capture_(capture), problem_(capture.problem), options_(options), call_(supported_call(capture)) {}

  Result run() {
    check_status(bitattn_kernels_check_device(), capture_.name);
    Result result;
    result.backend = "gpu:fa3";
    forward(result);
    if (!options_.forward_only && !problem_.dout.empty()) backward(result);
    return result;
  }

 private:
  using Words = gpu::Buffer<std::uint16_t>;
  using Floats = gpu::Buffer<float>;

  static BitattnTensor view(const Words& buffer, std::size_t tokens, std::size_t heads,
                            std::size_t head_dim) {
    const auto d = static_cast<std::int64_t>(head_dim);
    const auto token = static_cast<std::int64_t>(heads) * d;
    return {buffer.data(), static_cast<std::int64_t>(tokens) * token, token, d};
  }
  BitattnTensor query_view(const Words& buffer) const {
    return view(buffer, problem_.seqlen_q, problem_.heads_q, problem_.head_dim);
  }
  BitattnTensor key_view(const Words& buffer) const {
    return view(buffer, problem_.seqlen_k, problem_.heads_kv, problem_.head_dim);
  }
  /// Memory that starts as 0xff bytes, so that an element no kernel wrote would show.
  template <class T>
  static void poisoned(gpu::Buffer<T>& buffer, std::size_t size, const char* what) {
    buffer.allocate(size, what);
    buffer.fill_bytes(0xff, what);
  }
  template <class T>
  static Tensor<T> fetch(const gpu::Buffer<T>& buffer, const std::vector<std::size_t>& shape,
                         const char* what) {
    Tensor<T> tensor(shape);
    buffer.download(tensor.data.data(), tensor.size(), what);
    return tensor;
  }
  void report(double share) const {
    if (options_.progress) options_.progress(share);
  }

  void forward(Result& result) {
    q_.upload(problem_.q.data, "q");
    k_.upload(problem_.k.data, "k");
    v_.upload(problem_.v.data, "v");
    const auto size = [](const std::vector<std::size_t>& shape) {
      std::size_t n = 1;
      for (const std::size_t d : shape) n *= d;
      return n;
    };
    poisoned(out_, size(problem_.out_shape()), "out");
    poisoned(lse_, size(problem_.row_shape()), "lse");
    check_status(bitattn_kernels_forward(&call_, query_view(q_), key_view(k_), key_view(v_), query_view(out_),
                                         lse_.data(), nullptr),
                 capture_.name);
    result.out = fetch(out_, problem_.out_shape(), "out");
    result.lse = fetch(lse_, problem_.row_shape(), "lse");
    report(options_.forward_only || problem_.dout.empty() ? 1.0 : 0.3);
  }

  void backward(Result& result) {
    const std::size_t padded_q = static_cast<std::size_t>(bitattn_kernels_padded_q(&call_));
    const std::size_t padded_k = static_cast<std::size_t>(bitattn_kernels_padded_k(&call_));
    const std::vector<std::size_t> rows{problem_.batch, problem_.heads_q, padded_q};
    const std::vector<std::size_t> q_accum{problem_.batch, problem_.heads_q, padded_q, problem_.head_dim};
    const std::vector<std::size_t> k_accum{problem_.batch, problem_.heads_kv, padded_k, problem_.head_dim};
    const Intermediates& recorded = capture_.recorded.intermediates;
    // Without keys the library's host code fills in zeros and runs no kernel: nothing is left in between.
    const bool leaves = problem_.total_k() > 0;
    const bool want_dq = leaves && (options_.want_accumulators || !recorded.dq_accum.empty());
    const bool want_dkv =
        leaves && problem_.group() > 1 &&
        (options_.want_accumulators || !recorded.dk_accum.empty() || !recorded.dv_accum.empty());

    dout_.upload(problem_.dout.data, "dout");
    Words dq;
    Words dk;
    Words dv;
    poisoned(dq, problem_.q.size(), "dq");
    poisoned(dk, problem_.k.size(), "dk");
    poisoned(dv, problem_.v.size(), "dv");
    Floats dpsum;
    Floats lse_log2;
    Floats dq_accum;
    Floats dk_accum;
    Floats dv_accum;
    const std::size_t row_count = problem_.batch * problem_.heads_q * padded_q;
    const std::size_t key_count = problem_.batch * problem_.heads_kv * padded_k;
    if (leaves) {
      poisoned(dpsum, row_count, "dpsum");
      poisoned(lse_log2, row_count, "lse_log2");
    }
    if (want_dq) poisoned(dq_accum, row_count * problem_.head_dim, "dq_accum");
    if (want_dkv) {  // the library's host code clears these; without queries no kernel adds to them
      const int byte = problem_.total_q() > 0 ? 0xff : 0;
      dk_accum.allocate(key_count * problem_.head_dim, "dk_accum");
      dv_accum.allocate(key_count * problem_.head_dim, "dv_accum");
      dk_accum.fill_bytes(byte, "dk_accum");
      dv_accum.fill_bytes(byte, "dv_accum");
    }
    gpu::Buffer<unsigned char> workspace;
    poisoned(workspace, bitattn_kernels_backward_workspace(&call_), "the backward's workspace");
    const BitattnIntermediates keep{dpsum.data(), lse_log2.data(), dq_accum.data(), dk_accum.data(),
                                    dv_accum.data()};
    check_status(
        bitattn_kernels_backward(&call_, query_view(q_), key_view(k_), key_view(v_), query_view(out_),
                                 lse_.data(), query_view(dout_), query_view(dq), key_view(dk), key_view(dv),
                                 workspace.data(), workspace.size(), &keep, nullptr),
        capture_.name);
    result.dq = fetch(dq, problem_.q_shape(), "dq");
    result.dk = fetch(dk, problem_.k_shape(), "dk");
    result.dv = fetch(dv, problem_.v_shape(), "dv");
    if (leaves) {
      result.intermediates.dpsum = fetch(dpsum, rows, "dpsum");
      result.intermediates.lse_log2 = fetch(lse_log2, rows, "lse_log2");
    }
    if (want_dq) result.intermediates.dq_accum = fetch(dq_accum, q_accum, "dq_accum");
    if (want_dkv) {
      result.intermediates.dk_accum = fetch(dk_accum, k_accum, "dk_accum");
      result.intermediates.dv_accum = fetch(dv_accum, k_accum, "dv_accum");
    }
    report(1.0);
  }

  const Capture& capture_;
  const Problem& problem_;
  const RunOptions& options_;
  BitattnCall call_;
  Words q_, k_, v_, out_, dout_;
  Floats lse_;
};

class GpuKernelsBackend final : public Backend {
 public:
  std::string name() const override { return "gpu:fa3"; }

  Result run(const Capture& capture, const RunOptions& options) const override {
    try {
      Result result = Run(capture, options).run();
      if (!capture.problem.deterministic) {
        result.notes.push_back(
            "dq: FlashAttention-3 fixes no order of key blocks; here they are added from left to right");
      }
      if (options.want_uncast) result.notes.push_back("gpu:fa3 keeps no values from before their last cast");
      return result;
    } catch (const gpu::Error& error) {
      throw InputError(capture.name + ": gpu:fa3: " + error.what());
    }
  }
};

}  // namespace

std::unique_ptr<Backend> gpu_kernels_backend() {
  return std::make_unique<GpuKernelsBackend>();
}

}  // namespace bitattn
