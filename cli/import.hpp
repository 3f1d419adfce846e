#pragma once
// bitattn import: tensors of other formats as captures.

#include "cli/command.hpp"

namespace bitattn::cli {

void add_import(CLI::App& app, CommonOptions& common, Action& action);

}  // namespace bitattn::cli
