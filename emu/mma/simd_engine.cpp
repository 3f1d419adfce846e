#include "emu/mma/simd_engine.hpp"

// One object file for each instruction set, all from this source: Highway includes it again per target.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "emu/mma/simd_engine.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#include "emu/mma/float_mode.hpp"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128 && !HWY_HAVE_SCALABLE
#include "emu/mma/simd_multiply-inl.hpp"
#include "emu/mma/simd_pack-inl.hpp"
#endif

#if HWY_ONCE

#include <hwy/targets.h>

#include <array>
#include <memory>
#include <string>
#include <utility>

namespace bitattn::mma {

namespace {

using simd::kStep;
using simd::Layout;
using simd::LineFacts;

/// What one instruction set brings: a panel's width and three loops.
struct Target {
  std::string_view name;
  std::int64_t bit;  ///< Highway's
  int width;
  void (*pack_left)(const MatrixView&, const Layout&, std::uint32_t*);
  void (*pack_right)(const MatrixView&, const Layout&, std::uint32_t*);
  void (*multiply_finite)(const PackedOperand&, const PackedOperand&, Start, float*, std::ptrdiff_t,
                          RowCounts&);
};

bool is_the_chip(const arith::TensorCoreRule& rule) {
  constexpr arith::TensorCoreRule kChip = arith::kHopperWide;
  return rule.aligned_fraction_bits == kChip.aligned_fraction_bits &&
         rule.result_fraction_bits == kChip.result_fraction_bits &&
         rule.exponent_floor == kChip.exponent_floor && rule.round_to_nearest == kChip.round_to_nearest;
}

class SimdEngine final : public Engine {
 public:
  explicit SimdEngine(const Target& target) : target_(target) {}

  std::string_view name() const override { return target_.name; }

  void pack(const MatrixView& view, Side side, PackedOperand& out) const override {
    out.side = side;
    out.rows = view.rows;
    out.k = (view.k + kStep - 1) / kStep * kStep;
    const Layout layout = layout_of(out);
    out.extra.resize(layout.total);
    (side == Side::left ? target_.pack_left : target_.pack_right)(view, layout, out.extra.data());
    out.tame = true;
    for (int line = 0; line < layout.lines; ++line)
      out.tame = out.tame && facts(out, layout)[line].special == simd::kFinite;
    out.words.clear();
    if (out.tame) return;
    out.words.resize(static_cast<std::size_t>(out.rows) * static_cast<std::size_t>(out.k));
    std::uint16_t* word = out.words.data();
    for (int r = 0; r < out.rows; ++r) {
      for (int k = 0; k < out.k; ++k) *word++ = view.at(r, k);
    }
  }

  void multiply(const PackedOperand& left, const PackedOperand& right, Start start, float* c,
                std::ptrdiff_t ldc, const arith::TensorCoreRule& rule) const override {
    if (left.k == 0) {
      for (int m = 0; m < left.rows && start == Start::zero; ++m) std::fill_n(c + m * ldc, right.rows, 0.0F);
      return;
    }
    if (!is_the_chip(rule)) {
      for (int m = 0; m < left.rows; ++m) {
        for (int n = 0; n < right.rows; ++n)
          c[m * ldc + n] = chain(left, right, m, n, start, c[m * ldc + n], rule);
      }
      return;
    }
    // Elements with infinite or NaN operands are computed first, while C still holds what they start from.
    std::vector<std::pair<std::ptrdiff_t, float>> special;
    if (!left.tame || !right.tame) special = special_elements(left, right, start, c, ldc);
    {
      const FloatModeScope mode(FloatMode::toward_zero);
      target_.multiply_finite(left, right, start, c, ldc, row_counts());
    }
    for (const auto& [offset, value] : special) c[offset] = value;
  }

 private:
  Layout layout_of(const PackedOperand& operand) const {
    return {operand.side, operand.rows, operand.k, target_.width};
  }

  static const LineFacts* facts(const PackedOperand& operand, const Layout& layout) {
    return reinterpret_cast<const LineFacts*>(operand.extra.data() + layout.facts);
  }

