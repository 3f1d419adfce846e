// Tile products of the SIMD engines; included once per instruction set (hence no #pragma once).
//
// Two vector paths over one layout: multiply_fast, four operations a product, valid under the guards of
// simd_layout.hpp; and multiply_careful, the model's integer steps lane by lane, for all finite operands and
// every accumulator.

#if defined(BITATTN_EMU_MMA_SIMD_MULTIPLY_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef BITATTN_EMU_MMA_SIMD_MULTIPLY_INL_HPP
#undef BITATTN_EMU_MMA_SIMD_MULTIPLY_INL_HPP
#else
#define BITATTN_EMU_MMA_SIMD_MULTIPLY_INL_HPP
#endif

#include <algorithm>

#include "emu/mma/simd_engine.hpp"
#include "emu/mma/simd_pack-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace bitattn::mma::simd::HWY_NAMESPACE {

#if HWY_TARGET <= HWY_AVX3
inline constexpr int kRowBlock = 2;  ///< rows of C at a time: what the registers hold
#else
inline constexpr int kRowBlock = 1;
#endif

/// fp32 to integer, cut off; |v| < 2^31. Without the repair of overflows that Highway's ConvertTo adds.
HWY_INLINE VI truncate(VF v) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  return VI{_mm512_cvttps_epi32(v.raw)};
#elif HWY_TARGET == HWY_AVX2
  return VI{_mm256_cvttps_epi32(v.raw)};
#elif HWY_ARCH_X86
  return VI{_mm_cvttps_epi32(v.raw)};
#else
  return hn::ConvertTo(I32(), v);
#endif
}

/// Biased exponents of the j-th vector of columns, moved into the exponent field, from the bytes of all
/// columns.
template <int j>
HWY_INLINE VI exponent_field(VU bytes) {
  VU moved = bytes;
  if constexpr (j < 3) {
    moved = hn::ShiftLeft<23 - 8 * j>(bytes);
  } else {
    moved = hn::ShiftRight<1>(bytes);
  }
  return hn::BitCast(I32(), hn::And(moved, hn::Set(U32(), 0x7f800000U)));
}
HWY_INLINE VI exponent_field(VU bytes, int j) {
  return j == 0   ? exponent_field<0>(bytes)
         : j == 1 ? exponent_field<1>(bytes)
         : j == 2 ? exponent_field<2>(bytes)
                  : exponent_field<3>(bytes);
}

/// `v` times 2^(25-M). by_add: `scale` is 25 - M in the exponent field, and v = +-0 becomes less than 1 in
/// magnitude, as does a subnormal v, because M >= -101 (guard 2): both are cut to 0, which is right: |v| *
/// 2^(25-M) < 1.
template <bool by_add>
HWY_INLINE VF scaled(VF v, VI scale) {
  if constexpr (by_add) {
    return hn::BitCast(F32(), hn::Add(hn::BitCast(I32(), v), scale));
  } else {
    return hn::Mul(v, hn::BitCast(F32(), scale));
  }
}

/// Largest biased product exponent of one step so far, for all columns of a panel (a byte each): the k-th
/// product.
HWY_INLINE VB with_product(VB m, std::uint8_t left_exponent, const std::uint8_t* right_exponents) {
  const U8 db;
  return hn::Max(m, hn::SaturatedSub(hn::Set(db, left_exponent), hn::Load(db, right_exponents)));
}

/// The exponent bytes of one step of an operand.
HWY_INLINE const std::uint8_t* exponents_of_left(const std::uint32_t* row, int step) {
  return reinterpret_cast<const std::uint8_t*>(row + static_cast<std::ptrdiff_t>(step) * kLeftStep + kStep);
}
HWY_INLINE const std::uint8_t* exponents_of_right(const std::uint32_t* panel, int step) {
  constexpr std::size_t kWordsOfValues = kStep * kWidth / 2;
  return reinterpret_cast<const std::uint8_t*>(
      panel + static_cast<std::size_t>(step) * Layout::step_words(Side::right, kWidth) + kWordsOfValues);
}

