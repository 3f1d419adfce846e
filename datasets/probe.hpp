#pragma once
// Reading a file in a child process first, because the HDF5 library may crash, hang or take all memory on a
// damaged file.

#include <cstddef>
#include <string>

namespace bitattn {

struct ProbeLimits {
  double seconds = 60;                                 ///< without any progress
  double bytes_per_second = 4.0e6;                     ///< more time is given for data, at this slowest speed
  std::size_t spare_memory = std::size_t{512} << 20U;  ///< address space beyond what the checked sizes need
};

/// Forks; the child reads the named group ("" for every capture of the file), metadata and data, just as this
/// process would afterwards. Throws InputError with the child's own message, or one that says that it crashed
/// or took too long.
///
/// Why forking is safe in a program with threads: the child makes no new thread and ends by _exit; it uses
/// malloc, which glibc keeps usable after fork, file descriptors, and HDF5, whose lock this process holds
/// during the fork, so that no other thread is inside the library. It takes no other lock that a thread of
/// ours could hold (no iostreams, no oneTBB).
void probe_in_child(const std::string& path, const std::string& group, const ProbeLimits& limits);

/// probe_in_child unless the same bytes (device, inode, size, times) have passed in this process already.
/// What is left of a race: a file changed between the look at its times and the read that follows at once.
void probe_once(const std::string& path, const std::string& group);

}  // namespace bitattn
