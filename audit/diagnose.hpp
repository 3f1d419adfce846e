#pragma once
// The main job: run a kernel's emulation over a capture, look on row by row, compare with what was recorded
// and with the truth, and sum up where rounding goes wrong. Every figure: docs/diagnose.md.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "audit/blame.hpp"
#include "audit/compare.hpp"
#include "audit/errors.hpp"
#include "audit/find_remedies.hpp"
#include "audit/inputs.hpp"
#include "audit/locate.hpp"
#include "audit/row_choice.hpp"
#include "audit/witness.hpp"
#include "datasets/result.hpp"

namespace bitattn::audit {

/// How much of a capture blame runs over and over: nothing; the worst heads, or rows of the worst one, that
/// make about half a million visible pairs; everything. With chosen rows: those.
enum class BlameScope : std::uint8_t { none, worst, all };

struct DiagnoseOptions {
  std::string backend = "fa3";          ///< an emulated kernel
  std::string reference = "reference";  ///< the truth's backend; "": no truth
  RowChoice rows;                       ///< the truth is computed for these rows only (dK, dV then have none)
  BlameScope blame = BlameScope::none;
  std::size_t worst_rows = 8;   ///< rows that blame tells apart
  bool block_residues = false;  ///< keep the residue of every key block's running maximum
  /// Called with what is being done and the share done, from any thread; may throw to cancel.
  std::function<void(const std::string& stage, double share)> progress;
};

/// Figures of a set of rows: the whole capture or one query head.
struct RowSummary {
  RowStatistics residue;             ///< of the last row max
  double largest_block_residue = 0;  ///< over all key blocks' running maxima
  double largest_scaled_max = 0;     ///< |m * c|
  std::size_t tied_rows = 0;
  std::uint32_t most_ties = 0;
  RowStatistics p_sum_excess, before_cast, after_cast;
  RowStatistics g_minus_d, d_p_excess, eta, beta;
  /// Frobenius norms over the rows with a dQ to relate them to, over that dQ's norm; NaN where it is 0.
  double leak = 0, leak_mean_key = 0, condition = 0, dq_error = 0;
  std::size_t leak_rows = 0;
  double leak_norm = 0,
         dq_norm = 0;  ///< over the same rows, in units of dQ: `leak` is the one over the other
};

struct Diagnosis {
  std::string capture, backend;
  bool with_backward = false;
  InputSummary inputs;
  std::optional<Comparison> against_recorded;  ///< a: recorded, b: emulated
  std::optional<Witness> witness;              ///< where anything was recorded
  RowFindings rows;
  bool with_truth = false;
  std::string reference;             ///< its name
  std::vector<TensorErrors> errors;  ///< empty without truth
  double largest_lse_error = 0;      ///< NaN where no lse is finite
  Fp64Tensor dq_norm;  ///< per row: of the true dQ, without truth of the emulated one before its last cast
  Fp64Tensor dq_error_norm;  ///< per row, with truth
  double leak_dk = 0;  ///< Frobenius norm of what the row sums put into dK over that of the true dK, without
                       ///< truth of the emulated one; NaN where that is 0 or the truth is of chosen rows
  std::vector<double> leak_dk_by_head;  ///< KV heads
  Fp64Tensor leak_dk_norm;              ///< per key: [B,Hkv,Sk], THD [Hkv,total_k]
  RowSummary whole;
  std::vector<RowSummary> by_head;      ///< query heads, over all sequences
  std::vector<RowId> chosen;            ///< rows that were asked for; empty: all
  std::vector<SpecialValues> specials;  ///< in the emulated out, dq, dk, dv
  std::vector<std::string> notes;       ///< of the emulation
  Result emulated;
  RemediesFinding remedies;    ///< of find_remedies(), which the caller runs after diagnose()
  std::optional<Blame> blame;  ///< where asked for, the kernel has rounding sites and anything_finite()
  std::string blame_not_run;   ///< why not where it was asked for; "": it was run, or not asked for

  /// Does any row have a finite score, and with a backward a finite score gradient?
  bool anything_finite() const {
    return whole.residue.rows > 0 && (!with_backward || whole.before_cast.rows > 0);
  }

  /// The row sums that should be 0: after the cast, with softcap before it.
  const Fp64Tensor& drift(const Problem& problem) const {
    return problem.softcap > 0 ? rows.before_cast : rows.after_cast;
  }
};

/// Why anything_finite() does not hold.
std::string nothing_finite_text(const Diagnosis& diagnosis);

/// Throws InputError where the backend cannot run the problem or is none of an emulated kernel.
Diagnosis diagnose(const Capture& capture, const DiagnoseOptions& options);

}  // namespace bitattn::audit
