#pragma once
// Remedies of the inputs: what a model would do to q and k before it calls attention. dq and dk of a result
// are those of what attention was then given.

#include "datasets/problem.hpp"
#include "emu/profile/remedies.hpp"

namespace bitattn {

/// mean-free-keys, mean-free-keys-bf16, qk-norm, qk-norm-gain.
bool is_input_remedy(profile::Remedy remedy);

/// The problem with its q and k changed; norms before means (docs/remedies.md, "In the model").
Problem remedy_inputs(const Problem& problem, const profile::RemedySet& remedies);

}  // namespace bitattn
