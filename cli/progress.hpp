#pragma once
// A progress bar on standard error, on a terminal only.

#include <chrono>
#include <mutex>
#include <string>

namespace bitattn::cli {

/// update() may be called from any thread. It also throws Interrupted once the user has asked for an end.
class Progress {
 public:
  explicit Progress(bool quiet);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() { clear(); }

  /// What is being worked on; shown before the stage.
  void subject(const std::string& text);
  void update(const std::string& stage, double share);
  /// The same where several subjects are under way: shows this one.
  void update(const std::string& subject, const std::string& stage, double share);
  /// Takes the bar off the terminal.
  void clear();

 private:
  void draw();

  bool shown_;
  std::mutex mutex_;
  std::string subject_;
  std::string stage_;
  double share_ = 0;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace bitattn::cli
