#pragma once
// Reading in a child process, because the HDF5 library may crash, hang, take all memory, or quietly spoil its
// own on a damaged file. The child reads and checks; this process gets plain words through a pipe and never
// opens the file itself.

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "datasets/foreign.hpp"
#include "datasets/result.hpp"

namespace bitattn {

struct ChildLimits {
  double seconds = 20;                                 ///< without any progress
  double bytes_per_second = 4.0e6;                     ///< more time is given for data, at this slowest speed
  std::size_t spare_memory = std::size_t{512} << 20U;  ///< address space beyond what the checked sizes need
};

/// Forks; the child reads the group named ("" for every capture of the file), metadata and data. Returns the
/// groups of these captures. Throws InputError with the child's own message, or one that says that it crashed
/// or took too long.
///
/// Why forking is safe in a program with threads: the child makes no new thread and ends by _exit; it uses
/// malloc, which glibc keeps usable after fork, file descriptors, and HDF5, whose lock this process holds
/// during the fork, so that no other thread is inside the library. It takes no other lock that a thread of
/// ours could hold (no iostreams, no oneTBB).
std::vector<std::string> check_in_child(const std::string& path, const std::string& group,
                                        const ChildLimits& limits);

/// The captures of a file, or the group named ("": all), and their attributes; reads no tensor. Throws
/// InputError as above.
std::map<std::string, Attributes> attributes_in_child(const std::string& path, const std::string& group,
                                                      const ChildLimits& limits);

/// One capture, read and checked by a child that was forked for it. Throws InputError as above.
Capture read_in_child(const std::string& path, const std::string& group, const ChildLimits& limits);

/// All data sets of a file that need not be a capture (foreign.hpp). Throws InputError as above.
ForeignFile read_foreign_in_child(const std::string& path, const ChildLimits& limits);

}  // namespace bitattn
