#include "datasets/interrupt.hpp"

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstring>

namespace bitattn {
namespace {

std::atomic<int> pending_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "the handler may touch lock-free atomics only");

struct Slot {
  enum State : int { free_slot, being_written, in_use };
  std::atomic<int> state{free_slot};
  std::array<char, 4096> path{};
};
std::array<Slot, 16> temporaries;

extern "C" void bitattn_on_signal(int signal) {
  int none = 0;
  if (pending_signal.compare_exchange_strong(none, signal)) return;
  for (Slot& slot : temporaries) {
    if (slot.state.load() == Slot::in_use) ::unlink(slot.path.data());
  }
  ::_exit(128 + signal);
}

}  // namespace

Interrupted::Interrupted(int signal)
    : signal_(signal),
      text_(signal == SIGINT ? "interrupted" : "ended by signal " + std::to_string(signal)) {}

void install_interrupt_handlers() {
  struct sigaction action {};
  action.sa_handler = bitattn_on_signal;
  ::sigemptyset(&action.sa_mask);
  // No SA_RESTART: a wait in poll or read shall come back and look at the flag.
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

void throw_if_interrupted() {
  const int signal = pending_signal.load(std::memory_order_relaxed);
  if (signal != 0) throw Interrupted(signal);
}

namespace detail {

int remember_temporary(const std::string& path) {
  if (path.size() >= temporaries.front().path.size()) return -1;
  for (std::size_t i = 0; i < temporaries.size(); ++i) {
    int expected = Slot::free_slot;
    if (!temporaries[i].state.compare_exchange_strong(expected, Slot::being_written)) continue;
    std::memcpy(temporaries[i].path.data(), path.c_str(), path.size() + 1);
    temporaries[i].state.store(Slot::in_use);
    return static_cast<int>(i);
  }
  return -1;
}

void forget_temporary(int slot) {
  if (slot >= 0) temporaries[static_cast<std::size_t>(slot)].state.store(Slot::free_slot);
}

}  // namespace detail
}  // namespace bitattn
