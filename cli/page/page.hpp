#pragma once
// A diagnosis as one self-contained HTML page: no network, no scripts, light and dark, for a desktop and a
// phone. Every number on it comes from the same JSON as --json and carries its key and exact value.

#include <string>
#include <vector>

#include "audit/diagnose.hpp"
#include "cli/output.hpp"

namespace bitattn::cli::page {

/// Captures are added one after the other; of many, the worst `kDetailed` keep all their sections and the
/// others a line in the index, so that neither the page nor what is held grows without end.
class Page {
 public:
  static constexpr std::size_t kDetailed = 24;
  /// `command`: as it was typed.
  explicit Page(std::string command) : command_(std::move(command)) {}

  /// `one`: its JSON, as diagnosis_json gives it.
  void add(const Capture& capture, const audit::Diagnosis& diagnosis, const Json& one);
  bool empty() const { return entries_.empty(); }
  std::string html() const;

 private:
  struct Entry {
    std::size_t number = 0;  ///< index among the captures of --json
    double leak = 0;         ///< NaN: none
    std::string name, line;  ///< HTML: a row of the index
    std::string head;        ///< HTML: verdict and figures
    std::string sections;    ///< HTML; "" where dropped
  };
  std::string command_;
  std::vector<Entry> entries_;  ///< worst leak first
};

/// The bit of provenance that the build knows: "bitattn 0.1.0 (commit 4c9f0e5)".
std::string version_text();

}  // namespace bitattn::cli::page
