#include "gpu/common/device.hpp"

#include <cstdio>

#include "gpu/common/no_gpu.hpp"

namespace bitattn::gpu {

namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char byte[4];
    std::snprintf(byte, sizeof byte, "%02x",
                  static_cast<unsigned>(static_cast<unsigned char>(uuid.bytes[i])));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += "-";
    text += byte;
  }
  return text;
}

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(std::string(what) + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")");
}

std::string Device::text() const {
  return name + " (sm_" + std::to_string(major) + std::to_string(minor) + ", " +
         std::to_string(multiprocessors) + " multiprocessors, " + bytes_text(memory) + "), driver for CUDA " +
         version_text(driver) + ", built with CUDA " + version_text(runtime);
}

Device select_device() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    throw Error(no_gpu_text(status));
  }
  check(cudaSetDevice(0), "selecting the GPU");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "reading the GPU's properties");
  Device device;
  device.name = properties.name;
  device.major = properties.major;
  device.minor = properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  device.memory = properties.totalGlobalMem;
  device.uuid = uuid_text(properties.uuid);
  check(cudaDriverGetVersion(&device.driver), "reading the driver's version");
  check(cudaRuntimeGetVersion(&device.runtime), "reading the runtime's version");
  if (device.major < 8) {
    throw Error(device.name + " is sm_" + std::to_string(device.major) + std::to_string(device.minor) +
                ", this program's GPU code needs sm_80 or later");
  }
  return device;
}

std::size_t free_memory() {
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "reading the GPU's free memory");
  return free;
}

std::string bytes_text(std::size_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text;
}

}  // namespace bitattn::gpu
