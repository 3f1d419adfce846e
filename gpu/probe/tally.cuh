#pragma once
// Counting mismatches on the device, and finding the first one.

#include <cstdint>

#include "gpu/common/buffer.hpp"
#include "gpu/common/launch.hpp"
#include "gpu/probe/probe.hpp"

namespace bitattn::gpu::probe {

/// What a sweep leaves behind.
struct Tally {
  unsigned long long mismatches;
  unsigned long long first;  ///< smallest index of a case that differs
};

/// Inputs and results of one case.
struct Outcome {
  std::uint32_t inputs[3];
  std::uint32_t chip, model;
};

inline constexpr unsigned long long kNoCase = ~0ULL;

/// Adds a thread's counts to the tally.
__device__ inline void add_to_tally(Tally* tally, unsigned long long mismatches, unsigned long long first) {
  if (mismatches == 0) return;
  atomicAdd(&tally->mismatches, mismatches);
  atomicMin(&tally->first, first);
}

/// Cases [first, first + count): `Check::run(index)` gives an Outcome. With `shown` the outcomes are written
/// there too.
template <class Check>
__global__ void sweep(std::uint64_t first, std::uint64_t count, Tally* tally, Outcome* shown) {
  unsigned long long mismatches = 0;
  unsigned long long first_mismatch = kNoCase;
  const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const Outcome outcome = Check::run(first + i);
    if (shown != nullptr) shown[i] = outcome;
    if (outcome.chip == outcome.model) continue;
    ++mismatches;
    if (first + i < first_mismatch) first_mismatch = first + i;
  }
  add_to_tally(tally, mismatches, first_mismatch);
}

/// A tally on the device.
class DeviceTally {
 public:
  DeviceTally() : buffer_(1, "a tally") { clear(); }
  void clear() {
    const Tally empty{0, kNoCase};
    check(cudaMemcpy(buffer_.data(), &empty, sizeof empty, cudaMemcpyHostToDevice), "clearing a tally");
  }
  Tally* device() const { return buffer_.data(); }
  /// Waits for the device.
  Tally read() const { return buffer_.download("reading a tally").front(); }

 private:
  Buffer<Tally> buffer_;
};

/// Fills in a unit's verdict from its counts.
inline void settle(Unit& unit, std::uint64_t cases, std::uint64_t mismatches) {
  unit.cases = cases;
  unit.mismatches = mismatches;
  unit.verdict = mismatches == 0 ? Verdict::follows : Verdict::differs;
}

/// Runs Check over [0, count) and fills in the unit. `operands`: how many inputs a case has.
template <class Check>
void sweep_unit(Unit& unit, std::uint64_t count, int operands, const Device& device) {
  DeviceTally tally;
  const dim3 grid(static_cast<unsigned>(device.multiprocessors) * 8);
  const dim3 block(256);
  // In pieces, so that no launch lasts long.
  constexpr std::uint64_t kPiece = std::uint64_t{1} << 30;
  Event begin;
  Event end;
  begin.record();
  for (std::uint64_t first = 0; first < count; first += kPiece) {
    launch(unit.name.c_str(), sweep<Check>, grid, block, first,
           count - first < kPiece ? count - first : kPiece, tally.device(), nullptr);
  }
  end.record();
  unit.seconds = end.milliseconds_since(begin) * 1e-3;
  const Tally result = tally.read();
  settle(unit, count, result.mismatches);
  if (result.mismatches == 0) return;
  Buffer<Outcome> shown(1, "an outcome");
  launch(unit.name.c_str(), sweep<Check>, dim3(1), dim3(1), result.first, 1, tally.device(), shown.data());
  const Outcome outcome = shown.download("reading a mismatch").front();
  Mismatch mismatch;
  mismatch.index = result.first;
  mismatch.inputs.assign(outcome.inputs, outcome.inputs + operands);
  mismatch.chip = outcome.chip;
  mismatch.model = outcome.model;
  unit.first = mismatch;
}

}  // namespace bitattn::gpu::probe
