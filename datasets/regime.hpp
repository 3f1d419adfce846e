#pragma once
// Regimes: seeded recipes for inputs that show a fault. Same seed, same bits, on every machine: normal
// deviates come from a counter-based generator and integer or correctly rounded arithmetic alone, never from
// libm or <random> distributions.

#include <cstdint>
#include <string>
#include <vector>

#include "datasets/problem.hpp"

namespace bitattn {

struct GenerateOptions {
  std::string regime = "normal";
  std::size_t batch = 1, heads_q = 1, heads_kv = 1, seqlen_q = 256, seqlen_k = 256, head_dim = 128;
  bool causal = false;
  int window_left = -1, window_right = -1;
  double softcap = 0;
  double softmax_scale = 0;  ///< 0: 1/sqrt(head_dim)
  std::uint64_t seed = 0;
  double key_shift = 0;  ///< one vector of this times the mean key norm added to all keys of a head
};

struct RegimeInfo {
  std::string name, description;
};

/// All regimes with a line each.
const std::vector<RegimeInfo>& regimes();

/// The problem of a regime. Throws InputError for an unknown regime or shapes that do not fit.
Problem generate(const GenerateOptions& options);

}  // namespace bitattn
