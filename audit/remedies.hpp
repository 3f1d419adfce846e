#pragma once
// Remedies tried on a capture: what each one leaves of the errors, of the drift and of the leak, and what it
// costs; and the cheapest one that is good enough. Every figure: docs/remedies.md.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "audit/errors.hpp"
#include "datasets/result.hpp"
#include "emu/profile/remedies.hpp"

namespace bitattn::audit {

/// What remedies cost beyond the unmodified kernel, forward and backward together, for one problem.
struct CostOfRemedies {
  double pairs = 0;                          ///< visible (query, key) pairs, all query heads
  double forward_ops = 0, backward_ops = 0;  ///< fp32 operations for every pair
  double products = 0;       ///< on the tensor core, for every pair and column of a head; the kernel has 7
  double fp32_products = 0;  ///< the same without the tensor core
  double bytes = 0;          ///< written and read
  double estimate = 0;       ///< share of the unmodified kernel's time, from these counts
  /// Share measured in a real kernel; only where every remedy of the set was.
  std::optional<double> measured_low, measured_high;
  /// What remedies are ranked by: the middle of the measured share, else the estimate.
  double rank() const { return measured_low ? (*measured_low + *measured_high) / 2 : estimate; }
};

/// Costs of the set; docs/remedies.md says how the estimate is made.
CostOfRemedies cost_of(const Problem& problem, const profile::RemedySet& remedies);

struct RemedyTrial {
  std::string name;  ///< backend
  profile::RemedySet remedies;
  bool other_function = false;  ///< errors are those of another problem (qk-norm)
  std::string not_tried;        ///< why not; "": it was
  ErrorSum out, dq, dk, dv;     ///< before the last cast
  ErrorSum out_stored, dq_stored, dk_stored, dv_stored;
  /// Mean-free keys: error of the truth on the keys that they are cast to, which any kernel then has; against
  /// the same truth as the rest. No elements for other remedies.
  ErrorSum dq_of_inputs, dk_of_inputs;
  /// Stored error over that of fp32; 1 where both are exact, infinity where only fp32 is, NaN where either is
  /// not defined.
  double dq_times_fp32 = 0, dk_times_fp32 = 0;
  double drift = 0;  ///< RMS over rows of the sum of what is multiplied with K, corrections included; NaN:
                     ///< not seen
  /// |softmax_scale * drift * key averaged with the row's P'| over |dQ|, Frobenius; the key is the one that
  /// dS is multiplied with. NaN: not seen.
  double leak = 0;
  CostOfRemedies cost;
};

struct RemediesOptions {
  std::vector<std::string> names;  ///< backends to try beside fa3 and fa3+fp32; empty: the usual ones
  bool experimental = false;       ///< and those that are known to hurt
  double factor = 1.2;             ///< good enough: stored dQ and dK within this times those of fp32
  std::string reference = "reference";
  std::optional<std::size_t> kv_head;  ///< this KV head and its query heads alone; costs are the capture's
  /// Called with what is being done and the share done, from any thread; may throw to cancel.
  std::function<void(const std::string& stage, double share)> progress;
};

struct RemediesReport {
  std::string capture;
  double factor = 0;
  std::vector<RemedyTrial> trials;  ///< fa3 first, fa3+fp32 last
  /// Index of the cheapest trial that is good enough in dQ and dK: inside the kernel, and with changes of the
  /// model's inputs allowed. None: not even one was.
  std::optional<std::size_t> cheapest, cheapest_with_inputs;
  std::string no_yardstick;  ///< why fp32's errors are no yardstick and nothing is recommended; "": they are
  bool plain_is_enough() const { return cheapest && *cheapest == 0; }
};

/// A trial's stored error over fp32's (RemedyTrial::dq_times_fp32).
double times_fp32(double error, double fp32_error);

/// The backends that are tried unless others are named.
std::vector<std::string> usual_trials(bool experimental);

/// Its errors are those of another problem: qk-norm among its remedies.
bool is_other_function(const std::string& name);

/// Throws InputError where the capture has no dout, or fa3 cannot run it, or a name means nothing.
RemediesReport try_remedies(const Capture& capture, const RemediesOptions& options);

}  // namespace bitattn::audit
