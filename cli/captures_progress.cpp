#include "cli/captures_progress.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace bitattn::cli {

std::string time_left_text(double seconds) {
  constexpr double kMinute = 60;
  constexpr double kHour = 3600;
  if (seconds < 2 * kMinute) return fmt::format("{:.0f} s", std::ceil(seconds));
  if (seconds < 2 * kHour) return fmt::format("{:.0f} min", std::ceil(seconds / kMinute));
  return fmt::format("{:.1f} h", seconds / kHour);
}

CapturesProgress::CapturesProgress(Progress& bar, std::size_t captures, std::vector<std::string> stages)
    : bar_(bar), captures_(captures), stages_(std::move(stages)), begin_(std::chrono::steady_clock::now()) {}

void CapturesProgress::skip() {
  const std::lock_guard lock(mutex_);
  ++skipped_;
}

void CapturesProgress::update(const std::string& capture, const std::string& stage, double share,
                              double& done) {
  std::string text;
  double all = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto at = std::find(stages_.begin(), stages_.end(), stage);
    const double now = (static_cast<double>(at - stages_.begin()) + std::clamp(share, 0.0, 1.0)) /
                       static_cast<double>(stages_.size());
    // Threads report out of order.
    if (at != stages_.end() && now > done) {
      under_way_ += now - done;
      done = now;
    }
    const double computed = static_cast<double>(finished_) + under_way_;
    all = (static_cast<double>(skipped_) + computed) / static_cast<double>(captures_);
    text = fmt::format("{}/{}", skipped_ + finished_, captures_);
    if (finished_ > 0) {
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin_;
      const double left = static_cast<double>(captures_ - skipped_) - computed;
      text += ", " + time_left_text(spent.count() / computed * left) + " left";
    }
  }
  // As wide as it becomes, so that the bar stays where it is.
  bar_.update(capture, fmt::format("{:<18}", text), all);
}

void CapturesProgress::finish(double done) {
  const std::lock_guard lock(mutex_);
  under_way_ -= done;
  ++finished_;
}

}  // namespace bitattn::cli
