#pragma once
// The exact inner product of any two rows of finite BF16 numbers: one fixed-point register that covers every
// product of two of them. The slow way out where the exponents of a row span too much for the sliced
// products.

#include <array>
#include <cstddef>

#include "reference/wide.hpp"

namespace bitattn::reference {

/// A BF16 word taken apart: (negative ? -1 : 1) * significand * 2^exponent, significand below 2^8.
struct Bf16Parts {
  std::uint32_t significand;
  std::int32_t exponent;
  bool negative;

  explicit Bf16Parts(std::uint16_t word)
      : significand(word & 0x7fU), exponent(-133), negative((word & 0x8000U) != 0) {
    const auto field = static_cast<std::int32_t>(word >> 7U & 0xffU);
    if (field == 0) return;
    significand |= 0x80U;
    exponent = field - 134;
  }
  static bool finite(std::uint16_t word) { return (word & 0x7f80U) != 0x7f80U; }
};

/// The exact sum of a[d] * b[d], cut to 128 bits: at most 2^-127 too small in magnitude, relatively.
inline Wide exact_inner_product(const std::uint16_t* a, const std::uint16_t* b, std::size_t n) {
  // Products are multiples of 2^-266 below 2^257; 640 bits hold sums of 2^100 of them.
  constexpr std::int32_t kUnit = -272;
  std::array<std::uint64_t, 10> sum{};  // two's complement
  for (std::size_t d = 0; d < n; ++d) {
    const Bf16Parts x(a[d]);
    const Bf16Parts y(b[d]);
    const std::uint64_t p = static_cast<std::uint64_t>(x.significand) * y.significand;
    if (p == 0) continue;
    const auto position = static_cast<unsigned>(x.exponent + y.exponent - kUnit);
    const U128 shifted = static_cast<U128>(p) << (position % 64);
    std::size_t limb = position / 64;
    if (x.negative == y.negative) {
      U128 carry = static_cast<U128>(sum[limb]) + low_half(shifted);
      sum[limb++] = low_half(carry);
      carry = static_cast<U128>(sum[limb]) + high_half(shifted) + high_half(carry);
      sum[limb++] = low_half(carry);
      for (bool more = high_half(carry) != 0; more && limb < sum.size(); ++limb) more = ++sum[limb] == 0;
    } else {
      U128 borrow = static_cast<U128>(sum[limb]) - low_half(shifted);
      sum[limb++] = low_half(borrow);
      borrow = static_cast<U128>(sum[limb]) - high_half(shifted) - (high_half(borrow) != 0 ? 1U : 0U);
      sum[limb++] = low_half(borrow);
      for (bool more = high_half(borrow) != 0; more && limb < sum.size(); ++limb) more = sum[limb]-- == 0;
    }
  }
  const bool negative = sum.back() >> 63U != 0;
  if (negative) {
    bool carry = true;
    for (std::uint64_t& limb : sum) {
      limb = ~limb + (carry ? 1U : 0U);
      carry = carry && limb == 0;
    }
  }
  std::size_t top = sum.size();
  while (top > 0 && sum[top - 1] == 0) --top;
  if (top == 0) return {};
  // The top three limbs hold the 128 bits that count.
  const auto limb_at = [&sum, top](std::size_t below) { return below < top ? sum[top - 1 - below] : 0U; };
  const int shift = std::countl_zero(limb_at(0));
  U128 significand = (static_cast<U128>(limb_at(0)) << 64U) | limb_at(1);
  if (shift != 0)
    significand =
        (significand << static_cast<unsigned>(shift)) | limb_at(2) >> (64U - static_cast<unsigned>(shift));
  return {significand, kUnit + 64 * (static_cast<std::int32_t>(top) - 2) - shift, negative};
}

}  // namespace bitattn::reference
