// Packing for the SIMD engines; included once per instruction set (hence no #pragma once). Layout:
// simd_layout.hpp.

#if defined(BITATTN_EMU_MMA_SIMD_PACK_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef BITATTN_EMU_MMA_SIMD_PACK_INL_HPP
#undef BITATTN_EMU_MMA_SIMD_PACK_INL_HPP
#else
#define BITATTN_EMU_MMA_SIMD_PACK_INL_HPP
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "emu/mma/simd_layout.hpp"

HWY_BEFORE_NAMESPACE();
namespace bitattn::mma::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U8 = hn::Repartition<std::uint8_t, F32>;
using U16Half = hn::Rebind<std::uint16_t, F32>;
using VF = hn::Vec<F32>;
using VI = hn::Vec<I32>;
using VU = hn::Vec<U32>;
using VB = hn::Vec<U8>;

inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));
inline constexpr int kVectors = 4;  ///< of a panel: one for each byte of an exponent word
inline constexpr int kWidth = kLanes * kVectors;

/// One step of a left operand, and a row of a right one: 16-bit vectors.
using U16Left = hn::CappedTag<std::uint16_t, kStep>;
using U16Right = hn::Repartition<std::uint16_t, F32>;

/// What packing learns from a vector of words.
template <class D16>
struct Elements {
  using V = hn::Vec<D16>;
  V field;        ///< E
  V significand;  ///< 0 for zeros
  hn::Mask<D16> zero;

  HWY_INLINE explicit Elements(V words) {
    const D16 d;
    const V magnitude = hn::And(words, hn::Set(d, std::uint16_t{0x7fffU}));
    const V exponent = hn::ShiftRight<7>(magnitude);
    const V one = hn::Set(d, std::uint16_t{1});
    field = hn::Max(exponent, one);
    significand =
        hn::Or(hn::And(words, hn::Set(d, std::uint16_t{0x7fU})), hn::ShiftLeft<7>(hn::Min(exponent, one)));
    zero = hn::Eq(magnitude, hn::Zero(d));
  }

  /// E in the low byte, 255 - E in the high one, 0 for a zero: the greatest of each are what LineFacts wants.
  HWY_INLINE V extremes() const {
    const D16 d;
    const V high = hn::Sub(hn::Set(d, std::uint16_t{255U}), field);
    return hn::IfThenZeroElse(zero, hn::Or(field, hn::ShiftLeft<8>(high)));
  }
};

template <class D16>
HWY_INLINE hn::Vec<D16> max_bytes(D16 d, hn::Vec<D16> a, hn::Vec<D16> b) {
  const hn::Repartition<std::uint8_t, D16> d8;
  return hn::BitCast(d, hn::Max(hn::BitCast(d8, a), hn::BitCast(d8, b)));
}

/// LineFacts of some extremes; `special` is left to those who see an E of 255.
template <class D16>
HWY_INLINE LineFacts facts_of(D16 d, hn::Vec<D16> extremes, bool heavy) {
  const hn::FixedTag<std::uint8_t, 16> d8;
  HWY_ALIGN std::uint16_t lanes[hn::MaxLanes(D16())];
  hn::Store(extremes, d, lanes);
  hn::Vec<decltype(d8)> m = hn::Load(d8, reinterpret_cast<const std::uint8_t*>(lanes));
  for (std::size_t i = 8; i < hn::Lanes(d); i += 8) {
    m = hn::Max(m, hn::Load(d8, reinterpret_cast<const std::uint8_t*>(lanes + i)));
  }
  m = hn::Max(m, hn::ShiftRightBytes<8>(d8, m));
  m = hn::Max(m, hn::ShiftRightBytes<4>(d8, m));
  m = hn::Max(m, hn::ShiftRightBytes<2>(d8, m));
  const std::uint32_t both = hn::GetLane(hn::BitCast(hn::FixedTag<std::uint32_t, 4>(), m));
  return {both & 255U, 255U - (both >> 8U & 255U), heavy ? 1U : 0U, kFinite};
}

