#pragma once
// Dot products that ask a tensor core every awkward question: random ones of every width, and ones built to
// cancel, underflow, overflow, drop bits at the edge of the alignment window, or mix zeros, infinities and
// NaNs.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "tests/emu/arith/random_bits.hpp"
#include "tests/emu/arith/slow_tensor_core.hpp"

namespace bitattn::test {

/// One fused step's operands; words of a narrower format stand in the low bits. The first k of each are used.
struct DotProductCase {
  std::array<std::uint16_t, 32> a{};
  std::array<std::uint16_t, 32> b{};
  std::uint32_t c = 0;
};

enum class CaseKind {
  kNarrowExponents,
  kMediumExponents,
  kWideExponents,
  kRandomBitsFinite,
  kRandomBitsAll,
  kCCancelsTheProductsByUlps,
  kProductsCancelInPairs,
  kPairsCancelButForOneBit,
  kUnderflowCZeroOrSubnormal,
  kUnderflowProductsNearSmallestSubnormal,
  kSumsThatTheExponentFloorDecides,
  kOnlySubnormalOperands,
  kManyZerosOfBothSigns,
  kZerosOnly,
  kOverflow,
  kProductsBeyondFp32Cancelling,
  kOneDominatingProduct,
  kLargeC,
  kFewProductsExtremeSignificands,
  kExtremeSignificands,
  kBitsAtTheWindowEdge,
  kAttentionLike,
  kInfinitiesAndNaNs,
  kOneSpecialValue,
};

inline constexpr std::array kCaseKindNames{
    "narrow exponents",
    "medium exponents",
    "wide exponents",
    "random bits, finite",
    "random bits, all",
    "c cancels the products by ulps",
    "products cancel in pairs",
    "pairs cancel but for one bit",
    "underflow, c zero or subnormal",
    "underflow, products near 2^-149",
    "sums that the exponent floor decides",
    "only subnormal operands",
    "many zeros of both signs",
    "zeros only",
    "overflow",
    "products beyond fp32, cancelling",
    "one dominating product",
    "large c",
    "few products, extreme significands",
    "extreme significands",
    "bits at the window's edge",
    "attention-like",
    "infinities and NaNs",
    "one special value",
};
inline constexpr int kCaseKinds = static_cast<int>(kCaseKindNames.size());

namespace detail {

inline int smallest_exponent(const SlowFormat& f) {
  return 1 - f.bias();
}
inline int largest_exponent(const SlowFormat& f) {
  return (1 << f.exponent_bits) - (f.has_infinity ? 2 : 1) - f.bias();
}
inline std::uint32_t fraction_mask(const SlowFormat& f) {
  return (1U << f.fraction_bits) - 1U;
}

/// ±1.fraction * 2^exponent; below the normal numbers a subnormal (at least the smallest), above them the top
/// exponent.
inline std::uint32_t number(const SlowFormat& f, bool negative, int exponent, std::uint32_t fraction) {
  const std::uint32_t sign = negative ? 1U << (f.width() - 1) : 0U;
  fraction &= fraction_mask(f);
  exponent = std::min(exponent, largest_exponent(f));
  if (exponent < smallest_exponent(f)) {
    const int shift = std::min(smallest_exponent(f) - exponent, 31);
    return sign | std::max(((1U << f.fraction_bits) | fraction) >> shift, 1U);
  }
  if (!f.has_infinity && exponent == largest_exponent(f))
    fraction = std::min(fraction, fraction_mask(f) - 1U);
  return sign | static_cast<std::uint32_t>(exponent + f.bias()) << f.fraction_bits | fraction;
}

class CaseMaker {
 public:
  CaseMaker(const SlowFormat& a, const SlowFormat& b, int k, RandomBits& random)
      : a_(a), b_(b), k_(k), random_(random) {
    // Product exponents that the formats reach with normal operands, and whose sums fp32 holds.
    low_ = std::max(smallest_exponent(a) + smallest_exponent(b), -120);
    high_ = std::min(largest_exponent(a) + largest_exponent(b), 120);
  }

