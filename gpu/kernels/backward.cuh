#pragma once
// The backward's main kernel: dK and dV of one key block and one query head a block of threads, and its share
// of dQ.
//
// One warpgroup moves data: its first warp loads, its second adds finished dQ shares to memory in turn. Two
// warpgroups compute, each for 64 keys: scores are held transposed (keys are rows), so that P and dS are at
// once the register operands of dV and dK. Step numbers in brackets: docs/spec/fa3-operation-order.md 4.

#include "gpu/kernels/async.cuh"
#include "gpu/kernels/order.cuh"
#include "gpu/kernels/params.hpp"
#include "gpu/kernels/wgmma.cuh"

namespace bitattn::gpu {

/// Tiles of a backward kernel. block_n groups dQ's sums and is a matter of bits; block_m only decides how
/// many rows past the end are computed (4.7), which shows where inputs are not finite.
template <int kHeadDim_, int kBlockM_, bool kCausal_>
struct BackwardTile {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr bool kCausal = kCausal_;
  static constexpr int kBlockN = 128;
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kStages = 2;
  static constexpr int kPanels = kHeadDim / kPanelColumns;
  static constexpr int kQueryBytes = kBlockM * kHeadDim * 2;
  static constexpr int kKeyBytes = kBlockN * kHeadDim * 2;
  static constexpr int kScoreBytes = kBlockM * kBlockN * 2;
  static constexpr int kStatisticBytes = kBlockM * 4;
  /// dQ is held transposed: a warpgroup has 64 columns of it and all rows, or, with 64 columns in all, 64
  /// rows.
  static constexpr int kDqRows = kPanels == kWarpgroups ? kBlockM : kBlockM / kWarpgroups;
  static constexpr int kDqSliceBytes = kDqRows * 64 * 4;
  /// Two places for dQ where there is room: a computing warpgroup goes on while a share waits for its turn.
  static constexpr int kDqStages =
      2 * kKeyBytes + 2 * kStages * kQueryBytes + kStages * kScoreBytes + 4 * kDqSliceBytes <= 224 * 1024 ? 2
                                                                                                          : 1;
  static constexpr int kLoaderRegisters = 24;
  static constexpr int kComputeRegisters = 240;
};

/// Offsets in shared memory.
template <class Tile>
struct BackwardShared {
  static constexpr int kK = 0;
  static constexpr int kV = kK + Tile::kKeyBytes;
  static constexpr int kQ = kV + Tile::kKeyBytes;
  static constexpr int kDout = kQ + Tile::kStages * Tile::kQueryBytes;
  static constexpr int kDs = kDout + Tile::kStages * Tile::kQueryBytes;
  static constexpr int kDq = kDs + Tile::kStages * Tile::kScoreBytes;
  static constexpr int kLse = kDq + Tile::kDqStages * Tile::kWarpgroups * Tile::kDqSliceBytes;
  static constexpr int kDpsum = kLse + Tile::kStages * Tile::kStatisticBytes;
  static constexpr int kBarriers = kDpsum + Tile::kStages * Tile::kStatisticBytes;
  static constexpr int kTicket = kBarriers + 8 * (1 + 4 * Tile::kStages);
  static constexpr int kBytes = kTicket + 8;
  static_assert(Tile::kQueryBytes % kSwizzleBytes == 0 && Tile::kScoreBytes % kSwizzleBytes == 0);
  static_assert(kBytes <= 232448, "the most a block of threads can have");

