#pragma once
// What every subcommand shares: the common options, exit codes, and how a subcommand is added.

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

namespace bitattn::cli {

/// 0: done, and what was asked holds. 1: done, and it does not hold. 2: bad usage or bad input.
enum ExitCode : int { kHolds = 0, kDoesNotHold = 1, kBadInput = 2 };

struct CommonOptions {
  bool json = false;
  bool quiet = false;
  int threads = 0;           ///< 0: all
  std::string command_line;  ///< as it was typed, each word quoted where a shell needs it
};

/// What main runs once the command line is understood.
using Action = std::function<int()>;

/// --json, --quiet, --threads on a subcommand.
void add_common_options(CLI::App& command, CommonOptions& common);

void add_backends(CLI::App& app, CommonOptions& common, Action& action);
void add_bench(CLI::App& app, CommonOptions& common, Action& action);
void add_compare(CLI::App& app, CommonOptions& common, Action& action);
void add_diagnose(CLI::App& app, CommonOptions& common, Action& action);
void add_generate(CLI::App& app, CommonOptions& common, Action& action);
void add_info(CLI::App& app, CommonOptions& common, Action& action);
void add_probe(CLI::App& app, CommonOptions& common, Action& action);
void add_remedies(CLI::App& app, CommonOptions& common, Action& action);
void add_run(CLI::App& app, CommonOptions& common, Action& action);
void add_sites(CLI::App& app, CommonOptions& common, Action& action);
void add_verify(CLI::App& app, CommonOptions& common, Action& action);
void add_witness(CLI::App& app, CommonOptions& common, Action& action);

/// "A:B" or "A" (then both are A) as two integers of at least `least`. Throws InputError that names the
/// option.
std::pair<long long, long long> parse_pair(const std::string& option, const std::string& text,
                                           long long least);

}  // namespace bitattn::cli
