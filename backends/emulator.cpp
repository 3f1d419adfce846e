#include "backends/emulator.hpp"

#include <algorithm>
#include <vector>

#include "backends/attention_inputs.hpp"
#include "backends/fa3_support.hpp"
#include "backends/fp32.hpp"
#include "emu/arith/bits.hpp"
#include "emu/kernels/flash3_backward.hpp"
#include "emu/kernels/flash3_forward.hpp"

namespace bitattn {

namespace {

constexpr int kMostOrderFreeParts = 6;  ///< all orders of more parts are too many to try

/// Marks a place of a padded array that no kernel writes.
float unwritten() {
  return arith::from_bits(0xffffffffU);
}

/// What the forward leaves for a backward with remedies, beside O and LSE.
struct ForRemedies {
  std::vector<float> out_residual, reference, row_sum;
};

class EmulatorBackend final : public Backend {
 public:
  explicit EmulatorBackend(profile::Profile profile) : profile_(std::move(profile)) {}

  std::string name() const override { return profile_.name; }

  Result run(const Capture& capture, const RunOptions& options) const override {
    check_fa3_supports(capture);
    check_remedies_fit(capture, profile_.remedies);
    const Problem& problem = capture.problem;
    const bool with_backward = !options.forward_only && !problem.dout.empty();
    ProblemViews views;
    view_problem(problem, with_backward, views);
    PairProgress progress(problem, with_backward ? 2 : 1, options);
    kernels::Execution execution;
    execution.observer = options.observer;
    execution.advance = progress.callback();

    Result result;
    result.backend = name();
    ForRemedies kept;
    run_forward(problem, views, options, execution, result, kept);
    if (!with_backward) return result;
    if (profile_.remedies.has(profile::Remedy::fp32_backward)) {
      take_fp32_backward(capture, options, result);
    } else {
      run_backward(capture, views, options, execution, kept, result);
    }
    return result;
  }

 private:
  void run_forward(const Problem& problem, const ProblemViews& views, const RunOptions& options,
                   const kernels::Execution& execution, Result& result, ForRemedies& kept) const {
    result.out = Bf16Tensor(problem.out_shape());
    result.lse = Fp32Tensor(problem.row_shape());
    std::vector<float> out_fp32(options.want_uncast ? result.out.size() : 0);
    kernels::ForwardOutputs outputs;
    outputs.out = result.out.data.data();
    outputs.out_uncast = options.want_uncast ? out_fp32.data() : nullptr;
    outputs.lse = result.lse.data.data();
    outputs.rows = views.rows;
    if (profile_.remedies.keeps_residual()) {
      kept.out_residual.resize(result.out.size());
      outputs.out_residual = kept.out_residual.data();
    }
    if (profile_.remedies.split_statistic()) {
      kept.reference.resize(result.lse.size());
      kept.row_sum.resize(result.lse.size());
      outputs.reference = kept.reference.data();
      outputs.row_sum = kept.row_sum.data();
    }
    kernels::flash3_forward(profile_, views.inputs, outputs, execution);
    if (options.want_uncast) {
      result.uncast.out = widened(out_fp32, result.out.shape);
      result.uncast.lse = widened(result.lse.data, result.lse.shape);
    }
  }

  /// The gradients of fp32 attention, whose m, L and O are its own.
  static void take_fp32_backward(const Capture& capture, const RunOptions& options, Result& result) {
    Result fp32 = fp32_backend()->run(capture, options);
    result.dq = std::move(fp32.dq);
    result.dk = std::move(fp32.dk);
    result.dv = std::move(fp32.dv);
    result.uncast.dq = std::move(fp32.uncast.dq);
    result.uncast.dk = std::move(fp32.uncast.dk);
    result.uncast.dv = std::move(fp32.uncast.dv);
  }

