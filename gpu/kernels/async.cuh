#pragma once
// Hopper's copy engine and barriers, one PTX instruction a function.

#include <cuda.h>

#include <cstdint>

namespace bitattn::gpu {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---- barriers in shared memory (mbarrier) ----

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives and announces bytes that copies will bring before the phase ends.
__device__ __forceinline__ void barrier_expect(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
/// Waits for the end of the phase of this parity.
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// A place in a ring of buffers: which buffer, and the parity of its current round.
template <int kStages>
struct RingPosition {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- named barriers among warps (0 is __syncthreads) ----

__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- registers of a warpgroup ----

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- copies ----

/// Ordinary stores to shared memory become visible to the copy engine and the tensor core.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// The same for memory of the device.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// A box of a (column, token, head, batch) tensor to shared memory; what lies outside the tensor reads as
/// zero.
__device__ __forceinline__ void copy_box(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                         int column, int token, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(batch)
      : "memory");
}
/// A box from shared memory to a tensor; what lies outside the tensor is not written.
__device__ __forceinline__ void store_box(const CUtensorMap* map, std::uint32_t shared, int column, int token,
                                          int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(shared), "r"(column), "r"(token), "r"(head), "r"(batch)
      : "memory");
}
/// Consecutive bytes (a multiple of 16) to shared memory.
__device__ __forceinline__ void copy_bytes(std::uint32_t shared, const void* global, int bytes,
                                           std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}
/// Consecutive bytes from shared memory to memory.
__device__ __forceinline__ void store_bytes(void* global, std::uint32_t shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
/// Adds consecutive floats to memory: round to nearest even, subnormals kept (docs/spec/hopper-arithmetic.md
/// 8).
__device__ __forceinline__ void add_bytes(void* global, std::uint32_t shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Shared memory of this thread's committed stores may be overwritten.
__device__ __forceinline__ void copies_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// This thread's committed stores and additions have been performed.
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---- turns among blocks of threads (global memory) ----

/// Waits until *p is `value`; what was done before it became so is then visible here.
__device__ __forceinline__ void wait_for_turn(const int* p, int value) {
  int v;
  do {  // relaxed: an acquiring load empties the L1 cache each time
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  } while (v != value);
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
/// Counts *p up by one after all that was done before.
__device__ __forceinline__ void pass_turn(int* p) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(p) : "memory");
}

}  // namespace bitattn::gpu
