#pragma once
// The golden captures a test can find, and a comparison of results that knows nothing of the audit it will
// later check.

#include <cstddef>
#include <string>
#include <vector>

#include "datasets/result.hpp"

namespace bitattn::test {

/// Paths of the bundled captures under datasets/goldens/<folder>, sorted.
std::vector<std::string> bundled_captures(const std::string& folder);

/// Paths of the large set's captures: $BITATTN_GOLDENS/<folder>/*.h5, sorted; empty where the variable is not
/// set.
std::vector<std::string> large_set_captures(const std::string& folder);

/// The one capture of a file.
Capture load(const std::string& path);

/// Elements of all tensors that both results hold: how many were compared, how many differ in a bit. Places
/// of padded arrays that no kernel writes (0xffffffff in `emulated`) are left out.
struct Difference {
  std::size_t compared = 0;
  std::size_t differing = 0;
  std::string text;  ///< "out 0/32768, lse 0/256, …"
};
Difference difference(const Result& recorded, const Result& emulated);

}  // namespace bitattn::test
