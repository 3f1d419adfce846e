// bitattn generate: a synthetic capture, problem only. Same seed, same bits, on every machine.

#include <fmt/format.h>

#include <cstdlib>
#include <memory>

#include "cli/capture_list.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "datasets/capture_file.hpp"
#include "datasets/error.hpp"
#include "datasets/regime.hpp"

namespace bitattn::cli {

namespace {

struct Options {
  GenerateOptions problem;
  std::string output, heads = "1", seqlen = "256", window;
};

int run(Options options, const CommonOptions& common) {
  GenerateOptions& problem = options.problem;
  const auto [heads_q, heads_kv] = parse_pair("--heads", options.heads, 1);
  const auto [seqlen_q, seqlen_k] = parse_pair("--seqlen", options.seqlen, 1);
  problem.heads_q = static_cast<std::size_t>(heads_q);
  problem.heads_kv = static_cast<std::size_t>(heads_kv);
  problem.seqlen_q = static_cast<std::size_t>(seqlen_q);
  problem.seqlen_k = static_cast<std::size_t>(seqlen_k);
  if (!options.window.empty()) {
    if (options.window.find(':') == std::string::npos) {
      throw InputError("--window " + options.window + ": expected LEFT:RIGHT, -1 for no limit");
    }
    const auto [left, right] = parse_pair("--window", options.window, -1);
    problem.window_left = static_cast<int>(left);
    problem.window_right = static_cast<int>(right);
  }
  const Problem made = generate(problem);
  const CaptureName output = parse_capture_name(options.output);
  CaptureWriter writer(output.file);
  const std::string group = output.group.empty() ? "/" : output.group;
  writer.write_capture(group, made, Result{});
  writer.commit();
  if (common.json) {
    print_json({{"written", options.output},
                {"regime", problem.regime},
                {"seed", problem.seed},
                {"q", json_shape(made.q.shape)},
                {"k", json_shape(made.k.shape)}});
  } else if (!common.quiet) {
    print(fmt::format("{}: regime {}, seed {}, batch {}, heads {}:{}, queries {}, keys {}, head size {}\n",
                      options.output, problem.regime, problem.seed, made.batch, made.heads_q, made.heads_kv,
                      made.seqlen_q, made.seqlen_k, made.head_dim));
  }
  return kHolds;
}

}  // namespace

void add_generate(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command =
      app.add_subcommand("generate", "Writes a synthetic capture (a problem without results)");
  add_common_options(*command, common);
  const auto options = std::make_shared<Options>();
  GenerateOptions& problem = options->problem;
  std::string names;
  for (const RegimeInfo& info : regimes()) names += (names.empty() ? "" : ", ") + info.name;
  command->add_option("output", options->output, "The file to write (OUT.h5 or OUT.h5:/group)")->required();
  command->add_option("--regime", problem.regime, "Recipe of the inputs: " + names);
  command->add_option("--batch", problem.batch, "Batch elements")->check(CLI::PositiveNumber);
  command->add_option("--heads", options->heads, "Query heads, or HQ:HKV");
  command->add_option("--seqlen", options->seqlen, "Queries and keys, or SQ:SK");
  command->add_option("--dim", problem.head_dim, "Head size")->check(CLI::PositiveNumber);
  command->add_flag("--causal", problem.causal, "Causal mask");
  command->add_option("--window", options->window, "Local window LEFT:RIGHT, -1 for no limit");
  command->add_option("--softcap", problem.softcap, "Softcap (0: none)");
  command->add_option("--scale", problem.softmax_scale, "softmax_scale (default 1/sqrt(head size))")
      ->check([](const std::string& text) {  // 0 would mean the default
        return std::strtod(text.c_str(), nullptr) > 0 ? std::string() : text + " is no number above 0";
      });
  command->add_option("--seed", problem.seed, "Seed: same seed, same bits")
      ->check([](const std::string& text) {
        return text.find('-') == std::string::npos ? std::string() : text + " is no whole number from 0 on";
      });
  command->add_option("--key-shift", problem.key_shift,
                      "Adds one vector of this times the mean key norm to all keys of a head");
  command->callback(
      [options, &common, &action] { action = [options, &common] { return run(*options, common); }; });
}

}  // namespace bitattn::cli
