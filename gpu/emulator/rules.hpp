#pragma once
// A profile as device code reads it, and the scalar fp32 arithmetic and row operations under it: what
// emu/kernels does between matrix products, one statement one rounding. Orders:
// docs/spec/fa3-operation-order.md (sections in brackets).

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/mufu.hpp"
#include "emu/arith/reduce_add.hpp"
#include "emu/arith/tensor_core.hpp"
#include "emu/profile/flash3.hpp"

namespace bitattn::gpu::emulator {

/// The parts of a profile that change bits, as plain data.
struct Rules {
  arith::TensorCoreRule tensor_core;
  bool chip_tensor_core;  ///< tensor_core is the chip's own: the fast path may be taken
  bool flush;             ///< FTZ in add, mul, fma, max
  profile::Forward forward;
  profile::Backward backward;
  profile::Scalars scalars;
};

inline constexpr float kMinusInfinity = arith::from_bits(arith::kInfinity | arith::kSignBit);
inline constexpr std::uint32_t kLn2Bits = 0x3f317218U;
inline constexpr std::uint32_t kLog2EBits = 0x3fb8aa3bU;

/// fp32 with one sign turned.
BITATTN_HD constexpr float negated(float x) {
  return arith::from_bits(arith::to_bits(x) ^ arith::kSignBit);
}

/// The scalar arithmetic of a profile.
struct Ops {
  bool flush;

  BITATTN_HD float add(float a, float b) const { return flush ? arith::ftz::add(a, b) : arith::add(a, b); }
  BITATTN_HD float sub(float a, float b) const { return add(a, negated(b)); }
  BITATTN_HD float mul(float a, float b) const { return flush ? arith::ftz::mul(a, b) : arith::mul(a, b); }
  BITATTN_HD float fma(float a, float b, float c) const {
    return flush ? arith::ftz::fma(a, b, c) : arith::fma(a, b, c);
  }
  BITATTN_HD float max(float a, float b) const { return flush ? arith::ftz::max(a, b) : arith::max(a, b); }
  BITATTN_HD float ex2(float x) const { return arith::from_bits(arith::mufu::ex2(arith::to_bits(x))); }
  BITATTN_HD float lg2(float x) const { return arith::from_bits(arith::mufu::lg2(arith::to_bits(x))); }
  BITATTN_HD float rcp(float x) const { return arith::from_bits(arith::mufu::rcp(arith::to_bits(x))); }
  BITATTN_HD float tanh(float x) const { return arith::from_bits(arith::mufu::tanh(arith::to_bits(x))); }
};

/// p of a score: ex2(fma(x, c, -reference)) [2.5.7, 4.3.5]; reference is already rounded.
BITATTN_HD inline float exponential(const Ops& ops, float x, float c, float reference, bool fused) {
  return ops.ex2(fused ? ops.fma(x, c, negated(reference)) : ops.sub(ops.mul(x, c), reference));
}

/// L of the four partial sums of a row [2.7.1].
BITATTN_HD inline float total(const Ops& ops, const Rules& rules, const float* lanes) {
  if (rules.forward.quad_sum == profile::QuadSum::across_then_beside) {
    return ops.add(ops.add(lanes[0], lanes[2]), ops.add(lanes[1], lanes[3]));
  }
  return ops.add(ops.add(lanes[0], lanes[1]), ops.add(lanes[2], lanes[3]));
}

/// LSE of a row that saw a key [2.7.3].
BITATTN_HD inline float log_sum_exp(const Ops& ops, const Rules& rules, float m, float sum) {
  const float ln2 = arith::from_bits(kLn2Bits);
  const float c_ln2 = ops.mul(rules.scalars.scale_log2, ln2);
  const float log_sum = ops.lg2(sum);
  return rules.forward.lse == profile::LseFusion::max_term ? ops.fma(c_ln2, m, ops.mul(log_sum, ln2))
                                                           : ops.fma(log_sum, ln2, ops.mul(c_ln2, m));
}

/// dS of one pair [4.3.6].
BITATTN_HD inline float score_gradient(const Ops& ops, const Rules& rules, float p, float dp, float dpsum) {
  const float factor = rules.backward.ds_from_cast_p ? arith::fp32_from_bf16(arith::bf16_from_fp32(p)) : p;
  if (rules.backward.ds == profile::DsOrder::subtract_then_multiply)
    return ops.mul(factor, ops.sub(dp, dpsum));
  return ops.fma(factor, dp, negated(ops.mul(factor, dpsum)));
}

/// D = rowsum(dO . O) in the order of the preprocess kernel [3.1]: `threads` share a row, each with vectors
/// of 8 columns.
BITATTN_HD inline float dpsum(const Ops& ops, const Rules& rules, const std::uint16_t* dout,
                              const std::uint16_t* out, int columns, int head_dim, int threads) {
  const auto x = [columns](const std::uint16_t* row, int column) {
    return column < columns ? arith::fp32_from_bf16(row[column]) : 0.0F;
  };
  float partial[16];
  for (int t = 0; t < threads; ++t) {
    float a = 0;
    int visited = 0;
    for (int base = 8 * t; base < head_dim; base += 8 * threads) {
      for (int i = base; i < base + 8; ++i, ++visited) {
        if (visited == 0) continue;
        if (visited == 1) {  // one of the first two products is rounded, the other fused
          const bool second_rounded = rules.backward.dpsum == profile::DpsumStart::second_product_rounded;
          const int rounded_column = second_rounded ? i : i - 1;
          const int fused_column = second_rounded ? i - 1 : i;
          a = ops.mul(x(dout, rounded_column), x(out, rounded_column));
          a = ops.fma(x(dout, fused_column), x(out, fused_column), a);
        } else {
          a = ops.fma(x(dout, i), x(out, i), a);
        }
      }
    }
    partial[t] = a;
  }
  for (int offset = threads / 2; offset > 0; offset /= 2) {
    for (int t = 0; t < offset; ++t) partial[t] = ops.add(partial[t], partial[t + offset]);
  }
  return partial[0];
}

/// A part added to memory [4.6].
BITATTN_HD inline float reduce_add(const Rules& rules, float memory, float part, bool by_atomics) {
  return by_atomics || rules.backward.bulk_reduce_flushes ? arith::global_reduce_add(memory, part)
                                                          : arith::bulk_reduce_add(memory, part);
}

}  // namespace bitattn::gpu::emulator
