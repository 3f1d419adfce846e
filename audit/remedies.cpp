#include "audit/remedies.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "audit/remaining_drift.hpp"
#include "backends/backend.hpp"
#include "backends/fa3_support.hpp"
#include "backends/input_remedies.hpp"
#include "datasets/error.hpp"

namespace bitattn::audit {

namespace {

using profile::Remedy;
using profile::RemedySet;

// One streaming multiprocessor of an H200, per cycle: fused products of BF16 on the tensor core, fp32
// operations beside it, bytes of memory; and the share of the tensor core's rate that a good kernel gets.
constexpr double kProducts = 2048;
constexpr double kOperations = 128;
constexpr double kBytes = 20;
constexpr double kForwardShare = 0.7;
constexpr double kBackwardShare = 0.6;
constexpr double kForwardProducts = 2;
constexpr double kBackwardProducts = 5;
// Bytes that the unmodified kernels read and write for every element of a token: q, k, v, O forward; q, k, v,
// dO, O, dQ, dK, dV and the fp32 accumulator of dQ backward.
constexpr double kOwnBytes = 40;

double visible_pairs(const Problem& problem) {
  double pairs = 0;
  for (std::size_t b = 0; b < problem.batch; ++b) {
    const SequenceSpan span = problem.sequence(b);
    for (std::size_t i = 0; i < span.q_length; ++i) {
      const KeyRange range =
          visible_keys(problem, static_cast<std::int64_t>(i), static_cast<std::int64_t>(span.q_length),
                       static_cast<std::int64_t>(span.k_length));
      pairs += static_cast<double>(std::max<std::int64_t>(0, range.last - range.first));
    }
  }
  return pairs * static_cast<double>(problem.heads_q);
}

/// Truths of one slice of heads: of the problem itself, and of the problems that other functions make of it.
/// Mean-free keys are no other function: whatever vector all keys of a row are moved by, softmax gives the
/// same P, and sum_j dS_ij = 0 gives the same dQ and dK. So the truth of the unrounded mean-free key is that
/// of the problem itself, and the cast of the moved keys is an error like any other.
class Truths {
 public:
  Truths(const Capture& slice, const RemediesOptions& options) : slice_(slice), options_(options) {}

  /// The truth for a trial: its own function's where its remedies change the function.
  const Result& of(const RemedySet& remedies) {
    RemedySet functions;
    for (const Remedy r : {Remedy::qk_norm, Remedy::qk_norm_gain}) {
      if (remedies.has(r)) functions.add(r);
    }
    return on(functions);
  }

  /// The truth on the inputs that attention is given, their cast included.
  const Result& of_inputs(const RemedySet& remedies) {
    RemedySet inputs;
    for (const profile::RemedyInfo& i : profile::kRemedies) {
      if (remedies.has(i.remedy) && is_input_remedy(i.remedy)) inputs.add(i.remedy);
    }
    return on(inputs);
  }

 private:
  const Result& on(const RemedySet& functions) {
    for (const Known& known : known_) {
      if (known.functions == functions) return *known.truth;
    }
    RunOptions run;
    run.want_uncast = true;
    if (options_.progress) {
      run.progress = [&](double share) { options_.progress("reference", share); };
    }
    const std::string name = options_.reference + (functions.empty() ? "" : "+" + profile::text(functions));
    known_.push_back({functions, std::make_unique<Result>(make_backend(name)->run(slice_, run))});
    return *known_.back().truth;
  }

