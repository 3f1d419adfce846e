#include "emu/mma/fp8_product.hpp"

#include <algorithm>
#include <cmath>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp8_scaling.hpp"

namespace bitattn::mma {

namespace {

constexpr int kStep = 32;
constexpr int kNoExponent = -512;  ///< of a zero: below every other

/// A tile's numbers taken apart once, for all products it is in.
struct Decoded {
  std::vector<std::int16_t> significands;  ///< with the sign
  std::vector<std::int16_t> exponents;
  bool nan = false;

  explicit Decoded(const Fp8Operand& operand) {
    using arith::E4m3;
    significands.reserve(operand.codes.size());
    exponents.reserve(operand.codes.size());
    for (const std::uint8_t code : operand.codes) {
      const auto s = static_cast<std::int16_t>(E4m3::significand(code));
      significands.push_back(static_cast<std::int16_t>(E4m3::negative(code) ? -s : s));
      exponents.push_back(static_cast<std::int16_t>(s == 0 ? kNoExponent : E4m3::exponent(code)));
      nan = nan || E4m3::nan(code);
    }
  }
};

/// wgmma_fp8_k32<E4m3, E4m3> of finite numbers, in the same steps (emu/arith/tensor_core.hpp, fused_step).
std::uint32_t finite_step(const std::int16_t* a, const std::int16_t* a_exponents, const std::int16_t* b,
                          const std::int16_t* b_exponents, std::uint32_t c) {
  constexpr arith::TensorCoreRule kRule = arith::kHopperFp8;
  constexpr int kProductShift = kRule.aligned_fraction_bits - 2 * arith::E4m3::kFractionBits;
  int exponents[kStep];
  int largest = kRule.exponent_floor;
  for (int i = 0; i < kStep; ++i) {
    exponents[i] = a_exponents[i] + b_exponents[i];
    largest = std::max(largest, exponents[i]);
  }
  const int c_field = static_cast<int>(c >> 23U & 255U);
  const std::uint32_t c_significand = (c & 0x7fffffU) | (c_field != 0 ? 0x800000U : 0U);
  const int c_exponent = (c_field != 0 ? c_field : 1) - 127;
  if (c_significand != 0) largest = std::max(largest, c_exponent);
  int sum = 0;
  for (int i = 0; i < kStep; ++i) {
    const int product = a[i] * b[i];
    const int magnitude = std::abs(product) << kProductShift >> std::min(largest - exponents[i], 31);
    sum += product < 0 ? -magnitude : magnitude;
  }
  if (c_significand != 0) {
    const int shift = largest - c_exponent - (kRule.aligned_fraction_bits - 23);
    const auto term = static_cast<int>(arith::detail::shift_right(c_significand, shift));
    sum += (c & arith::kSignBit) != 0U ? -term : term;
  }
  return arith::detail::round_and_pack(sum, largest, kRule);
}

}  // namespace

void pack_fp8(const MatrixView& view, Fp8Operand& out) {
  out.rows = view.rows;
  out.k_padded = (view.k + kStep - 1) / kStep * kStep;
  out.codes.assign(static_cast<std::size_t>(out.rows) * static_cast<std::size_t>(out.k_padded), 0);
  const int rows = std::min(view.rows, view.rows_in_memory);
  const int columns = std::min(view.k, view.k_in_memory);
  float amax = 0;
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k < columns; ++k) {
      const float x = std::abs(arith::fp32_from_bf16(view.at(r, k)));
      if (std::isfinite(x)) amax = std::max(amax, x);
    }
  }
  out.exponent = arith::fp8_scale_exponent(arith::Fp8::e4m3, amax);
  const float scale = std::ldexp(1.0F, out.exponent);
  for (int r = 0; r < rows; ++r) {
    std::uint8_t* codes = out.codes.data() + static_cast<std::ptrdiff_t>(r) * out.k_padded;
    for (int k = 0; k < columns; ++k) {
      const float x = arith::fp32_from_bf16(view.at(r, k));
      codes[k] = arith::e4m3_from_fp32(arith::to_bits(arith::ftz::mul(x, scale)));
    }
  }
}

void multiply_fp8(const Fp8Operand& left, const Fp8Operand& right, Start start, float* c,
                  std::ptrdiff_t ldc) {
  const float left_scale = std::ldexp(1.0F, -left.exponent);
  const float right_scale = std::ldexp(1.0F, -right.exponent);
  const Decoded a(left);
  const Decoded b(right);
  const bool finite = !a.nan && !b.nan;
  for (int m = 0; m < left.rows; ++m) {
    for (int n = 0; n < right.rows; ++n) {
      std::uint32_t chain = 0;
      for (int k = 0; k < left.k_padded; k += kStep) {
        const std::ptrdiff_t at_a = static_cast<std::ptrdiff_t>(m) * left.k_padded + k;
        const std::ptrdiff_t at_b = static_cast<std::ptrdiff_t>(n) * right.k_padded + k;
        chain = finite && !arith::is_nan(chain) && (chain & arith::kInfinity) != arith::kInfinity
                    ? finite_step(a.significands.data() + at_a, a.exponents.data() + at_a,
                                  b.significands.data() + at_b, b.exponents.data() + at_b, chain)
                    : arith::wgmma_fp8_k32<arith::E4m3, arith::E4m3>(left.codes.data() + at_a,
                                                                     right.codes.data() + at_b, chain);
      }
      const float tile = arith::ftz::mul(arith::ftz::mul(arith::from_bits(chain), left_scale), right_scale);
      float& sum = c[m * ldc + n];
      sum = start == Start::zero ? tile : arith::ftz::add(sum, tile);
    }
  }
}

}  // namespace bitattn::mma
