#pragma once
// What a remedied backward still multiplies with K: the row sums of dS with all corrections, and what they
// put into dQ. Measured while the emulator runs.

#include <cstddef>
#include <map>
#include <mutex>
#include <tuple>

#include "datasets/problem.hpp"
#include "emu/kernels/observer.hpp"

namespace bitattn::audit {

class RemainingDrift final : public kernels::Observer {
 public:
  explicit RemainingDrift(const Problem& problem) : problem_(problem) {}
  void backward_rows(const kernels::BackwardRows& rows) override;

  /// Sums over all rows, in the rows' own order: the same for any number of threads.
  struct Sums {
    std::size_t rows = 0;          ///< that see a key and are finite
    double drift2 = 0, leak2 = 0;  ///< drift^2 and |softmax_scale * drift * key|^2
  };
  Sums sums() const;
  std::size_t rows() const { return sums().rows; }
  double drift_squares() const { return sums().drift2; }
  double leak_squares() const { return sums().leak2; }

 private:
  const Problem& problem_;
  std::mutex mutex_;
  std::map<std::tuple<int, int, int>, Sums> parts_;  ///< by sequence, head and first row
};

}  // namespace bitattn::audit