/// Zeroes infinities and NaNs; the greatest Special among them.
inline std::uint32_t clean(std::uint16_t* words, int count) {
  std::uint32_t special = kFinite;
  for (int i = 0; i < count; ++i) {
    if ((words[i] & 0x7f80U) != 0x7f80U) continue;
    special = std::max<std::uint32_t>(special, (words[i] & 0x7fU) != 0U ? kHasNan : kHasInfinity);
    words[i] = 0;
  }
  return special;
}

/// to[j][i] = from[i][j] for 8 x 8 words; `from` by row pointers, `to` by a stride.
HWY_INLINE void transpose_8x8(const std::uint16_t* const* from, std::ptrdiff_t offset, std::uint16_t* to,
                              std::ptrdiff_t to_stride) {
  const hn::FixedTag<std::uint16_t, 8> d16;
  const hn::FixedTag<std::uint32_t, 4> d32;
  const hn::FixedTag<std::uint64_t, 2> d64;
  hn::Vec<decltype(d16)> r[8];
  for (int i = 0; i < 8; ++i) r[i] = hn::LoadU(d16, from[i] + offset);
  hn::Vec<decltype(d32)> s[8];
  for (int i = 0; i < 8; i += 2) {
    s[i] = hn::BitCast(d32, hn::InterleaveLower(d16, r[i], r[i + 1]));
    s[i + 1] = hn::BitCast(d32, hn::InterleaveUpper(d16, r[i], r[i + 1]));
  }
  hn::Vec<decltype(d64)> t[8];
  for (int h = 0; h < 2; ++h) {    // columns 0..3, 4..7
    for (int i = 0; i < 2; ++i) {  // rows 0..3, 4..7
      t[4 * h + i] = hn::BitCast(d64, hn::InterleaveLower(d32, s[4 * i + h], s[4 * i + 2 + h]));
      t[4 * h + 2 + i] = hn::BitCast(d64, hn::InterleaveUpper(d32, s[4 * i + h], s[4 * i + 2 + h]));
    }
  }
  for (int j = 0; j < 4; ++j) {
    hn::StoreU(hn::BitCast(d16, hn::InterleaveLower(d64, t[2 * j], t[2 * j + 1])), d16,
               to + 2 * j * to_stride);
    hn::StoreU(hn::BitCast(d16, hn::InterleaveUpper(d64, t[2 * j], t[2 * j + 1])), d16,
               to + (2 * j + 1) * to_stride);
  }
}

/// Element by element: tile edges and views without a contiguous direction. out[i] = element (r, k0 + i).
inline void gather_words(const MatrixView& view, int r, int k0, int count, std::uint16_t* out) {
  for (int i = 0; i < count; ++i) out[i] = view.at(r, k0 + i);
}

inline constexpr int kRowGroup =
    32;  ///< rows of a left operand that are turned together: a cache line of words

/// kRowGroup rows of a view whose rows lie side by side, k0..k0+15 of each, to out[kRowGroup][16]. Each line
/// of memory is read once: with a stride of many words they all fall into few sets of the cache.
HWY_INLINE void turn_rows(const MatrixView& view, int r0, int k0, std::uint16_t* out) {
  HWY_ALIGN std::uint16_t lines[kStep][kRowGroup];
  const std::uint16_t* from[kStep];
  const int rows = std::clamp(view.rows_in_memory - r0, 0, kRowGroup);
  for (int k = 0; k < kStep; ++k) {
    const int present = k0 + k < view.k_in_memory ? rows : 0;
    if (present == kRowGroup) {
      std::memcpy(lines[k], view.data + r0 + (k0 + k) * view.k_stride, sizeof(lines[k]));
    } else {
      if (present > 0) {
        std::memcpy(lines[k], view.data + r0 + (k0 + k) * view.k_stride,
                    static_cast<std::size_t>(present) * sizeof(std::uint16_t));
      }
      std::fill(lines[k] + present, lines[k] + kRowGroup, std::uint16_t{0});
    }
    from[k] = lines[k];
  }
  for (int r = 0; r < kRowGroup; r += 8) {
    transpose_8x8(from, r, out + r * kStep, kStep);
    transpose_8x8(from + 8, r, out + r * kStep + 8, kStep);
  }
}

