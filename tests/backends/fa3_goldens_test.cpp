// Proves: the emulated FlashAttention-3 kernels give every recorded bit of real runs on an H200,
// intermediates included.

#include <gtest/gtest.h>

#include <cstdio>

#include "backends/emulator.hpp"
#include "tests/backends/goldens.hpp"

namespace bitattn {
namespace {

using test::Difference;

void expect_every_bit(const std::vector<std::string>& paths) {
  std::size_t compared = 0;
  for (const std::string& path : paths) {
    SCOPED_TRACE(path);
    const Capture capture = test::load(path);
    ASSERT_TRUE(capture.has_recorded());
    const Result emulated = emulator_backend(profile::Profile{})->run(capture, {});
    const Difference d = test::difference(capture.recorded, emulated);
    EXPECT_EQ(d.differing, 0U) << d.text;
    EXPECT_GE(d.compared, capture.recorded.out.size());
    compared += d.compared;
  }
  std::printf("%zu captures, %zu elements, every bit equal\n", paths.size(), compared);
}

TEST(Fa3Goldens, EveryBitOfTheBundledCaptures) {
  const std::vector<std::string> paths = test::bundled_captures("fa3");
  ASSERT_GE(paths.size(), 10U);
  expect_every_bit(paths);
}

TEST(Fa3Goldens, EveryBitOfTheBundledRealRun) {
  const std::vector<std::string> paths = test::bundled_captures("real-run");
  ASSERT_GE(paths.size(), 1U);
  expect_every_bit(paths);
}

class LargeSet : public ::testing::TestWithParam<const char*> {};

TEST_P(LargeSet, EveryBit) {
  const std::vector<std::string> paths = test::large_set_captures(GetParam());
  if (paths.empty()) GTEST_SKIP() << "BITATTN_GOLDENS is not set";
  expect_every_bit(paths);
}

INSTANTIATE_TEST_SUITE_P(Fa3Goldens, LargeSet, ::testing::Values("fa3", "fa3-corners", "real-run"),
                         [](const ::testing::TestParamInfo<const char*>& tested) {
                           std::string name = tested.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace bitattn
