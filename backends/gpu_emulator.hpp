#pragma once
// The emulator's own arithmetic run on a GPU, as a backend: the bits of `fa3`, many heads at a time.

#include <memory>

#include "backends/backend.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn {

/// A backend that runs this profile on the selected GPU; its name is "emu-gpu:" and the profile's.
/// `workspace`: bytes of GPU memory for what is in the making, 0 for a share of what is free; changes no bit.
/// No observers, no dQ in parts.
std::unique_ptr<Backend> gpu_emulator_backend(const profile::Profile& profile, std::size_t workspace = 0);

}  // namespace bitattn
