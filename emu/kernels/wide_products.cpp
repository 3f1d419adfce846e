#include "emu/kernels/wide_products.hpp"

// The loops are compiled once for each instruction set: Highway includes this file again per target.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "emu/kernels/wide_products.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "emu/arith/bits.hpp"
#include "emu/arith/fp32.hpp"

#ifndef BITATTN_WIDE_PRODUCTS_ONCE
#define BITATTN_WIDE_PRODUCTS_ONCE
namespace bitattn::kernels::wide {

constexpr int kStep = 16;
constexpr double kSmallestNormal = 0x1p-126;

/// Exponent of a term as the tensor core takes it: not below that of the smallest normal number.
inline int exponent(double x) {
  return std::max(-126, std::ilogb(x));
}

/// One step for one element, by the definition.
inline double step(const double* a, const double* b, std::ptrdiff_t b_stride, double c,
                   const arith::TensorCoreRule& rule) {
  double plain = c;
  for (int i = 0; i < kStep; ++i) plain += a[i] * b[i * b_stride];
  if (!std::isfinite(plain)) return static_cast<double>(arith::canonical(static_cast<float>(plain)));
  int largest = rule.exponent_floor;
  if (c != 0) largest = std::max(largest, exponent(c));
  for (int i = 0; i < kStep; ++i) {
    const double y = b[i * b_stride];
    if (a[i] != 0 && y != 0) largest = std::max(largest, exponent(a[i]) + exponent(y));
  }
  const int shift = rule.aligned_fraction_bits - largest;
  auto sum = static_cast<std::int64_t>(std::trunc(std::ldexp(c, shift)));
  for (int i = 0; i < kStep; ++i) {
    sum += static_cast<std::int64_t>(std::trunc(std::ldexp(a[i] * b[i * b_stride], shift)));
  }
  return static_cast<double>(arith::from_bits(arith::detail::round_and_pack(sum, largest, rule)));
}

/// 2^exponent(x); 0 for 0.
inline double power(double x) {
  if (x == 0) return 0;
  constexpr std::uint64_t kExponentBits = 0x7ff0000000000000ULL;
  return std::max(std::bit_cast<double>(std::bit_cast<std::uint64_t>(x) & kExponentBits), kSmallestNormal);
}

}  // namespace bitattn::kernels::wide
#endif

HWY_BEFORE_NAMESPACE();
namespace bitattn::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F64 = hn::ScalableTag<double>;
using U64 = hn::RebindToUnsigned<F64>;
using V = hn::Vec<F64>;

