#pragma once
// What FlashAttention-3's emulation takes.

#include "datasets/result.hpp"
#include "emu/profile/remedies.hpp"

namespace bitattn {

/// Throws InputError for what FlashAttention-3 itself refuses or what its emulation does not cover.
void check_fa3_supports(const Capture& capture);

/// Throws InputError where a remedy has no meaning for this problem.
void check_remedies_fit(const Capture& capture, const profile::RemedySet& remedies);

}  // namespace bitattn
