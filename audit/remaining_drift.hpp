#pragma once
// What a remedied backward still multiplies with K: the row sums of dS with all corrections, and what they
// put into dQ. Measured while the emulator runs.

#include <cstddef>
#include <mutex>

#include "datasets/problem.hpp"
#include "emu/kernels/observer.hpp"

namespace bitattn::audit {

class RemainingDrift final : public kernels::Observer {
 public:
  explicit RemainingDrift(const Problem& problem) : problem_(problem) {}
  void backward_rows(const kernels::BackwardRows& rows) override;

  std::size_t rows() const { return rows_; }        ///< that see a key and are finite
  double drift_squares() const { return drift2_; }  ///< sum over rows of drift^2
  double leak_squares() const { return leak2_; }    ///< sum over rows of |softmax_scale * drift * key|^2

 private:
  const Problem& problem_;
  std::mutex mutex_;
  std::size_t rows_ = 0;
  double drift2_ = 0, leak2_ = 0;
};

}  // namespace bitattn::audit
