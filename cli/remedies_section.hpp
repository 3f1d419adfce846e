#pragma once
// Remedies as a section of a diagnosis: options, text and JSON.

#include <string>

#include "audit/find_remedies.hpp"
#include "cli/output.hpp"

namespace CLI {
class App;
}

namespace bitattn::cli {

/// --remedies and --no-remedies.
void add_remedies_options(CLI::App& command, audit::TryRemedies& whether);

/// Section REMEDIES; "" where there is nothing to say.
std::string remedies_section(const audit::RemediesFinding& finding);

/// As `bitattn remedies --json`, or why they were not tried.
Json remedies_section_json(const audit::RemediesFinding& finding);

}  // namespace bitattn::cli