  std::uint32_t base;
  __device__ __forceinline__ std::uint32_t at(int offset) const {
    return base + static_cast<std::uint32_t>(offset);
  }
  __device__ __forceinline__ std::uint32_t k() const { return at(kK); }
  __device__ __forceinline__ std::uint32_t v() const { return at(kV); }
  __device__ __forceinline__ std::uint32_t q(int stage) const { return at(kQ + stage * Tile::kQueryBytes); }
  __device__ __forceinline__ std::uint32_t dout(int stage) const {
    return at(kDout + stage * Tile::kQueryBytes);
  }
  __device__ __forceinline__ std::uint32_t ds(int stage) const { return at(kDs + stage * Tile::kScoreBytes); }
  __device__ __forceinline__ std::uint32_t dq(int stage, int warpgroup) const {
    return at(kDq + (stage * Tile::kWarpgroups + warpgroup) * Tile::kDqSliceBytes);
  }
  __device__ __forceinline__ std::uint32_t lse(int stage) const {
    return at(kLse + stage * Tile::kStatisticBytes);
  }
  __device__ __forceinline__ std::uint32_t dpsum(int stage) const {
    return at(kDpsum + stage * Tile::kStatisticBytes);
  }
  __device__ __forceinline__ std::uint32_t barrier(int i) const { return at(kBarriers + 8 * i); }
  __device__ __forceinline__ std::uint32_t kv_full() const { return barrier(0); }
  __device__ __forceinline__ std::uint32_t q_full(int stage) const { return barrier(1 + stage); }
  __device__ __forceinline__ std::uint32_t q_empty(int stage) const {
    return barrier(1 + Tile::kStages + stage);
  }
  __device__ __forceinline__ std::uint32_t dout_full(int stage) const {
    return barrier(1 + 2 * Tile::kStages + stage);
  }
  __device__ __forceinline__ std::uint32_t dout_empty(int stage) const {
    return barrier(1 + 3 * Tile::kStages + stage);
  }
};

/// Named barriers: dS is written (both computing warpgroups); a place for a warpgroup's share of dQ is full,
/// or empty.
enum BackwardBarrier : int { kDsWritten = 1, kDqFull = 2, kDqEmpty = 6, kKeysDone = 10, kStored = 11 };
__device__ __forceinline__ int dq_barrier(BackwardBarrier first, int stage, int warpgroup) {
  return first + 2 * stage + warpgroup;
}
inline constexpr int kDqThreads = 128 + 32;

/// The key block and query head of a block of threads, and the query blocks [first, last) that see it (4.2).
struct BackwardWork {
  int block_n, head, batch, first, last;
};

template <class Tile>
__device__ __forceinline__ BackwardWork backward_work(const BackwardParams& p, int ticket) {
  const int unit = ticket / p.blocks_n;
  const int in_unit = ticket % p.blocks_n;
  BackwardWork work;
  // A key block waits for those before it in the order of dQ. Unless all of a head surely run at once, they
  // must have started before: the ticket says so. Where they do, the longest go first and short ones fill the
  // end.
  work.block_n = p.descending != 0 && p.longest_first == 0 ? p.blocks_n - 1 - in_unit : in_unit;
  work.head = unit % p.heads_q;
  work.batch = unit / p.heads_q;
  work.first = 0;
  work.last = p.blocks_m;
  if constexpr (Tile::kCausal) {
    work.first = max(0, (work.block_n * Tile::kBlockN + p.seqlen_q - p.seqlen_k) / Tile::kBlockM);
  }
  return work;
}

/// How many key blocks add to a query block: those from the left up to its last visible key.
template <class Tile>
__device__ __forceinline__ int visiting_key_blocks(int block_m, int seqlen_q, int seqlen_k, int blocks_n) {
  if constexpr (!Tile::kCausal) return blocks_n;
  const int visible = (block_m + 1) * Tile::kBlockM + seqlen_k - seqlen_q;
  return max(0, min(blocks_n, (visible + Tile::kBlockN - 1) / Tile::kBlockN));
}

/// The loading thread: K and V once, then Q with LSE and dO with D, query blocks ascending.
template <class Tile>
__device__ __forceinline__ void backward_load(const BackwardParams& p, const BackwardShared<Tile>& shared,
                                              const BackwardWork& work) {
  const auto copy_tile = [&](std::uint32_t tile, int rows, const CUtensorMap* map, std::uint32_t barrier,
                             int token, int head) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      copy_box(tile + static_cast<std::uint32_t>(panel * rows * kRowBytes), map, barrier,
               panel * kPanelColumns, token, head, work.batch);
    }
  };
  const int kv_head = work.head / p.group;
  const std::int64_t unit = static_cast<std::int64_t>(work.batch) * p.heads_q + work.head;
  const float* lse = p.lse_log2 + unit * p.blocks_m * Tile::kBlockM;
  const float* dpsum = p.dpsum + unit * p.blocks_m * Tile::kBlockM;
  barrier_expect(shared.kv_full(), 2 * Tile::kKeyBytes);
  copy_tile(shared.k(), Tile::kBlockN, &p.k, shared.kv_full(), work.block_n * Tile::kBlockN, kv_head);
  copy_tile(shared.v(), Tile::kBlockN, &p.v, shared.kv_full(), work.block_n * Tile::kBlockN, kv_head);
  RingPosition<Tile::kStages> ring;
