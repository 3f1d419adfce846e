#pragma once
// The Shapley value: the fair split of what a group of players achieves together.

#include <cstddef>
#include <vector>

namespace bitattn::audit {

/// values[m]: what the players whose bits are set in m achieve; 2^players entries. Returns every player's
/// share: what it adds to those before it, averaged over all orders of the players. The shares add up to
/// values.back() - values.front().
inline std::vector<double> shapley_values(std::size_t players, const std::vector<double>& values) {
  // |S|! (n - |S| - 1)! / n!: the share of orders in which exactly S comes before a player.
  std::vector<double> weight(players);
  for (std::size_t before = 0; before < players; ++before) {
    double w = 1.0 / static_cast<double>(players);
    for (std::size_t i = 1; i <= before; ++i) {
      w *= static_cast<double>(i) / static_cast<double>(players - i);
    }
    weight[before] = w;
  }
  std::vector<double> shares(players, 0.0);
  for (std::size_t m = 0; m < values.size(); ++m) {
    std::size_t before = 0;
    for (std::size_t bits = m; bits != 0; bits &= bits - 1) ++before;
    for (std::size_t i = 0; i < players; ++i) {
      if ((m >> i & 1U) == 0) shares[i] += weight[before] * (values[m | std::size_t{1} << i] - values[m]);
    }
  }
  return shares;
}

}  // namespace bitattn::audit
