#include "backends/stages.hpp"

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

constexpr int kMostOrderFreeParts = 6;  ///< all orders of more parts are too many to try

using Values = std::vector<double>;

/// Marks a place that no kernel wrote: no fp32 number and no NaN, so no kernel can write it.
constexpr double kNeverWritten = 0x1p-1000;

float narrow(double x) {
  return arith::canonical(static_cast<float>(x));
}

Bf16Tensor words_of(const Values& values, const std::vector<std::size_t>& shape) {
  Bf16Tensor out(shape);
  std::transform(values.begin(), values.end(), out.data.begin(),
                 [](double x) { return arith::bf16_from_fp32(narrow(x)); });
  return out;
}

/// Places that were never written get the mark of such places, 0xffffffff.
Fp32Tensor fp32_of(const Values& values, const std::vector<std::size_t>& shape) {
  Fp32Tensor out(shape);
  std::transform(values.begin(), values.end(), out.data.begin(),
                 [](double x) { return x == kNeverWritten ? arith::from_bits(0xffffffffU) : narrow(x); });
  return out;
}

Values widened_words(const Bf16Tensor& tensor) {
  Values out(tensor.size());
  std::transform(tensor.data.begin(), tensor.data.end(), out.begin(),
                 [](std::uint16_t w) { return static_cast<double>(arith::fp32_from_bf16(w)); });
  return out;
}

Values widened_values(const Fp32Tensor& tensor) {
  return {tensor.data.begin(), tensor.data.end()};
}

Fp64Tensor tensor(Values values, const std::vector<std::size_t>& shape) {
  Fp64Tensor out;
  out.shape = shape;
  out.data = std::move(values);
  return out;
}

class Stages {
 public:
  Stages(const profile::Profile& profile, const Capture& capture, const StageOptions& options)
      : profile_(profile), capture_(capture), problem_(capture.problem), options_(options) {
    check_fa3_supports(capture);
    check_remedies_fit(capture, profile.remedies);
    if (profile.remedies.has(profile::Remedy::fp32_backward)) {
      throw InputError(profile.name + ": an fp32 backward has no rounding sites");
    }
    view_problem(problem_, with_backward(), views_);
    result_.backend = profile.name;
  }

  Result run() {
    const Result& recorded = capture_.recorded;
    const bool recorded_forward = options_.from_recorded && usable(recorded.out, problem_.out_shape()) &&
                                  usable(recorded.lse, problem_.row_shape());
    const bool needs_forward = !recorded_forward || profile_.remedies.keeps_residual() ||
                               profile_.remedies.split_statistic() ||
                               profile_.exact.has(profile::Site::dpsum_o_cast);
    if (options_.forward || (with_backward() && needs_forward)) run_forward();
    if (with_backward()) {
      if (recorded_forward) {
        out_ = widened_words(recorded.out);
        lse_ = widened_values(recorded.lse);
      }
      run_backward();
    }
    return std::move(result_);
  }

 private:
  bool with_backward() const { return options_.backward && !problem_.dout.empty(); }

  template <class T>
  static bool usable(const Tensor<T>& tensor, const std::vector<std::size_t>& shape) {
    return !tensor.empty() && tensor.shape == shape;
  }

  void run_forward() {
    const std::vector<std::size_t> out_shape = problem_.out_shape();
    out_.resize(Bf16Tensor(out_shape).size());
    out_uncast_.resize(out_.size());
    lse_.resize(Fp32Tensor(problem_.row_shape()).size());
    residual_.resize(profile_.remedies.keeps_residual() ? out_.size() : 0);
    reference_.resize(profile_.remedies.split_statistic() ? lse_.size() : 0);
    row_sum_.resize(reference_.size());
    kernels::ForwardOutputsOf<double, double> outputs;
    outputs.out = out_.data();
    outputs.out_uncast = out_uncast_.data();
    outputs.lse = lse_.data();
    outputs.out_residual = residual_.data();
    outputs.reference = reference_.data();
    outputs.row_sum = row_sum_.data();
    outputs.rows = views_.rows;
    kernels::flash3_forward(profile_, views_.inputs, outputs, {});
    result_.out = words_of(out_, out_shape);
    result_.lse = fp32_of(lse_, problem_.row_shape());
    result_.uncast.out = tensor(out_uncast_, out_shape);
    result_.uncast.lse = tensor(lse_, problem_.row_shape());
  }

