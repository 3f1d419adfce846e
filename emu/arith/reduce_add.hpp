#pragma once
// Reductions to memory: what one addition into a memory word gives.
// Source: docs/spec/hopper-arithmetic.md 8; 100.7e6 pairs for each form on an H200, 0 mismatches.
// The order in which several thread blocks reach one address is not fixed by the chip.

#include "emu/arith/fp32.hpp"
#include "emu/arith/fp32_ftz.hpp"

namespace bitattn::arith {

/// cp.reduce.async.bulk ... add.f32 and shared-memory atomicAdd: plain IEEE, subnormals kept.
BITATTN_HD inline float bulk_reduce_add(float memory, float operand) {
  return add(memory, operand);
}

/// red.global.add.f32, atomicAdd(float*), also the float4 form: operands and result flushed.
BITATTN_HD inline float global_reduce_add(float memory, float operand) {
  return ftz::add(memory, operand);
}

}  // namespace bitattn::arith
