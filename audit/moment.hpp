#pragma once
// When in a run a capture was taken, and the order of such moments.

#include <cstdint>
#include <optional>
#include <string>

#include "datasets/problem.hpp"

namespace bitattn::audit {

struct Moment {
  std::int64_t step = 0;  ///< 0 where the capture says none
  std::string layer;      ///< or what else tells the capture from the others of its step
  std::int64_t call = 0, rank = 0;
  bool said = false;  ///< by attributes of the capture: its step, its layer, or both

  bool operator==(const Moment& other) const {
    return step == other.step && layer == other.layer && call == other.call && rank == other.rank;
  }
};

/// By step, layer, call and rank; layers in their natural order.
bool operator<(const Moment& a, const Moment& b);

/// blocks.9.attn before blocks.10.attn: runs of digits count as numbers.
bool natural_less(const std::string& a, const std::string& b);

/// An attribute that is a whole number, as such or as text; none where it is absent or no whole number.
std::optional<std::int64_t> whole_number(const Attributes& attributes, const std::string& name);

/// The moment that the attributes step, layer, call and rank say, numbers as such or as text. The layer of a
/// capture that says none is `group`, and `place` (where in its run it lies) if it says no step either.
/// Throws InputError (`where`: the capture) for a step, call or rank that is no whole number.
Moment moment_of(const Attributes& attributes, const std::string& where, const std::string& group,
                 const std::string& place);

}  // namespace bitattn::audit