#pragma unroll 1  // few registers are left to this warp
  for (int m = work.first; m < work.last; ++m) {
    const int token = m * Tile::kBlockM;
    barrier_wait(shared.q_empty(ring.stage), ring.parity ^ 1);
    barrier_expect(shared.q_full(ring.stage), Tile::kQueryBytes + Tile::kStatisticBytes);
    copy_tile(shared.q(ring.stage), Tile::kBlockM, &p.q, shared.q_full(ring.stage), token, work.head);
    copy_bytes(shared.lse(ring.stage), lse + token, Tile::kStatisticBytes, shared.q_full(ring.stage));
    barrier_wait(shared.dout_empty(ring.stage), ring.parity ^ 1);
    barrier_expect(shared.dout_full(ring.stage), Tile::kQueryBytes + Tile::kStatisticBytes);
    copy_tile(shared.dout(ring.stage), Tile::kBlockM, &p.dout, shared.dout_full(ring.stage), token,
              work.head);
    copy_bytes(shared.dpsum(ring.stage), dpsum + token, Tile::kStatisticBytes, shared.dout_full(ring.stage));
    ring.advance();
  }
}

/// The adding warp: each query block's share of dQ goes to memory when it is this key block's turn [4.6]. The
/// first in the order writes instead of adding to a zero: a tensor-core result is never -0, so the bits are
/// the same.
template <class Tile>
__device__ __forceinline__ void backward_add_dq(const BackwardParams& p, const BackwardShared<Tile>& shared,
                                                const BackwardWork& work) {
  const bool leader = threadIdx.x % 32 == 0;
  const std::int64_t unit = static_cast<std::int64_t>(work.batch) * p.heads_q + work.head;
  int* turn = p.turns + unit * p.blocks_m;
  float* dq = p.dq_accum + unit * p.blocks_m * (Tile::kBlockM * Tile::kHeadDim);
  const auto all_empty = [&](int stage) {
#pragma unroll
    for (int w = 0; w < Tile::kWarpgroups; ++w) named_arrive(dq_barrier(kDqEmpty, stage, w), kDqThreads);
  };
  for (int stage = 0; stage < Tile::kDqStages; ++stage) all_empty(stage);
  int stage = 0;
#pragma unroll 1
  for (int m = work.first; m < work.last; ++m) {
    int position = work.block_n;
    if (p.descending != 0) {
      position = visiting_key_blocks<Tile>(m, p.seqlen_q, p.seqlen_k, p.blocks_n) - 1 - work.block_n;
    }
    if (leader) {
      wait_for_turn(turn + m, position);
      fence_async_global();
    }
    float* tile = dq + static_cast<std::int64_t>(m) * (Tile::kBlockM * Tile::kHeadDim);
#pragma unroll
    for (int w = 0; w < Tile::kWarpgroups; ++w) {
      named_sync(dq_barrier(kDqFull, stage, w), kDqThreads);
      if (leader) {
        float* slice = tile + w * (Tile::kDqSliceBytes / 4);
        if (position == 0) {
          store_bytes(slice, shared.dq(stage, w), Tile::kDqSliceBytes);
        } else {
          add_bytes(slice, shared.dq(stage, w), Tile::kDqSliceBytes);
        }
        copies_commit();
      }
    }
    if (leader) copies_wait_read();
    __syncwarp();
    all_empty(stage);
    if (leader) {
      copies_wait();  // performed, not only read: the next key block's addition must come after
      fence_async_global();
      pass_turn(turn + m);
    }
    __syncwarp();
    if constexpr (Tile::kDqStages == 2) stage ^= 1;
  }
}

/// Hides pairs that the mask hides [4.3.4]: this thread's keys are rows, its queries columns. Queries past
/// the end are not masked; their LSE of +inf makes P = 0.
template <class Tile>
__device__ __forceinline__ void mask_transposed(float (&s)[Tile::kBlockM / 2], int key, int first_query,
                                                const BackwardParams& p) {
  int first_visible[2];  // queries first_query + [first_visible, ...) see the key
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = key + 8 * i;
    first_visible[i] = Tile::kCausal ? j - first_query - p.seqlen_k + p.seqlen_q : 0;
    if (j >= p.seqlen_k) first_visible[i] = 0x7fffffff;
  }
#pragma unroll
  for (int v = 0; v < Tile::kBlockM / 8; ++v) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (8 * v + e % 2 < first_visible[e / 2]) s[4 * v + e] = minus_infinity();
    }
  }
}

