#include "emu/kernels/vector_row_ops.hpp"

// The loops are compiled once for each instruction set: Highway includes this file again per target.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "emu/kernels/vector_row_ops.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "emu/arith/bits.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/kernels/mufu_words.hpp"
#include "emu/mma/float_mode.hpp"

// One rounding each for add, mul and fma, in MXCSR's flush modes: only x86 with FMA has that.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace bitattn::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using mma::FloatMode;
using mma::FloatModeScope;

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using VF = hn::Vec<F32>;
using VI = hn::Vec<I32>;
using VU = hn::Vec<U32>;

// One half of a vector's lanes, and as many lanes of twice the width.
using F64 = hn::ScalableTag<double>;
using I64 = hn::RebindToSigned<F64>;
using HalfF32 = hn::Rebind<float, F64>;
using HalfI32 = hn::Rebind<std::int32_t, F64>;

inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));

/// Every NaN becomes the chip's. NaNs stay NaNs through the operations, so that once, at the end, is enough.
HWY_INLINE VF canonical(VF x) {
  return hn::IfThenElse(hn::IsNaN(x), hn::BitCast(F32(), hn::Set(U32(), arith::kQuietNan)), x);
}

/// Entry `fixed >> 17 & 63` of a table.
HWY_INLINE VU look_up(const std::array<std::uint32_t, 64>& table, VU fixed) {
  const U32 du;
  const VU i = hn::ShiftRight<17>(fixed);
#if HWY_TARGET == HWY_AVX3
  const std::uint32_t* const t = table.data();
  const __m512i low = _mm512_permutex2var_epi32(hn::Load(du, t).raw, i.raw, hn::Load(du, t + 16).raw);
  const __m512i high = _mm512_permutex2var_epi32(hn::Load(du, t + 32).raw, i.raw, hn::Load(du, t + 48).raw);
  return hn::IfThenElse(hn::TestBit(fixed, hn::Set(du, 1U << 22U)), VU{high}, VU{low});
#else
  return hn::GatherIndex(du, table.data(), hn::BitCast(I32(), hn::And(i, hn::Set(du, 63U))));
#endif
}

/// arith::mufu::square_17 of the lower 17 bits: their upper 7 are h, their lower 10 are l.
HWY_INLINE VU square_17(VU fixed) {
  const U32 du;
  const VU h = hn::And(hn::ShiftRight<10>(fixed), hn::Set(du, 0x7fU));
  const VU l = hn::And(fixed, hn::Set(du, 0x3ffU));
  VU s = hn::Mul(hn::Add(h, h), h);
  s = hn::Add(s, hn::IfThenElseZero(hn::TestBit(fixed, hn::Set(du, 1U << 10U)), hn::ShiftRight<8>(l)));
  s = hn::Add(s, hn::IfThenElseZero(hn::TestBit(fixed, hn::Set(du, 1U << 11U)), hn::ShiftRight<7>(l)));
  s = hn::Add(s, hn::IfThenElseZero(hn::TestBit(fixed, hn::Set(du, 1U << 12U)), hn::ShiftRight<6>(l)));
  s = hn::Add(s, hn::IfThenElseZero(hn::TestBit(fixed, hn::Set(du, 1U << 13U)), hn::ShiftRight<5>(l)));
  s = hn::Add(s, hn::IfThenElseZero(hn::TestBit(fixed, hn::Set(du, 1U << 14U)), hn::ShiftRight<4>(l)));
  s = hn::Add(s, hn::IfThenElseZero(hn::TestBit(fixed, hn::Set(du, 1U << 15U)), hn::ShiftRight<3>(l)));
  return hn::Add(s, hn::IfThenElseZero(hn::TestBit(fixed, hn::Set(du, 1U << 16U)), hn::ShiftRight<2>(l)));
}

