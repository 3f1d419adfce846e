#pragma once
// A plain text table: columns as wide as their longest cell, numbers to the right.

#include <string>
#include <vector>

namespace bitattn::cli {

class Table {
 public:
  /// A column's heading; `left`: its cells begin at the left.
  Table& column(const std::string& heading, bool left = false);
  void row(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  /// Every line begins with `indent` spaces and ends with a line feed.
  std::string text(int indent = 2) const;

 private:
  std::vector<std::string> headings_;
  std::vector<bool> left_;
  std::vector<std::vector<std::string>> rows_;
};

/// Breaks text at spaces into lines of at most `width` columns, each with `indent` spaces before it.
std::string wrapped(const std::string& text, int indent = 2, std::size_t width = 98);

/// The last `width` characters, with ".." before them where some are left off.
std::string shortened(const std::string& text, std::size_t width);

}  // namespace bitattn::cli
