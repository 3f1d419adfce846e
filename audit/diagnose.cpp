#include "audit/diagnose.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>

#include "backends/backend.hpp"
#include "datasets/error.hpp"

namespace bitattn::audit {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// dQ before its last step: the fp32 accumulator times the scale that the kernel multiplies by, the product
/// not rounded. The kernel's own multiply flushes what is below 2^-126 and so belongs to the step from here
/// to the stored value.
Fp64Tensor dq_before_last_step(const Problem& problem, const Fp32Tensor& dq_accum) {
  Fp64Tensor dq(problem.q_shape());
  const double scale = static_cast<double>(static_cast<float>(problem.softmax_scale));
  const TileSizes tiles = tile_sizes(problem);
  for (std::size_t b = 0; b < problem.batch; ++b) {
    const SequenceSpan span = problem.sequence(b);
    for (std::size_t h = 0; h < problem.heads_q; ++h) {
      for (std::size_t i = 0; i < span.q_length; ++i) {
        const std::size_t from =
            index_of(problem, dq_accum.shape, Axes::padded_query_columns, tiles, b, h, i, 0);
        const std::size_t to = (span.q_begin + i) * problem.q_stride() + h * problem.head_dim;
        for (std::size_t d = 0; d < problem.head_dim; ++d) {
          dq.data[to + d] = static_cast<double>(dq_accum.data[from + d]) * scale;
        }
      }
    }
  }
  return dq;
}

/// Norms of the emulated dQ per row, before its last cast.
Fp64Tensor row_norms(const Problem& problem, const Fp64Tensor& dq) {
  Fp64Tensor norms(problem.row_shape(), kNan);
  if (dq.empty()) return norms;
  for (std::size_t b = 0; b < problem.batch; ++b) {
    const SequenceSpan span = problem.sequence(b);
    for (std::size_t i = 0; i < span.q_length; ++i) {
      for (std::size_t h = 0; h < problem.heads_q; ++h) {
        const double* row = dq.data.data() + (span.q_begin + i) * problem.q_stride() + h * problem.head_dim;
        double squares = 0;
        for (std::size_t d = 0; d < problem.head_dim; ++d) squares += row[d] * row[d];
        norms.data[problem.row_index(b, h, i)] = std::sqrt(squares);
      }
    }
  }
  return norms;
}

RowSummary summarize_rows(const Problem& problem, const Diagnosis& d, int head) {
  RowSummary s;
  const RowFindings& f = d.rows;
  s.residue = row_statistics(problem, f.row_max_residue, head);
  s.largest_block_residue = row_statistics(problem, f.largest_block_residue, head).largest;
  s.p_sum_excess = row_statistics(problem, f.p_sum_excess, head);
  s.before_cast = row_statistics(problem, f.before_cast, head);
  s.after_cast = row_statistics(problem, f.after_cast, head);
  s.g_minus_d = row_statistics(problem, f.g_minus_d, head);
  s.d_p_excess = row_statistics(problem, f.d_p_excess, head);
  s.eta = row_statistics(problem, f.eta, head);
  s.beta = row_statistics(problem, f.beta, head);
  double leak2 = 0;
  double mean2 = 0;
  double uncancelled2 = 0;
  double dq2 = 0;
  double error2 = 0;
  for_each_row_with_keys(problem, [&](std::size_t, std::size_t h, std::size_t, std::size_t index) {
    if (head >= 0 && h != static_cast<std::size_t>(head)) return;
    const double scaled =
        std::abs(static_cast<double>(f.row_max.data[index]) * static_cast<double>(f.scale_log2));
    if (std::isfinite(scaled)) s.largest_scaled_max = std::max(s.largest_scaled_max, scaled);
    s.tied_rows += f.tied_maxima.data[index] > 1 ? 1 : 0;
    s.most_ties = std::max(s.most_ties, f.tied_maxima.data[index]);
    const double dq = d.dq_norm.data[index];
    const double leak = f.leak.data[index];
    const double mean = f.leak_mean_key.data[index];
    const double uncancelled = f.uncancelled.data[index];
    const double error = d.with_truth ? d.dq_error_norm.data[index] : 0;
    if (!std::isfinite(dq + leak + mean + uncancelled + error)) return;
    ++s.leak_rows;
    leak2 += leak * leak;
    mean2 += mean * mean;
    uncancelled2 += uncancelled * uncancelled;
    error2 += error * error;
    dq2 += dq * dq;
  });
  const auto share = [&](double squares) {
    if (s.leak_rows == 0) return kNan;
    return squares == 0 ? 0.0 : dq2 == 0 ? kNan : std::sqrt(squares / dq2);
  };
  s.leak = share(leak2);
  s.leak_norm = s.leak_rows == 0 ? kNan : std::sqrt(leak2);
  s.dq_norm = s.leak_rows == 0 ? kNan : std::sqrt(dq2);
  s.leak_mean_key = share(mean2);
  s.condition = share(uncancelled2);
  s.dq_error = d.with_truth ? share(error2) : kNan;
  return s;
}

/// Norms of the leak into dK by key, and its share of dK: of the truth's where there is one.
void summarize_dk(const Problem& problem, Diagnosis& d) {
  const Fp64Tensor& leak = d.rows.leak_dk;
  if (leak.empty()) return;
  const std::size_t heads = problem.heads_kv;
  const std::size_t dim = problem.head_dim;
  const std::size_t tokens = problem.total_k();
  d.leak_dk_norm = problem.layout == Layout::thd ? Fp64Tensor({heads, tokens})
                                                 : Fp64Tensor({problem.batch, heads, problem.seqlen_k});
  double all_leak2 = 0;
  double all_dk2 = 0;
  const auto share = [](double leak2, double dk2) { return dk2 > 0 ? std::sqrt(leak2 / dk2) : kNan; };
  for (std::size_t h = 0; h < heads; ++h) {
    double leak2 = 0;
    double dk2 = 0;
    for (std::size_t t = 0; t < tokens; ++t) {
      double squares = 0;
      for (std::size_t x = 0; x < dim; ++x) {
        const std::size_t at = (t * heads + h) * dim + x;
        squares += leak.data[at] * leak.data[at];
        if (!d.with_truth) dk2 += d.emulated.uncast.dk.data[at] * d.emulated.uncast.dk.data[at];
      }
      leak2 += squares;
      const std::size_t key =
          problem.layout == Layout::thd
              ? h * tokens + t
              : (t / problem.seqlen_k * heads + h) * problem.seqlen_k + t % problem.seqlen_k;
      d.leak_dk_norm.data[key] = std::sqrt(squares);
    }
    if (d.with_truth) dk2 = d.errors[2].by_head[h].before_cast.truth2;
    d.leak_dk_by_head.push_back(share(leak2, dk2));
    all_leak2 += leak2;
    all_dk2 += dk2;
  }
  d.leak_dk = share(all_leak2, all_dk2);
}

/// The truth of all rows, a KV head and its query heads at a time, so that no more than that is held at once.
void add_whole_truth(const Capture& capture, const Backend& reference, const DiagnoseOptions& options,
                     const Result& emulated, ErrorsAgainstTruth& errors) {
  const std::size_t heads = capture.problem.heads_kv;
  for (std::size_t h = 0; h < heads; ++h) {
    Capture slice;
    slice.name = capture.name;
    slice.problem = slice_heads(capture.problem, h, 1);
    RunOptions run;
    run.want_uncast = true;
    if (options.progress) {
      run.progress = [&](double share) {
        options.progress("reference", (static_cast<double>(h) + share) / static_cast<double>(heads));
      };
    }
    errors.add_slice(emulated, reference.run(slice, run), h, 1);
  }
}

/// The truth of chosen rows; rows that share a query and its KV head share one run.
void add_truth_of_rows(const Capture& capture, const Backend& reference, const DiagnoseOptions& options,
                       const Result& emulated, const std::vector<RowId>& rows, ErrorsAgainstTruth& errors) {
  const Problem& problem = capture.problem;
  std::map<std::array<std::size_t, 3>, std::vector<std::size_t>> heads_of;
  for (const RowId& row : rows)
    heads_of[{row.sequence, row.head / problem.group(), row.row}].push_back(row.head);
  std::size_t done = 0;
  for (const auto& [key, heads] : heads_of) {
    Capture one;
    one.name = capture.name;
    one.problem = single_row_problem(problem, key[0], key[1], key[2]);
    RunOptions run;
    run.want_uncast = true;
    const Result truth = reference.run(one, run);
    for (const std::size_t head : heads) errors.add_row(emulated, truth, key[0], head, key[2]);
    ++done;
    if (options.progress) {
      options.progress("reference", static_cast<double>(done) / static_cast<double>(heads_of.size()));
    }
  }
}

/// Visible pairs that blame's worst parts may have together: some ten seconds of one core.
constexpr double kBlamedPairs = 512 * 1024;

void add_blame(const Capture& capture, const DiagnoseOptions& options, Diagnosis& d) {
  const std::optional<EmulatedKernel> kernel = emulated_kernel(options.backend);
  if (!kernel) return;
  const Problem& problem = capture.problem;
  const bool by_error = d.with_truth && d.with_backward;
  std::vector<RowPart> parts;
  if (!d.chosen.empty()) {
    parts = parts_of_rows(
        problem, d.chosen,
        options.blame == BlameScope::all ? std::numeric_limits<double>::infinity() : kBlamedPairs);
  } else if (options.blame == BlameScope::all) {
    parts = whole_parts(problem);
  } else if (d.with_backward) {
    parts = worst_parts(problem, by_error ? d.dq_error_norm : d.rows.leak, d.dq_norm, kBlamedPairs);
  } else {
    const Fp64Tensor even(problem.row_shape(), 1.0);
    parts = worst_parts(problem, even, even, kBlamedPairs);
  }
  if (parts.empty()) return;
  BlameOptions how;
  how.worst_rows = options.worst_rows;
  if (d.with_backward) how.findings = &d.rows;
  if (by_error) how.dq_error_norm = &d.dq_error_norm;
  if (options.progress) how.progress = [&](double share) { options.progress("blame", share); };
  d.blame = blame(capture, *kernel, parts, how);
}

}  // namespace