/// Rows [0, R) by the first V vectors of a panel, one chunk of steps. `left` by rows; `left_live` and
/// `right_live`: is the step's operand anything but zeros? `values`: of the right operand,
/// [steps][16][kWidth]. `c`: in and out. Returns, lane by lane, the smallest M (in the exponent field) of any
/// step that was computed. The rounding mode is toward zero.
template <int R, int V, bool by_add>
HWY_INLINE VI fast_steps(const std::uint32_t* const* left, const std::uint32_t* const* left_live,
                         const std::uint32_t* right, const float* values, const std::uint32_t* right_live,
                         int steps, VF (&c)[R][V]) {
  const F32 df;
  const I32 di;
  const U8 db;
  const VI field_mask = hn::Set(di, 0x7f800000);
  constexpr int kOne = by_add ? 0 : 127;
  const VI scale_base = hn::Set(di, (127 + 25 + kOne) << 23);  // minus M's field: 2^(25-M)
  const VI unscale_base = hn::Set(di, (127 + kOne) << 23);     // minus scale: 2^(M-25)
  const VB clamp = hn::Set(db, static_cast<std::uint8_t>(kSmallestM));
  VI smallest_m = hn::Set(di, 0x7f800000);

  // A step without products leaves c as it is (M = e_c, nothing is cut, and 24 bits fit the result); -0
  // became +0 at the start of the chunk. The other steps, and once more the last one.
  int live[kChunkSteps + 1];
  int count = 0;
  for (int s = 0; s < steps; ++s) {
    if (right_live[s] != 0U && (left_live[0][s] | left_live[R - 1][s]) != 0U) live[count++] = s;
  }
  if (count == 0) return smallest_m;
  live[count] = live[count - 1];

  VB m_bytes[R];
  for (int r = 0; r < R; ++r) {
    const std::uint8_t* const first_left = exponents_of_left(left[r], live[0]);
    const std::uint8_t* const first_right = exponents_of_right(right, live[0]);
    m_bytes[r] = clamp;
    for (int k = 0; k < kStep; ++k)
      m_bytes[r] = with_product(m_bytes[r], first_left[k], first_right + k * kWidth);
  }
  for (int i = 0; i < count; ++i) {
    const float* const b_rows = values + static_cast<std::ptrdiff_t>(live[i]) * kStep * kWidth;
    const std::uint8_t* const next_right = exponents_of_right(right, live[i + 1]);
    const std::uint8_t* next_left[R];
    const float* a[R];
    VI scale[R][V];
    VI sum[R][V];
    for (int r = 0; r < R; ++r) {
      a[r] = reinterpret_cast<const float*>(left[r] + static_cast<std::ptrdiff_t>(live[i]) * kLeftStep);
      next_left[r] = exponents_of_left(left[r], live[i + 1]);
      for (int j = 0; j < V; ++j) {
        const VI m = hn::Max(exponent_field(hn::BitCast(U32(), m_bytes[r]), j),
                             hn::And(hn::BitCast(di, c[r][j]), field_mask));
        smallest_m = hn::Min(smallest_m, m);
        scale[r][j] = hn::Sub(scale_base, m);
        sum[r][j] = truncate(scaled<by_add>(c[r][j], scale[r][j]));
      }
      m_bytes[r] = clamp;
    }
    // The products of this step, and the exponents of the next: they wait for nothing, and fill what the
    // chain from a step's sum to the next step's scale leaves idle.
    HWY_UNROLL(2)
    for (int k = 0; k < kStep; ++k) {
      for (int r = 0; r < R; ++r)
        m_bytes[r] = with_product(m_bytes[r], next_left[r][k], next_right + k * kWidth);
      for (int j = 0; j < V; ++j) {
        const VF b = hn::Load(df, b_rows + k * kWidth + j * kLanes);
        for (int r = 0; r < R; ++r) {
          const VF product = hn::Mul(hn::Set(df, a[r][k]), b);
          sum[r][j] = hn::Add(sum[r][j], truncate(scaled<by_add>(product, scale[r][j])));
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < V; ++j) {
        // Both exact but for the conversion, which cuts to 24 bits; a zero sum gives +0.
        c[r][j] = hn::Mul(hn::ConvertTo(df, sum[r][j]), hn::BitCast(df, hn::Sub(unscale_base, scale[r][j])));
      }
    }
  }
  return smallest_m;
}

/// One step of one vector of columns in the model's own integers: all finite operands, every accumulator.
/// `left`: 16 values; `values`: of the right operand, rows kWidth apart.
inline VF careful_step(const std::uint32_t* left, const std::uint32_t* values, VF accumulator) {
  const F32 df;
  const I32 di;
  const U32 du;
  const VU c = hn::BitCast(du, accumulator);
  const VI zero = hn::Zero(di);
  const VI one = hn::Set(di, 1);

  // Largest biased exponent of the terms that are not zero (the floor is -133).
  const VI c_magnitude = hn::BitCast(di, hn::And(c, hn::Set(du, 0x7fffffffU)));
  const VI c_field = hn::ShiftRight<23>(c_magnitude);
  const VI c_exponent = hn::Max(c_field, one);
  const VI floor = hn::Set(di, arith::kHopperWide.exponent_floor + 127);
  VI m = hn::IfThenElse(hn::Eq(c_magnitude, zero), floor, hn::Max(c_exponent, floor));
  for (int k = 0; k < kStep; ++k) {
    const std::uint32_t a = left[k] & 0x7fffffffU;
    if (a == 0U) continue;
    const VI b = hn::BitCast(di, hn::And(hn::Load(du, values + k * kWidth), hn::Set(du, 0x7fffffffU)));
    const VI e = hn::Add(hn::Max(hn::ShiftRight<23>(b), one),
                         hn::Set(di, static_cast<int>(std::max(a >> 23U, 1U)) - 127));
    m = hn::Max(m, hn::IfThenElse(hn::Eq(b, zero), floor, e));
  }

  // Terms, cut off at 2^(M-25), in two sums that fit 32 bits each: 9 terms of less than 4 * 2^25.
  const VI last = hn::Set(di, 31);
  const VI c_significand =
      hn::Or(hn::And(c_magnitude, hn::Set(di, 0x7fffff)), hn::ShiftLeft<23>(hn::Min(c_field, one)));
  const VI c_term =
      hn::BitCast(di, hn::Shr(hn::BitCast(du, hn::ShiftLeft<2>(c_significand)),
                              hn::BitCast(du, hn::Max(hn::Min(hn::Sub(m, c_exponent), last), zero))));
  const VI c_sign = hn::BroadcastSignBit(hn::BitCast(di, c));
  VI sum[2] = {hn::Sub(hn::Xor(c_term, c_sign), c_sign), zero};
  for (int k = 0; k < kStep; ++k) {
    const std::uint32_t a = left[k] & 0x7fffffffU;
    if (a == 0U) continue;
    const int a_significand = static_cast<int>((a >> 16U & 0x7fU) | (a >> 23U != 0U ? 0x80U : 0U));
    const VI word = hn::BitCast(di, hn::Load(du, values + k * kWidth));
    const VI b = hn::And(word, hn::Set(di, 0x7fffffff));
    const VI field = hn::ShiftRight<23>(b);
    const VI significand =
        hn::Or(hn::And(hn::ShiftRight<16>(b), hn::Set(di, 0x7f)), hn::ShiftLeft<7>(hn::Min(field, one)));
    const VI e = hn::Add(hn::Max(field, one), hn::Set(di, static_cast<int>(std::max(a >> 23U, 1U)) - 127));
    const VI product = hn::ShiftLeft<11>(hn::Mul(significand, hn::Set(di, a_significand)));
    const VU shift =
        hn::BitCast(du, hn::Max(hn::Min(hn::Sub(m, e), last), zero));  // below 0: only where the product is 0
    const VI term = hn::BitCast(di, hn::Shr(hn::BitCast(du, product), shift));
    const VI sign = hn::BroadcastSignBit(hn::Xor(word, hn::Set(di, static_cast<int>(left[k]))));
    sum[k % 2] = hn::Add(sum[k % 2], hn::Sub(hn::Xor(term, sign), sign));
  }

  // |sum| < 2^32: its sign from the halved sum, its magnitude modulo 2^32.
  const VI low = hn::Add(sum[0], sum[1]);
  const VI halved = hn::Add(hn::Add(hn::ShiftRight<1>(sum[0]), hn::ShiftRight<1>(sum[1])),
                            hn::And(hn::And(sum[0], sum[1]), one));
  const VI sign = hn::BroadcastSignBit(halved);
  const VI magnitude = hn::Sub(hn::Xor(low, sign), sign);
  // Cutting to 24 bits may drop the lowest of 32 bits first.
  const VI top = hn::BroadcastSignBit(magnitude);
  const VI v = hn::IfThenElse(hn::MaskFromVec(top),
                              hn::BitCast(di, hn::ShiftRight<1>(hn::BitCast(du, magnitude))), magnitude);
  const VI unit = hn::Sub(hn::Sub(m, hn::Set(di, 127 + arith::kHopperWide.aligned_fraction_bits)), top);
  const VF cut = hn::ConvertTo(df, v);
  // cut * 2^unit in two multiplies: the first is exact, the second cuts off below 2^-149.
  const VI hundred = hn::Set(di, 100);
  const VI first = hn::Min(hn::Max(unit, hn::Neg(hundred)), hn::Set(di, 127));
  const VI second = hn::Min(hn::Add(unit, hundred), zero);
  const VI bias = hn::Set(di, 127);
  const VF result = hn::Mul(hn::Mul(cut, hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(first, bias)))),
                            hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(second, bias))));
  VI bits = hn::BitCast(di, result);
  const auto overflow =
      hn::And(hn::Gt(hn::Add(hn::ShiftRight<23>(hn::BitCast(di, cut)), unit), hn::Set(di, 127 + 127)),
              hn::Ne(v, zero));
  bits = hn::IfThenElse(overflow, hn::Set(di, 0x7f800000), bits);
  const VI negative = hn::BitCast(di, hn::And(hn::BitCast(du, sign), hn::Set(du, arith::kSignBit)));
  bits =
      hn::IfThenZeroElse(hn::Eq(bits, zero), hn::Or(bits, negative));  // an underflow to zero loses its sign
  // Among finite products, an infinite accumulator stays, a NaN becomes the chip's.
  const VI infinity = hn::Set(di, 0x7f800000);
  bits = hn::IfThenElse(hn::Eq(c_magnitude, infinity), hn::BitCast(di, c), bits);
  bits = hn::IfThenElse(hn::Gt(c_magnitude, infinity), hn::Set(di, static_cast<int>(arith::kQuietNan)), bits);
  return hn::BitCast(df, bits);
}

