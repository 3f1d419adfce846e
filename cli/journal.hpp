#pragma once
// Finished captures of a long diagnosis, a line of JSON each, so that the same command goes on where it was
// stopped.

#include <sys/types.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "cli/output.hpp"

namespace bitattn::cli {

/// A line that was cut off by a crash is dropped, one that is not what was written (every line has a
/// checksum) is told and not used. find() and add() may be called from any thread.
class Journal {
 public:
  /// Opens the file at `path`, or begins it. `settings`: all that changes a figure, the program's version
  /// among it. Throws InputError where the file is no journal, cannot be written, or another run writes it.
  Journal(const std::string& path, std::string settings);
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;
  ~Journal();

  /// What an entry is found by: the capture's group, its file's whole path, its size and time of change as
  /// they are now, and the settings. To be taken before the file is read.
  std::string key(const std::string& capture) const;
  /// The entry, null where there is none.
  Json find(const std::string& key) const;
  /// Appends an entry and flushes it to the disk. Throws InputError where that fails.
  void add(const std::string& key, const Json& entry);

 private:
  void load();
  void append(const std::string& line);

  struct Place {
    off_t begin = 0;
    std::size_t length = 0;
  };
  std::string path_, settings_;
  int descriptor_ = -1;
  mutable std::mutex mutex_;
  std::map<std::string, Place> kept_;
};

}  // namespace bitattn::cli
