#include "cli/page/html.hpp"

#include <fmt/format.h>

#include <cmath>

#include "datasets/shape_text.hpp"

namespace bitattn::cli::page {

namespace {

constexpr const char* kReplacement = "\uFFFD";
constexpr const char* kMinus = "−";
constexpr const char* kNone = "–";

/// Bytes of the well-formed UTF-8 sequence that begins at `from`; 0 where there is none.
std::size_t sequence_length(const std::string& text, std::size_t from) {
  const auto byte = [&](std::size_t at) {
    return static_cast<unsigned char>(at < text.size() ? text[at] : '\0');
  };
  const auto follows = [&](std::size_t at) { return (byte(at) & 0xc0U) == 0x80U; };
  const unsigned first = byte(from);
  const unsigned second = byte(from + 1);
  if (first < 0x80U) return 1;
  if (first >= 0xc2U && first < 0xe0U) return follows(from + 1) ? 2 : 0;
  if (first >= 0xe0U && first < 0xf0U) {
    const bool overlong = first == 0xe0U && second < 0xa0U;
    const bool surrogate = first == 0xedU && second >= 0xa0U;
    const bool noncharacter = first == 0xefU && second == 0xbfU && byte(from + 2) >= 0xbeU;  // none of XML's
    return follows(from + 1) && follows(from + 2) && !overlong && !surrogate && !noncharacter ? 3 : 0;
  }
  if (first >= 0xf0U && first < 0xf5U) {
    const bool outside = (first == 0xf0U && second < 0x90U) || (first == 0xf4U && second >= 0x90U);
    return follows(from + 1) && follows(from + 2) && follows(from + 3) && !outside ? 4 : 0;
  }
  return 0;
}

std::string grouped_integer(double x) {
  return (x < 0 ? kMinus : "") + grouped(static_cast<std::size_t>(std::llround(std::abs(x))));
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string safe;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = sequence_length(text, at);
    if (length == 0) {
      safe += kReplacement;
      ++at;
      continue;
    }
    const char c = text[at];
    if (length > 1) {
      safe.append(text, at, length);
    } else if (static_cast<unsigned char>(c) < 0x20U || c == 0x7f) {
      safe += c == '\n' || c == '\t' ? " " : kReplacement;
    } else if (c == '&') {
      safe += "&amp;";
    } else if (c == '<') {
      safe += "&lt;";
    } else if (c == '>') {
      safe += "&gt;";
    } else if (c == '"') {
      safe += "&quot;";
    } else if (c == '\'') {
      safe += "&#39;";
    } else {
      safe += c;
    }
    at += length;
  }
  return safe;
}

std::string power_of_ten(int exponent) {
  static const char* const kDigits[] = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string text = "10";
  if (exponent < 0) text += "⁻";
  for (const char c : std::to_string(std::abs(exponent))) text += kDigits[c - '0'];
  return text;
}

std::string number_text(double x) {
  if (std::isnan(x)) return kNone;
  if (x == 0) return "0";
  if (std::isinf(x)) return std::string(x < 0 ? kMinus : "") + "∞";
  const double magnitude = std::abs(x);
  const std::string sign = x < 0 ? kMinus : "";
  if (magnitude >= 0.01 && magnitude < 9.95) return sign + fmt::format("{:.2g}", magnitude);
  if (magnitude >= 9.95 && magnitude < 99999.5) return grouped_integer(x);
  const std::string text = fmt::format("{:.1e}", magnitude);
  const std::size_t e = text.find('e');
  return sign + text.substr(0, e) + "×" + power_of_ten(std::stoi(text.substr(e + 1)));
}

std::string share_text(double share) {
  if (!std::isfinite(share)) return number_text(share);
  if (share >= 10) return number_text(share) + " times";
  const double x = share * 100;
  if (x == 0) return "0 %";
  if (x < 0.01) return number_text(x) + " %";
  return (x >= 9.95 ? grouped_integer(x) : fmt::format("{:.2g}", x)) + " %";
}

std::string text_at(const Json& json, const std::string& pointer) {
  const Json& value = at(json, pointer);
  return value.is_string() ? escaped(value.get<std::string>()) : "";
}

std::string figure(const Json& json, const std::string& pointer, Style style) {
  const double x = number_at(json, pointer);
  const std::string text = style == Style::share                       ? share_text(x)
                           : style == Style::count && std::isfinite(x) ? grouped_integer(x)
                                                                       : number_text(x);
  return "<data value=\"" + (std::isfinite(x) ? shortest_text(x) : "") + "\" data-key=\"" + escaped(pointer) +
         "\">" + text + "</data>";
}

std::string section(const std::string& title, const std::string& intro, const std::string& content) {
  return "<section><h2>" + title + "</h2>" + (intro.empty() ? "" : "<p class=\"soft\">" + intro + "</p>") +
         content + "</section>\n";
}

std::string table(const std::vector<Column>& columns, const std::vector<std::vector<std::string>>& rows) {
  std::string text = "<div class=\"scroll\"><table><thead><tr>";
  for (const Column& column : columns) {
    text += "<th" + (column.classes.empty() ? "" : " class=\"" + column.classes + "\"") + ">" +
            column.heading + "</th>";
  }
  text += "</tr></thead><tbody>";
  for (const auto& row : rows) {
    text += "<tr>";
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const bool left = columns[c].classes.find("left") != std::string::npos;
      text += (left ? "<td class=\"left\">" : "<td>") + row[c] + "</td>";
    }
    text += "</tr>";
  }
  return text + "</tbody></table></div>";
}

}  // namespace bitattn::cli::page
