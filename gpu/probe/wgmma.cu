// Tensor-core steps through wgmma: one warpgroup, one tile of 64 rows and N columns. Built for sm_90a alone.
//
// Every tile stands twice in shared memory: as plain rows, which the model reads, and as the core matrices of
// 8 lines by 16 bytes that the instruction reads (no swizzle). A core matrix is 128 bytes; the two along k
// are neighbours, groups of 8 lines follow every 256 bytes.

#include "gpu/probe/products.cuh"

namespace bitattn::gpu::probe {

namespace {

constexpr int kRows = 64;
constexpr int kThreads = 256;  ///< the first warpgroup multiplies, all compare
constexpr int kChain = 4;
constexpr int kStepBytes = 32;  ///< of one line in one step
constexpr int kCoreBytes = 128;
constexpr int kGroupBytes = 256;

enum class Source { shared, registers };
enum class Major { k, line };  ///< which neighbours lie side by side in memory

struct Bf16Type {
  using A = arith::Bf16;
  using B = arith::Bf16;
  using Word = std::uint16_t;
  static constexpr arith::TensorCoreRule kRule{25, 23, -133};
};
struct F16Type {
  using A = arith::F16;
  using B = arith::F16;
  using Word = std::uint16_t;
  static constexpr arith::TensorCoreRule kRule{25, 23, -133};
};
template <class FormatA, class FormatB>
struct Fp8Type {
  using A = FormatA;
  using B = FormatB;
  using Word = std::uint8_t;
  static constexpr arith::TensorCoreRule kRule{13, 13, -133};
};
using E4m3Type = Fp8Type<arith::E4m3, arith::E4m3>;
using E5m2Type = Fp8Type<arith::E5m2, arith::E5m2>;
using E4m3E5m2Type = Fp8Type<arith::E4m3, arith::E5m2>;
using E5m2E4m3Type = Fp8Type<arith::E5m2, arith::E4m3>;

template <int N>
struct Wgmma;

#define BITATTN_UNWRAP(...) __VA_ARGS__
#define BITATTN_IS(Wanted) (std::is_same_v<Type, Wanted>)

// One wgmma, accumulators in d. `scale_d` 0: the old accumulators are ignored. 8-bit operands are always
// k-major, so their instruction has no transposition flags.
#define BITATTN_SHARED_16(N, registers, outputs, i0, i1, i2, i3, i4, types)                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
               "k16.f32." types " {" registers "}, " i0 ", " i1 ", p, 1, 1, " i3 ", " i4 ";\n}"    \
               : BITATTN_UNWRAP outputs                                                            \
               : "l"(a), "l"(b), "r"(scale_d), "n"(transposed_a), "n"(transposed_b))
#define BITATTN_SHARED_8(N, registers, outputs, i0, i1, i2, types)                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
               "k32.f32." types " {" registers "}, " i0 ", " i1 ", p, 1, 1;\n}"                    \
               : BITATTN_UNWRAP outputs                                                            \
               : "l"(a), "l"(b), "r"(scale_d))
#define BITATTN_REGISTERS_16(N, registers, outputs, i0, i1, i2, i3, i4, i5, i6, types)                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N         \
               "k16.f32." types " {" registers "}, {" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", p, 1, 1, " i6 \
               ";\n}"                                                                                      \
               : BITATTN_UNWRAP outputs                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(transposed_b))
#define BITATTN_REGISTERS_8(N, registers, outputs, i0, i1, i2, i3, i4, i5, types)                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N        \
               "k32.f32." types " {" registers "}, {" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", p, 1, 1;\n}" \
               : BITATTN_UNWRAP outputs                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d))

