#pragma once
// The forward: out and lse of one tile of query rows a block of threads, in FlashAttention-3's operation
// order.
//
// One warpgroup loads (the copy engine, a ring of key and value tiles), kWarpgroups compute, each for 64
// query rows. Step numbers in brackets: docs/spec/fa3-operation-order.md 2. Scores of block n are multiplied
// while P.V of block n+1 still runs; that moves no rounding (2.6).

#include "gpu/kernels/async.cuh"
#include "gpu/kernels/order.cuh"
#include "gpu/kernels/params.hpp"
#include "gpu/kernels/wgmma.cuh"

namespace bitattn::gpu {

/// Where the rounded P of a warpgroup waits for its product with V.
enum class Weights { in_registers, in_shared_memory };

/// Tiles of a forward kernel. block_n is a matter of bits (2.2), the rest is not.
template <int kHeadDim_, int kBlockN_, int kWarpgroups_, bool kCausal_,
          Weights kWeights_ = Weights::in_registers>
struct ForwardTile {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr bool kCausal = kCausal_;
  static constexpr Weights kWeights = kWeights_;
  static constexpr int kBlockM = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kStages = 2;
  static constexpr int kPanels = kHeadDim / kPanelColumns;
  static constexpr int kQueryBytes = 64 * kHeadDim * 2;  ///< of a warpgroup
  static constexpr int kKeyBytes = kBlockN * kHeadDim * 2;
  static constexpr int kWeightBytes = kWeights == Weights::in_shared_memory ? 64 * kBlockN * 2 : 0;
  /// O leaves through the place of Q where there is no other.
  static constexpr bool kOwnOutput =
      kWarpgroups * (2 * kQueryBytes + kWeightBytes) + 2 * kStages * kKeyBytes <= 224 * 1024;
  static constexpr bool kExponentsFirst = kHeadDim == 128 && !kCausal;
  static constexpr int kLoaderRegisters = kWarpgroups == 2 ? 24 : 32;
  static constexpr int kComputeRegisters = kWarpgroups == 2 ? 240 : 160;
};

/// Offsets in shared memory.
template <class Tile>
struct ForwardShared {
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + Tile::kWarpgroups * Tile::kQueryBytes;
  static constexpr int kV = kK + Tile::kStages * Tile::kKeyBytes;
  static constexpr int kWeights = kV + Tile::kStages * Tile::kKeyBytes;
  static constexpr int kOutput = kWeights + Tile::kWarpgroups * Tile::kWeightBytes;
  static constexpr int kBarriers = kOutput + (Tile::kOwnOutput ? Tile::kWarpgroups * Tile::kQueryBytes : 0);
  static constexpr int kTickets = kBarriers + 8 * (2 * Tile::kWarpgroups + 4 * Tile::kStages + 4);
  static constexpr int kBytes = kTickets + 8;
  static_assert(Tile::kKeyBytes % kSwizzleBytes == 0 && Tile::kQueryBytes % kSwizzleBytes == 0 &&
                Tile::kWeightBytes % kSwizzleBytes == 0);
  static_assert(kBytes <= 232448, "the most a block of threads can have");

