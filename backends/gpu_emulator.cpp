#include "backends/gpu_emulator.hpp"

#include <limits>
#include <utility>
#include <vector>

#include "backends/attention_inputs.hpp"
#include "backends/fa3_support.hpp"
#include "datasets/error.hpp"
#include "emu/kernels/flash3_backward.hpp"
#include "gpu/emulator/flash3.hpp"

namespace bitattn {

namespace {

class GpuEmulatorBackend final : public Backend {
 public:
  GpuEmulatorBackend(profile::Profile profile, std::size_t workspace)
      : profile_(std::move(profile)), workspace_(workspace) {}

  std::string name() const override { return "emu-gpu:" + profile_.name; }

  Result run(const Capture& capture, const RunOptions& options) const override {
    check_fa3_supports(capture);
    const Problem& problem = capture.problem;
    const bool with_backward = !options.forward_only && !problem.dout.empty();
    ProblemViews views;
    view_problem(problem, with_backward, views);
    gpu::emulator::Inputs inputs;
    inputs.call = views.inputs.call;
    std::vector<gpu::emulator::Sequence> sequences;
    for (const kernels::Sequence& s : views.inputs.sequences) {
      sequences.push_back({s.q_begin, s.q_length, s.k_begin, s.k_length});
    }
    inputs.sequences = sequences;
    inputs.total_q = views.inputs.total_q;
    inputs.total_k = views.inputs.total_k;
    inputs.q = views.inputs.q;
    inputs.k = views.inputs.k;
    inputs.v = views.inputs.v;
    inputs.dout = views.inputs.dout;

    Result result;
    result.backend = name();
    result.out = Bf16Tensor(problem.out_shape());
    result.lse = Fp32Tensor(problem.row_shape());
    std::vector<float> out_fp32(options.want_uncast ? result.out.size() : 0);
    gpu::emulator::ForwardOutputs forward;
    forward.out = result.out.data.data();
    forward.out_fp32 = options.want_uncast ? out_fp32.data() : nullptr;
    forward.lse = result.lse.data.data();
    forward.rows = views.rows;
    forward.row_count = result.lse.size();

    Backward backward(problem);
    if (with_backward) backward.prepare(profile_, capture, views, options, result);
    gpu::emulator::Options run_options;
    run_options.workspace = workspace_;
    run_options.progress = options.progress;
    try {
      gpu::emulator::flash3(profile_, inputs, forward, with_backward ? &backward.outputs : nullptr,
                            run_options);
    } catch (const gpu::Error& error) {
      throw InputError(capture.name + ": " + name() + ": " + error.what());
    }
    if (options.want_uncast) {
      result.uncast.out = widened(out_fp32, result.out.shape);
      result.uncast.lse = widened(result.lse.data, result.lse.shape);
      if (with_backward) backward.keep_uncast(result);
    }
    return result;
  }

 private:
  /// The backward's outputs and what they are laid out by.
  struct Backward {
    explicit Backward(const Problem& p) : problem(p) {}

    void prepare(const profile::Profile& profile, const Capture& capture, const ProblemViews& views,
                 const RunOptions& options, Result& result) {
      const profile::BackwardTiles tiles = profile::flash3_backward_tiles(views.inputs.call, profile);
      layout = kernels::padded_layout(views.inputs, tiles);
      const Intermediates& recorded = capture.recorded.intermediates;
      Intermediates& kept = result.intermediates;
      const auto dim = static_cast<std::size_t>(tiles.head_dim);
      const std::vector<std::size_t> q_rows = padded_shape(problem.heads_q, layout.q_padded);
      const std::vector<std::size_t> k_rows = padded_shape(problem.heads_kv, layout.k_padded);
      const auto with_dim = [dim](std::vector<std::size_t> shape) {
        shape.push_back(dim);
        return shape;
      };
      result.dq = Bf16Tensor(problem.q_shape());
      result.dk = Bf16Tensor(problem.k_shape());
      result.dv = Bf16Tensor(problem.v_shape());
      outputs.dq = result.dq.data.data();
      outputs.dk = result.dk.data.data();
      outputs.dv = result.dv.data.data();
      outputs.q_rows = layout.q_rows;
      outputs.k_rows = layout.k_rows;
      outputs.q_row_count = elements(q_rows);
      outputs.k_row_count = elements(k_rows);
      if (options.want_uncast) {
        dq_fp32.resize(result.dq.size());
        dk_fp32.resize(result.dk.size());
        dv_fp32.resize(result.dv.size());
        outputs.dq_fp32 = dq_fp32.data();
        outputs.dk_fp32 = dk_fp32.data();
        outputs.dv_fp32 = dv_fp32.data();
      }
      if (problem.total_k() > 0) {  // without keys the host fills in zeros and runs no kernel
        const auto keep = [](Fp32Tensor& tensor, const std::vector<std::size_t>& shape) {
          tensor = Fp32Tensor(shape);
          return tensor.data.data();
        };
        outputs.dpsum = keep(kept.dpsum, q_rows);
        outputs.lse_log2 = keep(kept.lse_log2, q_rows);
        if (options.want_accumulators || !recorded.dq_accum.empty()) {
          outputs.dq_accum = keep(kept.dq_accum, with_dim(q_rows));
        }
        if (problem.group() > 1 &&
            (options.want_accumulators || !recorded.dk_accum.empty() || !recorded.dv_accum.empty())) {
          outputs.dk_accum = keep(kept.dk_accum, with_dim(k_rows));
          outputs.dv_accum = keep(kept.dv_accum, with_dim(k_rows));
        }
      }
      // Two additions onto zero commute, so an order matters from three parts on.
      const int parts = kernels::most_key_blocks(views.inputs, tiles);
      result.dq_order_fixed = tiles.dq_order != profile::DqOrder::any || parts <= 2;
      result.dkv_order_fixed = tiles.dkv_order_fixed || problem.group() <= 2;
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
    }

    void keep_uncast(Result& result) const {
      result.uncast.dq = widened(dq_fp32, result.dq.shape);
      result.uncast.dk = widened(dk_fp32, result.dk.shape);
      result.uncast.dv = widened(dv_fp32, result.dv.shape);
    }

    std::vector<std::size_t> padded_shape(std::size_t heads, std::ptrdiff_t rows) const {
      std::vector<std::size_t> shape;
      if (problem.layout != Layout::thd) shape.push_back(problem.batch);
      shape.push_back(heads);
      shape.push_back(static_cast<std::size_t>(rows));
      return shape;
    }
    static std::size_t elements(const std::vector<std::size_t>& shape) {
      std::size_t n = 1;
      for (const std::size_t d : shape) n *= d;
      return n;
    }

    const Problem& problem;
    kernels::PaddedLayout layout;
    gpu::emulator::BackwardOutputs outputs;
    std::vector<float> dq_fp32, dk_fp32, dv_fp32;
  };

  profile::Profile profile_;
  std::size_t workspace_;
};

}  // namespace

std::unique_ptr<Backend> gpu_emulator_backend(const profile::Profile& profile, std::size_t workspace) {
  return std::make_unique<GpuEmulatorBackend>(profile, workspace);
}

}  // namespace bitattn
