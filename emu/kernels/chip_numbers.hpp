#pragma once
// The chip's numbers: fp32 values, BF16 words, tensor-core products. What a schedule does to a number it does
// through a class like this one, every operation named by what it is for; site_numbers.hpp is the other one.

#include <cstdint>
#include <optional>

#include "emu/arith/bf16.hpp"
#include "emu/kernels/attention.hpp"
#include "emu/kernels/remedies/add_scaled.hpp"
#include "emu/kernels/remedies/low_precision.hpp"
#include "emu/kernels/vector_row_ops.hpp"
#include "emu/mma/fp8_product.hpp"
#include "emu/profile/flash3.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn::kernels {

class ChipNumbers {
 public:
  using Value = float;         ///< a value between casts
  using Word = std::uint16_t;  ///< a value after its cast to BF16
  /// A tile for the BF16 tensor core, and for the FP8 one where some product runs there.
  struct Operand {
    mma::PackedOperand bf16;
    mma::Fp8Operand fp8;
  };
  using Sums = QuadSums;
  using Site = profile::Site;

  ChipNumbers(const profile::Profile& profile, const profile::Call& call, const Execution& execution)
      : engine_(execution.engine != nullptr ? *execution.engine : mma::default_engine()),
        rule_(tensor_core_rule(profile.arithmetic)),
        order_(profile.forward),
        scalars_(profile::flash3_scalars(call)),
        low_(profile.remedies),
        row_(profile, engine_.name()),
        add_scaled_(profile.arithmetic, engine_.name()) {}

  float scale_log2() const { return scalars_.scale_log2; }
  bool softcapped() const { return scalars_.softcap_scale != 0; }

  // Products. An operand is packed once; `site` names the product.
  void pack(profile::Point /*point*/, const mma::MatrixView& view, mma::Side side, Operand& out) const {
    engine_.pack(view, side, out.bf16);
    if (low_.fp8_products()) mma::pack_fp8(view, out.fp8);
  }
  void pack(const Word* data, std::ptrdiff_t row_stride, std::ptrdiff_t k_stride, int rows, int k,
            mma::Side side, Operand& out) const {
    const mma::MatrixView view = mma::whole(data, row_stride, k_stride, rows, k);
    engine_.pack(view, side, out.bf16);
    if (low_.fp8_products()) mma::pack_fp8(view, out.fp8);
  }
  void multiply(Site site, const Operand& left, const Operand& right, mma::Start start, Value* c,
                std::ptrdiff_t ldc) const {
    if (low_.fp8_product(site)) {
      mma::multiply_fp8(left.fp8, right.fp8, start, c, ldc);
    } else {
      engine_.multiply(left.bf16, right.bf16, start, c, ldc, rule_);
    }
  }

  // Forward.
  void softcap(Value* x, int n) const { row_.softcap(x, n, scalars_.softcap_scale); }
  Value row_max(const Value* x, int n, Value start) const { return row_.row_max(x, n, start); }
  Value scaled_max(Value m) const { return row_.ops.mul(m, scalars_.scale_log2); }
  Value rescale_factor(Value previous, Value reference) const {
    return row_.ops.ex2(row_.ops.mul(row_.ops.sub(previous, reference), scalars_.scale_log2));
  }
  void forward_exponentials(const Value* x, Value* p, int n, Value scaled_max) const {
    row_.forward_exponentials(x, p, n, scalars_.scale_log2, scaled_max);
  }
  void add_to_row_sums(const Value* p, int n, bool first, Value alpha, Sums& sums) const {
    row_.add_to_quad_sums(p, n, first, alpha, sums);
  }
  void cast_p(const Value* p, Word* words, int n) const { cast_probabilities(low_.p, p, words, n); }
  void rescale_output(Value* o, int n, Value alpha) const { row_.scale(o, n, alpha); }
  Value total(const Sums& sums) const { return row_.total(sums); }
  Value inverse(Value total) const { return row_.ops.rcp(total); }
  Value log_sum_exp(Value m, Value total) const {
    constexpr float kLn2 = arith::from_bits(0x3f317218U);
    const float c_ln2 = row_.ops.mul(scalars_.scale_log2, kLn2);
    const float log_total = row_.ops.lg2(total);
    return order_.lse == profile::LseFusion::max_term ? row_.ops.fma(c_ln2, m, row_.ops.mul(log_total, kLn2))
                                                      : row_.ops.fma(log_total, kLn2, row_.ops.mul(c_ln2, m));
  }
  void normalise(Value* o, int n, Value inverse) const { row_.scale(o, n, inverse); }
  void cast_output(const Value* o, Word* words, int n) const { row_.cast(o, words, n); }

