#include "backends/fp32.hpp"

#include <vector>

#include "backends/attention_inputs.hpp"
#include "emu/kernels/fp32_attention.hpp"

namespace bitattn {

namespace {

class Fp32Backend final : public Backend {
 public:
  std::string name() const override { return "fp32"; }

  Result run(const Capture& capture, const RunOptions& options) const override {
    const Problem& problem = capture.problem;
    const bool with_backward = !options.forward_only && !problem.dout.empty();
    ProblemViews views;
    view_problem(problem, with_backward, views);
    PairProgress progress(problem, 1, options);
    kernels::Execution execution;
    execution.advance = progress.callback();

    Result result;
    result.backend = name();
    result.out = Bf16Tensor(problem.out_shape());
    result.lse = Fp32Tensor(problem.row_shape());
    std::vector<float> out(result.out.size());
    std::vector<float> dq;
    std::vector<float> dk;
    std::vector<float> dv;
    kernels::ForwardOutputs forward;
    forward.out = result.out.data.data();
    forward.out_uncast = out.data();
    forward.lse = result.lse.data.data();
    forward.rows = views.rows;
    kernels::BackwardOutputs backward;
    if (with_backward) {
      result.dq = Bf16Tensor(problem.q_shape());
      result.dk = Bf16Tensor(problem.k_shape());
      result.dv = Bf16Tensor(problem.v_shape());
      dq.resize(result.dq.size());
      dk.resize(result.dk.size());
      dv.resize(result.dv.size());
      backward.dq = result.dq.data.data();
      backward.dk = result.dk.data.data();
      backward.dv = result.dv.data.data();
      backward.dq_uncast = dq.data();
      backward.dk_uncast = dk.data();
      backward.dv_uncast = dv.data();
    }
    const kernels::VisibleKeys visible = [&problem](int query, int sq, int sk) {
      const KeyRange range = visible_keys(problem, query, sq, sk);
      return std::pair<int, int>(static_cast<int>(range.first), static_cast<int>(range.last));
    };
    kernels::fp32_attention(views.inputs, visible, forward, backward, execution);
    if (options.want_uncast) {
      result.uncast.out = widened(out, result.out.shape);
      result.uncast.lse = widened(result.lse.data, result.lse.shape);
      if (with_backward) {
        result.uncast.dq = widened(dq, result.dq.shape);
        result.uncast.dk = widened(dk, result.dk.shape);
        result.uncast.dv = widened(dv, result.dv.shape);
      }
    }
    return result;
  }
};

}  // namespace

std::unique_ptr<Backend> fp32_backend() {
  return std::make_unique<Fp32Backend>();
}

}  // namespace bitattn
