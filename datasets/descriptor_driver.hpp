#pragma once
// An HDF5 file driver that writes to a file descriptor. The library's own drivers open files by name; ours
// has no name until it is whole (output_file.hpp), and must be closable after the disk is full.

#include <hdf5.h>

namespace bitattn::hdf5 {

/// Where an HDF5 file goes. Must outlive the file.
struct DescriptorSink {
  int descriptor = -1;   ///< open for reading and writing; not closed by the driver
  bool discard = false;  ///< from now on writes succeed without effect
  int error = 0;         ///< errno of the first write that failed; whoever commits the file looks here

  /// A failed write is kept from the library: HDF5 can neither close a file it cannot flush nor end the
  /// program after a dataset whose flush failed.
  void fail(int reason) {
    if (error == 0) error = reason;
    discard = true;
  }
};

/// Makes H5Fcreate with this access list, under any name, use the sink. False where the library refuses.
bool use_descriptor(hid_t access_list, DescriptorSink* sink);

}  // namespace bitattn::hdf5
