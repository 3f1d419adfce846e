#include "python/words.hpp"

#include <memory>
#include <vector>

#include "datasets/error.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn::python {

namespace py = pybind11;

namespace {

// DLPack 0.x as every library hands it out when no version is asked for: the layout is the interface.
struct DlDevice {
  std::int32_t type, id;
};
struct DlType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t ndim;
  DlType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  ///< in elements; null: row-major
  std::uint64_t byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};
constexpr std::uint8_t kDlFloat = 2;
constexpr std::uint8_t kDlBfloat = 4;
constexpr std::int32_t kDlCpu = 1;
constexpr std::int32_t kDlCudaHost = 3;

/// What an exported tensor holds until its taker gives it back.
struct Export {
  DlManagedTensor managed{};
  std::vector<std::int64_t> shape;
  py::object owner;
};

std::string type_name(const py::handle& object) {
  return py::str(py::type::handle_of(object).attr("__name__")).cast<std::string>();
}

[[noreturn]] void refuse(const std::string& tensor, const std::string& found, const std::string& expected) {
  throw InputError("tensor " + tensor + " is " + found + ", expected " + expected);
}

/// "float32" for what DLPack calls code 2 and 32 bits.
std::string type_text(DlType type) {
  static const char* const kNames[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string name =
      type.code < std::size(kNames) ? kNames[type.code] : "type " + std::to_string(type.code) + " of ";
  return name + std::to_string(type.bits);
}

/// What `call` gives; Python's own refusal (a tensor without memory, say) as ours.
template <class Call>
auto dlpack_call(const std::string& tensor, const py::handle& object, Call call) {
  try {
    return call();
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    const std::string reason = py::str(error.value()).cast<std::string>();
    throw InputError("tensor " + tensor + " (" + type_name(object) +
                     ") gives nothing through DLPack: " + printable(reason));
  }
}

void release(DlManagedTensor* managed) {
  if (managed->deleter != nullptr) managed->deleter(managed);
}

/// A DLPack tensor on the host as an array over its memory. uint16 for BF16, float32 for float32.
py::array from_dlpack(const py::handle& object, const std::string& tensor, DlType expected,
                      const char* expected_text) {
  py::object source = py::reinterpret_borrow<py::object>(object);
  // torch does not hand out tensors that autograd follows.
  if (py::hasattr(source, "requires_grad") && source.attr("requires_grad").cast<bool>())
    source = source.attr("detach")();
  // Asked before the tensor is taken, so that one on a GPU is refused before anything waits for it.
  const py::tuple device =
      dlpack_call(tensor, source, [&] { return py::tuple(source.attr("__dlpack_device__")()); });
  const int where = py::int_(device[0]).cast<int>();
  if (where != kDlCpu && where != kDlCudaHost)
    refuse(tensor, "on a device (" + type_name(object) + ")", "on the host: call .cpu()");
  const py::capsule capsule =
      dlpack_call(tensor, source, [&] { return py::capsule(source.attr("__dlpack__")()); });
  auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  // An owner from the start: whatever is thrown below, the tensor is given back.
  const py::capsule owner(managed, [](void* p) { release(static_cast<DlManagedTensor*>(p)); });
  const DlTensor& view = managed->tensor;
  if (view.dtype.code != expected.code || view.dtype.bits != expected.bits || view.dtype.lanes != 1) {
    refuse(tensor, "a " + type_name(object) + " of " + type_text(view.dtype), expected_text);
  }
  const auto item = static_cast<py::ssize_t>(expected.bits / 8);
  std::vector<py::ssize_t> shape(view.shape, view.shape + view.ndim);
  std::vector<py::ssize_t> strides(shape.size());
  py::ssize_t dense = item;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = view.strides != nullptr ? static_cast<py::ssize_t>(view.strides[axis]) * item : dense;
    dense *= shape[axis];
  }
  void* data = static_cast<char*>(view.data) + view.byte_offset;
  const py::dtype type = item == 2 ? py::dtype::of<std::uint16_t>() : py::dtype::of<float>();
  return py::array(type, shape, strides, data, owner);
}

std::string dtype_name(const py::array& array) {
  return py::str(array.dtype().attr("name")).cast<std::string>();
}

