#pragma once
// centred-keys: dS.K is taken with K - kappa, kappa one vector for a head's keys, chosen so that the
// difference is a BF16 number exactly and no coordinate grows. Nothing is added back, because the sum over
// keys of dS is 0 in theory.

#include <cstdint>
#include <vector>

#include "emu/kernels/attention.hpp"

namespace bitattn::kernels::remedies {

/// kappa of one coordinate as a BF16 word; keys: element j is keys[j * stride]. Zero unless all keys are
/// finite, of one sign and within a factor of 4 of each other.
std::uint16_t key_centre(const std::uint16_t* keys, std::ptrdiff_t stride, int count);

/// K - kappa of every sequence and KV head, laid out as K.
std::vector<std::uint16_t> centred_keys(const AttentionInputs& inputs);

}  // namespace bitattn::kernels::remedies
