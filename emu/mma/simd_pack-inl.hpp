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

/// Running maxima and minima over some elements of a line, lane by lane.
struct FactVectors {
  VU largest;
  VU smallest;
  VU magnitude;  ///< largest |bits|: tells infinities and NaNs
  VU heavy;      ///< largest sum of the 16 significands of a step

  // A constructor of its own: a generated one would not be compiled for this instruction set.
  HWY_INLINE FactVectors()
      : largest(hn::Zero(U32())),
        smallest(hn::Set(U32(), kSmallestNone)),
        magnitude(hn::Zero(U32())),
        heavy(hn::Zero(U32())) {}
};

/// What packing wants to know of some elements, given as fp32 bits.
struct Elements {
  VU value;        ///< infinities and NaNs are zeros here
  VU exponent;     ///< E
  VU significand;  ///< 0 for zeros
  hn::Mask<U32> zero;

  HWY_INLINE Elements(VU bits, FactVectors& facts) {
    const U32 du;
    const VU magnitude = hn::And(bits, hn::Set(du, 0x7fffffffU));
    facts.magnitude = hn::Max(facts.magnitude, magnitude);
    const auto finite = hn::Lt(hn::BitCast(I32(), magnitude), hn::Set(I32(), 0x7f800000));
    value = hn::IfThenElseZero(hn::RebindMask(du, finite), bits);
    const VU finite_magnitude = hn::IfThenElseZero(hn::RebindMask(du, finite), magnitude);
    zero = hn::Eq(finite_magnitude, hn::Zero(du));
    const VU field = hn::ShiftRight<23>(finite_magnitude);
    exponent = hn::Max(field, hn::Set(du, 1U));
    significand = hn::Or(hn::And(hn::ShiftRight<16>(finite_magnitude), hn::Set(du, 0x7fU)),
                         hn::ShiftLeft<7>(hn::Min(field, hn::Set(du, 1U))));
    facts.largest = hn::Max(facts.largest, hn::IfThenZeroElse(zero, exponent));
    facts.smallest = hn::Min(facts.smallest, hn::IfThenElse(zero, hn::Set(du, kSmallestNone), exponent));
  }
};

HWY_INLINE VU load_words(const std::uint16_t* words) {
  return hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16Half(), words)));
}

