#pragma once
// Two runs compared: where they part, which kernel each of them follows there, what differs.

#include <string>

#include "audit/identify.hpp"
#include "audit/parting.hpp"
#include "cli/output.hpp"

namespace bitattn::cli {

/// Whose kernel made the bits of one side's capture, as far as that was asked and could be told.
struct FollowedKernel {
  std::optional<audit::Identification> found;
  std::string kernel;   ///< as the capture says
  std::string refused;  ///< why it could not be told
};

struct FollowedKernels {
  FollowedKernel a, b;
};

/// What the search for both sides' kernels found, or why there was none ("": nothing differs).
struct Followed {
  std::optional<FollowedKernels> kernels;
  std::string not_looked_for;
};

/// All of it as sections; of the tensors, those of the pair where the runs part, or of the only one.
std::string parting_report(const audit::ComparedRuns& runs, const Followed& followed);
Json parting_json(const audit::ComparedRuns& runs, const Followed& followed);

}  // namespace bitattn::cli
