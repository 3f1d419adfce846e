#pragma once
// Backends with remedies: NAME+REMEDY+…

#include <memory>
#include <string>
#include <vector>

#include "backends/backend.hpp"

namespace bitattn {

/// "fa3+subtract-first+gproj" and the like. Remedies inside a kernel take fa3; those of the inputs take any
/// backend that computes. Throws InputError for a name that means nothing.
std::unique_ptr<Backend> remedied_backend(const std::string& name);

/// The list with a line for every remedy of fa3 after that of fa3.
std::vector<BackendInfo> with_remedies(std::vector<BackendInfo> list);

}  // namespace bitattn