/// arith::mufu::ex2.
HWY_INLINE VF ex2(VF x) {
  const F32 df;
  const I32 di;
  const U32 du;
  const VF scaled = hn::Mul(x, hn::Set(df, 0x1p23F));
#if HWY_TARGET == HWY_AVX3
  const VI cut{_mm512_cvttps_epi32(scaled.raw)};
#else
  const VI cut{_mm256_cvttps_epi32(scaled.raw)};
#endif
  // x in fixed point. A negative number's fraction is one's complemented, unless it is 0: one less than -|x|
  // cut off.
  const auto whole = hn::Eq(hn::And(cut, hn::Set(di, 0x7fffff)), hn::Zero(di));
  const VU fixed = hn::BitCast(du, hn::Add(cut, hn::IfThenZeroElse(whole, hn::BroadcastSignBit(cut))));
  const VU c0 = look_up(kEx2Words.c0, fixed);
  const VU c1_c2 = look_up(kEx2Words.c1_c2, fixed);
  const VU c1 = hn::And(c1_c2, hn::Set(du, 0xffffU));
  const VU c2 = hn::ShiftRight<16>(c1_c2);
  // (C0*2^13 + 6114 + C1*u + C2*sq) >> 15 in 32 bits. C1*u = 4*high + low and C0 = 4*(C0>>2) + (C0&3), so
  // that it is (C0>>2) + ((high + ((low + C2*sq + 6114) >> 2) + ((C0&3) << 11)) >> 13); high < 2^31, the rest
  // < 2^25.
  const VU u = hn::And(fixed, hn::Set(du, 0x1ffffU));
  const VU high = hn::Mul(c1, hn::ShiftRight<2>(u));
  const VU low = hn::Mul(c1, hn::And(fixed, hn::Set(du, 3U)));
  const VU tail = hn::ShiftRight<2>(hn::Add(hn::Add(low, hn::Mul(c2, square_17(fixed))), hn::Set(du, 6114U)));
  const VU c0_low = hn::ShiftLeft<11>(hn::And(c0, hn::Set(du, 3U)));
  const VU interpolated = hn::ShiftRight<13>(hn::Add(high, hn::Add(tail, c0_low)));
  // The table's C0 carries 126 units of the exponent field, and the significand's leading 1 is one more.
  const VU significand = hn::Add(hn::ShiftRight<2>(c0), interpolated);
  VU bits = hn::Add(hn::And(fixed, hn::Set(du, 0xff800000U)), significand);
  // From 128 on the exponent field is 255 or more, below -126 it is 0 or less; far beyond, `cut` was no
  // number at all.
  bits =
      hn::IfThenElse(hn::RebindMask(du, hn::Ge(x, hn::Set(df, 128.0F))), hn::Set(du, arith::kInfinity), bits);
  bits = hn::IfThenZeroElse(hn::RebindMask(du, hn::Lt(x, hn::Set(df, -126.0F))), bits);
  bits = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), hn::Set(du, arith::kQuietNan), bits);
  return hn::BitCast(df, bits);
}

/// One half of tanh: C0*2^15 + C1*u + 2*C2*sq, times 2^(exponent - 40), cut off to 24 bits. All of it is
/// exact in fp64: the sum is an integer below 2^42.
HWY_INLINE hn::Vec<HalfF32> tanh_half(hn::Vec<HalfI32> exponent, hn::Vec<HalfI32> c0, hn::Vec<HalfI32> c1,
                                      hn::Vec<HalfI32> c2, hn::Vec<HalfI32> u, hn::Vec<HalfI32> square) {
  const F64 d;
  const I64 di;
  const auto wide = [&](hn::Vec<HalfI32> v) HWY_ATTR { return hn::PromoteTo(d, v); };
  auto sum = hn::MulAdd(wide(c1), wide(u), hn::Mul(wide(c0), hn::Set(d, 32768.0)));
  sum = hn::MulAdd(hn::Mul(wide(c2), hn::Set(d, 2.0)), wide(square), sum);
  const auto power = hn::ShiftLeft<52>(hn::PromoteTo(di, hn::Add(exponent, hn::Set(HalfI32(), 1023 - 40))));
  const auto bits = hn::BitCast(di, hn::Mul(sum, hn::BitCast(d, power)));
  return hn::DemoteTo(HalfF32(), hn::BitCast(d, hn::And(bits, hn::Set(di, -(std::int64_t{1} << 29)))));
}

