#pragma once
// A full trace: every (query, key) pair's intermediates of one emulated run, streamed to a file as they are
// made.

#include <mutex>
#include <string>
#include <vector>

#include "datasets/capture_file.hpp"
#include "datasets/problem.hpp"
#include "emu/kernels/observer.hpp"

namespace bitattn::audit {

/// Bytes of fp32 values that a full trace of this problem writes, before compression.
double full_trace_bytes(const Problem& problem);

/// Passes on what it sees to `next` and writes <group>/trace/{scores, p_forward, p, dp, ds, p_bf16, ds_bf16}
/// [B,Hq,Sq,Sk] (packed sequences [Hq,total,longest Sk]). Pairs that no tile of the kernel visits stay NaN of
/// bits 0xffffffff.
class FullTrace final : public kernels::Observer {
 public:
  FullTrace(const Problem& problem, CaptureWriter& writer, const std::string& group, kernels::Observer& next);

  void forward_block(const kernels::ForwardBlock& block) override;
  void forward_rows(const kernels::ForwardRows& rows) override { next_.forward_rows(rows); }
  void backward_rows(const kernels::BackwardRows& rows) override;

 private:
  struct Piece {
    kernels::HeadId id;
    int row_begin, rows, key_begin, keys;
    std::ptrdiff_t row_stride;
  };
  template <class T>
  void write(const char* name, const Piece& piece, const T* values);

  const Problem& problem_;
  CaptureWriter& writer_;
  std::string group_;
  kernels::Observer& next_;
  std::mutex mutex_;
  std::vector<float> buffer_;
};

}  // namespace bitattn::audit
