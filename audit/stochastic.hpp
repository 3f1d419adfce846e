#pragma once
// Is a cast of this kernel rounded stochastically? No bits can tell; the statistics of the recorded words
// can. docs/identify.md

#include <array>
#include <optional>

#include "audit/compare.hpp"
#include "audit/identify.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn::audit {

/// The casts that are tried, the last ones first: what they say is exact.
inline constexpr std::array kStochasticPoints{
    profile::Point::out_word, profile::Point::dq_word, profile::Point::dk_word, profile::Point::dv_word,
    profile::Point::p_word,   profile::Point::pb_word, profile::Point::ds_word,
};

/// What a stochastic rounding of this cast says of the recorded words of a unit, if it describes them: every
/// word one of two neighbours and rounded up as often as it should (a last cast), or a spread around the
/// plain kernel's bits as large as in a simulation, without bias (an inner cast). `plain`: recorded against
/// the plain kernels; where a tensor that this cast cannot reach differs, it does not fit.
std::optional<StochasticFit> fit_stochastic(const profile::Profile& profile, const Capture& unit,
                                            profile::Point point, const Comparison& plain);

}  // namespace bitattn::audit
