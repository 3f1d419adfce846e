#pragma once
// High-precision attention as a backend.

#include <memory>
#include <string>

#include "backends/backend.hpp"

namespace bitattn {

/// `name`: "reference" (the fast one, about 115 bits, with a proven bound for every element) or
/// "reference:BITS" (every operation in MPFR at that precision, many times slower). Throws InputError unless
/// BITS is a number from 24 to 4096.
std::unique_ptr<Backend> reference_backend(const std::string& name);

}  // namespace bitattn
