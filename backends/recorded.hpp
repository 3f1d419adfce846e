#pragma once
// What the capture itself recorded, as a backend.

#include <memory>

#include "backends/backend.hpp"

namespace bitattn {

std::unique_ptr<Backend> recorded_backend();

}  // namespace bitattn
