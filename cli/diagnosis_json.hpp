#pragma once
// A diagnosis as JSON (keys: docs/diagnose.md).

#include "audit/diagnose.hpp"
#include "cli/output.hpp"

namespace bitattn::cli {

Json diagnosis_json(const Capture& capture, const audit::Diagnosis& diagnosis, std::size_t worst);

/// Where in that JSON the row sums stand that should be 0: after the cast, with a softcap before it.
std::string drift_pointer(const Json& one);

}  // namespace bitattn::cli
