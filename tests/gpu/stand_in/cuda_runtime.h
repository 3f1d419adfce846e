#pragma once
// A stand-in for CUDA on a CPU, as far as gpu/emulator needs it: the same kernels, compiled by a plain C++
// compiler and run thread by thread, block after block. Found in place of CUDA's own header by the tests that
// want it.
//
// A block's threads are fibers that take turns at barriers and at warp votes and shuffles, so what a kernel
// may rely on holds and nothing more: a missing barrier shows as a wrong result. "GPU memory" is host memory
// with a limit that tests set, filled with garbage, and every array ends at a page that may not be touched.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3() = default;
  constexpr dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}  // NOLINT: as CUDA's
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};

enum cudaError_t {
  cudaSuccess,
  cudaErrorMemoryAllocation,
  cudaErrorInsufficientDriver,
  cudaErrorInvalidValue
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
struct cudaUUID_t {
  char bytes[16];
};
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  std::size_t totalGlobalMem;
  int multiProcessorCount;
  int major, minor;
};
using cudaEvent_t = void*;

const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total);
cudaError_t cudaMalloc(void** pointer, std::size_t bytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemset(void* pointer, int byte, std::size_t bytes);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, void* stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end);

extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

void __syncthreads();
int __any_sync(unsigned mask, int predicate);
float __shfl_xor_sync(unsigned mask, float value, int lane_mask);
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
using std::max;
using std::min;

namespace bitattn::gpu {

/// Runs a kernel over all blocks of a grid, several at a time.
void run_on_stand_in(const char* what, dim3 grid, dim3 block, const std::function<void()>& kernel);

namespace stand_in {

/// Bytes that cudaMalloc has to give in all. 2 GiB unless set.
void set_memory(std::size_t bytes);
/// The most bytes that were taken at one time since memory was set.
std::size_t peak_memory();

}  // namespace stand_in

}  // namespace bitattn::gpu
