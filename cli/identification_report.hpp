#pragma once
// Which kernel made the bits of a capture, as a report, in a few lines, or as JSON.

#include <string>
#include <vector>

#include "audit/identify.hpp"
#include "cli/output.hpp"
#include "datasets/result.hpp"

namespace bitattn::cli {

/// Does a kernel give every recorded bit?
bool identified_exactly(const audit::Identification& found);

/// All of it, with the capture's header; several lines, each with a line feed.
std::string identification_report(const Capture& capture, const audit::Identification& found);
/// "follows fa3 in every recorded bit: …", and what there is to add to it, a line each without a line feed.
std::vector<std::string> identification_brief(const audit::Identification& found);
/// What a summary of many captures counts: "fa3, unmodified", the profile and its deviations, "no profile
/// fits".
std::string identification_kind(const audit::Identification& found);
Json identification_json(const audit::Identification& found);

}  // namespace bitattn::cli
