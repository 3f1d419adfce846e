#pragma once
// Reading the vectors measured on the chip; formats in datasets/goldens/arithmetic/README.md.

#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace bitattn::test {

/// All records of a binary file. Throws std::runtime_error if it is missing, empty or not a whole number of
/// records.
template <class Record>
std::vector<Record> read_records(const std::string& path) {
  static_assert(std::is_trivially_copyable_v<Record>);
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be opened");
  std::ostringstream content;
  content << file.rdbuf();
  const std::string bytes = content.str();
  if (bytes.empty() || bytes.size() % sizeof(Record) != 0) {
    throw std::runtime_error(path + ": " + std::to_string(bytes.size()) +
                             " bytes are no whole number of records of " + std::to_string(sizeof(Record)));
  }
  std::vector<Record> records(bytes.size() / sizeof(Record));
  std::memcpy(records.data(), bytes.data(), bytes.size());
  return records;
}

/// Rows of a CSV file, without its header, which must be `header`. Throws std::runtime_error.
inline std::vector<std::vector<std::string>> read_csv(const std::string& path, const std::string& header) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) throw std::runtime_error(path + ": cannot be read");
  if (line != header) throw std::runtime_error(path + ": header is '" + line + "' and not '" + header + "'");
  std::vector<std::vector<std::string>> rows;
  while (std::getline(file, line)) {
    std::vector<std::string> row;
    std::istringstream fields(line);
    for (std::string field; std::getline(fields, field, ',');) row.push_back(field);
    rows.push_back(row);
  }
  return rows;
}

/// One fused step (or two) of 2-byte operands.
struct WideDotProduct {
  std::uint16_t a[16], b[16];
  std::uint32_t c, d;
};
static_assert(sizeof(WideDotProduct) == 72);

struct Fp8DotProduct {
  std::uint8_t a[32], b[32];
  std::uint32_t c, d;
};
static_assert(sizeof(Fp8DotProduct) == 72);

/// Four steps into one accumulator.
struct ChainOfFour {
  std::uint16_t a[4][16], b[4][16];
  std::uint32_t c, d;
};
static_assert(sizeof(ChainOfFour) == 264);

struct FunctionValue {
  std::uint32_t x, y;
};

/// x and its conversions; `fp8` is e4m3 | e5m2 << 8.
struct Conversions {
  std::uint32_t x, bf16, f16, fp8;
};

/// a, b, c and the result; reductions: memory before, operand, 0, memory after.
struct Operation {
  std::uint32_t a, b, c, d;
};

}  // namespace bitattn::test
