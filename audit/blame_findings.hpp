#pragma once
// Blame as HDF5 findings (docs/blame.md lists the data sets).

#include <string>

#include "audit/blame.hpp"
#include "datasets/capture_file.hpp"

namespace bitattn::audit {

/// Writes /findings/blame of the capture at `group`.
void write_blame(CaptureWriter& writer, const std::string& group, const Problem& problem, const Blame& blame);

}  // namespace bitattn::audit