/// arith::mufu::tanh.
HWY_INLINE VF tanh(VF x) {
  const F32 df;
  const I32 di;
  const U32 du;
  const HalfI32 half;
  const VU bits = hn::BitCast(du, x);
  const VU sign = hn::And(bits, hn::Set(du, arith::kSignBit));
  const VI exponent = hn::BitCast(di, hn::Sub(hn::ShiftRight<23>(hn::AndNot(sign, bits)), hn::Set(du, 127U)));
  const VI row = hn::Min(hn::Max(hn::Add(exponent, hn::Set(di, 8)), hn::Zero(di)), hn::Set(di, 10));
  const VU first_bits = hn::GatherIndex(du, kTanhWords.first_bits.data(), row);
  const VU segment_bits = hn::ShiftRight<8>(first_bits);
  const VU fraction = hn::And(bits, hn::Set(du, 0x7fffffU));
  const VU segment = hn::Add(hn::And(first_bits, hn::Set(du, 255U)),
                             hn::Shr(fraction, hn::Sub(hn::Set(du, 23U), segment_bits)));
  const VU u = hn::And(hn::Shr(fraction, hn::Sub(hn::Set(du, 6U), segment_bits)), hn::Set(du, 0x1ffffU));
  const VI i = hn::BitCast(di, segment);
  const VI c0 = hn::GatherIndex(di, kTanhWords.c0.data(), i);
  const VI c1 = hn::GatherIndex(di, kTanhWords.c1.data(), i);
  const VI c2 = hn::GatherIndex(di, kTanhWords.c2.data(), i);
  const VI ui = hn::BitCast(di, u);
  const VI square = hn::BitCast(di, square_17(u));
  const auto lower =
      tanh_half(hn::LowerHalf(half, exponent), hn::LowerHalf(half, c0), hn::LowerHalf(half, c1),
                hn::LowerHalf(half, c2), hn::LowerHalf(half, ui), hn::LowerHalf(half, square));
  const auto upper =
      tanh_half(hn::UpperHalf(half, exponent), hn::UpperHalf(half, c0), hn::UpperHalf(half, c1),
                hn::UpperHalf(half, c2), hn::UpperHalf(half, ui), hn::UpperHalf(half, square));
  VU result = hn::BitCast(du, hn::Combine(df, upper, lower));
  result =
      hn::IfThenElse(hn::RebindMask(du, hn::Gt(exponent, hn::Set(di, 2))), hn::Set(du, arith::kOne), result);
  result = hn::Or(result, sign);
  result = hn::IfThenElse(hn::RebindMask(du, hn::Lt(exponent, hn::Set(di, -8))), bits, result);
  result = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), hn::Set(du, arith::kQuietNan), result);
  return hn::BitCast(df, result);
}

/// arith::bf16_from_fp32, a word in each lane.
HWY_INLINE VU bf16_word(VF x) {
  const U32 du;
  const VU bits = hn::BitCast(du, x);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1U));
  const VU word = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffU))));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), hn::Set(du, 0x7fffU), word);
}

/// out[j] := f(x[j], y[j]), whole vectors first; the rest of the row in a buffer.
template <class Function>
HWY_INLINE void map(const Function& f, const float* x, const float* y, float* out, std::ptrdiff_t n) {
  const F32 df;
  std::ptrdiff_t j = 0;
  for (; j + kLanes <= n; j += kLanes) hn::StoreU(f(hn::LoadU(df, x + j), hn::LoadU(df, y + j)), df, out + j);
  if (j == n) return;
  HWY_ALIGN float edge[3][kLanes] = {};
  std::copy(x + j, x + n, edge[0]);
  std::copy(y + j, y + n, edge[1]);
  hn::Store(f(hn::Load(df, edge[0]), hn::Load(df, edge[1])), df, edge[2]);
  std::copy_n(edge[2], n - j, out + j);
}

