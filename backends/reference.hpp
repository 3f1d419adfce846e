#pragma once
// High-precision attention as a backend.

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backends/backend.hpp"

namespace bitattn {

/// `name`: "reference" (the fast one, about 115 bits, with a proven bound for every element) or
/// "reference:BITS" (every operation in MPFR at that precision, many times slower). Throws InputError unless
/// BITS is a number from 24 to 4096.
std::unique_ptr<Backend> reference_backend(const std::string& name);

/// One row of queries of a problem.
struct RowName {
  std::size_t sequence = 0, head = 0, row = 0;
};

/// The truth of one row of queries, rounded to fp64, with proven bounds on the error before that rounding.
struct ReferenceRow {
  RowName name;
  std::vector<double> out, out_bound;  ///< [head_dim_v]
  double lse = 0, lse_bound = 0;
  std::vector<double> dq, dq_bound;  ///< [head_dim]; empty without dout
};

/// out, lse and dq of chosen rows alone, as the backend "reference" gives them, in the order of `rows`.
/// `progress` as in RunOptions. Throws InputError for a row that the problem does not have.
std::vector<ReferenceRow> reference_rows(const Problem& problem, std::span<const RowName> rows,
                                         const std::function<void(double)>& progress = {});

}  // namespace bitattn
