#pragma once
// A diagnosis as JSON (keys: docs/diagnose.md).

#include "audit/diagnose.hpp"
#include "cli/output.hpp"

namespace bitattn::cli {

Json diagnosis_json(const Capture& capture, const audit::Diagnosis& diagnosis, std::size_t worst);

}  // namespace bitattn::cli
