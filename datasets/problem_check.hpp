#pragma once
// Parts of the checks that stand between files and the rest of the program.

#include <string>

#include "datasets/result.hpp"

namespace bitattn {

/// Heads, head sizes, batch and lengths as the shapes of q, k and v and the cu_seqlens say; q, k and v have
/// the axes of the layout.
void set_sizes(Problem& problem);

/// Is that attribute one that a problem holds itself, so that it cannot be among its others?
bool is_problem_attribute(const std::string& name);

/// check_problem with the tensors' data left out, so that a reader can refuse a problem before it takes
/// memory for it. Throws InputError.
void check_problem_without_data(const Problem& problem, const std::string& where);

/// Throws InputError unless every tensor of the result is whole and, where the problem fixes its shape, of
/// that shape.
void check_result(const Problem& problem, const Result& result, const std::string& where);

}  // namespace bitattn
