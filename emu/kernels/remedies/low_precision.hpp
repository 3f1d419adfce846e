#pragma once
// experimental:p-e4m3, ds-e5m2-tensor, fp8-backward and the like: P, dS or whole products in FP8. No kernel
// that was recorded does this; the casts and the FP8 tensor core are the chip's own
// (docs/spec/hopper-arithmetic.md 1 and 7), the scaling and where sums are promoted to fp32 are a choice
// (docs/lower-precision.md).

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>

#include "emu/arith/fp8_scaling.hpp"
#include "emu/profile/remedies.hpp"
#include "emu/profile/sites.hpp"

namespace bitattn::kernels::remedies {

/// P is at most 1 but for its last bits: 2^8 keeps it below both formats' largest numbers.
inline constexpr int kPExponent = 8;

/// What of a profile runs in FP8.
struct LowPrecision {
  std::optional<arith::Fp8> p, p_backward, ds;
  bool forward_products = false, backward_products = false;

  explicit LowPrecision(const profile::RemedySet& remedies)
      : forward_products(remedies.has(profile::Remedy::fp8_forward)),
        backward_products(remedies.has(profile::Remedy::fp8_backward)) {
    using profile::Remedy;
    if (remedies.has(Remedy::p_e4m3)) p = p_backward = arith::Fp8::e4m3;
    if (remedies.has(Remedy::p_e5m2)) p = p_backward = arith::Fp8::e5m2;
    if (remedies.has(Remedy::ds_e4m3) || remedies.has(Remedy::ds_e4m3_tensor)) ds = arith::Fp8::e4m3;
    if (remedies.has(Remedy::ds_e5m2) || remedies.has(Remedy::ds_e5m2_tensor)) ds = arith::Fp8::e5m2;
    if (forward_products) p = arith::Fp8::e4m3;
    if (backward_products) p_backward = ds = arith::Fp8::e4m3;
  }

  bool fp8_products() const { return forward_products || backward_products; }
  bool fp8_product(profile::Site site) const {
    const bool forward = site == profile::Site::score_mma || site == profile::Site::pv_mma;
    return forward ? forward_products : backward_products;
  }
};

/// Largest finite magnitude of a tile of dS: `rows` rows of n, `stride` apart.
template <class Value>
float largest_magnitude(const Value* ds, int rows, int n, std::ptrdiff_t stride) {
  float largest = 0;
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < n; ++j) {
      const auto x = std::abs(static_cast<float>(ds[r * stride + j]));
      if (std::isfinite(x)) largest = std::max(largest, x);
    }
  }
  return largest;
}

/// Casts a tile of dS: words(r, j) = BF(MUL(F8(MUL(ds, 2^exponent)), 2^-exponent)).
template <class Numbers>
void cast_ds_fp8(const Numbers& numbers, arith::Fp8 format, int exponent, const typename Numbers::Value* ds,
                 typename Numbers::Word* words, int rows, int n, std::ptrdiff_t stride) {
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < n; ++j) {
      const std::ptrdiff_t at = r * stride + j;
      words[at] = numbers.cast_fp8(profile::Site::ds_cast, ds[at], format, exponent);
    }
  }
}

}  // namespace bitattn::kernels::remedies
