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
  /// HTML that only a diagnosis itself gives, not its JSON.
  struct Sections {
    std::string head;  ///< verdict and figures
    std::string rest;  ///< "" where there are none
  };
  /// `command`: as it was typed.
  explicit Page(std::string command) : command_(std::move(command)) {}

  static Sections sections(const Capture& capture, const audit::Diagnosis& diagnosis, const Json& one);
  /// Would a capture with this leak (NaN: none) have sections, after those that were added? Once it would
  /// not, it never will.
  bool shows(double leak) const;
  /// `one`: its JSON, as diagnosis_json gives it. Without sections it has a line in the index only.
  void add(const Json& one, Sections sections);
  /// HTML that stands above the index, with the page's heading.
  void introduce(std::string html) { introduction_ = std::move(html); }
  bool empty() const { return entries_.empty(); }
  std::string html() const;

 private:
  struct Entry {
    std::size_t number = 0;  ///< index among the captures of --json
    double leak = 0;         ///< NaN: none
    std::string name, line;  ///< HTML: a row of the index
    Sections sections;       ///< empty where dropped
  };
  static bool comes_before(const Entry& a, const Entry& b);
  std::string plain_heading() const;

  std::string command_, introduction_;
  std::vector<Entry> entries_;  ///< worst leak first
};

/// The bit of provenance that the build knows: "bitattn 0.1.0 (commit 4c9f0e5)".
std::string version_text();

}  // namespace bitattn::cli::page