std::string nothing_finite_text(const Diagnosis& d) {
  return d.whole.residue.rows == 0 ? "no row sees a key with finite scores"
                                   : "no row has finite score gradients";
}

Diagnosis diagnose(const Capture& capture, const DiagnoseOptions& options) {
  const Problem& problem = capture.problem;
  Diagnosis d;
  d.capture = capture.name;
  d.backend = options.backend;
  d.with_backward = !problem.dout.empty();
  d.inputs = summarize_inputs(problem);

  const std::unique_ptr<Backend> backend = make_backend(options.backend);
  RowLocator locator(problem, {options.block_residues});
  RunOptions run;
  run.want_uncast = true;
  run.want_order_free_parts = capture.has_recorded();
  run.want_accumulators = true;
  run.observer = &locator;
  if (options.progress) run.progress = [&](double share) { options.progress("emulation", share); };
  d.emulated = backend->run(capture, run);
  if (!d.emulated.intermediates.dq_accum.empty()) {
    d.emulated.uncast.dq = dq_before_last_step(problem, d.emulated.intermediates.dq_accum);
  }
  d.rows = std::move(locator.findings());
  if (std::isnan(d.rows.scale_log2) && problem.total_q() > 0 && problem.total_k() > 0) {
    throw InputError("backend " + options.backend +
                     " is no emulated kernel whose rows can be looked at, expected fa3");
  }
  d.notes = d.emulated.notes;
  d.specials = special_values(problem, d.emulated);
  if (capture.has_recorded()) {
    d.witness = witness(capture);
    Result recorded = capture.recorded;
    recorded.backend = "recorded";
    d.against_recorded = compare_results(capture.name, problem, recorded, d.emulated);
  }

  if (!options.rows.all()) {
    if (options.rows.worst > 0 && !d.with_backward) {
      throw InputError(capture.name +
                       ": --rows N ranks rows by their score-gradient sums, but the capture has no dout");
    }
    d.chosen = options.rows.worst > 0 ? worst_rows(problem, d.drift(problem), options.rows.worst)
                                      : chosen_rows(problem, options.rows);
  }
  ErrorsAgainstTruth errors(problem);
  if (!options.reference.empty()) {
    d.with_truth = true;
    const std::unique_ptr<Backend> reference = make_backend(options.reference);
    d.reference = reference->name();
    if (options.rows.all()) {
      add_whole_truth(capture, *reference, options, d.emulated, errors);
    } else {
      add_truth_of_rows(capture, *reference, options, d.emulated, d.chosen, errors);
    }
    d.errors = errors.tensors();
    d.largest_lse_error = errors.largest_lse_error();
    d.dq_norm = errors.true_dq_norm();
    d.dq_error_norm = errors.dq_error_norm();
  } else {
    d.dq_norm = row_norms(problem, d.emulated.uncast.dq);
    d.dq_error_norm = Fp64Tensor(problem.row_shape(), kNan);
  }

  summarize_dk(problem, d);
  d.whole = summarize_rows(problem, d, -1);
  for (std::size_t h = 0; h < problem.heads_q; ++h) {
    d.by_head.push_back(summarize_rows(problem, d, static_cast<int>(h)));
  }
  if (options.blame != BlameScope::none) {
    if (d.anything_finite()) {
      add_blame(capture, options, d);
    } else {
      d.blame_not_run = nothing_finite_text(d);
    }
  }
  return d;
}

}  // namespace bitattn::audit
