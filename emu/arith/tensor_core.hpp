#pragma once
// One fused step of Hopper's tensor core: c + sum of k products, for one element of the accumulator.
//
// The steps are those of docs/spec/hopper-arithmetic.md 1: decode, specials, align, sum, round and pack.
// 41.5e9 dot products on an H200 (wgmma and mma.sync, every N, both operand sources and orders), 0
// mismatches.
//
// A rule is passed by value: device code may not refer to a host constant.

#include <cstdint>

#include "emu/arith/bits.hpp"
#include "emu/arith/fp32.hpp"
#include "emu/arith/narrow_float.hpp"

namespace bitattn::arith {

/// An operand format. `ieee`: the top exponent holds infinity and NaN (else, e4m3, only S.1111.111 is NaN).
template <int exponent_bits, int fraction, bool ieee>
struct OperandFormat {
  static constexpr int kFractionBits = fraction;
  static constexpr int kBias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int kTopExponent = (1 << exponent_bits) - 1;
  static constexpr std::uint32_t kFractionMask = (1U << fraction) - 1U;

  BITATTN_HD static constexpr int exponent_field(std::uint32_t v) {
    return static_cast<int>(v >> fraction) & kTopExponent;
  }
  BITATTN_HD static constexpr bool negative(std::uint32_t v) {
    return (v >> (exponent_bits + fraction) & 1U) != 0U;
  }
  BITATTN_HD static constexpr bool nan(std::uint32_t v) {
    return ieee ? exponent_field(v) == kTopExponent && (v & kFractionMask) != 0U : (v & 0x7fU) == 0x7fU;
  }
  BITATTN_HD static constexpr bool infinite(std::uint32_t v) {
    return ieee && exponent_field(v) == kTopExponent && (v & kFractionMask) == 0U;
  }
  /// Significand as an integer; subnormals are not normalised.
  BITATTN_HD static constexpr std::uint32_t significand(std::uint32_t v) {
    return (v & kFractionMask) | (exponent_field(v) != 0 ? 1U << fraction : 0U);
  }
  BITATTN_HD static constexpr int exponent(std::uint32_t v) {
    const int e = exponent_field(v);
    return (e != 0 ? e : 1) - kBias;
  }
};

using Bf16 = OperandFormat<8, 7, true>;
using F16 = OperandFormat<5, 10, true>;
using E4m3 = OperandFormat<4, 3, false>;
using E5m2 = OperandFormat<5, 2, true>;

/// What a chip's tensor core does with one fused sum: plain data, so that another chip (or a deliberately
/// wrong one, in a test) is another value and not another function.
struct TensorCoreRule {
  int aligned_fraction_bits;      ///< bits kept below the largest exponent when terms are aligned (F)
  int result_fraction_bits;       ///< fraction bits of the result (OF)
  int exponent_floor;             ///< the alignment exponent is never below this
  bool round_to_nearest = false;  ///< last rounding: false toward zero (the chip), true to nearest even
};

inline constexpr TensorCoreRule kHopperWide{25, 23, -133};  ///< BF16 and FP16 operands, 16 products a step
inline constexpr TensorCoreRule kHopperFp8{13, 13, -133};  ///< FP8 operands through wgmma, 32 products a step

namespace detail {

/// m * 2^-shift (or 2^shift to the left where shift is negative), cut off toward zero.
BITATTN_HD constexpr std::uint64_t shift_right(std::uint64_t m, int shift) {
  return shift <= 0 ? m << -shift : shift > 63 ? 0U : m >> shift;
}

/// The special value of a step, where infinities and NaNs among the terms decide it.
struct Specials {
  bool nan = false, positive = false, negative = false;
  BITATTN_HD constexpr bool any() const { return nan || positive || negative; }
  BITATTN_HD constexpr std::uint32_t result() const {
    if (nan || (positive && negative)) return kQuietNan;
    return positive ? kInfinity : kInfinity | kSignBit;
  }
};

/// sum * 2^(exponent - F) to fp32: cut off (or rounded) to OF fraction bits, subnormal results kept, overflow
/// to infinity, a zero sum or an underflow to zero always +0.
BITATTN_HD constexpr std::uint32_t round_and_pack(std::int64_t sum, int exponent, TensorCoreRule rule) {
  if (sum == 0) return 0U;
  const std::uint32_t sign = sum < 0 ? kSignBit : 0U;
  std::uint64_t v = static_cast<std::uint64_t>(sum < 0 ? -sum : sum);
  const int unit = exponent - rule.aligned_fraction_bits;
  int e = highest_bit(v) + unit;  // 2^e <= |value| < 2^(e+1)
  if (e > 127) return sign | kInfinity;
  const int last_place = (e < -126 ? -126 : e) - rule.result_fraction_bits;
  const int shift = last_place - unit;
  std::uint64_t quotient = shift_right(v, shift);
  if (rule.round_to_nearest && shift > 0 && shift < 64) {
    const std::uint64_t rest = v & ((std::uint64_t{1} << shift) - 1U);
    const std::uint64_t half = std::uint64_t{1} << (shift - 1);
    if (rest > half || (rest == half && (quotient & 1U) != 0U)) ++quotient;
    if (quotient >> (rule.result_fraction_bits + 1) != 0U) {
      quotient >>= 1U;
      ++e;
      if (e > 127) return sign | kInfinity;
    }
  }
  if (quotient == 0) return 0U;
  quotient <<= 23 - rule.result_fraction_bits;
  // A subnormal that rounds up to 2^-126 carries into the exponent field by itself.
  if (e < -126) return sign | static_cast<std::uint32_t>(quotient);
  return sign | static_cast<std::uint32_t>(e + 127) << 23U | static_cast<std::uint32_t>(quotient & 0x7fffffU);
}

}  // namespace detail

/// One fused step: bits of c + sum over i < k of a[i]*b[i] under `rule`. a, b: k operand words of formats A
/// and B.
template <class A, class B, class Word>
BITATTN_HD constexpr std::uint32_t fused_step(const Word* a, const Word* b, int k, std::uint32_t c,
                                              TensorCoreRule rule) {
  constexpr int kProductFractionBits = A::kFractionBits + B::kFractionBits;
  detail::Specials specials{is_nan(c), c == kInfinity, c == (kInfinity | kSignBit)};
  const int c_field = static_cast<int>(c >> 23U & 255U);
  const std::uint32_t c_significand = (c & 0x7fffffU) | (c_field != 0 ? 0x800000U : 0U);
  const int c_exponent = (c_field != 0 ? c_field : 1) - 127;

  // Largest exponent over the terms that are not zero; a product's is taken before any normalisation.
  int largest = rule.exponent_floor;
  if (c_significand != 0U && c_exponent > largest) largest = c_exponent;
  for (int i = 0; i < k; ++i) {
    const std::uint32_t x = a[i];
    const std::uint32_t y = b[i];
    const bool x_zero = A::significand(x) == 0U;
    const bool y_zero = B::significand(y) == 0U;
    if (A::nan(x) || B::nan(y)) {
      specials.nan = true;
    } else if (A::infinite(x) || B::infinite(y)) {
      if ((x_zero && !A::infinite(x)) || (y_zero && !B::infinite(y))) {
        specials.nan = true;
      } else if (A::negative(x) != B::negative(y)) {
        specials.negative = true;
      } else {
        specials.positive = true;
      }
    } else if (!x_zero && !y_zero) {
      const int e = A::exponent(x) + B::exponent(y);
      if (e > largest) largest = e;
    }
  }
  if (specials.any()) return specials.result();

  // Every term cut off toward zero at 2^(largest - F); no guard or sticky bit remains.
  const int f = rule.aligned_fraction_bits;
  std::int64_t c_term = 0;
  if (c_significand != 0U) {
    c_term = static_cast<std::int64_t>(detail::shift_right(c_significand, largest - c_exponent - (f - 23)));
  }
  std::int64_t sum = (c & kSignBit) != 0U ? -c_term : c_term;
  for (int i = 0; i < k; ++i) {
    const std::uint32_t x = a[i];
    const std::uint32_t y = b[i];
    const std::uint64_t m = static_cast<std::uint64_t>(A::significand(x)) * B::significand(y);
    if (m == 0) continue;
    const std::int64_t term = static_cast<std::int64_t>(
        detail::shift_right(m, largest - A::exponent(x) - B::exponent(y) - (f - kProductFractionBits)));
    sum += A::negative(x) != B::negative(y) ? -term : term;
  }
  return detail::round_and_pack(sum, largest, rule);
}

/// wgmma m64nNk16 and mma.sync m16n8k16, BF16: one step.
BITATTN_HD constexpr std::uint32_t mma_bf16_k16(const std::uint16_t* a, const std::uint16_t* b,
                                                std::uint32_t c, TensorCoreRule rule = kHopperWide) {
  return fused_step<Bf16, Bf16>(a, b, 16, c, rule);
}
/// mma.sync m16n8k8, BF16.
BITATTN_HD constexpr std::uint32_t mma_bf16_k8(const std::uint16_t* a, const std::uint16_t* b,
                                               std::uint32_t c) {
  return fused_step<Bf16, Bf16>(a, b, 8, c, kHopperWide);
}
/// wgmma and mma.sync m16n8k16, FP16.
BITATTN_HD constexpr std::uint32_t mma_f16_k16(const std::uint16_t* a, const std::uint16_t* b,
                                               std::uint32_t c) {
  return fused_step<F16, F16>(a, b, 16, c, kHopperWide);
}
/// wgmma m64nNk32, FP8 (A and B each e4m3 or e5m2). Every step cuts the accumulator to 13 fraction bits.
template <class A, class B>
BITATTN_HD constexpr std::uint32_t wgmma_fp8_k32(const std::uint8_t* a, const std::uint8_t* b,
                                                 std::uint32_t c) {
  return fused_step<A, B>(a, b, 32, c, kHopperFp8);
}
/// mma.sync m16n8k32, e4m3. sm_90a has no such unit: the compiler emits two FP16 steps (products with k%4 in
/// {0,1}, then {2,3}) and one FADD.
BITATTN_HD inline std::uint32_t mma_sync_e4m3_k32(const std::uint8_t* a, const std::uint8_t* b,
                                                  std::uint32_t c) {
  std::uint32_t t = 0;
  for (int half = 0; half < 2; ++half) {
    std::uint16_t x[16] = {};
    std::uint16_t y[16] = {};
    int n = 0;
    for (int k = 0; k < 32; ++k) {
      if (k % 4 / 2 != half) continue;
      x[n] = f16_from_e4m3(a[k]);
      y[n] = f16_from_e4m3(b[k]);
      ++n;
    }
    t = mma_f16_k16(x, y, t);
  }
  return to_bits(add(from_bits(c), from_bits(t)));
}

}  // namespace bitattn::arith
