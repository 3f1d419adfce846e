#pragma once
// Small captures of every make, and damage to them: the material of the fuzz tests.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "datasets/philox.hpp"

namespace bitattn::test {

/// Random numbers of one damaged file: they depend on the seed and its number only.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t file)
      : key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32U)}, file_(file) {}
  /// 0 to n - 1.
  std::size_t below(std::size_t n) {
    const PhiloxCounter w = philox(
        {step_++, static_cast<std::uint32_t>(file_), static_cast<std::uint32_t>(file_ >> 32U), 0}, key_);
    return n == 0 ? 0 : (w[0] | static_cast<std::uint64_t>(w[1]) << 32U) % n;
  }

 private:
  PhiloxKey key_;
  std::uint64_t file_;
  std::uint32_t step_ = 0;
};

/// A whole file.
struct Sample {
  std::string name, bytes;
};

/// Small captures of every make: built by hand in both formats and all storages, our writer's, and bundled
/// real ones.
std::vector<Sample> make_samples();

/// The bytes of damaged file number `i`.
std::string damaged(const std::vector<Sample>& samples, std::uint64_t seed, std::uint64_t i);

/// The number in an environment variable.
std::uint64_t from_environment(const char* name, std::uint64_t otherwise);

}  // namespace bitattn::test