#define BITATTN_WGMMA_SHAPE(N, registers, outputs, i0, i1, i2, i3, i4, i5, i6, i7)                    \
  template <>                                                                                         \
  struct Wgmma<N> {                                                                                   \
    template <class Type, int transposed_a, int transposed_b>                                         \
    __device__ static void shared(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, int scale_d) { \
      if constexpr (BITATTN_IS(Bf16Type)) {                                                           \
        BITATTN_SHARED_16(N, registers, outputs, i0, i1, i2, i3, i4, "bf16.bf16");                    \
      } else if constexpr (BITATTN_IS(F16Type)) {                                                     \
        BITATTN_SHARED_16(N, registers, outputs, i0, i1, i2, i3, i4, "f16.f16");                      \
      } else if constexpr (BITATTN_IS(E4m3Type)) {                                                    \
        BITATTN_SHARED_8(N, registers, outputs, i0, i1, i2, "e4m3.e4m3");                             \
      } else if constexpr (BITATTN_IS(E5m2Type)) {                                                    \
        BITATTN_SHARED_8(N, registers, outputs, i0, i1, i2, "e5m2.e5m2");                             \
      } else if constexpr (BITATTN_IS(E4m3E5m2Type)) {                                                \
        BITATTN_SHARED_8(N, registers, outputs, i0, i1, i2, "e4m3.e5m2");                             \
      } else {                                                                                        \
        BITATTN_SHARED_8(N, registers, outputs, i0, i1, i2, "e5m2.e4m3");                             \
      }                                                                                               \
    }                                                                                                 \
    template <class Type, int transposed_b>                                                           \
    __device__ static void from_registers(float (&d)[N / 2], const std::uint32_t* a, std::uint64_t b, \
                                          int scale_d) {                                              \
      if constexpr (BITATTN_IS(Bf16Type)) {                                                           \
        BITATTN_REGISTERS_16(N, registers, outputs, i0, i1, i2, i3, i4, i5, i6, "bf16.bf16");         \
      } else if constexpr (BITATTN_IS(F16Type)) {                                                     \
        BITATTN_REGISTERS_16(N, registers, outputs, i0, i1, i2, i3, i4, i5, i6, "f16.f16");           \
      } else if constexpr (BITATTN_IS(E4m3Type)) {                                                    \
        BITATTN_REGISTERS_8(N, registers, outputs, i0, i1, i2, i3, i4, i5, "e4m3.e4m3");              \
      } else {                                                                                        \
        BITATTN_REGISTERS_8(N, registers, outputs, i0, i1, i2, i3, i4, i5, "e5m2.e5m2");              \
      }                                                                                               \
    }                                                                                                 \
  };
#include "gpu/probe/wgmma_shapes.inc"
#undef BITATTN_WGMMA_SHAPE

/// Where things lie in shared memory, for a chain of `steps`.
struct Places {
  int stride;  ///< bytes of a plain line, padded so that lines start in different banks
  int a, b, a_core, b_core, c, d, total;

  __host__ __device__ Places(int columns, int steps) {
    stride = steps * kStepBytes + 4;
    int at = 0;
    a_core = at;
    at += kRows * kStepBytes * steps;
    b_core = at;
    at += columns * kStepBytes * steps;
    c = at;
    at += kRows * columns * 4;
    d = at;
    at += kRows * columns * 4;
    a = at;
    at += kRows * stride;
    b = at;
    at += columns * stride;
    total = at;
  }
};

/// Byte offset of an element in the core matrices of its step.
template <class Word>
__device__ int core_offset(Major major, int line, int k) {
  if (major == Major::k) {
    const int byte = k * static_cast<int>(sizeof(Word));
    return line / 8 * kGroupBytes + byte / 16 * kCoreBytes + line % 8 * 16 + byte % 16;
  }
  return line / 8 * kGroupBytes + k / 8 * kCoreBytes + k % 8 * 16 + line % 8 * static_cast<int>(sizeof(Word));
}

__device__ std::uint64_t descriptor(const unsigned char* core) {
  const std::uint64_t address = static_cast<std::uint32_t>(__cvta_generic_to_shared(core));
  return (address & 0x3ffffU) >> 4U | static_cast<std::uint64_t>(kCoreBytes >> 4) << 16U |
         static_cast<std::uint64_t>(kGroupBytes >> 4) << 32U;
}

/// Fills in the operands of a tile, both ways, and the accumulators.
template <class Type>
__device__ __noinline__ void make_tile(unsigned char* memory, const Places& places, const TileShape& shape,
                                       int columns, int steps, bool zero_start, Major major_a,
                                       Major major_b) {
  using Word = typename Type::Word;
  constexpr int kK = kStepBytes / static_cast<int>(sizeof(Word));
  const int depth = kK * steps;
  for (int i = static_cast<int>(threadIdx.x); i < (kRows + columns) * depth; i += kThreads) {
    const int line = i / depth;
    const int k = i % depth;
    const bool is_a = line < kRows;
    const int within = is_a ? line : line - kRows;
    const Word word = static_cast<Word>(is_a ? operand_word<typename Type::A, Operand::a>(shape, within, k)
                                             : operand_word<typename Type::B, Operand::b>(shape, within, k));
    reinterpret_cast<Word*>(memory + (is_a ? places.a : places.b) + within * places.stride)[k] = word;
    const int core = (is_a ? places.a_core : places.b_core) + k / kK * (is_a ? kRows : columns) * kStepBytes;
    *reinterpret_cast<Word*>(memory + core + core_offset<Word>(is_a ? major_a : major_b, within, k % kK)) =
        word;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kRows * columns; i += kThreads) {
    std::uint32_t products = 0;
    if (needs_products(shape) && !zero_start) {
      products = chain<typename Type::A, typename Type::B>(
          reinterpret_cast<const Word*>(memory + places.a + i / columns * places.stride),
          reinterpret_cast<const Word*>(memory + places.b + i % columns * places.stride), kK, steps, 0U,
          Type::kRule);
    }
    reinterpret_cast<std::uint32_t*>(memory + places.c)[i] =
        accumulator_word(shape, i / columns, i % columns, products);
  }
}

