#include "datasets/hdf5_support.hpp"

#include <mutex>

#include "datasets/shape_text.hpp"

namespace bitattn::hdf5 {

namespace {

std::mutex& library_mutex() {
  static std::mutex mutex;
  return mutex;
}
thread_local int lock_depth = 0;

}  // namespace

LibraryLock::LibraryLock() {
  if (lock_depth++ == 0) library_mutex().lock();
}

LibraryLock::~LibraryLock() {
  if (--lock_depth == 0) library_mutex().unlock();
}

QuietErrors::QuietErrors() {
  H5Eget_auto2(H5E_DEFAULT, &function_, &data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

QuietErrors::~QuietErrors() {
  H5Eset_auto2(H5E_DEFAULT, function_, data_);
}

namespace {

herr_t take_description(unsigned /*n*/, const H5E_error2_t* error, void* text) {
  if (error->desc != nullptr) *static_cast<std::string*>(text) = error->desc;
  return 0;
}

}  // namespace

std::string last_error() {
  std::string text;
  // Downward goes from our call to the innermost one, so the last entry kept is the cause.
  if (H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, take_description, &text) < 0 || text.empty()) return "";
  return " (" + printable(text) + ")";
}

Handle make_bf16_type() {
  Handle type(H5Tcopy(H5T_IEEE_F32LE), H5Tclose);
  // Fields first: the size can only shrink once they lie within the 16 bits.
  H5Tset_fields(type.get(), 15, 7, 8, 0, 7);
  H5Tset_precision(type.get(), 16);
  H5Tset_size(type.get(), 2);
  H5Tset_ebias(type.get(), 127);
  H5Tset_norm(type.get(), H5T_NORM_IMPLIED);
  return type;
}

bool is_bf16_type(hid_t type) {
  if (H5Tget_class(type) != H5T_FLOAT || H5Tget_size(type) != 2 || H5Tget_order(type) != H5T_ORDER_LE)
    return false;
  if (H5Tget_precision(type) != 16 || H5Tget_offset(type) != 0) return false;
  std::size_t sign = 0;
  std::size_t exponent = 0;
  std::size_t exponent_bits = 0;
  std::size_t mantissa = 0;
  std::size_t mantissa_bits = 0;
  if (H5Tget_fields(type, &sign, &exponent, &exponent_bits, &mantissa, &mantissa_bits) < 0) return false;
  return sign == 15 && exponent == 7 && exponent_bits == 8 && mantissa == 0 && mantissa_bits == 7 &&
         H5Tget_ebias(type) == 127 && H5Tget_norm(type) == H5T_NORM_IMPLIED;
}

namespace {

std::string order_text(hid_t type) {
  switch (H5Tget_order(type)) {
    case H5T_ORDER_LE:
      return "little-endian ";
    case H5T_ORDER_BE:
      return "big-endian ";
    default:
      return "";
  }
}

std::string describe_float(hid_t type) {
  const std::size_t bits = H5Tget_size(type) * 8;
  for (const auto& [standard, name] :
       {std::pair{H5T_IEEE_F32LE, "float32"}, std::pair{H5T_IEEE_F64LE, "float64"},
        std::pair{H5T_IEEE_F32BE, "big-endian float32"}, std::pair{H5T_IEEE_F64BE, "big-endian float64"}}) {
    if (H5Tequal(type, standard) > 0) return name;
  }
  std::size_t sign = 0;
  std::size_t exponent = 0;
  std::size_t exponent_bits = 0;
  std::size_t mantissa = 0;
  std::size_t mantissa_bits = 0;
  if (H5Tget_fields(type, &sign, &exponent, &exponent_bits, &mantissa, &mantissa_bits) < 0)
    return "a float type";
  const std::size_t bias = H5Tget_ebias(type);
  if (bits == 16 && sign == 15 && exponent == 10 && exponent_bits == 5 && mantissa_bits == 10 && bias == 15) {
    return order_text(type) + "float16 (IEEE half)";
  }
  return std::to_string(bits) + "-bit " + order_text(type) + "float (sign bit " + std::to_string(sign) +
         ", exponent " + std::to_string(exponent_bits) + " bits at " + std::to_string(exponent) +
         " with bias " + std::to_string(bias) + ", mantissa " + std::to_string(mantissa_bits) + " bits at " +
         std::to_string(mantissa) +
         (H5Tget_norm(type) == H5T_NORM_IMPLIED ? ")" : ", no implied leading bit)");
}

}  // namespace

std::string describe_type(hid_t type) {
  const std::string bits = std::to_string(H5Tget_size(type) * 8) + "-bit ";
  switch (H5Tget_class(type)) {
    case H5T_FLOAT:
      return describe_float(type);
    case H5T_INTEGER:
      return bits + order_text(type) + (H5Tget_sign(type) == H5T_SGN_NONE ? "unsigned integer" : "integer");
    case H5T_ENUM:
      return bits + "enumeration";
    case H5T_STRING:
      return "string";
    case H5T_BITFIELD:
      return bits + "bit field";
    case H5T_OPAQUE:
      return bits + "opaque type";
    case H5T_COMPOUND:
      return bits + "compound type";
    case H5T_REFERENCE:
      return "reference";
    case H5T_VLEN:
      return "variable-length sequence";
    case H5T_ARRAY:
      return bits + "array type";
    default:
      return "an unknown type";
  }
}

bool read_shape(hid_t space, std::vector<std::size_t>& shape) {
  const H5S_class_t kind = H5Sget_simple_extent_type(space);
  if (kind != H5S_SCALAR && kind != H5S_SIMPLE) return false;
  const int rank = H5Sget_simple_extent_ndims(space);
  if (rank < 0) return false;
  std::vector<hsize_t> dims(static_cast<std::size_t>(rank));
  if (rank > 0 && H5Sget_simple_extent_dims(space, dims.data(), nullptr) < 0) return false;
  shape.assign(dims.begin(), dims.end());
  return true;
}

}  // namespace bitattn::hdf5
