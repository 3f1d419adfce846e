#include "backends/sites.hpp"

#include <algorithm>
#include <vector>

#include "backends/attention_inputs.hpp"
#include "backends/fa3_support.hpp"
#include "datasets/error.hpp"
#include "emu/arith/bf16.hpp"
#include "emu/kernels/flash3_backward.hpp"
#include "emu/kernels/flash3_forward.hpp"

namespace bitattn {

namespace {

Bf16Tensor narrowed(const std::vector<double>& values, const std::vector<std::size_t>& shape) {
  Bf16Tensor out(shape);
  std::transform(values.begin(), values.end(), out.data.begin(),
                 [](double x) { return arith::bf16_from_fp32(arith::canonical(static_cast<float>(x))); });
  return out;
}

Fp64Tensor tensor(std::vector<double> values, const std::vector<std::size_t>& shape) {
  Fp64Tensor out;
  out.shape = shape;
  out.data = std::move(values);
  return out;
}

class SiteBackend final : public Backend {
 public:
  explicit SiteBackend(profile::Profile profile) : profile_(std::move(profile)) {}

  std::string name() const override { return profile_.name; }

  Result run(const Capture& capture, const RunOptions& options) const override {
    check_fa3_supports(capture);
    check_remedies_fit(capture, profile_.remedies);
    if (profile_.remedies.has(profile::Remedy::fp32_backward)) {
      throw InputError(name() + ": an fp32 backward has no rounding sites");
    }
    const Problem& problem = capture.problem;
    const bool with_backward = !options.forward_only && !problem.dout.empty();
    ProblemViews views;
    view_problem(problem, with_backward, views);
    PairProgress progress(problem, with_backward ? 2 : 1, options);
    kernels::Execution execution;
    execution.advance = progress.callback();

    Result result;
    result.backend = name();
    const std::vector<std::size_t> out_shape = problem.out_shape();
    const std::size_t out_size = Bf16Tensor(out_shape).size();
    std::vector<double> out(out_size);
    std::vector<double> out_uncast(out_size);
    std::vector<double> lse(Fp32Tensor(problem.row_shape()).size());
    kernels::ForwardOutputsOf<double, double> forward;
    forward.out = out.data();
    forward.out_uncast = out_uncast.data();
    forward.lse = lse.data();
    forward.rows = views.rows;
    std::vector<double> residual(profile_.remedies.keeps_residual() ? out_size : 0);
    std::vector<double> reference(profile_.remedies.split_statistic() ? lse.size() : 0);
    std::vector<double> row_sum(reference.size());
    forward.out_residual = residual.data();
    forward.reference = reference.data();
    forward.row_sum = row_sum.data();
    kernels::flash3_forward(profile_, views.inputs, forward, execution);
    if (with_backward) {
      kernels::BackwardInputsOf<double, double> in;
      in.out = out.data();
      in.out_uncast = out_uncast.data();
      in.lse = lse.data();
      in.rows = views.rows;
      in.out_residual = residual.data();
      in.reference = reference.data();
      in.row_sum = row_sum.data();
      run_backward(problem, views, in, execution, result);
    }
    result.out = narrowed(out, out_shape);
    result.lse = Fp32Tensor(problem.row_shape());
    std::transform(lse.begin(), lse.end(), result.lse.data.begin(),
                   [](double x) { return static_cast<float>(x); });
    result.uncast.out = tensor(std::move(out_uncast), out_shape);
    result.uncast.lse = tensor(std::move(lse), problem.row_shape());
    return result;
  }

 private:
  void run_backward(const Problem& problem, const ProblemViews& views,
                    const kernels::BackwardInputsOf<double, double>& in, const kernels::Execution& execution,
                    Result& result) const {
    std::vector<double> dq(Bf16Tensor(problem.q_shape()).size());
    std::vector<double> dk(Bf16Tensor(problem.k_shape()).size());
    std::vector<double> dv(Bf16Tensor(problem.v_shape()).size());
    std::vector<double> dq_uncast(dq.size());
    std::vector<double> dk_uncast(dk.size());
    std::vector<double> dv_uncast(dv.size());
    kernels::BackwardOutputsOf<double, double> outputs;
    outputs.dq = dq.data();
    outputs.dk = dk.data();
    outputs.dv = dv.data();
    outputs.dq_uncast = dq_uncast.data();
    outputs.dk_uncast = dk_uncast.data();
    outputs.dv_uncast = dv_uncast.data();
    kernels::flash3_backward(profile_, views.inputs, in, outputs, execution);
    result.dq = narrowed(dq, problem.q_shape());
    result.dk = narrowed(dk, problem.k_shape());
    result.dv = narrowed(dv, problem.v_shape());
    result.uncast.dq = tensor(std::move(dq_uncast), problem.q_shape());
    result.uncast.dk = tensor(std::move(dk_uncast), problem.k_shape());
    result.uncast.dv = tensor(std::move(dv_uncast), problem.v_shape());
  }

  profile::Profile profile_;
};

}  // namespace

std::unique_ptr<Backend> site_backend(const profile::Profile& profile) {
  return std::make_unique<SiteBackend>(profile);
}

}  // namespace bitattn
