#pragma once
// A comparison of two results as a table, a line, or JSON.

#include <string>

#include "audit/compare.hpp"
#include "cli/output.hpp"

namespace bitattn::cli {

/// The tensors, a line each, and the first and worst places where bits differ.
std::string comparison_table(const audit::Comparison& comparison, Layout layout);
/// "equal: 8 tensors, 86,464 elements" or "12 of 86,464 elements differ (dq 12)".
std::string comparison_verdict(const audit::Comparison& comparison);
/// "recorded 0.5 (0x3f00), fa3 0.502 (0x3f01), 1 ulp": an element of a tensor, on both sides.
std::string element_values(const audit::ElementPair& pair, bool bf16, const audit::Comparison& comparison);
Json tensor_json(const audit::TensorComparison& tensor);
Json comparison_json(const audit::Comparison& comparison);
/// The capture names a kernel, and it is none of those that are emulated: its bits need not be fa3's.
bool recorded_by_another(const Problem& problem);
/// With what was recorded as a: every recorded tensor was compared, and every bit compared is equal.
bool verified(const audit::Comparison& comparison);

}  // namespace bitattn::cli