  std::uint32_t base;
  __device__ __forceinline__ std::uint32_t at(int offset) const {
    return base + static_cast<std::uint32_t>(offset);
  }
  __device__ __forceinline__ std::uint32_t q(int warpgroup) const {
    return at(kQ + warpgroup * Tile::kQueryBytes);
  }
  __device__ __forceinline__ std::uint32_t k(int stage) const { return at(kK + stage * Tile::kKeyBytes); }
  __device__ __forceinline__ std::uint32_t v(int stage) const { return at(kV + stage * Tile::kKeyBytes); }
  __device__ __forceinline__ std::uint32_t weights(int warpgroup) const {
    return at(kWeights + warpgroup * Tile::kWeightBytes);
  }
  __device__ __forceinline__ std::uint32_t output(int warpgroup) const {
    return at((Tile::kOwnOutput ? kOutput : kQ) + warpgroup * Tile::kQueryBytes);
  }
  __device__ __forceinline__ std::uint32_t barrier(int i) const { return at(kBarriers + 8 * i); }
  __device__ __forceinline__ std::uint32_t k_full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ std::uint32_t k_empty(int stage) const { return barrier(Tile::kStages + stage); }
  __device__ __forceinline__ std::uint32_t v_full(int stage) const {
    return barrier(2 * Tile::kStages + stage);
  }
  __device__ __forceinline__ std::uint32_t v_empty(int stage) const {
    return barrier(3 * Tile::kStages + stage);
  }
  __device__ __forceinline__ std::uint32_t ticket_full(int slot) const {
    return barrier(4 * Tile::kStages + slot);
  }
  __device__ __forceinline__ std::uint32_t ticket_empty(int slot) const {
    return barrier(4 * Tile::kStages + 2 + slot);
  }
  __device__ __forceinline__ std::uint32_t q_full(int warpgroup) const {
    return barrier(4 * Tile::kStages + 4 + warpgroup);
  }
  __device__ __forceinline__ std::uint32_t q_empty(int warpgroup) const {
    return barrier(4 * Tile::kStages + 4 + Tile::kWarpgroups + warpgroup);
  }
  __device__ __forceinline__ std::uint32_t ticket(int slot) const { return at(kTickets + 4 * slot); }
};

/// A tile of a head, and the key blocks [0, last) that its rows may see (2.3).
struct ForwardWork {
  int block_m, head, batch, last;
};

/// The tile of a ticket. Heads come in groups whose keys and values fit the L2 cache; under a causal mask the
/// longest tiles of a group come first.
template <class Tile>
__device__ __forceinline__ ForwardWork forward_work(const ForwardParams& p, int ticket) {
  const int per_group = p.heads_per_group * p.blocks_m;
  const int group = ticket / per_group;
  const int in_group = ticket % per_group;
  int block_m, unit;
  if constexpr (Tile::kCausal) {
    const int heads = min(p.heads_per_group, p.batch * p.heads_q - group * p.heads_per_group);
    block_m = p.blocks_m - 1 - in_group / heads;
    unit = group * p.heads_per_group + in_group % heads;
  } else {
    block_m = in_group % p.blocks_m;
    unit = group * p.heads_per_group + in_group / p.blocks_m;
  }
  ForwardWork work{block_m, unit % p.heads_q, unit / p.heads_q,
                   (p.seqlen_k + Tile::kBlockN - 1) / Tile::kBlockN};
  if constexpr (Tile::kCausal) {
    const int visible = (block_m + 1) * Tile::kBlockM + p.seqlen_k - p.seqlen_q;  // of the tile's last row
    work.last = max(0, min(work.last, (visible + Tile::kBlockN - 1) / Tile::kBlockN));
  }
  return work;
}

/// The loading thread: for each tile Q, and K and V blocks from right to left, as far ahead as there is room.
/// It also draws the tickets; the computing warpgroups read them from two slots.
template <class Tile>
__device__ __forceinline__ void forward_load(const ForwardParams& p, const ForwardShared<Tile>& shared) {
  RingPosition<2> slots;
  RingPosition<Tile::kStages> ring;
  int q_parity = 1;
  const auto copy_tile = [&](std::uint32_t tile, int rows, const CUtensorMap* map, std::uint32_t barrier,
                             int token, int head, int batch) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      copy_box(tile + static_cast<std::uint32_t>(panel * rows * kRowBytes), map, barrier,
               panel * kPanelColumns, token, head, batch);
    }
  };
  int ticket = static_cast<int>(blockIdx.x);
  while (true) {
    barrier_wait(shared.ticket_empty(slots.stage), slots.parity ^ 1);
    store_word(shared.ticket(slots.stage), ticket);
    barrier_arrive(shared.ticket_full(slots.stage));
    slots.advance();
    if (ticket >= p.tiles) return;
    const ForwardWork work = forward_work<Tile>(p, ticket);
    // The counter returns to zero by itself: as many tickets are drawn as there are tiles.
    ticket = static_cast<int>(gridDim.x + atomicInc(p.ticket_counter, static_cast<unsigned>(p.tiles - 1)));
    if (work.last == 0) continue;
    const int kv_head = work.head / p.group;
#pragma unroll 1
    for (int n = work.last - 1; n >= 0; --n) {
      barrier_wait(shared.k_empty(ring.stage), ring.parity ^ 1);
      barrier_expect(shared.k_full(ring.stage), Tile::kKeyBytes);
      copy_tile(shared.k(ring.stage), Tile::kBlockN, &p.k, shared.k_full(ring.stage), n * Tile::kBlockN,
                kv_head, work.batch);
      if (n == work.last - 1) {
#pragma unroll 1
        for (int w = 0; w < Tile::kWarpgroups; ++w) {
          barrier_wait(shared.q_empty(w), q_parity);
          barrier_expect(shared.q_full(w), Tile::kQueryBytes);
          copy_tile(shared.q(w), 64, &p.q, shared.q_full(w), work.block_m * Tile::kBlockM + 64 * w, work.head,
                    work.batch);
        }
        q_parity ^= 1;
      }
      barrier_wait(shared.v_empty(ring.stage), ring.parity ^ 1);
      barrier_expect(shared.v_full(ring.stage), Tile::kKeyBytes);
      copy_tile(shared.v(ring.stage), Tile::kBlockN, &p.v, shared.v_full(ring.stage), n * Tile::kBlockN,
                kv_head, work.batch);
      ring.advance();
    }
  }
}

