// The host side of bitattn_kernels.h: checks, tensor maps, workspace, launches.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "gpu/common/no_gpu.hpp"
#include "gpu/kernels/around_backward.cuh"
#include "gpu/kernels/backward.cuh"
#include "gpu/kernels/bitattn_kernels.h"
#include "gpu/kernels/forward.cuh"
#include "gpu/kernels/host_check.hpp"
#include "gpu/kernels/tensor_map.hpp"

namespace bitattn::gpu {
namespace {

using kernels_host::check;
using kernels_host::fail;
using kernels_host::Failure;
using kernels_host::tensor_map;

std::string& last_message() {
  thread_local std::string message;
  return message;
}

void check_device() {
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found != cudaSuccess || count == 0) {
    cudaGetLastError();
    fail(BITATTN_KERNELS_NO_DEVICE, no_gpu_text(found));
  }
  int device = 0;
  int major = 0;
  int minor = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  if (major != 9 || minor != 0) {
    fail(BITATTN_KERNELS_OTHER_CHIP, "the device is of compute capability " + std::to_string(major) + "." +
                                         std::to_string(minor) + ", the kernels need 9.0 (Hopper)");
  }
}

constexpr int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

int query_tile(const BitattnCall& call) {
  return call.head_dim == 64 ? 128 : call.causal != 0 ? 64 : 80;  // docs/spec/fa3-operation-order.md 4.1
}
constexpr int kKeyTile = 128;

int padded(int length, int tile) {
  return ceil_div(length, tile) * tile;
}

void check_call(const BitattnCall& call) {
  const auto refuse = [](const std::string& why) { fail(BITATTN_KERNELS_UNSUPPORTED, why); };
  if (call.head_dim != 64 && call.head_dim != 128) {
    refuse("head dim " + std::to_string(call.head_dim) + ", the kernels have 64 and 128");
  }
  if (call.heads_q < 1 || call.heads_kv < 1 || call.heads_q % call.heads_kv != 0) {
    refuse(std::to_string(call.heads_q) + " query heads and " + std::to_string(call.heads_kv) + " KV heads");
  }
  if (call.batch < 1 || call.batch > 65535 || call.heads_q > 65535) {
    refuse("batch " + std::to_string(call.batch) + " and " + std::to_string(call.heads_q) +
           " heads, both must lie in 1..65535");
  }
  // Index arithmetic on tokens is done in int, and tiles may stick out by one.
  constexpr int kLongest = 1 << 24;
  for (const int length : {call.seqlen_q, call.seqlen_k}) {
    if (length < 0 || length > kLongest) {
      refuse("a length of " + std::to_string(length) + ", it must lie in 0.." + std::to_string(kLongest));
    }
  }
}

Strides strides_of(const BitattnTensor& tensor) {
  return {tensor.batch_stride, tensor.token_stride, tensor.head_stride};
}

void check_tensor(const BitattnTensor& tensor, const char* name) {
  const auto aligned = [](std::int64_t bytes) { return bytes % 16 == 0; };
  if (tensor.data == nullptr) fail(BITATTN_KERNELS_UNSUPPORTED, std::string(name) + ": no memory");
  if (!aligned(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.data)))) {
    fail(BITATTN_KERNELS_MISALIGNED, std::string(name) + ": the address is not a multiple of 16");
  }
  for (const std::int64_t stride : {tensor.batch_stride, tensor.token_stride, tensor.head_stride}) {
    if (!aligned(2 * stride) || stride < 0) {
      fail(BITATTN_KERNELS_MISALIGNED, std::string(name) + ": a stride of " + std::to_string(stride) +
                                           " elements, it must be a multiple of 8");
    }
  }
}

/// The scalars as FlashAttention-3's host code computes them (docs/spec/fa3-operation-order.md 2.1).
float softmax_scale(const BitattnCall& call) {
  return static_cast<float>(call.softmax_scale);
}
float scale_log2(const BitattnCall& call) {
  constexpr double kLog2E = 1.4426950408889634074;
  return static_cast<float>(static_cast<double>(softmax_scale(call)) * kLog2E);
}

template <class Params>
void launch(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
            const Params& params, const char* name) {
  if (shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), name);
  }
  kernel<<<grid, threads, static_cast<std::size_t>(shared_bytes), stream>>>(params);
  check(cudaGetLastError(), name);
}

