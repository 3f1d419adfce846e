#pragma once
// Pieces of HTML: text made safe, numbers as a reader wants them. All of it is also well-formed XML.

#include <string>
#include <vector>

#include "cli/output.hpp"

namespace bitattn::cli::page {

/// Text from anywhere (captures are not to be trusted) as the content of an element or of an attribute:
/// markup escaped, control characters and what is no UTF-8 replaced.
std::string escaped(const std::string& text);

/// "3.2×10⁻⁷", "0.012", "66", "1,234"; "0" for zero, "–" for what is not defined.
std::string number_text(double x);
/// A share: "1.2 %", "7,800 times".
std::string share_text(double share);
/// "10⁻⁷"
std::string power_of_ten(int exponent);

/// How a number is written.
enum class Style : unsigned char { number, share, count };

/// The number at a JSON pointer of a diagnosis, as <data value="exact" data-key="pointer">text</data>; null
/// and absent are "–". So the page can be held against the JSON, digit by digit.
std::string figure(const Json& json, const std::string& pointer, Style style = Style::number);
/// That text, escaped; "" where it is none.
std::string text_at(const Json& json, const std::string& pointer);

/// A section of the page: heading, a soft line below it ("": none), and what follows.
std::string section(const std::string& title, const std::string& intro, const std::string& content);

/// A table that scrolls by itself where the page is narrow. All of it is HTML; a column whose classes name
/// "left" has its cells begin there.
struct Column {
  std::string heading;
  std::string classes;
};
std::string table(const std::vector<Column>& columns, const std::vector<std::vector<std::string>>& rows);

}  // namespace bitattn::cli::page
