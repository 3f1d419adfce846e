#pragma once
// The ranking of many captures: from their JSON, as text and as JSON (keys: docs/diagnose.md).

#include <string>
#include <vector>

#include "audit/ranking.hpp"
#include "cli/output.hpp"

namespace bitattn::cli {

/// What a ranking takes of a capture's JSON, as diagnosis_json gives it.
audit::RankedCapture ranked_capture(const Json& one);

/// Of more than one capture of which one at least names its layer or step there is a ranking.
bool is_run(const std::vector<audit::RankedCapture>& captures);

/// How the captures were diagnosed, as far as a reader of the ranking has to know.
struct RankingTerms {
  std::string backend;         ///< the emulated kernel
  bool with_reference = true;  ///< shares are of the true |dQ|
  bool blame = false;          ///< both were looked at
  bool remedies = false;
};

/// Sections NaN AND INFINITIES (where there are any), LAYERS, OVER STEPS, HEADS, BACKWARD IN FP32 FIRST,
/// WHOSE FIGURES; at most 100 columns wide.
std::string ranking_text(const audit::Ranking& ranking, const RankingTerms& terms);

Json ranking_json(const audit::Ranking& ranking);

/// "NaN or infinities from step 2 on, first in dout of h.0 and h.1 (2 of 3 layers)."; "" where there are
/// none.
std::string not_finite_text(const audit::Ranking& ranking);

/// The same of one layer: "not finite from step 2 on, first in dout"; "" where it is finite throughout.
std::string not_finite_text(const audit::RankedLayer& layer);

/// How many layers leak more than the casts to BF16 cost anyway, and of how many that is not known: a
/// sentence for the headline of a page and for the text.
std::string verdict_text(const audit::Ranking& ranking);

/// "2 recorded by pytorch-flash and 1 with nothing recorded": captures whose figures are only those of the
/// emulated kernel. "" where there are none.
std::string emulated_only_text(const audit::Ranking& ranking);

/// "blame (--blame worst) and remedies (--remedies)": what was not looked at; "" where all was.
std::string left_out_text(const RankingTerms& terms);

/// Places of at most `most` of `count` steps, evenly spaced, the first and the last among them.
std::vector<std::size_t> some_steps(std::size_t count, std::size_t most);

}  // namespace bitattn::cli
