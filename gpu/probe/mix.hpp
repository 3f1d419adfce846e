#pragma once
// Random bits from a counter, the same on host and device.

#include <cstdint>

#include "emu/arith/bits.hpp"

namespace bitattn::gpu::probe {

/// 64 random bits of a counter (splitmix64).
BITATTN_HD constexpr std::uint64_t mix(std::uint64_t z) {
  z += 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27U)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31U);
}

}  // namespace bitattn::gpu::probe
