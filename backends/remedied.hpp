#pragma once
// Backends with remedies, and with rounding sites run exactly: NAME+REMEDY+…+exact:SITE,…

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn {

/// "fa3+subtract-first+gproj", "fa3+exact:o_cast,ds_cast" and the like. Remedies inside a kernel and exact
/// sites take fa3; remedies of the inputs take any backend that computes. Throws InputError for a name that
/// means nothing.
std::unique_ptr<Backend> remedied_backend(const std::string& name);

/// What a name with or without a '+' stands for, where that is an emulated kernel with rounding sites.
struct EmulatedKernel {
  profile::Profile profile;   ///< bears the name
  profile::RemedySet inputs;  ///< remedies of the inputs, applied before the kernel
};

/// Empty for other backends (reference, fp32, recorded, GPU). Throws InputError for a name that means
/// nothing.
std::optional<EmulatedKernel> emulated_kernel(const std::string& name);

/// The list with a line for every remedy of fa3 after that of fa3.
std::vector<BackendInfo> with_remedies(std::vector<BackendInfo> list);

}  // namespace bitattn
