#pragma once
// A diagnosis for a person: verdict first, then where the rows go wrong, worst first, then what it means.

#include <string>
#include <vector>

#include "audit/diagnose.hpp"
#include "cli/output.hpp"

namespace bitattn::cli {

/// The whole report of one capture. `worst`: rows in the last table where none were asked for.
std::string diagnosis_report(const Capture& capture, const audit::Diagnosis& diagnosis, std::size_t worst);

/// One line of a report over many captures, taken from a capture's JSON as diagnosis_json gives it.
struct DiagnosisLine {
  std::string capture, recorded;
  double largest_residue = 0, drift = 0, leak = 0, dq_error = 0, condition = 0;
  std::size_t rows = 0;
  std::string
      site;  ///< that owns most of dQ's (forward only: O's) error, and its share; "": blame was not run
  std::string remedy;  ///< the cheapest recommended one, and its cost; "": none was tried
};
DiagnosisLine diagnosis_line(const Json& one);
/// Worst (largest leak) first.
std::string diagnosis_overview(std::vector<DiagnosisLine> lines);
/// Section BLAME AND REMEDIES, or one of both: a line a capture in the same order. "" where neither was run.
std::string causes_overview(std::vector<DiagnosisLine> lines);

}  // namespace bitattn::cli
