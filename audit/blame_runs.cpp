#include "audit/blame_runs.hpp"

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace bitattn::audit {

namespace {

using profile::Site;
using profile::SiteSet;

constexpr double kMostBytes = 2.0 * 1024 * 1024 * 1024;  ///< of all runs under way at once

SiteSet forward_sites() {
  SiteSet set;
  for (const profile::SiteInfo& info : profile::kSites) {
    if (info.site <= Site::o_cast) set.add(info.site);
  }
  return set;
}

std::vector<std::size_t> sorted(std::vector<std::size_t> values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

Capture part_capture(const Problem& problem, const RowPart& part) {
  Capture capture;
  capture.name = "part";
  capture.problem = part_problem(problem, part);
  return capture;
}

void leave_out(std::vector<double>& truth, const std::vector<double>& chip) {
  for (std::size_t i = 0; i < truth.size(); ++i) {
    if (!std::isfinite(chip[i]) || !std::isfinite(truth[i]))
      truth[i] = std::numeric_limits<double>::quiet_NaN();
  }
}

}  // namespace

ErrorPlaces::ErrorPlaces(const Problem& problem, const std::vector<RowPart>& parts,
                         const std::vector<RowId>& rows)
    : query_heads_(problem.heads_q), kv_heads_(problem.heads_kv) {
  for (std::size_t t = 0; t < kBlamedCount; ++t) tensors_.push_back(static_cast<Blamed>(t));
  for (const RowPart& part : parts) {
    held_kv_heads_.push_back(part.kv_head);
    for (std::size_t g = 0; g < problem.group(); ++g) {
      held_query_heads_.push_back(part.kv_head * problem.group() + g);
    }
  }
  held_kv_heads_ = sorted(std::move(held_kv_heads_));
  held_query_heads_ = sorted(std::move(held_query_heads_));
  const auto add_row_tensors = [&] {
    for (const Blamed t : {Blamed::out, Blamed::dq, Blamed::score_gradient_sum}) tensors_.push_back(t);
  };
  for (const std::size_t h : held_query_heads_) {
    query_heads_[h] = tensors_.size();
    add_row_tensors();
  }
  for (const std::size_t h : held_kv_heads_) {
    kv_heads_[h] = tensors_.size();
    for (const Blamed t : {Blamed::dk, Blamed::dv}) tensors_.push_back(t);
  }
  first_row_place_ = tensors_.size();
  for (const RowId& row : rows) {
    rows_.push_back(row.index);
    add_row_tensors();
  }
}

std::size_t ErrorPlaces::row(std::size_t index) const {
  return static_cast<std::size_t>(std::find(rows_.begin(), rows_.end(), index) - rows_.begin());
}

PartRuns::PartRuns(const Problem& problem, const profile::Profile& profile, const RowPart& part)
    : whole_(problem), part_(part), capture_(part_capture(problem, part)), runs_(capture_, profile) {
  SiteForward forward = runs_.forward(SiteSet::all());
  SiteGradients exact = gradients(forward, SiteSet::all());
  dq_truth_ = exact.dq;
  truth_ = stored(std::move(forward), std::move(exact));
  SiteForward chip_forward = runs_.forward({});
  SiteGradients chip_gradients = gradients(chip_forward, {});
  dq_before_cast_ = gradients(chip_forward, SiteSet{}.add(Site::dq_cast)).dq;
  chip_sums_ = chip_gradients.score_gradient_sums;
  const Tensors chip = stored(std::move(chip_forward), std::move(chip_gradients));
  leave_out(truth_.out, chip.out);
  leave_out(truth_.dq, chip.dq);
  leave_out(truth_.dk, chip.dk);
  leave_out(truth_.dv, chip.dv);
  leave_out(truth_.sums, chip.sums);
}

SiteGradients PartRuns::gradients(const SiteForward& forward, const SiteSet& exact) const {
  return capture_.problem.dout.empty() ? SiteGradients{} : runs_.backward(forward, exact);
}

PartRuns::Tensors PartRuns::stored(SiteForward forward, SiteGradients gradients) {
  return {std::move(forward.out), std::move(gradients.dq), std::move(gradients.dk), std::move(gradients.dv),
          std::move(gradients.score_gradient_sums)};
}

RowId PartRuns::row_id(std::size_t head_of_group, std::size_t row) const {
  const std::size_t head = part_.kv_head * whole_.group() + head_of_group;
  const std::size_t i = part_.first_row + row;
  return {part_.sequence, head, i, whole_.row_index(part_.sequence, head, i)};
}

/// Calls f(member of Tensors, first element, elements, places that it belongs to) for every vector that
/// counts.
template <class F>
void PartRuns::for_each_vector(const ErrorPlaces& places, F&& f) const {
  const Problem& p = capture_.problem;
  const std::size_t group = p.heads_q;
  const bool backward = !p.dout.empty();
  std::vector<std::size_t> at;
  for (std::size_t i = 0; i < part_.rows; ++i) {
    for (std::size_t g = 0; g < group; ++g) {
      if (!part_.counts(g, i)) continue;
      const RowId id = row_id(g, i);
      const std::size_t n = places.row(id.index);
      const auto visit = [&](std::vector<double> Tensors::*member, Blamed tensor, std::size_t first,
                             std::size_t count) {
        at = {ErrorPlaces::of_all(tensor), places.of_query_head(id.head, tensor)};
        const std::size_t of_row = places.of_row(n, tensor);
        if (of_row < places.size()) at.push_back(of_row);
        f(member, first, count, at);
      };
      visit(&Tensors::out, Blamed::out, (i * group + g) * p.head_dim_v, p.head_dim_v);
      if (!backward) continue;
      visit(&Tensors::dq, Blamed::dq, (i * group + g) * p.head_dim, p.head_dim);
      visit(&Tensors::sums, Blamed::score_gradient_sum, g * part_.rows + i, 1);
    }
  }
  if (!backward) return;
  at = {ErrorPlaces::of_all(Blamed::dk), places.of_kv_head(part_.kv_head, Blamed::dk)};
  f(&Tensors::dk, 0, truth_.dk.size(), at);
  at = {ErrorPlaces::of_all(Blamed::dv), places.of_kv_head(part_.kv_head, Blamed::dv)};
  f(&Tensors::dv, 0, truth_.dv.size(), at);
}

void PartRuns::add_truth(const ErrorPlaces& places, std::vector<double>& truth2,
                         std::vector<std::size_t>& elements, std::vector<std::size_t>& not_finite) const {
  for_each_vector(places, [&](std::vector<double> Tensors::*member, std::size_t first, std::size_t count,
                              const std::vector<std::size_t>& at) {
    const double* truth = (truth_.*member).data() + first;
    double sum = 0;
    std::size_t left_out = 0;
    for (std::size_t d = 0; d < count; ++d) {
      if (std::isfinite(truth[d])) {
        sum += truth[d] * truth[d];
      } else {
        ++left_out;
      }
    }
    for (const std::size_t place : at) {
      truth2[place] += sum;
      elements[place] += count;
      not_finite[place] += left_out;
    }
  });
}

double PartRuns::bytes_of_a_run() const {
  const Problem& p = capture_.problem;
  const auto keys = static_cast<double>(p.seqlen_k);
  const auto rows = static_cast<double>(p.total_q());
  const auto dim = static_cast<double>(std::max(p.head_dim, p.head_dim_v));
  // A strip of 128 rows by all keys in nine arrays; keys and values as operands and dK, dV; Q-shaped results.
  return 8.0 * (128 * keys * 9 + keys * dim * 10 + rows * dim * static_cast<double>(p.heads_q) * 6);
}

void PartRuns::add_errors(const std::vector<SiteSet>& on, const ErrorPlaces& places,
                          std::vector<std::vector<double>>& error2,
                          const std::function<void()>& advance) const {
  static const SiteSet kForward = forward_sites();
  std::map<SiteSet, std::vector<std::size_t>> by_forward;
  for (std::size_t n = 0; n < on.size(); ++n) by_forward[on[n] & kForward].push_back(n);
  const std::vector<std::pair<SiteSet, std::vector<std::size_t>>> forwards(by_forward.begin(),
                                                                           by_forward.end());
  const auto run_forward = [&](std::size_t which) {
    const auto& [on_in_forward, runs] = forwards[which];
    const SiteForward forward = runs_.forward(~on_in_forward);
    tbb::parallel_for(std::size_t{0}, runs.size(), [&](std::size_t i) {
      tbb::this_task_arena::isolate([&] {
        const std::size_t n = runs[i];
        SiteForward outputs;
        outputs.out = forward.out;
        const Tensors found = stored(std::move(outputs), gradients(forward, ~on[n]));
        for_each_vector(places, [&](std::vector<double> Tensors::*member, std::size_t first,
                                    std::size_t count, const std::vector<std::size_t>& at) {
          const double* x = (found.*member).data() + first;
          const double* truth = (truth_.*member).data() + first;
          double sum = 0;
          for (std::size_t d = 0; d < count; ++d) {
            const double error = x[d] - truth[d];
            if (std::isfinite(error)) sum += error * error;
          }
          for (const std::size_t place : at) error2[n][place] += sum;
        });
        if (advance) advance();
      });
    });
  };
  const int most = std::max(1, static_cast<int>(kMostBytes / bytes_of_a_run()));
  tbb::task_arena arena(std::min(most, tbb::this_task_arena::max_concurrency()));
  arena.execute([&] {
    tbb::parallel_for(std::size_t{0}, forwards.size(),
                      [&](std::size_t which) { tbb::this_task_arena::isolate([&] { run_forward(which); }); });
  });
}

void PartRuns::for_each_row(
    const std::function<void(const RowId& row, double sum, double dq_error2)>& f) const {
  const Problem& p = capture_.problem;
  const std::size_t group = p.heads_q;
  const SequenceSpan span = whole_.sequence(part_.sequence);
  for (std::size_t i = 0; i < part_.rows; ++i) {
    const KeyRange range =
        visible_keys(whole_, static_cast<std::int64_t>(part_.first_row + i),
                     static_cast<std::int64_t>(span.q_length), static_cast<std::int64_t>(span.k_length));
    if (range.first >= range.last) continue;
    for (std::size_t g = 0; g < group; ++g) {
      if (!part_.counts(g, i)) continue;
      double error2 = 0;
      if (!dq_truth_.empty()) {
        for (std::size_t d = 0; d < p.head_dim; ++d) {
          const std::size_t at = (i * group + g) * p.head_dim + d;
          error2 += (dq_before_cast_[at] - dq_truth_[at]) * (dq_before_cast_[at] - dq_truth_[at]);
        }
      }
      f(row_id(g, i), chip_sums_.empty() ? 0.0 : std::abs(chip_sums_[g * part_.rows + i]), error2);
    }
  }
}

}  // namespace bitattn::audit
