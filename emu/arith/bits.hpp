#pragma once
// Bit patterns of fp32 numbers, and the marks that let every function of emu/arith run on host and device.

#include <cstdint>

#if !defined(__CUDA_ARCH__)
#include <bit>
#endif

#if defined(__CUDACC__)
#define BITATTN_HD __host__ __device__
#else
#define BITATTN_HD
#endif

namespace bitattn::arith {

/// The only NaN that an fp32 instruction of Hopper returns (payload and sign of input NaNs are lost).
/// Source: docs/spec/hopper-arithmetic.md, head of the page.
inline constexpr std::uint32_t kQuietNan = 0x7fffffffU;
inline constexpr std::uint32_t kInfinity = 0x7f800000U;
inline constexpr std::uint32_t kSignBit = 0x80000000U;
inline constexpr std::uint32_t kSmallestNormal = 0x00800000U;
inline constexpr std::uint32_t kOne = 0x3f800000U;

/// Bits of a float; signalling NaNs pass unchanged.
// The builtin and not std::bit_cast, which is a host function to nvcc.
BITATTN_HD constexpr std::uint32_t to_bits(float x) {
  return __builtin_bit_cast(std::uint32_t, x);
}

/// Float of these bits.
BITATTN_HD constexpr float from_bits(std::uint32_t x) {
  return __builtin_bit_cast(float, x);
}

BITATTN_HD constexpr bool is_nan(std::uint32_t x) {
  return (x & 0x7fffffffU) > kInfinity;
}
BITATTN_HD constexpr bool is_infinite(std::uint32_t x) {
  return (x & 0x7fffffffU) == kInfinity;
}

/// Flush to zero: a subnormal becomes zero of the same sign.
BITATTN_HD constexpr std::uint32_t flush(std::uint32_t x) {
  return (x & kInfinity) != 0U ? x : (x & kSignBit);
}

/// Index of the highest set bit of v; v must not be 0.
BITATTN_HD constexpr int highest_bit(std::uint64_t v) {
#if defined(__CUDA_ARCH__)
  return 63 - __clzll(static_cast<long long>(v));
#else
  return 63 - std::countl_zero(v);
#endif
}

}  // namespace bitattn::arith
