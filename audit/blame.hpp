#pragma once
// Blame: which rounding site owns how much of an error. How shares are computed, what they mean and what they
// do not: docs/blame.md.

#include <cstddef>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "audit/locate.hpp"
#include "audit/row_part.hpp"
#include "audit/site_reach.hpp"
#include "backends/remedied.hpp"

namespace bitattn::audit {

/// What one site owns of one error, as shares of |error|^2: 1 is all of it. A share can be negative (the site
/// cancels what others do) or above 1.
struct SiteShare {
  profile::Site site = profile::Site::score_mma;
  /// Shapley value over the sites that matter and the group of all others; NaN for a site of that group.
  double fair = std::numeric_limits<double>::quiet_NaN();
  double off_alone = 0;  ///< what of |error|^2 goes when this site alone is exact
  double on_alone = 0;   ///< |error|^2 when this site alone is as the chip does, over that with all of them
  bool grouped() const { return fair != fair; }
};

/// One error, split among the sites that can move its tensor.
struct ErrorShares {
  Blamed tensor = Blamed::out;
  double error2 = 0;                         ///< |x - truth|^2, x as stored, every site as the chip does
  double truth2 = 0;                         ///< |truth|^2; of score_gradient_sum 0
  std::size_t elements = 0, not_finite = 0;  ///< not_finite: left out
  std::vector<SiteShare>
      sites;               ///< those split one by one by falling fair share, then the others by falling size
  std::size_t others = 0;  ///< sites of the group, at the end of `sites`
  double others_fair = 0;  ///< the group's share; with the fair shares of all other sites it makes 1
  /// |x - truth| / |truth|; NaN where the truth is zero and the error is not, or nothing is finite.
  double relative() const;
  /// Some element was looked at and is finite.
  bool any_finite() const { return elements > not_finite; }
};

struct BlamedHead {
  std::size_t head = 0;  ///< query head (out, dq, score_gradient_sum) or KV head (dk, dv)
  std::vector<ErrorShares> tensors;
};

struct BlamedRow {
  RowId row;
  std::vector<ErrorShares> tensors;  ///< out, dq, score_gradient_sum
};

/// The sum R of a row's cast dS by its closed form, R = (G - D) - D(sum P' - 1) + eta + beta
/// (docs/spec/fa3-operation-order.md 9.2), as shares of |R|^2 over rows: <term, R> / <R, R>.
struct SumSplit {
  double before = std::numeric_limits<double>::quiet_NaN();  ///< (G - D) - D(sum P' - 1): all before dP - D
  double eta = std::numeric_limits<double>::quiet_NaN();     ///< fp32 rounding of dP - D and of the product
  double beta = std::numeric_limits<double>::quiet_NaN();    ///< cast of dS
};

struct Blame {
  std::string kernel;
  std::vector<RowPart> parts;  ///< what was looked at, worst first
  bool whole = false;          ///< every row of the capture was
  std::size_t rows = 0;        ///< that count
  std::size_t rows_of_capture = 0;
  std::size_t runs = 0;                 ///< of the emulated kernel, forward or backward, over all parts
  std::vector<ErrorShares> tensors;     ///< over everything looked at, in the order of Blamed
  std::vector<BlamedHead> query_heads;  ///< worst (relative error of dQ, or of out) first
  std::vector<BlamedHead> kv_heads;     ///< the same by dK
  std::vector<BlamedRow> worst_rows;    ///< by score-gradient sum (forward only: none)
  /// The row sums' split in closed form, and by the fair shares of the sites that each term is made of. NaN
  /// with softcap or without a backward.
  SumSplit sums_in_closed_form, sums_by_sites;
  /// What no site explains: how far |dQ - truth|^2 before the last cast is from the reference's, over the
  /// rows looked at, relative to it. NaN without reference.
  double left_over = std::numeric_limits<double>::quiet_NaN();
};

struct BlameOptions {
  std::size_t worst_rows = 8;
  const RowFindings* findings = nullptr;       ///< of the same kernel on the capture: for the closed form
  const Fp64Tensor* dq_error_norm = nullptr;   ///< by row, before the last cast, against the reference
  std::function<void(double share)> progress;  ///< from any thread; may throw to cancel
};

/// Runs the kernel over the parts with its sites on and off, some hundred times. Throws InputError where the
/// kernel cannot run the problem.
Blame blame(const Capture& capture, const EmulatedKernel& kernel, const std::vector<RowPart>& parts,
            const BlameOptions& options);

}  // namespace bitattn::audit
