// Damaged files: whatever is done to a capture, reading ends in a capture or in one line. Never a crash,
// never a hang.
//
// BITATTN_FUZZ_FILES: how many damaged files (3000; 1000 under AddressSanitizer, where a fork takes longer),
// BITATTN_FUZZ_SEED: which ones (1), BITATTN_FUZZ_FIRST:
// number of the first one (0), BITATTN_FUZZ_KEEP: a folder for those that made the HDF5 library crash or
// hang.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>

#include "datasets/error.hpp"
#include "datasets/reading_child.hpp"
#include "tests/datasets/damage.hpp"
#include "tests/datasets/hdf5_builder.hpp"

namespace bitattn {
namespace {

using test::TemporaryFolder;

TEST(Fuzz, DamagedCapturesEndInACaptureOrOneLine) {
#if defined(__SANITIZE_ADDRESS__)
  constexpr std::uint64_t kFiles = 1000;
#else
  constexpr std::uint64_t kFiles = 3000;
#endif
  const std::uint64_t files = test::from_environment("BITATTN_FUZZ_FILES", kFiles);
  const std::uint64_t seed = test::from_environment("BITATTN_FUZZ_SEED", 1);
  const char* keep = std::getenv("BITATTN_FUZZ_KEEP");
  const std::vector<test::Sample> samples = test::make_samples();
  ASSERT_GE(samples.size(), 14U);
  const TemporaryFolder folder;
  const std::string path = folder / "damaged.h5";
  ChildLimits limits;
  limits.seconds = 1;  // whole files take milliseconds
  std::map<std::string, std::uint64_t> ends;
  double slowest = 0;
  const std::uint64_t first = test::from_environment("BITATTN_FUZZ_FIRST", 0);
  for (std::uint64_t i = first; i < first + files; ++i) {
    const std::string bytes = test::damaged(samples, seed, i);
    test::write_bytes(path, bytes);
    const auto begin = std::chrono::steady_clock::now();
    std::string end;
    try {
      for (const std::string& group : check_in_child(path, "", limits)) {
        const Capture capture = read_in_child(path, group, limits);
        check_problem(capture.problem, path);
      }
      end = "read";
    } catch (const InputError& error) {
      const std::string line = error.what();
      ASSERT_EQ(line.find('\n'), std::string::npos) << line;
      ASSERT_EQ(line.rfind(path, 0), 0U) << line;
      end = "refused";
      if (line.find("crashed") != std::string::npos) end = "library crashed";
      if (line.find("no progress") != std::string::npos) end = "timed out";
      if (line.find("more memory") != std::string::npos) end = "out of memory";
      if (line.find("without an answer") != std::string::npos) end = "no answer";
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    slowest = std::max(slowest, seconds);
    ++ends[end];
    if (keep != nullptr && end != "read" && end != "refused") {
      test::write_bytes(
          std::string(keep) + "/" + std::to_string(seed) + "-" + std::to_string(i) + "-" + end + ".h5",
          bytes);
    }
  }
#if !defined(__SANITIZE_ADDRESS__)  // there, an absurd allocation inside the library ends the child with exit
  EXPECT_EQ(ends["no answer"], 0U) << "the child neither answered nor crashed";
#endif
  if (files >= 100) {
    EXPECT_GT(ends["refused"], files / 10) << "the damage does something";
  }
  std::printf("%llu damaged files from %zu samples, seed %llu, slowest %.2f s:",
              static_cast<unsigned long long>(files), samples.size(), static_cast<unsigned long long>(seed),
              slowest);
  for (const auto& [end, count] : ends)
    std::printf(" %s %llu;", end.c_str(), static_cast<unsigned long long>(count));
  std::printf("\n");
}

}  // namespace
}  // namespace bitattn
