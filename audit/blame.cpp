#include "audit/blame.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>

#include "audit/blame_runs.hpp"
#include "audit/shapley.hpp"
#include "backends/input_remedies.hpp"

namespace bitattn::audit {

namespace {

using profile::Site;
using profile::SiteSet;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
/// A site is split off the others where its share alone, on or off, reaches this in some tensor of some head.
constexpr double kMatters = 0.005;
/// Groups of sites that are split one by one: 2^(groups + 1) runs a part.
constexpr std::size_t kMostGroups = 6;

using Errors = std::vector<double>;  ///< by place

/// How many runs are done of those foreseen, for the progress bar.
class Count {
 public:
  Count(std::size_t parts, const std::function<void(double)>& report) : parts_(parts), report_(report) {
    foreseen_ = parts * (64U + (std::size_t{1} << (kMostGroups + 1)));
  }
  void done() {
    const std::size_t n = ++done_;
    if (report_) report_(std::min(1.0, static_cast<double>(n) / static_cast<double>(foreseen_)));
  }
  std::size_t runs() const { return done_; }
  void foresee(std::size_t more) { foreseen_ = done_ + parts_ * more; }

 private:
  std::size_t parts_;
  const std::function<void(double)>& report_;
  std::atomic<std::size_t> done_{0};
  std::size_t foreseen_ = 1;
};

/// Every site alone, on and off. Sites that cannot move the same tensor share a run.
struct Alone {
  std::vector<std::vector<Site>> groups;
  std::vector<std::size_t> group_of;  ///< by site; groups.size(): a site that moves nothing
  std::vector<Errors> only, without;  ///< by group
  Errors all;
};

std::vector<Site> all_sites() {
  std::vector<Site> sites;
  for (const profile::SiteInfo& info : profile::kSites) sites.push_back(info.site);
  return sites;
}

double share_of(double part, double whole) {
  return whole > 0 ? part / whole : 0.0;
}

SiteSet set_of(const std::vector<Site>& sites) {
  SiteSet set;
  for (const Site site : sites) set.add(site);
  return set;
}

/// Everything that blame() goes through, part by part.
class Investigation {
 public:
  Investigation(const Problem& problem, const profile::Profile& profile, const std::vector<RowPart>& parts,
                const BlameOptions& options)
      : problem_(problem),
        profile_(profile),
        parts_(parts),
        options_(options),
        count_(parts.size(), options.progress) {}

  Blame run() {
    Blame b;
    b.kernel = profile_.name;
    b.parts = parts_;
    b.rows_of_capture = problem_.heads_q * problem_.total_q();
    if (parts_.size() == 1) {
      kept_ = std::make_unique<PartRuns>(problem_, profile_, parts_.front());
    }
    const std::vector<RowId> rows = look_at_rows(b);
    const ErrorPlaces places(problem_, parts_, rows);
    Alone alone = run_alone(places);
    const std::vector<std::vector<Site>> groups =
        switch_groups(sites_that_matter(places, alone), profile_, problem_, kMostGroups);
    const std::vector<Errors> by_subset = run_subsets(places, groups);
    b.runs = count_.runs();
    split(places, alone, groups, by_subset, rows, b);
    if (options_.findings != nullptr && problem_.softcap == 0 && !problem_.dout.empty()) {
      split_sums(b);
    }
    return b;
  }

 private:
  /// The part's truth costs two runs, so that of a single part is kept.
  template <class F>
  void for_each_part(F&& f) {
    if (kept_) return f(*kept_);
    for (const RowPart& part : parts_) f(PartRuns(problem_, profile_, part));
  }

  /// The rows looked at: how many, what of them no site explains, and the worst ones.
  std::vector<RowId> look_at_rows(Blame& b) {
    struct Row {
      RowId id;
      double sum;
    };
    std::vector<Row> rows;
    double by_reference = 0;
    double by_sites = 0;
    bool any = false;
    for_each_part([&](const PartRuns& part) {
      part.for_each_row([&](const RowId& row, double sum, double dq_error2) {
        ++b.rows;
        rows_.push_back(row.index);
        if (std::isfinite(sum)) rows.push_back({row, sum});
        if (options_.dq_error_norm == nullptr) return;
        const double reference = options_.dq_error_norm->data[row.index];
        if (!std::isfinite(reference) || !std::isfinite(dq_error2)) return;
        any = true;
        by_reference += reference * reference;
        by_sites += dq_error2;
      });
    });
    b.whole = b.rows == rows_that_see_keys();
    if (any) {
      b.left_over =
          by_reference == 0 ? (by_sites == 0 ? 0.0 : kNan) : std::abs(by_reference - by_sites) / by_reference;
    }
    if (problem_.dout.empty()) return {};
    const std::size_t worst = std::min(options_.worst_rows, rows.size());
    std::partial_sort(
        rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(worst), rows.end(),
        [](const Row& x, const Row& y) { return x.sum != y.sum ? x.sum > y.sum : x.id.index < y.id.index; });
    std::vector<RowId> found;
    for (std::size_t n = 0; n < worst; ++n) found.push_back(rows[n].id);
    return found;
  }

