#pragma once
// The floating-point environments in which vectorised code gives the chip's bits.

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace bitattn::mma {

enum class FloatMode : std::uint8_t {
  toward_zero,    ///< rounding toward zero, subnormals kept: the tensor core's last step
  nearest,        ///< to nearest even, subnormals kept: reductions to memory
  nearest_flush,  ///< to nearest even, subnormal operands and results flushed: FADD/FMUL/FFMA.FTZ (x86 only;
                  ///< docs/spec/hopper-arithmetic.md 6: the same rule but for the patterns of NaNs)
};

/// Sets a mode for this thread while in scope. Code that depends on it must sit behind a call that is not
/// inlined: a compiler may move arithmetic, but not a call, across the change.
class FloatModeScope {
 public:
  FloatModeScope(const FloatModeScope&) = delete;
  FloatModeScope& operator=(const FloatModeScope&) = delete;

#if defined(__x86_64__) || defined(__i386__)
  explicit FloatModeScope(FloatMode mode) : saved_(_mm_getcsr()) {
    const unsigned wanted = mode == FloatMode::toward_zero ? kMaskedExceptions | _MM_ROUND_TOWARD_ZERO
                            : mode == FloatMode::nearest   ? kMaskedExceptions
                                                           : kMaskedExceptions | kFlush;
    if ((saved_ & ~kStickyFlags) != wanted) _mm_setcsr(wanted);
  }
  ~FloatModeScope() {
    _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kStickyFlags = 0x3fU;
  static constexpr unsigned kMaskedExceptions = 0x1f80U;
  static constexpr unsigned kFlush = 0x8040U;  // flush-to-zero, denormals-are-zero
  unsigned saved_;
#else
  explicit FloatModeScope(FloatMode mode) : saved_(std::fegetround()) {
    std::fesetround(mode == FloatMode::toward_zero ? FE_TOWARDZERO : FE_TONEAREST);
  }
  ~FloatModeScope() {
    std::fesetround(saved_);
  }

 private:
  int saved_;
#endif
};

}  // namespace bitattn::mma
