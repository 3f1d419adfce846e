#pragma once
// Small problems and the bundled captures, for the audit's tests.

#include <string>
#include <vector>

#include "datasets/result.hpp"

namespace bitattn::test {

struct Shape {
  std::size_t batch = 1, seqlen_q = 8, seqlen_k = 8, heads_q = 1, heads_kv = 1, head_dim = 64;
};

/// All-zero inputs of that shape, scale 1/sqrt(head_dim).
Problem blank(const Shape& shape);

/// Packed sequences of these lengths, all-zero inputs.
Problem blank_packed(const std::vector<std::int32_t>& q_lengths, const std::vector<std::int32_t>& k_lengths,
                     const Shape& shape);

/// Fills q, k, v and dout with numbers of a small generator of its own: multiples of 1/16 in [-2, 2].
void fill(Problem& problem, std::uint64_t seed);

/// The only capture of <bundled goldens>/<path>.
Capture bundled(const std::string& path);

/// <BITATTN_GOLDENS>/<path> or the bundled file of that name; "" where neither exists.
std::string find_golden(const std::string& path);

}  // namespace bitattn::test
