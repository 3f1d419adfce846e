#pragma once
// fp32 operands that ask an adder, a multiplier or a fused multiply-add every awkward question, as a function
// of the case's number alone.

#include <cstdint>

#include "gpu/probe/mix.hpp"

namespace bitattn::gpu::probe {

/// The boundary values: every sign and exponent with the fractions at both ends, around the middle and one
/// bit off.
inline constexpr std::uint32_t kBoundaryFractions = 8;
inline constexpr std::uint32_t kBoundaryValues = 2 * 256 * kBoundaryFractions;

BITATTN_HD constexpr std::uint32_t boundary_value(std::uint32_t i) {
  const std::uint32_t which = i % kBoundaryFractions;
  const std::uint32_t fraction = which == 0   ? 0U
                                 : which == 1 ? 1U
                                 : which == 2 ? 2U
                                 : which == 3 ? 0x3fffffU
                                 : which == 4 ? 0x400000U
                                 : which == 5 ? 0x400001U
                                 : which == 6 ? 0x7ffffeU
                                              : 0x7fffffU;
  const std::uint32_t sign_and_exponent = i / kBoundaryFractions % 512U;
  return sign_and_exponent << 23U | fraction;
}

struct Operands {
  std::uint32_t a, b, c;
};

/// All pairs of boundary values; c runs through values that a sum of a*b may meet: 0, -RN(a*b) and its
/// neighbours are the caller's business, here c is a boundary value picked by a hash.
BITATTN_HD constexpr Operands boundary_operands(std::uint64_t i) {
  const std::uint32_t a = boundary_value(static_cast<std::uint32_t>(i % kBoundaryValues));
  const std::uint32_t b = boundary_value(static_cast<std::uint32_t>(i / kBoundaryValues % kBoundaryValues));
  const std::uint32_t c = boundary_value(static_cast<std::uint32_t>(mix(i) % kBoundaryValues));
  return {a, b, c};
}
inline constexpr std::uint64_t kBoundaryPairs = std::uint64_t{kBoundaryValues} * kBoundaryValues;

namespace detail {

BITATTN_HD constexpr std::uint32_t with_exponent(std::uint32_t bits, int field) {
  const int clamped = field < 0 ? 0 : field > 254 ? 254 : field;
  return (bits & 0x807fffffU) | static_cast<std::uint32_t>(clamped) << 23U;
}

}  // namespace detail

/// Random operands in eight kinds, one after the other: any bits; exponents close together; products (and,
/// for two operands, sums) around the smallest normal number; a + b cancelling but for a few last places;
/// subnormals; products that c cancels; significands of almost all ones or zeros; any bits with a special
/// value among them.
BITATTN_HD constexpr Operands random_operands(std::uint64_t i) {
  using detail::with_exponent;
  const std::uint64_t r = mix(2 * i);
  const std::uint64_t s = mix(2 * i + 1);
  std::uint32_t a = static_cast<std::uint32_t>(r);
  std::uint32_t b = static_cast<std::uint32_t>(r >> 32U);
  std::uint32_t c = static_cast<std::uint32_t>(s);
  const std::uint32_t extra = static_cast<std::uint32_t>(s >> 32U);
  const int spread = static_cast<int>(extra & 31U) - 16;
  switch (i % 8) {
    case 1: {
      const int e = static_cast<int>(a >> 23U & 255U);
      b = with_exponent(b, e + spread);
      c = with_exponent(c, 2 * e - 127 + static_cast<int>(extra >> 5U & 31U) - 16);
      break;
    }
    case 2: {
      const int e = static_cast<int>(a >> 23U & 255U) % 128;
      a = with_exponent(a, 64 + e);
      b = with_exponent(b, 127 - e - static_cast<int>(extra & 3U) - 62);
      c = with_exponent(c, static_cast<int>(extra >> 2U & 31U));
      if ((extra >> 7U & 1U) != 0U) c = 0;
      break;
    }
    case 3:
      b = (a ^ 0x80000000U) + (extra & 7U) - 4U;
      break;
    case 4:
      a = with_exponent(a, static_cast<int>(extra & 3U));
      b = with_exponent(b, (extra >> 2U & 1U) != 0U ? 127 + spread : static_cast<int>(extra >> 3U & 3U));
      c = with_exponent(c, static_cast<int>(extra >> 5U & 3U));
      break;
    case 5: {
      // c's exponent and leading bits are those of -a*b.
      a = with_exponent(a, 100 + static_cast<int>(extra & 63U));
      b = with_exponent(b, 100 + static_cast<int>(extra >> 6U & 63U));
      const std::uint64_t product =
          static_cast<std::uint64_t>((a & 0x7fffffU) | 0x800000U) * ((b & 0x7fffffU) | 0x800000U);
      const bool high = product >> 47U != 0U;
      const std::uint32_t fraction = static_cast<std::uint32_t>(product >> (high ? 24U : 23U)) & 0x7fffffU;
      const int e =
          static_cast<int>(a >> 23U & 255U) + static_cast<int>(b >> 23U & 255U) - 127 + (high ? 1 : 0);
      c = with_exponent((((a ^ b) & 0x80000000U) ^ 0x80000000U) | fraction, e) + (extra >> 12U & 7U) - 3U;
      break;
    }
    case 6: {
      const std::uint32_t ones = 0x7fffffU;
      a = (a & 0xff800000U) | ((extra & 1U) != 0U ? ones - (extra >> 1U & 3U) : extra >> 1U & 3U);
      b = (b & 0xff800000U) | ((extra & 8U) != 0U ? ones - (extra >> 4U & 3U) : extra >> 4U & 3U);
      c = (c & 0xff800000U) | ((extra & 64U) != 0U ? ones - (extra >> 7U & 3U) : extra >> 7U & 3U);
      break;
    }
    case 7: {
      const std::uint32_t special = boundary_value(static_cast<std::uint32_t>(extra % kBoundaryValues));
      const std::uint32_t place = c % 3U;
      if (place == 0U) a = special;
      if (place == 1U) b = special;
      if (place == 2U) c = special;
      break;
    }
    default:
      break;
  }
  return {a, b, c};
}

/// Boundary pairs first, then random operands.
BITATTN_HD constexpr Operands operands(std::uint64_t i) {
  return i < kBoundaryPairs ? boundary_operands(i) : random_operands(i - kBoundaryPairs);
}

}  // namespace bitattn::gpu::probe
