#pragma once
// Why there is no GPU to use: one sentence for all that look for one.

#include <cuda_runtime.h>

#include <string>

namespace bitattn::gpu {

/// Where cudaGetDeviceCount gave `status` and no device.
inline std::string no_gpu_text(cudaError_t status) {
  return std::string("no usable NVIDIA GPU here: ") +
         (status == cudaErrorInsufficientDriver ? "no driver, or one older than this program's CUDA"
          : status != cudaSuccess               ? cudaGetErrorString(status)
                                                : "CUDA lists none");
}

}  // namespace bitattn::gpu
