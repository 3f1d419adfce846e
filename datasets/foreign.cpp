#include "datasets/foreign.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "datasets/capture_reader.hpp"
#include "datasets/error.hpp"
#include "datasets/interrupt.hpp"
#include "datasets/reading_child.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn {

std::size_t foreign_element_size(const std::string& type) {
  constexpr std::array<std::pair<const char*, std::size_t>, 12> kSizes{{{"bf16", 2},
                                                                        {"fp16", 2},
                                                                        {"fp32", 4},
                                                                        {"fp64", 8},
                                                                        {"u8", 1},
                                                                        {"i8", 1},
                                                                        {"u16", 2},
                                                                        {"i16", 2},
                                                                        {"u32", 4},
                                                                        {"i32", 4},
                                                                        {"u64", 8},
                                                                        {"i64", 8}}};
  for (const auto& [name, size] : kSizes) {
    if (type == name) return size;
  }
  return 0;
}

std::vector<std::uint8_t> read_whole_file(const std::string& path) {
  const auto fail = [&path](const std::string& what) { throw InputError(path + ": " + what); };
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail(std::string("cannot be opened: ") + std::strerror(errno));
  struct Closer {
    int fd;
    ~Closer() { ::close(fd); }
  } const closer{fd};
  struct stat status {};
  if (::fstat(fd, &status) != 0) fail(std::string("cannot be read: ") + std::strerror(errno));
  if (!S_ISREG(status.st_mode)) fail("is not a regular file");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size >= machine_memory()) fail("is larger than this machine's memory");
  std::vector<std::uint8_t> content(size);
  std::size_t at = 0;
  while (at < size) {
    const ssize_t n = ::read(fd, content.data() + at, size - at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(std::string("cannot be read: ") + std::strerror(errno));
    if (n == 0) fail("became shorter while it was read");
    at += static_cast<std::size_t>(n);
  }
  return content;
}

ForeignFile read_foreign(const std::string& path) {
  const std::size_t dot = path.rfind('.');
  const std::string ending = dot == std::string::npos ? "" : path.substr(dot);
  if (ending == ".safetensors") return read_safetensors(path);
  if (ending == ".npz") return read_npz(path);
  if (ending == ".npy") return read_npy(path);
  if (ending == ".h5" || ending == ".hdf5") return read_foreign_in_child(path, {});
  if (ending == ".pt" || ending == ".pth")
    throw InputError(path + ": PyTorch's own format: use python3 -m bitattn.importing");
  throw InputError(path + ": expected a file that ends in .safetensors, .npz, .npy, .h5 or .hdf5");
}

ForeignFile read_foreign(const std::vector<std::string>& paths) {
  ForeignFile all;
  for (const std::string& path : paths) {
    throw_if_interrupted();
    ForeignFile one = read_foreign(path);
    for (auto& [name, tensor] : one.tensors) {
      if (!all.tensors.emplace(name, std::move(tensor)).second)
        throw InputError(path + ": tensor " + printable(name) + " is in another of the files too");
    }
    all.attributes.merge(one.attributes);
  }
  return all;
}

}  // namespace bitattn
