#pragma once
// The ranking of many captures as the beginning of a page: which layers need an FP32 backward first, how they
// grew over steps, and the worst heads.

#include <string>

#include "cli/output.hpp"
#include "cli/ranking_section.hpp"

namespace bitattn::cli::page {

/// Heading and sections, as HTML. `ranking`: its JSON, as ranking_json gives it; numbers carry their keys in
/// it.
std::string ranking_introduction(const Json& ranking, const audit::Ranking& ranked,
                                 const RankingTerms& terms);

}  // namespace bitattn::cli::page