template <class Type>
__device__ __noinline__ void compare_tile(const unsigned char* memory, const Places& places,
                                          std::uint64_t tile, int columns, const Launch& launch,
                                          unsigned long long& mismatches, unsigned long long& first) {
  using Word = typename Type::Word;
  constexpr int kK = kStepBytes / static_cast<int>(sizeof(Word));
  for (int i = static_cast<int>(threadIdx.x); i < kRows * columns; i += kThreads) {
    const std::uint32_t c =
        launch.zero_start ? 0U : reinterpret_cast<const std::uint32_t*>(memory + places.c)[i];
    const std::uint32_t chip = reinterpret_cast<const std::uint32_t*>(memory + places.d)[i];
    const std::uint32_t model = chain<typename Type::A, typename Type::B>(
        reinterpret_cast<const Word*>(memory + places.a + i / columns * places.stride),
        reinterpret_cast<const Word*>(memory + places.b + i % columns * places.stride), kK, launch.steps, c,
        launch.rule);
    compare_product(launch,
                    tile * static_cast<std::uint64_t>(kRows * columns) + static_cast<std::uint64_t>(i), c,
                    chip, model, mismatches, first);
  }
}

template <class Type, int N, int kSteps, Source source, Major major_a, Major major_b>
__global__ void __launch_bounds__(kThreads, 1) products(const Launch launch) {
  using Word = typename Type::Word;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Places places(N, kSteps);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = 16 * (warp % 4) + lane / 4;
  unsigned long long mismatches = 0;
  unsigned long long first = kNoCase;
  for (std::uint64_t t = blockIdx.x; t < launch.count; t += gridDim.x) {
    const std::uint64_t tile = launch.first + t;
    const TileShape shape =
        tile_shape<typename Type::A, typename Type::B>(tile, kStepBytes / static_cast<int>(sizeof(Word)));
    make_tile<Type>(memory, places, shape, N, kSteps, launch.zero_start, major_a, major_b);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (warp < 4) {
      float d[N / 2];
      const float* const c = reinterpret_cast<const float*>(memory + places.c);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        d[i] = c[(row + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * (lane % 4) + i % 2];
      }
      std::uint32_t a[kSteps][4] = {};
      if constexpr (source == Source::registers) {
        // Bytes 4q.. of a line's step, lines row and row + 8, then the same 16 bytes further on.
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a[s][i] = *reinterpret_cast<const std::uint32_t*>(memory + places.a +
                                                              (row + 8 * (i % 2)) * places.stride +
                                                              s * kStepBytes + 16 * (i / 2) + 4 * (lane % 4));
          }
        }
      }
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const std::uint64_t b = descriptor(memory + places.b_core + s * N * kStepBytes);
        const int scale_d = s > 0 || !launch.zero_start ? 1 : 0;
        if constexpr (source == Source::registers) {
          Wgmma<N>::template from_registers<Type, major_b == Major::line ? 1 : 0>(d, a[s], b, scale_d);
        } else {
          Wgmma<N>::template shared<Type, major_a == Major::line ? 1 : 0, major_b == Major::line ? 1 : 0>(
              d, descriptor(memory + places.a_core + s * kRows * kStepBytes), b, scale_d);
        }
      }
      asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
      float* const results = reinterpret_cast<float*>(memory + places.d);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        results[(row + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = d[i];
      }
    }
    __syncthreads();
    compare_tile<Type>(memory, places, tile, N, launch, mismatches, first);
    __syncthreads();
  }
  add_to_tally(launch.tally, mismatches, first);
}

template <class Type, int N, int kSteps, Source source = Source::shared, Major major_a = Major::k,
          Major major_b = Major::k>
void unit(Run& run, Unit& made, std::uint64_t count, bool zero_start, arith::TensorCoreRule rule) {
  Launch what;
  what.steps = kSteps;
  what.zero_start = zero_start;
  what.rule = rule;
  const int bytes = Places(N, kSteps).total;
  const auto kernel = products<Type, N, kSteps, source, major_a, major_b>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "asking for shared memory");
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads,
                                                      static_cast<std::size_t>(bytes)),
        "asking for the occupancy");
  if (blocks == 0)
    throw Error("wgmma probe: no block of " + std::to_string(bytes) + " bytes of shared memory fits");
  const dim3 grid(static_cast<unsigned>(run.device().multiprocessors * blocks));
  product_unit<typename Type::A, typename Type::B>(
      made, count, kRows, N, kStepBytes / static_cast<int>(sizeof(typename Type::Word)), what,
      [&](const Launch& l) {
        kernel<<<grid, kThreads, static_cast<std::size_t>(bytes)>>>(l);
        check(cudaGetLastError(), made.name.c_str());
      });
}

