#pragma once
// The floating-point environment of the SIMD tile products: rounding toward zero, subnormals kept.

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace bitattn::mma {

/// Sets it for this thread while in scope. Code that depends on it must sit behind a call that is not
/// inlined: a compiler may move arithmetic, but not a call, across the change.
class TowardZero {
 public:
#if defined(__x86_64__) || defined(__i386__)
  TowardZero() : saved_(_mm_getcsr()) {
    _mm_setcsr(kMaskedExceptions | _MM_ROUND_TOWARD_ZERO);
  }
  ~TowardZero() {
    _mm_setcsr(saved_);
  }
#else
  TowardZero() : saved_(std::fegetround()) {
    std::fesetround(FE_TOWARDZERO);
  }
  ~TowardZero() {
    std::fesetround(saved_);
  }
#endif
  TowardZero(const TowardZero&) = delete;
  TowardZero& operator=(const TowardZero&) = delete;

 private:
#if defined(__x86_64__) || defined(__i386__)
  static constexpr unsigned kMaskedExceptions = 0x1f80U;  // and neither flush-to-zero nor denormals-are-zero
  unsigned saved_;
#else
  int saved_;
#endif
};

}  // namespace bitattn::mma
