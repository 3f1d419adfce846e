#pragma once
// Remedies as part of a diagnosis: whether they are tried on a capture, on which heads, and what came out.

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "audit/remedies.hpp"

namespace bitattn::audit {

struct Diagnosis;

/// A capture's remedies are tried unasked where one run of the kernel takes no more fused products than this:
/// a causal head of 2,000 tokens at head size 128.
inline constexpr double kProductsOfUnaskedTrials = 2147483648.0;

enum class TryRemedies {
  where_cheap,  ///< the whole capture, else its worst KV head, else nothing
  always,       ///< the whole capture, whatever it costs
  never,
};

struct RemediesFinding {
  std::optional<RemediesReport> report;
  std::string not_tried;               ///< why there is no report
  std::optional<std::size_t> kv_head;  ///< tried on this KV head alone, the one with the largest leak
  std::string why_one_head;            ///< "" where all heads were tried
};

/// Tries what `bitattn remedies` tries, without the other functions (qk-norm), which are never recommended.
/// The recommendation is the same where all heads are tried.
RemediesFinding find_remedies(const Capture& capture, const Diagnosis& diagnosis, TryRemedies whether,
                              const std::function<void(const std::string& stage, double share)>& progress,
                              double most_products = kProductsOfUnaskedTrials);

}  // namespace bitattn::audit
