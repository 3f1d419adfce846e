#pragma once
// Which device computes for a backend: what a stored result says in its attribute `device`.

#include <string>

namespace bitattn {

/// "CPU", or the name of the GPU that gpu:fa3 and emu-gpu:fa3 run on.
std::string device_of(const std::string& backend);

}  // namespace bitattn