void zero(const BitattnTensor& tensor, const BitattnCall& call, int tokens, int heads, cudaStream_t stream) {
  if (tokens == 0) return;
  launch(zero_kernel, dim3(1024), kRowThreads, 0, stream,
         FillParams{static_cast<std::uint16_t*>(tensor.data), strides_of(tensor), call.batch, tokens, heads,
                    call.head_dim},
         "zeros");
}

int multiprocessors() {
  int device = 0;
  int count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

/// Ticket counters of the forward. Each is zero again when a kernel ends, so a launch needs none of its own:
/// only as many as run at once, on any number of streams.
constexpr unsigned kTicketCounters = 4096;
__device__ unsigned ticket_counters[kTicketCounters];

unsigned* next_ticket_counter() {
  static std::atomic<unsigned> next{0};
  void* first = nullptr;
  check(cudaGetSymbolAddress(&first, ticket_counters), "the ticket counters");
  return static_cast<unsigned*>(first) + next++ % kTicketCounters;
}

template <class Tile>
void launch_forward(const BitattnCall& call, const BitattnTensor& q, const BitattnTensor& k,
                    const BitattnTensor& v, const BitattnTensor& out, float* lse, cudaStream_t stream) {
  const int d = call.head_dim;
  ForwardParams p{};
  p.q = tensor_map(q, "q", d, call.seqlen_q, call.heads_q, call.batch, 64);
  p.k = tensor_map(k, "k", d, call.seqlen_k, call.heads_kv, call.batch, Tile::kBlockN);
  p.v = tensor_map(v, "v", d, call.seqlen_k, call.heads_kv, call.batch, Tile::kBlockN);
  p.out = tensor_map(out, "out", d, call.seqlen_q, call.heads_q, call.batch, 64);
  p.out_data = static_cast<std::uint16_t*>(out.data);
  p.out_strides = strides_of(out);
  p.lse = lse;
  p.scale_log2 = scale_log2(call);
  p.batch = call.batch;
  p.heads_q = call.heads_q;
  p.group = call.heads_q / call.heads_kv;
  p.seqlen_q = call.seqlen_q;
  p.seqlen_k = call.seqlen_k;
  p.blocks_m = ceil_div(call.seqlen_q, Tile::kBlockM);
  // Keys and values of the heads computed side by side should stay in the L2 cache (60 MB on an H200).
  constexpr std::int64_t kCacheBytes = 32 << 20;
  const std::int64_t bytes_per_head = 4LL * call.seqlen_k * d / p.group;
  const std::int64_t heads = static_cast<std::int64_t>(call.batch) * call.heads_q;
  p.heads_per_group = static_cast<int>(
      std::clamp<std::int64_t>(kCacheBytes / std::max<std::int64_t>(1, bytes_per_head), 1, heads));
  const std::int64_t tiles = heads * p.blocks_m;
  if (tiles > 1 << 30)
    fail(BITATTN_KERNELS_UNSUPPORTED, std::to_string(tiles) + " query tiles, the most are 2^30");
  p.tiles = static_cast<int>(tiles);
  p.ticket_counter = next_ticket_counter();
  launch(forward_kernel<Tile, Flash3Order>, dim3(static_cast<unsigned>(std::min(p.tiles, multiprocessors()))),
         Tile::kThreads, ForwardShared<Tile>::kBytes, stream, p, "forward");
}

void forward(const BitattnCall& call, const BitattnTensor& q, const BitattnTensor& k, const BitattnTensor& v,
             const BitattnTensor& out, float* lse, cudaStream_t stream) {
  check_device();
  check_call(call);
  if (call.seqlen_q == 0) return;
  check_tensor(out, "out");
  if (lse == nullptr) fail(BITATTN_KERNELS_UNSUPPORTED, "lse: no memory");
  if (call.seqlen_k == 0) {  // as the library's host code: O = 0, LSE = +inf, no kernel (2.8)
    zero(out, call, call.seqlen_q, call.heads_q, stream);
    const std::int64_t rows = static_cast<std::int64_t>(call.batch) * call.heads_q * call.seqlen_q;
    fill_kernel<<<1024, kRowThreads, 0, stream>>>(lse, rows, __builtin_inff());
    check(cudaGetLastError(), "lse");
    return;
  }
  check_tensor(q, "q");
  check_tensor(k, "k");
  check_tensor(v, "v");
  // For one query the library's host code drops the causal flag, and so takes another key tile (2.1).
  const bool causal = call.causal != 0 && call.seqlen_q > 1;
  if (call.head_dim == 128) {
    if (causal) {
      launch_forward<ForwardTile<128, 128, 2, true>>(call, q, k, v, out, lse, stream);
    } else {
      launch_forward<ForwardTile<128, 176, 2, false>>(call, q, k, v, out, lse, stream);
    }
  } else if (causal) {
    launch_forward<ForwardTile<64, 128, 3, true>>(call, q, k, v, out, lse, stream);
  } else {
    launch_forward<ForwardTile<64, 192, 3, false, Weights::in_shared_memory>>(call, q, k, v, out, lse,
                                                                              stream);
  }
}

/// Places in the backward's workspace, in bytes.
struct Workspace {
  std::size_t dpsum = 0, lse_log2 = 0, dq_accum = 0, dk_parts = 0, dv_parts = 0;
  std::size_t turns = 0, turns_bytes = 0;  ///< the ticket is their last number
  std::size_t bytes = 0;
};

Workspace plan_workspace(const BitattnCall& call) {
  Workspace w;
  const auto take = [&](std::size_t bytes) {
    const std::size_t at = w.bytes;
    w.bytes += (bytes + 255) / 256 * 256;
    return at;
  };
  const auto heads = static_cast<std::size_t>(call.batch) * static_cast<std::size_t>(call.heads_q);
  const std::size_t rows_q = heads * static_cast<std::size_t>(padded(call.seqlen_q, query_tile(call)));
  const std::size_t rows_k = heads * static_cast<std::size_t>(padded(call.seqlen_k, kKeyTile));
  const std::size_t row_bytes = 4 * static_cast<std::size_t>(call.head_dim);
  w.dpsum = take(4 * rows_q);
  w.lse_log2 = take(4 * rows_q);
  w.dq_accum = take(row_bytes * rows_q);
  w.turns_bytes = 4 * (heads * static_cast<std::size_t>(ceil_div(call.seqlen_q, query_tile(call))) + 1);
  w.turns = take(w.turns_bytes);
  if (call.heads_q > call.heads_kv) {
    w.dk_parts = take(row_bytes * rows_k);
    w.dv_parts = take(row_bytes * rows_k);
  }
  return w;
}

struct BackwardTensors {
  BitattnTensor q, k, v, out, dout, dq, dk, dv;
  const float* lse;
};

template <class Tile>
void launch_backward(const BitattnCall& call, const BackwardTensors& t, unsigned char* workspace,
                     const BitattnIntermediates& keep, cudaStream_t stream) {
  const Workspace plan = plan_workspace(call);
  const auto floats = [&](std::size_t at) { return reinterpret_cast<float*>(workspace + at); };
  const int d = call.head_dim;
  const int group = call.heads_q / call.heads_kv;
  const int blocks_m = ceil_div(call.seqlen_q, Tile::kBlockM);
  const int blocks_n = ceil_div(call.seqlen_k, Tile::kBlockN);
  const auto heads = static_cast<unsigned>(call.heads_q);
  const auto batch = static_cast<unsigned>(call.batch);
  float* const dpsum = keep.dpsum != nullptr ? keep.dpsum : floats(plan.dpsum);
  float* const lse_log2 = keep.lse_log2 != nullptr ? keep.lse_log2 : floats(plan.lse_log2);
  check(cudaMemsetAsync(workspace + plan.turns, 0, plan.turns_bytes, stream), "turns");

  PreprocessParams pre{};
  pre.out = static_cast<const std::uint16_t*>(t.out.data);
  pre.dout = static_cast<const std::uint16_t*>(t.dout.data);
  pre.lse = t.lse;
  pre.dpsum = dpsum;
  pre.lse_log2 = lse_log2;
  pre.out_strides = strides_of(t.out);
  pre.dout_strides = strides_of(t.dout);
  pre.batch = call.batch;
  pre.heads_q = call.heads_q;
  pre.seqlen_q = call.seqlen_q;
  pre.padded_q = blocks_m * Tile::kBlockM;
  constexpr int kRowsPerBlock = kRowThreads / (Tile::kHeadDim / 8);
  launch(preprocess_kernel<Tile::kHeadDim, Flash3Order>,
         dim3(static_cast<unsigned>(ceil_div(pre.padded_q, kRowsPerBlock)), heads, batch), kRowThreads, 0,
         stream, pre, "backward, preprocess");

  BackwardParams p{};
  p.q = tensor_map(t.q, "q", d, call.seqlen_q, call.heads_q, call.batch, Tile::kBlockM);
  p.dout = tensor_map(t.dout, "dout", d, call.seqlen_q, call.heads_q, call.batch, Tile::kBlockM);
  p.k = tensor_map(t.k, "k", d, call.seqlen_k, call.heads_kv, call.batch, Tile::kBlockN);
  p.v = tensor_map(t.v, "v", d, call.seqlen_k, call.heads_kv, call.batch, Tile::kBlockN);
  p.dk = tensor_map(t.dk, "dk", d, call.seqlen_k, call.heads_kv, call.batch, 64);
  p.dv = tensor_map(t.dv, "dv", d, call.seqlen_k, call.heads_kv, call.batch, 64);
  p.dpsum = dpsum;
  p.lse_log2 = lse_log2;
  p.dq_accum = floats(plan.dq_accum);
  p.dk_parts = floats(plan.dk_parts);
  p.dv_parts = floats(plan.dv_parts);
  p.turns = reinterpret_cast<int*>(workspace + plan.turns);
  p.ticket = p.turns + static_cast<std::int64_t>(call.batch) * call.heads_q * blocks_m;
  p.scale_log2 = scale_log2(call);
  p.softmax_scale = softmax_scale(call);
  p.batch = call.batch;
  p.heads_q = call.heads_q;
  p.group = group;
  p.seqlen_q = call.seqlen_q;
  p.seqlen_k = call.seqlen_k;
  p.blocks_m = blocks_m;
  p.blocks_n = blocks_n;
  p.descending = Tile::kCausal && call.dq_left_to_right == 0 ? 1 : 0;
  // Half of the multiprocessors is a margin: a multiprocessor holds one block of threads. It pays where a key
  // tile is two query tiles long: neighbours then wait for each other less.
  p.longest_first = Tile::kBlockN >= 2 * Tile::kBlockM && 2 * blocks_n <= multiprocessors() ? 1 : 0;
  launch(backward_kernel<Tile, Flash3Order>,
         dim3(static_cast<unsigned>(static_cast<std::int64_t>(call.batch) * call.heads_q * blocks_n)),
         Tile::kThreads, BackwardShared<Tile>::kBytes, stream, p, "backward");

  DqPostprocessParams post{};
  post.dq_accum = p.dq_accum;
  post.dq = static_cast<std::uint16_t*>(t.dq.data);
  post.dq_rows = keep.dq_accum;
  post.dq_strides = strides_of(t.dq);
  post.softmax_scale = p.softmax_scale;
  post.heads_q = call.heads_q;
  post.seqlen_q = call.seqlen_q;
  post.seqlen_k = call.seqlen_k;
  post.blocks_m = blocks_m;
  post.blocks_n = blocks_n;
  launch(dq_postprocess_kernel<Tile>, dim3(static_cast<unsigned>(blocks_m), heads, batch),
         128 * Tile::kWarpgroups, 0, stream, post, "backward, dq postprocess");

  if (group == 1) return;
  const auto add_group = [&](const float* parts, float* sums, const BitattnTensor& gradient,
                             const char* name) {
    GroupSumParams g{};
    g.parts = parts;
    g.sums = sums;
    g.gradient = static_cast<std::uint16_t*>(gradient.data);
    g.strides = strides_of(gradient);
    g.heads_kv = call.heads_kv;
    g.group = group;
    g.seqlen_k = call.seqlen_k;
    g.padded_k = blocks_n * Tile::kBlockN;
    constexpr int kRows = kRowThreads / (Tile::kHeadDim / 4);
    launch(
        group_sum_kernel<Tile::kHeadDim>,
        dim3(static_cast<unsigned>(ceil_div(g.padded_k, kRows)), static_cast<unsigned>(call.heads_kv), batch),
        kRowThreads, 0, stream, g, name);
  };
  add_group(p.dv_parts, keep.dv_accum, t.dv, "backward, dv of the groups");
  add_group(p.dk_parts, keep.dk_accum, t.dk, "backward, dk of the groups");
}

void backward(const BitattnCall& call, const BackwardTensors& t, void* workspace, std::size_t workspace_bytes,
              const BitattnIntermediates& keep, cudaStream_t stream) {
  check_device();
  check_call(call);
  const auto written = [&](const BitattnTensor& tensor, const char* name, int tokens) {
    if (tokens > 0) check_tensor(tensor, name);
  };
  written(t.dq, "dq", call.seqlen_q);
  written(t.dk, "dk", call.seqlen_k);
  written(t.dv, "dv", call.seqlen_k);
  if (call.seqlen_q == 0 || call.seqlen_k == 0) {  // as the library's host code (5)
    zero(t.dq, call, call.seqlen_q, call.heads_q, stream);
    zero(t.dk, call, call.seqlen_k, call.heads_kv, stream);
    zero(t.dv, call, call.seqlen_k, call.heads_kv, stream);
    return;
  }
  check_tensor(t.q, "q");
  check_tensor(t.k, "k");
  check_tensor(t.v, "v");
  check_tensor(t.out, "out");
  check_tensor(t.dout, "dout");
  if (t.lse == nullptr) fail(BITATTN_KERNELS_UNSUPPORTED, "lse: no memory");
  const std::size_t needed = plan_workspace(call).bytes;
  if (workspace == nullptr || workspace_bytes < needed) {
    fail(BITATTN_KERNELS_SMALL_WORKSPACE, "a workspace of " + std::to_string(workspace_bytes) + " bytes, " +
                                              std::to_string(needed) + " are needed");
  }
  if (reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0) {
    fail(BITATTN_KERNELS_MISALIGNED, "the workspace is not aligned to 256 bytes");
  }
  auto* const bytes = static_cast<unsigned char*>(workspace);
  if (call.head_dim == 128) {
    if (call.causal != 0) {
      launch_backward<BackwardTile<128, 64, true>>(call, t, bytes, keep, stream);
    } else {
      launch_backward<BackwardTile<128, 80, false>>(call, t, bytes, keep, stream);
    }
  } else if (call.causal != 0) {
    launch_backward<BackwardTile<64, 128, true>>(call, t, bytes, keep, stream);
  } else {
    launch_backward<BackwardTile<64, 128, false>>(call, t, bytes, keep, stream);
  }
}

/// Runs `work` and turns whatever it throws into a status and a line.
template <class Work>
int guarded(const Work& work) noexcept {
  try {
    work();
    return BITATTN_KERNELS_OK;
  } catch (const Failure& failure) {
    try {
      last_message() = failure.message;
    } catch (...) {
      last_message().clear();
    }
    return failure.status;
  } catch (...) {
    last_message().clear();
    return BITATTN_KERNELS_CUDA_ERROR;
  }
}

}  // namespace
}  // namespace bitattn::gpu