struct FusedExponential {
  VF c, negated;
  HWY_INLINE VF operator()(VF x, VF /*y*/) const { return ex2(hn::MulAdd(x, c, negated)); }
};
struct Exponential {
  VF c, reference;
  HWY_INLINE VF operator()(VF x, VF /*y*/) const { return ex2(hn::Sub(hn::Mul(x, c), reference)); }
};
struct Softcap {
  VF scale;
  HWY_INLINE VF operator()(VF x, VF /*y*/) const { return tanh(hn::Mul(x, scale)); }
};
struct SoftcapDerivative {
  HWY_INLINE VF operator()(VF t, VF /*y*/) const {
    return canonical(hn::NegMulAdd(t, t, hn::Set(F32(), 1.0F)));
  }
};
struct Product {
  HWY_INLINE VF operator()(VF x, VF y) const { return canonical(hn::Mul(x, y)); }
};
struct ProductWith {
  VF factor;
  HWY_INLINE VF operator()(VF x, VF /*y*/) const { return canonical(hn::Mul(x, factor)); }
};
struct Sum {
  HWY_INLINE VF operator()(VF x, VF y) const { return canonical(hn::Add(x, y)); }
};
template <bool fused, bool from_cast_p>
struct ScoreGradient {
  VF dpsum;
  HWY_INLINE VF operator()(VF p, VF dp) const {
    VF factor = p;
    if constexpr (from_cast_p) factor = hn::BitCast(F32(), hn::ShiftLeft<16>(bf16_word(p)));
    if constexpr (fused) return canonical(hn::MulSub(factor, dp, hn::Mul(factor, dpsum)));
    return canonical(hn::Mul(factor, hn::Sub(dp, dpsum)));
  }
};

// Not inlined, so that no arithmetic leaves the mode that its caller sets.
template <class Function>
HWY_NOINLINE void run_map(const Function& f, const float* x, const float* y, float* out, std::ptrdiff_t n) {
  map(f, x, y, out, n);
}
template <class Function>
HWY_INLINE void map_in(FloatMode mode, const Function& f, const float* x, const float* y, float* out,
                       std::ptrdiff_t n) {
  const FloatModeScope scope(mode);
  run_map(f, x, y, out, n);
}

void softcap(float* x, int n, float softcap_scale) {
  map_in(FloatMode::nearest_flush, Softcap{hn::Set(F32(), softcap_scale)}, x, x, x, n);
}
void softcap_with_derivative(float* x, float* h, int n, float softcap_scale) {
  softcap(x, n, softcap_scale);
  map_in(FloatMode::nearest_flush, SoftcapDerivative{}, x, x, h, n);
}

float row_max(const float* x, int n) {
  // MAXPS returns its second operand if either is a NaN: NaNs in x are passed over.
  const F32 df;
  VF m = hn::Set(df, -INFINITY);
  int j = 0;
  for (; j + kLanes <= n; j += kLanes) m = hn::Max(hn::LoadU(df, x + j), m);
  float result = hn::GetLane(hn::MaxOfLanes(df, m));
  for (; j < n; ++j) result = x[j] > result ? x[j] : result;
  return result;
}

void exponentials(const float* x, float* p, int n, float c, float reference, bool fused) {
  const F32 df;
  const VF vc = hn::Set(df, c);
  const VF vr = hn::Set(df, reference);
  if (fused) {
    map_in(FloatMode::nearest_flush, FusedExponential{vc, hn::Neg(vr)}, x, x, p, n);
  } else {
    map_in(FloatMode::nearest_flush, Exponential{vc, vr}, x, x, p, n);
  }
}

