#pragma once
// A new file that appears under its name only when it is whole: nothing is left behind by an error, an
// interrupt or a crash, and an existing file of that name is replaced in one step or not at all.

#include <cstdint>
#include <string>
#include <vector>

namespace bitattn {

class OutputFile {
 public:
  /// What the file is called until commit. `named`: a hidden name, as where the file system has no nameless
  /// files.
  enum class Until : std::uint8_t { nameless, named };

  /// Opens a nameless file in the folder of `path` (O_TMPFILE; a hidden temporary name where the file system
  /// has none). Throws InputError if the folder is missing or unwritable, `path` is not a regular file, or is
  /// one of `inputs` (capture names, compared by device and inode).
  explicit OutputFile(const std::string& path, const std::vector<std::string>& inputs = {},
                      Until until = Until::nameless);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  /// Open for reading and writing, empty; stays owned here.
  int descriptor() const { return descriptor_; }
  /// The name it will bear, as the user gave it.
  const std::string& path() const { return path_; }

  /// Flushes to the disk and gives the file its name. Throws InputError where that fails; the file is then
  /// gone.
  void commit();

 private:
  void open_nameless();
  void open_named();
  void give_name();
  std::string link_source() const;
  [[noreturn]] void fail(const std::string& what, int reason) const;

  std::string path_;    // as given
  std::string target_;  // with symbolic links resolved
  std::string folder_;
  std::string temporary_;  // "" while the file is nameless
  int descriptor_ = -1;
  int slot_ = -1;
  bool committed_ = false;
};

/// A text file written as a whole. Throws InputError.
void write_text_file(const std::string& path, const std::string& text,
                     const std::vector<std::string>& inputs = {});

}  // namespace bitattn
