#pragma once
// The GPU at hand, and the check that every CUDA call goes through.

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "gpu/common/error.hpp"

namespace bitattn::gpu {

/// Throws Error "WHAT: CUDA's message" unless `status` is success.
void check(cudaError_t status, const char* what);

struct Device {
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  int multiprocessors = 0;
  std::size_t memory = 0;       ///< bytes of the whole card
  std::string uuid;             ///< as nvidia-smi prints it
  int driver = 0, runtime = 0;  ///< CUDA versions, 13000 for 13.0

  /// sm_90: what wgmma and TMA need.
  bool is_hopper() const { return major == 9 && minor == 0; }
  /// "NVIDIA H200 (sm_90, 132 multiprocessors, 139.8 GiB), driver for CUDA 13.0, built with CUDA 13.0"
  std::string text() const;
};

/// Selects the first GPU that CUDA lists (CUDA_VISIBLE_DEVICES chooses another). Throws Error where there is
/// none.
Device select_device();

/// Bytes free on the selected GPU.
std::size_t free_memory();

/// "1.5 GiB"
std::string bytes_text(std::size_t bytes);

}  // namespace bitattn::gpu
