#include "cli/table.hpp"

#include <algorithm>

namespace bitattn::cli {

namespace {

/// Columns on a terminal: UTF-8 continuation bytes take none.
std::size_t columns_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0U) != 0x80U; }));
}

}  // namespace

Table& Table::column(const std::string& heading, bool left) {
  headings_.push_back(heading);
  left_.push_back(left);
  return *this;
}

void Table::row(std::vector<std::string> cells) {
  cells.resize(headings_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::text(int indent) const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < headings_.size(); ++c) {
    std::size_t width = columns_of(headings_[c]);
    for (const auto& row : rows_) width = std::max(width, columns_of(row[c]));
    widths.push_back(width);
  }
  std::string text;
  const auto add_line = [&](const std::vector<std::string>& cells) {
    std::string line(static_cast<std::size_t>(indent), ' ');
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const std::string padding(widths[c] - columns_of(cells[c]), ' ');
      line += left_[c] ? cells[c] + padding : padding + cells[c];
      line += "  ";
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  if (std::any_of(headings_.begin(), headings_.end(), [](const std::string& h) { return !h.empty(); })) {
    add_line(headings_);
  }
  for (const auto& row : rows_) add_line(row);
  return text;
}

std::string wrapped(const std::string& text, int indent, std::size_t width) {
  std::string lines;
  const std::string margin(static_cast<std::size_t>(indent), ' ');
  std::string line = margin;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (line.size() > margin.size() && columns_of(line) + 1 + columns_of(word) > width) {
      lines += line + "\n";
      line = margin;
    }
    if (line.size() > margin.size()) line += " ";
    line += word;
    begin = end + 1;
  }
  if (line.size() > margin.size()) lines += line + "\n";
  return lines;
}

std::string shortened(const std::string& text, std::size_t width) {
  return text.size() <= width ? text : ".." + text.substr(text.size() - width + 2);
}

}  // namespace bitattn::cli
