#pragma once
// RowOps in vector instructions, with the same bits: what a schedule uses. Where an instruction set or a
// profile's arithmetic has no vector form, the scalar model of row_ops.hpp runs.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "emu/kernels/row_ops.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn::kernels {

/// The loops of one instruction set, for the chip's arithmetic. Shapes and meaning: RowOps.
struct VectorRowLoops {
  void (*softcap)(float* x, int n, float softcap_scale);
  void (*softcap_with_derivative)(float* x, float* h, int n, float softcap_scale);
  /// max over x; -inf for n = 0. NaNs are passed over.
  float (*row_max)(const float* x, int n);
  void (*exponentials)(const float* x, float* p, int n, float c, float reference, bool fused);
  void (*add_to_quad_sums)(const float* p, int n, bool first, float alpha, bool rescale_fused, float* lanes);
  void (*cast)(const float* x, std::uint16_t* words, int n);
  void (*scaled)(const float* x, float* out, int n, float factor);
  void (*score_gradient)(const float* p, const float* dp, float* ds, int n, float dpsum, bool fused,
                         bool from_cast_p);
  void (*multiply)(const float* a, const float* b, float* out, int n);
  void (*reduce_add)(float* memory, const float* part, std::ptrdiff_t n);        ///< subnormals kept
  void (*reduce_add_flush)(float* memory, const float* part, std::ptrdiff_t n);  ///< and flushed
};

/// The loops that go with a tile-product engine of that name ("avx512", "avx2"); nullptr: none, use the
/// scalar model.
const VectorRowLoops* vector_row_loops(std::string_view engine);

class VectorRowOps {
 public:
  /// `engine`: the tile-product engine's name; "scalar" keeps to the scalar model throughout.
  VectorRowOps(const profile::Profile& profile, std::string_view engine)
      : ops(profile.arithmetic),
        model_(profile),
        loops_(profile.arithmetic.flush_subnormals ? vector_row_loops(engine) : nullptr),
        ex2_loops_(profile.arithmetic.ex2 == profile::Function::special_function_unit ? loops_ : nullptr),
        forward_(profile.forward),
        backward_(profile.backward) {}

  void softcap(float* x, int n, float softcap_scale) const;
  void softcap_with_derivative(float* x, float* h, int n, float softcap_scale) const;
  float row_max(const float* x, int n, float start) const;
  void forward_exponentials(const float* x, float* p, int n, float c, float reference) const;
  void backward_exponentials(const float* x, float* p, int n, float c, float reference) const;
  void add_to_quad_sums(const float* p, int n, bool first, float alpha, QuadSums& sums) const;
  float total(const QuadSums& sums) const { return model_.total(sums); }
  void cast(const float* x, std::uint16_t* words, int n) const;
  void scale(float* x, int n, float factor) const { scaled(x, x, n, factor); }
  void scaled(const float* x, float* out, int n, float factor) const;
  void score_gradient(const float* p, const float* dp, float* ds, int n, float dpsum) const;
  void multiply(const float* a, const float* b, float* out, int n) const;
  void reduce_add(float* memory, const float* part, std::ptrdiff_t n, bool by_atomics) const;
  float dpsum(const std::uint16_t* dout, const std::uint16_t* out, int columns, int head_dim,
              int threads) const {
    return model_.dpsum(dout, out, columns, head_dim, threads);
  }

  ScalarOps ops;

 private:
  RowOps model_;
  const VectorRowLoops* loops_;
  const VectorRowLoops* ex2_loops_;
  profile::Forward forward_;
  profile::Backward backward_;
};

}  // namespace bitattn::kernels