/// A tile of C: all rows by the columns of one panel, one chunk of steps at a time.
struct Panel {
  const std::uint32_t* left;  ///< of row 0 and this chunk's first step
  const std::uint32_t* left_live;
  std::size_t left_row_words;
  int left_steps;  ///< of the whole operand: stride of left_live
  const LineFacts* left_facts;
  const std::uint32_t* right;  ///< of this panel and this chunk's first step
  const std::uint32_t* right_live;
  const float* values;  ///< the same chunk of the right operand, widened: [steps][16][kWidth]
  LineFacts right_facts;
  int steps;  ///< of this chunk
  bool zero_start;
  float* c;
  std::ptrdiff_t ldc;
  int columns;                      ///< of this panel that exist
  const std::uint32_t* next_right;  ///< of the next chunk or panel
  std::ptrdiff_t next_right_words;  ///< 0: there is none
};

/// Which fast path suits these operands?
enum class Scale : std::uint8_t { none, by_add, by_multiply };

HWY_INLINE Scale scale_for(const LineFacts& left, const LineFacts& right) {
  if (left.largest > kLargestByteField || right.largest > kLargestByteField) return Scale::none;
  if ((left.heavy & right.heavy) != 0U) return Scale::none;
  const std::uint32_t fields = left.largest + right.largest;
  if (fields <= kScaleByAdd.largest_fields) return Scale::by_add;
  return fields <= kScaleByMultiply.largest_fields ? Scale::by_multiply : Scale::none;
}