HWY_NOINLINE void run_quad_sums(const float* p, int n, bool first, float alpha, bool rescale_fused,
                                float* lanes) {
  // Lane q owns columns 8v + 2q and 8v + 2q + 1.
  const hn::FixedTag<float, 4> d;
  const auto load_even = [&](int v) HWY_ATTR {
    return hn::ConcatEven(d, hn::LoadU(d, p + v + 4), hn::LoadU(d, p + v));
  };
  const auto load_odd = [&](int v) HWY_ATTR {
    return hn::ConcatOdd(d, hn::LoadU(d, p + v + 4), hn::LoadU(d, p + v));
  };
  auto l = hn::LoadU(d, lanes);
  if (first) {
    l = load_even(0);
  } else if (rescale_fused) {
    l = hn::MulAdd(hn::Set(d, alpha), l, load_even(0));
  } else {
    l = hn::Add(hn::Mul(hn::Set(d, alpha), l), load_even(0));
  }
  l = hn::Add(l, load_odd(0));
  for (int v = 8; v < n; v += 8) {
    l = hn::Add(l, load_even(v));
    l = hn::Add(l, load_odd(v));
  }
  const auto quiet = hn::BitCast(d, hn::Set(hn::RebindToUnsigned<decltype(d)>(), arith::kQuietNan));
  hn::StoreU(hn::IfThenElse(hn::IsNaN(l), quiet, l), d, lanes);
}
void add_to_quad_sums(const float* p, int n, bool first, float alpha, bool rescale_fused, float* lanes) {
  const FloatModeScope scope(FloatMode::nearest_flush);
  run_quad_sums(p, n, first, alpha, rescale_fused, lanes);
}

void cast(const float* x, std::uint16_t* words, int n) {
  const F32 df;
  const I32 di;
  const U16 d16;
  int j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, bf16_word(hn::LoadU(df, x + j)))), d16, words + j);
  }
  if (j == n) return;
  HWY_ALIGN float edge[kLanes] = {};
  HWY_ALIGN std::uint16_t edge_words[kLanes];
  std::copy(x + j, x + n, edge);
  hn::Store(hn::DemoteTo(d16, hn::BitCast(di, bf16_word(hn::Load(df, edge)))), d16, edge_words);
  std::copy_n(edge_words, n - j, words + j);
}

void scaled(const float* x, float* out, int n, float factor) {
  map_in(FloatMode::nearest_flush, ProductWith{hn::Set(F32(), factor)}, x, x, out, n);
}

void score_gradient(const float* p, const float* dp, float* ds, int n, float dpsum, bool fused,
                    bool from_cast_p) {
  const VF d = hn::Set(F32(), dpsum);
  if (fused) {
    if (from_cast_p) {
      map_in(FloatMode::nearest_flush, ScoreGradient<true, true>{d}, p, dp, ds, n);
    } else {
      map_in(FloatMode::nearest_flush, ScoreGradient<true, false>{d}, p, dp, ds, n);
    }
  } else if (from_cast_p) {
    map_in(FloatMode::nearest_flush, ScoreGradient<false, true>{d}, p, dp, ds, n);
  } else {
    map_in(FloatMode::nearest_flush, ScoreGradient<false, false>{d}, p, dp, ds, n);
  }
}

void multiply(const float* a, const float* b, float* out, int n) {
  map_in(FloatMode::nearest_flush, Product{}, a, b, out, n);
}

void reduce_add(float* memory, const float* part, std::ptrdiff_t n) {
  map_in(FloatMode::nearest, Sum{}, memory, part, memory, n);
}
void reduce_add_flush(float* memory, const float* part, std::ptrdiff_t n) {
  map_in(FloatMode::nearest_flush, Sum{}, memory, part, memory, n);
}

extern const VectorRowLoops kLoops;
const VectorRowLoops kLoops{softcap, softcap_with_derivative, row_max,  exponentials, add_to_quad_sums, cast,
                            scaled,  score_gradient,          multiply, reduce_add,   reduce_add_flush};

}  // namespace bitattn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE

#include <hwy/targets.h>

namespace bitattn::kernels {

const VectorRowLoops* vector_row_loops([[maybe_unused]] std::string_view engine) {
#if HWY_TARGETS & HWY_AVX3
  if (engine == "avx512" && (hwy::SupportedTargets() & HWY_AVX3) != 0) return &N_AVX3::kLoops;
#endif
#if HWY_TARGETS & HWY_AVX2
  if (engine == "avx2" && (hwy::SupportedTargets() & HWY_AVX2) != 0) return &N_AVX2::kLoops;
#endif
  return nullptr;
}

void VectorRowOps::softcap(float* x, int n, float softcap_scale) const {
  if (loops_ == nullptr) return model_.softcap(x, n, softcap_scale);
  loops_->softcap(x, n, softcap_scale);
}

void VectorRowOps::softcap_with_derivative(float* x, float* h, int n, float softcap_scale) const {
  if (loops_ == nullptr) return model_.softcap_with_derivative(x, h, n, softcap_scale);
  loops_->softcap_with_derivative(x, h, n, softcap_scale);
}

float VectorRowOps::row_max(const float* x, int n, float start) const {
  if (loops_ == nullptr || std::isnan(start)) return model_.row_max(x, n, start);
  const float m = loops_->row_max(x, n);
  // The order of -0 and +0, and subnormals that count as zeros, are the model's to decide.
  if (std::fabs(m) < 0x1p-126F) return model_.row_max(x, n, start);
  return ops.max(start, m);
}

void VectorRowOps::forward_exponentials(const float* x, float* p, int n, float c, float reference) const {
  if (ex2_loops_ == nullptr) return model_.forward_exponentials(x, p, n, c, reference);
  ex2_loops_->exponentials(x, p, n, c, reference, forward_.exponent_fused);
}

void VectorRowOps::backward_exponentials(const float* x, float* p, int n, float c, float reference) const {
  if (ex2_loops_ == nullptr) return model_.backward_exponentials(x, p, n, c, reference);
  ex2_loops_->exponentials(x, p, n, c, reference, backward_.exponent_fused);
}

void VectorRowOps::add_to_quad_sums(const float* p, int n, bool first, float alpha, QuadSums& sums) const {
  if (loops_ == nullptr) return model_.add_to_quad_sums(p, n, first, alpha, sums);
  loops_->add_to_quad_sums(p, n, first, alpha, forward_.row_sum_rescale_fused, sums.lane);
}

void VectorRowOps::cast(const float* x, std::uint16_t* words, int n) const {
  if (loops_ == nullptr) return model_.cast(x, words, n);
  loops_->cast(x, words, n);
}

void VectorRowOps::scaled(const float* x, float* out, int n, float factor) const {
  if (loops_ == nullptr) return model_.scaled(x, out, n, factor);
  loops_->scaled(x, out, n, factor);
}

void VectorRowOps::score_gradient(const float* p, const float* dp, float* ds, int n, float dpsum) const {
  if (loops_ == nullptr) return model_.score_gradient(p, dp, ds, n, dpsum);
  loops_->score_gradient(p, dp, ds, n, dpsum, backward_.ds == profile::DsOrder::fused,
                         backward_.ds_from_cast_p);
}

void VectorRowOps::multiply(const float* a, const float* b, float* out, int n) const {
  if (loops_ == nullptr) return model_.multiply(a, b, out, n);
  loops_->multiply(a, b, out, n);
}

void VectorRowOps::reduce_add(float* memory, const float* part, std::ptrdiff_t n, bool by_atomics) const {
  if (loops_ == nullptr) return model_.reduce_add(memory, part, n, by_atomics);
  (by_atomics || backward_.bulk_reduce_flushes ? loops_->reduce_add_flush : loops_->reduce_add)(memory, part,
                                                                                                n);
}

}  // namespace bitattn::kernels

#endif  // HWY_ONCE