template <class Type, int N, int kSteps = 1, Source source = Source::shared, Major major_a = Major::k,
          Major major_b = Major::k>
void tested(Run& run, const std::string& name, std::uint64_t count, bool zero_start = false) {
  Unit& made = run.begin("wgmma", name, kSteps > 1 ? "chains of 4" : "24 kinds");
  unit<Type, N, kSteps, source, major_a, major_b>(run, made, run.scaled(count), zero_start, Type::kRule);
}

/// BF16, every width from N up.
template <int N>
void every_width(Run& run, std::uint64_t count) {
  tested<Bf16Type, N>(run, "m64n" + std::to_string(N) + "k16 bf16", count);
  if constexpr (N < 256) every_width<N + 8>(run, count);
}

}  // namespace

void wgmma_units(Run& run) {
  if (!run.device().is_hopper()) {
    run.untested("wgmma", "all", "needs sm_90a");
    return;
  }
  constexpr std::uint64_t kMillion = 1'000'000;
  constexpr Source kRegisters = Source::registers;
  tested<Bf16Type, 64>(run, "m64n64k16 bf16, A and B in shared memory", 3000 * kMillion);
  tested<Bf16Type, 64, 1, kRegisters>(run, "m64n64k16 bf16, A in registers", 1000 * kMillion);
  tested<Bf16Type, 64, kChain>(run, "m64n64k16 bf16, chained", 500 * kMillion);
  tested<Bf16Type, 64, kChain, kRegisters>(run, "m64n64k16 bf16, A in registers, chained", 250 * kMillion);
  tested<Bf16Type, 64>(run, "m64n64k16 bf16, scale-d 0", 500 * kMillion, true);
  tested<Bf16Type, 64, 1, kRegisters>(run, "m64n64k16 bf16, A in registers, scale-d 0", 250 * kMillion, true);
  tested<Bf16Type, 64, kChain>(run, "m64n64k16 bf16, scale-d 0, chained", 250 * kMillion, true);
  tested<Bf16Type, 64, 1, Source::shared, Major::k, Major::line>(run, "m64n64k16 bf16, B N-major",
                                                                 300 * kMillion);
  tested<Bf16Type, 64, 1, Source::shared, Major::line, Major::k>(run, "m64n64k16 bf16, A M-major",
                                                                 300 * kMillion);
  tested<Bf16Type, 64, 1, Source::shared, Major::line, Major::line>(
      run, "m64n64k16 bf16, A M-major, B N-major", 300 * kMillion);
  tested<Bf16Type, 64, 1, kRegisters, Major::k, Major::line>(run, "m64n64k16 bf16, A in registers, B N-major",
                                                             300 * kMillion);
  tested<Bf16Type, 128, kChain, kRegisters>(run, "m64n128k16 bf16, A in registers, chained", 250 * kMillion);
  every_width<8>(run, 120 * kMillion);
  tested<F16Type, 64>(run, "m64n64k16 f16", 500 * kMillion);
  tested<F16Type, 64, 1, kRegisters>(run, "m64n64k16 f16, A in registers", 250 * kMillion);
  tested<E4m3Type, 64>(run, "m64n64k32 e4m3 x e4m3", 500 * kMillion);
  tested<E4m3Type, 64, 1, kRegisters>(run, "m64n64k32 e4m3 x e4m3, A in registers", 250 * kMillion);
  tested<E4m3Type, 64, kChain>(run, "m64n64k32 e4m3 x e4m3, chained", 125 * kMillion);
  tested<E5m2Type, 64>(run, "m64n64k32 e5m2 x e5m2", 500 * kMillion);
  tested<E4m3E5m2Type, 64>(run, "m64n64k32 e4m3 x e5m2", 500 * kMillion);
  tested<E5m2E4m3Type, 64>(run, "m64n64k32 e5m2 x e4m3", 500 * kMillion);
  for (const WrongRule& wrong : kWrongRules) {
    Unit wrong_unit;
    wrong_unit.name = std::string("wgmma m64n64k16 bf16 with ") + wrong.name;
    unit<Bf16Type, 64, 1>(run, wrong_unit, 50 * kMillion, false, wrong.rule);
    run.self_test(wrong_unit);
  }
  Unit wrong_unit;
  wrong_unit.name = "wgmma m64n64k32 e4m3 with F = 14";
  unit<E4m3Type, 64, 1>(run, wrong_unit, 50 * kMillion, false, {14, 13, -133});
  run.self_test(wrong_unit);
}

}  // namespace bitattn::gpu::probe