  struct Known {
    RemedySet functions;
    std::unique_ptr<Result> truth;
  };
  const Capture& slice_;
  const RemediesOptions& options_;
  std::vector<Known> known_;
};

/// Sums over the slices of what only the end relates to each other.
struct Gathered {
  std::size_t rows = 0;
  double drift2 = 0, leak2 = 0;
};

void add_trial(const Capture& slice, const Result& truth, const RemediesOptions& options, RemedyTrial& trial,
               Gathered& gathered) {
  RemainingDrift drift(slice.problem);
  RunOptions run;
  run.want_uncast = true;
  run.observer = &drift;
  if (options.progress) run.progress = [&](double share) { options.progress(trial.name, share); };
  const Result result = make_backend(trial.name)->run(slice, run);
  ErrorsAgainstTruth errors(slice.problem);
  errors.add_slice(result, truth, 0, slice.problem.heads_kv);
  const std::vector<TensorErrors>& tensors = errors.tensors();
  ErrorSum* const before[] = {&trial.out, &trial.dq, &trial.dk, &trial.dv};
  ErrorSum* const stored[] = {&trial.out_stored, &trial.dq_stored, &trial.dk_stored, &trial.dv_stored};
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    before[t]->add(tensors[t].whole.before_cast);
    stored[t]->add(tensors[t].whole.stored);
  }
  gathered.rows += drift.rows();
  gathered.drift2 += drift.drift_squares();
  gathered.leak2 += drift.leak_squares();
}

bool centres_inputs(const RemedySet& remedies) {
  return remedies.has(Remedy::mean_free_keys) || remedies.has(Remedy::mean_free_keys_bf16);
}

/// What the cast of moved keys does by itself: one truth against the other.
void add_input_error(const Problem& slice, const Result& moved, const Result& truth, RemedyTrial& trial) {
  ErrorsAgainstTruth errors(slice);
  errors.add_slice(moved, truth, 0, slice.heads_kv);
  trial.dq_of_inputs.add(errors.tensors()[1].whole.before_cast);
  trial.dk_of_inputs.add(errors.tensors()[2].whole.before_cast);
}

/// Errors leave out what is not finite, so a trial must not have more of that than fp32.
bool good_enough(const RemedyTrial& trial, const RemedyTrial& fp32, double factor) {
  return trial.not_tried.empty() && !trial.other_function && trial.dq_times_fp32 <= factor &&
         trial.dk_times_fp32 <= factor && trial.dq_stored.not_finite <= fp32.dq_stored.not_finite &&
         trial.dk_stored.not_finite <= fp32.dk_stored.not_finite;
}

/// Why the errors of fp32 can be no yardstick; "": they can.
std::string missing_yardstick(const RemedyTrial& fp32) {
  const auto why = [](const char* tensor, const ErrorSum& error) -> std::string {
    if (!std::isnan(error.relative())) return "";
    return std::string("no error of fp32's ") + tensor +
           (error.elements == error.not_finite ? ": nothing is finite" : ": the truth is zero");
  };
  const std::string dq = why("dQ", fp32.dq_stored);
  return dq.empty() ? why("dK", fp32.dk_stored) : dq;
}

bool has_input_remedy(const RemedySet& remedies) {
  return std::any_of(profile::kRemedies.begin(), profile::kRemedies.end(), [&](const profile::RemedyInfo& i) {
    return remedies.has(i.remedy) && is_input_remedy(i.remedy);
  });
}

bool has_experimental_remedy(const RemedySet& remedies) {
  return std::any_of(profile::kRemedies.begin(), profile::kRemedies.end(),
                     [&](const profile::RemedyInfo& i) { return remedies.has(i.remedy) && i.experimental; });
}

bool changes_function(const RemedySet& remedies) {
  return remedies.has(Remedy::qk_norm) || remedies.has(Remedy::qk_norm_gain);
}

RemedyTrial new_trial(const Capture& capture, const std::string& name) {
  RemedyTrial trial;
  trial.name = name;
  try {
    trial.remedies = profile::parse_remedies(name).remedies;
  } catch (const std::invalid_argument& error) {
    throw InputError(error.what());
  }
  make_backend(name);  // a name that means nothing ends here
  trial.other_function = changes_function(trial.remedies);
  trial.cost = cost_of(capture.problem, trial.remedies);
  try {
    check_remedies_fit(capture, trial.remedies);
  } catch (const InputError& error) {
    trial.not_tried = error.what();
  }
  return trial;
}

}  // namespace

CostOfRemedies cost_of(const Problem& problem, const RemedySet& remedies) {
  CostOfRemedies cost;
  cost.pairs = visible_pairs(problem);
  const auto dim = static_cast<double>(problem.head_dim);
  const auto rows = static_cast<double>(problem.total_q() * problem.heads_q);
  double forward_products = 0;
  double low = 0;
  double high = 0;
  bool measured = true;
  const auto add = [&](const profile::RemedyCost& c) {
    cost.forward_ops += c.forward_ops;
    cost.backward_ops += c.backward_ops;
    forward_products += c.forward_products;
    cost.products += c.forward_products + c.backward_products + c.backward_columns / dim;
    cost.fp32_products += c.fp32_products;
    cost.bytes += c.bytes_per_out * static_cast<double>(problem.total_q() * problem.out_stride()) +
                  c.bytes_per_q * static_cast<double>(problem.total_q() * problem.q_stride()) +
                  c.bytes_per_k * static_cast<double>(problem.total_k() * problem.k_stride()) +
                  c.bytes_per_row * rows;
  };
  std::uint8_t shared = 0;
  for (const profile::RemedyInfo& i : profile::kRemedies) {
    if (!remedies.has(i.remedy)) continue;
    add(i.cost);
    shared |= i.shares;
    measured = measured && i.cost.measured_high >= 0;
    low += i.cost.measured_low;
    high += i.cost.measured_high;
  }
  for (const profile::SharedCost& s : profile::kSharedCosts) {
    if (profile::has(shared, s.work)) add(s.cost);
  }
  if (cost.pairs == 0) return cost;
  // Cycles of one multiprocessor for a pair.
  const double unmodified =
      dim / kProducts * (kForwardProducts / kForwardShare + kBackwardProducts / kBackwardShare) +
      kOwnBytes * dim * rows / kBytes / cost.pairs;
  const double added_products =
      dim / kProducts *
      (forward_products / kForwardShare + (cost.products - forward_products) / kBackwardShare);
  const double added_operations =
      (cost.forward_ops + cost.backward_ops + cost.fp32_products * dim) / kOperations;
  const double added_bytes = cost.bytes / kBytes / cost.pairs;
  cost.estimate = (added_products + added_operations + added_bytes) / unmodified;
  if (measured) {
    cost.measured_low = low;
    cost.measured_high = high;
  }
  return cost;
}

