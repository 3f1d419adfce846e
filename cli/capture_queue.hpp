#pragma once
// Many captures worked through on all cores, with their results taken in order.

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "datasets/result.hpp"

namespace bitattn::cli {

struct CaptureWork {
  /// Is capture n finished already, so that it need not be read? In order, never two at once.
  std::function<bool(std::size_t n)> skip;
  /// What there is to do. At any time, from any thread, for different n at once.
  std::function<void(std::size_t n, const Capture& capture)> work;
  /// After either, in order, never two at once. `error`: the line of an InputError of reading or of work; ""
  /// where there was none.
  std::function<void(std::size_t n, const std::string& error)> finish;
};

/// Reads the captures one after the other. Small ones are worked on at the same time, as each has too little
/// to do for all cores; a large one alone, so that memory holds only one. `at_once` false: all of them one
/// after the other. Throws what the functions throw, but InputError of `work`; Interrupted too.
void work_through(const std::vector<std::string>& names, bool at_once, const CaptureWork& work);

}  // namespace bitattn::cli
