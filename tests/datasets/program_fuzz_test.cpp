// The program itself on damaged files: every command ends with 0, 1 or 2; with 2 it prints one line and has
// written nothing; never a signal, never a hang, and the input is as it was.
//
// BITATTN_PROGRAM_FUZZ_FILES: how many damaged files (60), BITATTN_FUZZ_SEED: which ones (1).

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

#include "tests/datasets/damage.hpp"
#include "tests/datasets/hdf5_builder.hpp"

namespace bitattn {
namespace {

using test::TemporaryFolder;

struct Ended {
  int code = -1;  ///< exit code, 1000 + signal, or -1 where it had to be killed
  std::string errors;
};

Ended run_program(std::vector<std::string> arguments, const std::string& errors_path) {
  arguments.insert(arguments.begin(), BITATTN_PROGRAM);
  std::vector<char*> pointers;
  pointers.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    const int null = ::open("/dev/null", O_WRONLY);
    const int errors = ::open(errors_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ::dup2(null, 1);
    ::dup2(errors, 2);
    ::execv(pointers[0], pointers.data());
    ::_exit(127);
  }
  Ended ended;
  const auto begin = std::chrono::steady_clock::now();
  int status = 0;
  // A library that loops for ever is ended by the reading child's own time-out.
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(300)) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return ended;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  ended.errors = test::file_bytes(errors_path);
  return ended;
}

TEST(ProgramFuzz, EveryCommandEndsWithZeroOneOrTwo) {
  const std::uint64_t files = test::from_environment("BITATTN_PROGRAM_FUZZ_FILES", 60);
  const std::uint64_t seed = test::from_environment("BITATTN_FUZZ_SEED", 1);
  const std::vector<test::Sample> samples = test::make_samples();
  const TemporaryFolder folder;
  const std::string in = folder / "damaged.h5";
  const std::string out = folder / "out.h5";
  const std::string errors = folder / "errors.txt";
  const std::vector<std::vector<std::string>> commands{{"info", in},
                                                       {"verify", in},
                                                       {"run", in, "-b", "fp32", "-o", out},
                                                       {"diagnose", in, "-o", out},
                                                       {"compare", in, in}};
  std::map<int, std::size_t> ends;
  for (std::uint64_t i = 0; i < files; ++i) {
    const std::string bytes = test::damaged(samples, seed, i);
    test::write_bytes(in, bytes);
    const std::vector<std::string>& command = commands[i % commands.size()];
    const Ended ended = run_program(command, errors);
    ++ends[ended.code];
    const std::string what = command[0] + ", file " + std::to_string(i) + ": " + ended.errors;
    ASSERT_TRUE(ended.code == 0 || ended.code == 1 || ended.code == 2) << ended.code << ", " << what;
    if (ended.code == 2) {
      EXPECT_EQ(std::count(ended.errors.begin(), ended.errors.end(), '\n'), 1) << what;
      EXPECT_EQ(folder.entries(), (std::vector<std::string>{"damaged.h5", "errors.txt"})) << what;
    }
    EXPECT_EQ(test::file_bytes(in), bytes) << what;
    ::unlink(out.c_str());
  }
  EXPECT_GT(ends[2], 0U);
  std::printf("%llu damaged files: exit 0 %zu, 1 %zu, 2 %zu\n", static_cast<unsigned long long>(files),
              ends[0], ends[1], ends[2]);
}

}  // namespace
}  // namespace bitattn