/// What a thread keeps of its two rows (16*warp + lane/4 and 8 below) from block to block.
struct RowState {
  float max[2];
  float sum[2];  ///< over this thread's own columns: one of the four partial sums of a row [2.5.8]
};

/// Hides scores that the mask hides [2.4].
template <class Tile, bool kTestLength>
__device__ __forceinline__ void mask_scores(float (&s)[Tile::kBlockN / 2], int first_key, int first_row,
                                            const ForwardParams& p) {
  const int column = first_key + 2 * (static_cast<int>(threadIdx.x) % 4);
  int last[2];  // of this thread's columns, those below are visible
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    last[i] = kTestLength ? p.seqlen_k - column : 0x7fffffff;
    if constexpr (Tile::kCausal)
      last[i] = min(last[i], first_row + 8 * i + 1 + p.seqlen_k - p.seqlen_q - column);
  }
#pragma unroll
  for (int v = 0; v < Tile::kBlockN / 8; ++v) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (8 * v + e % 2 >= last[e / 2]) s[4 * v + e] = minus_infinity();
    }
  }
}

/// Scores of one key block become exponentials; row max and sums go on [2.5.4 to 2.5.8]. alpha: the factor
/// for what was summed before. kCheckInfinity: rows that have seen no key yet are possible (the kernel's
/// masking steps).
template <class Tile, class Order, bool kFirst, bool kCheckInfinity>
__device__ __forceinline__ void softmax_step(float (&s)[Tile::kBlockN / 2], RowState& row, float (&alpha)[2],
                                             float c) {
  constexpr int kGroups = Tile::kBlockN / 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float previous = row.max[i];
    float m = kFirst ? s[2 * i] : max_ftz(previous, s[2 * i]);
    float m_odd = s[2 * i + 1];  // two chains: the order of a maximum is free
#pragma unroll
    for (int v = 1; v < kGroups; ++v) {
      m = max_ftz(m, s[4 * v + 2 * i]);
      m_odd = max_ftz(m_odd, s[4 * v + 2 * i + 1]);
    }
    m = max_ftz(m, m_odd);
    m = max_ftz(m, __shfl_xor_sync(0xffffffffU, m, 2));
    m = max_ftz(m, __shfl_xor_sync(0xffffffffU, m, 1));
    row.max[i] = m;
    const bool empty = kCheckInfinity && m == minus_infinity();
    if constexpr (!kFirst) alpha[i] = ex2(Order::rescale_exponent(previous, empty ? 0.0F : m, c));
    const float reference = empty ? 0.0F : Order::forward_reference(m, c);
#pragma unroll
    for (int v = 0; v < kGroups; ++v) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        float& x = s[4 * v + 2 * i + u];
        x = ex2(Order::forward_exponent(x, c, reference));
      }
    }
    // The sum's rescale is fused with its first addition.
    float sum = kFirst ? s[2 * i] : fma(alpha[i], row.sum[i], s[2 * i]);
    sum = add(sum, s[2 * i + 1]);
#pragma unroll
    for (int v = 1; v < kGroups; ++v) {
      sum = add(sum, s[4 * v + 2 * i]);
      sum = add(sum, s[4 * v + 2 * i + 1]);
    }
    row.sum[i] = sum;
  }
}

template <int kCount>
__device__ __forceinline__ void scale_rows(float (&o)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) o[e] = mul(o[e], factor[e % 4 / 2]);
}

/// Turns of the warpgroups: while one multiplies, the others do their exponentials. No matter of bits.
template <class Tile>
struct Turns {
  int warpgroup;
  static constexpr int kThreads = 256;
  __device__ __forceinline__ void begin() const {
    if (warpgroup == 0) named_arrive(1, kThreads);
  }
  __device__ __forceinline__ void wait() const { named_sync(1 + warpgroup, kThreads); }
  __device__ __forceinline__ void pass_on() const {
    named_arrive(1 + (warpgroup + 1) % Tile::kWarpgroups, kThreads);
  }
};

