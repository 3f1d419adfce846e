#pragma once
// Our own Hopper kernels in FlashAttention-3's operation order as a backend (gpu/kernels).

#include <memory>

#include "backends/backend.hpp"

namespace bitattn {

/// The backend `gpu:fa3`. run() throws InputError with one line where there is no Hopper GPU, too little
/// memory on it, or a problem that the kernels do not have: head dims other than 64 and 128, softcap, local
/// windows, packed sequences.
std::unique_ptr<Backend> gpu_kernels_backend();

}  // namespace bitattn
