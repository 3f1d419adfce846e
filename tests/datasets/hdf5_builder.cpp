#include "tests/datasets/hdf5_builder.hpp"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <stdexcept>

namespace bitattn::test {

using hdf5::Handle;

TemporaryFolder::TemporaryFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "bitattn-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> TemporaryFolder::entries() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path_))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

Builder::Builder(const std::string& path, bool newest) {
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  if (newest) H5Pset_libver_bounds(access.get(), H5F_LIBVER_LATEST, H5F_LIBVER_LATEST);
  file_ = Handle(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.get()), H5Fclose);
  if (!file_) throw std::runtime_error("cannot create " + path);
}

void Builder::group(const std::string& path) {
  const Handle parents(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
  H5Pset_create_intermediate_group(parents.get(), 1);
  const Handle group(H5Gcreate2(file_.get(), path.c_str(), parents.get(), H5P_DEFAULT, H5P_DEFAULT),
                     H5Gclose);
}

void Builder::dataset(const std::string& path, hid_t type, const std::vector<std::size_t>& shape,
                      const void* data, Storage storage) {
  const std::vector<hsize_t> dims(shape.begin(), shape.end());
  const Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr), H5Sclose);
  const Handle create(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  if (storage == Storage::compact) H5Pset_layout(create.get(), H5D_COMPACT);
  if (storage == Storage::chunked || storage == Storage::filtered) {
    std::vector<hsize_t> chunk;
    for (const hsize_t d : dims) chunk.push_back(std::max<hsize_t>(1, (d + 1) / 2));
    H5Pset_chunk(create.get(), static_cast<int>(chunk.size()), chunk.data());
  }
  if (storage == Storage::filtered) {
    H5Pset_shuffle(create.get());
    H5Pset_deflate(create.get(), 6);
    H5Pset_fletcher32(create.get());
  }
  const Handle parents(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
  H5Pset_create_intermediate_group(parents.get(), 1);
  const Handle set(
      H5Dcreate2(file_.get(), path.c_str(), type, space.get(), parents.get(), create.get(), H5P_DEFAULT),
      H5Dclose);
  if (!set) throw std::runtime_error("cannot create dataset " + path);
  if (data != nullptr && H5Dwrite(set.get(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) < 0) {
    throw std::runtime_error("cannot write dataset " + path);
  }
}

void Builder::attribute(const std::string& group, const std::string& name, hid_t type, hid_t space,
                        const void* value) {
  const Handle object(H5Oopen(file_.get(), group.c_str(), H5P_DEFAULT), H5Oclose);
  if (H5Aexists(object.get(), name.c_str()) > 0) H5Adelete(object.get(), name.c_str());
  const Handle attribute(H5Acreate2(object.get(), name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT),
                         H5Aclose);
  if (!attribute || H5Awrite(attribute.get(), type, value) < 0)
    throw std::runtime_error("cannot write " + name);
}

void Builder::integer(const std::string& group, const std::string& name, std::int64_t value, hid_t type) {
  const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
  std::int64_t buffer = value;
  H5Tconvert(H5T_NATIVE_INT64, type, 1, &buffer, nullptr, H5P_DEFAULT);
  attribute(group, name, type, space.get(), &buffer);
}

void Builder::unsigned_integer(const std::string& group, const std::string& name, std::uint64_t value) {
  const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
  attribute(group, name, H5T_STD_U64LE, space.get(), &value);
}

void Builder::real(const std::string& group, const std::string& name, double value, hid_t type) {
  const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
  double buffer = value;
  H5Tconvert(H5T_NATIVE_DOUBLE, type, 1, &buffer, nullptr, H5P_DEFAULT);
  attribute(group, name, type, space.get(), &buffer);
}

void Builder::boolean(const std::string& group, const std::string& name, bool value) {
  // As h5py stores a bool.
  const Handle type(H5Tenum_create(H5T_STD_I8LE), H5Tclose);
  const std::int8_t no = 0;
  const std::int8_t yes = 1;
  H5Tenum_insert(type.get(), "FALSE", &no);
  H5Tenum_insert(type.get(), "TRUE", &yes);
  const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
  attribute(group, name, type.get(), space.get(), value ? &yes : &no);
}

void Builder::variable_text(const std::string& group, const std::string& name, const std::string& value) {
  const Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type.get(), H5T_VARIABLE);
  H5Tset_cset(type.get(), H5T_CSET_UTF8);
  const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
  const char* pointer = value.c_str();
  attribute(group, name, type.get(), space.get(), &pointer);
}

void Builder::fixed_text(const std::string& group, const std::string& name, const std::string& value,
                         H5T_str_t padding) {
  const Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
  const std::size_t size = value.size() + 5;
  H5Tset_size(type.get(), size);
  H5Tset_strpad(type.get(), padding);
  const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
  std::string buffer = value;
  buffer.resize(size, padding == H5T_STR_SPACEPAD ? ' ' : '\0');
  attribute(group, name, type.get(), space.get(), buffer.data());
}

void Builder::integers(const std::string& group, const std::string& name,
                       const std::vector<std::int64_t>& values) {
  const hsize_t n = values.size();
  const Handle space(H5Screate_simple(1, &n, nullptr), H5Sclose);
  attribute(group, name, H5T_STD_I64LE, space.get(), values.data());
}

void Builder::bf16(const std::string& path, const std::vector<std::size_t>& shape, std::uint16_t first,
                   Storage storage) {
  const Handle type = hdf5::make_bf16_type();
  std::vector<std::uint16_t> words(
      std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<std::size_t>()));
  std::iota(words.begin(), words.end(), first);
  dataset(path, type.get(), shape, words.data(), storage);
}

void Builder::fp32(const std::string& path, const std::vector<std::size_t>& shape, Storage storage) {
  std::vector<float> values(
      std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<std::size_t>()));
  std::iota(values.begin(), values.end(), 0.25F);
  dataset(path, H5T_IEEE_F32LE, shape, values.data(), storage);
}

void Builder::capture(const std::string& name, const Shape& s, std::uint16_t first, Storage storage) {
  const std::string at = name == "/" ? "/" : name + "/";
  if (name != "/") group(name);
  const std::vector<std::size_t> rows{s.batch, s.sq, s.heads_q, s.dim};
  const std::vector<std::size_t> keys{s.batch, s.sk, s.heads_kv, s.dim};
  std::uint16_t word = first;
  for (const char* tensor : {"q", "dout", "out", "dq"}) bf16(at + tensor, rows, word += 100, storage);
  for (const char* tensor : {"k", "v", "dk", "dv"}) bf16(at + tensor, keys, word += 100, storage);
  fp32(at + "lse", {s.batch, s.heads_q, s.sq}, storage);
  real(name, "softmax_scale", 0.125);
}

std::string file_bytes(const std::string& path) {
  std::string bytes(std::filesystem::file_size(path), '\0');
  std::ifstream in(path, std::ios::binary);
  in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!in) throw std::runtime_error("cannot read " + path);
  return bytes;
}

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace bitattn::test
