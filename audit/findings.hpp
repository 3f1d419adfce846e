#pragma once
// Findings into an HDF5 file: what a diagnosis measured row by row, with units and descriptions
// (docs/diagnose.md).

#include <string>
#include <vector>

#include "audit/diagnose.hpp"
#include "datasets/capture_file.hpp"

namespace bitattn::audit {

/// Names of the axes of tensors of Problem::row_shape(): batch, head, query; packed sequences head, token.
std::vector<std::string> row_axes(const Problem& problem);

/// The per-row figures of the emulator's run, under <group>/findings/….
void write_row_findings(CaptureWriter& writer, const std::string& group, const Problem& problem,
                        const RowFindings& rows);

/// All of a diagnosis: the rows' figures, and what relates them to dQ; a summary as attributes of
/// <group>/findings.
void write_findings(CaptureWriter& writer, const std::string& group, const Problem& problem,
                    const Diagnosis& diagnosis);

}  // namespace bitattn::audit
