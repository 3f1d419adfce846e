#pragma once
// From arguments to captures: files, FILE.h5:/group, folders; and output files that must not be an input.

#include <functional>
#include <string>
#include <vector>

#include "datasets/capture_file.hpp"

namespace bitattn::cli {

/// The arguments with every folder replaced by the HDF5 files in it and below (*.h5, *.hdf5), sorted. Throws
/// InputError for a folder without any.
std::vector<std::string> expand_folders(const std::vector<std::string>& arguments);

/// Are two paths one file, or would they be?
bool same_file(const std::string& a, const std::string& b);

/// Throws InputError if the output file is one of these inputs.
void check_output(const std::string& output, const std::vector<std::string>& inputs);

/// The group that the capture `name` gets in the output OUT.h5 or OUT.h5:/group: its own group, below the
/// output's if it names one, and below the file's stem where the output gathers several files.
std::string output_group(const std::string& output, const std::string& name, bool several_files);

/// What is said on standard error of captures that cannot be used: a line a file, however many of its
/// captures are damaged. Told in the order of the captures.
class DamagedCaptures {
 public:
  /// The line of an earlier file is written once another one's comes.
  void add(const std::string& capture, const std::string& error);
  /// Writes the line that is left.
  void finish();

 private:
  std::string file_, error_;
  std::size_t others_ = 0;
};

/// Names of every capture of the arguments, in their order. With several arguments and `go_on`, one that
/// cannot be used is reported on standard error and counted in `failed`; else it throws InputError.
std::vector<std::string> list_all_captures(const std::vector<std::string>& arguments, bool go_on,
                                           std::size_t& failed);

/// Reads every capture of the arguments, one after the other, and calls `work`. With several files and
/// `go_on`, a file that cannot be used is reported on standard error and the others are worked through.
/// Returns how many files failed.
std::size_t for_each_capture(const std::vector<std::string>& arguments, bool go_on,
                             const std::function<void(const Capture&)>& work);

}  // namespace bitattn::cli
