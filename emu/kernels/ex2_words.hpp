#pragma once
// The coefficients of ex2 as vector code wants them: one table of words for C0, one for C1 and C2.

#include <array>
#include <cstdint>

#include "emu/arith/mufu_tables.hpp"

namespace bitattn::kernels {

struct Ex2Words {
  alignas(64)
      std::array<std::uint32_t, 64> c0{};  ///< C0 + 126 * 2^25: 126 units of the exponent field, two bits up
  alignas(64) std::array<std::uint32_t, 64> c1_c2{};  ///< C1 in the lower 16 bits, C2 above
};

inline constexpr Ex2Words kEx2Words = [] {
  Ex2Words words;
  for (std::uint32_t i = 0; i < 64; ++i) {
    const arith::mufu::table::Segment s = arith::mufu::table::ex2(i);
    words.c0[i] = static_cast<std::uint32_t>(s.c0) + (126U << 25U);
    words.c1_c2[i] = static_cast<std::uint32_t>(s.c1) | static_cast<std::uint32_t>(s.c2) << 16U;
  }
  return words;
}();

}  // namespace bitattn::kernels
