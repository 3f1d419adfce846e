#pragma once
// A dense tensor in row-major order that owns its memory.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bitattn {

template <class T>
struct Tensor {
  std::vector<std::size_t> shape;
  std::vector<T> data;

  Tensor() = default;
  explicit Tensor(std::vector<std::size_t> dimensions, T fill = T{}) : shape(std::move(dimensions)) {
    std::size_t n = 1;
    for (const std::size_t d : shape) n *= d;
    data.assign(n, fill);
  }
  /// No tensor at all, as opposed to one with a dimension of 0.
  bool empty() const { return shape.empty(); }
  std::size_t size() const { return data.size(); }
};

using Bf16Tensor = Tensor<std::uint16_t>;  ///< BF16 words
using Fp32Tensor = Tensor<float>;
using Fp64Tensor = Tensor<double>;

}  // namespace bitattn
