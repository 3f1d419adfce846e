#pragma once
// What goes wrong on a GPU, as one clear line; the program ends with it and exit code 2.

#include <stdexcept>

namespace bitattn::gpu {

/// No GPU, too little memory, a chip that cannot run this, or a CUDA call that failed.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace bitattn::gpu