double times_fp32(double error, double fp32_error) {
  if (std::isnan(error) || std::isnan(fp32_error)) return std::numeric_limits<double>::quiet_NaN();
  if (fp32_error > 0) return error / fp32_error;
  return error > 0 ? std::numeric_limits<double>::infinity() : 1.0;
}

std::vector<std::string> usual_trials(bool experimental) {
  std::vector<std::string> names{
      "subtract-first",
      "shifted-max",
      "rounded-sum",
      "gproj",
      "subtract-first+gproj",
      "gproj-weighted",
      "o-residual",
      "o-residual8",
      "consistent-d",
      "centred-keys",
      "heavy-low",
      "heavy-projection",
      "ds-split",
      "o-residual8+centred-keys",
      "o-residual8+rounded-sum",
      "o-residual8+rounded-sum+centred-keys",
      "centred-keys+heavy-projection",
      "centred-keys+heavy-low+heavy-projection",
      "o-residual8+rounded-sum+centred-keys+heavy-low",
      "o-residual8+rounded-sum+centred-keys+heavy-low+heavy-projection",
      "consistent-d+gproj",
      "consistent-d+gproj-weighted",
      "o-residual+rounded-sum+ds-split",
      "fp32-backward",
      "mean-free-keys",
      "mean-free-keys-bf16",
      "o-residual8+mean-free-keys",
      "qk-norm",
      "qk-norm-gain",
  };
  if (experimental) {
    for (const profile::RemedyInfo& i : profile::kRemedies) {
      if (i.experimental) names.emplace_back(i.name);
    }
  }
  for (std::string& name : names) name = "fa3+" + name;
  return names;
}

bool is_other_function(const std::string& name) {
  return changes_function(profile::parse_remedies(name).remedies);
}

RemediesReport try_remedies(const Capture& capture, const RemediesOptions& options) {
  const Problem& problem = capture.problem;
  if (problem.dout.empty()) {
    throw InputError(capture.name + ": no dout, expected a capture whose gradients can be computed");
  }
  RemediesReport report;
  report.capture = capture.name;
  report.factor = options.factor;
  report.trials.push_back(new_trial(capture, "fa3"));
  for (const std::string& name : options.names.empty() ? usual_trials(options.experimental) : options.names) {
    report.trials.push_back(new_trial(capture, name));
  }
  report.trials.push_back(new_trial(capture, "fa3+fp32"));

  std::vector<Gathered> gathered(report.trials.size());
  // A KV head and its query heads at a time, so that no more than their truth is held at once.
  for (std::size_t h = 0; h < problem.heads_kv; ++h) {
    if (options.kv_head && *options.kv_head != h) continue;
    Capture slice;
    slice.name = capture.name;
    slice.problem = slice_heads(problem, h, 1);
    Truths truths(slice, options);
    for (std::size_t t = 0; t < report.trials.size(); ++t) {
      RemedyTrial& trial = report.trials[t];
      if (!trial.not_tried.empty()) continue;
      const Result& truth = truths.of(trial.remedies);
      add_trial(slice, truth, options, trial, gathered[t]);
      if (centres_inputs(trial.remedies)) {
        add_input_error(slice.problem, truths.of_inputs(trial.remedies), truth, trial);
      }
    }
  }
  for (std::size_t t = 0; t < report.trials.size(); ++t) {
    RemedyTrial& trial = report.trials[t];
    const Gathered& g = gathered[t];
    trial.drift = trial.leak = std::numeric_limits<double>::quiet_NaN();
    if (g.rows == 0) continue;
    trial.drift = std::sqrt(g.drift2 / static_cast<double>(g.rows));
    if (trial.dq.truth2 > 0) trial.leak = std::sqrt(g.leak2 / trial.dq.truth2);
  }
  const RemedyTrial& fp32 = report.trials.back();
  report.no_yardstick = missing_yardstick(fp32);
  for (RemedyTrial& trial : report.trials) {
    trial.dq_times_fp32 = times_fp32(trial.dq_stored.relative(), fp32.dq_stored.relative());
    trial.dk_times_fp32 = times_fp32(trial.dk_stored.relative(), fp32.dk_stored.relative());
  }
  if (!report.no_yardstick.empty()) return report;
  for (std::size_t t = 0; t < report.trials.size(); ++t) {
    const RemedyTrial& trial = report.trials[t];
    if (has_experimental_remedy(trial.remedies) || !good_enough(trial, fp32, options.factor)) continue;
    const auto cheaper_than = [&](const std::optional<std::size_t>& best) {
      return !best || trial.cost.rank() < report.trials[*best].cost.rank();
    };
    if (cheaper_than(report.cheapest_with_inputs)) report.cheapest_with_inputs = t;
    if (!has_input_remedy(trial.remedies) && cheaper_than(report.cheapest)) report.cheapest = t;
  }
  return report;
}

}  // namespace bitattn::audit
