#pragma once
// What was tried on a capture, as text and as JSON.

#include <string>

#include "audit/remedies.hpp"
#include "cli/output.hpp"

namespace bitattn::cli {

std::string remedies_report(const Capture& capture, const audit::RemediesReport& report);
Json remedies_json(const audit::RemediesReport& report);

}  // namespace bitattn::cli