/// The j-th vector of a row of C; lanes past the panel's end are +0.
HWY_INLINE VF load_c(const Panel& panel, const float* row, int j) {
  const F32 df;
  const int present = panel.columns - j * kLanes;
  if (panel.zero_start) return hn::Zero(df);
  if (present >= kLanes) return hn::LoadU(df, row + j * kLanes);
  HWY_ALIGN float edge[kLanes] = {};
  std::copy_n(row + j * kLanes, present, edge);
  return hn::Load(df, edge);
}

HWY_INLINE void store_c(const Panel& panel, float* row, int j, VF c) {
  const F32 df;
  const int present = panel.columns - j * kLanes;
  if (present >= kLanes) {
    hn::StoreU(c, df, row + j * kLanes);
    return;
  }
  HWY_ALIGN float edge[kLanes];
  hn::Store(c, df, edge);
  std::copy_n(edge, present, row + j * kLanes);
}

/// -0 to +0, and: is every accumulator 0 or in [2^-101, limit)? Integers throughout, so that NaNs pass
/// unchanged.
template <int V>
HWY_INLINE bool ready(VF (&c)[V], std::uint32_t limit) {
  const I32 di;
  const U32 du;
  const VU smallest = hn::Set(du, kSmallestM << 23U);
  auto bad = hn::Ne(hn::Zero(di), hn::Zero(di));
  for (int j = 0; j < V; ++j) {
    const VU bits = hn::BitCast(du, c[j]);
    const VU magnitude = hn::And(bits, hn::Set(du, 0x7fffffffU));
    const auto is_zero = hn::Eq(hn::BitCast(di, magnitude), hn::Zero(di));
    const auto low = hn::Lt(hn::BitCast(di, magnitude), hn::BitCast(di, smallest));
    const auto high = hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, static_cast<int>(limit) - 1));
    bad = hn::Or(bad, hn::AndNot(is_zero, hn::Or(low, high)));
    c[j] = hn::BitCast(F32(), hn::IfThenZeroElse(is_zero, hn::BitCast(di, bits)));
  }
  return hn::AllFalse(di, bad);
}