/// One step of a right operand, columns n0..n0+kWidth-1, to out[16][kWidth].
HWY_INLINE void step_of_columns(const MatrixView& view, int n0, int k0, std::uint16_t* out) {
  if (view.row_stride == 1) {
    const int columns = std::clamp(view.rows_in_memory - n0, 0, kWidth);
    for (int k = 0; k < kStep; ++k) {
      const int present = k0 + k < view.k_in_memory ? columns : 0;
      std::uint16_t* const row = out + k * kWidth;
      if (present == kWidth) {
        std::memcpy(row, view.data + n0 + (k0 + k) * view.k_stride, kWidth * sizeof(std::uint16_t));
      } else {
        if (present > 0) {
          std::memcpy(row, view.data + n0 + (k0 + k) * view.k_stride,
                      static_cast<std::size_t>(present) * sizeof(std::uint16_t));
        }
        std::fill(row + present, row + kWidth, std::uint16_t{0});
      }
    }
    return;
  }
  std::uint16_t edge[8][kStep];
  for (int n = 0; n < kWidth; n += 8) {
    const std::uint16_t* from[8];
    for (int i = 0; i < 8; ++i) {
      if (view.k_stride == 1 && n0 + n + i < view.rows_in_memory && k0 + kStep <= view.k_in_memory) {
        from[i] = view.data + (n0 + n + i) * view.row_stride + k0;
      } else {
        gather_words(view, n0 + n + i, k0, kStep, edge[i]);
        from[i] = edge[i];
      }
    }
    transpose_8x8(from, 0, out + n, kWidth);
    transpose_8x8(from, 8, out + n + 8 * kWidth, kWidth);
  }
}

/// Running facts of one row of a left operand.
struct RowFacts {
  hn::Vec<U16Left> extremes;
  hn::Vec<U16Left> heavy;  ///< largest sums of 4 neighbouring significands

  // A constructor of its own: a generated one would not be compiled for this instruction set.
  HWY_INLINE RowFacts() : extremes(hn::Zero(U16Left())), heavy(hn::Zero(U16Left())) {}

  HWY_INLINE LineFacts reduced() const {
    const U16Left d;
    // No four of them above 995, so no 16 above 4 * 995 < kHeavySum. Enough for one side: the other is summed
    // exactly.
    static_assert(4 * 995 <= kHeavySum);
    return facts_of(d, extremes, !hn::AllFalse(d, hn::Gt(heavy, hn::Set(d, std::uint16_t{995U}))));
  }
};

/// Halves of a vector of 16-bit numbers, widened.
template <class D16>
HWY_INLINE VU widen(D16 /*d*/, hn::Vec<D16> v, int half) {
  if constexpr (hn::MaxLanes(D16()) == hn::MaxLanes(F32())) {
    return hn::PromoteTo(U32(), v);
  } else {
    const U16Half d;
    return hn::PromoteTo(U32(), half == 0 ? hn::LowerHalf(d, v) : hn::UpperHalf(d, v));
  }
}

