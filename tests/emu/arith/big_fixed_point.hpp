#pragma once
// Exact numbers for the tests: signed integers of up to 1024 bits that count units of 2^-320. Every fp32
// number, every product of two and every sum of such products below 2^700 is one of them. Nothing here is
// shared with emu/arith.

#include <boost/multiprecision/cpp_int.hpp>
#include <cstdint>

namespace bitattn::test {

using Exact = boost::multiprecision::number<boost::multiprecision::cpp_int_backend<
    1024, 1024, boost::multiprecision::signed_magnitude, boost::multiprecision::unchecked, void>>;

inline constexpr int kUnitExponent = -320;  ///< an Exact of 1 is 2^-320

/// 2^exponent; exponent >= -320.
inline Exact power_of_two(int exponent) {
  return Exact(1) << static_cast<unsigned>(exponent - kUnitExponent);
}

/// integer * 2^exponent; exponent >= -320.
inline Exact scaled(std::int64_t integer, int exponent) {
  return Exact(integer) << static_cast<unsigned>(exponent - kUnitExponent);
}

/// The e with 2^e <= |v| < 2^(e+1); v must not be 0.
inline int binary_exponent(const Exact& v) {
  return static_cast<int>(msb(Exact(abs(v)))) + kUnitExponent;
}

/// Value of a finite fp32 number.
inline Exact exact_from_fp32(std::uint32_t bits) {
  const int field = static_cast<int>((bits / 0x800000U) % 256U);
  const std::int64_t fraction = bits % 0x800000U;
  const Exact magnitude = field == 0 ? scaled(fraction, -149) : scaled(0x800000 + fraction, field - 150);
  return bits >= 0x80000000U ? Exact(-magnitude) : magnitude;
}

/// The fp32 number of value v, which must be one (below 2^128, no more digits than fp32 has); 0 gives +0.
inline std::uint32_t fp32_from_exact(const Exact& v) {
  if (v == 0) return 0U;
  const std::uint32_t sign = v < 0 ? 0x80000000U : 0U;
  const Exact magnitude = abs(v);
  const int e = binary_exponent(v);
  if (e < -126) return sign + static_cast<std::uint32_t>(magnitude / power_of_two(-149));
  return sign + static_cast<std::uint32_t>(e + 126) * 0x800000U +
         static_cast<std::uint32_t>(magnitude / power_of_two(e - 23));
}

}  // namespace bitattn::test
