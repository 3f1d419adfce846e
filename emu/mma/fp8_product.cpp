#include "emu/mma/fp8_product.hpp"

#include <algorithm>
#include <cmath>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp8_scaling.hpp"

namespace bitattn::mma {

namespace {

constexpr int kStep = 32;

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
  for (int m = 0; m < left.rows; ++m) {
    const std::uint8_t* a = left.codes.data() + static_cast<std::ptrdiff_t>(m) * left.k_padded;
    for (int n = 0; n < right.rows; ++n) {
      const std::uint8_t* b = right.codes.data() + static_cast<std::ptrdiff_t>(n) * right.k_padded;
      std::uint32_t chain = 0;
      for (int k = 0; k < left.k_padded; k += kStep) {
        chain = arith::wgmma_fp8_k32<arith::E4m3, arith::E4m3>(a + k, b + k, chain);
      }
      const float tile = arith::ftz::mul(arith::ftz::mul(arith::from_bits(chain), left_scale), right_scale);
      float& sum = c[m * ldc + n];
      sum = start == Start::zero ? tile : arith::ftz::add(sum, tile);
    }
  }
}

}  // namespace bitattn::mma