/// One (row, step) of a left operand.
HWY_INLINE void pack_left_step(const std::uint16_t* words, std::uint32_t* out, std::uint32_t& live,
                               RowFacts& facts) {
  const U16Left d;
  const U32 du;
  const hn::RebindToSigned<U16Left> di16;
  const hn::Repartition<std::uint8_t, U16Left> d8;
  const hn::Half<decltype(d8)> d8_half;
  auto* const exponents = reinterpret_cast<std::uint8_t*>(out + kStep);
  bool all_zero = true;
  for (int i = 0; i < kStep; i += static_cast<int>(hn::Lanes(d))) {
    const hn::Vec<U16Left> w = hn::LoadU(d, words + i);
    const Elements<U16Left> e(w);
    // E above kLargestByteField does not fit; such a row is not given to the fast path.
    const hn::Vec<U16Left> byte =
        hn::IfThenZeroElse(e.zero, hn::Add(e.field, hn::Set(d, std::uint16_t{64U})));
    hn::StoreU(hn::DemoteTo(d8_half, hn::BitCast(di16, byte)), d8_half, exponents + i);
    for (int h = 0; h * kLanes < static_cast<int>(hn::Lanes(d)); ++h) {
      hn::StoreU(hn::ShiftLeft<16>(widen(d, w, h)), du, out + i + h * kLanes);
    }
    facts.extremes = max_bytes(d, facts.extremes, e.extremes());
    facts.heavy = hn::Max(facts.heavy, hn::BitCast(d, hn::SumsOf8(hn::BitCast(d8, e.significand))));
    all_zero = all_zero && hn::AllTrue(d, e.zero);
  }
  live = all_zero ? 0U : 1U;
}

/// Where the parts of a left operand lie.
struct LeftOut {
  const Layout& layout;
  std::uint32_t* extra;

  HWY_INLINE void step(const std::uint16_t* words, int r, int s, RowFacts& facts) const {
    pack_left_step(
        words,
        extra + static_cast<std::size_t>(r) * layout.line_words + static_cast<std::size_t>(s * kLeftStep),
        extra[layout.live + static_cast<std::size_t>(r * layout.steps + s)], facts);
  }
};

inline void pack_left(const MatrixView& view, const Layout& layout, std::uint32_t* extra) {
  HWY_ALIGN std::uint16_t block[kRowGroup * kStep];
  LineFacts* const facts = reinterpret_cast<LineFacts*>(extra + layout.facts);
  const LeftOut out{layout, extra};
  for (int r0 = 0; r0 < view.rows; r0 += kRowGroup) {
    const int rows = std::min(kRowGroup, view.rows - r0);
    RowFacts row[kRowGroup];
    if (view.row_stride == 1 && view.k_stride != 1) {
      for (int s = 0; s < layout.steps; ++s) {
        turn_rows(view, r0, s * kStep, block);
        for (int i = 0; i < rows; ++i) out.step(block + i * kStep, r0 + i, s, row[i]);
      }
    } else {
      for (int i = 0; i < rows; ++i) {
        for (int s = 0; s < layout.steps; ++s) {
          const std::uint16_t* words = block;
          if (view.k_stride == 1 && r0 + i < view.rows_in_memory && (s + 1) * kStep <= view.k_in_memory) {
            words = view.data + (r0 + i) * view.row_stride + static_cast<std::ptrdiff_t>(s) * kStep;
          } else {
            gather_words(view, r0 + i, s * kStep, kStep, block);
          }
          out.step(words, r0 + i, s, row[i]);
        }
      }
    }
    for (int i = 0; i < rows; ++i) {
      facts[r0 + i] = row[i].reduced();
      if (facts[r0 + i].largest != 255U) continue;
      std::uint32_t special = kFinite;
      RowFacts finite;
      for (int s = 0; s < layout.steps; ++s) {
        gather_words(view, r0 + i, s * kStep, kStep, block);
        special = std::max(special, clean(block, kStep));
        out.step(block, r0 + i, s, finite);
      }
      facts[r0 + i] = finite.reduced();
      facts[r0 + i].special = special;
    }
  }
}

