#pragma once
// Every way of computing attention is a backend: it turns a problem into a result and bears the name users
// type.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "datasets/result.hpp"
#include "emu/kernels/observer.hpp"

namespace bitattn {

struct RunOptions {
  bool want_uncast = false;            ///< keep the values before their last cast (Result::uncast)
  bool want_order_free_parts = false;  ///< keep dQ (dK, dV) in parts where the kernel fixes no order
  bool want_accumulators =
      false;  ///< keep dq_accum (and dk_accum, dv_accum); always kept where the capture recorded them
  bool forward_only = false;
  /// Called with what the emulator has in its hands, row block by row block; nullptr: nobody looks. Backends
  /// other than the emulator ignore it.
  kernels::Observer* observer = nullptr;
  /// Called from any thread with the share done, 0 to 1; may throw to cancel.
  std::function<void(double)> progress;
};

class Backend {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend() = default;
  virtual std::string name() const = 0;
  /// Throws InputError where the problem is outside what this backend can do.
  virtual Result run(const Capture& capture, const RunOptions& options) const = 0;
};

struct BackendInfo {
  std::string name, description;
};

/// What `bitattn backends` lists.
const std::vector<BackendInfo>& backends();

/// The backend of that name ("fa3", "fp32", "reference", "reference:256", "recorded"). Throws InputError for
/// any other.
std::unique_ptr<Backend> make_backend(const std::string& name);

}  // namespace bitattn
