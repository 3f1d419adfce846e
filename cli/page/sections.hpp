#pragma once
// The sections of one capture's diagnosis, each as HTML, "" where there is nothing to say. `one` is the
// capture's JSON.

#include <string>

#include "audit/diagnose.hpp"
#include "cli/output.hpp"

namespace bitattn::cli::page {

/// Kernel, device, shape and mask in a line.
std::string subject_line(const Json& one, const Problem& problem);
/// One sentence.
std::string verdict_sentence(const Json& one);
/// Verdict, cause, bits, and the six figures to remember.
std::string head_of(const Json& one);
std::string cause_section(const Json& one);
std::string blame_section(const Json& one);
std::string errors_section(const Json& one);
/// Residue, drift and leak of every head over the rows.
std::string rows_map_section(const Capture& capture, const audit::Diagnosis& diagnosis, const Json& one);
std::string heads_section(const Json& one);
std::string worst_rows_section(const Json& one, bool chosen);
std::string specials_section(const Json& one);
std::string bits_section(const Json& one);
std::string witness_section(const Json& one);
std::string remedies_section(const Json& one);
std::string provenance_section(const Json& one, const Problem& problem);

}  // namespace bitattn::cli::page
