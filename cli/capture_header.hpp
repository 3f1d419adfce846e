#pragma once
// The head of a report: what a capture is, before anything is computed from it.

#include <string>

#include "audit/inputs.hpp"
#include "cli/output.hpp"
#include "datasets/result.hpp"

namespace bitattn::cli {

/// Name, kernel, shape, mask, norms, recorded tensors; several lines, each with a line feed.
std::string capture_header(const Capture& capture, const audit::InputSummary& inputs);
/// The same without what has to be computed of the inputs.
std::string capture_title(const Capture& capture);
Json capture_json(const Capture& capture, const audit::InputSummary& inputs);

/// One line each: which tensors hold NaN or infinities, where first, how far spread; "" if none do.
std::string specials_text(const std::vector<audit::SpecialValues>& specials, Layout layout);
Json specials_json(const std::vector<audit::SpecialValues>& specials);

/// "flash-attention-3 (0251105a, nvcc 13.0.88) on NVIDIA H200", as the capture says.
std::string kernel_text(const Problem& problem);

/// Names of the tensors that a result holds.
std::vector<std::string> tensor_names(const Result& result);

}  // namespace bitattn::cli
