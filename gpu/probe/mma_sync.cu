// Tensor-core steps through mma.sync: one warp, one tile of 16 rows and 8 columns.

#include "gpu/probe/products.cuh"

namespace bitattn::gpu::probe {

namespace {

constexpr int kRows = 16;
constexpr int kColumns = 8;
constexpr int kWarps = 8;
constexpr int kMostSteps = 4;

/// Two 16-bit or four 8-bit neighbours as the register that holds them.
template <class Word>
__device__ std::uint32_t packed(const Word* words) {
  if constexpr (sizeof(Word) == 2) {
    return words[0] | static_cast<std::uint32_t>(words[1]) << 16U;
  } else {
    return words[0] | static_cast<std::uint32_t>(words[1]) << 8U |
           static_cast<std::uint32_t>(words[2]) << 16U | static_cast<std::uint32_t>(words[3]) << 24U;
  }
}

#define BITATTN_MMA(shape_and_types)                                              \
  asm volatile("mma.sync.aligned." shape_and_types                                \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

template <class Format>
struct Model16 {
  using A = Format;
  using B = Format;
  using Word = std::uint16_t;
  __device__ static std::uint32_t model(const Word* a, const Word* b, int k, int steps, std::uint32_t c,
                                        arith::TensorCoreRule rule) {
    return chain<A, B>(a, b, k, steps, c, rule);
  }
};

struct Bf16K16 : Model16<arith::Bf16> {
  static constexpr int kK = 16;
  __device__ static void step(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    BITATTN_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  }
};
struct F16K16 : Model16<arith::F16> {
  static constexpr int kK = 16;
  __device__ static void step(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    BITATTN_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  }
};
struct Bf16K8 : Model16<arith::Bf16> {
  static constexpr int kK = 8;
  __device__ static void step(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
  }
};
struct E4m3K32 {
  using A = arith::E4m3;
  using B = arith::E4m3;
  using Word = std::uint8_t;
  static constexpr int kK = 32;
  __device__ static std::uint32_t model(const Word* a, const Word* b, int k, int steps, std::uint32_t c,
                                        arith::TensorCoreRule /*rule*/) {
    for (int s = 0; s < steps; ++s) c = arith::mma_sync_e4m3_k32(a + s * k, b + s * k, c);
    return c;
  }
  __device__ static void step(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 900
    BITATTN_MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32");
#endif
  }
};
#undef BITATTN_MMA

template <class Type>
__global__ void __launch_bounds__(32 * kWarps) products(const Launch launch) {
  using Word = typename Type::Word;
  constexpr int kK = Type::kK;
  constexpr int kPerRegister = 4 / static_cast<int>(sizeof(Word));
  constexpr int kStride = kK * kMostSteps + kPerRegister;  // not a multiple of the banks
  __shared__ Word words[kWarps][kRows + kColumns][kStride];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4;
  const int quad = lane % 4;
  unsigned long long mismatches = 0;
  unsigned long long first = kNoCase;
  Word(&tile_words)[kRows + kColumns][kStride] = words[warp];
  for (std::uint64_t t = static_cast<std::uint64_t>(blockIdx.x) * kWarps + warp; t < launch.count;
       t += static_cast<std::uint64_t>(gridDim.x) * kWarps) {
    const std::uint64_t tile = launch.first + t;
    const TileShape shape = tile_shape<typename Type::A, typename Type::B>(tile, kK);
    const int depth = kK * launch.steps;
    __syncwarp();
    for (int i = lane; i < (kRows + kColumns) * depth; i += 32) {
      const int line = i / depth;
      const int k = i % depth;
      tile_words[line][k] = static_cast<Word>(
          line < kRows ? operand_word<typename Type::A, Operand::a>(shape, line, k)
                       : operand_word<typename Type::B, Operand::b>(shape, line - kRows, k));
    }
    __syncwarp();
    std::uint32_t c[4];
    float d[4];
    for (int i = 0; i < 4; ++i) {
      const int row = group + 8 * (i / 2);
      const int column = 2 * quad + i % 2;
      const std::uint32_t products = needs_products(shape)
                                         ? Type::model(tile_words[row], tile_words[kRows + column], kK,
                                                       launch.steps, 0U, arith::kHopperWide)
                                         : 0U;
      c[i] = accumulator_word(shape, row, column, products);
      d[i] = __uint_as_float(c[i]);
    }
    __syncwarp();
    for (int s = 0; s < launch.steps; ++s) {
      // Registers hold neighbours along k: words 2q.. (4q.. for 8 bits), and the same half a step further on.
      const int k = s * kK + kPerRegister * quad;
      constexpr int kHalf = kK == 8 ? 0 : kK / 2;
      const std::uint32_t a[4] = {packed(&tile_words[group][k]), packed(&tile_words[group + 8][k]),
                                  packed(&tile_words[group][k + kHalf]),
                                  packed(&tile_words[group + 8][k + kHalf])};
      const std::uint32_t b[2] = {packed(&tile_words[kRows + group][k]),
                                  packed(&tile_words[kRows + group][k + kHalf])};
      Type::step(d, a, b);
    }
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const int row = group + 8 * (i / 2);
      const int column = 2 * quad + i % 2;
      const std::uint32_t accumulator = i == 0 ? c[0] : i == 1 ? c[1] : i == 2 ? c[2] : c[3];
      const float chip = i == 0 ? d[0] : i == 1 ? d[1] : i == 2 ? d[2] : d[3];
      const std::uint32_t model = Type::model(tile_words[row], tile_words[kRows + column], kK, launch.steps,
                                              accumulator, launch.rule);
      compare_product(launch, (tile * kRows + row) * kColumns + column, accumulator, __float_as_uint(chip),
                      model, mismatches, first);
    }
  }
  add_to_tally(launch.tally, mismatches, first);
}

template <class Type>
void unit(Run& run, Unit& unit, std::uint64_t count, int steps, arith::TensorCoreRule rule) {
  Launch what;
  what.steps = steps;
  what.rule = rule;
  const dim3 grid(static_cast<unsigned>(run.device().multiprocessors) * 8);
  product_unit<typename Type::A, typename Type::B>(
      unit, count, kRows, kColumns, Type::kK, what,
      [&](const Launch& l) { launch(unit.name.c_str(), products<Type>, grid, dim3(32 * kWarps), l); });
}

template <class Type>
void tested(Run& run, const char* name, std::uint64_t count, int steps) {
  Unit& made = run.begin("mma.sync", name, steps > 1 ? "chains of 4" : "24 kinds");
  unit<Type>(run, made, run.scaled(count), steps, arith::kHopperWide);
}

}  // namespace

void mma_sync_units(Run& run) {
  constexpr std::uint64_t kBillion = 1'000'000'000;
  tested<Bf16K16>(run, "m16n8k16 bf16", kBillion, 1);
  tested<Bf16K16>(run, "m16n8k16 bf16, chained", kBillion / 4, kMostSteps);
  tested<Bf16K8>(run, "m16n8k8 bf16", kBillion, 1);
  tested<F16K16>(run, "m16n8k16 f16", kBillion / 2, 1);
  if (run.device().major >= 9) {
    tested<E4m3K32>(run, "m16n8k32 e4m3", kBillion / 2, 1);
  } else {
    run.untested("mma.sync", "m16n8k32 e4m3", "needs sm_90 or later");
  }
  for (const WrongRule& wrong : kWrongRules) {
    Unit wrong_unit;
    wrong_unit.name = std::string("mma.sync m16n8k16 bf16 with ") + wrong.name;
    unit<Bf16K16>(run, wrong_unit, kBillion / 20, 1, wrong.rule);
    run.self_test(wrong_unit);
  }
}

}  // namespace bitattn::gpu::probe
