#pragma once
// What blame measures: squared errors of a kernel with some of its sites switched on, gathered at the places
// that a report shows (everything, heads, single rows).

#include <cstddef>
#include <functional>
#include <vector>

#include "audit/row_part.hpp"
#include "audit/site_reach.hpp"
#include "backends/sites.hpp"

namespace bitattn::audit {

/// Numbers the places: one for every tensor over everything, for every head and for some rows.
class ErrorPlaces {
 public:
  /// `rows`: those with places of their own.
  ErrorPlaces(const Problem& problem, const std::vector<RowPart>& parts, const std::vector<RowId>& rows);

  std::size_t size() const { return tensors_.size(); }
  Blamed tensor(std::size_t place) const { return tensors_[place]; }
  static std::size_t of_all(Blamed tensor) { return static_cast<std::size_t>(tensor); }
  /// out, dq and score_gradient_sum of a query head that some part holds.
  std::size_t of_query_head(std::size_t head, Blamed tensor) const {
    return query_heads_[head] + rank(tensor);
  }
  /// dk and dv of a KV head that some part holds.
  std::size_t of_kv_head(std::size_t head, Blamed tensor) const {
    return kv_heads_[head] + (tensor == Blamed::dv ? 1 : 0);
  }
  /// out, dq and score_gradient_sum of rows[n].
  std::size_t of_row(std::size_t n, Blamed tensor) const { return first_row_place_ + 3 * n + rank(tensor); }
  /// Position of a row (index into row_shape()) among `rows`, or rows' number where it is none of them.
  std::size_t row(std::size_t index) const;
  /// The first places are those of everything and of heads.
  bool is_of_row(std::size_t place) const { return place >= first_row_place_; }
  /// Heads that some part holds, ascending.
  const std::vector<std::size_t>& query_heads() const { return held_query_heads_; }
  const std::vector<std::size_t>& kv_heads() const { return held_kv_heads_; }

 private:
  static std::size_t rank(Blamed tensor) { return tensor == Blamed::out ? 0 : tensor == Blamed::dq ? 1 : 2; }
  std::vector<Blamed> tensors_;
  std::vector<std::size_t> query_heads_, kv_heads_, held_query_heads_, held_kv_heads_, rows_;
  std::size_t first_row_place_ = 0;
};

/// One part with its truth: what comes out with every site exact.
class PartRuns {
 public:
  PartRuns(const Problem& problem, const profile::Profile& profile, const RowPart& part);
  PartRuns(const PartRuns&) = delete;
  PartRuns& operator=(const PartRuns&) = delete;

  /// error2[n][place] += |x - truth|^2, x as stored with the sites on[n] as the chip does and all others
  /// exact. advance() is called after every run of n, from any thread.
  void add_errors(const std::vector<profile::SiteSet>& on, const ErrorPlaces& places,
                  std::vector<std::vector<double>>& error2, const std::function<void()>& advance) const;
  /// Squared truths, and numbers of elements counted and left out (because they are not finite).
  void add_truth(const ErrorPlaces& places, std::vector<double>& truth2, std::vector<std::size_t>& elements,
                 std::vector<std::size_t>& not_finite) const;

  /// Calls f(row, |sum of the cast dS| with every site as the chip does, |dQ - truth|^2 before the last cast)
  /// for every row that counts and sees a key; zeros without a backward.
  void for_each_row(const std::function<void(const RowId& row, double sum, double dq_error2)>& f) const;

 private:
  struct Tensors {
    std::vector<double> out, dq, dk, dv, sums;
  };
  static Tensors stored(SiteForward forward, SiteGradients gradients);
  template <class F>
  void for_each_vector(const ErrorPlaces& places, F&& f) const;
  RowId row_id(std::size_t head_of_group, std::size_t row) const;
  SiteGradients gradients(const SiteForward& forward, const profile::SiteSet& exact) const;
  double bytes_of_a_run() const;

  const Problem& whole_;
  RowPart part_;
  Capture capture_;
  SiteRuns runs_;
  Tensors truth_;  ///< NaN where the truth or the chip's value is not finite
  std::vector<double> dq_truth_, dq_before_cast_, chip_sums_;
};

}  // namespace bitattn::audit
