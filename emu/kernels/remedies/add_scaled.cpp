#include "emu/kernels/remedies/add_scaled.hpp"

namespace bitattn::kernels::remedies {

void add_scaled(const ScalarOps& ops, float factor, const float* x, float* sum, int n) {
  for (int j = 0; j < n; ++j) sum[j] = ops.fma(factor, x[j], sum[j]);
}

}  // namespace bitattn::kernels::remedies