  void run_backward(const Capture& capture, const ProblemViews& views, const RunOptions& options,
                    const kernels::Execution& execution, const ForRemedies& for_remedies,
                    Result& result) const {
    const Problem& problem = capture.problem;
    const profile::BackwardTiles tiles = profile::flash3_backward_tiles(views.inputs.call, profile_);
    const kernels::PaddedLayout layout = kernels::padded_layout(views.inputs, tiles);
    const Intermediates& recorded = capture.recorded.intermediates;
    Intermediates& kept = result.intermediates;

    result.dq = Bf16Tensor(problem.q_shape());
    result.dk = Bf16Tensor(problem.k_shape());
    result.dv = Bf16Tensor(problem.v_shape());
    std::vector<float> dq_fp32(options.want_uncast ? result.dq.size() : 0);
    std::vector<float> dk_fp32(options.want_uncast ? result.dk.size() : 0);
    std::vector<float> dv_fp32(options.want_uncast ? result.dv.size() : 0);
    kernels::BackwardOutputs outputs;
    outputs.dq = result.dq.data.data();
    outputs.dk = result.dk.data.data();
    outputs.dv = result.dv.data.data();
    if (options.want_uncast) {
      outputs.dq_uncast = dq_fp32.data();
      outputs.dk_uncast = dk_fp32.data();
      outputs.dv_uncast = dv_fp32.data();
    }

    const bool packed = problem.layout == Layout::thd;
    const auto padded_shape = [&](std::size_t heads, std::ptrdiff_t rows) {
      std::vector<std::size_t> shape;
      if (!packed) shape.push_back(problem.batch);
      shape.push_back(heads);
      shape.push_back(static_cast<std::size_t>(rows));
      return shape;
    };
    const auto with_dim = [&](std::vector<std::size_t> shape) {
      shape.push_back(static_cast<std::size_t>(tiles.head_dim));
      return shape;
    };
    const std::vector<std::size_t> q_rows = padded_shape(problem.heads_q, layout.q_padded);
    const std::vector<std::size_t> k_rows = padded_shape(problem.heads_kv, layout.k_padded);
    const bool grouped = problem.group() > 1;
    if (problem.total_k() > 0) {  // without keys the host fills in zeros and runs no kernel
      kept.dpsum = Fp32Tensor(q_rows, unwritten());
      kept.lse_log2 = Fp32Tensor(q_rows, unwritten());
      outputs.dpsum = kept.dpsum.data.data();
      outputs.lse_log2 = kept.lse_log2.data.data();
      if (options.want_accumulators || !recorded.dq_accum.empty()) {
        kept.dq_accum = Fp32Tensor(with_dim(q_rows), unwritten());
        outputs.dq_accum = kept.dq_accum.data.data();
      }
      if (grouped &&
          (options.want_accumulators || !recorded.dk_accum.empty() || !recorded.dv_accum.empty())) {
        kept.dk_accum = Fp32Tensor(with_dim(k_rows));  // the host clears these before the kernel adds
        kept.dv_accum = Fp32Tensor(with_dim(k_rows));
        outputs.dk_accum = kept.dk_accum.data.data();
        outputs.dv_accum = kept.dv_accum.data.data();
      }
    }

    // Two additions onto zero commute, so an order matters from three parts on.
    const int parts = kernels::most_key_blocks(views.inputs, tiles);
    result.dq_order_fixed = tiles.dq_order != profile::DqOrder::any || parts <= 2;
    result.dkv_order_fixed = tiles.dkv_order_fixed || problem.group() <= 2;
    const auto keep_parts = [&](OrderFreeParts& target, kernels::Parts<float>& where, int count,
                                const std::vector<std::size_t>& rows) {
      if (count > kMostOrderFreeParts) return;
      std::vector<std::size_t> shape = with_dim(rows);
      shape.insert(shape.begin(), static_cast<std::size_t>(count));
      target.parts = static_cast<std::size_t>(count);
      target.flushed_adds = tiles.dq_added_by_atomics && &target == &result.dq_parts;
      target.values = Fp32Tensor(shape, unwritten());
      where.values = target.values.data.data();
      where.rows = static_cast<std::ptrdiff_t>(target.values.size() / target.parts) / tiles.head_dim;
    };
    if (options.want_order_free_parts && !result.dq_order_fixed)
      keep_parts(result.dq_parts, outputs.dq_parts, parts, q_rows);
    if (options.want_order_free_parts && !result.dkv_order_fixed) {
      const int group = static_cast<int>(problem.group());
      keep_parts(result.dk_parts, outputs.dk_parts, group, k_rows);
      keep_parts(result.dv_parts, outputs.dv_parts, group, k_rows);
    }
    if (!result.dq_order_fixed) {
      result.notes.push_back(
          "dq: the kernel adds up to " + std::to_string(parts) +
          " key blocks of a row in no fixed order; here they are added in ascending order");
    }
    if (!result.dkv_order_fixed) {
      result.notes.push_back(
          "dk, dv: the kernel adds the " + std::to_string(problem.group()) +
          " query heads of a group in no fixed order; here they are added in ascending order");
    }

    kernels::BackwardInputs forward;
    forward.out = result.out.data.data();
    forward.lse = result.lse.data.data();
    forward.rows = views.rows;
    forward.out_residual = for_remedies.out_residual.data();
    forward.reference = for_remedies.reference.data();
    forward.row_sum = for_remedies.row_sum.data();
    kernels::flash3_backward(profile_, views.inputs, forward, outputs, execution);
    if (options.want_uncast) {
      result.uncast.dq = widened(dq_fp32, result.dq.shape);
      result.uncast.dk = widened(dk_fp32, result.dk.shape);
      result.uncast.dv = widened(dv_fp32, result.dv.shape);
    }
  }

  profile::Profile profile_;
};

}  // namespace

std::unique_ptr<Backend> emulator_backend(const profile::Profile& profile) {
  return std::make_unique<EmulatorBackend>(profile);
}

}  // namespace bitattn