/// Row m, vector by vector, in the model's integers.
inline void careful_row(const Panel& panel, int m, RowCounts& counts) {
  float* const row = panel.c + m * panel.ldc;
  for (int j = 0; j * kLanes < panel.columns; ++j) {
    const std::uint32_t* left = panel.left + static_cast<std::size_t>(m) * panel.left_row_words;
    const std::uint32_t* right =
        reinterpret_cast<const std::uint32_t*>(panel.values) + static_cast<std::ptrdiff_t>(j) * kLanes;
    VF c = load_c(panel, row, j);
    for (int s = 0; s < panel.steps; ++s, left += kLeftStep, right += kStep * kWidth) {
      c = careful_step(left, right, c);
    }
    store_c(panel, row, j, c);
  }
  ++counts.careful;
}

/// Rows [m, m + R) by the fast path if all guards hold; false, and nothing done, otherwise.
template <int R, int V>
bool fast_rows(const Panel& panel, int m, RowCounts& counts) {
  bool by_add = true;
  std::uint32_t smallest = kSmallestNone;
  const std::uint32_t* left[R];
  const std::uint32_t* live[R];
  for (int r = 0; r < R; ++r) {
    const LineFacts& facts = panel.left_facts[m + r];
    const Scale scale = scale_for(facts, panel.right_facts);
    if (scale == Scale::none || facts.special != kFinite) return false;
    by_add = by_add && scale == Scale::by_add;
    smallest = std::min(smallest, facts.smallest);
    left[r] = panel.left + static_cast<std::size_t>(m + r) * panel.left_row_words;
    live[r] = panel.left_live + static_cast<std::ptrdiff_t>(m + r) * panel.left_steps;
  }
  VF c[R][V];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < V; ++j) c[r][j] = load_c(panel, panel.c + (m + r) * panel.ldc, j);
    if (panel.zero_start) continue;
    if (by_add && !ready<V>(c[r], kScaleByAdd.accumulator_limit)) by_add = false;
    if (!by_add && !ready<V>(c[r], kScaleByMultiply.accumulator_limit)) return false;
  }
  const VI smallest_m =
      by_add
          ? fast_steps<R, V, true>(left, live, panel.right, panel.values, panel.right_live, panel.steps, c)
          : fast_steps<R, V, false>(left, live, panel.right, panel.values, panel.right_live, panel.steps, c);
  // Where the smallest elements alone do not prove guard (2), the exponents that came up may.
  if (smallest + panel.right_facts.smallest < kSmallestProductM + 127U) {
    const I32 di;
    const auto low = hn::Lt(smallest_m, hn::Set(di, static_cast<int>(kSmallestProductM << 23U)));
    if (!hn::AllFalse(di, low)) return false;
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < V; ++j) store_c(panel, panel.c + (m + r) * panel.ldc, j, c[r][j]);
  }
  (by_add ? counts.by_add : counts.by_multiply) += R;
  return true;
}

/// Fetches what comes up soon: C of the rows after next, and a share of the next panel's right operand. Both
/// lie farther away than the processor's own prefetching reaches: accumulators and operands of a long
/// sequence fill its outer caches.
HWY_INLINE void fetch_ahead(const Panel& panel, int m, int rows) {
  constexpr std::ptrdiff_t kLineFloats = kCacheLine / sizeof(float);
  if (m + 3 * kRowBlock <= rows) {
    for (int r = m + 2 * kRowBlock; r < m + 3 * kRowBlock; ++r) {
      const float* const row = panel.c + r * panel.ldc;
      for (std::ptrdiff_t i = 0; i < panel.columns; i += kLineFloats) __builtin_prefetch(row + i, 1, 3);
    }
  }
  const std::ptrdiff_t lines = panel.next_right_words / kLineFloats;
  const std::ptrdiff_t end = lines * std::min(rows, m + kRowBlock) / rows;
  for (std::ptrdiff_t i = lines * m / rows; i < end; ++i) {
    __builtin_prefetch(panel.next_right + i * kLineFloats, 0, 2);
  }
}

