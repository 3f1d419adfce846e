// bitattn: what a BF16 attention kernel computes, to the last bit, and where its rounding goes wrong.

#include <tbb/global_control.h>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "cli/identify.hpp"
#include "cli/import.hpp"
#include "cli/output.hpp"
#include "cli/table.hpp"
#include "datasets/error.hpp"
#include "datasets/interrupt.hpp"

namespace bitattn::cli {

void add_common_options(CLI::App& command, CommonOptions& common) {
  command.add_flag("--json", common.json, "One JSON object on standard output instead of the tables");
  command.add_flag("--quiet", common.quiet, "No progress and no remarks on standard error");
  command.add_option("--threads", common.threads, "Threads to use (default: all cores); changes no bit")
      ->check(CLI::Range(1, 4096));
}

std::pair<long long, long long> parse_pair(const std::string& option, const std::string& text,
                                           long long least) {
  const auto parse = [&](const std::string& part) {
    long long value = 0;
    const char* end = part.data() + part.size();
    const auto [stop, error] = std::from_chars(part.data(), end, value);
    if (error != std::errc{} || stop != end || value < least || value > 2147483647) {
      throw InputError(option + " " + text + ": '" + part + "' is no whole number from " +
                       std::to_string(least) + " on");
    }
    return value;
  };
  const std::size_t colon = text.find(':');
  if (colon == std::string::npos) return {parse(text), parse(text)};
  return {parse(text.substr(0, colon)), parse(text.substr(colon + 1))};
}

namespace {

/// CLI11's help, its lines broken at 100 columns.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    const std::string help = CLI::Formatter::make_help(app, std::move(name), mode);
    std::string text;
    for (std::size_t begin = 0; begin < help.size();) {
      const std::size_t end = std::min(help.find('\n', begin), help.size());
      text += broken(help.substr(begin, end - begin));
      begin = end + 1;
    }
    return text;
  }

 private:
  /// What an option does stands from a column on; the lines that it is broken into stand there too.
  std::string broken(const std::string& line) const {
    constexpr std::size_t kColumns = 100;
    if (line.size() <= kColumns) return line + "\n";
    const std::size_t begin = line.rfind("  ", 0) == 0 ? get_column_width() : 0;
    std::string lines = wrapped(line.substr(begin), static_cast<int>(begin), kColumns);
    return lines.replace(0, begin, line, 0, begin);
  }
};

/// "bitattn" and the words after it, each as a shell would need it.
std::string quoted(std::span<char*> words) {
  std::string line = "bitattn";
  for (const std::string word : words) {
    const bool plain = !word.empty() && word.find_first_not_of(
                                            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                            "0123456789_-+=:,./@%^") == std::string::npos;
    line += " ";
    if (plain) {
      line += word;
      continue;
    }
    line += "'";
    for (const char c : word) line += c == '\'' ? std::string("'\\''") : std::string(1, c);
    line += "'";
  }
  return line;
}

int run(int argc, char** argv) {
  const auto words = std::span(argv, static_cast<std::size_t>(argc)).subspan(argc > 0 ? 1 : 0);
  CLI::App app("What a BF16 attention kernel computes, to the last bit, and where its rounding goes wrong",
               "bitattn");
  app.set_version_flag("--version", std::string("bitattn ") + BITATTN_VERSION);
  app.require_subcommand(1);
  app.formatter(std::make_shared<HelpFormatter>());
  app.footer(
      "A capture is named FILE.h5 or FILE.h5:/group/inside; a file with many captures is worked through.\n"
      "Exit codes: 0 done, and what was asked holds; 1 done, and it does not hold; 2 bad usage or bad "
      "input.");
  CommonOptions common;
  common.command_line = quoted(words);
  Action action;
  add_info(app, common, action);
  add_generate(app, common, action);
  add_import(app, common, action);
  add_run(app, common, action);
  add_compare(app, common, action);
  add_verify(app, common, action);
  add_witness(app, common, action);
  add_diagnose(app, common, action);
  add_identify(app, common, action);
  add_remedies(app, common, action);
  add_sites(app, common, action);
  add_backends(app, common, action);
  add_bench(app, common, action);
  add_probe(app, common, action);
  // The first word that is no option names the command; CLI11 itself would only say that one is missing.
  const auto command =
      std::find_if(words.begin(), words.end(), [](const char* word) { return word[0] != '-'; });
  const std::vector<CLI::App*> commands = app.get_subcommands([](const CLI::App*) { return true; });
  if (command != words.end() && std::none_of(commands.begin(), commands.end(), [&](const CLI::App* known) {
        return known->get_name() == *command;
      })) {
    throw InputError(std::string(*command) + " is no command (bitattn --help lists the commands)");
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help, --version
      app.exit(error);
      return finish_output(kHolds);
    }
    throw InputError(one_line(error.what()) + " (bitattn --help lists the commands and their options)");
  }
  std::unique_ptr<tbb::global_control> threads;
  if (common.threads > 0) {
    threads = std::make_unique<tbb::global_control>(tbb::global_control::max_allowed_parallelism,
                                                    static_cast<std::size_t>(common.threads));
  }
  return finish_output(action());
}

int fail(const std::string& what) {
  std::fflush(stdout);
  std::fprintf(stderr, "bitattn: %s\n", one_line(what).c_str());
  return kBadInput;
}

}  // namespace
}  // namespace bitattn::cli

int main(int argc, char** argv) {
  using bitattn::cli::fail;
  bitattn::install_interrupt_handlers();
  std::signal(SIGXFSZ,
              SIG_IGN);  // a file that may not grow further is an error of writing, and gets its line
  try {
    return bitattn::cli::run(argc, argv);
  } catch (const bitattn::InputError& error) {
    return fail(error.what());
  } catch (const bitattn::Interrupted& interrupted) {
    return fail(std::string(interrupted.what()) + ", nothing was written");
  } catch (const std::bad_alloc&) {
    return fail("not enough memory for this problem");
  } catch (const std::length_error&) {
    return fail("not enough memory for this problem");
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}
