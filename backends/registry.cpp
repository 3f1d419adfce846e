#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "backends/device.hpp"
#include "backends/emulator.hpp"
#include "backends/fp32.hpp"
#ifdef BITATTN_WITH_GPU_EMULATOR
#include "backends/gpu_emulator.hpp"
#endif
#ifdef BITATTN_WITH_GPU_KERNELS
#include "backends/gpu_kernels.hpp"
#endif
#include "backends/recorded.hpp"
#include "backends/reference.hpp"
#include "backends/remedied.hpp"
#include "datasets/error.hpp"
#if defined(BITATTN_WITH_GPU_EMULATOR) || defined(BITATTN_WITH_GPU_KERNELS)
#include "gpu/common/device.hpp"
#endif

namespace bitattn {

const std::vector<BackendInfo>& backends() {
  static const std::vector<BackendInfo> all = with_remedies({
      {"fa3", "FlashAttention-3's BF16 Hopper kernels, emulated to the last bit"},
      {"fp32", "attention in fp32 throughout, max subtracted first, no cast before the last"},
      {"reference[:BITS]", "attention in high precision (MPFR), from the mathematics alone; the truth"},
      {"recorded", "what the capture itself recorded"},
#ifdef BITATTN_WITH_GPU_KERNELS
      {"gpu:fa3",
       "our own kernels for Hopper in FlashAttention-3's operation order, run on this machine's GPU"},
#endif
#ifdef BITATTN_WITH_GPU_EMULATOR
      {"emu-gpu:fa3", "the emulator's own arithmetic, without tensor cores, run on this machine's GPU"},
#endif
  });
  return all;
}

std::unique_ptr<Backend> make_backend(const std::string& name) {
  if (name.find('+') != std::string::npos) return remedied_backend(name);
  if (name == "fa3") return emulator_backend(profile::Profile{});
  if (name == "fp32") return fp32_backend();
#ifdef BITATTN_WITH_GPU_KERNELS
  if (name == "gpu:fa3") return gpu_kernels_backend();
#endif
#ifdef BITATTN_WITH_GPU_EMULATOR
  if (name == "emu-gpu:fa3") return gpu_emulator_backend(profile::Profile{});
#endif
  if (name == "recorded") return recorded_backend();
  if (name == "reference" || name.starts_with("reference:")) return reference_backend(name);
  throw InputError("no backend is called '" + name +
                   "'; bitattn backends lists fa3, fp32, reference and the others");
}

std::string device_of(const std::string& backend) {
#if defined(BITATTN_WITH_GPU_EMULATOR) || defined(BITATTN_WITH_GPU_KERNELS)
  if (backend.starts_with("gpu:") || backend.starts_with("emu-gpu:")) {
    try {
      return gpu::select_device().name;
    } catch (const gpu::Error& error) {
      throw InputError(backend + ": " + error.what());
    }
  }
#endif
  static_cast<void>(backend);
  return "CPU";
}

}  // namespace bitattn
