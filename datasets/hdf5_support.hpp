#pragma once
// What reading and writing share of the HDF5 C library: handles that close themselves, errors without
// printing, types.

#include <hdf5.h>

#include <string>
#include <utility>
#include <vector>

namespace bitattn::hdf5 {

/// An HDF5 identifier that is closed when it goes out of scope.
class Handle {
 public:
  using Closer = herr_t (*)(hid_t);
  Handle() = default;
  Handle(hid_t id, Closer closer) : id_(id), closer_(closer) {}
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), closer_(other.closer_) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      close();
      id_ = std::exchange(other.id_, -1);
      closer_ = other.closer_;
    }
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { close(); }

  hid_t get() const { return id_; }
  explicit operator bool() const { return id_ >= 0; }
  /// Closes now; false where the library reports a failure (a full disk shows up here).
  bool close() { return id_ < 0 || closer_(std::exchange(id_, -1)) >= 0; }

 private:
  hid_t id_ = -1;
  Closer closer_ = nullptr;
};

/// Serial HDF5 keeps global state, so everything of ours that calls it holds this lock, the fork of a probe
/// included. May be taken again by its holder, and counts as held in a child that was forked under it: hence
/// no std::recursive_mutex, whose owner is a thread id that the child does not have.
class LibraryLock {
 public:
  LibraryLock();
  LibraryLock(const LibraryLock&) = delete;
  LibraryLock& operator=(const LibraryLock&) = delete;
  ~LibraryLock();
};

/// While it lives, the library prints nothing to standard error.
class QuietErrors {
 public:
  QuietErrors();
  QuietErrors(const QuietErrors&) = delete;
  QuietErrors& operator=(const QuietErrors&) = delete;
  ~QuietErrors();

 private:
  H5E_auto2_t function_ = nullptr;
  void* data_ = nullptr;
};

/// What the library says went wrong in its last failed call, innermost cause, as " (…)"; "" where it says
/// nothing.
std::string last_error();

/// The declared BF16: 2 bytes little-endian, sign bit 15, exponent 8 bits at 7, bias 127, mantissa 7 bits at
/// 0, implied leading bit.
Handle make_bf16_type();
/// True where a file's type is that layout, whatever its padding rules are (16 of 16 bits are in use).
bool is_bf16_type(hid_t type);
/// A file's type in words for an error message: "float16 (IEEE half)", "32-bit little-endian integer", …
std::string describe_type(hid_t type);

/// Dimensions of a dataspace; false where it is no simple one (a scalar counts as simple with no axes).
bool read_shape(hid_t space, std::vector<std::size_t>& shape);

}  // namespace bitattn::hdf5
