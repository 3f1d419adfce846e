#pragma once
// BF16 words out of Python objects, and tensors of ours as NumPy arrays.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "datasets/tensor.hpp"

namespace bitattn::python {

/// An array of BF16 words as Python gave it: uint16 words, ml_dtypes.bfloat16, or anything on the host that
/// speaks DLPack with BF16 elements (a torch tensor), whose memory is looked at and not copied. Throws
/// InputError that names `tensor` for anything else; values of other types are never rounded here.
pybind11::array words_view(const pybind11::handle& object, const std::string& tensor);

/// The same, or float32 elements, into memory of ours, row-major; any strides.
Bf16Tensor bf16_tensor(const pybind11::handle& object, const std::string& tensor);
Fp32Tensor fp32_tensor(const pybind11::handle& object, const std::string& tensor);

/// A read-only array over a tensor's memory, which `owner` keeps alive; None for no tensor. BF16 as uint16
/// words.
pybind11::object array_of(const Bf16Tensor& tensor, const pybind11::handle& owner);
pybind11::object array_of(const Fp32Tensor& tensor, const pybind11::handle& owner);
pybind11::object array_of(const Fp64Tensor& tensor, const pybind11::handle& owner);

/// A tensor for consumers of DLPack that know BF16 (torch.from_dlpack): a capsule over the tensor's memory,
/// which `owner` keeps alive. DLPack has no word for read-only: whoever takes it must not write.
pybind11::capsule dlpack_of(const Bf16Tensor& tensor, const pybind11::handle& owner);

}  // namespace bitattn::python
