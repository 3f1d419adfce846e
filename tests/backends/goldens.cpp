#include "tests/backends/goldens.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "datasets/capture_file.hpp"

namespace bitattn::test {

namespace {

namespace fs = std::filesystem;

std::vector<std::string> captures_in(const fs::path& folder) {
  std::vector<std::string> paths;
  if (!fs::is_directory(folder)) return paths;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".h5") paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

template <class T>
void compare(const char* name, const Tensor<T>& recorded, const Tensor<T>& emulated, Difference& difference) {
  if (recorded.empty() || emulated.empty()) return;
  if (!difference.text.empty()) difference.text += ", ";
  difference.text += name;
  if (recorded.shape != emulated.shape) {
    difference.differing += recorded.size();
    difference.text += " has another shape";
    return;
  }
  std::size_t differing = 0;
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    if constexpr (sizeof(T) == 4) {
      std::uint32_t word = 0;
      std::memcpy(&word, &emulated.data[i], sizeof word);
      if (word == 0xffffffffU) continue;
    }
    ++difference.compared;
    if (std::memcmp(&recorded.data[i], &emulated.data[i], sizeof(T)) != 0) ++differing;
  }
  difference.differing += differing;
  difference.text += " " + std::to_string(differing) + "/" + std::to_string(recorded.size());
}

}  // namespace

std::vector<std::string> bundled_captures(const std::string& folder) {
  return captures_in(fs::path(BITATTN_BUNDLED_GOLDENS) / folder);
}

std::vector<std::string> large_set_captures(const std::string& folder) {
  const char* root = std::getenv("BITATTN_GOLDENS");
  if (root == nullptr || *root == '\0') return {};
  return captures_in(fs::path(root) / folder);
}

Capture load(const std::string& path) {
  return read_capture(path);
}

Difference difference(const Result& recorded, const Result& emulated) {
  Difference d;
  compare("out", recorded.out, emulated.out, d);
  compare("lse", recorded.lse, emulated.lse, d);
  const Intermediates& r = recorded.intermediates;
  const Intermediates& e = emulated.intermediates;
  compare("dpsum", r.dpsum, e.dpsum, d);
  compare("lse_log2", r.lse_log2, e.lse_log2, d);
  compare("dq_accum", r.dq_accum, e.dq_accum, d);
  compare("dk_accum", r.dk_accum, e.dk_accum, d);
  compare("dv_accum", r.dv_accum, e.dv_accum, d);
  compare("dq", recorded.dq, emulated.dq, d);
  compare("dk", recorded.dk, emulated.dk, d);
  compare("dv", recorded.dv, emulated.dv, d);
  return d;
}

}  // namespace bitattn::test
