#pragma once
// What was tried on a capture, as text and as JSON.

#include <string>
#include <vector>

#include "audit/remedies.hpp"
#include "cli/output.hpp"
#include "cli/table.hpp"

namespace bitattn::cli {

/// A number of an error: two digits, as in docs/spec/measured-facts.md; "-" where it is not defined.
std::string two_digits(double x);
/// A row for a trial: its name without "fa3+", broken into lines of at most `width`, then the cells.
void add_trial_row(Table& table, const std::string& name, std::size_t width,
                   const std::vector<std::string>& cells);
/// The recommendation in sentences.
std::string recommendation(const audit::RemediesReport& report);

std::string remedies_report(const Capture& capture, const audit::RemediesReport& report);
Json remedies_json(const audit::RemediesReport& report);

}  // namespace bitattn::cli