  DotProductCase make(CaseKind kind) {
    case_ = {};
    const auto spread = [&](int width) {
      const int middle = random_.between(low_, high_);
      fill([&] { return middle + random_.between(-width, width); });
      case_.c = random_.one_in(8) ? zero_fp32() : fp32(middle + random_.between(-width, width));
    };
    switch (kind) {
      case CaseKind::kNarrowExponents:
        spread(2);
        break;
      case CaseKind::kMediumExponents:
        spread(8);
        break;
      case CaseKind::kWideExponents:
        spread(40);
        break;
      case CaseKind::kRandomBitsFinite:
        random_words(true);
        break;
      case CaseKind::kRandomBitsAll:
        random_words(false);
        break;
      case CaseKind::kCCancelsTheProductsByUlps: {
        spread(random_.between(0, 12));
        cancel_with_c();
        break;
      }
      case CaseKind::kProductsCancelInPairs:
      case CaseKind::kPairsCancelButForOneBit: {
        spread(random_.between(0, 30));
        for (int i = 0; i + 1 < k_; i += 2) {
          case_.a[at(i + 1)] = word(case_.a[at(i)] ^ sign(a_));
          case_.b[at(i + 1)] = case_.b[at(i)];
        }
        if (kind == CaseKind::kPairsCancelButForOneBit) {
          const int i = random_.between(0, k_ - 1);
          case_.b[at(i)] = finite(b_, case_.b[at(i)] ^ 1U);
        }
        if (random_.one_in(2)) case_.c = zero_fp32();
        break;
      }
      case CaseKind::kUnderflowCZeroOrSubnormal: {
        fill([&] { return random_.between(-160, -128); });
        thin_out(random_.between(1, k_));
        case_.c = random_.one_in(3) ? zero_fp32() : subnormal_fp32();
        break;
      }
      case CaseKind::kUnderflowProductsNearSmallestSubnormal: {
        const int top = random_.between(-165, -132);
        fill([&] { return top - random_.between(0, 20); });
        thin_out(random_.between(1, 4));
        case_.c = zero_fp32();
        break;
      }
      case CaseKind::kSumsThatTheExponentFloorDecides: {
        // Two products that stop 2^-157 or 2^-158 short of a multiple of 2^-149, and a crowd around 2^-158,
        // where the floor -133 cuts: whether the crowd carries the sum over depends on how much of each is
        // cut off.
        const bool negative = random_.one_in(2);
        const int top = random_.between(-162, -157);
        const int crowd = random_.between(1, k_ - 2);
        fill([&] { return top - random_.between(0, 2); });
        strip_signs();
        for (int i = 2 + crowd; i < k_; ++i) case_.a[at(i)] = 0;
        const auto product = [&](int i, std::uint32_t significand, int exponent) {
          const int e = static_cast<int>(std::bit_width(significand)) - 1;
          case_.a[at(i)] = word(number(a_, false, e + exponent / 2, significand << (a_.fraction_bits - e)));
          case_.b[at(i)] = word(number(b_, false, exponent - exponent / 2, 0));
        };
        if (a_.fraction_bits >= 7) {
          product(0, static_cast<std::uint32_t>(2 * random_.between(1, 100) - 1), -150);
          const bool longer = random_.one_in(2);
          product(1, longer ? 255U : 127U, longer ? -158 : -157);
        }
        for (int i = 0; i < k_; ++i) case_.a[at(i)] |= word(negative ? sign(a_) : 0U);
        case_.c = zero_fp32();
        break;
      }
      case CaseKind::kOnlySubnormalOperands: {
        for (int i = 0; i < k_; ++i) {
          case_.a[at(i)] = word((random_.bits32() & fraction_mask(a_)) | random_sign(a_));
          case_.b[at(i)] = word((random_.bits32() & fraction_mask(b_)) | random_sign(b_));
          // A subnormal times a large number is what meets other terms.
          if (random_.one_in(3)) case_.b[at(i)] = any_number(b_, random_.between(0, largest_exponent(b_)));
        }
        case_.c = random_.one_in(2) ? subnormal_fp32() : fp32(random_.between(-149, 0));
        break;
      }
      case CaseKind::kManyZerosOfBothSigns: {
        spread(random_.between(0, 60));
        for (int i = 0; i < k_; ++i) {
          if (!random_.one_in(4)) case_.a[at(i)] = word(random_sign(a_));
          if (random_.one_in(4)) case_.b[at(i)] = word(random_sign(b_));
        }
        // A zero beside a large number: its product's exponent must not count.
        case_.b[at(random_.between(0, k_ - 1))] = any_number(b_, largest_exponent(b_));
        if (random_.one_in(2)) case_.c = fp32(random_.between(-149, low_));
        break;
      }
      case CaseKind::kZerosOnly: {
        for (int i = 0; i < k_; ++i) {
          case_.a[at(i)] = word(random_sign(a_));
          case_.b[at(i)] =
              random_.one_in(2) ? word(random_sign(b_)) : any_number(b_, random_.between(-200, 200));
        }
        case_.c = random_.one_in(2) ? zero_fp32() : random_.one_in(2) ? subnormal_fp32() : finite_fp32();
        break;
      }
      case CaseKind::kOverflow: {
        const bool same_sign = random_.one_in(2);
        fill([&] { return random_.between(118, 128); });
        if (same_sign) strip_signs();
        thin_out(random_.between(1, k_));
        case_.c = random_.one_in(4) ? zero_fp32() : fp32(random_.between(124, 127));
        if (same_sign && random_.one_in(2)) case_.c &= 0x7fffffffU;
        if (random_.one_in(8)) case_.c = 0x7f7fffffU ^ (random_.bits32() & 0x80000000U);
        break;
      }
      case CaseKind::kProductsBeyondFp32Cancelling: {
        fill([&] { return random_.between(126, 250); });
        for (int i = 0; i + 1 < k_; i += 2) {
          case_.a[at(i + 1)] = word(case_.a[at(i)] ^ sign(a_));
          case_.b[at(i + 1)] = case_.b[at(i)];
        }
        const int e = random_.between(90, 128);
        set_product(random_.between(0, k_ - 1), e);
        case_.c = fp32(random_.between(90, 127));
        break;
      }
      case CaseKind::kOneDominatingProduct: {
        const int top = random_.between(low_, high_);
        fill([&] { return top - random_.between(0, 60); });
        set_product(random_.between(0, k_ - 1), top);
        case_.c = fp32(top - random_.between(0, 60));
        break;
      }
      case CaseKind::kLargeC: {
        const int top = random_.between(low_, high_);
        fill([&] { return top - random_.between(0, 40); });
        case_.c = fp32(top + random_.between(0, 30));
        break;
      }
      case CaseKind::kFewProductsExtremeSignificands: {
        spread(random_.between(0, 30));
        extreme_significands();
        thin_out(random_.between(1, 3));
        break;
      }
      case CaseKind::kExtremeSignificands: {
        spread(random_.between(0, 6));
        extreme_significands();
        break;
      }
      case CaseKind::kBitsAtTheWindowEdge: {
        // The largest term once, the others so far below that their last bits fall around the cut of F = 13
        // or 25.
        const int top = random_.between(low_, high_);
        const int distance = random_.between(8, 30);
        fill([&] { return top - distance - random_.between(-2, 2); });
        if (random_.one_in(2)) {
          case_.c = fp32(top);
        } else {
          set_product(random_.between(0, k_ - 1), top);
          case_.c = fp32(top - random_.between(0, 30));
        }
        break;
      }
      case CaseKind::kAttentionLike: {
        // Probabilities in (0, 1] times values around 1, onto a sum of the same.
        fill([&] { return 0; });
        for (int i = 0; i < k_; ++i) {
          case_.a[at(i)] = word(any_number(a_, -random_.between(0, 14)) & ~sign(a_));
          case_.b[at(i)] = any_number(b_, random_.between(-3, 2));
        }
        case_.c = fp32(random_.between(-4, 3));
        break;
      }
      case CaseKind::kInfinitiesAndNaNs: {
        random_words(true);
        const int n = random_.between(1, k_);
        for (int i = 0; i < n; ++i) put_special(random_.between(0, k_ - 1));
        if (random_.one_in(3)) case_.c = special_fp32();
        break;
      }
      case CaseKind::kOneSpecialValue: {
        spread(4);
        if (random_.one_in(4)) {
          case_.c = special_fp32();
        } else {
          put_special(random_.between(0, k_ - 1));
        }
        break;
      }
    }
    return case_;
  }

