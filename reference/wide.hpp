#pragma once
// A small floating-point number with 128 bits of significand and a wide exponent, for the elementwise steps
// of the fast reference. Operations truncate; how much they can lose is said at each, and docs/reference.md
// adds it up.

#include <bit>
#include <cmath>
#include <cstdint>

namespace bitattn::reference {

__extension__ using U128 = unsigned __int128;
__extension__ using I128 = __int128;

inline std::uint64_t high_half(U128 x) {
  return static_cast<std::uint64_t>(x >> 64U);
}
inline std::uint64_t low_half(U128 x) {
  return static_cast<std::uint64_t>(x);
}
inline U128 product(std::uint64_t a, std::uint64_t b) {
  return static_cast<U128>(a) * b;
}

/// Leading zeros of x, which must not be 0: then below 128.
inline int leading_zeros(U128 x) {
  return (high_half(x) != 0 ? std::countl_zero(high_half(x)) : 64 + std::countl_zero(low_half(x))) & 127;
}

/// The 256-bit product a * b.
struct U256 {
  U128 high, low;
};
inline U256 full_product(U128 a, U128 b) {
  const U128 ll = product(low_half(a), low_half(b));
  const U128 lh = product(low_half(a), high_half(b));
  const U128 hl = product(high_half(a), low_half(b));
  const U128 hh = product(high_half(a), high_half(b));
  const U128 middle = static_cast<U128>(high_half(ll)) + low_half(lh) + low_half(hl);
  return {hh + high_half(lh) + high_half(hl) + high_half(middle), (middle << 64U) | low_half(ll)};
}

/// floor(a * b / 2^128).
inline U128 high_product(U128 a, U128 b) {
  return full_product(a, b).high;
}

/// x >> shift for any shift >= 0.
inline U128 shift_right(U128 x, int shift) {
  return shift < 128 ? x >> static_cast<unsigned>(shift) : U128{0};
}

/// (negative ? -1 : 1) * significand * 2^exponent; significand is 0 or has its top bit set.
struct Wide {
  U128 significand = 0;
  std::int32_t exponent = 0;
  bool negative = false;

  bool zero() const { return significand == 0; }
  /// |value| < 2^top(); meaningless for 0.
  std::int32_t top() const { return exponent + 128; }
};

/// x * 2^power for a double and any power; below the doubles' range: 0.
inline double scaled(double x, int power) {
  if (power >= -1022 && power <= 1023) {
    return x * std::bit_cast<double>(static_cast<std::uint64_t>(power + 1023) << 52U);
  }
  return std::ldexp(x, power);
}

/// The significand as a number in (1/2, 1], never less than significand / 2^128, unless it is 0.
inline double fraction(const Wide& x) {
  return x.zero() ? 0.0 : (static_cast<double>(high_half(x.significand) >> 12U) + 1) * 0x1p-52;
}

/// An upper bound of |x|, at most 2^-50 too large; 0 below the doubles' range.
inline double magnitude(const Wide& x) {
  return scaled(fraction(x), x.zero() ? 0 : x.top());
}

/// n * 2^exponent, exactly.
inline Wide wide_from(I128 n, std::int32_t exponent) {
  if (n == 0) return {};
  const bool negative = n < 0;
  const U128 m = negative ? U128{0} - static_cast<U128>(n) : static_cast<U128>(n);
  const int shift = leading_zeros(m);
  return {m << static_cast<unsigned>(shift), exponent - shift, negative};
}

/// a * b; at most 2^-127 too small in magnitude, relatively.
inline Wide multiply(const Wide& a, const Wide& b) {
  if (a.zero() || b.zero()) return {};
  U256 p = full_product(a.significand, b.significand);
  int shift = 0;
  if (high_half(p.high) >> 63U == 0) {
    p.high = (p.high << 1U) | (p.low >> 127U);
    shift = 1;
  }
  return {p.high, a.exponent + b.exponent + 128 - shift, a.negative != b.negative};
}

/// a + b; the error is at most 2^-127 * max(|a|, |b|, |a + b|).
inline Wide add(const Wide& a, const Wide& b) {
  if (a.zero()) return b;
  if (b.zero()) return a;
  const bool a_first = a.exponent != b.exponent ? a.exponent > b.exponent : a.significand >= b.significand;
  const Wide& large = a_first ? a : b;
  const Wide& small = a_first ? b : a;
  const U128 aligned = shift_right(small.significand, large.exponent - small.exponent);
  if (large.negative == small.negative) {
    const U128 sum = large.significand + aligned;
    if (sum >= large.significand) return {sum, large.exponent, large.negative};
    return {(sum >> 1U) | (U128{1} << 127U), large.exponent + 1, large.negative};
  }
  const U128 difference = large.significand - aligned;
  if (difference == 0) return {};
  const int shift = leading_zeros(difference);
  return {difference << static_cast<unsigned>(shift), large.exponent - shift, large.negative};
}

inline Wide negated(Wide x) {
  x.negative = !x.negative;
  return x;
}

}  // namespace bitattn::reference
