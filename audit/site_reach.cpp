#include "audit/site_reach.hpp"

#include <algorithm>

namespace bitattn::audit {

namespace {

using profile::Site;

BlamedSet set(std::initializer_list<Blamed> tensors) {
  BlamedSet all;
  for (const Blamed t : tensors) all.set(static_cast<std::size_t>(t));
  return all;
}

bool deviates(const profile::Profile& profile, Site site) {
  return std::any_of(profile.deviations.begin(), profile.deviations.end(),
                     [&](const profile::Deviation& d) { return profile::site_of(d.point) == site; });
}

}  // namespace

BlamedSet reach(Site site, const profile::Profile& profile, const Problem& problem) {
  using enum Blamed;
  const BlamedSet everything = set({out, dq, dk, dv, score_gradient_sum});
  const BlamedSet backward = set({dq, dk, dv, score_gradient_sum});
  const BlamedSet through_ds = set({dq, dk, score_gradient_sum});
  const BlamedSet through_d = set({out, dq, dk, score_gradient_sum});
  BlamedSet found;
  switch (site) {
    case Site::softcap:
    case Site::softcap_backward:
      if (problem.softcap > 0) found = site == Site::softcap ? everything : backward;
      break;
    case Site::score_mma:
    case Site::score_scale:
    case Site::row_max_scale:
    case Site::exp2:
    case Site::row_sum:
    case Site::rescale:  // the factor is also the row sum's, and so the log-sum-exp's
      found = everything;
      break;
    case Site::p_cast:  // into the gradients through D alone
    case Site::pv_mma:
    case Site::rcp:
      found = through_d;
      break;
    case Site::o_cast:
      // D reads the stored O and rounds it to BF16 once more: nothing, where it was rounded so.
      found = deviates(profile, site) ? through_d : set({out});
      break;
    case Site::lse:
    case Site::lse_log2:
    case Site::score_mma_backward:
    case Site::p_backward:
      found = backward;
      break;
    case Site::dpsum_o_cast:
    case Site::dpsum:
    case Site::dp_mma:
    case Site::ds_sub:
    case Site::ds_mul:
    case Site::ds_cast:
      found = through_ds;
      break;
    case Site::pb_cast:
      found = profile.backward.ds_from_cast_p ? backward : set({dv});
      break;
    case Site::dv_mma:
    case Site::dv_cast:
      found = set({dv});
      break;
    case Site::dk_mma:
    case Site::dk_cast:
      found = set({dk});
      break;
    case Site::dq_mma:
    case Site::dq_reduce:
    case Site::dq_cast:
      found = set({dq});
      break;
    case Site::dkv_reduce:
      if (problem.group() > 1) found = set({dk, dv});
      break;
  }
  const bool last_cast = site == Site::dq_cast || site == Site::dk_cast || site == Site::dv_cast;
  if (!profile.remedies.empty() && found.any() && !last_cast) {
    found |= site <= Site::o_cast ? everything : backward;
  }
  if (problem.dout.empty()) found &= set({out});
  return found;
}

std::vector<std::vector<Site>> switch_groups(const std::vector<Site>& sites, const profile::Profile& profile,
                                             const Problem& problem, std::size_t most) {
  std::vector<std::vector<Site>> groups;
  std::vector<BlamedSet> reached;
  for (const Site site : sites) {
    const BlamedSet ours = reach(site, profile, problem);
    if (ours.none()) continue;
    std::size_t g = 0;
    while (g < groups.size() && (reached[g] & ours).any()) ++g;
    if (g == most) continue;
    if (g == groups.size()) {
      groups.emplace_back();
      reached.emplace_back();
    }
    groups[g].push_back(site);
    reached[g] |= ours;
  }
  return groups;
}

}  // namespace bitattn::audit
