#pragma once
// From work done to the share that a progress callback is told.

#include <algorithm>
#include <atomic>

#include "reference/attention_rows.hpp"

namespace bitattn::reference {

/// Adds up pieces of work and passes on their share of `total`, at most 1. Safe from any thread.
class PairCounter {
 public:
  PairCounter(double total, const Progress& progress) : total_(total), progress_(progress) {}

  void operator()(double pairs) {
    double before = done_.load();
    while (!done_.compare_exchange_weak(before, before + pairs)) {
    }
    if (progress_) progress_(total_ > 0 ? std::min(1.0, (before + pairs) / total_) : 1.0);
  }

 private:
  double total_;
  const Progress& progress_;
  std::atomic<double> done_{0};
};

}  // namespace bitattn::reference