  std::size_t rows_that_see_keys() const {
    std::size_t n = 0;
    for_each_row_with_keys(problem_, [&](std::size_t, std::size_t, std::size_t, std::size_t) { ++n; });
    return n;
  }

  std::vector<Errors> errors(const ErrorPlaces& places, const std::vector<SiteSet>& on) {
    std::vector<Errors> found(on.size(), Errors(places.size(), 0.0));
    for_each_part([&](const PartRuns& part) { part.add_errors(on, places, found, [&] { count_.done(); }); });
    return found;
  }

  Alone run_alone(const ErrorPlaces& places) {
    Alone alone;
    alone.groups = switch_groups(all_sites(), profile_, problem_, profile::kSiteCount);
    alone.group_of.assign(profile::kSiteCount, alone.groups.size());
    std::vector<SiteSet> on{SiteSet::all()};
    for (std::size_t g = 0; g < alone.groups.size(); ++g) {
      const SiteSet group = set_of(alone.groups[g]);
      for (const Site site : alone.groups[g]) alone.group_of[static_cast<std::size_t>(site)] = g;
      on.push_back(group);
      on.push_back(~group);
    }
    std::vector<Errors> found = errors(places, on);
    alone.all = std::move(found[0]);
    for (std::size_t g = 0; g < alone.groups.size(); ++g) {
      alone.only.push_back(std::move(found[1 + 2 * g]));
      alone.without.push_back(std::move(found[2 + 2 * g]));
    }
    return alone;
  }

  bool reaches(Site site, Blamed tensor) const {
    return reach(site, profile_, problem_)[static_cast<std::size_t>(tensor)];
  }

  /// Both shares of a site that reaches the place's tensor; 0 where there is no error.
  static SiteShare share_alone(const Alone& alone, Site site, std::size_t place) {
    const std::size_t g = alone.group_of[static_cast<std::size_t>(site)];
    SiteShare share;
    share.site = site;
    const double all = alone.all[place];
    if (!(all > 0)) return share;
    share.on_alone = alone.only[g][place] / all;
    share.off_alone = (all - alone.without[g][place]) / all;
    return share;
  }
  static double size(const SiteShare& share) {
    return std::max(std::abs(share.on_alone), std::abs(share.off_alone));
  }

