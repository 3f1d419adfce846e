// Names of captures: "FILE.h5" or "FILE.h5:/group/inside".

#include <sys/stat.h>

#include "datasets/capture_file.hpp"

namespace bitattn {
namespace {

bool exists(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

// "/a//b/" and "/a/b" are one group to HDF5, so they are one name here.
std::string tidy_group(const std::string& group) {
  std::string tidy;
  for (const char c : group) {
    if (c == '/' && !tidy.empty() && tidy.back() == '/') continue;
    tidy.push_back(c);
  }
  while (tidy.size() > 1 && tidy.back() == '/') tidy.pop_back();
  return tidy;
}

}  // namespace

CaptureName parse_capture_name(const std::string& name) {
  // A file's own name may hold ":/", so what exists as a file decides first.
  if (exists(name)) return {name, ""};
  for (std::size_t at = name.find(":/"); at != std::string::npos; at = name.find(":/", at + 1)) {
    if (exists(name.substr(0, at))) return {name.substr(0, at), tidy_group(name.substr(at + 1))};
  }
  const std::size_t at = name.find(":/");
  if (at == std::string::npos) return {name, ""};
  return {name.substr(0, at), tidy_group(name.substr(at + 1))};
}

}  // namespace bitattn
