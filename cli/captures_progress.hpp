#pragma once
// How far many captures are: how many are finished, and the time that is left.

#include <chrono>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

#include "cli/progress.hpp"

namespace bitattn::cli {

/// "45 s", "3 min", "2.5 h"; rounded up.
std::string time_left_text(double seconds);

/// All functions may be called from any thread; update() throws Interrupted as Progress does.
class CapturesProgress {
 public:
  /// `stages`: those that every capture goes through, in their order.
  CapturesProgress(Progress& bar, std::size_t captures, std::vector<std::string> stages);

  /// A capture that need not be computed.
  void skip();
  /// Of a capture that is under way: `done` is its share so far, kept by the caller and 0 to begin with.
  void update(const std::string& capture, const std::string& stage, double share, double& done);
  /// It is finished. `done` as above.
  void finish(double done);

 private:
  Progress& bar_;
  const std::size_t captures_;
  const std::vector<std::string> stages_;
  const std::chrono::steady_clock::time_point begin_;
  std::mutex mutex_;
  std::size_t skipped_ = 0, finished_ = 0;
  double under_way_ = 0;  ///< captures, the shares of those under way added
};

}  // namespace bitattn::cli
