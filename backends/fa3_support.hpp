#pragma once
// What FlashAttention-3's emulation takes.

#include "datasets/result.hpp"

namespace bitattn {

/// Throws InputError for what FlashAttention-3 itself refuses or what its emulation does not cover.
void check_fa3_supports(const Capture& capture);

}  // namespace bitattn
