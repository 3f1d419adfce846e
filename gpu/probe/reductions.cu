// Reductions to memory: one addition into a word, by every instruction that attention kernels use for it.

#include <cuda.h>

#include "emu/arith/reduce_add.hpp"
#include "gpu/probe/operands.hpp"
#include "gpu/probe/tally.cuh"
#include "gpu/probe/units.hpp"

namespace bitattn::gpu::probe {

namespace {

constexpr int kThreads = 256;
constexpr int kBulkFloats = 1024;                         ///< of one bulk reduction
constexpr int kBoxFloats = 256;                           ///< of one tensor-map box
constexpr std::uint64_t kRound = std::uint64_t{1} << 26;  ///< words of memory, cases of a round

__global__ void fill(std::uint64_t first, std::uint64_t count, float* memory) {
  const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    memory[i] = __uint_as_float(operands(first + i).a);
  }
}

/// Compares every word with the model. `flushes`: the rule of red.global; else that of the bulk reduction.
__global__ void compare(std::uint64_t first, std::uint64_t count, const float* memory, bool flushes,
                        Tally* tally, Outcome* shown) {
  unsigned long long mismatches = 0;
  unsigned long long first_mismatch = kNoCase;
  const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const Operands o = operands(first + i);
    const float a = __uint_as_float(o.a);
    const float b = __uint_as_float(o.b);
    const std::uint32_t model =
        arith::to_bits(flushes ? arith::global_reduce_add(a, b) : arith::bulk_reduce_add(a, b));
    const std::uint32_t chip = __float_as_uint(memory[i]);
    if (shown != nullptr) shown[i] = {{o.a, o.b, 0}, chip, model};
    if (chip == model) continue;
    ++mismatches;
    if (first + i < first_mismatch) first_mismatch = first + i;
  }
  add_to_tally(tally, mismatches, first_mismatch);
}

enum class Form { red, atom, vector4, shared_atom, bulk };

