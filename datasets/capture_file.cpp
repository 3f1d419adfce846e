// Captures by name: every read stands behind a probe.

#include "datasets/capture_file.hpp"

#include "datasets/capture_reader.hpp"
#include "datasets/probe.hpp"

namespace bitattn {

void probe_file(const std::string& path) {
  probe_once(path, "");
}

std::vector<std::string> list_captures(const std::string& name) {
  const auto [file, group] = parse_capture_name(name);
  probe_once(file, group);
  if (!group.empty()) {
    expect_capture_group(file, group);
    return {full_name(file, group)};
  }
  std::vector<std::string> names;
  for (const std::string& g : capture_groups(file)) names.push_back(full_name(file, g));
  return names;
}

Capture read_capture(const std::string& name) {
  const auto [file, group] = parse_capture_name(name);
  const std::string inside = group.empty() ? "/" : group;
  probe_once(file, inside);
  return read_capture_group(file, inside, machine_memory(), {});
}

}  // namespace bitattn
