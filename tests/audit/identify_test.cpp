// Proves: identify names the kernel that made the bits. Real kernels with one deviation each, unmodified
// kernels as controls, generated ones with a site made coarse on purpose in every regime, kernels that no
// search space was written for, and bits that no kernel made.

#include "audit/identify.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "audit/unit.hpp"
#include "backends/stages.hpp"
#include "datasets/capture_file.hpp"
#include "datasets/regime.hpp"
#include "tests/audit/problems.hpp"

namespace bitattn {
namespace {

using audit::Identification;
using audit::Verdict;
using profile::Deviation;
using profile::Format;
using profile::Kind;
using profile::Point;
using profile::Profile;

constexpr int kBf16 = static_cast<int>(Format::bf16);
constexpr int kFp16 = static_cast<int>(Format::fp16);
constexpr int kE4m3 = static_cast<int>(Format::e4m3);

std::string site_of(const Deviation& d) {
  return std::string(profile::info(d.point).site);
}

std::string sites(const Identification& found) {
  if (!found.best) return "none";
  if (found.best->deviations.empty()) return found.best->profile;
  std::string names;
  for (const Deviation& d : found.best->deviations) names += (names.empty() ? "" : " ") + site_of(d);
  return names;
}

// --- real kernels

struct RealKernel {
  const char* file;
  const char* born_in;
  const char* named;
};

class RealKernels : public ::testing::TestWithParam<RealKernel> {};

TEST_P(RealKernels, AreNamedAtTheirSite) {
  const RealKernel& kernel = GetParam();
  const std::string path = test::find_golden("fa3-variants/" + std::string(kernel.file) + ".h5");
  if (path.empty()) GTEST_SKIP() << "not bundled, and BITATTN_GOLDENS does not hold it";
  const Identification found = audit::identify(read_capture(path), {});
  EXPECT_EQ(found.verdict, Verdict::deviation);
  EXPECT_EQ(found.born_in, kernel.born_in);
  ASSERT_TRUE(found.best);
  ASSERT_EQ(found.best->deviations.size(), 1U);
  EXPECT_EQ(profile::text(found.best->deviations.front()), kernel.named);
  EXPECT_TRUE(found.left.equal());
  EXPECT_EQ(found.left.compared_tensors(), 8U);
}

constexpr const char* kCase1 = "dpsum: each product dO*O rounded to BF16";
constexpr const char* kCase2 = "block_order: key blocks of dQ in the opposite order";
constexpr const char* kCase3 =
    "ds_cast: cast of dS rounded to BF16, multiplied by softmax_scale and rounded again, later "
    "multiplications dropped";
INSTANTIATE_TEST_SUITE_P(Bundled, RealKernels,
                         ::testing::Values(RealKernel{"case_01_late", "dpsum", kCase1},
                                           RealKernel{"case_03_late", "dq_accum", kCase3}),
                         [](const auto& tested) { return std::string(tested.param.file); });
INSTANTIATE_TEST_SUITE_P(LargeSet, RealKernels,
                         ::testing::Values(RealKernel{"case_01_normal", "dpsum", kCase1},
                                           RealKernel{"case_02_normal", "dq_accum", kCase2},
                                           RealKernel{"case_03_normal", "dq_accum", kCase3}),
                         [](const auto& tested) { return std::string(tested.param.file); });

TEST(Identify, UnmodifiedKernelsAreExact) {
  namespace fs = std::filesystem;
  std::size_t captures = 0;
  for (const char* folder : {"fa3", "real-run"}) {
    for (const auto& entry : fs::directory_iterator(fs::path(BITATTN_BUNDLED_GOLDENS) / folder)) {
      const Identification found = audit::identify(read_capture(entry.path().string()), {});
      EXPECT_EQ(found.verdict, Verdict::unmodified) << entry.path();
      EXPECT_TRUE(found.left.equal());
      EXPECT_TRUE(found.born_in.empty());
      ++captures;
    }
  }
  EXPECT_EQ(captures, 21U);
}

// --- generated kernels

struct Made {
  const char* regime = "normal";
  std::size_t seqlen = 160, heads_q = 1, heads_kv = 1, head_dim = 64;
  bool causal = true;
  std::size_t batch = 1;
};

Capture made_by(const std::vector<Deviation>& deviations, const Made& made, bool intermediates = true) {
  GenerateOptions options;
  options.regime = made.regime;
  options.batch = made.batch;
  options.seqlen_q = options.seqlen_k = made.seqlen;
  options.heads_q = made.heads_q;
  options.heads_kv = made.heads_kv;
  options.head_dim = made.head_dim;
  options.causal = made.causal;
  options.seed = 17;
  Capture capture;
  capture.name = made.regime;
  capture.problem = generate(options);
  Profile profile;
  profile.deviations = deviations;
  capture.recorded = run_stages(profile, capture, {});
  capture.recorded.backend = "recorded";
  capture.recorded.uncast = {};
  if (!intermediates) capture.recorded.intermediates = {};
  return capture;
}

/// Is the deviation that was made the one that was told, or among those that give the same bits here?
bool told(const Identification& found, const Deviation& deviation) {
  const auto has = [&](const audit::Explanation& e) {
    return std::find(e.deviations.begin(), e.deviations.end(), deviation) != e.deviations.end();
  };
  return (found.best && has(*found.best)) || std::any_of(found.equals.begin(), found.equals.end(), has);
}

/// A site made coarse: a point of it kept in a narrower format, or a cast that truncates. Enough sites for
/// all regimes; the ones that a softcap or a group adds are apart.
const std::vector<Deviation>& coarse_sites() {
  static const std::vector<Deviation> all{
      {Point::score, Kind::narrowed, kBf16},
      {Point::exponent, Kind::narrowed, kBf16},
      {Point::scaled_max, Kind::narrowed, kBf16},
      {Point::p, Kind::narrowed, kFp16},
      {Point::total, Kind::narrowed, kBf16},
      {Point::alpha, Kind::narrowed, kBf16},
      {Point::p_word, Kind::truncated, 0},
      {Point::pv, Kind::narrowed, kBf16},
      {Point::inverse, Kind::narrowed, kBf16},
      {Point::lse, Kind::narrowed, kBf16},
      {Point::out_word, Kind::truncated, 0},
      {Point::o_in_dpsum, Kind::narrowed, kE4m3},
      {Point::dpsum, Kind::narrowed, kBf16},
      {Point::lse_log2, Kind::narrowed, kBf16},
      {Point::score_backward, Kind::narrowed, kBf16},
      {Point::p_backward, Kind::narrowed, kFp16},
      {Point::dp, Kind::narrowed, kBf16},
      {Point::ds_difference, Kind::narrowed, kBf16},
      {Point::p_in_ds, Kind::narrowed, kBf16},
      {Point::pb_word, Kind::truncated, 0},
      {Point::ds_word, Kind::truncated, 0},
      {Point::dv, Kind::narrowed, kBf16},
      {Point::dk, Kind::narrowed, kBf16},
      {Point::dq_part, Kind::narrowed, kBf16},
      {Point::dq_accum, Kind::narrowed, kBf16},
      {Point::dq_word, Kind::truncated, 0},
      {Point::dk_word, Kind::truncated, 0},
      {Point::dv_word, Kind::truncated, 0},
  };
  return all;
}

const std::vector<std::string>& regimes() {
  static const std::vector<std::string> all{"normal", "late", "ties", "peaky", "wild"};
  return all;
}

void expect_named(const Deviation& coarse, const std::string& regime) {
  SCOPED_TRACE(regime + ", " + profile::text(coarse));
  const Capture capture = made_by({coarse}, {.regime = regime.c_str(), .seqlen = 150});
  const Capture plain = made_by({}, {.regime = regime.c_str(), .seqlen = 150});
  const bool shows = !audit::compare_results("", capture.problem, capture.recorded, plain.recorded).equal();
  const Identification found = audit::identify(capture, {.with_remedies = false, .progress = {}});
  if (!shows) {  // numbers that the coarse format holds anyway
    EXPECT_EQ(found.verdict, Verdict::unmodified);
    return;
  }
  EXPECT_EQ(found.verdict, Verdict::deviation);
  EXPECT_TRUE(told(found, coarse)) << "told: " << sites(found);
}

TEST(IdentifyExhaustive, NamesACoarseSite) {
  // Each regime with some sites.
  for (std::size_t i = 0; i < coarse_sites().size(); i += 4) {
    expect_named(coarse_sites()[i], regimes()[i / 4 % regimes().size()]);
  }
}

TEST(IdentifyExhaustive, NamesEveryCoarseSiteInEveryRegime) {
  for (const std::string& regime : regimes()) {
    for (const Deviation& coarse : coarse_sites()) expect_named(coarse, regime);
  }
}

// --- kernels that a fork might ship, written down before they were tried

struct Fork {
  const char* what;
  std::vector<Deviation> deviations;
  Made made;
  const char* site;  ///< "" where the search space does not hold it
};

const std::vector<Fork>& forks() {
  const Made long_one{.regime = "normal", .seqlen = 300};
  const Made grouped{.regime = "normal", .seqlen = 130, .heads_q = 4, .heads_kv = 2};
  static const std::vector<Fork> all{
      {"scores in FP16", {{Point::score, Kind::narrowed, kFp16}}, {.regime = "late"}, "score_mma"},
      {"P rounded by way of FP16", {{Point::p_word, Kind::twice, kFp16}}, {}, "p_cast"},
      {"a softer constant", {{Point::c_forward, Kind::ulps, 2}}, {.regime = "late"}, "score_scale"},
      {"exp2 of degree 3",
       {{Point::p, Kind::polynomial, 10 * static_cast<int>(profile::PolynomialForm::published_floor) + 3}},
       {},
       "exp2"},
      {"log-sum-exp in FP16", {{Point::lse, Kind::narrowed, kFp16}}, {}, "lse"},
      // dpsum is not recorded here, so D itself in BF16 gives the same bits, earlier.
      {"D in BF16 where it is subtracted", {{Point::d_read, Kind::narrowed, kBf16}}, {}, "dpsum"},
      {"causal mask one key short in the backward", {{Point::mask_backward, Kind::shifted, -1}}, {}, "mask"},
      {"the last key block not added to dQ",
       {{Point::blocks_dq, Kind::skipped, -1}},
       long_one,
       "block_order"},
      {"h mod heads_kv for V in the forward",
       {{Point::head_map_forward_v, Kind::modulo, 0}},
       grouped,
       "head_map"},
      {"keys in FP8 in the forward", {{Point::k_forward, Kind::narrowed, kE4m3}}, {}, "operand"},
      // Several query blocks, so that the accumulator holds something when a block is added.
      {"dK accumulated apart", {{Point::dk, Kind::added_apart, 0}}, long_one, "dk_mma"},
      {"without fused multiply-adds", {{Point::compiler, Kind::no_fma, 0}}, {.regime = "late"}, "compiler"},
      {"a constant seven ulps off", {{Point::c_backward, Kind::ulps, 7}}, {.regime = "late"}, ""},
      {"a maximum kept below 6",
       {{Point::row_max, Kind::kept_below, 6}},
       {.regime = "late", .seqlen = 300},
       ""},
  };
  return all;
}

class Forks : public ::testing::TestWithParam<std::size_t> {};

TEST_P(Forks, AreNamedOrNotPretendedToBe) {
  const Fork& fork = forks()[GetParam()];
  SCOPED_TRACE(fork.what);
  const Capture capture = made_by(fork.deviations, fork.made, GetParam() % 2 == 0);
  const Identification found = audit::identify(capture, {.with_remedies = false, .progress = {}});
  if (*fork.site == '\0') {
    EXPECT_NE(found.verdict, Verdict::unmodified);
    if (found.verdict == Verdict::deviation) {
      EXPECT_TRUE(found.left.equal());  // told otherwise, and with every bit
    }
    return;
  }
  EXPECT_EQ(found.verdict, Verdict::deviation);
  EXPECT_EQ(sites(found), fork.site);
}

INSTANTIATE_TEST_SUITE_P(Exhaustive, Forks, ::testing::Range<std::size_t>(0, forks().size()));

// --- statistics

TEST(Identify, NamesStochasticRoundingByItsStatistics) {
  for (const Point point : {Point::out_word, Point::dk_word, Point::p_word, Point::ds_word}) {
    SCOPED_TRACE(profile::info(point).what);
    const Capture capture = made_by({{point, Kind::stochastic, 0}}, {.seqlen = 200});
    const Identification found = audit::identify(capture, {.with_remedies = false, .progress = {}});
    EXPECT_EQ(found.verdict, Verdict::stochastic);
    EXPECT_EQ(sites(found), profile::info(point).site);
  }
}

// --- what is no kernel's, and where

TEST(IdentifyExhaustive, SaysWhereNothingFits) {
  Capture capture = made_by({}, {.seqlen = 100});
  // Another number here and there, as no rounding gives it.
  for (std::size_t i = 5; i < capture.recorded.out.size(); i += 97) capture.recorded.out.data[i] ^= 0x40U;
  const Identification found = audit::identify(capture, {});
  EXPECT_EQ(found.verdict, Verdict::nothing_fits);
  EXPECT_FALSE(found.best) << sites(found);
  EXPECT_EQ(found.born_in, "out");
  EXPECT_GT(found.tried, 100U);
}

TEST(IdentifyExhaustive, NamesTwoKernelsThatDeviateEachOnItsOwn) {
  const Capture capture =
      made_by({{Point::p_word, Kind::truncated, 0}, {Point::dv_word, Kind::truncated, 0}}, {});
  const Identification found = audit::identify(capture, {.with_remedies = false, .progress = {}});
  EXPECT_EQ(found.verdict, Verdict::deviation);
  EXPECT_EQ(sites(found), "p_cast dv_cast");
}

TEST(IdentifyExhaustive, TellsPlacesInTheWholeCapture) {
  Capture capture = made_by({}, {.seqlen = 100, .heads_q = 4, .heads_kv = 2, .batch = 2});
  // Head 3 of batch element 1, query 70, column 9; and all after it in its row.
  const std::size_t element = ((100 + 70) * 4 + 3) * 64 + 9;
  capture.recorded.out.data[element] ^= 1U;
  const Identification found = audit::identify(capture, {.with_remedies = false, .progress = {}});
  EXPECT_EQ(found.verdict, Verdict::nothing_fits);
  ASSERT_TRUE(found.born);
  EXPECT_EQ(found.born->place.sequence, 1U);
  EXPECT_EQ(found.born->place.head, 3U);
  EXPECT_EQ(found.born->place.row, 70U);
  EXPECT_EQ(found.born->place.column, 9U);
}

// A part of a capture gives the bits that the whole gives there: what the search rests on.
TEST(Units, GiveTheBitsOfTheWhole) {
  for (const bool causal : {true, false}) {
    const Capture capture = made_by({}, {.seqlen = 450, .heads_q = 2, .heads_kv = 2, .causal = causal});
    const Profile pinned = audit::pinned({}, capture.problem);
    std::vector<audit::Unit> units;
    audit::UnitRange range = audit::whole_unit(capture.problem, 0, 1, 1);
    units.push_back(audit::make_unit(capture, range, true, true));
    range.q_begin = 256;  // two backward tiles of rows, and the keys they see
    range.q_end = 384;
    if (causal) range.k_end = 384;
    units.push_back(audit::make_unit(capture, range, true, false));
    range = audit::whole_unit(capture.problem, 0, 0, 1);
    range.k_begin = 256;
    if (causal) range.q_begin = 256;
    units.push_back(audit::make_unit(capture, range, false, true));
    for (const audit::Unit& unit : units) {
      StageOptions stages;
      stages.forward = unit.rows;
      Result made = run_stages(pinned, unit.capture, stages);
      if (!unit.rows) made.out = {};
      const audit::Comparison c =
          audit::compare_results("", unit.capture.problem, unit.capture.recorded, made);
      EXPECT_TRUE(c.equal()) << (causal ? "causal" : "full") << ", differing " << c.differing();
      EXPECT_GE(c.compared_tensors(), 4U);
    }
  }
}

}  // namespace
}  // namespace bitattn
