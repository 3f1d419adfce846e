#pragma once
// Kernel launches, each checked, and the time that work on the GPU took.

#include "gpu/common/device.hpp"

namespace bitattn::gpu {

/// Launches `kernel` on the default stream and throws Error where the launch itself fails. `what` names it.
/// In a plain C++ compiler the kernel runs in the stand-in for a GPU that some tests bring
/// (tests/gpu/stand_in).
template <class... Parameters, class... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
#if defined(__CUDACC__)
  kernel<<<grid, block>>>(Parameters(arguments)...);
  check(cudaGetLastError(), what);
#else
  run_on_stand_in(what, grid, block, [&] { kernel(Parameters(arguments)...); });
#endif
}

/// A CUDA event.
class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "creating an event"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record() { check(cudaEventRecord(event_, nullptr), "recording an event"); }
  /// Waits for this event; milliseconds since `start`.
  double milliseconds_since(const Event& start) {
    check(cudaEventSynchronize(event_), "waiting for the GPU");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start.event_, event_), "reading an event");
    return static_cast<double>(milliseconds);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace bitattn::gpu
