#ifndef BITATTN_KERNELS_H
#define BITATTN_KERNELS_H
/* BF16 attention for Hopper in FlashAttention-3's operation order: a C interface.
 *
 * The results are, bit for bit, those of FlashAttention-3's SM90 kernels with deterministic=True as
 * nvcc 13.0.88 compiles them (docs/spec/fa3-operation-order.md), and so those of bitattn's emulated backend
 * `fa3`. Exception: with infinities or NaNs among the inputs and query heads that FlashAttention-3 packs into
 * one tile, other tiles are visited.
 *
 * All pointers are device pointers. Functions launch on the given stream (a cudaStream_t; NULL: the default
 * one) and do not wait for it. They return a BitattnKernelStatus and never throw; bitattn_kernels_message()
 * says more.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum BitattnKernelStatus {
  BITATTN_KERNELS_OK = 0,
  BITATTN_KERNELS_NO_DEVICE = 1,   /* no CUDA device, or no driver */
  BITATTN_KERNELS_OTHER_CHIP = 2,  /* the current device is not of compute capability 9.0 */
  BITATTN_KERNELS_UNSUPPORTED = 3, /* head dim, head counts or lengths */
  BITATTN_KERNELS_MISALIGNED = 4,  /* an address or stride is not a multiple of 16 bytes */
  BITATTN_KERNELS_SMALL_WORKSPACE = 5,
  BITATTN_KERNELS_CUDA_ERROR = 6
} BitattnKernelStatus;

/* A BF16 tensor of (batch, token, head, head dim); strides in elements, the head dim contiguous. */
typedef struct BitattnTensor {
  void* data;
  int64_t batch_stride, token_stride, head_stride;
} BitattnTensor;

typedef struct BitattnCall {
  int32_t batch, seqlen_q, seqlen_k;
  int32_t heads_q,
      heads_kv;         /* heads_kv divides heads_q: query head h reads KV head h / (heads_q / heads_kv) */
  int32_t head_dim;     /* 64 or 128, of q, k and v */
  double softmax_scale; /* usually 1 / sqrt(head_dim) */
  int32_t causal;       /* query i sees keys up to i + seqlen_k - seqlen_q */
  /* The order in which key blocks are added to dQ. 0: FlashAttention-3's deterministic order (from right to
   * left if causal, else from left to right). 1: from left to right always. */
  int32_t dq_left_to_right;
} BitattnCall;

/* What the backward leaves in between; each may be NULL. Rows are padded to the query tile
 * (bitattn_kernels_padded_q) or key tile (bitattn_kernels_padded_k). */
typedef struct BitattnIntermediates {
  float* dpsum;    /* [batch][heads_q][padded_q]: rowsum(dout * out) */
  float* lse_log2; /* [batch][heads_q][padded_q] */
  float* dq_accum; /* [batch][heads_q][padded_q][head_dim]: dQ before its scale and cast */
  float* dk_accum; /* [batch][heads_kv][padded_k][head_dim], written only if heads_q > heads_kv */
  float* dv_accum;
} BitattnIntermediates;

/* Can the current device run the kernels? */
int bitattn_kernels_check_device(void);

/* out (as q) and lse, fp32 [batch][heads_q][seqlen_q], natural log. */
int bitattn_kernels_forward(const BitattnCall* call, BitattnTensor q, BitattnTensor k, BitattnTensor v,
                            BitattnTensor out, float* lse, void* stream);

/* Bytes of workspace that the backward needs, aligned to 256. */
size_t bitattn_kernels_backward_workspace(const BitattnCall* call);
int32_t bitattn_kernels_padded_q(const BitattnCall* call);
int32_t bitattn_kernels_padded_k(const BitattnCall* call);

/* dq, dk, dv of dout, with the forward's out and lse. intermediates may be NULL. */
int bitattn_kernels_backward(const BitattnCall* call, BitattnTensor q, BitattnTensor k, BitattnTensor v,
                             BitattnTensor out, const float* lse, BitattnTensor dout, BitattnTensor dq,
                             BitattnTensor dk, BitattnTensor dv, void* workspace, size_t workspace_bytes,
                             const BitattnIntermediates* intermediates, void* stream);

/* One line about this thread's last call that did not return BITATTN_KERNELS_OK. */
const char* bitattn_kernels_message(void);

#ifdef __cplusplus
}
#endif

#endif
