#pragma once
// Charts as inline SVG. Positions along x are in per cent, so that a chart is as wide as its place and its
// text stays as large as it is. Colours come from the page's style sheet, one class a meaning.

#include <optional>
#include <string>
#include <vector>

#include "audit/row_bins.hpp"

namespace bitattn::cli::page {

/// A logarithmic axis from 10^first to 10^last.
struct DecadeAxis {
  int first = 0, last = 1;
  /// Around all positive finite values, and at least `least` decades.
  static DecadeAxis around(const std::vector<double>& values, int least = 2);
  /// Place of x in per cent, held within the axis; 0 for what is not above 0.
  double place(double x) const;
  /// Exponents that get a label: at most `most`.
  std::vector<int> labels(std::size_t most) const;
};

/// One line of a chart of points on a common axis.
struct PointRow {
  std::string label;             ///< HTML
  std::optional<double> hollow;  ///< a second point, drawn as a ring
  double value = 0;              ///< the point
  std::string figure, remark;    ///< HTML beside it
};
/// `mark`: a vertical line with its label, where something on the axis means something.
struct Mark {
  double value = 0;
  std::string label;
};
std::string point_chart(const std::string& hue, const DecadeAxis& axis, const std::vector<PointRow>& rows,
                        const std::optional<Mark>& mark = std::nullopt);

/// Rows of one head as bins along the token axis.
struct Strip {
  std::string label, hover;  ///< text, not escaped
  std::vector<audit::RowBin> bins;
  std::string figure;  ///< HTML to the right: "" for none
};
/// Heads over rows: the largest magnitude in each bin, in eight steps of half a decade down from the largest
/// of all.
std::string strip_map(const std::string& hue, const std::vector<Strip>& strips);

/// One head over rows on a logarithmic axis: a band from the smallest to the largest of each bin, and the RMS
/// as a line. `ticks`: labels along the rows, each at a place in per cent.
struct RowTick {
  double place = 0;
  std::string label;
};
std::string row_profile(const std::string& hue, const std::vector<audit::RowBin>& bins,
                        const std::vector<RowTick>& ticks, const std::string& hover);

/// A bar of parts of a whole, with their shares printed beside it.
struct SharePart {
  std::string label;  ///< HTML
  double share = 0;
  std::string figure;  ///< HTML
};
std::string share_bars(const std::string& hue, const std::vector<SharePart>& parts);

}  // namespace bitattn::cli::page
