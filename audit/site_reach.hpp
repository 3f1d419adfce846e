#pragma once
// Which tensors a rounding site can move. What cannot move the same tensor can be switched in the same run.

#include <array>
#include <bitset>
#include <cstdint>
#include <string_view>
#include <vector>

#include "datasets/problem.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn::audit {

/// What blame looks at. `score_gradient_sum`: one number a row, the sum over its keys of the cast dS
/// (softcap: of dS before its derivative), 0 in theory.
enum class Blamed : std::uint8_t { out, dq, dk, dv, score_gradient_sum };
inline constexpr std::size_t kBlamedCount = 5;
inline constexpr std::array<std::string_view, kBlamedCount> kBlamedNames{"out", "dq", "dk", "dv",
                                                                         "score_gradient_sum"};
using BlamedSet = std::bitset<kBlamedCount>;

/// The tensors that a site's rounding can move when this kernel runs this problem; none for a site whose
/// operation does not occur. With remedies an upper bound.
BlamedSet reach(profile::Site site, const profile::Profile& profile, const Problem& problem);

/// Sites in groups whose reaches do not overlap, the first sites in the first groups. At most `most` groups:
/// sites that would need another one are left out. Sites that reach nothing are left out.
std::vector<std::vector<profile::Site>> switch_groups(const std::vector<profile::Site>& sites,
                                                      const profile::Profile& profile, const Problem& problem,
                                                      std::size_t most);

}  // namespace bitattn::audit