HWY_INLINE std::uint32_t special_of(std::uint32_t magnitude) {
  return magnitude > 0x7f800000U ? kHasNan : magnitude == 0x7f800000U ? kHasInfinity : kFinite;
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

/// 8 rows of a view, k0..k0+15 of each, to out[8][16].
HWY_INLINE void eight_rows(const MatrixView& view, int r0, int k0, std::uint16_t* out) {
  const bool inside = r0 + 8 <= view.rows_in_memory && k0 + kStep <= view.k_in_memory;
  if (inside && view.row_stride == 1) {
    const std::uint16_t* from[kStep];
    for (int k = 0; k < kStep; ++k) from[k] = view.data + r0 + (k0 + k) * view.k_stride;
    transpose_8x8(from, 0, out, kStep);
    transpose_8x8(from + 8, 0, out + 8, kStep);
    return;
  }
  for (int i = 0; i < 8; ++i) {
    if (inside && view.k_stride == 1) {
      std::memcpy(out + i * kStep, view.data + (r0 + i) * view.row_stride + k0,
                  kStep * sizeof(std::uint16_t));
    } else {
      gather_words(view, r0 + i, k0, kStep, out + i * kStep);
    }
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

HWY_INLINE LineFacts reduce(const FactVectors& v) {
  const U32 du;
  return {hn::GetLane(hn::MaxOfLanes(du, v.largest)), hn::GetLane(hn::MinOfLanes(du, v.smallest)),
          hn::GetLane(hn::MaxOfLanes(du, v.heavy)) > kHeavySum ? 1U : 0U,
          special_of(hn::GetLane(hn::MaxOfLanes(du, v.magnitude)))};
}

/// One (row, step) of a left operand.
HWY_INLINE void pack_left_step(const std::uint16_t* words, std::uint32_t* out, std::uint32_t& live,
                               FactVectors& facts) {
  const U32 du;
  VU sum = hn::Zero(du);
  for (int i = 0; i < kStep; i += kLanes) {
    const Elements e(load_words(words + i), facts);
    hn::Store(e.value, du, out + i);
    // E above kLargestByteField spoils the bytes; such a row is not given to the fast path.
    const VU byte = hn::IfThenZeroElse(e.zero, hn::Add(e.exponent, hn::Set(du, 64U)));
    const VU two = hn::Or(byte, hn::ShiftLeft<8>(byte));
    hn::Store(hn::Or(two, hn::ShiftLeft<16>(two)), du, out + kStep + i);
    sum = hn::Add(sum, e.significand);
  }
  sum = hn::SumOfLanes(du, sum);
  live = hn::GetLane(sum) != 0U ? 1U : 0U;
  facts.heavy = hn::Max(facts.heavy, sum);
}

inline void pack_left(const MatrixView& view, const Layout& layout, std::uint32_t* extra) {
  HWY_ALIGN std::uint16_t block[8 * kStep];
  LineFacts* const facts = reinterpret_cast<LineFacts*>(extra + layout.facts);
  const bool transposed = view.k_stride != 1;
  for (int r0 = 0; r0 < view.rows; r0 += 8) {
    const int rows = std::min(8, view.rows - r0);
    FactVectors v[8];
    for (int s = 0; s < layout.steps; ++s) {
      const int k0 = s * kStep;
      if (transposed) eight_rows(view, r0, k0, block);
      for (int i = 0; i < rows; ++i) {
        const int r = r0 + i;
        const std::uint16_t* words = block + i * kStep;
        if (!transposed) {
          if (r < view.rows_in_memory && k0 + kStep <= view.k_in_memory) {
            words = view.data + r * view.row_stride + k0;
          } else {
            gather_words(view, r, k0, kStep, block + i * kStep);
          }
        }
        pack_left_step(
            words,
            extra + static_cast<std::size_t>(r) * layout.line_words + static_cast<std::size_t>(s * kLeftStep),
            extra[layout.live + static_cast<std::size_t>(r * layout.steps + s)], v[i]);
      }
    }
    for (int i = 0; i < rows; ++i) facts[r0 + i] = reduce(v[i]);
  }
}

/// One (panel, step) of a right operand; `facts` and `zero_byte` have one entry for each vector of columns.
HWY_INLINE void pack_right_step(const std::uint16_t* block, const VU* zero_byte, std::uint32_t* out,
                                std::uint32_t& live, FactVectors* facts) {
  const U32 du;
  std::uint32_t* const exponents = out + kStep * kWidth;
  VU sum[kVectors];
  for (int j = 0; j < kVectors; ++j) sum[j] = hn::Zero(du);
  for (int k = 0; k < kStep; ++k) {
    VU word = hn::Zero(du);
    for (int j = kVectors - 1; j >= 0; --j) {
      const Elements e(load_words(block + k * kWidth + j * kLanes), facts[j]);
      hn::Store(e.value, du, out + k * kWidth + j * kLanes);
      const VU byte =
          hn::IfThenElse(e.zero, zero_byte[j],
                         hn::And(hn::Sub(hn::Set(du, kLargestByteField), e.exponent), hn::Set(du, 255U)));
      word = hn::Or(hn::ShiftLeft<8>(word), byte);
      sum[j] = hn::Add(sum[j], e.significand);
    }
    hn::Store(word, du, exponents + k * kLanes);
  }
  VU any = sum[0];
  for (int j = 0; j < kVectors; ++j) {
    any = hn::Or(any, sum[j]);
    facts[j].heavy = hn::Max(facts[j].heavy, sum[j]);
  }
  live = hn::AllFalse(du, hn::Ne(any, hn::Zero(du))) ? 0U : 1U;
}

inline void pack_right(const MatrixView& view, const Layout& layout, std::uint32_t* extra) {
  const U32 du;
  HWY_ALIGN std::uint16_t block[kStep * kWidth];
  LineFacts* const line_facts = reinterpret_cast<LineFacts*>(extra + layout.facts);
  for (int p = 0; p < layout.lines; ++p) {
    // Columns past the operand's end claim a large exponent: zeros they are, but no reason to look closer at
    // a step.
    VU zero_byte[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      const VU column = hn::Iota(du, static_cast<std::uint32_t>(p * kWidth + j * kLanes));
      const auto inside = hn::Lt(hn::BitCast(I32(), column), hn::Set(I32(), view.rows));
      zero_byte[j] = hn::IfThenElseZero(hn::RebindMask(du, inside), hn::Set(du, 255U));
    }
    FactVectors v[kVectors];
    for (int s = 0; s < layout.steps; ++s) {
      step_of_columns(view, p * kWidth, s * kStep, block);
      pack_right_step(block, zero_byte,
                      extra + static_cast<std::size_t>(p) * layout.line_words +
                          static_cast<std::size_t>(s) * Layout::step_words(Side::right, kWidth),
                      extra[layout.live + static_cast<std::size_t>(p * layout.steps + s)], v);
    }
    std::uint32_t* const column = extra + layout.columns + static_cast<std::size_t>(p * kWidth);
    for (int j = 0; j < kVectors; ++j) hn::StoreU(v[j].magnitude, du, column + j * kLanes);
    for (int n = 0; n < kWidth; ++n) column[n] = special_of(column[n]);
    LineFacts& facts = line_facts[p];
    facts = reduce(v[0]);
    for (int j = 1; j < kVectors; ++j) {
      const LineFacts other = reduce(v[j]);
      facts = {std::max(facts.largest, other.largest), std::min(facts.smallest, other.smallest),
               facts.heavy | other.heavy, std::max(facts.special, other.special)};
    }
  }
}

}  // namespace bitattn::mma::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
