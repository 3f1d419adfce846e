#pragma once
// Does this chip's arithmetic follow emu/arith? Every unit runs the chip's instruction and the model, both on
// the device, over the same inputs and counts the results that differ in a bit.

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gpu/common/device.hpp"

namespace bitattn::gpu::probe {

/// The first case that differed, in the order of the cases.
struct Mismatch {
  std::uint64_t index = 0;            ///< number of the case in its unit
  std::vector<std::uint32_t> inputs;  ///< bits; a dot product: the words of a, of b, then c
  std::uint32_t chip = 0, model = 0;  ///< bits of the two results
};

enum class Verdict : std::uint8_t {
  follows,  ///< every case equal in every bit
  differs,
  untested,  ///< this chip or build has no such instruction; the note says why
};

/// One instruction (or one form of it) and what came of its comparison.
struct Unit {
  std::string group;   ///< "function", "conversion", "fp32", "reduction", "mma.sync", "wgmma"
  std::string name;    ///< the instruction
  std::string inputs;  ///< which cases: "all 2^32", "boundary, random", "24 kinds"
  std::uint64_t cases = 0;
  std::uint64_t mismatches = 0;
  Verdict verdict = Verdict::untested;
  std::string note;
  std::optional<Mismatch> first;
  double seconds = 0;
};

/// A deliberately wrong rule that the probe must notice, or its other counts would prove nothing.
struct SelfTest {
  std::string name;
  std::uint64_t cases = 0, mismatches = 0;
  bool noticed() const { return mismatches > 0; }
};

struct Report {
  Device device;
  std::vector<Unit> units;
  std::vector<SelfTest> self_tests;
  std::uint64_t dot_products() const;
  /// Nothing differs, and every wrong rule was noticed.
  bool holds() const;
};

struct Options {
  /// Fewer random cases: a share of the full count. Exhaustive units and wrong rules stay as they are.
  double share = 1;
  /// Called before each unit with its name.
  std::function<void(const std::string&)> progress;
};

/// Runs all units on the selected GPU. Throws Error where there is none or a CUDA call fails.
Report run(const Options& options);

}  // namespace bitattn::gpu::probe
