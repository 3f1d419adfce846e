#pragma once
// HDF5 files as users might make them, right and wrong ones, for the tests of reading.

#include <hdf5.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "datasets/hdf5_support.hpp"

namespace bitattn::test {

/// A folder of its own that goes with the test.
class TemporaryFolder {
 public:
  TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  const std::filesystem::path& path() const { return path_; }
  /// Names of everything in it, hidden files too.
  std::vector<std::string> entries() const;

 private:
  std::filesystem::path path_;
};

/// How a dataset is laid out on disk.
enum class Storage : std::uint8_t { contiguous, compact, chunked, filtered };

class Builder {
 public:
  /// `newest`: in the library's newest format in place of the oldest.
  explicit Builder(const std::string& path, bool newest = false);
  void close() { file_.close(); }
  hid_t file() const { return file_.get(); }

  void group(const std::string& path);
  void dataset(const std::string& path, hid_t type, const std::vector<std::size_t>& shape, const void* data,
               Storage storage = Storage::contiguous);
  void remove(const std::string& path) { H5Ldelete(file_.get(), path.c_str(), H5P_DEFAULT); }
  void integer(const std::string& group, const std::string& name, std::int64_t value,
               hid_t type = H5T_STD_I64LE);
  void unsigned_integer(const std::string& group, const std::string& name, std::uint64_t value);
  void real(const std::string& group, const std::string& name, double value, hid_t type = H5T_IEEE_F64LE);
  void boolean(const std::string& group, const std::string& name, bool value);
  void variable_text(const std::string& group, const std::string& name, const std::string& value);
  void fixed_text(const std::string& group, const std::string& name, const std::string& value,
                  H5T_str_t padding);
  void integers(const std::string& group, const std::string& name, const std::vector<std::int64_t>& values);

  /// A small capture in `group`: BSHD, [1, sq, heads_q, dim] and so on, BF16 words counted up from `first`,
  /// softmax_scale 0.125, and everything recorded.
  struct Shape {
    std::size_t batch = 1, sq = 3, sk = 5, heads_q = 2, heads_kv = 1, dim = 8;
  };
  void capture(const std::string& group, const Shape& shape, std::uint16_t first = 0x3f80,
               Storage storage = Storage::contiguous);
  void bf16(const std::string& path, const std::vector<std::size_t>& shape, std::uint16_t first,
            Storage storage = Storage::contiguous);
  void fp32(const std::string& path, const std::vector<std::size_t>& shape,
            Storage storage = Storage::contiguous);

 private:
  void attribute(const std::string& group, const std::string& name, hid_t type, hid_t space,
                 const void* value);
  hdf5::Handle file_;
};

/// Whole file as bytes.
std::string file_bytes(const std::string& path);
void write_bytes(const std::string& path, const std::string& bytes);

}  // namespace bitattn::test