/// A tile whose rows see no key: O = +0, LSE = -inf (2.3). Each warpgroup writes its 64 rows.
template <class Tile>
__device__ __forceinline__ void forward_empty(const ForwardParams& p, const ForwardWork& work,
                                              int warpgroup) {
  constexpr int kChunks = Tile::kHeadDim / 8;
  const int first = work.block_m * Tile::kBlockM + 64 * warpgroup;
  const int rows = min(64, p.seqlen_q - first);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  for (int i = thread; i < rows * kChunks; i += 128) {
    auto* out = p.out_data + work.batch * p.out_strides.batch +
                static_cast<std::int64_t>(first + i / kChunks) * p.out_strides.token +
                work.head * p.out_strides.head + i % kChunks * 8;
    *reinterpret_cast<uint4*>(out) = uint4{0, 0, 0, 0};
  }
  float* lse = p.lse + (static_cast<std::int64_t>(work.batch) * p.heads_q + work.head) * p.seqlen_q + first;
  for (int i = thread; i < rows; i += 128) lse[i] = minus_infinity();
}

/// A computing warpgroup's places in the rings; they go on from tile to tile.
template <class Tile>
struct ForwardPlaces {
  RingPosition<Tile::kStages> k, v;
  int q_parity = 0;
};

/// One computing warpgroup, one tile.
template <class Tile, class Order>
__device__ __forceinline__ void forward_compute(const ForwardParams& p, const ForwardShared<Tile>& shared,
                                                const ForwardWork& work, const Turns<Tile>& turns,
                                                ForwardPlaces<Tile>& places) {
  constexpr int kD = Tile::kHeadDim;
  constexpr int kN = Tile::kBlockN;
  constexpr bool kShared = Tile::kWeights == Weights::in_shared_memory;
  const int warpgroup = turns.warpgroup;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = thread % 32;
  const int first_row = work.block_m * Tile::kBlockM + 64 * warpgroup;
  const int query = first_row + thread / 32 * 16 + lane / 4;

  float o[kD / 2];
  float s[kN / 2];
  std::uint32_t p_words[kShared ? 4 : kN / 4];
  RowState row;
  float alpha[2] = {1.0F, 1.0F};
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) o[i] = 0.0F;

  const ByColumns<64> q{shared.q(warpgroup)};
  const auto together = [&] { named_sync(4 + warpgroup, 128); };
  const auto multiply_scores = [&] {
    wgmma_fence();
    multiply<kN, kD / 16>(s, q, ByColumns<kN>{shared.k(places.k.stage)});
    wgmma_commit();
  };
  const auto multiply_values = [&] {
    const ByTokens<kN> v{shared.v(places.v.stage)};
    wgmma_fence();
    if constexpr (kShared) {
      multiply_add<kD, kN / 16>(o, ByColumns<64>{shared.weights(warpgroup)}, v);
    } else {
      multiply_add<kD, kN / 16>(o, p_words, v);
    }
    wgmma_commit();
  };
  const auto keep_weights = [&] {
    if constexpr (kShared) {
      together();  // the product before has read the place
      store_accumulators<64, kN>(shared.weights(warpgroup), 0, s);
      fence_async_shared();
      together();
    } else {
      pack_operand(s, p_words);
    }
  };
  const auto release = [&](std::uint32_t barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };

  // The rightmost block: tests the length too, and starts maxima and sums.
  barrier_wait(shared.q_full(warpgroup), places.q_parity);
  barrier_wait(shared.k_full(places.k.stage), places.k.parity);
  multiply_scores();
  wgmma_wait<0>();
  pin(s);
  release(shared.k_empty(places.k.stage));
  places.k.advance();
  int n = work.last - 1;
  mask_scores<Tile, true>(s, n * kN, query, p);
  softmax_step<Tile, Order, true, true>(s, row, alpha, p.scale_log2);
  keep_weights();

  // One step to the left: scores of block n beside P.V of block n+1.
  const auto step = [&](auto masked) {
    constexpr bool kMasked = decltype(masked)::value;
    barrier_wait(shared.k_full(places.k.stage), places.k.parity);
    turns.wait();
    pin(o);
    multiply_scores();
    barrier_wait(shared.v_full(places.v.stage), places.v.parity);
    multiply_values();
    turns.pass_on();
    wgmma_wait<1>();
    pin(s);
    release(shared.k_empty(places.k.stage));
    places.k.advance();
    if constexpr (kMasked) mask_scores<Tile, false>(s, n * kN, query, p);
    softmax_step<Tile, Order, false, kMasked>(s, row, alpha, p.scale_log2);
    // Long since over; but the assembler moves no exponential behind a wait in a loop, as it else does, so
    // that they run beside the product. Whether that pays was measured (docs/evidence/kernels.md).
    if constexpr (Tile::kExponentsFirst) barrier_wait(shared.v_full(places.v.stage), places.v.parity);
    wgmma_wait<0>();
    pin(o);
    release(shared.v_empty(places.v.stage));
    places.v.advance();
    scale_rows(o, alpha);
    keep_weights();
  };
  --n;
  if constexpr (Tile::kCausal) {
    const int masked_from = max(0, (work.block_m * Tile::kBlockM + p.seqlen_k - p.seqlen_q) / kN);
#pragma unroll 1
    for (; n >= masked_from; --n) step(True{});
  }
