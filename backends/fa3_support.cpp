#include "backends/fa3_support.hpp"

#include <string>

#include "datasets/error.hpp"

namespace bitattn {

void check_fa3_supports(const Capture& capture) {
  const Problem& problem = capture.problem;
  const auto refuse = [&](const std::string& why) {
    throw InputError(capture.name + ": fa3 cannot run this: " + why);
  };
  for (const std::size_t dim : {problem.head_dim, problem.head_dim_v}) {
    if (dim == 0 || dim > 256 || dim % 8 != 0) {
      refuse("head dim " + std::to_string(dim) + ", FlashAttention-3 takes multiples of 8 up to 256");
    }
  }
  const bool masked = problem.causal || problem.window_left >= 0 || problem.window_right >= 0;
  if (masked && problem.causal_alignment == CausalAlignment::top_left) {
    for (std::size_t b = 0; b < problem.batch; ++b) {
      const SequenceSpan span = problem.sequence(b);
      if (span.q_length != span.k_length) {
        refuse(
            "causal_alignment top-left with different lengths, FlashAttention-3 aligns to the bottom right");
      }
    }
  }
  if (problem.integer("num_splits", 1) > 1) refuse("num_splits above 1 is not emulated");
}

void check_remedies_fit(const Capture& capture, const profile::RemedySet& remedies) {
  for (const profile::RemedyInfo& i : profile::kRemedies) {
    if (!remedies.has(i.remedy) || !i.needs_zero_sum || capture.problem.softcap == 0) continue;
    throw InputError(capture.name + ": " + std::string(i.name) +
                     " rests on the row sum of dS being 0, which it is not with a softcap");
  }
}

}  // namespace bitattn
