#pragma once
// SIGINT and SIGTERM as an exception at a safe place, so that an interrupted run leaves nothing behind.

#include <exception>
#include <string>

namespace bitattn {

/// The run was interrupted. Not an InputError: the program ends with 128 + signal.
class Interrupted : public std::exception {
 public:
  explicit Interrupted(int signal);
  const char* what() const noexcept override { return text_.c_str(); }
  int signal() const { return signal_; }

 private:
  int signal_;
  std::string text_;
};

/// From now on the first SIGINT or SIGTERM only sets a flag, for throw_if_interrupted(); the second one
/// removes the temporary files of open CaptureWriters and ends the process at once with 128 + signal.
void install_interrupt_handlers();

/// Throws Interrupted once a signal has arrived. For long loops (progress callbacks); any thread; costs one
/// load.
void throw_if_interrupted();

namespace detail {

/// Files that a second signal removes. `path` must be shorter than 4096 bytes; returns a slot for
/// forget_temporary, or -1 where all slots are taken (the file then outlives a second signal, nothing else).
int remember_temporary(const std::string& path);
void forget_temporary(int slot);

}  // namespace detail
}  // namespace bitattn
