#pragma once
// From another format's tensors to captures: names, layout, number types.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "datasets/foreign.hpp"
#include "datasets/result.hpp"

namespace bitattn {

struct ImportOptions {
  /// Tensor of a capture ("q", "dout", "cu_seqlens_q") to its name in the file; for the others the rules
  /// hold.
  std::map<std::string, std::string> names;
  std::string layout;                   ///< BSHD, BHSD, SBHD or THD; "": BSHD for four axes, THD for three
  bool round = false;                   ///< round what is not BF16 to nearest even; else it is refused
  std::optional<double> softmax_scale;  ///< these: absent, what the file says
  std::optional<bool> causal;
  std::optional<int> window_left, window_right;
  std::optional<double> softcap;
  std::optional<std::string> causal_alignment;
  Attributes attributes;  ///< added to those of the file
};

struct ImportedCapture {
  std::string group;   ///< in the file to write: "/" or "/layers.3.attn"
  std::string layout;  ///< that the file's tensors were read in
  Capture capture;
  std::size_t rounded = 0;         ///< elements that were rounded
  std::vector<std::string> taken;  ///< "q from layers.3.attn.query_states"
};

/// All captures in the tensors: one for every prefix ("layers.3.attn.") below which q, k and v are found by
/// the names that are usual for them (docs/captures.md, "Importing"); with a name mapped, one. Throws
/// InputError with one clear line.
std::vector<ImportedCapture> import_captures(const std::string& where, const ForeignFile& file,
                                             const ImportOptions& options);

}  // namespace bitattn