/// One computing warpgroup.
template <class Tile, class Order>
__device__ __forceinline__ void backward_compute(const BackwardParams& p, const BackwardShared<Tile>& shared,
                                                 const BackwardWork& work, int warpgroup) {
  constexpr int kD = Tile::kHeadDim;
  constexpr int kM = Tile::kBlockM;
  constexpr int kN = Tile::kBlockN;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = thread % 32;
  const int tile_row = 64 * warpgroup;
  const int key = work.block_n * kN + tile_row + thread / 32 * 16 + lane / 4;
  const int column = 2 * (lane % 4);  // of the first of this thread's queries in a group of 8

  float dk[kD / 2];
  float dv[kD / 2];
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0.0F;

  const auto rows_of = [&](std::uint32_t tile) {
    return tile + static_cast<std::uint32_t>(tile_row * kRowBytes);
  };
  const ByColumns<kN> k{rows_of(shared.k())};
  const ByColumns<kN> v{rows_of(shared.v())};
  const bool split_columns = Tile::kPanels == Tile::kWarpgroups;
  const ByTokens<kN> k_by_tokens{shared.k() +
                                 static_cast<std::uint32_t>(split_columns ? warpgroup * kN * kRowBytes : 0)};
  // Every thread for itself: each has read statistics from the place that is given back.
  const auto release = [&](std::uint32_t barrier) { barrier_arrive(barrier); };

  barrier_wait(shared.kv_full(), 0);
  RingPosition<Tile::kStages> ring;
  int dq_stage = 0;
  const auto step = [&](int m, auto masked) {
    float s[kM / 2];
    float dp[kM / 2];
    std::uint32_t p_words[kM / 4];
    std::uint32_t ds_words[kM / 4];
    const int stage = ring.stage;

    // S and dP [1, 2].
    barrier_wait(shared.q_full(stage), ring.parity);
    wgmma_fence();
    multiply<kM, kD / 16>(s, k, ByColumns<kM>{shared.q(stage)});
    wgmma_commit();
    barrier_wait(shared.dout_full(stage), ring.parity);
    wgmma_fence();
    multiply<kM, kD / 16>(dp, v, ByColumns<kM>{shared.dout(stage)});
    wgmma_commit();
    wgmma_wait<1>();
    pin(s);

    // P [4, 5].
    if constexpr (decltype(masked)::value) mask_transposed<Tile>(s, key, m * kM + column, p);
    const std::uint32_t lse_at = shared.lse(stage) + static_cast<std::uint32_t>(4 * column);
    for_each_constant<kM / 8>([&](auto constant) {
      constexpr int kGroup = decltype(constant)::value;
      const float2 lse = load_pair<32 * kGroup>(lse_at);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[4 * kGroup + e];
        x = ex2(Order::backward_exponent(x, p.scale_log2, e % 2 == 0 ? lse.x : lse.y));
      }
    });
    wgmma_wait<0>();
    pin(dp);

    // dS from the unrounded P [6], and both casts [7].
    const std::uint32_t dpsum_at = shared.dpsum(stage) + static_cast<std::uint32_t>(4 * column);
    for_each_constant<kM / 8>([&](auto constant) {
      constexpr int kGroup = decltype(constant)::value;
      const float2 d = load_pair<32 * kGroup>(dpsum_at);
      float* const p_at = s + 4 * kGroup;
      float* const ds_at = dp + 4 * kGroup;
#pragma unroll
      for (int e = 0; e < 4; ++e) ds_at[e] = Order::score_gradient(p_at[e], ds_at[e], e % 2 == 0 ? d.x : d.y);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        p_words[2 * kGroup + i] = bf16_pair(p_at[2 * i], p_at[2 * i + 1]);
        ds_words[2 * kGroup + i] = bf16_pair(ds_at[2 * i], ds_at[2 * i + 1]);
      }
    });
    store_transposed<kM>(shared.ds(stage), warpgroup, ds_words);

    // dV [8].
    pin(dv);
    wgmma_fence();
    multiply_add<kD, kM / 16>(dv, p_words, ByTokens<kM>{shared.dout(stage)});
    wgmma_commit();

    // This key block's share of dQ, transposed [9]. dS lies in two buffers in turn: whoever writes one of
    // them has passed the barrier below since both warpgroups read it.
    fence_async_shared();
    named_sync(kDsWritten, 256);
    float dq[Tile::kDqRows / 2];
    const std::uint32_t ds_row =
        split_columns ? 0U : static_cast<std::uint32_t>(warpgroup * Tile::kDqRows * kRowBytes);
    wgmma_fence();
    multiply<Tile::kDqRows, kN / 16>(dq, k_by_tokens, ByColumns<kM>{shared.ds(stage) + ds_row});
    wgmma_commit();
    wgmma_wait<1>();
    pin(dv);
    release(shared.dout_empty(stage));

    // dK [10].
    pin(dk);
    wgmma_fence();
    multiply_add<kD, kM / 16>(dk, ds_words, ByTokens<kM>{shared.q(stage)});
    wgmma_commit();
    wgmma_wait<1>();
    pin(dq);
    named_sync(dq_barrier(kDqEmpty, dq_stage, warpgroup), kDqThreads);
    const std::uint32_t dq_at = shared.dq(dq_stage, warpgroup) + static_cast<std::uint32_t>(16 * thread);
    for_each_constant<Tile::kDqRows / 8>([&](auto constant) {
      constexpr int kGroup = decltype(constant)::value;
      store_quad<2048 * kGroup>(dq_at, dq + 4 * kGroup);
    });
    fence_async_shared();
    named_arrive(dq_barrier(kDqFull, dq_stage, warpgroup), kDqThreads);
    if constexpr (Tile::kDqStages == 2) dq_stage ^= 1;
    wgmma_wait<0>();
    pin(dk);
    release(shared.q_empty(stage));
    ring.advance();
  };
  // Query blocks that the mask's edge crosses come first, except in a key block that sticks out of the
  // sequence.
  const int keys_end = (work.block_n + 1) * kN;
  int masked_until = work.first;
  if (keys_end > p.seqlen_k) {
    masked_until = work.last;
  } else if (Tile::kCausal) {
    masked_until = min(work.last, max(work.first, (keys_end - 1 - p.seqlen_k + p.seqlen_q + kM - 1) / kM));
  }
