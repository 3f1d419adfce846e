#pragma once
// What a kernel's threads do to one row between its matrix products: exponentials, sums, casts, rescales.
// Scalar code, one statement one rounding; it is the model that any vectorised form is tested against.
//
// Arithmetic: docs/spec/hopper-arithmetic.md 3 to 9; orders: docs/spec/fa3-operation-order.md (sections in
// brackets).

#include <cstddef>
#include <cstdint>

#include "emu/profile/profile.hpp"

namespace bitattn::kernels {

/// The scalar fp32 arithmetic of a profile: the chip's, or one with a decision changed.
class ScalarOps {
 public:
  explicit ScalarOps(const profile::Arithmetic& arithmetic) : arithmetic_(arithmetic) {}

  float add(float a, float b) const;
  float sub(float a, float b) const;  ///< add with the sign of b turned
  float mul(float a, float b) const;
  float fma(float a, float b, float c) const;
  float max(float a, float b) const;
  float ex2(float x) const;
  float lg2(float x) const;
  float rcp(float x) const;
  float tanh(float x) const;

 private:
  profile::Arithmetic arithmetic_;
};

/// The four partial sums of a row, one to each lane of the quad that shares it [1.4].
struct QuadSums {
  float lane[4] = {0, 0, 0, 0};
};

class RowOps {
 public:
  explicit RowOps(const profile::Profile& profile)
      : ops(profile.arithmetic), forward_(profile.forward), backward_(profile.backward) {}

  /// x_j := tanh(x_j * softcap_scale) [2.5.2].
  void softcap(float* x, int n, float softcap_scale) const;
  /// The same, and h_j := fma(-x_j, x_j, 1) of the new x_j [4.3.3].
  void softcap_with_derivative(float* x, float* h, int n, float softcap_scale) const;
  /// max over x_j and `start` [2.5.4]; order is irrelevant.
  float row_max(const float* x, int n, float start) const;
  /// p_j := ex2(fma(x_j, c, -reference)) [2.5.7]; reference is already rounded.
  void forward_exponentials(const float* x, float* p, int n, float c, float reference) const;
  /// The same as the backward's profile has it [4.3.5].
  void backward_exponentials(const float* x, float* p, int n, float c, float reference) const;
  /// Adds the p of one key block to the partial sums; on the first block they start with it [2.5.8].
  void add_to_quad_sums(const float* p, int n, bool first, float alpha, QuadSums& sums) const;
  /// L of the four partial sums [2.7.1].
  float total(const QuadSums& sums) const;
  /// BF16 words of x_j.
  void cast(const float* x, std::uint16_t* words, int n) const;
  /// x_j := x_j * factor [2.5.10].
  void scale(float* x, int n, float factor) const;
  /// out_j := x_j * factor.
  void scaled(const float* x, float* out, int n, float factor) const;
  /// dS_j from P_j, dP_j and D [4.3.6]; with softcap before the multiply by h.
  void score_gradient(const float* p, const float* dp, float* ds, int n, float dpsum) const;
  /// out_j := a_j * b_j.
  void multiply(const float* a, const float* b, float* out, int n) const;
  /// memory_j := memory_j + part_j as the reduction to memory does it [4.6].
  void reduce_add(float* memory, const float* part, std::ptrdiff_t n, bool by_atomics) const;
  /// D = rowsum(dO . O) in the order of the preprocess kernel [3.1]; `columns` of both rows, cleared up to
  /// head_dim.
  float dpsum(const std::uint16_t* dout, const std::uint16_t* out, int columns, int head_dim,
              int threads) const;

  ScalarOps ops;

 private:
  void exponentials(const float* x, float* p, int n, float c, float reference, bool fused) const;

  profile::Forward forward_;
  profile::Backward backward_;
};

}  // namespace bitattn::kernels
