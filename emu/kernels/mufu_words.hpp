#pragma once
// The coefficients of ex2 and tanh as vector code wants them: one table for each word that it looks up.

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

struct TanhWords {
  std::array<std::uint32_t, 11>
      first_bits{};  ///< by exponent + 8: first row in the lower 8 bits, segment bits above
  std::array<std::int32_t, 51> c0{}, c1{}, c2{};
};

inline constexpr TanhWords kTanhWords = [] {
  TanhWords words;
  for (std::uint32_t i = 0; i < 11; ++i) {
    words.first_bits[i] = static_cast<std::uint32_t>(arith::mufu::table::tanh_first(i)) |
                          static_cast<std::uint32_t>(arith::mufu::table::tanh_bits(i)) << 8U;
  }
  for (std::uint32_t i = 0; i < 51; ++i) {
    const arith::mufu::table::Segment s = arith::mufu::table::tanh(i);
    words.c0[i] = s.c0;
    words.c1[i] = s.c1;
    words.c2[i] = s.c2;
  }
  return words;
}();

}  // namespace bitattn::kernels