#pragma unroll 1
  for (int m = work.first; m < masked_until; ++m) step(m, True{});
#pragma unroll 1
  for (int m = masked_until; m < work.last; ++m) step(m, False{});

    // The softmax scale enters dK here, dV never [4.5].
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) dk[i] = mul(dk[i], p.softmax_scale);
  if (p.group == 1) {
    // The tiles of K and V are no longer needed once both warpgroups are here: dK and dV leave through them.
    named_sync(kKeysDone, 256);
    store_accumulators<kN, kD>(shared.k(), tile_row, dk);
    store_accumulators<kN, kD>(shared.v(), tile_row, dv);
    fence_async_shared();
    named_sync(kStored + warpgroup, 128);
    if (thread == 0) {
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        const auto offset = static_cast<std::uint32_t>((panel * kN + tile_row) * kRowBytes);
        const int token = work.block_n * kN + tile_row;
        store_box(&p.dk, shared.k() + offset, panel * kPanelColumns, token, work.head, work.batch);
        store_box(&p.dv, shared.v() + offset, panel * kPanelColumns, token, work.head, work.batch);
      }
      copies_commit();
      copies_wait_read();
    }
    return;
  }
  // Query heads that share a KV head: their fp32 tiles are added by a kernel of its own, heads ascending.
  const std::int64_t unit = static_cast<std::int64_t>(work.batch) * p.heads_q + work.head;
  const std::int64_t first = (unit * p.blocks_n * kN + key) * kD + column;
#pragma unroll
  for (int g = 0; g < kD / 8; ++g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t at = first + 8 * i * kD + 8 * g;
      *reinterpret_cast<float2*>(p.dk_parts + at) = float2{dk[4 * g + 2 * i], dk[4 * g + 2 * i + 1]};
      *reinterpret_cast<float2*>(p.dv_parts + at) = float2{dv[4 * g + 2 * i], dv[4 * g + 2 * i + 1]};
    }
  }
}

template <class Tile, class Order>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const BackwardShared<Tile> shared{shared_address(memory)};
  if (threadIdx.x == 0) {
    *reinterpret_cast<int*>(memory + BackwardShared<Tile>::kTicket) = atomicAdd(p.ticket, 1);
    barrier_init(shared.kv_full(), 1);
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      barrier_init(shared.q_full(stage), 1);
      barrier_init(shared.dout_full(stage), 1);
      barrier_init(shared.q_empty(stage), 128 * Tile::kWarpgroups);
      barrier_init(shared.dout_empty(stage), 128 * Tile::kWarpgroups);
    }
    barrier_init_done();
  }
  __syncthreads();
  const int ticket = *reinterpret_cast<const int*>(memory + BackwardShared<Tile>::kTicket);
  const BackwardWork work = backward_work<Tile>(p, ticket);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    give_registers<Tile::kLoaderRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x == 0) backward_load<Tile>(p, shared, work);
    if (warp == 1) backward_add_dq<Tile>(p, shared, work);
  } else {
    take_registers<Tile::kComputeRegisters>();
    backward_compute<Tile, Order>(p, shared, work, warpgroup - 1);
  }
}

}  // namespace bitattn::gpu
