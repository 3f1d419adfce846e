#pragma once
// FlashAttention-3 in the emulator's arithmetic, on any GPU from sm_80 on, without tensor cores: the bits of
// emu/kernels.
//
// The schedule is the kernel's own, taken from the same profile; how it is run is not: rows of many heads go
// through a key block together, and what is between the products goes through memory, which costs little
// beside products that take a dozen instructions each. Nothing of size S * S is kept: the forward holds one
// key block of every row, the backward as many key blocks as the workspace has room for.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "emu/profile/flash3.hpp"
#include "gpu/common/error.hpp"

namespace bitattn::gpu::emulator {

/// Where the tokens of one batch element or packed sequence lie along the token axis.
struct Sequence {
  int q_begin = 0, q_length = 0;
  int k_begin = 0, k_length = 0;
};

/// Inputs in host memory. Element (token, head, d) of q is q[(token * heads_q + head) * head_dim + d], and so
/// on.
struct Inputs {
  profile::Call call;
  std::span<const Sequence> sequences;
  int total_q = 0, total_k = 0;  ///< tokens in memory
  const std::uint16_t* q = nullptr;
  const std::uint16_t* k = nullptr;
  const std::uint16_t* v = nullptr;
  const std::uint16_t* dout = nullptr;  ///< may be nullptr: forward only
};

/// Outputs in host memory; those that may be nullptr are not fetched. The row statistics of (sequence s, head
/// h, row i) lie at rows[s * heads_q + h] + i.
struct ForwardOutputs {
  std::uint16_t* out = nullptr;
  float* out_fp32 = nullptr;  ///< may be nullptr: O before its cast
  float* lse = nullptr;
  std::span<const std::ptrdiff_t> rows;
  std::size_t row_count = 0;  ///< elements of lse
};

/// q_rows, k_rows: first row of (sequence, head) in the padded arrays, as the library pads them.
struct BackwardOutputs {
  std::uint16_t *dq = nullptr, *dk = nullptr, *dv = nullptr;
  float *dq_fp32 = nullptr, *dk_fp32 = nullptr, *dv_fp32 = nullptr;  ///< may be nullptr: before the last cast
  float *dpsum = nullptr, *lse_log2 = nullptr;                       ///< may be nullptr: padded rows
  float* dq_accum = nullptr;                       ///< may be nullptr: padded rows x rounded head dim
  float *dk_accum = nullptr, *dv_accum = nullptr;  ///< may be nullptr: padded rows x rounded head dim, GQA
  std::span<const std::ptrdiff_t> q_rows, k_rows;
  std::size_t q_row_count = 0, k_row_count = 0;
};

struct Options {
  /// Bytes of GPU memory for what is in the making; 0: a share of what is free.
  std::size_t workspace = 0;
  /// Called with the share done, 0 to 1; may throw to cancel.
  std::function<void(double)> progress;
};

/// What a run did.
struct Work {
  double forward_products = 0, backward_products = 0;  ///< fused products, of the kernel's own tiles
  double forward_seconds = 0, backward_seconds = 0;    ///< on the GPU, by its events, transfers left out
};

/// Runs the forward and, with dout, the backward on the selected GPU. Throws gpu::Error where there is no GPU
/// or too little memory, and for profiles with exact sites, remedies, or functions that are not the chip's.
Work flash3(const profile::Profile& profile, const Inputs& inputs, const ForwardOutputs& forward,
            const BackwardOutputs* backward, const Options& options);

}  // namespace bitattn::gpu::emulator