 private:
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  static std::uint32_t sign(const SlowFormat& f) { return 1U << (f.width() - 1); }
  static std::uint16_t word(std::uint32_t v) { return static_cast<std::uint16_t>(v); }
  std::uint32_t random_sign(const SlowFormat& f) { return random_.one_in(2) ? sign(f) : 0U; }
  std::uint16_t any_number(const SlowFormat& f, int exponent) {
    return word(number(f, random_.one_in(2), exponent, random_.bits32()));
  }
  std::uint16_t finite(const SlowFormat& f, std::uint32_t v) {
    const SlowOperand x = slow_decode(v, f);
    return x.nan || x.infinite ? any_number(f, 0) : word(v);
  }

  std::uint32_t fp32(int exponent) {
    return number(kSlowFp32, random_.one_in(2), std::max(exponent, -149), random_.bits32());
  }
  std::uint32_t zero_fp32() { return random_.one_in(2) ? 0x80000000U : 0U; }
  std::uint32_t subnormal_fp32() {
    return zero_fp32() | (random_.bits32() & 0x7fffffU) >> random_.between(0, 22);
  }
  std::uint32_t finite_fp32() {
    const std::uint32_t v = random_.bits32();
    return (v & 0x7f800000U) == 0x7f800000U ? v ^ 0x40000000U : v;
  }
  std::uint32_t special_fp32() {
    constexpr std::array<std::uint32_t, 6> kValues{0x7f800000U, 0xff800000U, 0x7fffffffU,
                                                   0x7f800001U, 0xffc00000U, 0xffffffffU};
    return kValues[at(random_.between(0, 5))];
  }

