#include "audit/blame_findings.hpp"

#include <cmath>

namespace bitattn::audit {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Tables [rows, sites] of the three kinds of shares, and [rows] of relative errors and of the others' share.
struct Tables {
  explicit Tables(std::size_t rows)
      : fair({rows, profile::kSiteCount}, kNan),
        off_alone(fair),
        on_alone(fair),
        others({rows}, kNan),
        error({rows}, kNan) {}

  void set(std::size_t row, const ErrorShares& s) {
    for (const SiteShare& share : s.sites) {
      const std::size_t at = row * profile::kSiteCount + static_cast<std::size_t>(share.site);
      fair.data[at] = share.fair;
      off_alone.data[at] = share.off_alone;
      on_alone.data[at] = share.on_alone;
    }
    others.data[row] = s.others_fair;
    error.data[row] = s.relative();
  }

  void write(CaptureWriter& writer, const std::string& group, const std::string& path,
             const std::string& axis) const {
    writer.write_finding(group, path + "/fair", fair, "1",
                         "Shapley share of |error|^2 by rounding site; NaN for a site that cannot move the "
                         "tensor or is one of the others",
                         {axis, "site"});
    writer.write_finding(group, path + "/off_alone", off_alone, "1",
                         "share of |error|^2 that goes when this site alone is exact", {axis, "site"});
    writer.write_finding(group, path + "/on_alone", on_alone, "1",
                         "|error|^2 with this site alone as the chip does, over that with all",
                         {axis, "site"});
    writer.write_finding(group, path + "/others", others, "1",
                         "Shapley share of all sites that were not split one by one", {axis});
    writer.write_finding(group, path + "/error", error, "1",
                         "|stored value - truth| / |truth| (score_gradient_sum: NaN)", {axis});
  }

  Fp64Tensor fair, off_alone, on_alone, others, error;
};

std::string names_of_sites() {
  std::string names;
  for (const profile::SiteInfo& info : profile::kSites) {
    names += (names.empty() ? "" : ",") + std::string(info.name);
  }
  return names;
}

void write_heads(CaptureWriter& writer, const std::string& group, const std::vector<BlamedHead>& heads,
                 std::size_t count, const std::string& axis) {
  if (heads.empty()) return;
  for (std::size_t t = 0; t < heads.front().tensors.size(); ++t) {
    Tables tables(count);
    for (const BlamedHead& head : heads) tables.set(head.head, head.tensors[t]);
    const auto tensor = static_cast<std::size_t>(heads.front().tensors[t].tensor);
    tables.write(writer, group, "blame/heads/" + std::string(kBlamedNames[tensor]), axis);
  }
}

}  // namespace

void write_blame(CaptureWriter& writer, const std::string& group, const Problem& problem,
                 const Blame& blame) {
  Tables all(blame.tensors.size());
  std::string tensors;
  for (std::size_t t = 0; t < blame.tensors.size(); ++t) {
    all.set(t, blame.tensors[t]);
    const auto tensor = static_cast<std::size_t>(blame.tensors[t].tensor);
    tensors += (tensors.empty() ? "" : ",") + std::string(kBlamedNames[tensor]);
  }
  all.write(writer, group, "blame/all", "tensor");
  write_heads(writer, group, blame.query_heads, problem.heads_q, "head");
  write_heads(writer, group, blame.kv_heads, problem.heads_kv, "kv_head");
  if (!blame.worst_rows.empty()) {
    Tables rows(blame.worst_rows.size());
    Fp64Tensor places({blame.worst_rows.size(), 3});
    for (std::size_t n = 0; n < blame.worst_rows.size(); ++n) {
      const BlamedRow& row = blame.worst_rows[n];
      rows.set(n, row.tensors[1]);
      places.data[3 * n] = static_cast<double>(row.row.sequence);
      places.data[3 * n + 1] = static_cast<double>(row.row.head);
      places.data[3 * n + 2] = static_cast<double>(row.row.row);
    }
    rows.write(writer, group, "blame/worst_rows/dq", "worst_row");
    writer.write_finding(group, "blame/worst_rows/place", places, "1", "sequence, query head, query",
                         {"worst_row", "coordinate"});
  }
  Attributes attributes{{"kernel", blame.kernel},
                        {"sites", names_of_sites()},
                        {"tensors", tensors},
                        {"rows_looked_at", static_cast<std::int64_t>(blame.rows)},
                        {"rows_of_capture", static_cast<std::int64_t>(blame.rows_of_capture)},
                        {"runs", static_cast<std::int64_t>(blame.runs)}};
  const auto add = [&](const char* name, double x) {
    if (std::isfinite(x)) attributes[name] = x;
  };
  add("left_over", blame.left_over);
  add("sums_in_closed_form_before", blame.sums_in_closed_form.before);
  add("sums_in_closed_form_eta", blame.sums_in_closed_form.eta);
  add("sums_in_closed_form_beta", blame.sums_in_closed_form.beta);
  add("sums_by_sites_before", blame.sums_by_sites.before);
  add("sums_by_sites_eta", blame.sums_by_sites.eta);
  add("sums_by_sites_beta", blame.sums_by_sites.beta);
  writer.write_attributes((group == "/" ? "" : group) + "/findings/blame", attributes);
}

}  // namespace bitattn::audit
