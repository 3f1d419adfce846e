#pragma once
// What a schedule shows to whoever looks on: the numbers it has in its hands, row block by row block, without
// a copy. The audit measures through this, so that nothing of size S*S is ever kept.
//
// Calls for different rows may come from several threads at once; the calls for one row come in program
// order.

#include <cstddef>
#include <cstdint>

namespace bitattn::kernels {

/// Which (sequence, query head) a call belongs to.
struct HeadId {
  int sequence = 0;
  int head = 0;
};

/// Forward, one key block of some rows, after its exponentials (docs/spec/fa3-operation-order.md 2.5).
struct ForwardBlock {
  HeadId id;
  int row_begin = 0,
      rows =
          0;  ///< query rows [row_begin, row_begin + rows) of the sequence; rows past its end are not shown
  int key_begin = 0, keys = 0;            ///< key block; keys past the sequence's end are masked
  bool first = false;                     ///< the rows' first key block
  std::ptrdiff_t row_stride = 0;          ///< of the arrays over keys
  float scale_log2 = 0;                   ///< c
  const float* scores = nullptr;          ///< [rows][keys], raw (softcap: after tanh), masked: -inf
  const float* p = nullptr;               ///< [rows][keys], fp32 numerators
  const std::uint16_t* p_bf16 = nullptr;  ///< [rows][keys]
  const float* row_max = nullptr;         ///< [rows], running maximum after this block
};

/// Forward, some rows after their last key block (2.7).
struct ForwardRows {
  HeadId id;
  int row_begin = 0, rows = 0;
  float scale_log2 = 0;
  const float* row_max =
      nullptr;  ///< [rows], the last running maximum m (raw score units); -inf without a visible key
  const float* row_sum = nullptr;  ///< [rows], L
};

/// Backward, some rows with all key blocks that visit them (4.3). Pairs of tiles that the kernel does not
/// visit hold zeros.
struct BackwardRows {
  HeadId id;
  int row_begin = 0, rows = 0;  ///< rows past the sequence's end are not shown
  int key_begin = 0, keys = 0;  ///< all keys that any of these rows' tiles cover, from key_begin; may reach
                                ///< past the sequence's end
  std::ptrdiff_t row_stride = 0;
  float scale_log2 = 0;
  const float* s = nullptr;   ///< [rows][keys], scores as the exponential reads them (masked: -inf)
  const float* p = nullptr;   ///< P', fp32
  const float* dp = nullptr;  ///< dP
  const float* ds = nullptr;  ///< dS before its cast
  const float* ds_softcap =
      nullptr;  ///< softcap only: dS before the multiply by 1 - tanh^2; else equal to ds
  const std::uint16_t* p_bf16 = nullptr;
  const std::uint16_t* ds_bf16 = nullptr;
  const float* dpsum = nullptr;     ///< [rows], D
  const float* lse_log2 = nullptr;  ///< [rows], E
  /// [rows], sum over keys of what remedies add to dS beside ds_bf16 (docs/remedies.md); nullptr: nothing
  const double* added = nullptr;
  const std::uint16_t* dq_keys = nullptr;  ///< what dS is multiplied with for dQ, laid out as k
};

class Observer {
 public:
  Observer() = default;
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;
  virtual ~Observer() = default;
  virtual void forward_block(const ForwardBlock& /*block*/) {}
  virtual void forward_rows(const ForwardRows& /*rows*/) {}
  virtual void backward_rows(const BackwardRows& /*rows*/) {}
};

}  // namespace bitattn::kernels
