#include "emu/kernels/row_ops.hpp"

#include <array>
#include <cmath>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/mufu.hpp"
#include "emu/arith/reduce_add.hpp"

namespace bitattn::kernels {

namespace {

using profile::Function;

float apply(std::uint32_t (*function)(std::uint32_t), float x) {
  return arith::from_bits(function(arith::to_bits(x)));
}

/// fp64 rounded once to fp32, subnormal results flushed: what a correctly rounded unit with FTZ would give.
float rounded(double x) {
  return arith::ftz::in(arith::canonical(static_cast<float>(x)));
}

}  // namespace

float ScalarOps::add(float a, float b) const {
  return arithmetic_.flush_subnormals ? arith::ftz::add(a, b) : arith::add(a, b);
}

float ScalarOps::sub(float a, float b) const {
  return add(a, arith::from_bits(arith::to_bits(b) ^ arith::kSignBit));
}

float ScalarOps::mul(float a, float b) const {
  return arithmetic_.flush_subnormals ? arith::ftz::mul(a, b) : arith::mul(a, b);
}

float ScalarOps::fma(float a, float b, float c) const {
  return arithmetic_.flush_subnormals ? arith::ftz::fma(a, b, c) : arith::fma(a, b, c);
}

float ScalarOps::max(float a, float b) const {
  if (arithmetic_.flush_subnormals) return arith::ftz::max(a, b);
  if (std::isnan(a)) return arith::canonical(b);
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

float ScalarOps::ex2(float x) const {
  if (arithmetic_.ex2 == Function::special_function_unit) return apply(arith::mufu::ex2, x);
  return rounded(std::exp2(static_cast<double>(arith::ftz::in(x))));
}

float ScalarOps::lg2(float x) const {
  if (arithmetic_.lg2 == Function::special_function_unit) return apply(arith::mufu::lg2, x);
  return rounded(std::log2(static_cast<double>(arith::ftz::in(x))));
}

float ScalarOps::rcp(float x) const {
  if (arithmetic_.rcp == Function::special_function_unit) return apply(arith::mufu::rcp, x);
  return rounded(1.0 / static_cast<double>(arith::ftz::in(x)));
}

float ScalarOps::tanh(float x) const {
  return apply(arith::mufu::tanh, x);
}

void RowOps::softcap(float* x, int n, float softcap_scale) const {
  for (int j = 0; j < n; ++j) x[j] = ops.tanh(ops.mul(x[j], softcap_scale));
}

void RowOps::softcap_with_derivative(float* x, float* h, int n, float softcap_scale) const {
  for (int j = 0; j < n; ++j) {
    const float t = ops.tanh(ops.mul(x[j], softcap_scale));
    x[j] = t;
    h[j] = ops.fma(arith::from_bits(arith::to_bits(t) ^ arith::kSignBit), t, 1.0F);
  }
}

float RowOps::row_max(const float* x, int n, float start) const {
  float m = start;
  for (int j = 0; j < n; ++j) m = ops.max(m, x[j]);
  return m;
}

void RowOps::exponentials(const float* x, float* p, int n, float c, float reference, bool fused) const {
  if (fused) {
    const float negated = arith::from_bits(arith::to_bits(reference) ^ arith::kSignBit);
    for (int j = 0; j < n; ++j) p[j] = ops.ex2(ops.fma(x[j], c, negated));
  } else {
    for (int j = 0; j < n; ++j) p[j] = ops.ex2(ops.sub(ops.mul(x[j], c), reference));
  }
}

void RowOps::forward_exponentials(const float* x, float* p, int n, float c, float reference) const {
  exponentials(x, p, n, c, reference, forward_.exponent_fused);
}

void RowOps::backward_exponentials(const float* x, float* p, int n, float c, float reference) const {
  exponentials(x, p, n, c, reference, backward_.exponent_fused);
}

void RowOps::add_to_quad_sums(const float* p, int n, bool first, float alpha, QuadSums& sums) const {
  // Lane q owns columns 8v + 2q and 8v + 2q + 1 of the accumulator and visits them in ascending order.
  for (int q = 0; q < 4; ++q) {
    float l = sums.lane[q];
    const float p0 = p[2 * q];
    if (first) {
      l = p0;
    } else if (forward_.row_sum_rescale_fused) {
      l = ops.fma(alpha, l, p0);
    } else {
      l = ops.add(ops.mul(alpha, l), p0);
    }
    l = ops.add(l, p[2 * q + 1]);
    for (int v = 8; v < n; v += 8) {
      l = ops.add(l, p[v + 2 * q]);
      l = ops.add(l, p[v + 2 * q + 1]);
    }
    sums.lane[q] = l;
  }
}

float RowOps::total(const QuadSums& sums) const {
  const auto& l = sums.lane;
  if (forward_.quad_sum == profile::QuadSum::across_then_beside) {
    return ops.add(ops.add(l[0], l[2]), ops.add(l[1], l[3]));
  }
  return ops.add(ops.add(l[0], l[1]), ops.add(l[2], l[3]));
}

void RowOps::cast(const float* x, std::uint16_t* words, int n) const {
  for (int j = 0; j < n; ++j) words[j] = arith::bf16_from_fp32(x[j]);
}

void RowOps::scale(float* x, int n, float factor) const {
  scaled(x, x, n, factor);
}

void RowOps::scaled(const float* x, float* out, int n, float factor) const {
  for (int j = 0; j < n; ++j) out[j] = ops.mul(x[j], factor);
}

void RowOps::score_gradient(const float* p, const float* dp, float* ds, int n, float dpsum) const {
  for (int j = 0; j < n; ++j) {
    const float factor = backward_.ds_from_cast_p ? arith::fp32_from_bf16(arith::bf16_from_fp32(p[j])) : p[j];
    if (backward_.ds == profile::DsOrder::subtract_then_multiply) {
      ds[j] = ops.mul(factor, ops.sub(dp[j], dpsum));
    } else {
      const float subtracted = ops.mul(factor, dpsum);
      ds[j] = ops.fma(factor, dp[j], arith::from_bits(arith::to_bits(subtracted) ^ arith::kSignBit));
    }
  }
}

void RowOps::multiply(const float* a, const float* b, float* out, int n) const {
  for (int j = 0; j < n; ++j) out[j] = ops.mul(a[j], b[j]);
}

void RowOps::reduce_add(float* memory, const float* part, std::ptrdiff_t n, bool by_atomics) const {
  const bool flushes = by_atomics || backward_.bulk_reduce_flushes;
  for (std::ptrdiff_t j = 0; j < n; ++j) {
    memory[j] =
        flushes ? arith::global_reduce_add(memory[j], part[j]) : arith::bulk_reduce_add(memory[j], part[j]);
  }
}

float RowOps::dpsum(const std::uint16_t* dout, const std::uint16_t* out, int columns, int head_dim,
                    int threads) const {
  const auto x = [&](const std::uint16_t* row, int column) {
    return column < columns ? arith::fp32_from_bf16(row[column]) : 0.0F;
  };
  std::array<float, 16> partial{};
  for (int t = 0; t < threads; ++t) {
    // Thread t owns vectors of 8 consecutive columns: 8t, 8t + 8*threads, …
    float a = 0;
    int visited = 0;
    for (int base = 8 * t; base < head_dim; base += 8 * threads) {
      for (int i = base; i < base + 8; ++i, ++visited) {
        if (visited == 0) continue;
        if (visited == 1) {  // the compiler fuses the second addend's neighbour: one of the first two
                             // products is rounded
          const bool second_rounded = backward_.dpsum == profile::DpsumStart::second_product_rounded;
          const int rounded_column = second_rounded ? i : i - 1;
          const int fused_column = second_rounded ? i - 1 : i;
          a = ops.mul(x(dout, rounded_column), x(out, rounded_column));
          a = ops.fma(x(dout, fused_column), x(out, fused_column), a);
        } else {
          a = ops.fma(x(dout, i), x(out, i), a);
        }
      }
    }
    partial[static_cast<std::size_t>(t)] = a;
  }
  for (int offset = threads / 2; offset > 0;
       offset /= 2) {  // butterfly; additions commute, so all lanes agree
    for (int t = 0; t < offset; ++t) {
      partial[static_cast<std::size_t>(t)] =
          ops.add(partial[static_cast<std::size_t>(t)], partial[static_cast<std::size_t>(t + offset)]);
    }
  }
  return partial[0];
}

}  // namespace bitattn::kernels
