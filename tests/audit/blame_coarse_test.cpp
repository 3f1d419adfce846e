// A kernel with one site made coarse on purpose: blame names that site first, in every tensor whose error it
// makes, for each site and each regime.

#include <gtest/gtest.h>

#include <set>

#include "audit/blame.hpp"
#include "audit/blame_runs.hpp"
#include "datasets/regime.hpp"
#include "emu/profile/deviation.hpp"

namespace {

using namespace bitattn;
using profile::Deviation;
using profile::Kind;
using profile::Point;
using profile::Profile;
using profile::Site;

/// The value at each site that is kept too coarsely.
Point coarse_point(Site site) {
  switch (site) {
    case Site::score_mma:
      return Point::score;
    case Site::softcap:
      return Point::softcap;
    case Site::score_scale:
      return Point::exponent;
    case Site::row_max_scale:
      return Point::scaled_max;
    case Site::exp2:
      return Point::p;
    case Site::row_sum:
      return Point::total;
    case Site::rescale:
      return Point::alpha;
    case Site::p_cast:
      return Point::p_word;
    case Site::pv_mma:
      return Point::pv;
    case Site::rcp:
      return Point::inverse;
    case Site::lse:
      return Point::lse;
    case Site::o_cast:
      return Point::out_word;
    case Site::dpsum_o_cast:
      return Point::o_in_dpsum;
    case Site::dpsum:
      return Point::dpsum;
    case Site::lse_log2:
      return Point::lse_log2;
    case Site::score_mma_backward:
      return Point::score_backward;
    case Site::softcap_backward:
      return Point::softcap_backward;
    case Site::p_backward:
      return Point::p_backward;
    case Site::dp_mma:
      return Point::dp;
    case Site::ds_sub:
      return Point::ds_difference;
    case Site::ds_mul:
      return Point::ds;
    case Site::pb_cast:
      return Point::pb_word;
    case Site::ds_cast:
      return Point::ds_word;
    case Site::dv_mma:
      return Point::dv;
    case Site::dk_mma:
      return Point::dk;
    case Site::dq_mma:
      return Point::dq_part;
    case Site::dq_reduce:
      return Point::dq_accum;
    case Site::dkv_reduce:
      return Point::dkv_accum;
    case Site::dq_cast:
      return Point::dq_word;
    case Site::dk_cast:
      return Point::dk_word;
    case Site::dv_cast:
      return Point::dv_word;
  }
  return Point::compiler;
}

/// O's cast is one rounding with two readers, the store and D, so what reaches a tensor through D alone is
/// rightly D's reading of it.
bool is_the_same_rounding(Site named, Site coarse) {
  return named == coarse || (coarse == Site::o_cast && named == Site::dpsum_o_cast);
}

bool of_softcap(Site site) {
  return site == Site::softcap || site == Site::softcap_backward;
}

Capture capture_of(const std::string& regime, bool softcap) {
  GenerateOptions options;
  options.regime = regime;
  options.seqlen_q = 40;
  options.seqlen_k = 48;  // three key blocks of these profiles
  options.heads_q = 2;
  options.heads_kv = 1;
  options.head_dim = 96;
  options.causal = true;
  options.softcap = softcap ? 5 : 0;
  options.seed = 5;
  Capture capture;
  capture.name = regime;
  capture.problem = generate(options);
  return capture;
}

/// Small tiles, so that small problems have several.
Profile small_tiles() {
  Profile profile;
  profile.forward.block_n = 16;
  profile.backward.block_n = 16;
  return profile;
}

audit::Blame blame_of(const Capture& capture, const Profile& profile) {
  audit::BlameOptions options;
  options.worst_rows = 0;
  return audit::blame(capture, {profile, {}}, audit::whole_parts(capture.problem), options);
}

/// |stored value - truth|^2 by tensor, every site as this kernel does.
std::vector<double> errors_of(const Capture& capture, const Profile& profile) {
  const std::vector<audit::RowPart> parts = audit::whole_parts(capture.problem);
  const audit::ErrorPlaces places(capture.problem, parts, {});
  std::vector<std::vector<double>> error2{std::vector<double>(places.size(), 0.0)};
  for (const audit::RowPart& part : parts) {
    audit::PartRuns(capture.problem, profile, part).add_errors({profile::SiteSet::all()}, places, error2, {});
  }
  return error2[0];
}

class CoarseSite : public ::testing::TestWithParam<Site> {};

TEST_P(CoarseSite, IsNamedFirstWhereItStandsOut) {
  const Site site = GetParam();
  ASSERT_EQ(profile::site_of(coarse_point(site)), site);
  std::size_t regimes_with_effect = 0;
  std::string without_effect;
  for (const RegimeInfo& regime : regimes()) {
    SCOPED_TRACE(regime.name);
    const Capture capture = capture_of(regime.name, of_softcap(site));
    const std::vector<double> plain = errors_of(capture, small_tiles());
    // As coarse as it takes to stand out of the chip's own errors: four times as large in the square, so that
    // the coarse site owns most of it.
    Profile profile = small_tiles();
    std::set<std::size_t> standing_out;
    for (int bits = 4; bits > 0 && standing_out.empty(); --bits) {
      profile.deviations = {{coarse_point(site), Kind::narrowed, profile::kBits + bits}};
      const std::vector<double> coarse = errors_of(capture, profile);
      for (std::size_t t = 0; t < audit::kBlamedCount; ++t) {
        if (coarse[t] > 4 * plain[t]) standing_out.insert(t);
      }
    }
    if (standing_out.empty()) {
      without_effect += " " + regime.name;
      continue;
    }
    ++regimes_with_effect;
    const audit::Blame blame = blame_of(capture, profile);
    for (const std::size_t t : standing_out) {
      const audit::ErrorShares& shares = blame.tensors[t];
      ASSERT_FALSE(shares.sites.empty());
      EXPECT_TRUE(is_the_same_rounding(shares.sites.front().site, site))
          << profile::name(shares.sites.front().site) << " instead of " << profile::name(site) << ": "
          << audit::kBlamedNames[t] << ", " << profile::text(profile.deviations.front()) << ", error^2 "
          << shares.error2 << " against " << plain[t] << ", share " << shares.sites.front().fair;
    }
  }
  RecordProperty("regimes_without_effect", without_effect);
  // A site cannot stand out where another error is larger than anything its coarsest rounding makes (dQ's
  // cast beside the drift of `late` and `ties`), nor where what it rounds holds one bit or is flushed to 0
  // anyway.
  EXPECT_GE(regimes_with_effect + 2, regimes().size()) << "without effect in:" << without_effect;
}

std::vector<Site> all_sites() {
  std::vector<Site> sites;
  for (const profile::SiteInfo& info : profile::kSites) sites.push_back(info.site);
  return sites;
}

INSTANTIATE_TEST_SUITE_P(Fa3, CoarseSite, ::testing::ValuesIn(all_sites()),
                         [](const ::testing::TestParamInfo<Site>& tested) {
                           return std::string(profile::name(tested.param));
                         });

}  // namespace
