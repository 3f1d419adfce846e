// Proves: the schedules over fp64 numbers are the schedules. With no site exact they give the chip's bits,
// with every site exact the truth, and one site alone moves what it should.

#include "backends/sites.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "backends/backend.hpp"
#include "datasets/regime.hpp"
#include "tests/backends/goldens.hpp"

namespace bitattn {
namespace {

using profile::Profile;
using profile::Site;
using profile::SiteSet;

TEST(Sites, NoneExactGivesEveryRecordedBit) {
  std::size_t compared = 0;
  for (const std::string& path : test::bundled_captures("fa3")) {
    SCOPED_TRACE(path);
    const Capture capture = test::load(path);
    const test::Difference d = test::difference(capture.recorded, site_backend(Profile{})->run(capture, {}));
    EXPECT_EQ(d.differing, 0U) << d.text;
    compared += d.compared;
  }
  EXPECT_GT(compared, 1000000U);
}

double relative_error(const Fp64Tensor& value, const Fp64Tensor& truth) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    error += (value.data[i] - truth.data[i]) * (value.data[i] - truth.data[i]);
    norm += truth.data[i] * truth.data[i];
  }
  return std::sqrt(error / norm);
}

Capture capture_of(const std::string& regime, double softcap) {
  GenerateOptions options;
  options.regime = regime;
  options.seqlen_q = 70;
  options.seqlen_k = 300;  // three key blocks, so that the order of their sum can matter
  options.heads_q = 4;
  options.heads_kv = 2;
  options.head_dim = 64;
  options.causal = true;
  options.softcap = softcap;
  options.seed = 3;
  Capture capture;
  capture.name = regime;
  capture.problem = generate(options);
  return capture;
}

Result run_exact(const Capture& capture, const SiteSet& exact) {
  Profile profile;
  profile.exact = exact;
  return site_backend(profile)->run(capture, {});
}

TEST(Sites, AllExactIsTheTruth) {
  for (const char* regime : {"normal", "late", "peaky", "wild"}) {
    for (const double softcap : {0.0, 20.0}) {
      SCOPED_TRACE(std::string(regime) + ", softcap " + std::to_string(softcap));
      const Capture capture = capture_of(regime, softcap);
      RunOptions options;
      options.want_uncast = true;
      const Result truth = make_backend("reference")->run(capture, options);
      const Result exact = run_exact(capture, SiteSet::all());
      // late: dQ is what is left of terms a few hundred times larger, so fp64 leaves some 1e-12 of it.
      EXPECT_LT(relative_error(exact.uncast.out, truth.uncast.out), 1e-12);
      EXPECT_LT(relative_error(exact.uncast.dv, truth.uncast.dv), 1e-11);
      EXPECT_LT(relative_error(exact.uncast.dq, truth.uncast.dq), 1e-9);
      EXPECT_LT(relative_error(exact.uncast.dk, truth.uncast.dk), 1e-9);
    }
  }
}

class EverySite : public ::testing::TestWithParam<Site> {};

bool differs(const Result& a, const Result& b) {
  const auto other = [](const Fp64Tensor& x, const Fp64Tensor& y) { return x.data != y.data; };
  return other(a.uncast.out, b.uncast.out) || other(a.uncast.lse, b.uncast.lse) ||
         other(a.uncast.dq, b.uncast.dq) || other(a.uncast.dk, b.uncast.dk) ||
         other(a.uncast.dv, b.uncast.dv) || a.out.data != b.out.data;
}

// A switch that nothing reads would be no switch: each one moves some bit of some regime. The cast of dS
// hides most roundings before it, so they are looked at with and without it.
TEST_P(EverySite, MovesSomethingWhenSwitchedOff) {
  const Site site = GetParam();
  for (const char* regime : {"normal", "late", "tinygrad", "ties"}) {
    for (const double softcap : {0.0, 20.0}) {
      const Capture capture = capture_of(regime, softcap);
      for (const SiteSet& others : {SiteSet{}, SiteSet{}.add(Site::ds_cast)}) {
        if (others.has(site)) continue;
        if (differs(run_exact(capture, others), run_exact(capture, SiteSet(others).add(site)))) return;
      }
    }
  }
  // The stored O and dV have no operation but their cast: their values before it are the same by definition.
  EXPECT_TRUE(site == Site::o_cast || site == Site::dv_cast);
}

std::vector<Site> all_sites() {
  std::vector<Site> sites;
  for (const profile::SiteInfo& site : profile::kSites) sites.push_back(site.site);
  return sites;
}

INSTANTIATE_TEST_SUITE_P(Fa3, EverySite, ::testing::ValuesIn(all_sites()),
                         [](const ::testing::TestParamInfo<Site>& tested) {
                           return std::string(profile::kSites[static_cast<std::size_t>(tested.param)].name);
                         });

}  // namespace
}  // namespace bitattn
