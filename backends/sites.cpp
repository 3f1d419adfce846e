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
    const Problem& problem = capture.problem;
    const SiteRuns runs(capture, profile_);
    const bool with_backward = !options.forward_only && !problem.dout.empty();
    PairProgress progress(problem, with_backward ? 2 : 1, options);
    SiteForward forward = runs.forward(profile_.exact, progress.callback());
    Result result;
    result.backend = name();
    if (with_backward) {
      SiteGradients gradients = runs.backward(forward, profile_.exact, progress.callback());
      result.dq = narrowed(gradients.dq, problem.q_shape());
      result.dk = narrowed(gradients.dk, problem.k_shape());
      result.dv = narrowed(gradients.dv, problem.v_shape());
      result.uncast.dq = tensor(std::move(gradients.dq_uncast), problem.q_shape());
      result.uncast.dk = tensor(std::move(gradients.dk_uncast), problem.k_shape());
      result.uncast.dv = tensor(std::move(gradients.dv_uncast), problem.v_shape());
    }
    result.out = narrowed(forward.out, problem.out_shape());
    result.lse = Fp32Tensor(problem.row_shape());
    std::transform(forward.lse.begin(), forward.lse.end(), result.lse.data.begin(),
                   [](double x) { return static_cast<float>(x); });
    result.uncast.out = tensor(std::move(forward.out_uncast), problem.out_shape());
    result.uncast.lse = tensor(std::move(forward.lse), problem.row_shape());
    return result;
  }

 private:
  profile::Profile profile_;
};

std::size_t elements(const std::vector<std::size_t>& shape) {
  return Fp64Tensor(shape).size();
}

}  // namespace

SiteRuns::SiteRuns(const Capture& capture, const profile::Profile& profile)
    : problem_(capture.problem), profile_(profile) {
  check_fa3_supports(capture);
  check_remedies_fit(capture, profile.remedies);
  if (profile.remedies.has(profile::Remedy::fp32_backward)) {
    throw InputError(profile.name + ": an fp32 backward has no rounding sites");
  }
  view_problem(problem_, !problem_.dout.empty(), views_);
}

SiteForward SiteRuns::forward(const profile::SiteSet& exact, const Advance& advance) const {
  profile::Profile profile = profile_;
  profile.exact = exact;
  kernels::Execution execution;
  execution.advance = advance;
  SiteForward forward;
  forward.out.resize(elements(problem_.out_shape()));
  forward.out_uncast.resize(forward.out.size());
  forward.lse.resize(elements(problem_.row_shape()));
  if (profile.remedies.keeps_residual()) forward.residual.resize(forward.out.size());
  if (profile.remedies.split_statistic()) {
    forward.reference.resize(forward.lse.size());
    forward.row_sum.resize(forward.lse.size());
  }
  kernels::ForwardOutputsOf<double, double> outputs;
  outputs.out = forward.out.data();
  outputs.out_uncast = forward.out_uncast.data();
  outputs.lse = forward.lse.data();
  outputs.rows = views_.rows;
  outputs.out_residual = forward.residual.data();
  outputs.reference = forward.reference.data();
  outputs.row_sum = forward.row_sum.data();
  kernels::flash3_forward(profile, views_.inputs, outputs, execution);
  return forward;
}

SiteGradients SiteRuns::backward(const SiteForward& forward, const profile::SiteSet& exact,
                                 const Advance& advance) const {
  profile::Profile profile = profile_;
  profile.exact = exact;
  kernels::Execution execution;
  execution.advance = advance;
  kernels::BackwardInputsOf<double, double> inputs;
  inputs.out = forward.out.data();
  inputs.out_uncast = forward.out_uncast.data();
  inputs.lse = forward.lse.data();
  inputs.rows = views_.rows;
  inputs.out_residual = forward.residual.data();
  inputs.reference = forward.reference.data();
  inputs.row_sum = forward.row_sum.data();
  SiteGradients gradients;
  gradients.dq.resize(elements(problem_.q_shape()));
  gradients.dk.resize(elements(problem_.k_shape()));
  gradients.dv.resize(elements(problem_.v_shape()));
  gradients.dq_uncast.resize(gradients.dq.size());
  gradients.dk_uncast.resize(gradients.dk.size());
  gradients.dv_uncast.resize(gradients.dv.size());
  gradients.score_gradient_sums.resize(forward.lse.size());
  kernels::BackwardOutputsOf<double, double> outputs;
  outputs.dq = gradients.dq.data();
  outputs.dk = gradients.dk.data();
  outputs.dv = gradients.dv.data();
  outputs.dq_uncast = gradients.dq_uncast.data();
  outputs.dk_uncast = gradients.dk_uncast.data();
  outputs.dv_uncast = gradients.dv_uncast.data();
  outputs.ds_sums = gradients.score_gradient_sums.data();
  kernels::flash3_backward(profile, views_.inputs, inputs, outputs, execution);
  return gradients;
}

std::unique_ptr<Backend> site_backend(const profile::Profile& profile) {
  return std::make_unique<SiteBackend>(profile);
}

}  // namespace bitattn