template <class T>
Tensor<T> dense_copy(const py::array& view) {
  // Converts nothing but strides: the element type is known to fit. Python's own error where there is no
  // memory.
  const py::array_t<T, py::array::c_style | py::array::forcecast> dense(
      py::reinterpret_borrow<py::object>(view));
  Tensor<T> tensor;
  tensor.shape.assign(dense.shape(), dense.shape() + dense.ndim());
  tensor.data.assign(dense.data(), dense.data() + dense.size());
  return tensor;
}

template <class T>
py::object read_only(const Tensor<T>& tensor, const py::handle& owner) {
  if (tensor.empty()) return py::none();
  py::array array(py::dtype::of<T>(), std::vector<py::ssize_t>(tensor.shape.begin(), tensor.shape.end()),
                  tensor.data.data(), owner);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

}  // namespace

py::array words_view(const py::handle& object, const std::string& tensor) {
  static const char* const kExpected = "BF16: uint16 words, ml_dtypes.bfloat16, or a bfloat16 tensor";
  if (py::isinstance<py::array>(object)) {
    auto array = py::reinterpret_borrow<py::array>(object);
    const std::string name = dtype_name(array);
    // NumPy turns the bytes of its own types as they are copied, and not those of ml_dtypes.
    if (name == "bfloat16" && !array.dtype().attr("isnative").cast<bool>())
      refuse(tensor, "big-endian bfloat16", "the machine's byte order");
    if (name == "uint16") return array;
    if (name == "bfloat16") return array.attr("view")(py::dtype::of<std::uint16_t>());
    refuse(tensor, "an array of " + name, kExpected);
  }
  if (py::hasattr(object, "__dlpack__")) return from_dlpack(object, tensor, {kDlBfloat, 16, 1}, kExpected);
  refuse(tensor, type_name(object), kExpected);
}

Bf16Tensor bf16_tensor(const py::handle& object, const std::string& tensor) {
  return dense_copy<std::uint16_t>(words_view(object, tensor));
}

Fp32Tensor fp32_tensor(const py::handle& object, const std::string& tensor) {
  if (py::isinstance<py::array>(object)) {
    const auto array = py::reinterpret_borrow<py::array>(object);
    if (dtype_name(array) != "float32") refuse(tensor, "an array of " + dtype_name(array), "float32");
    return dense_copy<float>(array);
  }
  if (py::hasattr(object, "__dlpack__"))
    return dense_copy<float>(from_dlpack(object, tensor, {kDlFloat, 32, 1}, "float32"));
  refuse(tensor, type_name(object), "a float32 array");
}

py::capsule dlpack_of(const Bf16Tensor& tensor, const py::handle& owner) {
  auto kept = std::make_unique<Export>();
  kept->shape.assign(tensor.shape.begin(), tensor.shape.end());
  kept->owner = py::reinterpret_borrow<py::object>(owner);
  DlTensor& view = kept->managed.tensor;
  // The interface has no const.
  view.data = const_cast<std::uint16_t*>(tensor.data.data());
  view.device = {kDlCpu, 0};
  view.ndim = static_cast<std::int32_t>(kept->shape.size());
  view.dtype = {kDlBfloat, 16, 1};
  view.shape = kept->shape.data();
  kept->managed.context = kept.get();
  kept->managed.deleter = [](DlManagedTensor* managed) {
    const py::gil_scoped_acquire gil;  // whoever took it may be on any thread
    delete static_cast<Export*>(managed->context);
  };
  // A capsule that nobody took gives back what it holds; a taken one has another name.
  PyObject* capsule = PyCapsule_New(&kept->managed, "dltensor", [](PyObject* object) {
    if (PyCapsule_IsValid(object, "dltensor") != 0)
      release(static_cast<DlManagedTensor*>(PyCapsule_GetPointer(object, "dltensor")));
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(kept.release());  // the capsule's from here on
  return py::reinterpret_steal<py::capsule>(capsule);
}

py::object array_of(const Bf16Tensor& tensor, const py::handle& owner) {
  return read_only(tensor, owner);
}
py::object array_of(const Fp32Tensor& tensor, const py::handle& owner) {
  return read_only(tensor, owner);
}
py::object array_of(const Fp64Tensor& tensor, const py::handle& owner) {
  return read_only(tensor, owner);
}

}  // namespace bitattn::python