  std::vector<Site> sites_that_matter(const ErrorPlaces& places, const Alone& alone) const {
    std::vector<std::pair<double, Site>> found;
    for (const Site site : all_sites()) {
      double most = 0;
      for (std::size_t place = 0; place < places.size() && !places.is_of_row(place); ++place) {
        if (!reaches(site, places.tensor(place)) || !(alone.all[place] > 0)) continue;
        most = std::max(most, size(share_alone(alone, site, place)));
      }
      if (most >= kMatters) found.emplace_back(most, site);
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<Site> sites;
    for (const auto& [most, site] : found) sites.push_back(site);
    return sites;
  }

  /// Errors with every subset of the groups on; the last player is all sites of no group.
  std::vector<Errors> run_subsets(const ErrorPlaces& places, const std::vector<std::vector<Site>>& groups) {
    SiteSet others = SiteSet::all();
    for (const auto& group : groups) others = others & ~set_of(group);
    std::vector<SiteSet> on;
    for (std::size_t m = 0; m < std::size_t{2} << groups.size(); ++m) {
      SiteSet set;
      for (std::size_t g = 0; g < groups.size(); ++g) {
        if ((m >> g & 1U) != 0) set = set | set_of(groups[g]);
      }
      if ((m >> groups.size() & 1U) != 0) set = set | others;
      on.push_back(set);
    }
    count_.foresee(on.size());
    return errors(places, on);
  }

  void split(const ErrorPlaces& places, const Alone& alone, const std::vector<std::vector<Site>>& groups,
             const std::vector<Errors>& by_subset, const std::vector<RowId>& rows, Blame& b) {
    Errors truth2(places.size(), 0.0);
    std::vector<std::size_t> elements(places.size(), 0);
    std::vector<std::size_t> not_finite(places.size(), 0);
    for_each_part([&](const PartRuns& part) { part.add_truth(places, truth2, elements, not_finite); });
    std::vector<double> values(by_subset.size());
    const auto shares = [&](std::size_t place) {
      ErrorShares s;
      s.tensor = places.tensor(place);
      s.error2 = alone.all[place];
      s.truth2 = s.tensor == Blamed::score_gradient_sum ? 0.0 : truth2[place];
      s.elements = elements[place];
      s.not_finite = not_finite[place];
      for (std::size_t m = 0; m < values.size(); ++m) values[m] = by_subset[m][place];
      const std::vector<double> fair = shapley_values(groups.size() + 1, values);
      std::vector<Site> left = all_sites();
      for (std::size_t g = 0; g < groups.size(); ++g) {
        for (const Site site : groups[g]) {
          left.erase(std::find(left.begin(), left.end(), site));
          if (!reaches(site, s.tensor)) continue;
          s.sites.push_back(share_alone(alone, site, place));
          s.sites.back().fair = share_of(fair[g], s.error2);
        }
      }
      std::sort(s.sites.begin(), s.sites.end(),
                [](const SiteShare& x, const SiteShare& y) { return x.fair > y.fair; });
      const auto first_other = static_cast<std::ptrdiff_t>(s.sites.size());
      for (const Site site : left) {
        if (reaches(site, s.tensor)) s.sites.push_back(share_alone(alone, site, place));
      }
      std::stable_sort(s.sites.begin() + first_other, s.sites.end(),
                       [](const SiteShare& x, const SiteShare& y) { return size(x) > size(y); });
      s.others = s.sites.size() - static_cast<std::size_t>(first_other);
      s.others_fair = share_of(fair.back(), s.error2);
      return s;
    };
    const bool backward = !problem_.dout.empty();
    for (std::size_t t = 0; t < (backward ? kBlamedCount : 1); ++t) {
      b.tensors.push_back(shares(ErrorPlaces::of_all(static_cast<Blamed>(t))));
    }
    const std::vector<Blamed> of_queries =
        backward ? std::vector<Blamed>{Blamed::out, Blamed::dq, Blamed::score_gradient_sum}
                 : std::vector<Blamed>{Blamed::out};
    for (const std::size_t h : places.query_heads()) {
      BlamedHead head{h, {}};
      for (const Blamed t : of_queries) head.tensors.push_back(shares(places.of_query_head(h, t)));
      b.query_heads.push_back(std::move(head));
    }
    for (const std::size_t h : places.kv_heads()) {
      if (!backward) break;
      BlamedHead head{h, {}};
      for (const Blamed t : {Blamed::dk, Blamed::dv}) head.tensors.push_back(shares(places.of_kv_head(h, t)));
      b.kv_heads.push_back(std::move(head));
    }
    const auto worse = [backward](const BlamedHead& x, const BlamedHead& y) {
      const std::size_t first = backward && x.tensors.size() == 3 ? 1 : 0;  // dq, or out; dk
      const double a = x.tensors[first].relative();
      const double c = y.tensors[first].relative();
      return std::isnan(c) ? !std::isnan(a) : a > c;
    };
    std::stable_sort(b.query_heads.begin(), b.query_heads.end(), worse);
    std::stable_sort(b.kv_heads.begin(), b.kv_heads.end(), worse);
    for (std::size_t n = 0; n < rows.size(); ++n) {
      BlamedRow row{rows[n], {}};
      for (const Blamed t : of_queries) row.tensors.push_back(shares(places.of_row(n, t)));
      b.worst_rows.push_back(std::move(row));
    }
  }

  /// The row sums' closed form over the rows looked at, beside what the sites own of them.
  void split_sums(Blame& b) const {
    const RowFindings& f = *options_.findings;
    double before = 0;
    double eta = 0;
    double beta = 0;
    double all = 0;
    for (const std::size_t i : rows_) {
      const double r = f.after_cast.data[i];
      if (!std::isfinite(r)) continue;
      before += (f.g_minus_d.data[i] - f.d_p_excess.data[i]) * r;
      eta += f.eta.data[i] * r;
      beta += f.beta.data[i] * r;
      all += r * r;
    }
    b.sums_in_closed_form = {before / all, eta / all, beta / all};
    const ErrorShares& sums = b.tensors[static_cast<std::size_t>(Blamed::score_gradient_sum)];
    const auto fair = [&](Site site) {
      for (const SiteShare& share : sums.sites) {
        // Of a site among the others: its share if sites act on each other in pairs only.
        if (share.site == site) return share.grouped() ? (share.on_alone + share.off_alone) / 2 : share.fair;
      }
      return kNan;
    };
    b.sums_by_sites.eta = fair(Site::ds_sub) + fair(Site::ds_mul);
    b.sums_by_sites.beta = fair(Site::ds_cast);
    b.sums_by_sites.before = 1 - b.sums_by_sites.eta - b.sums_by_sites.beta;
  }

  const Problem& problem_;
  const profile::Profile& profile_;
  const std::vector<RowPart>& parts_;
  const BlameOptions& options_;
  Count count_;
  std::unique_ptr<PartRuns> kept_;
  std::vector<std::size_t> rows_;  ///< indices of the rows looked at
};

}  // namespace

double ErrorShares::relative() const {
  if (!any_finite()) return kNan;
  if (error2 == 0) return 0;
  return truth2 > 0 ? std::sqrt(error2 / truth2) : kNan;
}

Blame blame(const Capture& capture, const EmulatedKernel& kernel, const std::vector<RowPart>& parts,
            const BlameOptions& options) {
  const Problem problem =
      kernel.inputs.empty() ? capture.problem : remedy_inputs(capture.problem, kernel.inputs);
  return Investigation(problem, kernel.profile, parts, options).run();
}

}  // namespace bitattn::audit
