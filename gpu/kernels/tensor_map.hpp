#pragma once
// Tensors as the copy engine sees them.

#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <string>

#include "gpu/kernels/host_check.hpp"

namespace bitattn::gpu::kernels_host {

/// The driver's function, found at run time so that nothing links against the driver.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result),
        "cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess || entry == nullptr) {
      fail(BITATTN_KERNELS_CUDA_ERROR, "the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return function;
}

/// A tensor as the copy engine sees it, in boxes of 64 columns and `rows` tokens of one head.
inline CUtensorMap tensor_map(const BitattnTensor& tensor, const char* name, int head_dim, int tokens,
                              int heads, int batch, int rows) {
  CUtensorMap map;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(tokens),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  // A dimension of one may have any stride; the driver wants one that could be used.
  const auto bytes = [&](std::int64_t stride, int count) {
    return static_cast<cuuint64_t>(2 * (count > 1 ? stride : std::max<std::int64_t>(stride, head_dim)));
  };
  const cuuint64_t strides[3] = {bytes(tensor.token_stride, tokens), bytes(tensor.head_stride, heads),
                                 bytes(tensor.batch_stride, batch)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, tensor.data, sizes, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail(BITATTN_KERNELS_CUDA_ERROR, std::string(name) + ": the driver refuses its tensor map, error " +
                                         std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace bitattn::gpu::kernels_host
