#include "cli/capture_list.hpp"

#include <algorithm>
#include <filesystem>

#include "cli/output.hpp"
#include "datasets/error.hpp"
#include "datasets/interrupt.hpp"

namespace bitattn::cli {

namespace fs = std::filesystem;

std::vector<std::string> expand_folders(const std::vector<std::string>& arguments) {
  std::vector<std::string> names;
  for (const std::string& argument : arguments) {
    std::error_code error;
    if (!fs::is_directory(argument, error)) {
      names.push_back(argument);
      continue;
    }
    std::vector<std::string> found;
    auto it =
        fs::recursive_directory_iterator(argument, fs::directory_options::skip_permission_denied, error);
    for (const auto end = fs::recursive_directory_iterator(); !error && it != end; it.increment(error)) {
      const std::string extension = it->path().extension().string();
      std::error_code ignored;
      if ((extension == ".h5" || extension == ".hdf5") && it->is_regular_file(ignored)) {
        found.push_back(it->path().string());
      }
    }
    if (error) throw InputError(argument + ": the folder cannot be read: " + error.message());
    if (found.empty()) throw InputError(argument + ": the folder holds no HDF5 files (*.h5, *.hdf5)");
    std::sort(found.begin(), found.end());
    names.insert(names.end(), found.begin(), found.end());
  }
  return names;
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  if (fs::exists(a, error) && fs::exists(b, error)) return fs::equivalent(a, b, error);
  return fs::weakly_canonical(fs::absolute(a, error), error) ==
         fs::weakly_canonical(fs::absolute(b, error), error);
}

void check_output(const std::string& output, const std::vector<std::string>& inputs) {
  const std::string file = parse_capture_name(output).file;
  std::error_code error;
  if (fs::is_directory(file, error)) throw InputError(file + ": is a folder, expected a file to write to");
  for (const std::string& input : inputs) {
    if (same_file(file, parse_capture_name(input).file)) {
      throw InputError(file + ": the output would replace the input");
    }
  }
}

std::string output_group(const std::string& output, const std::string& name, bool several_files) {
  const CaptureName parsed = parse_capture_name(name);
  std::string group = parse_capture_name(output).group;
  if (group == "/") group.clear();
  if (several_files) group += "/" + fs::path(parsed.file).stem().string();
  if (parsed.group != "/") group += parsed.group;
  return group.empty() ? "/" : group;
}

void DamagedCaptures::add(const std::string& capture, const std::string& error) {
  const std::string file = parse_capture_name(capture).file;
  if (!error_.empty() && file == file_) {
    ++others_;
    return;
  }
  finish();
  file_ = file;
  error_ = error;
}

void DamagedCaptures::finish() {
  if (error_.empty()) return;
  warn(error_ + (others_ == 0 ? "" : " (and " + counted(others_, "more capture") + " of this file)"));
  error_.clear();
  others_ = 0;
}

std::vector<std::string> list_all_captures(const std::vector<std::string>& arguments, bool go_on,
                                           std::size_t& failed) {
  std::vector<std::string> names;
  for (const std::string& argument : arguments) {
    throw_if_interrupted();
    try {
      for (ListedCapture& listed : list_attributes(argument)) names.push_back(std::move(listed.name));
    } catch (const InputError& error) {
      if (!go_on || arguments.size() == 1) throw;
      warn(error.what());
      ++failed;
    }
  }
  return names;
}

std::size_t for_each_capture(const std::vector<std::string>& arguments, bool go_on,
                             const std::function<void(const Capture&)>& work) {
  std::size_t failed = 0;
  DamagedCaptures damaged;
  const std::vector<std::string> names = list_all_captures(arguments, go_on, failed);
  for (const std::string& name : names) {
    throw_if_interrupted();
    try {
      work(read_capture(name));
    } catch (const InputError& error) {
      if (!go_on || names.size() == 1) throw;
      damaged.add(name, error.what());
      ++failed;
    }
  }
  damaged.finish();
  return failed;
}

}  // namespace bitattn::cli
