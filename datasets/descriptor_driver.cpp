#include "datasets/descriptor_driver.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>

namespace bitattn::hdf5 {
namespace {

struct DriverInfo {
  DescriptorSink* sink;
};

/// The library knows its first member only.
struct DescriptorFile {
  H5FD_t common;
  DescriptorSink* sink;
  haddr_t end_of_allocation;
  haddr_t end_of_file;
};

constexpr haddr_t kLargestAddress = static_cast<haddr_t>(std::numeric_limits<off_t>::max());

DescriptorFile* mine(H5FD_t* file) {
  return reinterpret_cast<DescriptorFile*>(file);
}
const DescriptorFile* mine(const H5FD_t* file) {
  return reinterpret_cast<const DescriptorFile*>(file);
}

extern "C" {

H5FD_t* bitattn_driver_open(const char* /*name*/, unsigned /*flags*/, hid_t access_list,
                            haddr_t /*maxaddr*/) {
  const auto* info = static_cast<const DriverInfo*>(H5Pget_driver_info(access_list));
  if (info == nullptr || info->sink == nullptr) return nullptr;
  auto file = std::make_unique<DescriptorFile>();
  file->sink = info->sink;
  return &file.release()->common;
}

herr_t bitattn_driver_close(H5FD_t* file) {
  delete mine(file);
  return 0;
}

int bitattn_driver_compare(const H5FD_t* a, const H5FD_t* b) {
  const int x = mine(a)->sink->descriptor;
  const int y = mine(b)->sink->descriptor;
  return x < y ? -1 : (x > y ? 1 : 0);
}

herr_t bitattn_driver_query(const H5FD_t* /*file*/, unsigned long* flags) {
  if (flags != nullptr) {
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
             H5FD_FEAT_AGGREGATE_SMALLDATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
  }
  return 0;
}

haddr_t bitattn_driver_get_eoa(const H5FD_t* file, H5FD_mem_t /*type*/) {
  return mine(file)->end_of_allocation;
}

herr_t bitattn_driver_set_eoa(H5FD_t* file, H5FD_mem_t /*type*/, haddr_t address) {
  mine(file)->end_of_allocation = address;
  return 0;
}

haddr_t bitattn_driver_get_eof(const H5FD_t* file, H5FD_mem_t /*type*/) {
  return mine(file)->end_of_file;
}

herr_t bitattn_driver_get_handle(H5FD_t* file, hid_t /*access_list*/, void** handle) {
  *handle = &mine(file)->sink->descriptor;
  return 0;
}

herr_t bitattn_driver_read(H5FD_t* file, H5FD_mem_t /*type*/, hid_t /*transfer*/, haddr_t address,
                           std::size_t size, void* buffer) {
  auto* to = static_cast<char*>(buffer);
  while (size > 0) {
    const ssize_t n = ::pread(mine(file)->sink->descriptor, to, size, static_cast<off_t>(address));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (n == 0) {  // past the end: zeros, as the library expects of a file that is still growing
      std::memset(to, 0, size);
      return 0;
    }
    to += n;
    address += static_cast<haddr_t>(n);
    size -= static_cast<std::size_t>(n);
  }
  return 0;
}

herr_t bitattn_driver_write(H5FD_t* file, H5FD_mem_t /*type*/, hid_t /*transfer*/, haddr_t address,
                            std::size_t size, const void* buffer) {
  DescriptorFile& f = *mine(file);
  const haddr_t end = address + size;
  const auto* from = static_cast<const char*>(buffer);
  while (size > 0 && !f.sink->discard) {
    const ssize_t n = ::pwrite(f.sink->descriptor, from, size, static_cast<off_t>(address));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      f.sink->fail(n == 0 ? ENOSPC : errno);
      break;
    }
    from += n;
    address += static_cast<haddr_t>(n);
    size -= static_cast<std::size_t>(n);
  }
  f.end_of_file = std::max(f.end_of_file, end);
  return 0;
}

herr_t bitattn_driver_truncate(H5FD_t* file, hid_t /*transfer*/, hbool_t /*closing*/) {
  DescriptorFile& f = *mine(file);
  if (f.end_of_allocation == f.end_of_file) return 0;
  if (!f.sink->discard && ::ftruncate(f.sink->descriptor, static_cast<off_t>(f.end_of_allocation)) != 0) {
    f.sink->fail(errno);
  }
  f.end_of_file = f.end_of_allocation;
  return 0;
}

}  // extern "C"

H5FD_class_t make_class() {
  H5FD_class_t driver{};
#ifdef H5FD_CLASS_VERSION  // 1.14 and later
  driver.version = H5FD_CLASS_VERSION;
  constexpr H5FD_class_value_t kOurs = 513;  // above 511: unregistered drivers
  driver.value = kOurs;
#endif
  driver.name = "bitattn-descriptor";
  driver.maxaddr = kLargestAddress;
  driver.fc_degree = H5F_CLOSE_STRONG;
  driver.fapl_size = sizeof(DriverInfo);
  driver.open = bitattn_driver_open;
  driver.close = bitattn_driver_close;
  driver.cmp = bitattn_driver_compare;
  driver.query = bitattn_driver_query;
  driver.get_eoa = bitattn_driver_get_eoa;
  driver.set_eoa = bitattn_driver_set_eoa;
  driver.get_eof = bitattn_driver_get_eof;
  driver.get_handle = bitattn_driver_get_handle;
  driver.read = bitattn_driver_read;
  driver.write = bitattn_driver_write;
  driver.truncate = bitattn_driver_truncate;
  constexpr H5FD_mem_t kMap[H5FD_MEM_NTYPES] = H5FD_FLMAP_DICHOTOMY;
  std::copy(std::begin(kMap), std::end(kMap), std::begin(driver.fl_map));
  return driver;
}

}  // namespace

bool use_descriptor(hid_t access_list, DescriptorSink* sink) {
  static const H5FD_class_t driver = make_class();
  static const hid_t id = H5FDregister(&driver);
  const DriverInfo info{sink};
  return id >= 0 && H5Pset_driver(access_list, id, &info) >= 0;
}

}  // namespace bitattn::hdf5