  // Backward.
  Value dpsum(const std::uint16_t* dout, const Word* out, const Value* /*out_uncast*/, int columns,
              const profile::BackwardTiles& tiles) const {
    return row_.dpsum(dout, out, columns, tiles.head_dim, tiles.dpsum_threads);
  }
  Value lse_log2(Value lse) const {
    constexpr float kLog2E = arith::from_bits(0x3fb8aa3bU);
    return row_.ops.mul(lse, kLog2E);
  }
  void softcap_with_derivative(Value* s, Value* h, int n) const {
    row_.softcap_with_derivative(s, h, n, scalars_.softcap_scale);
  }
  void backward_exponentials(const Value* s, Value* p, int n, Value lse_log2) const {
    row_.backward_exponentials(s, p, n, scalars_.scale_log2, lse_log2);
  }
  void score_gradient(const Value* p, const Value* dp, Value* ds, int n, Value dpsum) const {
    row_.score_gradient(p, dp, ds, n, dpsum);
  }
  void apply_derivative(Value* ds, const Value* h, int n) const { row_.multiply(ds, h, ds, n); }
  void cast_p_backward(const Value* p, Word* words, int n) const {
    cast_probabilities(low_.p_backward, p, words, n);
  }
  void cast_ds(const Value* ds, Word* words, int n) const { row_.cast(ds, words, n); }
  static constexpr bool casts_ds_apart() { return false; }  ///< dK reads other words of dS than dQ
  void cast_ds_for_dk(const Value* ds, Word* words, int n) const { row_.cast(ds, words, n); }
  void reduce_dq(Value* memory, const Value* part, std::ptrdiff_t n, bool by_atomics) const {
    row_.reduce_add(memory, part, n, by_atomics);
  }
  void reduce_dkv(Value* memory, const Value* part, std::ptrdiff_t n) const {
    row_.reduce_add(memory, part, n, false);
  }
  void scale_dq(Value* x, int n) const { row_.scale(x, n, scalars_.softmax_scale); }
  void scale_dk(Value* x, int n) const { row_.scale(x, n, scalars_.softmax_scale); }
  /// The postprocess of grouped dK and dV multiplies by a run-time 1.0, which only flushes subnormals (5).
  void postprocess_dkv(Value* x, int n) const { row_.scale(x, n, 1.0F); }
  void cast_dq(const Value* x, Word* words, int n) const { row_.cast(x, words, n); }
  void cast_dk(const Value* x, Word* words, int n) const { row_.cast(x, words, n); }
  void cast_dv(const Value* x, Word* words, int n) const { row_.cast(x, words, n); }

  // Operations that remedies add (emu/kernels/remedies): each one rounding of the chip, at the site it
  // belongs to.
  float softmax_scale() const { return scalars_.softmax_scale; }
  Value add(Site /*site*/, Value a, Value b) const { return row_.ops.add(a, b); }
  Value sub(Site /*site*/, Value a, Value b) const { return row_.ops.sub(a, b); }
  Value mul(Site /*site*/, Value a, Value b) const { return row_.ops.mul(a, b); }
  Value fma(Site /*site*/, Value a, Value b, Value c) const { return row_.ops.fma(a, b, c); }
  Value ex2(Site /*site*/, Value x) const { return row_.ops.ex2(x); }
  Value lg2(Site /*site*/, Value x) const { return row_.ops.lg2(x); }
  Value rcp(Site /*site*/, Value x) const { return row_.ops.rcp(x); }
  /// sum_j := fma(factor, x_j, sum_j)
  void add_scaled(Site /*site*/, Value factor, const Value* x, Value* sum, int n) const {
    add_scaled_(factor, x, sum, n);
  }
  void scale(Site /*site*/, Value* x, int n, Value factor) const { row_.scale(x, n, factor); }
  Word cast(Site /*site*/, Value x) const { return arith::bf16_from_fp32(x); }
  /// x through FP8 at a scale of 2^exponent.
  Word cast_fp8(Site /*site*/, Value x, arith::Fp8 format, int exponent) const {
    return arith::bf16_from_fp32(arith::through_fp8(format, x, exponent));
  }
  static Value value(Word word) { return arith::fp32_from_bf16(word); }
  /// The BF16 number nearest to an output, as D reads it.
  static Value output_read_by_dpsum(Value y) { return value(arith::bf16_from_fp32(y)); }

 private:
  void cast_probabilities(std::optional<arith::Fp8> format, const Value* p, Word* words, int n) const {
    if (!format) {
      row_.cast(p, words, n);
      return;
    }
    for (int j = 0; j < n; ++j) words[j] = cast_fp8(Site::p_cast, p[j], *format, remedies::kPExponent);
  }

  const mma::Engine& engine_;
  arith::TensorCoreRule rule_;
  profile::Forward order_;
  profile::Scalars scalars_;
  remedies::LowPrecision low_;
  VectorRowOps row_;
  remedies::AddScaled add_scaled_;
};

}  // namespace bitattn::kernels