template <int V>
void panel_rows(const Panel& panel, int rows, RowCounts& counts) {
  int m = 0;
  while (m < rows) {
    fetch_ahead(panel, m, rows);
    if (m + kRowBlock <= rows && fast_rows<kRowBlock, V>(panel, m, counts)) {
      m += kRowBlock;
      continue;
    }
    const int end = std::min(rows, m + kRowBlock);
    for (; m < end; ++m) {
      if (panel.left_facts[m].special != kFinite) continue;  // not this path's: see SimdEngine
      if (kRowBlock > 1 && fast_rows<1, V>(panel, m, counts)) continue;
      careful_row(panel, m, counts);
    }
  }
}

/// The values of one (panel, step) as fp32.
HWY_INLINE void widen_step(const std::uint32_t* step, float* values) {
  const U16Half d16;
  const U32 du;
  const auto* const words = reinterpret_cast<const std::uint16_t*>(step);
  for (int i = 0; i < kStep * kWidth; i += kLanes) {
    const VU bits = hn::ShiftLeft<16>(hn::PromoteTo(du, hn::Load(d16, words + i)));
    hn::Store(hn::BitCast(F32(), bits), F32(), values + i);
  }
}

/// All rows and columns whose operands are finite. The rounding mode is toward zero, subnormals are kept.
HWY_NOINLINE void multiply_finite(const PackedOperand& left, const PackedOperand& right, Start start,
                                  float* c, std::ptrdiff_t ldc, RowCounts& counts) {
  const Layout left_layout(Side::left, left.rows, left.k, kWidth);
  const Layout right_layout(Side::right, right.rows, right.k, kWidth);
  const std::uint32_t* const l = left.extra.data();
  const std::uint32_t* const r = right.extra.data();
  const std::size_t step_words = Layout::step_words(Side::right, kWidth);
  HWY_ALIGN float values[kChunkSteps * kStep * kWidth];
  const std::size_t first_words = std::min<std::size_t>(right_layout.line_words, kChunkSteps * step_words);
  for (std::size_t i = 0; i < first_words; i += kCacheLine / sizeof(std::uint32_t))
    __builtin_prefetch(r + i, 0, 3);
  for (int p = 0; p < right_layout.lines; ++p) {
    for (int s = 0; s < left_layout.steps; s += kChunkSteps) {
      Panel panel{};
      panel.left = l + static_cast<std::ptrdiff_t>(s) * kLeftStep;
      panel.left_live = l + left_layout.live + s;
      panel.left_row_words = left_layout.line_words;
      panel.left_steps = left_layout.steps;
      panel.left_facts = reinterpret_cast<const LineFacts*>(l + left_layout.facts);
      panel.right = r + static_cast<std::size_t>(p) * right_layout.line_words +
                    static_cast<std::size_t>(s) * step_words;
      panel.right_live = r + right_layout.live + static_cast<std::ptrdiff_t>(p) * right_layout.steps + s;
      panel.right_facts = reinterpret_cast<const LineFacts*>(r + right_layout.facts)[p];
      panel.steps = std::min(kChunkSteps, left_layout.steps - s);
      panel.zero_start = start == Start::zero && s == 0;
      panel.c = c + static_cast<std::ptrdiff_t>(p) * kWidth;
      panel.ldc = ldc;
      panel.columns = std::min(kWidth, right.rows - p * kWidth);
      for (int i = 0; i < panel.steps; ++i) {
        widen_step(panel.right + static_cast<std::size_t>(i) * step_words, values + i * kStep * kWidth);
      }
      panel.values = values;
      // Panels and their steps lie one behind the other.
      panel.next_right = panel.right + static_cast<std::size_t>(panel.steps) * step_words;
      panel.next_right_words = std::min<std::ptrdiff_t>(static_cast<std::ptrdiff_t>(kChunkSteps * step_words),
                                                        r + right_layout.facts - panel.next_right);
      switch ((panel.columns + kLanes - 1) / kLanes) {
        case 1:
          panel_rows<1>(panel, left.rows, counts);
          break;
        case 2:
          panel_rows<2>(panel, left.rows, counts);
          break;
        case 3:
          panel_rows<3>(panel, left.rows, counts);
          break;
        default:
          panel_rows<4>(panel, left.rows, counts);
          break;
      }
    }
  }
}

}  // namespace bitattn::mma::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
