#pragma once
// The one error a user can cause: bad usage or bad input. The program ends with its one line and exit code 2.

#include <stdexcept>
#include <string>

namespace bitattn {

/// what() is one clear line: file, tensor, the shape or value found and the one expected.
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace bitattn
