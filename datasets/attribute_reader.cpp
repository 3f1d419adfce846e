#include "datasets/attribute_reader.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "datasets/error.hpp"
#include "datasets/hdf5_support.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn::hdf5 {
namespace {

// Far above anything that says where a capture came from, far below what could hurt.
constexpr std::size_t kLargestAttributeBytes = std::size_t{16} << 20U;

herr_t take_name(hid_t /*object*/, const char* name, const H5A_info_t* /*info*/, void* names) {
  static_cast<std::vector<std::string>*>(names)->emplace_back(name);
  return 0;
}

struct OpenAttribute {
  std::string name, where;
  Handle attribute, type, space;
  std::vector<std::size_t> shape;
  std::size_t elements = 0;

  [[noreturn]] void fail(const std::string& what) const {
    throw InputError(where + ": attribute " + printable(name) + " " + what);
  }
};

template <class T>
std::vector<T> read_numbers(const OpenAttribute& a, hid_t memory_type) {
  std::vector<T> values(a.elements);
  if (a.elements > 0 && H5Aread(a.attribute.get(), memory_type, values.data()) < 0) {
    a.fail("cannot be read" + last_error());
  }
  return values;
}

std::string trim_fixed(std::string text, H5T_str_t padding) {
  if (padding == H5T_STR_NULLTERM) text.resize(std::min(text.find('\0'), text.size()));
  const char pad = padding == H5T_STR_SPACEPAD ? ' ' : '\0';
  while (!text.empty() && text.back() == pad) text.pop_back();
  return text;
}

std::vector<std::string> read_fixed_strings(const OpenAttribute& a) {
  const std::size_t size = H5Tget_size(a.type.get());
  if (size == 0 || a.elements > kLargestAttributeBytes / size) a.fail("is larger than 16 MiB");
  std::vector<char> bytes(a.elements * size);
  if (a.elements > 0 && H5Aread(a.attribute.get(), a.type.get(), bytes.data()) < 0) {
    a.fail("cannot be read" + last_error());
  }
  std::vector<std::string> values;
  values.reserve(a.elements);
  for (std::size_t i = 0; i < a.elements; ++i) {
    values.push_back(trim_fixed(std::string(bytes.data() + i * size, size), H5Tget_strpad(a.type.get())));
  }
  return values;
}

std::vector<std::string> read_variable_strings(const OpenAttribute& a) {
  std::vector<char*> pointers(a.elements, nullptr);
  const Handle type(H5Tcopy(a.type.get()), H5Tclose);
  if (a.elements > 0 && H5Aread(a.attribute.get(), type.get(), pointers.data()) < 0) {
    a.fail("cannot be read" + last_error());
  }
  std::vector<std::string> values;
  values.reserve(pointers.size());
  for (const char* p : pointers) values.emplace_back(p == nullptr ? "" : p);
  if (a.elements > 0) H5Dvlen_reclaim(type.get(), a.space.get(), H5P_DEFAULT, pointers.data());
  return values;
}

AttributeArray as_array(const OpenAttribute& a) {
  AttributeArray array;
  array.shape = a.shape;
  switch (H5Tget_class(a.type.get())) {
    case H5T_FLOAT:
      array.values = read_numbers<double>(a, H5T_NATIVE_DOUBLE);
      break;
    case H5T_STRING:
      array.values = H5Tis_variable_str(a.type.get()) > 0 ? read_variable_strings(a) : read_fixed_strings(a);
      break;
    default:
      // Integers of any width and enumerations (booleans); those that int64 cannot hold become text.
      if (H5Tget_class(a.type.get()) == H5T_INTEGER && H5Tget_sign(a.type.get()) == H5T_SGN_NONE) {
        const auto values = read_numbers<std::uint64_t>(a, H5T_NATIVE_UINT64);
        constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
        if (std::any_of(values.begin(), values.end(), [](std::uint64_t v) { return v > kMost; })) {
          std::vector<std::string> texts;
          texts.reserve(values.size());
          for (const std::uint64_t v : values) texts.push_back(std::to_string(v));
          array.values = std::move(texts);
        } else {
          array.values = std::vector<std::int64_t>(values.begin(), values.end());
        }
      } else {
        array.values = read_numbers<std::int64_t>(a, H5T_NATIVE_INT64);
      }
  }
  return array;
}

bool is_supported(hid_t type) {
  switch (H5Tget_class(type)) {
    case H5T_INTEGER:
    case H5T_FLOAT:
    case H5T_STRING:
    case H5T_ENUM:
      return true;
    default:
      return false;
  }
}

}  // namespace

GroupAttributes read_attributes(hid_t group, const std::string& where) {
  std::vector<std::string> names;
  if (H5Aiterate2(group, H5_INDEX_NAME, H5_ITER_INC, nullptr, take_name, &names) < 0) {
    throw InputError(where + ": attributes cannot be listed" + last_error());
  }
  GroupAttributes result;
  for (const std::string& name : names) {
    OpenAttribute a;
    a.name = name;
    a.where = where;
    a.attribute = Handle(H5Aopen(group, name.c_str(), H5P_DEFAULT), H5Aclose);
    if (!a.attribute) a.fail("cannot be opened" + last_error());
    a.type = Handle(H5Aget_type(a.attribute.get()), H5Tclose);
    a.space = Handle(H5Aget_space(a.attribute.get()), H5Sclose);
    if (!a.type || !a.space) a.fail("has no readable type or shape" + last_error());
    if (!is_supported(a.type.get()) || !read_shape(a.space.get(), a.shape)) {
      result.other[name] = describe_type(a.type.get());
      continue;
    }
    a.elements = checked_elements(a.shape, where + ": attribute " + printable(name));
    if (a.elements > kLargestAttributeBytes / 16) a.fail("has shape " + shape_text(a.shape) + ", too large");
    AttributeArray array = as_array(a);
    if (a.elements == 1) {
      std::visit([&](auto& values) { result.single[name] = values.front(); }, array.values);
    } else {
      result.arrays[name] = std::move(array);
    }
  }
  return result;
}

}  // namespace bitattn::hdf5
