#pragma once
// Witnesses as text and as JSON: of one capture (`bitattn witness`, a section of `bitattn diagnose`), and a
// line each of many.

#include <string>
#include <vector>

#include "audit/witness.hpp"
#include "cli/output.hpp"

namespace bitattn::cli {

/// The three laws, a line each, under the heading WITNESS. "" where nothing was recorded.
std::string witness_section(const Capture& capture, const audit::Witness& witness);
/// The same by batch element (or sequence) and KV head, farthest beyond its bound first, the first `most`; ""
/// with one.
std::string witness_heads(const Capture& capture, const audit::Witness& witness, std::size_t most);
/// "every law holds", "broken: sum_j dK_j = 0 in 1 of 2 heads".
std::string witness_verdict(const audit::Witness& witness);
/// What a broken law need not mean; "" where none is broken that this is true of.
std::string witness_remark(const audit::Witness& witness);
Json witness_json(const audit::Witness& witness);

struct WitnessLine {
  std::string capture;
  audit::Witness witness;
};
/// A line a capture, farthest beyond its bound first.
std::string witness_overview(std::vector<WitnessLine> lines);

}  // namespace bitattn::cli
