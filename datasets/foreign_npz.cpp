// .npz: a zip archive of .npy files, stored or deflated.

#include <zip.h>

#include <cstring>
#include <memory>
#include <optional>

#include "datasets/capture_reader.hpp"
#include "datasets/error.hpp"
#include "datasets/foreign.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn {

namespace {

/// A number without axes, as np.savez keeps a step or a scale: said beside the tensors.
std::optional<Attribute> scalar_value(const ForeignTensor& tensor) {
  if (!tensor.shape.empty()) return std::nullopt;
  const auto as = [&tensor](auto zero) {
    std::memcpy(&zero, tensor.bytes.data(), sizeof zero);
    return zero;
  };
  if (tensor.type == "i32") return std::int64_t{as(std::int32_t{})};
  if (tensor.type == "i64") return as(std::int64_t{});
  if (tensor.type == "fp32") return static_cast<double>(as(float{}));
  if (tensor.type == "fp64") return as(double{});
  return std::nullopt;
}

}  // namespace

ForeignFile read_npz(const std::string& path) {
  const auto fail = [&path](const std::string& what) { throw InputError(path + ": " + what); };
  int code = 0;
  const std::unique_ptr<zip_t, void (*)(zip_t*)> archive(zip_open(path.c_str(), ZIP_RDONLY, &code),
                                                         [](zip_t* z) { zip_discard(z); });
  if (!archive) {
    zip_error_t error;
    zip_error_init_with_code(&error, code);
    const std::string reason = zip_error_strerror(&error);
    zip_error_fini(&error);
    fail("cannot be opened as .npz: " + reason);
  }
  ForeignFile file;
  std::size_t total = 0;
  const zip_int64_t entries = zip_get_num_entries(archive.get(), 0);
  for (zip_int64_t i = 0; i < entries; ++i) {
    zip_stat_t about;
    const auto index = static_cast<zip_uint64_t>(i);
    if (zip_stat_index(archive.get(), index, 0, &about) != 0 || (about.valid & ZIP_STAT_SIZE) == 0)
      fail("an entry of the archive cannot be read");
    std::string name = about.name;
    if (name.size() < 4 || name.substr(name.size() - 4) != ".npy") continue;
    name.resize(name.size() - 4);
    total += about.size;
    if (about.size >= machine_memory() || total >= machine_memory())
      fail("unpacks to more than this machine's memory");
    std::vector<std::uint8_t> content(about.size);
    const std::unique_ptr<zip_file_t, void (*)(zip_file_t*)> entry(zip_fopen_index(archive.get(), index, 0),
                                                                   [](zip_file_t* f) { zip_fclose(f); });
    std::size_t at = 0;
    while (entry && at < content.size()) {
      const zip_int64_t n = zip_fread(entry.get(), content.data() + at, content.size() - at);
      if (n <= 0) break;
      at += static_cast<std::size_t>(n);
    }
    // One byte more is asked for: the checksum is looked at where the entry ends.
    std::uint8_t more = 0;
    if (!entry || at < content.size() || zip_fread(entry.get(), &more, 1) != 0)
      fail("array " + printable(name) + " is damaged");
    ForeignTensor tensor = parse_npy(path + ": array " + printable(name), content);
    if (const std::optional<Attribute> value = scalar_value(tensor)) {
      file.attributes[name] = *value;
    } else {
      file.tensors[name] = std::move(tensor);
    }
  }
  return file;
}

}  // namespace bitattn
