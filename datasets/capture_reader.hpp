#pragma once
// Reading of captures inside this process. Callers outside datasets use capture_file.hpp, which probes the
// file first.

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "datasets/result.hpp"

namespace bitattn {

/// Called before each piece of work on a file with the bytes it will read, so that a watcher knows how long
/// to wait.
using BeforeRead = std::function<void(std::size_t bytes)>;

/// Names of all groups of a file that hold q, k and v: "/" for the root, "/a/b" for others, in the order of
/// their names. Throws InputError if the file cannot be read, or a group holds only two of the three.
std::vector<std::string> capture_groups(const std::string& path, const BeforeRead& before_read = {});

/// Does that group of the file exist and hold q, k and v? Throws InputError with the reason if not.
void expect_capture_group(const std::string& path, const std::string& group);

/// The attributes of one element of each of these groups of a file. Throws InputError.
std::map<std::string, Attributes> capture_attributes(const std::string& path,
                                                     const std::vector<std::string>& groups,
                                                     const BeforeRead& before_read);

/// One capture, checked in full. `largest_bytes` and more is refused before memory is taken. Throws
/// InputError.
Capture read_capture_group(const std::string& path, const std::string& group, std::size_t largest_bytes,
                           const BeforeRead& before_read);

/// Memory of this machine or of the container it runs in, in bytes: the most that a capture may claim.
std::size_t machine_memory();

/// "FILE.h5" for the root, "FILE.h5:/group" for the others.
std::string full_name(const std::string& path, const std::string& group);

}  // namespace bitattn
