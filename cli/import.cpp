#include "cli/import.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstdlib>
#include <memory>

#include "cli/capture_list.hpp"
#include "cli/output.hpp"
#include "cli/table.hpp"
#include "datasets/capture_file.hpp"
#include "datasets/error.hpp"
#include "datasets/import.hpp"

namespace bitattn::cli {

namespace {

struct Options {
  std::vector<std::string> files, map, attributes;
  std::string output, layout, window, alignment;
  double scale = 0, softcap = 0;
  bool causal = false, round = false;
  CLI::Option* scale_option = nullptr;
  CLI::Option* softcap_option = nullptr;
};

/// NAME=VALUE taken apart.
std::pair<std::string, std::string> assignment(const std::string& option, const std::string& text) {
  const std::size_t at = text.find('=');
  if (at == 0 || at == std::string::npos || at + 1 == text.size())
    throw InputError(option + " " + one_line(text) + ": expected NAME=VALUE");
  return {text.substr(0, at), text.substr(at + 1)};
}

/// A number where the whole text is one.
Attribute attribute(const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const long long integer = std::strtoll(text.c_str(), &end, 10);
  if (errno == 0 && *end == '\0') return std::int64_t{integer};
  errno = 0;
  const double real = std::strtod(text.c_str(), &end);
  if (errno == 0 && *end == '\0') return real;
  return text;
}

ImportOptions import_options(const Options& options) {
  ImportOptions how;
  for (const std::string& text : options.map) how.names.insert(assignment("--map", text));
  for (const std::string& text : options.attributes) {
    const auto [name, value] = assignment("--attribute", text);
    how.attributes[name] = attribute(value);
  }
  how.layout = options.layout;
  how.round = options.round;
  if (options.scale_option->count() > 0) how.softmax_scale = options.scale;
  if (options.softcap_option->count() > 0) how.softcap = options.softcap;
  if (options.causal) how.causal = true;
  if (!options.alignment.empty()) how.causal_alignment = options.alignment;
  if (!options.window.empty()) {
    if (options.window.find(':') == std::string::npos)
      throw InputError("--window " + options.window + ": expected LEFT:RIGHT, -1 for no limit");
    const auto [left, right] = parse_pair("--window", options.window, -1);
    how.window_left = static_cast<int>(left);
    how.window_right = static_cast<int>(right);
  }
  return how;
}

/// What was made of the file's axes, in words: a wrong layout is seen here first.
std::string shape_words(const Problem& p) {
  const auto heads = [](std::size_t q, std::size_t kv) {
    return q == kv ? counted(q, "head") : fmt::format("{} query and {} KV heads", q, kv);
  };
  const std::string tokens = p.total_q() == p.total_k()
                                 ? counted(p.seqlen_q, "token")
                                 : fmt::format("{} queries, {} keys", p.seqlen_q, p.seqlen_k);
  return fmt::format("batch {}, {}, {}, head size {}", p.batch, tokens, heads(p.heads_q, p.heads_kv),
                     p.head_dim);
}

int run(const Options& options, const CommonOptions& common) {
  const ImportOptions how = import_options(options);
  check_output(options.output, options.files);
  const ForeignFile file = read_foreign(options.files);
  const std::string where = options.files.size() == 1 ? options.files[0] : options.files[0] + " and others";
  const std::vector<ImportedCapture> captures = import_captures(where, file, how);
  const CaptureName output = parse_capture_name(options.output);
  CaptureWriter writer(output.file, options.files);
  Json json = Json::array();
  std::string text;
  for (const ImportedCapture& import : captures) {
    const Problem& problem = import.capture.problem;
    std::string group = output.group == "/" ? "" : output.group;
    if (group.empty() || captures.size() > 1) group += import.group;
    writer.write_capture(group, problem, import.capture.recorded);
    json.push_back({{"group", group},
                    {"layout", import.layout},
                    {"q", json_shape(problem.q.shape)},
                    {"k", json_shape(problem.k.shape)},
                    {"tensors", import.taken},
                    {"rounded", import.rounded}});
    std::string line = fmt::format("{}{}: ", output.file, group == "/" ? "" : ":" + one_line(group));
    for (const std::string& taken : import.taken) line += (taken == import.taken[0] ? "" : ", ") + taken;
    line += fmt::format("; read as {}: {}", import.layout, shape_words(problem));
    if (import.rounded > 0) line += fmt::format("; {} rounded to BF16", counted(import.rounded, "element"));
    text += wrapped(line, 0);
  }
  writer.commit();
  if (common.json) {
    print_json({{"written", options.output}, {"captures", json}});
  } else if (!common.quiet) {
    print(text);
  }
  return kHolds;
}

}  // namespace

void add_import(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command = app.add_subcommand(
      "import",
      "Tensors of .safetensors, .npz, .npy and HDF5 files as captures (.pt: python3 -m bitattn.importing)");
  add_common_options(*command, common);
  const auto options = std::make_shared<Options>();
  command->add_option("files", options->files, "IN.safetensors, IN.npz, IN.h5, or q.npy k.npy v.npy …")
      ->required();
  command->add_option("-o,--output", options->output, "The file to write (OUT.h5 or OUT.h5:/group)")
      ->required();
  command->add_option("--map", options->map,
                      "TENSOR=NAME: which tensor of the file is q, k, v, dout, out, lse, dq, dk, dv, …");
  command->add_option("--layout", options->layout,
                      "Order of the file's axes: BSHD, BHSD, SBHD or THD (default BSHD; THD for three axes)");
  command->add_flag("--round", options->round, "Round what is not BF16 to nearest even; else it is refused");
  options->scale_option = command->add_option("--scale", options->scale, "softmax_scale");
  command->add_flag("--causal", options->causal, "Causal mask");
  command->add_option("--causal-alignment", options->alignment, "bottom-right (default) or top-left");
  command->add_option("--window", options->window, "Local window LEFT:RIGHT, -1 for no limit");
  options->softcap_option = command->add_option("--softcap", options->softcap, "Softcap (0: none)");
  command->add_option("--attribute", options->attributes, "NAME=VALUE: kernel=…, step=…, layer=… and others");
  command->callback(
      [options, &common, &action] { action = [options, &common] { return run(*options, common); }; });
}

}  // namespace bitattn::cli
