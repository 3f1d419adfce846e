#pragma once
// bitattn identify as a subcommand.

#include "cli/command.hpp"

namespace bitattn::cli {

void add_identify(CLI::App& app, CommonOptions& common, Action& action);

}  // namespace bitattn::cli
