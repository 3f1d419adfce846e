#pragma once
// Seeded random bits that are the same everywhere: SplitMix64 (Steele, Lea and Flood, "Fast splittable
// pseudorandom number generators", 2014), whose output function is also the `mix` of the digests.

#include <cstdint>

namespace bitattn::test {

constexpr std::uint64_t mix(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27U)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31U);
}

class RandomBits {
 public:
  explicit constexpr RandomBits(std::uint64_t seed) : state_(mix(seed)) {}

  constexpr std::uint64_t bits64() {
    const std::uint64_t z = mix(state_);
    state_ += 0x9E3779B97F4A7C15ULL;
    return z;
  }
  constexpr std::uint32_t bits32() { return static_cast<std::uint32_t>(bits64() >> 32U); }
  /// Uniform over low..high, both included.
  constexpr int between(int low, int high) {
    return low + static_cast<int>(((bits64() >> 32U) * static_cast<std::uint64_t>(high - low + 1)) >> 32U);
  }
  /// True once in n calls on average.
  constexpr bool one_in(int n) { return between(1, n) == 1; }

 private:
  std::uint64_t state_;
};

}  // namespace bitattn::test
