#pragma once
// How these tests write a number: its bits and, where it is one, its value; and the table of a comparison.

#include <fmt/format.h>

#include <bit>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace bitattn::test {

/// "0x3f800000 (0x1p+0)".
inline std::string show_fp32(std::uint32_t bits) {
  return fmt::format("{:#010x} ({:a})", bits, std::bit_cast<float>(bits));
}

/// "0x3f80 (0x1p+0)".
inline std::string show_bf16(std::uint16_t bits) {
  return fmt::format("{:#06x} ({:a})", bits, std::bit_cast<float>(std::uint32_t{bits} << 16U));
}

/// "0x7eff": a number of any other format, `digits` hexadecimal digits.
inline std::string show_bits(std::uint32_t bits, int digits) {
  return fmt::format("{:#0{}x}", bits, digits + 2);
}

/// A comparison of one unit with what it should return: how many cases, how many differ, and the first that
/// does.
struct Tally {
  std::string unit;
  std::uint64_t cases = 0;
  std::uint64_t mismatches = 0;
  std::string first = {};

  /// `describe()` gives the text of a mismatch; it is called for the first one only.
  template <class Describe>
  void count(bool equal, Describe&& describe) {
    ++cases;
    if (equal) return;
    if (mismatches++ == 0) first = std::forward<Describe>(describe)();
  }
};

inline void print_table(const std::string& title, const std::vector<Tally>& rows) {
  std::string text = fmt::format("{}\n{:<34} {:>12} {:>12}\n", title, "unit", "cases", "mismatches");
  Tally total{"total"};
  for (const Tally& row : rows) {
    text += fmt::format("{:<34} {:>12} {:>12}\n", row.unit, row.cases, row.mismatches);
    if (row.mismatches != 0) text += fmt::format("    first: {}\n", row.first);
    total.cases += row.cases;
    total.mismatches += row.mismatches;
  }
  text += fmt::format("{:<34} {:>12} {:>12}\n", total.unit, total.cases, total.mismatches);
  fmt::print("{}", text);
}

}  // namespace bitattn::test
