#pragma once
// What the files of the probe share: a run in the making, and the groups of units.

#include <string>

#include "gpu/probe/probe.hpp"

namespace bitattn::gpu::probe {

/// A report in the making.
class Run {
 public:
  Run(const Options& options, Report& report) : options_(options), report_(report) {}

  const Device& device() const { return report_.device; }
  /// That many cases, or the share of them that was asked for (at least 4096).
  std::uint64_t scaled(std::uint64_t cases) const;
  /// A new unit, valid until the next call.
  Unit& begin(const std::string& group, const std::string& name, const std::string& inputs);
  void untested(const std::string& group, const std::string& name, const std::string& why);
  void self_test(const Unit& unit);

 private:
  const Options& options_;
  Report& report_;
};

/// Inputs of a unit that runs over every pair of boundary values, then over random triples.
inline constexpr const char* kPairsText = "boundary, random";

void scalar_units(Run& run);
void reduction_units(Run& run);
void mma_sync_units(Run& run);
void wgmma_units(Run& run);  ///< sm_90a only

}  // namespace bitattn::gpu::probe
