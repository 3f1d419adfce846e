// .npy: a magic word, a version, a Python dictionary as text, the array's bytes.

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include "datasets/error.hpp"
#include "datasets/foreign.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn {
namespace {

/// The text after "'key':" in NumPy's header.
std::string_view value_of(std::string_view header, const std::string& key) {
  const std::size_t at = header.find("'" + key + "'");
  if (at == std::string_view::npos) return {};
  std::size_t from = header.find(':', at);
  if (from == std::string_view::npos) return {};
  do ++from;
  while (from < header.size() && header[from] == ' ');
  return header.substr(from);
}

std::string type_of(const std::string& descr) {
  static const std::map<std::string, std::string> kNames{{"<f2", "fp16"},
                                                         {"<f4", "fp32"},
                                                         {"<f8", "fp64"},
                                                         {"|u1", "u8"},
                                                         {"|i1", "i8"},
                                                         {"<u2", "u16"},
                                                         {"<i2", "i16"},
                                                         {"<u4", "u32"},
                                                         {"<i4", "i32"},
                                                         {"<u8", "u64"},
                                                         {"<i8", "i64"},
                                                         // What NumPy makes of an ml_dtypes.bfloat16 array.
                                                         {"<V2", "bf16"},
                                                         {"|V2", "bf16"}};
  const auto found = kNames.find(descr);
  return found == kNames.end() ? descr : found->second;
}

/// Column-major bytes into row-major ones.
std::vector<std::uint8_t> row_major(const std::vector<std::uint8_t>& bytes,
                                    const std::vector<std::size_t>& shape, std::size_t item) {
  std::vector<std::uint8_t> turned(bytes.size());
  std::vector<std::size_t> index(shape.size(), 0);
  for (std::size_t to = 0; to < bytes.size(); to += item) {
    std::size_t from = 0;
    for (std::size_t axis = shape.size(); axis-- > 0;) from = from * shape[axis] + index[axis];
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(from * item), item,
                turned.begin() + static_cast<std::ptrdiff_t>(to));
    for (std::size_t axis = shape.size(); axis-- > 0;) {
      if (++index[axis] < shape[axis]) break;
      index[axis] = 0;
    }
  }
  return turned;
}

}  // namespace

ForeignTensor parse_npy(const std::string& where, const std::vector<std::uint8_t>& content) {
  const auto fail = [&where](const std::string& what) { throw InputError(where + ": " + what); };
  constexpr std::array<std::uint8_t, 6> kMagic{0x93, 'N', 'U', 'M', 'P', 'Y'};
  constexpr std::size_t kVersion = kMagic.size() + 2;
  if (content.size() < kVersion + 4 || !std::equal(kMagic.begin(), kMagic.end(), content.begin()))
    fail("is no .npy file");
  const std::size_t width = content[kMagic.size()] == 1 ? 2 : 4;
  std::size_t length = 0;
  for (std::size_t i = width; i-- > 0;) length = length << 8U | content[kVersion + i];
  const std::size_t data = kVersion + width + length;
  if (length > content.size() || data > content.size()) fail("is no .npy file: its header is cut off");
  const std::string header(content.begin() + static_cast<std::ptrdiff_t>(kVersion + width),
                           content.begin() + static_cast<std::ptrdiff_t>(data));
  ForeignTensor tensor;
  const std::string_view descr = value_of(header, "descr");
  const std::string_view order = value_of(header, "fortran_order");
  std::string_view shape = value_of(header, "shape");
  if (descr.empty() || order.empty() || shape.empty() || shape[0] != '(')
    fail("is no .npy file: its header does not name descr, fortran_order and shape");
  if (descr[0] == '\'') {
    const std::size_t end = descr.find('\'', 1);
    tensor.type = type_of(std::string(descr.substr(1, end == std::string_view::npos ? end : end - 1)));
  } else {
    tensor.type = "records";
  }
  for (shape.remove_prefix(1); !shape.empty() && shape[0] != ')'; shape.remove_prefix(1)) {
    if (shape[0] == ' ' || shape[0] == ',' || shape[0] == 'L') continue;
    std::size_t dimension = 0;
    std::size_t digits = 0;
    for (; digits < shape.size() && shape[digits] >= '0' && shape[digits] <= '9'; ++digits) {
      constexpr std::size_t kMost = std::size_t{1} << 56U;
      dimension = std::min(kMost, dimension * 10 + static_cast<std::size_t>(shape[digits] - '0'));
    }
    if (digits == 0) fail("is no .npy file: its shape cannot be read");
    tensor.shape.push_back(dimension);
    shape.remove_prefix(digits - 1);
  }
  const std::size_t item = foreign_element_size(tensor.type);
  const std::size_t elements = checked_elements(tensor.shape, where);
  if (item != 0 && (content.size() - data) / item < elements) {
    fail("holds " + std::to_string(content.size() - data) + " bytes, expected " + shape_text(tensor.shape) +
         " of " + std::to_string(item));
  }
  if (item == 0) return tensor;
  tensor.bytes.assign(content.begin() + static_cast<std::ptrdiff_t>(data),
                      content.begin() + static_cast<std::ptrdiff_t>(data + elements * item));
  if (order.substr(0, 4) == "True") tensor.bytes = row_major(tensor.bytes, tensor.shape, item);
  return tensor;
}

ForeignFile read_npy(const std::string& path) {
  ForeignFile file;
  file.tensors[std::filesystem::path(path).stem().string()] = parse_npy(path, read_whole_file(path));
  return file;
}

}  // namespace bitattn
