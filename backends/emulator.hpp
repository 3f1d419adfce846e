#pragma once
// The emulator as a backend: a profile run over a problem.

#include <memory>

#include "backends/backend.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn {

/// A backend that runs this profile; it bears the profile's name. Tests use it with profiles that no name
/// stands for.
std::unique_ptr<Backend> emulator_backend(const profile::Profile& profile);

}  // namespace bitattn
