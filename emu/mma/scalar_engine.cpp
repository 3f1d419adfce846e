#include "emu/mma/scalar_engine.hpp"

#include <algorithm>

namespace bitattn::mma {

namespace {

constexpr int kStep = 16;

class ScalarEngine final : public Engine {
 public:
  std::string_view name() const override { return "scalar"; }

  void pack(const MatrixView& view, Side side, PackedOperand& out) const override {
    out.side = side;
    out.rows = view.rows;
    out.k = (view.k + kStep - 1) / kStep * kStep;
    out.tame = true;
    out.words.assign(static_cast<std::size_t>(out.rows) * static_cast<std::size_t>(out.k), 0);
    const int rows = std::min(view.rows, view.rows_in_memory);
    const int depth = std::min(view.k, view.k_in_memory);
    for (int r = 0; r < rows; ++r) {
      std::uint16_t* row = out.words.data() + static_cast<std::ptrdiff_t>(r) * out.k;
      const std::uint16_t* source = view.data + r * view.row_stride;
      for (int k = 0; k < depth; ++k) row[k] = source[k * view.k_stride];
    }
  }

  void multiply(const PackedOperand& left, const PackedOperand& right, Start start, float* c,
                std::ptrdiff_t ldc, const arith::TensorCoreRule& rule) const override {
    for (int m = 0; m < left.rows; ++m) {
      const std::uint16_t* a = left.words.data() + static_cast<std::ptrdiff_t>(m) * left.k;
      for (int n = 0; n < right.rows; ++n) {
        const std::uint16_t* b = right.words.data() + static_cast<std::ptrdiff_t>(n) * right.k;
        float& element = c[m * ldc + n];
        std::uint32_t accumulator = start == Start::zero ? 0U : arith::to_bits(element);
        for (int k = 0; k < left.k; k += kStep)
          accumulator = arith::mma_bf16_k16(a + k, b + k, accumulator, rule);
        element = arith::from_bits(accumulator);
      }
    }
  }
};

}  // namespace

const Engine& scalar_engine() {
  static const ScalarEngine engine;
  return engine;
}

}  // namespace bitattn::mma
