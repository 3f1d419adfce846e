#pragma once
// The part of check_problem that needs shapes only, so that a reader can refuse a problem before it takes
// memory for it.

#include <string>

#include "datasets/problem.hpp"

namespace bitattn {

/// check_problem with the tensors' data left out. Throws InputError.
void check_problem_without_data(const Problem& problem, const std::string& where);

}  // namespace bitattn
