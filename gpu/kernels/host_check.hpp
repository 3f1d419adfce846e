#pragma once
// How the host side of the kernels says what went wrong, up to the C interface, which turns it into a code.

#include <cuda_runtime.h>

#include <string>

#include "gpu/kernels/bitattn_kernels.h"

namespace bitattn::gpu::kernels_host {

/// A BitattnKernelStatus with its line. Nothing leaves the C interface but the code and the line.
struct Failure {
  int status;
  std::string message;
};

[[noreturn]] inline void fail(int status, const std::string& message) {
  throw Failure{status, message};
}

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  fail(BITATTN_KERNELS_CUDA_ERROR, std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace bitattn::gpu::kernels_host