  /// The words of (row or column r, step s) as they were before packing.
  void words(const PackedOperand& operand, int r, int s, std::uint16_t* out) const {
    if (!operand.words.empty()) {
      std::copy_n(operand.words.data() + static_cast<std::ptrdiff_t>(r) * operand.k +
                      static_cast<std::ptrdiff_t>(s) * kStep,
                  kStep, out);
      return;
    }
    const Layout layout = layout_of(operand);
    const bool is_left = operand.side == Side::left;
    const int line = is_left ? r : r / target_.width;
    const std::uint32_t* values =
        operand.extra.data() + static_cast<std::size_t>(line) * layout.line_words +
        static_cast<std::size_t>(s) * Layout::step_words(operand.side, target_.width);
    for (int k = 0; k < kStep; ++k) {
      out[k] = is_left
                   ? static_cast<std::uint16_t>(values[k] >> 16U)
                   : reinterpret_cast<const std::uint16_t*>(values)[k * target_.width + r % target_.width];
    }
  }

  /// One element by the scalar model.
  float chain(const PackedOperand& left, const PackedOperand& right, int m, int n, Start start, float c,
              const arith::TensorCoreRule& rule) const {
    std::uint32_t accumulator = start == Start::zero ? 0U : arith::to_bits(c);
    for (int s = 0; s < left.k / kStep; ++s) {
      std::uint16_t a[kStep];
      std::uint16_t b[kStep];
      words(left, m, s, a);
      words(right, n, s, b);
      accumulator = arith::mma_bf16_k16(a, b, accumulator, rule);
    }
    ++row_counts().scalar;
    return arith::from_bits(accumulator);
  }

  /// The elements of rows and columns that hold an infinity or a NaN, as (offset in C, value).
  std::vector<std::pair<std::ptrdiff_t, float>> special_elements(const PackedOperand& left,
                                                                 const PackedOperand& right, Start start,
                                                                 const float* c, std::ptrdiff_t ldc) const {
    const Layout left_layout = layout_of(left);
    const Layout right_layout = layout_of(right);
    const std::uint32_t* const columns = right.extra.data() + right_layout.columns;
    std::vector<std::pair<std::ptrdiff_t, float>> out;
    for (int m = 0; m < left.rows; ++m) {
      const std::uint32_t row = facts(left, left_layout)[m].special;
      if (row == simd::kFinite && right.tame) continue;
      for (int n = 0; n < right.rows; ++n) {
        const std::uint32_t special = row > columns[n] ? row : columns[n];
        if (special == simd::kFinite) continue;
        // A NaN operand makes its step NaN, and NaN it stays.
        const float value = special == simd::kHasNan
                                ? arith::from_bits(arith::kQuietNan)
                                : chain(left, right, m, n, start, c[m * ldc + n], arith::kHopperWide);
        out.emplace_back(m * ldc + n, value);
      }
    }
    return out;
  }

  Target target_;
};

#define BITATTN_SIMD_TARGET(name, bit, space)                                        \
  Target {                                                                           \
    name, bit, simd::space::kWidth, simd::space::pack_left, simd::space::pack_right, \
        simd::space::multiply_finite                                                 \
  }

/// The instruction sets of this build.
std::vector<Target> targets() {
  return {
#if HWY_TARGETS & HWY_NEON
    BITATTN_SIMD_TARGET("neon", HWY_NEON, N_NEON),
#endif
#if HWY_TARGETS & HWY_SSE4
        BITATTN_SIMD_TARGET("sse4", HWY_SSE4, N_SSE4),
#endif
#if HWY_TARGETS & HWY_AVX2
        BITATTN_SIMD_TARGET("avx2", HWY_AVX2, N_AVX2),
#endif
#if HWY_TARGETS & HWY_AVX3
        BITATTN_SIMD_TARGET("avx512", HWY_AVX3, N_AVX3),
#endif
  };
}

}  // namespace

std::span<const Engine* const> simd_engines() {
  static const std::vector<std::unique_ptr<Engine>> engines = [] {
    std::vector<std::unique_ptr<Engine>> supported;
    for (const Target& target : targets()) {
      if ((hwy::SupportedTargets() & target.bit) != 0)
        supported.push_back(std::make_unique<SimdEngine>(target));
    }
    return supported;
  }();
  static const std::vector<const Engine*> pointers = [] {
    std::vector<const Engine*> p;
    for (const auto& engine : engines) p.push_back(engine.get());
    return p;
  }();
  return pointers;
}

RowCounts& row_counts() {
  thread_local RowCounts counts;
  return counts;
}

}  // namespace bitattn::mma

#endif  // HWY_ONCE
