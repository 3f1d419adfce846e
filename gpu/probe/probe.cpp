#include "gpu/probe/probe.hpp"

#include <algorithm>

#include "gpu/probe/units.hpp"

namespace bitattn::gpu::probe {

std::uint64_t Report::dot_products() const {
  std::uint64_t sum = 0;
  for (const Unit& unit : units) {
    if (unit.group == "mma.sync" || unit.group == "wgmma") sum += unit.cases;
  }
  return sum;
}

bool Report::holds() const {
  return std::none_of(units.begin(), units.end(),
                      [](const Unit& unit) { return unit.verdict == Verdict::differs; }) &&
         std::all_of(self_tests.begin(), self_tests.end(),
                     [](const SelfTest& test) { return test.noticed(); });
}

std::uint64_t Run::scaled(std::uint64_t cases) const {
  constexpr double kFewest = 4096;
  return static_cast<std::uint64_t>(std::max(kFewest, static_cast<double>(cases) * options_.share));
}

Unit& Run::begin(const std::string& group, const std::string& name, const std::string& inputs) {
  if (options_.progress) options_.progress(group + ": " + name);
  Unit unit;
  unit.group = group;
  unit.name = name;
  unit.inputs = inputs;
  report_.units.push_back(unit);
  return report_.units.back();
}

void Run::untested(const std::string& group, const std::string& name, const std::string& why) {
  begin(group, name, "").note = why;
}

void Run::self_test(const Unit& unit) {
  report_.self_tests.push_back({unit.name, unit.cases, unit.mismatches});
}

Report run(const Options& options) {
  Report report;
  report.device = select_device();
  Run run(options, report);
  scalar_units(run);
  reduction_units(run);
  mma_sync_units(run);
  wgmma_units(run);
  return report;
}

}  // namespace bitattn::gpu::probe
