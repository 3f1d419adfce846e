#include "cli/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "cli/table.hpp"
#include "datasets/interrupt.hpp"

namespace bitattn::cli {

Progress::Progress(bool quiet) : shown_(!quiet && ::isatty(STDERR_FILENO) != 0) {}

void Progress::subject(const std::string& text) {
  const std::lock_guard lock(mutex_);
  subject_ = text;
  stage_.clear();
  share_ = 0;
}

void Progress::update(const std::string& stage, double share) {
  throw_if_interrupted();
  if (!shown_) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  // Threads report out of order: a bar never runs backwards within a stage.
  share_ = stage == stage_ ? std::max(share_, share) : share;
  stage_ = stage;
  draw();
}

void Progress::update(const std::string& subject, const std::string& stage, double share) {
  throw_if_interrupted();
  if (!shown_) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  subject_ = subject;
  stage_ = stage;
  share_ = std::max(share_, share);
  draw();
}

void Progress::draw() {
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  drawn_ = true;
  constexpr int kWidth = 24;
  const int filled = static_cast<int>(std::clamp(share_, 0.0, 1.0) * kWidth);
  const std::string bar = std::string(static_cast<std::size_t>(filled), '#') +
                          std::string(static_cast<std::size_t>(kWidth - filled), '.');
  const std::string line = fmt::format("{}  {:<10} [{}] {:3.0f}%", shortened(subject_, 44), stage_, bar,
                                       std::clamp(share_, 0.0, 1.0) * 100);
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  std::fflush(stderr);
}

void Progress::clear() {
  const std::lock_guard lock(mutex_);
  if (!drawn_) return;
  std::fprintf(stderr, "\r\033[K");
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace bitattn::cli
