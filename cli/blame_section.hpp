#pragma once
// The section BLAME of a diagnosis: which rounding sites own the errors.

#include <string>

#include "audit/blame.hpp"
#include "cli/output.hpp"

namespace bitattn::cli {

/// Tables with a heading: shares by tensor, of dQ in detail, by head, of the worst rows.
std::string blame_text(const Problem& problem, const audit::Blame& blame);
/// One clause for a verdict: the site that owns most of dQ's error (forward only: of O's) and its share.
std::string blame_verdict(const audit::Blame& blame);
Json blame_json(const audit::Blame& blame);

}  // namespace bitattn::cli