/// Adds operand b of every case to its word by one instruction. `count` is a multiple of kBulkFloats.
template <Form form>
__global__ void __launch_bounds__(kThreads) reduce(std::uint64_t first, std::uint64_t count, float* memory) {
  const std::uint64_t block_stride = static_cast<std::uint64_t>(gridDim.x) * kBulkFloats;
  for (std::uint64_t base = static_cast<std::uint64_t>(blockIdx.x) * kBulkFloats; base < count;
       base += block_stride) {
    if constexpr (form == Form::red || form == Form::atom) {
      for (int j = static_cast<int>(threadIdx.x); j < kBulkFloats; j += kThreads) {
        const float b = __uint_as_float(operands(first + base + j).b);
        if constexpr (form == Form::red) {
          asm volatile("red.global.add.f32 [%0], %1;" ::"l"(memory + base + j), "f"(b) : "memory");
        } else {
          float old;
          asm volatile("atom.global.add.f32 %0, [%1], %2;"
                       : "=f"(old)
                       : "l"(memory + base + j), "f"(b)
                       : "memory");
        }
      }
    } else if constexpr (form == Form::vector4) {
#if __CUDA_ARCH__ >= 900
      const int j = static_cast<int>(threadIdx.x) * 4;
      const float4 b = {__uint_as_float(operands(first + base + j).b),
                        __uint_as_float(operands(first + base + j + 1).b),
                        __uint_as_float(operands(first + base + j + 2).b),
                        __uint_as_float(operands(first + base + j + 3).b)};
      atomicAdd(reinterpret_cast<float4*>(memory + base + j), b);
#endif
    } else if constexpr (form == Form::shared_atom) {
      __shared__ float words[kBulkFloats];
      for (int j = static_cast<int>(threadIdx.x); j < kBulkFloats; j += kThreads) {
        words[j] = memory[base + j];
        atomicAdd(&words[j], __uint_as_float(operands(first + base + j).b));
        memory[base + j] = words[j];
      }
    } else {
#if __CUDA_ARCH__ >= 900
      __shared__ alignas(128) float words[kBulkFloats];
      for (int j = static_cast<int>(threadIdx.x); j < kBulkFloats; j += kThreads) {
        words[j] = __uint_as_float(operands(first + base + j).b);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      if (threadIdx.x == 0) {
        asm volatile(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
            "cp.async.bulk.commit_group;\n"
            "cp.async.bulk.wait_group 0;" ::"l"(memory + base),
            "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(words))), "n"(kBulkFloats * 4)
            : "memory");
      }
      __syncthreads();
#endif
    }
  }
}

/// The same through a tensor map of one axis.
__global__ void __launch_bounds__(kThreads)
    reduce_tensor(std::uint64_t first, std::uint64_t count, const __grid_constant__ CUtensorMap map) {
#if __CUDA_ARCH__ >= 900
  __shared__ alignas(128) float words[kBoxFloats];
  const std::uint64_t block_stride = static_cast<std::uint64_t>(gridDim.x) * kBoxFloats;
  for (std::uint64_t base = static_cast<std::uint64_t>(blockIdx.x) * kBoxFloats; base < count;
       base += block_stride) {
    for (int j = static_cast<int>(threadIdx.x); j < kBoxFloats; j += kThreads) {
      words[j] = __uint_as_float(operands(first + base + j).b);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile(
          "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%0, {%1}], [%2];\n"
          "cp.async.bulk.commit_group;\n"
          "cp.async.bulk.wait_group 0;" ::"l"(&map),
          "r"(static_cast<int>(base)), "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(words)))
          : "memory");
    }
    __syncthreads();
  }
#endif
}

/// The driver's own function, found through the runtime: nothing links against the driver.
CUtensorMap tensor_map(float* memory, CUtensorMapDataType type) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
      "looking for cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess) throw Error("the driver has no cuTensorMapEncodeTiled");
  CUtensorMap map;
  const cuuint64_t size = kRound;
  const cuuint32_t box = kBoxFloats;
  const cuuint32_t step = 1;
  const cuuint64_t no_stride = 0;
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &map, type, 1, memory, &size, &no_stride, &box, &step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Error("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)));
  return map;
}

template <class Launch>
void reduction(Run& run, const char* name, bool flushes, Buffer<float>& memory, Launch&& add_operands,
               std::uint64_t cases) {
  const std::uint64_t random = run.scaled(cases);
  // Whole rounds of bulk reductions, boundary pairs first.
  const std::uint64_t total = (kBoundaryPairs + random + kBulkFloats - 1) / kBulkFloats * kBulkFloats;
  Unit& unit = run.begin("reduction", name, kPairsText);
  const dim3 grid(static_cast<unsigned>(run.device().multiprocessors) * 8);
  const dim3 block(kThreads);
  DeviceTally tally;
  Buffer<Outcome> shown(1, "an outcome");
  Event begin;
  Event end;
  begin.record();
  for (std::uint64_t first = 0; first < total; first += kRound) {
    const std::uint64_t count = total - first < kRound ? total - first : kRound;
    launch(name, fill, grid, block, first, count, memory.data());
    add_operands(grid, block, first, count);
    launch(name, compare, grid, block, first, count, memory.data(), flushes, tally.device(), nullptr);
    if (unit.first) continue;
    const Tally so_far = tally.read();
    if (so_far.mismatches == 0) continue;
    const std::uint64_t place = so_far.first - first;
    launch(name, compare, dim3(1), dim3(1), so_far.first, 1, memory.data() + place, flushes, tally.device(),
           shown.data());
    const Outcome outcome = shown.download("reading a mismatch").front();
    unit.first = Mismatch{so_far.first, {outcome.inputs[0], outcome.inputs[1]}, outcome.chip, outcome.model};
    // That look counted its own case once more.
    const Tally restored{so_far.mismatches, so_far.first};
    check(cudaMemcpy(tally.device(), &restored, sizeof restored, cudaMemcpyHostToDevice),
          "restoring a tally");
  }
  end.record();
  unit.seconds = end.milliseconds_since(begin) * 1e-3;
  settle(unit, total, tally.read().mismatches);
}

template <Form form>
void plain_reduction(Run& run, const char* name, bool flushes, Buffer<float>& memory) {
  reduction(
      run, name, flushes, memory,
      [&](dim3 grid, dim3 block, std::uint64_t first, std::uint64_t count) {
        launch(name, reduce<form>, grid, block, first, count, memory.data());
      },
      std::uint64_t{1} << 30);
}

void tensor_reduction(Run& run, const char* name, CUtensorMapDataType type, bool flushes,
                      Buffer<float>& memory) {
  const CUtensorMap map = tensor_map(memory.data(), type);
  reduction(
      run, name, flushes, memory,
      [&](dim3 grid, dim3 block, std::uint64_t first, std::uint64_t count) {
        launch(name, reduce_tensor, grid, block, first, count, map);
      },
      std::uint64_t{1} << 30);
}

}  // namespace

void reduction_units(Run& run) {
  Buffer<float> memory(kRound, "the words that reductions add to");
  plain_reduction<Form::red>(run, "red.global.add.f32", true, memory);
  plain_reduction<Form::atom>(run, "atom.global.add.f32", true, memory);
  plain_reduction<Form::shared_atom>(run, "atomicAdd on shared memory", false, memory);
  const char* const vector = "atomicAdd(float4*)";
  const char* const bulk = "cp.reduce.async.bulk.add.f32";
  const char* const tensor = "cp.reduce.async.bulk.tensor.add, FLOAT32";
  const char* const tensor_ftz = "cp.reduce.async.bulk.tensor.add, FLOAT32_FTZ";
  if (run.device().major < 9) {
    for (const char* name : {vector, bulk, tensor, tensor_ftz})
      run.untested("reduction", name, "needs sm_90 or later");
    return;
  }
  plain_reduction<Form::vector4>(run, vector, true, memory);
  plain_reduction<Form::bulk>(run, bulk, false, memory);
  tensor_reduction(run, tensor, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, false, memory);
  tensor_reduction(run, tensor_ftz, CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ, true, memory);
}

}  // namespace bitattn::gpu::probe