#pragma unroll 1
  for (; n >= 0; --n) step(False{});

  if constexpr (Tile::kOwnOutput) release(shared.q_empty(warpgroup));
  places.q_parity ^= 1;
  barrier_wait(shared.v_full(places.v.stage), places.v.parity);
  pin(o);
  multiply_values();

  // Normalisation [2.7]: the four partial sums of a row meet across, then beside.
  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float total = row.sum[i];
    total = add(total, __shfl_xor_sync(0xffffffffU, total, 2));
    total = add(total, __shfl_xor_sync(0xffffffffU, total, 1));
    const bool usable = !(total == 0.0F || total != total);
    inverse[i] = usable ? rcp(total) : 0.0F;
    const float lse = usable ? Order::lse(row.max[i], total, p.scale_log2) : minus_infinity();
    if (lane % 4 == 0 && query + 8 * i < p.seqlen_q) {
      p.lse[(static_cast<std::int64_t>(work.batch) * p.heads_q + work.head) * p.seqlen_q + query + 8 * i] =
          lse;
    }
  }
  wgmma_wait<0>();
  pin(o);
  release(shared.v_empty(places.v.stage));
  places.v.advance();
  scale_rows(o, inverse);

  // O leaves through shared memory, once the tile before has left it and (where it is Q's place) all have
  // read Q.
  if (Tile::kOwnOutput && thread == 0) copies_wait_read();
  together();
  store_accumulators<64, kD>(shared.output(warpgroup), 0, o);
  fence_async_shared();
  together();
  if (thread == 0 && first_row < p.seqlen_q) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      store_box(&p.out, shared.output(warpgroup) + static_cast<std::uint32_t>(panel * 64 * kRowBytes),
                panel * kPanelColumns, first_row, work.head, work.batch);
    }
    copies_commit();
    if constexpr (!Tile::kOwnOutput) copies_wait_read();
  }
  if constexpr (!Tile::kOwnOutput) {
    if (thread == 0) barrier_arrive(shared.q_empty(warpgroup));
  }
}

template <class Tile, class Order>
__global__ void __launch_bounds__(Tile::kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const ForwardShared<Tile> shared{shared_address(memory)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      barrier_init(shared.k_full(stage), 1);
      barrier_init(shared.v_full(stage), 1);
      barrier_init(shared.k_empty(stage), 4 * Tile::kWarpgroups);
      barrier_init(shared.v_empty(stage), 4 * Tile::kWarpgroups);
    }
    for (int slot = 0; slot < 2; ++slot) {
      barrier_init(shared.ticket_full(slot), 1);
      barrier_init(shared.ticket_empty(slot), 4 * Tile::kWarpgroups);
    }
    for (int w = 0; w < Tile::kWarpgroups; ++w) {
      barrier_init(shared.q_full(w), 1);
      barrier_init(shared.q_empty(w), Tile::kOwnOutput ? 4 : 1);
    }
    barrier_init_done();
  }
  __syncthreads();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    give_registers<Tile::kLoaderRegisters>();
    if (threadIdx.x == 0) forward_load<Tile>(p, shared);
  } else {
    take_registers<Tile::kComputeRegisters>();
    const Turns<Tile> turns{warpgroup - 1};
    turns.begin();
    RingPosition<2> slots;
    ForwardPlaces<Tile> places;
    while (true) {
      barrier_wait(shared.ticket_full(slots.stage), slots.parity);
      const int ticket = load_word(shared.ticket(slots.stage));
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.ticket_empty(slots.stage));
      slots.advance();
      if (ticket >= p.tiles) break;
      const ForwardWork work = forward_work<Tile>(p, ticket);
      if (work.last == 0) {
        forward_empty<Tile>(p, work, turns.warpgroup);
      } else {
        forward_compute<Tile, Order>(p, shared, work, turns, places);
      }
    }
    if (threadIdx.x % 128 == 0) copies_wait_read();
  }
}

}  // namespace bitattn::gpu
