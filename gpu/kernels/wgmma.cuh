#pragma once
// Hopper's warpgroup matrix multiply-add, m64nNk16, BF16 operands and fp32 accumulators: thin wrappers of our
// own.
//
// Our own and not a library's, because a chain of these steps is what the emulator computes and it should be
// readable as such: one loop, k ascending, one instruction a step (docs/spec/fa3-operation-order.md 1.3).
//
// Accumulators of a thread (1.4): register 4*v + 2*i + u is row 16*warp + lane/4 + 8*i, column 8*v +
// 2*(lane%4) + u.

#include <cstdint>

#include "gpu/kernels/tile.cuh"

namespace bitattn::gpu {

template <int kN>
struct Wgmma;

#include "gpu/kernels/wgmma_shapes.inc"

/// A value that is the same in the whole warp, told to the compiler: descriptors are best kept in uniform
/// registers.
__device__ __forceinline__ int uniform(int value) {
  return __shfl_sync(0xffffffffU, value, 0);
}

/// Orders the warpgroup's register and shared-memory accesses before the multiply-adds that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving accesses of these registers across this point: they belong to the tensor
/// core from the first multiply-add to the wait.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

/// D[64 x kN] = A * B^T over kSteps steps of 16, both operands from shared memory; D starts at +0.
template <int kN, int kSteps, class A, class B>
__device__ __forceinline__ void multiply(float (&d)[kN / 2], const A& a, const B& b) {
  Wgmma<kN>::template start<A::kTransposed, B::kTransposed>(d, a.descriptor(0), b.descriptor(0));
#pragma unroll
  for (int step = 1; step < kSteps; ++step) {
    Wgmma<kN>::template add<A::kTransposed, B::kTransposed>(d, a.descriptor(step), b.descriptor(step));
  }
}

/// D += A * B^T, both operands from shared memory.
template <int kN, int kSteps, class A, class B>
__device__ __forceinline__ void multiply_add(float (&d)[kN / 2], const A& a, const B& b) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    Wgmma<kN>::template add<A::kTransposed, B::kTransposed>(d, a.descriptor(step), b.descriptor(step));
  }
}

/// D += A * B^T with A from registers: four words a step, as pack_operand leaves them.
template <int kN, int kSteps, class B>
__device__ __forceinline__ void multiply_add(float (&d)[kN / 2], const std::uint32_t (&a)[4 * kSteps],
                                             const B& b) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    Wgmma<kN>::template add<B::kTransposed>(d, a + 4 * step, b.descriptor(step));
  }
}

/// Accumulators cast to BF16 as the A operand of a next product: column groups 2k and 2k+1 are its k-step k
/// (1.3).
template <int kCount>
__device__ __forceinline__ void pack_operand(const float (&d)[kCount], std::uint32_t (&a)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) a[i] = bf16_pair(d[2 * i], d[2 * i + 1]);
}

}  // namespace bitattn::gpu