  void run_backward() {
    const profile::BackwardTiles tiles = profile::flash3_backward_tiles(views_.inputs.call, profile_);
    const kernels::PaddedLayout layout = kernels::padded_layout(views_.inputs, tiles);
    const bool packed = problem_.layout == Layout::thd;
    const auto shape = [&](std::size_t heads, std::ptrdiff_t rows, bool columns) {
      std::vector<std::size_t> dims;
      if (!packed) dims.push_back(problem_.batch);
      dims.push_back(heads);
      dims.push_back(static_cast<std::size_t>(rows));
      if (columns) dims.push_back(static_cast<std::size_t>(tiles.head_dim));
      return dims;
    };
    const std::vector<std::size_t> rows = shape(problem_.heads_q, layout.q_padded, false);
    const std::vector<std::size_t> of_q = shape(problem_.heads_q, layout.q_padded, true);
    const std::vector<std::size_t> of_k = shape(problem_.heads_kv, layout.k_padded, true);
    const Intermediates& recorded = capture_.recorded.intermediates;

    kernels::BackwardInputsOf<double, double> in;
    in.out = out_.data();
    in.out_uncast = out_uncast_.data();
    in.lse = lse_.data();
    in.out_residual = residual_.data();
    in.reference = reference_.data();
    in.row_sum = row_sum_.data();
    in.rows = views_.rows;
    std::vector<Values> kept;
    kept.reserve(5);
    const auto take = [&](const Fp32Tensor& from, const std::vector<std::size_t>& as) -> const double* {
      if (!options_.from_recorded || !usable(from, as)) return nullptr;
      kept.push_back(widened_values(from));
      return kept.back().data();
    };
    in.dpsum = take(recorded.dpsum, rows);
    in.lse_log2 = take(recorded.lse_log2, rows);
    in.dq_accum = take(recorded.dq_accum, of_q);
    in.dk_accum = take(recorded.dk_accum, of_k);
    in.dv_accum = take(recorded.dv_accum, of_k);

    const auto size = [](const std::vector<std::size_t>& dims) { return Fp32Tensor(dims).size(); };
    Values dq(size(problem_.q_shape()));
    Values dk(size(problem_.k_shape()));
    Values dv(size(problem_.v_shape()));
    Values dq_uncast(dq.size());
    Values dk_uncast(dk.size());
    Values dv_uncast(dv.size());
    Values dpsum(size(rows), kNeverWritten);
    Values lse_log2(size(rows), kNeverWritten);
    Values dq_accum(size(of_q), kNeverWritten);
    const bool grouped = problem_.group() > 1;
    Values dk_accum(grouped ? size(of_k) : 0);
    Values dv_accum(dk_accum.size());
    kernels::BackwardOutputsOf<double, double> out;
    out.dq = dq.data();
    out.dk = dk.data();
    out.dv = dv.data();
    out.dq_uncast = dq_uncast.data();
    out.dk_uncast = dk_uncast.data();
    out.dv_uncast = dv_uncast.data();
    out.dpsum = dpsum.data();
    out.lse_log2 = lse_log2.data();
    out.dq_accum = dq_accum.data();
    if (grouped) {
      out.dk_accum = dk_accum.data();
      out.dv_accum = dv_accum.data();
    }
    const int parts = kernels::most_key_blocks(views_.inputs, tiles);
    const int group = static_cast<int>(problem_.group());
    result_.dq_order_fixed = tiles.dq_order != profile::DqOrder::any || parts <= 2;
    result_.dkv_order_fixed = tiles.dkv_order_fixed || group <= 2;
    Values dq_parts;
    Values dk_parts;
    Values dv_parts;
    const auto keep = [&](Values& values, kernels::Parts<double>& where, int count,
                          const std::vector<std::size_t>& dims) {
      if (!options_.want_order_free_parts || count > kMostOrderFreeParts) return;
      values.assign(static_cast<std::size_t>(count) * size(dims), kNeverWritten);
      where.values = values.data();
      where.rows = static_cast<std::ptrdiff_t>(size(dims)) / tiles.head_dim;
    };
    if (!result_.dq_order_fixed) keep(dq_parts, out.dq_parts, parts, of_q);
    if (!result_.dkv_order_fixed) {
      keep(dk_parts, out.dk_parts, group, of_k);
      keep(dv_parts, out.dv_parts, group, of_k);
    }
    kernels::flash3_backward(profile_, views_.inputs, in, out, {});

    Intermediates& made = result_.intermediates;
    if (problem_.total_k() > 0) {  // without keys the host fills in zeros and runs no kernel
      made.dpsum = fp32_of(dpsum, rows);
      made.lse_log2 = fp32_of(lse_log2, rows);
      made.dq_accum = fp32_of(dq_accum, of_q);
      if (grouped) {
        made.dk_accum = fp32_of(dk_accum, of_k);
        made.dv_accum = fp32_of(dv_accum, of_k);
      }
    }
    const auto parts_of = [&](const Values& values, int count, std::vector<std::size_t> dims,
                              OrderFreeParts& to) {
      if (values.empty()) return;
      dims.insert(dims.begin(), static_cast<std::size_t>(count));
      to.parts = static_cast<std::size_t>(count);
      to.values = fp32_of(values, dims);
    };
    parts_of(dq_parts, parts, of_q, result_.dq_parts);
    result_.dq_parts.flushed_adds = tiles.dq_added_by_atomics;
    parts_of(dk_parts, group, of_k, result_.dk_parts);
    parts_of(dv_parts, group, of_k, result_.dv_parts);
    result_.dq = words_of(dq, problem_.q_shape());
    result_.dk = words_of(dk, problem_.k_shape());
    result_.dv = words_of(dv, problem_.v_shape());
    result_.uncast.dq = tensor(std::move(dq_uncast), problem_.q_shape());
    result_.uncast.dk = tensor(std::move(dk_uncast), problem_.k_shape());
    result_.uncast.dv = tensor(std::move(dv_uncast), problem_.v_shape());
  }

  const profile::Profile& profile_;
  const Capture& capture_;
  const Problem& problem_;
  const StageOptions& options_;
  ProblemViews views_;
  Values out_, out_uncast_, lse_, residual_, reference_, row_sum_;
  Result result_;
};

}  // namespace

Result run_stages(const profile::Profile& profile, const Capture& capture, const StageOptions& options) {
  return Stages(profile, capture, options).run();
}

}  // namespace bitattn
