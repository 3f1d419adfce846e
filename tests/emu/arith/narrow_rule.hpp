#pragma once
// Conversion from fp32 to a narrower format as a list of intervals: which fp32 numbers go to which code.
// Built from the exact values of the codes and the midpoints between neighbours, ties to the even code; no
// code shared with emu/arith. docs/spec/hopper-arithmetic.md 7.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/emu/arith/slow_tensor_core.hpp"

namespace bitattn::test {

struct NarrowRule {
  std::string name;
  SlowFormat format;
  std::uint32_t largest;  ///< code of the largest finite number
  bool saturate;          ///< overflow and infinities become `largest` instead of infinity, the next code
  std::uint32_t nan;      ///< what every NaN becomes, whatever its sign

  int digits() const { return format.width() / 4; }
};

inline const NarrowRule kNarrowBf16{"bf16", kSlowBf16, 0x7f7fU, false, 0x7fffU};
inline const NarrowRule kNarrowF16{"f16", kSlowF16, 0x7bffU, false, 0x7fffU};
inline const NarrowRule kNarrowE4m3{"e4m3", kSlowE4m3, 0x7eU, true, 0x7fU};
inline const NarrowRule kNarrowE5m2{"e5m2", kSlowE5m2, 0x7bU, true, 0x7fU};

/// fp32 bit patterns first..last, both included, all go to `code`.
struct NarrowInterval {
  std::uint32_t first, last;
  std::uint32_t code;
};

/// All 2^32 inputs, in the order of their bit patterns.
inline std::vector<NarrowInterval> narrow_intervals(const NarrowRule& rule) {
  std::vector<NarrowInterval> positive;
  std::uint32_t first = 0;
  for (std::uint32_t code = 0; code <= rule.largest; ++code) {
    std::uint32_t last = 0x7f800000U;
    if (code < rule.largest || !rule.saturate) {
      // Beyond the largest number the next one would be 2^(its exponent + 1), were there one.
      const Exact value = slow_value(rule.format, code);
      const Exact next =
          code < rule.largest ? slow_value(rule.format, code + 1U) : power_of_two(binary_exponent(value) + 1);
      const Exact midpoint = (value + next) / 2;
      last = fp32_from_exact(midpoint);
      if (exact_from_fp32(last) != midpoint) throw std::logic_error("a midpoint is no fp32 number");
      if (code % 2U == 1U) --last;  // the tie goes up, to the even neighbour
    }
    positive.push_back({first, last, code});
    first = last + 1U;
  }
  if (!rule.saturate) positive.push_back({first, 0x7f800000U, rule.largest + 1U});

  std::vector<NarrowInterval> all;
  const std::uint32_t code_sign = 1U << (rule.format.width() - 1);
  for (const std::uint32_t sign : {0U, 1U}) {
    const std::uint32_t fp32_sign = sign * 0x80000000U;
    for (const NarrowInterval& i : positive) {
      all.push_back({i.first + fp32_sign, i.last + fp32_sign, i.code + sign * code_sign});
    }
    all.push_back({0x7f800001U + fp32_sign, 0x7fffffffU + fp32_sign, rule.nan});
  }
  return all;
}

}  // namespace bitattn::test
