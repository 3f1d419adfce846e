#include "cli/page/charts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "cli/page/html.hpp"

namespace bitattn::cli::page {

namespace {

constexpr int kLevels = 8;
constexpr double kLevelsPerDecade = 2;

std::string percent_place(double place) {
  return fmt::format("{:.2f}%", place);
}

/// 1 to kLevels by magnitude, half a decade each; 0 for zero.
int level_of(double x, double largest) {
  if (!(x > 0) || !(largest > 0)) return 0;
  const double below = std::log10(largest / x) * kLevelsPerDecade;
  return std::max(1, kLevels - static_cast<int>(std::floor(below)));
}

/// Bins of one level as one path, runs of neighbours as one rectangle.
std::string level_paths(const std::vector<audit::RowBin>& bins, double largest) {
  std::array<std::string, kLevels + 1> paths;
  for (std::size_t begin = 0; begin < bins.size();) {
    const auto level = [&](std::size_t at) {
      return bins[at].rows == 0 ? -1 : level_of(bins[at].largest, largest);
    };
    const int here = level(begin);
    std::size_t end = begin + 1;
    while (end < bins.size() && level(end) == here) ++end;
    if (here >= 0)
      paths[static_cast<std::size_t>(here)] +=
          fmt::format("M{} 0h{}v1h-{}z", begin, end - begin, end - begin);
    begin = end;
  }
  std::string text;
  for (int level = 0; level <= kLevels; ++level) {
    const std::string& path = paths[static_cast<std::size_t>(level)];
    if (!path.empty()) text += fmt::format("<path class=\"l{}\" d=\"{}\"/>", level, path);
  }
  return text;
}

double largest_of(const std::vector<Strip>& strips) {
  double largest = 0;
  for (const Strip& strip : strips) {
    for (const audit::RowBin& bin : strip.bins) {
      if (bin.rows > 0) largest = std::max(largest, bin.largest);
    }
  }
  return largest;
}

std::string level_legend(const std::string& hue, double largest) {
  if (!(largest > 0)) return "<p class=\"legend\">0 in every row</p>";
  std::string text = fmt::format("<p class=\"legend {}\"><span>below {}</span>", hue,
                                 number_text(largest / std::pow(10, (kLevels - 1) / kLevelsPerDecade)));
  text += "<svg class=\"levels\" width=\"128\" height=\"10\" aria-hidden=\"true\">";
  for (int level = 1; level <= kLevels; ++level) {
    text += fmt::format("<rect class=\"l{}\" x=\"{}\" width=\"16\" height=\"10\"/>", level, (level - 1) * 16);
  }
  return text + fmt::format("</svg><span>{}</span></p>", number_text(largest));
}

}  // namespace

DecadeAxis DecadeAxis::around(const std::vector<double>& values, int least) {
  double smallest = 0;
  double largest = 0;
  for (const double x : values) {
    if (!(x > 0) || !std::isfinite(x)) continue;
    smallest = smallest == 0 ? x : std::min(smallest, x);
    largest = std::max(largest, x);
  }
  if (largest == 0) return {-least, 0};
  DecadeAxis axis{static_cast<int>(std::floor(std::log10(smallest))),
                  static_cast<int>(std::ceil(std::log10(largest)))};
  if (axis.last == axis.first) ++axis.last;
  axis.first = std::min(axis.first, axis.last - least);
  return axis;
}

double DecadeAxis::place(double x) const {
  if (!(x > 0)) return 0;
  return std::clamp((std::log10(x) - first) / (last - first), 0.0, 1.0) * 100;
}

std::vector<int> DecadeAxis::labels(std::size_t most) const {
  int step = 1;
  while (static_cast<std::size_t>((last - first) / step) + 1 > most) ++step;
  std::vector<int> exponents;
  for (int e = last; e >= first; e -= step) exponents.push_back(e);
  std::reverse(exponents.begin(), exponents.end());
  return exponents;
}

std::string point_chart(const std::string& hue, const DecadeAxis& axis, const std::vector<PointRow>& rows,
                        const std::optional<Mark>& mark) {
  std::string lines;
  const std::vector<int> labels = axis.labels(6);
  for (const int e : labels) {
    lines += fmt::format("<line class=\"grid\" x1=\"{0}\" x2=\"{0}\" y1=\"0\" y2=\"100%\"/>",
                         percent_place(axis.place(std::pow(10, e))));
  }
  if (mark) {
    lines += fmt::format("<line class=\"mark\" x1=\"{0}\" x2=\"{0}\" y1=\"0\" y2=\"100%\"/>",
                         percent_place(axis.place(mark->value)));
  }
  std::string text = "<div class=\"points " + hue + "\">";
  for (const PointRow& row : rows) {
    text += "<div class=\"label\">" + row.label + "</div><div class=\"value\">" + row.figure + "</div>";
    text += "<svg class=\"track\" aria-hidden=\"true\">" + lines;
    const bool shown = std::isfinite(row.value) && row.value > 0;
    if (row.hollow && std::isfinite(*row.hollow) && *row.hollow > 0) {
      if (shown) {
        text += fmt::format("<line class=\"between\" x1=\"{}\" x2=\"{}\" y1=\"50%\" y2=\"50%\"/>",
                            percent_place(axis.place(*row.hollow)), percent_place(axis.place(row.value)));
      }
      text += fmt::format("<circle class=\"ring\" cx=\"{}\" cy=\"50%\" r=\"4.5\"/>",
                          percent_place(axis.place(*row.hollow)));
    }
    if (shown) {
      text += fmt::format("<circle class=\"dot\" cx=\"{}\" cy=\"50%\" r=\"5\"/>",
                          percent_place(axis.place(row.value)));
    }
    text += "</svg><div class=\"remark\">" + row.remark + "</div>";
  }
  text += "<div class=\"label\"></div><div class=\"value\"></div><svg class=\"scale\" aria-hidden=\"true\">";
  for (const int e : labels) {
    const double place = axis.place(std::pow(10, e));
    const char* anchor = place < 4 ? "start" : place > 96 ? "end" : "middle";
    text += fmt::format("<text x=\"{}\" y=\"12\" text-anchor=\"{}\">{}</text>", percent_place(place), anchor,
                        e == 0 ? "1" : power_of_ten(e));
  }
  text += "</svg><div class=\"remark\">";
  if (mark) text += "<span class=\"markkey\"></span>" + mark->label;
  return text + "</div></div>";
}

std::string strip_map(const std::string& hue, const std::vector<Strip>& strips) {
  const double largest = largest_of(strips);
  const bool figures =
      std::any_of(strips.begin(), strips.end(), [](const Strip& s) { return !s.figure.empty(); });
  const bool low = strips.size() > 16;
  std::string text =
      fmt::format("<div class=\"strips {}{}{}\">", hue, low ? " low" : "", figures ? "" : " bare");
  // Of many heads every fourth or eighth is named.
  const std::size_t named = strips.size() > 64 ? 8 : low ? 4 : 1;
  for (std::size_t n = 0; n < strips.size(); ++n) {
    const Strip& strip = strips[n];
    text += "<div class=\"label\">" + (n % named == 0 ? escaped(strip.label) : "") + "</div>";
    text += fmt::format(
        "<svg class=\"strip\" viewBox=\"0 0 {} 1\" preserveAspectRatio=\"none\"><title>{}</title>{}</svg>",
        std::max<std::size_t>(1, strip.bins.size()), escaped(strip.hover), level_paths(strip.bins, largest));
    if (figures) text += "<div class=\"value\">" + strip.figure + "</div>";
  }
  return text + "</div>" + level_legend(hue, largest);
}

std::string row_profile(const std::string& hue, const std::vector<audit::RowBin>& bins,
                        const std::vector<RowTick>& ticks, const std::string& hover) {
  std::vector<double> values;
  for (const audit::RowBin& bin : bins) {
    if (bin.rows > 0) values.insert(values.end(), {bin.smallest, bin.largest, bin.rms});
  }
  DecadeAxis axis = DecadeAxis::around(values);
  // What is many decades below the largest tells nothing and would flatten the rest.
  constexpr int kMostDecades = 6;
  axis.first = std::max(axis.first, axis.last - kMostDecades);
  const auto height = [&](double x) { return 100 - axis.place(x); };
  std::string band;
  std::string line;
  bool drawing = false;
  for (std::size_t n = 0; n < bins.size(); ++n) {
    const audit::RowBin& bin = bins[n];
    if (bin.rows == 0) {
      drawing = false;
      continue;
    }
    const double top = height(bin.largest);
    // At least a hair, so that a single row's figure shows.
    const double low = std::max(height(bin.smallest), top + 1.2);
    band += fmt::format("M{} {:.1f}h1V{:.1f}h-1z", n, top, low);
    line += fmt::format("{}{} {:.1f}h1", drawing ? "L" : "M", n, height(bin.rms));
    drawing = true;
  }
  // The plot takes 146 of 174 pixels; the rest is for the labels below it.
  const auto pixel = [&](int e) { return 4 + 142 * (1 - axis.place(std::pow(10, e)) / 100); };
  const std::vector<int> labels = axis.labels(4);
  std::string text = fmt::format("<div class=\"plot {}\"><svg class=\"scale\" aria-hidden=\"true\">", hue);
  for (const int e : labels) {
    text += fmt::format("<text x=\"100%\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>", pixel(e) + 4,
                        e == 0 ? "1" : power_of_ten(e));
  }
  text += fmt::format("</svg><svg class=\"profile\" role=\"img\"><title>{}</title>", escaped(hover));
  for (const int e : labels) {
    text +=
        fmt::format("<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"{0:.1f}\" y2=\"{0:.1f}\"/>", pixel(e));
  }
  text += fmt::format(
      "<svg x=\"0\" y=\"4\" width=\"100%\" height=\"142\" viewBox=\"0 0 {} 100\" "
      "preserveAspectRatio=\"none\">"
      "<path class=\"band\" d=\"{}\"/><path class=\"line\" d=\"{}\"/></svg>",
      std::max<std::size_t>(1, bins.size()), band, line);
  for (const RowTick& tick : ticks) {
    const char* anchor = tick.place < 4 ? "start" : tick.place > 96 ? "end" : "middle";
    text += fmt::format("<line class=\"tick\" x1=\"{0}\" x2=\"{0}\" y1=\"146\" y2=\"151\"/>",
                        percent_place(tick.place));
    text += fmt::format("<text x=\"{}\" y=\"165\" text-anchor=\"{}\">{}</text>", percent_place(tick.place),
                        anchor, escaped(tick.label));
  }
  return text +
         "</svg><div class=\"key\"><span class=\"linekey\"></span>RMS<br/><span "
         "class=\"bandkey\"></span>range</div></div>";
}

std::string share_bars(const std::string& hue, const std::vector<SharePart>& parts) {
  double largest = 0;
  for (const SharePart& part : parts)
    largest = std::max(largest, std::isfinite(part.share) ? std::abs(part.share) : 0);
  std::string text = "<div class=\"points bars " + hue + "\">";
  for (const SharePart& part : parts) {
    const double width = largest > 0 && std::isfinite(part.share) ? std::abs(part.share) / largest * 100 : 0;
    text += "<div class=\"label\">" + part.label + "</div><div class=\"value\">" + part.figure + "</div>";
    text += "<svg class=\"track\" aria-hidden=\"true\">";
    text += fmt::format("<rect class=\"bar{}\" x=\"0\" y=\"4\" width=\"{}\" height=\"10\"/></svg>",
                        part.share < 0 ? " minus" : "", percent_place(width));
  }
  return text + "</div>";
}

}  // namespace bitattn::cli::page