using namespace bitattn::gpu;  // NOLINT: the C interface is outside every namespace

extern "C" {

int bitattn_kernels_check_device(void) {
  return guarded([] { check_device(); });
}

int bitattn_kernels_forward(const BitattnCall* call, BitattnTensor q, BitattnTensor k, BitattnTensor v,
                            BitattnTensor out, float* lse, void* stream) {
  return guarded([&] { forward(*call, q, k, v, out, lse, static_cast<cudaStream_t>(stream)); });
}

size_t bitattn_kernels_backward_workspace(const BitattnCall* call) {
  return plan_workspace(*call).bytes;
}
int32_t bitattn_kernels_padded_q(const BitattnCall* call) {
  return padded(call->seqlen_q, query_tile(*call));
}
int32_t bitattn_kernels_padded_k(const BitattnCall* call) {
  return padded(call->seqlen_k, kKeyTile);
}

int bitattn_kernels_backward(const BitattnCall* call, BitattnTensor q, BitattnTensor k, BitattnTensor v,
                             BitattnTensor out, const float* lse, BitattnTensor dout, BitattnTensor dq,
                             BitattnTensor dk, BitattnTensor dv, void* workspace, size_t workspace_bytes,
                             const BitattnIntermediates* intermediates, void* stream) {
  return guarded([&] {
    backward(*call, BackwardTensors{q, k, v, out, dout, dq, dk, dv, lse}, workspace, workspace_bytes,
             intermediates != nullptr ? *intermediates : BitattnIntermediates{},
             static_cast<cudaStream_t>(stream));
  });
}

const char* bitattn_kernels_message(void) {
  return last_message().c_str();
}

}  // extern "C"
