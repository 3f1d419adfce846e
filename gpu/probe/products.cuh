#pragma once
// What the mma.sync and the wgmma units share: which dot product a number stands for, and a unit's
// bookkeeping.

#include <string>
#include <vector>

#include "gpu/probe/dot_products.hpp"
#include "gpu/probe/tally.cuh"
#include "gpu/probe/units.hpp"

namespace bitattn::gpu::probe {

/// One launch over tiles [first, first + count). With `shown` the result of dot product `shown_index` goes
/// there.
struct Launch {
  std::uint64_t first = 0, count = 0;
  int steps = 1;            ///< fused steps in a row into one accumulator
  bool zero_start = false;  ///< scale-d = 0: the old accumulator is ignored
  arith::TensorCoreRule rule{};
  Tally* tally = nullptr;
  Outcome* shown = nullptr;
  std::uint64_t shown_index = 0;
};

/// Runs `start(launch)` over enough tiles and fills in the unit. A tile holds rows x columns dot products;
/// its operands are those of dot_products.cuh for formats A and B.
template <class A, class B, class Start>
void product_unit(Unit& unit, std::uint64_t dot_products, int rows, int columns, int k, Launch launch,
                  Start&& start) {
  const std::uint64_t a_tile = static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(columns);
  // Whole rounds of kinds.
  const std::uint64_t tiles = (dot_products / a_tile / kKinds + 1) * kKinds;
  DeviceTally tally;
  launch.tally = tally.device();
  constexpr std::uint64_t kPieces = 8;  // so that no launch lasts long
  const std::uint64_t piece = (tiles + kPieces - 1) / kPieces;
  Event begin;
  Event end;
  begin.record();
  for (launch.first = 0; launch.first < tiles; launch.first += piece) {
    launch.count = tiles - launch.first < piece ? tiles - launch.first : piece;
    start(launch);
  }
  end.record();
  unit.seconds = end.milliseconds_since(begin) * 1e-3;
  const Tally result = tally.read();
  settle(unit, tiles * a_tile, result.mismatches);
  if (result.mismatches == 0) return;
  Buffer<Outcome> shown(1, "an outcome");
  launch.first = result.first / a_tile;
  launch.count = 1;
  launch.shown = shown.data();
  launch.shown_index = result.first;
  start(launch);
  const Outcome outcome = shown.download("reading a mismatch").front();
  Mismatch mismatch;
  mismatch.index = result.first;
  mismatch.chip = outcome.chip;
  mismatch.model = outcome.model;
  const TileShape shape = tile_shape<A, B>(launch.first, k);
  const int within = static_cast<int>(result.first % a_tile);
  for (int i = 0; i < k * launch.steps; ++i) {
    mismatch.inputs.push_back(operand_word<A, Operand::a>(shape, within / columns, i));
  }
  for (int i = 0; i < k * launch.steps; ++i) {
    mismatch.inputs.push_back(operand_word<B, Operand::b>(shape, within % columns, i));
  }
  mismatch.inputs.push_back(outcome.inputs[2]);
  unit.first = mismatch;
}

/// Compares one dot product on the device.
__device__ inline void compare_product(const Launch& launch, std::uint64_t index, std::uint32_t c,
                                       std::uint32_t chip, std::uint32_t model,
                                       unsigned long long& mismatches, unsigned long long& first) {
  if (launch.shown != nullptr && index == launch.shown_index) *launch.shown = {{0, 0, c}, chip, model};
  if (chip == model) return;
  ++mismatches;
  if (index < first) first = index;
}

/// Wrong rules that a unit of products must notice. They run over all their cases, whatever share of the
/// others was asked for: some show in one case of three thousand.
struct WrongRule {
  const char* name;
  arith::TensorCoreRule rule;
};
inline constexpr WrongRule kWrongRules[] = {
    {"F = 24", {24, 23, -133}},
    {"F = 26", {26, 23, -133}},
    {"rounding to nearest", {25, 23, -133, true}},
    {"exponent floor -134", {25, 23, -134}},
};

}  // namespace bitattn::gpu::probe