template <int kRows, int kVectors>
HWY_INLINE void exact_block(const WideProduct& p, int m, int n) {
  const F64 d;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(d));
  V sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::LoadU(d, p.c + (m + r) * p.ldc + n + v * lanes);
  }
  const double* a = p.left + static_cast<std::ptrdiff_t>(m) * p.depth;
  const double* b = p.right + n;
  for (int k = 0; k < p.depth; ++k, b += p.columns) {
    V right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = hn::LoadU(d, b + v * lanes);
    for (int r = 0; r < kRows; ++r) {
      const V left = hn::Set(d, a[static_cast<std::ptrdiff_t>(r) * p.depth + k]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(left, right[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, p.c + (m + r) * p.ldc + n + v * lanes);
  }
}

void exact_loops(const WideProduct& p) {
  const F64 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  constexpr int kRows = 4;
  constexpr int kVectors = 2;
  int n = 0;
  for (; n + kVectors * lanes <= p.columns; n += kVectors * lanes) {
    int m = 0;
    for (; m + kRows <= p.rows; m += kRows) exact_block<kRows, kVectors>(p, m, n);
    for (; m < p.rows; ++m) exact_block<1, kVectors>(p, m, n);
  }
  for (; n + lanes <= p.columns; n += lanes) {
    for (int m = 0; m < p.rows; ++m) exact_block<1, 1>(p, m, n);
  }
  for (; n < p.columns; ++n) {
    for (int m = 0; m < p.rows; ++m) {
      double& sum = p.c[m * p.ldc + n];
      const double* a = p.left + static_cast<std::ptrdiff_t>(m) * p.depth;
      for (int k = 0; k < p.depth; ++k) sum += a[k] * p.right[static_cast<std::ptrdiff_t>(k) * p.columns + n];
    }
  }
}

/// The chip's rule (fp32 results, cut off) over `lanes` columns. left_powers, right_powers: 2^exponent of
/// every operand, 0 for 0.
HWY_INLINE void rule_vector(const WideProduct& p, const double* left_powers, const double* right_powers,
                            int m, int n, const arith::TensorCoreRule& rule) {
  const F64 d;
  const U64 du;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(d));
  const V exponent_bits = hn::BitCast(d, hn::Set(du, 0x7ff0000000000000ULL));
  const V fp32_bits = hn::BitCast(d, hn::Set(du, ~((1ULL << 29U) - 1U)));
  const V floor = hn::Set(d, std::ldexp(1.0, rule.exponent_floor));
  const V fraction = hn::Set(d, std::ldexp(1.0, rule.aligned_fraction_bits));
  const V unit = hn::Set(d, std::ldexp(1.0, -rule.aligned_fraction_bits));
  const V smallest = hn::Set(d, wide::kSmallestNormal);
  double* const c_at = p.c + m * p.ldc + n;
  V c = hn::LoadU(d, c_at);
  for (int k = 0; k < p.depth; k += wide::kStep) {
    const double* a = p.left + static_cast<std::ptrdiff_t>(m) * p.depth + k;
    const double* a_powers = left_powers + static_cast<std::ptrdiff_t>(m) * p.depth + k;
    const std::ptrdiff_t b = static_cast<std::ptrdiff_t>(k) * p.columns + n;
    const V c_power =
        hn::IfThenZeroElse(hn::Eq(c, hn::Zero(d)), hn::Max(hn::And(c, exponent_bits), smallest));
    V largest = hn::Max(floor, c_power);
    V products[wide::kStep];
    for (int i = 0; i < wide::kStep; ++i) {
      const std::ptrdiff_t at = b + static_cast<std::ptrdiff_t>(i) * p.columns;
      largest = hn::Max(largest, hn::Mul(hn::Set(d, a_powers[i]), hn::LoadU(d, right_powers + at)));
      products[i] = hn::Mul(hn::Set(d, a[i]), hn::LoadU(d, p.right + at));
    }
    const V scale = hn::Div(fraction, largest);  // powers of two: exact
    V sum = hn::Trunc(hn::Mul(c, scale));
    for (int i = 0; i < wide::kStep; ++i) sum = hn::Add(sum, hn::Trunc(hn::Mul(products[i], scale)));
    // Integers below 2^33 in sum: exact. Adding +0 makes a zero sum +0.
    const V value = hn::Add(hn::Mul(hn::Mul(sum, unit), largest), hn::Zero(d));
    const V magnitude = hn::Abs(value);
    const auto usual = hn::Or(hn::Eq(magnitude, hn::Zero(d)),
                              hn::And(hn::Ge(magnitude, smallest), hn::Lt(magnitude, hn::Set(d, 0x1p128))));
    if (HWY_LIKELY(hn::AllTrue(d, usual))) {
      c = hn::And(value, fp32_bits);
      continue;
    }
    hn::StoreU(c, d, c_at);  // subnormal, infinite or no number in some lane
    for (std::ptrdiff_t lane = 0; lane < lanes; ++lane) {
      c_at[lane] = wide::step(a, p.right + b + lane, p.columns, c_at[lane], rule);
    }
    c = hn::LoadU(d, c_at);
  }
  hn::StoreU(c, d, c_at);
}

void rule_loops(const WideProduct& p, const double* left_powers, const double* right_powers,
                const arith::TensorCoreRule& rule) {
  const int lanes = static_cast<int>(hn::Lanes(F64()));
  for (int m = 0; m < p.rows; ++m) {
    int n = 0;
    for (; n + lanes <= p.columns; n += lanes) rule_vector(p, left_powers, right_powers, m, n, rule);
    if (n == p.columns) continue;
    WideProduct rest = p;
    rest.left += static_cast<std::ptrdiff_t>(m) * p.depth;
    rest.rows = 1;
    rest.c += m * p.ldc;
    for (; n < p.columns; ++n) {
      double& c = rest.c[n];
      for (int k = 0; k < p.depth; k += wide::kStep) {
        c = wide::step(rest.left + k, p.right + static_cast<std::ptrdiff_t>(k) * p.columns + n, p.columns, c,
                       rule);
      }
    }
  }
}

}  // namespace bitattn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace bitattn::kernels {

HWY_EXPORT(exact_loops);
HWY_EXPORT(rule_loops);

void multiply_exactly(const WideProduct& product) {
  HWY_DYNAMIC_DISPATCH(exact_loops)(product);
}

void multiply_by_rule_scalar(const WideProduct& p, const arith::TensorCoreRule& rule) {
  for (int m = 0; m < p.rows; ++m) {
    const double* a = p.left + static_cast<std::ptrdiff_t>(m) * p.depth;
    for (int n = 0; n < p.columns; ++n) {
      double& c = p.c[m * p.ldc + n];
      for (int k = 0; k < p.depth; k += wide::kStep) {
        c = wide::step(a + k, p.right + static_cast<std::ptrdiff_t>(k) * p.columns + n, p.columns, c, rule);
      }
    }
  }
}

void multiply_by_rule(const WideProduct& p, const arith::TensorCoreRule& rule) {
  if (rule.round_to_nearest || rule.result_fraction_bits != 23) return multiply_by_rule_scalar(p, rule);
  const auto powers = [](const double* x, std::ptrdiff_t n, std::vector<double>& out) {
    out.resize(static_cast<std::size_t>(n));
    bool finite = true;
    for (std::ptrdiff_t i = 0; i < n; ++i) {
      finite = finite && std::isfinite(x[i]);
      out[static_cast<std::size_t>(i)] = std::isfinite(x[i]) ? wide::power(x[i]) : 0.0;
    }
    return finite;
  };
  std::vector<double> left;
  std::vector<double> right;
  const bool finite = powers(p.left, static_cast<std::ptrdiff_t>(p.rows) * p.depth, left) &&
                      powers(p.right, static_cast<std::ptrdiff_t>(p.depth) * p.columns, right);
  if (!finite) return multiply_by_rule_scalar(p, rule);
  HWY_DYNAMIC_DISPATCH(rule_loops)(p, left.data(), right.data(), rule);
}

}  // namespace bitattn::kernels

#endif  // HWY_ONCE
