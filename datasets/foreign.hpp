#pragma once
// Tensors as other formats hold them, before they are a capture. One file a format.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "datasets/problem.hpp"

namespace bitattn {

/// A dense row-major tensor of little-endian elements. `type`: "bf16", "fp16", "fp32", "fp64", "u8", "i8",
/// "u16", "i16", "u32", "i32", "u64", "i64", or the format's own word for any other, which nothing can use.
struct ForeignTensor {
  std::string type;
  std::vector<std::size_t> shape;
  std::vector<std::uint8_t> bytes;
};

/// Bytes of an element of that type; 0 for types that nothing can use.
std::size_t foreign_element_size(const std::string& type);

struct ForeignFile {
  /// By name; groups and archives make paths of it, "layers/3/q".
  std::map<std::string, ForeignTensor> tensors;
  /// What the file says beside its tensors; in HDF5 of the groups, by "group/attribute".
  Attributes attributes;
};

/// By the file name's ending: .safetensors, .npz, .npy (one tensor, named as the file), .h5 or .hdf5. Throws
/// InputError with one clear line.
ForeignFile read_foreign(const std::string& path);
/// The tensors of all files, as if they were in one. Throws InputError also where two are of one name.
ForeignFile read_foreign(const std::vector<std::string>& paths);

ForeignFile read_safetensors(const std::string& path);
ForeignFile read_npz(const std::string& path);
ForeignFile read_npy(const std::string& path);

/// In this process; read_foreign has a child do it (reading_child.hpp). `before_read` as in
/// capture_reader.hpp.
ForeignFile read_plain_hdf5(const std::string& path,
                            const std::function<void(std::size_t bytes)>& before_read);

/// A .npy file's content. `where` names it in errors.
ForeignTensor parse_npy(const std::string& where, const std::vector<std::uint8_t>& content);

/// All of a regular file. Throws InputError; also where it is larger than this machine's memory.
std::vector<std::uint8_t> read_whole_file(const std::string& path);

}  // namespace bitattn
