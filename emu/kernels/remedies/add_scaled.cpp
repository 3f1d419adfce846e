#include "emu/kernels/remedies/add_scaled.hpp"

// The loop is compiled once for each instruction set: Highway includes this file again per target.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "emu/kernels/remedies/add_scaled.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#include <algorithm>

#include "emu/arith/bits.hpp"
#include "emu/arith/fp32.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/mma/float_mode.hpp"

// One rounding in MXCSR's flush mode: only x86 with FMA has that.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace bitattn::kernels::remedies::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;

HWY_INLINE hn::Vec<F32> fused(hn::Vec<F32> factor, hn::Vec<F32> x, hn::Vec<F32> sum) {
  const F32 df;
  const auto r = hn::MulAdd(factor, x, sum);
  const auto quiet = hn::BitCast(df, hn::Set(hn::RebindToUnsigned<F32>(), arith::kQuietNan));
  return hn::IfThenElse(hn::IsNaN(r), quiet, r);
}

// Not inlined, so that no arithmetic leaves the mode that its caller sets.
HWY_NOINLINE void run(float factor, const float* x, float* sum, int n) {
  const F32 df;
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));
  const auto f = hn::Set(df, factor);
  int j = 0;
  for (; j + kLanes <= n; j += kLanes)
    hn::StoreU(fused(f, hn::LoadU(df, x + j), hn::LoadU(df, sum + j)), df, sum + j);
  if (j == n) return;
  HWY_ALIGN float edge[2][kLanes] = {};
  std::copy(x + j, x + n, edge[0]);
  std::copy(sum + j, sum + n, edge[1]);
  hn::Store(fused(f, hn::Load(df, edge[0]), hn::Load(df, edge[1])), df, edge[1]);
  std::copy_n(edge[1], n - j, sum + j);
}

void add_scaled(float factor, const float* x, float* sum, int n) {
  const mma::FloatModeScope scope(mma::FloatMode::nearest_flush);
  run(factor, x, sum, n);
}

}  // namespace bitattn::kernels::remedies::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE

#include <hwy/targets.h>

namespace bitattn::kernels::remedies {

AddScaled::AddScaled(const profile::Arithmetic& arithmetic, [[maybe_unused]] std::string_view engine)
    : flush_(arithmetic.flush_subnormals), loop_(nullptr) {
  if (!flush_) return;
#if HWY_TARGETS & HWY_AVX3
  if (engine == "avx512" && (hwy::SupportedTargets() & HWY_AVX3) != 0) loop_ = N_AVX3::add_scaled;
#endif
#if HWY_TARGETS & HWY_AVX2
  if (engine == "avx2" && (hwy::SupportedTargets() & HWY_AVX2) != 0) loop_ = N_AVX2::add_scaled;
#endif
}

void AddScaled::operator()(float factor, const float* x, float* sum, int n) const {
  if (loop_ != nullptr) return loop_(factor, x, sum, n);
  for (int j = 0; j < n; ++j) {
    sum[j] = flush_ ? arith::ftz::fma(factor, x[j], sum[j]) : arith::fma(factor, x[j], sum[j]);
  }
}

}  // namespace bitattn::kernels::remedies

#endif  // HWY_ONCE
