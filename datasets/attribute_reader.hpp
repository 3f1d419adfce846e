#pragma once
// Attributes of an HDF5 group: numbers of any width, booleans, strings of any kind, one element or many.

#include <hdf5.h>

#include <map>
#include <string>

#include "datasets/problem.hpp"

namespace bitattn::hdf5 {

struct GroupAttributes {
  Attributes single;                             ///< of one element, whatever its shape
  std::map<std::string, AttributeArray> arrays;  ///< of none or several elements
  std::map<std::string, std::string>
      other;  ///< of types that no attribute here can hold: name, type in words
};

/// All attributes of a group. Unsigned numbers beyond 63 bits come as decimal text. Throws InputError
/// (`where`: names the file and group) for attributes that cannot be read or are absurdly large.
GroupAttributes read_attributes(hid_t group, const std::string& where);

}  // namespace bitattn::hdf5
