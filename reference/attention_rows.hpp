#pragma once
// What the reference hands out, row by row, so that nothing large needs to stand in memory as a whole.

#include <functional>
#include <span>

#include "reference/number.hpp"
#include "reference/problem_view.hpp"

namespace bitattn::reference {

/// A finished row of queries. A bound is on |value - exact value|, absolute, proven in docs/reference.md;
/// infinity or NaN where nothing is claimed (non-finite inputs, or a precision too low for the scores).
struct QueryRow {
  RowId id;
  std::span<const Number> out;  ///< [head_dim_v]; a row without visible keys: 0
  std::span<const double> out_bound;
  const Number* lse = nullptr;  ///< natural log of the sum of exp(scaled scores); no visible keys: -infinity
  double lse_bound = 0;
  std::span<const Number> dq;  ///< [head_dim]; empty: forward only
  std::span<const double> dq_bound;
};

/// A finished row of keys: the gradients, summed over the query heads of its group.
struct KeyRow {
  std::size_t sequence = 0, head_kv = 0, key = 0;
  std::span<const Number> dk;  ///< [head_dim]
  std::span<const double> dk_bound;
  std::span<const Number> dv;  ///< [head_dim_v]
  std::span<const double> dv_bound;
};

/// Receives every row exactly once, in any order, from several threads at once. The numbers live only during
/// the call.
class Sink {
 public:
  Sink() = default;
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;
  virtual ~Sink() = default;
  virtual void query_row(const QueryRow& row) = 0;
  virtual void key_row(const KeyRow& /*row*/) {}
};

/// Called now and then, from any thread, with the share done, 0 to 1. Whatever it throws ends the computation
/// and comes out of the call that started it.
using Progress = std::function<void(double)>;

}  // namespace bitattn::reference