  /// Product i gets exponent e, split at random between the two operands as far as the formats reach.
  void set_product(int i, int e) {
    const int low = std::max(smallest_exponent(a_), e - largest_exponent(b_));
    const int high = std::min(largest_exponent(a_), e - smallest_exponent(b_));
    const int e_a = low <= high ? random_.between(low, high) : e / 2;
    case_.a[at(i)] = any_number(a_, e_a);
    case_.b[at(i)] = any_number(b_, e - e_a);
  }
  template <class Exponent>
  void fill(Exponent&& exponent) {
    for (int i = 0; i < k_; ++i) set_product(i, exponent());
  }
  /// Leaves about n products that are not zero.
  void thin_out(int n) {
    for (int i = 0; i < k_; ++i) {
      if (random_.between(1, k_) > n) case_.a[at(i)] = word(random_sign(a_));
    }
    set_if_zero();
  }
  void set_if_zero() {
    const int i = random_.between(0, k_ - 1);
    if (slow_decode(case_.a[at(i)], a_).significand == 0)
      case_.a[at(i)] = any_number(a_, smallest_exponent(a_));
  }
  void strip_signs() {
    for (int i = 0; i < k_; ++i) {
      case_.a[at(i)] = word(case_.a[at(i)] & ~sign(a_));
      case_.b[at(i)] = word(case_.b[at(i)] & ~sign(b_));
    }
  }
  void extreme_significands() {
    const auto extreme = [&](const SlowFormat& f, std::uint16_t v) {
      const std::uint32_t mask = fraction_mask(f);
      const std::array<std::uint32_t, 4> kFractions{0U, 1U, mask, mask - 1U};
      return finite(f, (v & ~mask) | kFractions[at(random_.between(0, 3))]);
    };
    for (int i = 0; i < k_; ++i) {
      case_.a[at(i)] = extreme(a_, case_.a[at(i)]);
      case_.b[at(i)] = extreme(b_, case_.b[at(i)]);
    }
    if (random_.one_in(2)) case_.c |= 0x007fffffU;
  }
  /// c becomes minus the products' sum, give or take a few units in its last place.
  void cancel_with_c() {
    double sum = 0;
    for (int i = 0; i < k_; ++i) {
      // Both factors are exact in double; the sum need not be, a few ulps beside it are as good.
      sum += slow_double(a_, case_.a[at(i)]) * slow_double(b_, case_.b[at(i)]);
    }
    const float c = static_cast<float>(-sum);
    if (!std::isfinite(c)) return;
    case_.c = std::bit_cast<std::uint32_t>(c);
    if ((case_.c & 0x7f800000U) != 0U && (case_.c & 0x7f800000U) < 0x7f000000U) {
      case_.c += static_cast<std::uint32_t>(random_.between(-3, 3));
    }
  }
  void random_words(bool only_finite) {
    for (int i = 0; i < k_; ++i) {
      case_.a[at(i)] = word(random_.bits32() & ((2U << (a_.width() - 1)) - 1U));
      case_.b[at(i)] = word(random_.bits32() & ((2U << (b_.width() - 1)) - 1U));
      if (only_finite) {
        case_.a[at(i)] = finite(a_, case_.a[at(i)]);
        case_.b[at(i)] = finite(b_, case_.b[at(i)]);
      }
    }
    case_.c = only_finite ? finite_fp32() : random_.bits32();
  }
  std::uint16_t special(const SlowFormat& f) {
    const std::uint32_t exponent = ((1U << f.exponent_bits) - 1U) << f.fraction_bits;
    const std::uint32_t fraction = random_.one_in(4) ? random_.bits32() & fraction_mask(f) : 0U;
    // e4m3 has no infinity: its NaN, or its largest numbers, which must not be taken for one.
    if (!f.has_infinity) return word(exponent | random_sign(f) | (random_.one_in(4) ? 7U : fraction));
    return word(exponent | random_sign(f) | fraction);
  }
  void put_special(int i) {
    if (random_.one_in(2)) {
      case_.a[at(i)] = special(a_);
      if (random_.one_in(6)) case_.b[at(i)] = word(random_sign(b_));  // inf * 0
      if (random_.one_in(6))
        case_.b[at(i)] = word((random_.bits32() & fraction_mask(b_)) | 1U);  // inf * subnormal
    } else {
      case_.b[at(i)] = special(b_);
      if (random_.one_in(6)) case_.a[at(i)] = word(random_sign(a_));
      if (random_.one_in(6)) case_.a[at(i)] = word((random_.bits32() & fraction_mask(a_)) | 1U);
    }
  }

  SlowFormat a_;
  SlowFormat b_;
  int k_;
  RandomBits& random_;
  int low_ = 0;
  int high_ = 0;
  DotProductCase case_;
};

}  // namespace detail

/// The n-th case of a kind, seeded by kind, n and formats alone: a case that fails can be made again by
/// itself.
inline DotProductCase dot_product_case(CaseKind kind, std::uint64_t n, const SlowFormat& a,
                                       const SlowFormat& b, int k) {
  const std::uint64_t formats = static_cast<std::uint64_t>(a.exponent_bits * 16 + b.exponent_bits * 256 + k);
  RandomBits random(mix(mix(formats) + static_cast<std::uint64_t>(kind)) + n);
  return detail::CaseMaker(a, b, k, random).make(kind);
}

}  // namespace bitattn::test
