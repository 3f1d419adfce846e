// Captures by name. Files are only ever opened in child processes.

#include "datasets/capture_file.hpp"

#include <sys/stat.h>

#include <map>
#include <mutex>
#include <tuple>

#include "datasets/capture_reader.hpp"
#include "datasets/reading_child.hpp"

namespace bitattn {
namespace {

/// Which bytes of which file, and which group of it.
using Identity = std::tuple<dev_t, ino_t, off_t, std::int64_t, std::int64_t, std::string>;

Identity identity_of(const std::string& path, const std::string& group) {
  struct stat s {};
  ::stat(path.c_str(), &s);
  constexpr std::int64_t kBillion = 1'000'000'000;
  return {s.st_dev,
          s.st_ino,
          s.st_size,
          s.st_mtim.tv_sec * kBillion + s.st_mtim.tv_nsec,
          s.st_ctim.tv_sec * kBillion + s.st_ctim.tv_nsec,
          group};
}

/// Groups of the captures of a file, or the one named, once all of them have been read without fault. What
/// has passed is not read again for this question, as long as device, inode, size and times stay the same.
std::vector<std::string> checked_groups(const std::string& path, const std::string& group) {
  static std::mutex mutex;
  static std::map<Identity, std::vector<std::string>> passed;
  const Identity identity = identity_of(path, group);
  {
    const std::lock_guard lock(mutex);
    if (const auto found = passed.find(identity); found != passed.end()) return found->second;
  }
  std::vector<std::string> groups = check_in_child(path, group, {});
  const std::lock_guard lock(mutex);
  passed[identity] = groups;
  return groups;
}

}  // namespace

void probe_file(const std::string& path) {
  checked_groups(path, "");
}

std::vector<std::string> list_captures(const std::string& name) {
  const auto [file, group] = parse_capture_name(name);
  std::vector<std::string> names;
  for (const std::string& g : checked_groups(file, group)) names.push_back(full_name(file, g));
  return names;
}

std::vector<ListedCapture> list_attributes(const std::string& name) {
  const auto [file, group] = parse_capture_name(name);
  std::vector<ListedCapture> listed;
  for (auto& [g, attributes] : attributes_in_child(file, group, {})) {
    listed.push_back({full_name(file, g), g, std::move(attributes)});
  }
  return listed;
}

Capture read_capture(const std::string& name) {
  const auto [file, group] = parse_capture_name(name);
  return read_in_child(file, group.empty() ? "/" : group, {});
}

}  // namespace bitattn