/// One (panel, step) of a right operand. A panel is two vectors of words; `zero_byte` is what stands for a
/// zero's exponent.
HWY_INLINE void pack_right_step(const std::uint16_t* block, const hn::Vec<U16Right>* zero_byte,
                                std::uint32_t* out, std::uint32_t& live, hn::Vec<U16Right>& extremes,
                                hn::Vec<U16Right>& heavy) {
  const U16Right d;
  const U16Half half;
  const U32 du;
  using V = hn::Vec<U16Right>;
  std::uint16_t* const out_words = reinterpret_cast<std::uint16_t*>(out);
  std::uint32_t* const exponents = out + kStep * kWidth / 2;
  V sum[2] = {hn::Zero(d), hn::Zero(d)};
  for (int k = 0; k < kStep; ++k) {
    VU pairs[2];
    for (int i = 0; i < 2; ++i) {
      const std::uint16_t* const words = block + k * kWidth + i * 2 * kLanes;
      const Elements<U16Right> e(hn::Load(d, words));
      hn::Store(hn::Load(d, words), d, out_words + k * kWidth + i * 2 * kLanes);
      const V low_byte = hn::Set(d, std::uint16_t{255U});
      const V byte =
          hn::IfThenElse(e.zero, zero_byte[i],
                         hn::And(hn::Sub(hn::Set(d, std::uint16_t{kLargestByteField}), e.field), low_byte));
      pairs[i] =
          hn::PromoteTo(du, hn::Or(hn::LowerHalf(half, byte), hn::ShiftLeft<8>(hn::UpperHalf(half, byte))));
      extremes = max_bytes(d, extremes, e.extremes());
      sum[i] = hn::Add(sum[i], e.significand);
    }
    hn::Store(hn::Or(pairs[0], hn::ShiftLeft<16>(pairs[1])), du, exponents + k * kLanes);
  }
  live = hn::AllTrue(d, hn::Eq(hn::Or(sum[0], sum[1]), hn::Zero(d))) ? 0U : 1U;
  heavy = hn::Max(heavy, hn::Max(sum[0], sum[1]));
}

/// One panel of a right operand. `columns`: where to note infinities and NaNs of each column, which the
/// values then lack; nullptr: they are taken as they are (the panel's largest E says if there are any).
inline LineFacts pack_panel(const MatrixView& view, const Layout& layout, int p, std::uint32_t* columns,
                            std::uint32_t* extra) {
  const U16Right d;
  HWY_ALIGN std::uint16_t block[kStep * kWidth];
  // Columns past the operand's end claim a large exponent: zeros they are, but no reason to look closer at a
  // step.
  hn::Vec<U16Right> zero_byte[2];
  for (int i = 0; i < 2; ++i) {
    for (int n = 0; n < 2 * kLanes; ++n) {
      block[n] = p * kWidth + i * 2 * kLanes + n < view.rows ? std::uint16_t{255U} : std::uint16_t{0};
    }
    zero_byte[i] = hn::Load(d, block);
  }
  hn::Vec<U16Right> extremes = hn::Zero(d);
  hn::Vec<U16Right> heavy = hn::Zero(d);
  for (int s = 0; s < layout.steps; ++s) {
    step_of_columns(view, p * kWidth, s * kStep, block);
    for (int i = 0; columns != nullptr && i < kStep * kWidth; ++i) {
      columns[i % kWidth] = std::max(columns[i % kWidth], clean(block + i, 1));
    }
    pack_right_step(block, zero_byte,
                    extra + static_cast<std::size_t>(p) * layout.line_words +
                        static_cast<std::size_t>(s) * Layout::step_words(Side::right, kWidth),
                    extra[layout.live + static_cast<std::size_t>(p * layout.steps + s)], extremes, heavy);
  }
  return facts_of(d, extremes, !hn::AllFalse(d, hn::Gt(heavy, hn::Set(d, std::uint16_t{kHeavySum}))));
}

inline void pack_right(const MatrixView& view, const Layout& layout, std::uint32_t* extra) {
  LineFacts* const facts = reinterpret_cast<LineFacts*>(extra + layout.facts);
  for (int p = 0; p < layout.lines; ++p) {
    std::uint32_t* const columns = extra + layout.columns + static_cast<std::size_t>(p * kWidth);
    std::fill_n(columns, kWidth, kFinite);
    facts[p] = pack_panel(view, layout, p, nullptr, extra);
    if (facts[p].largest != 255U) continue;
    facts[p] = pack_panel(view, layout, p, columns, extra);
    facts[p].special = *std::max_element(columns, columns + kWidth);
  }
}

}  // namespace bitattn::mma::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
