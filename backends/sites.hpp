#pragma once
// The emulator with rounding sites as switches, as a backend.

#include <memory>

#include "backends/backend.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn {

/// A backend that runs this profile over fp64 numbers, its `exact` sites without rounding
/// and its deviations honoured. Result::uncast
/// holds the values before the last cast whether asked for or not, Result's words their BF16 casts. No
/// intermediates, no observers.
std::unique_ptr<Backend> site_backend(const profile::Profile& profile);

}  // namespace bitattn
