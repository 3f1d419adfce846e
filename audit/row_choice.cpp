#include "audit/row_choice.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "audit/locate.hpp"
#include "datasets/error.hpp"

namespace bitattn::audit {

namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end == std::string::npos ? end : end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

std::size_t parse_count(const std::string& text, const std::string& whole) {
  std::size_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) {
    throw InputError("--rows " + whole + ": '" + text +
                     "' is no row number (N worst rows, or a list as in 5,100-120,h:i,b:h:i)");
  }
  return value;
}

}  // namespace

RowChoice parse_rows(const std::string& text) {
  RowChoice choice;
  if (text.find_first_of(",-:") == std::string::npos) {
    choice.worst = parse_count(text, text);
    if (choice.worst == 0) throw InputError("--rows 0: expected at least one row");
    return choice;
  }
  for (const std::string& item : split(text, ',')) {
    if (item.empty()) continue;
    const std::vector<std::string> parts = split(item, ':');
    if (parts.size() > 3) throw InputError("--rows " + text + ": '" + item + "' has more parts than b:h:i");
    RowRange range;
    if (parts.size() >= 2) range.head = parse_count(parts[parts.size() - 2], text);
    if (parts.size() == 3) range.sequence = parse_count(parts[0], text);
    const std::vector<std::string> ends = split(parts.back(), '-');
    if (ends.size() > 2) throw InputError("--rows " + text + ": '" + item + "' is no range");
    range.first = parse_count(ends.front(), text);
    range.last = parse_count(ends.back(), text);
    if (range.last < range.first)
      throw InputError("--rows " + text + ": '" + item + "' ends before it begins");
    choice.ranges.push_back(range);
  }
  if (choice.ranges.empty()) throw InputError("--rows " + text + ": expected at least one row");
  return choice;
}

std::vector<RowId> chosen_rows(const Problem& problem, const RowChoice& choice) {
  for (const RowRange& range : choice.ranges) {
    const auto check = [](const char* what, std::size_t value, std::size_t end) {
      if (value >= end) {
        throw InputError("--rows: " + std::string(what) + " " + std::to_string(value) +
                         " asked for, the capture has " + std::to_string(end));
      }
    };
    check("query row", range.last, problem.seqlen_q);
    if (range.head) check("head", *range.head, problem.heads_q);
    if (range.sequence) check("sequence", *range.sequence, problem.batch);
  }
  std::vector<RowId> rows;
  for_each_row_with_keys(problem, [&](std::size_t b, std::size_t h, std::size_t i, std::size_t index) {
    const bool wanted = std::any_of(choice.ranges.begin(), choice.ranges.end(), [&](const RowRange& r) {
      return i >= r.first && i <= r.last && (!r.head || *r.head == h) && (!r.sequence || *r.sequence == b);
    });
    if (wanted) rows.push_back({b, h, i, index});
  });
  return rows;
}

std::vector<RowId> worst_rows(const Problem& problem, const Fp64Tensor& values, std::size_t most) {
  std::vector<RowId> rows;
  for_each_row_with_keys(problem, [&](std::size_t b, std::size_t h, std::size_t i, std::size_t index) {
    if (std::isfinite(values.data[index])) rows.push_back({b, h, i, index});
  });
  const auto worse = [&](const RowId& x, const RowId& y) {
    const double a = std::abs(values.data[x.index]);
    const double b = std::abs(values.data[y.index]);
    return a != b ? a > b : x.index < y.index;
  };
  const std::size_t kept = std::min(most, rows.size());
  std::partial_sort(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(kept), rows.end(), worse);
  rows.resize(kept);
  return rows;
}

}  // namespace bitattn::audit
