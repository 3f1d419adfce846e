#pragma once
// Captures in HDF5 files: reading, listing and writing per docs/captures.md.
//
// The HDF5 library may itself crash on malformed metadata, or spoil its memory. So files are only ever opened
// in child processes: a crash or time-out there becomes an InputError here (reading_child.hpp).

#include <memory>
#include <string>
#include <vector>

#include "datasets/result.hpp"

namespace bitattn {

/// "FILE.h5" or "FILE.h5:/group/inside" taken apart; group is "" where none was named.
struct CaptureName {
  std::string file;
  std::string group;
};
CaptureName parse_capture_name(const std::string& name);

/// Reads all of a file once in a child process. Throws InputError with one clear line.
void probe_file(const std::string& path);

/// Full names ("FILE.h5:/group") of all captures in a file: every group that holds q, k and v. Throws
/// InputError if there are none or the named group is none. A capture at the root is named plainly "FILE.h5".
std::vector<std::string> list_captures(const std::string& name);

/// A capture as a list has it: its full name, its group ("/" for the root), and the group's attributes.
struct ListedCapture {
  std::string name, group;
  Attributes attributes;  ///< of one element each
};
/// All captures of a file, or the one named, in the order of their names. Of tensors only the names are
/// looked at: read_capture checks the rest. Throws InputError as list_captures does.
std::vector<ListedCapture> list_attributes(const std::string& name);

/// Reads one capture, checked in full (types, shapes, attributes), in a child process.
Capture read_capture(const std::string& name);

/// Several captures and findings into one new file that appears under its name on commit(), whole, in one
/// step (output_file.hpp); without commit, or after a crash, nothing is left. Never touches an existing file
/// before. Long writes look at the interrupt flag (interrupt.hpp) and throw Interrupted.
class CaptureWriter {
 public:
  /// Throws InputError if the folder is missing or unwritable, or the path is one of `inputs` (capture
  /// names).
  explicit CaptureWriter(const std::string& path, const std::vector<std::string>& inputs = {});
  CaptureWriter(const CaptureWriter&) = delete;
  CaptureWriter& operator=(const CaptureWriter&) = delete;
  ~CaptureWriter();

  /// Problem and result as one capture in `group` ("/" for the root).
  void write_capture(const std::string& group, const Problem& problem, const Result& result);
  /// One finding under group + "/findings/" + path (path may hold slashes), with units, description and, for
  /// axes named, dimension scales.
  void write_finding(const std::string& group, const std::string& path, const Fp64Tensor& values,
                     const std::string& units, const std::string& description,
                     const std::vector<std::string>& axes);
  void write_finding(const std::string& group, const std::string& path, const Fp32Tensor& values,
                     const std::string& units, const std::string& description,
                     const std::vector<std::string>& axes);
  /// Attributes of a group (made if it is not there yet): what a run, its options or its summary say.
  void write_attributes(const std::string& group, const Attributes& attributes);
  /// One fp32 tensor under group + "/" + path, created with `shape` and filled piece by piece: the block that
  /// begins at `start` and has `count` elements along each axis, row-major. Elements never written read as
  /// NaN of bits 0xffffffff. For traces that must not stand in memory as a whole.
  void create_streamed_fp32(const std::string& group, const std::string& path,
                            const std::vector<std::size_t>& shape, const std::string& units,
                            const std::string& description);
  void write_streamed_fp32(const std::string& group, const std::string& path,
                           const std::vector<std::size_t>& start, const std::vector<std::size_t>& count,
                           const float* values);
  /// Flushes, closes, and renames the temporary file to the path. Throws InputError on a full disk and the
  /// like.
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bitattn
