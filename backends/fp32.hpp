#pragma once
// Plain fp32 attention as a backend: no narrow cast before the last.

#include <memory>

#include "backends/backend.hpp"

namespace bitattn {

std::unique_ptr<Backend> fp32_backend();

}  // namespace bitattn
