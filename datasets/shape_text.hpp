#pragma once
// Shapes and numbers as error messages show them, and element counts that cannot overflow.

#include <array>
#include <charconv>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "datasets/error.hpp"

namespace bitattn {

/// [1, 256, 2, 128]
inline std::string shape_text(const std::vector<std::size_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

/// The shortest decimal that reads back as the same double.
inline std::string shortest_text(double value) {
  std::array<char, 32> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  return {buffer.data(), end};
}

/// Product of the dimensions. Throws InputError where it, times 8 bytes, would not fit 63 bits.
inline std::size_t checked_elements(const std::vector<std::size_t>& shape, const std::string& what) {
  constexpr std::size_t kMost = static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max()) / 8;
  std::size_t n = 1;
  for (const std::size_t d : shape) {
    if (d == 0) return 0;
  }
  for (const std::size_t d : shape) {
    if (d > kMost / n)
      throw InputError(what + " has shape " + shape_text(shape) + ", too many elements to count");
    n *= d;
  }
  return n;
}

/// Text from a file made safe to print: one line, no control characters, at most `most` bytes.
inline std::string printable(const std::string& text, std::size_t most = 200) {
  std::string safe;
  for (const char c : text) {
    if (safe.size() >= most) return safe + "...";
    const auto u = static_cast<unsigned char>(c);
    safe += (u < 0x20U || u == 0x7fU) ? '?' : c;
  }
  return safe;
}

}  // namespace bitattn
