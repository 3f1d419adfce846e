// HDF5 of other layouts: every data set of numbers, by its path; the groups' attributes.

#include <cstring>

#include "datasets/attribute_reader.hpp"
#include "datasets/capture_reader.hpp"
#include "datasets/error.hpp"
#include "datasets/foreign.hpp"
#include "datasets/hdf5_support.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn {
namespace {

using hdf5::Handle;
using hdf5::last_error;

struct Found {
  std::vector<std::string> groups, datasets;
};

herr_t take(hid_t /*object*/, const char* name, const H5O_info_t* info, void* found) {
  auto& list = *static_cast<Found*>(found);
  if (info->type == H5O_TYPE_GROUP) list.groups.emplace_back(std::strcmp(name, ".") == 0 ? "/" : name);
  if (info->type == H5O_TYPE_DATASET) list.datasets.emplace_back(name);
  return 0;
}

std::string type_of(hid_t type) {
  if (hdf5::is_bf16_type(type)) return "bf16";
  struct Known {
    hid_t type;
    const char* name;
  };
  for (const Known& known : {Known{H5T_IEEE_F32LE, "fp32"},
                             {H5T_IEEE_F64LE, "fp64"},
                             {H5T_STD_U8LE, "u8"},
                             {H5T_STD_I8LE, "i8"},
                             {H5T_STD_U16LE, "u16"},
                             {H5T_STD_I16LE, "i16"},
                             {H5T_STD_U32LE, "u32"},
                             {H5T_STD_I32LE, "i32"},
                             {H5T_STD_U64LE, "u64"},
                             {H5T_STD_I64LE, "i64"}}) {
    if (H5Tequal(type, known.type) > 0) return known.name;
  }
  const std::string text = hdf5::describe_type(type);
  return text.find("half") != std::string::npos && H5Tget_order(type) == H5T_ORDER_LE ? "fp16" : text;
}

}  // namespace

ForeignFile read_plain_hdf5(const std::string& path,
                            const std::function<void(std::size_t bytes)>& before_read) {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  H5Lunregister(H5L_TYPE_EXTERNAL);  // links into other files lead nowhere, as in captures
  const Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  if (!file) throw InputError(path + ": cannot be opened as HDF5" + last_error());
  Found found;
  if (H5Ovisit2(file.get(), H5_INDEX_NAME, H5_ITER_INC, take, &found, H5O_INFO_BASIC) < 0)
    throw InputError(path + ": groups cannot be listed" + last_error());
  ForeignFile content;
  for (const std::string& name : found.groups) {
    const Handle group(H5Gopen2(file.get(), name.c_str(), H5P_DEFAULT), H5Gclose);
    if (!group) throw InputError(path + ": group " + printable(name) + " cannot be opened" + last_error());
    const std::string prefix = name == "/" ? "" : name + "/";
    for (auto& [attribute, value] : hdf5::read_attributes(group.get(), full_name(path, "/" + name)).single)
      content.attributes[prefix + attribute] = value;
  }
  std::size_t total = 0;
  for (const std::string& name : found.datasets) {
    const std::string where = path + ": data set " + printable(name);
    const Handle dataset(H5Dopen2(file.get(), name.c_str(), H5P_DEFAULT), H5Dclose);
    if (!dataset) throw InputError(where + " cannot be opened" + last_error());
    const Handle type(H5Dget_type(dataset.get()), H5Tclose);
    const Handle space(H5Dget_space(dataset.get()), H5Sclose);
    const Handle list(H5Dget_create_plist(dataset.get()), H5Pclose);
    ForeignTensor tensor;
    if (!type || !space || !hdf5::read_shape(space.get(), tensor.shape)) continue;
    tensor.type = type_of(type.get());
    const std::size_t size = foreign_element_size(tensor.type);
    if (size != 0) {
      if (H5Pget_external_count(list.get()) > 0) throw InputError(where + " keeps its data in another file");
      const std::size_t bytes = checked_elements(tensor.shape, where) * size;
      total += bytes;
      if (bytes >= machine_memory() || total >= machine_memory())
        throw InputError(where + " asks for more than this machine's memory");
      before_read(total);
      tensor.bytes.resize(bytes);
      if (bytes > 0 &&
          H5Dread(dataset.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, tensor.bytes.data()) < 0)
        throw InputError(where + " cannot be read" + last_error());
    }
    content.tensors[name] = std::move(tensor);
  }
  return content;
}

}  // namespace bitattn
