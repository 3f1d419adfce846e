#pragma once
// Sums over one key block of a row, in an order that the backward's score fragments allow: keys b and b + 8
// of every 16 belong to one thread, eight threads share 16 keys.

#include <array>

#include "emu/profile/sites.hpp"

namespace bitattn::kernels::remedies {

/// The eight partial sums of 16 keys meet: neighbours, then pairs of them, then halves.
template <class Numbers, class Value>
Value meet(const Numbers& numbers, profile::Site site, std::array<Value, 8> lanes) {
  for (std::size_t distance = 1; distance < 8; distance *= 2) {
    for (std::size_t l = 0; l < 8; l += 2 * distance) {
      lanes[l] = numbers.add(site, lanes[l], lanes[l + distance]);
    }
  }
  return lanes[0];
}

/// sum_j x_j; n is a multiple of 16.
template <class Numbers, class Value>
Value block_sum(const Numbers& numbers, profile::Site site, const Value* x, int n) {
  Value sum = 0;
  for (int g = 0; g < n; g += 16) {
    std::array<Value, 8> lanes;
    for (int l = 0; l < 8; ++l) {
      lanes[static_cast<std::size_t>(l)] = numbers.add(site, x[g + l], x[g + 8 + l]);
    }
    const Value met = meet(numbers, site, lanes);
    sum = g == 0 ? met : numbers.add(site, sum, met);
  }
  return sum;
}

/// sum_j x_j * y_j: the product at b + 8 is added fused to the one at b.
template <class Numbers, class Value>
Value block_dot(const Numbers& numbers, profile::Site site, const Value* x, const Value* y, int n) {
  Value sum = 0;
  for (int g = 0; g < n; g += 16) {
    std::array<Value, 8> lanes;
    for (int l = 0; l < 8; ++l) {
      const Value first = numbers.mul(site, x[g + l], y[g + l]);
      lanes[static_cast<std::size_t>(l)] = numbers.fma(site, x[g + 8 + l], y[g + 8 + l], first);
    }
    const Value met = meet(numbers, site, lanes);
    sum = g == 0 ? met : numbers.add(site, sum, met);
  }
  return sum;
}

}  // namespace bitattn::kernels::remedies
