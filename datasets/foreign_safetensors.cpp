// .safetensors: 8 bytes with the length of a JSON header, little-endian; the header; the tensors' bytes.

#include <nlohmann/json.hpp>

#include "datasets/error.hpp"
#include "datasets/foreign.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn {
namespace {

using Json = nlohmann::json;

std::string type_of(const std::string& dtype) {
  static const std::map<std::string, std::string> kNames{
      {"BF16", "bf16"}, {"F16", "fp16"}, {"F32", "fp32"}, {"F64", "fp64"}, {"U8", "u8"},   {"I8", "i8"},
      {"U16", "u16"},   {"I16", "i16"},  {"U32", "u32"},  {"I32", "i32"},  {"U64", "u64"}, {"I64", "i64"}};
  const auto found = kNames.find(dtype);
  return found == kNames.end() ? dtype : found->second;
}

/// A number of JSON that is a size; throws Json::exception or returns one that fits.
std::size_t size_of(const Json& number) {
  return number.is_number_unsigned() ? number.get<std::size_t>() : throw InputError("");
}

}  // namespace

ForeignFile read_safetensors(const std::string& path) {
  const std::vector<std::uint8_t> content = read_whole_file(path);
  const auto fail = [&path](const std::string& what) { throw InputError(path + ": " + what); };
  constexpr std::size_t kPrefix = 8;
  std::uint64_t length = 0;
  if (content.size() < kPrefix) fail("is no .safetensors file: shorter than 8 bytes");
  for (std::size_t i = kPrefix; i-- > 0;) length = length << 8U | content[i];
  if (length > content.size() - kPrefix)
    fail("is no .safetensors file: its header would be longer than the file");
  const auto begin = content.begin() + kPrefix;
  const Json header = Json::parse(begin, begin + static_cast<std::ptrdiff_t>(length), nullptr, false);
  if (!header.is_object()) fail("is no .safetensors file: its header is no JSON object");
  const std::size_t data = kPrefix + length;
  ForeignFile file;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      for (const auto& [key, value] : entry.items()) {
        if (value.is_string()) file.attributes[key] = value.get<std::string>();
      }
      continue;
    }
    ForeignTensor tensor;
    std::size_t first = 0;
    std::size_t last = 0;
    try {
      tensor.type = type_of(entry.at("dtype").get<std::string>());
      for (const Json& dimension : entry.at("shape")) tensor.shape.push_back(size_of(dimension));
      first = size_of(entry.at("data_offsets").at(0));
      last = size_of(entry.at("data_offsets").at(1));
    } catch (const std::exception&) {
      fail("tensor " + printable(name) + " is not described as .safetensors describes tensors");
    }
    if (first > last || last > content.size() - data)
      fail("tensor " + printable(name) + " lies outside the file");
    const std::size_t size = foreign_element_size(tensor.type);
    const std::size_t elements = checked_elements(tensor.shape, path + ": tensor " + printable(name));
    if (size != 0 && (last - first) / size != elements) {
      fail("tensor " + printable(name) + " has " + std::to_string(last - first) + " bytes, expected " +
           shape_text(tensor.shape) + " of " + std::to_string(size));
    }
    const auto from = content.begin() + static_cast<std::ptrdiff_t>(data + first);
    tensor.bytes.assign(from, from + static_cast<std::ptrdiff_t>(last - first));
    file.tensors.emplace(name, std::move(tensor));
  }
  return file;
}

}  // namespace bitattn
