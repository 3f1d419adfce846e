#pragma once
// Numbers with rounding sites as switches: fp64 values, in which each site either rounds as the chip does or
// not at all.
//
// An operation of a site that is run as the chip does gives the chip's own bits wherever its operands are
// numbers the chip could hold; with others (because an earlier site is exact) it rounds the fp64 result to
// fp32 with flush to zero. A profile's deviations (emu/profile/deviation.hpp) are honoured here, at sites
// that are not exact. With no site exact and no deviation, the schedules give every bit of ChipNumbers (a
// test shows it).

#include <array>
#include <cstdint>
#include <vector>

#include "emu/kernels/attention.hpp"
#include "emu/kernels/remedies/low_precision.hpp"
#include "emu/mma/fp8_product.hpp"
#include "emu/profile/flash3.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn::kernels {

class SiteNumbers {
 public:
  using Value = double;
  using Word = double;  ///< after its cast; a BF16 number unless the cast's site is exact
  struct Sums {
    double lane[4] = {0, 0, 0, 0};
  };
  /// An operand as fp64 matrix, and packed for the tensor core where every element is a BF16 number.
  struct Operand {
    int rows = 0, k = 0;
    std::vector<double> values;  ///< left: [rows][k]; right: [k][rows]
    bool narrow = true;          ///< all elements are BF16 numbers
    mma::PackedOperand packed;   ///< valid where narrow
  };
  using Site = profile::Site;

  SiteNumbers(const profile::Profile& profile, const profile::Call& call, const Execution& execution);

  float scale_log2() const { return scalars_.scale_log2; }
  bool softcapped() const { return scalars_.softcap_scale != 0; }

  /// `point`: which operand this is.
  void pack(profile::Point point, const mma::MatrixView& view, mma::Side side, Operand& out) const;
  /// The same for words of our own: element (r, k) is data[r * row_stride + k * k_stride].
  void pack(const Word* data, std::ptrdiff_t row_stride, std::ptrdiff_t k_stride, int rows, int k,
            mma::Side side, Operand& out) const;
  void multiply(Site site, const Operand& left, const Operand& right, mma::Start start, Value* c,
                std::ptrdiff_t ldc) const;

  void softcap(Value* x, int n) const;
  Value row_max(const Value* x, int n, Value start) const;
  Value scaled_max(Value m) const;
  Value rescale_factor(Value previous, Value reference) const;
  void forward_exponentials(const Value* x, Value* p, int n, Value scaled_max) const;
  void add_to_row_sums(const Value* p, int n, bool first, Value alpha, Sums& sums) const;
  void cast_p(const Value* p, Word* words, int n) const;
  void rescale_output(Value* o, int n, Value alpha) const;
  Value total(const Sums& sums) const;
  Value inverse(Value total) const;
  Value log_sum_exp(Value m, Value total) const;
  void normalise(Value* o, int n, Value inverse) const;
  void cast_output(const Value* o, Word* words, int n) const;

  Value dpsum(const std::uint16_t* dout, const Word* out, const Value* out_uncast, int columns,
              const profile::BackwardTiles& tiles) const;
  Value lse_log2(Value lse) const;
  void softcap_with_derivative(Value* s, Value* h, int n) const;
  void backward_exponentials(const Value* s, Value* p, int n, Value lse_log2) const;
  void score_gradient(const Value* p, const Value* dp, Value* ds, int n, Value dpsum) const;
  void apply_derivative(Value* ds, const Value* h, int n) const;
  void cast_p_backward(const Value* p, Word* words, int n) const;
  void cast_ds(const Value* ds, Word* words, int n) const;
  bool casts_ds_apart() const;
  void cast_ds_for_dk(const Value* ds, Word* words, int n) const;
  void reduce_dq(Value* memory, const Value* part, std::ptrdiff_t n, bool by_atomics) const;
  void reduce_dkv(Value* memory, const Value* part, std::ptrdiff_t n) const;
  void scale_dq(Value* x, int n) const;
  void scale_dk(Value* x, int n) const;
  void postprocess_dkv(Value* x, int n) const;
  void cast_dq(const Value* x, Word* words, int n) const;
  void cast_dk(const Value* x, Word* words, int n) const;
  void cast_dv(const Value* x, Word* words, int n) const;

  float softmax_scale() const { return scalars_.softmax_scale; }
  double add(Site site, double a, double b) const;
  double sub(Site site, double a, double b) const { return add(site, a, -b); }
  double mul(Site site, double a, double b) const;
  double fma(Site site, double a, double b, double c) const;
  double ex2(Site site, double x) const;
  double lg2(Site site, double x) const;
  double rcp(Site site, double x) const;
  void add_scaled(Site site, double factor, const double* x, double* sum, int n) const;
  void scale(Site site, double* x, int n, double factor) const { scale(site, x, x, n, factor); }
  Word cast(Site site, double x) const;
  Word cast_fp8(Site site, double x, arith::Fp8 format, int exponent) const;
  static double value(Word word) { return word; }
  static double output_read_by_dpsum(double y);

 private:
  using Deviation = profile::Deviation;
  using Kind = profile::Kind;
  using Point = profile::Point;

  bool exact(Site site) const { return exact_.has(site); }
  /// The deviation of a point, unless its site is exact.
  const Deviation* at(Point point) const {
    const auto i = static_cast<std::size_t>(point);
    return deviates_[i] ? &deviations_[i] : nullptr;
  }
  bool deviates(Point point, Kind kind) const { return at(point) != nullptr && at(point)->kind == kind; }
  void take_deviations(const profile::Profile& profile);
  void set(const Deviation& deviation);
  void take_compiler(Point point, int first_pass, int last_pass);
  float constant(Point point, float value) const;
  static bool backward(Site site) { return site >= Site::dpsum_o_cast; }

  // The operations of a site at a point that may deviate.
  double value(Point point, double x) const;
  double add(Site site, Point point, double a, double b) const;
  double mul(Site site, Point point, double a, double b) const;
  double fma(Site site, Point point, double a, double b, double c) const;
  double function(Site site, Point point, double x) const;
  void cast(Point point, const Value* x, Word* words, int n) const;
  void multiply_block(Site site, const Operand& left, const Operand& right, mma::Start start, Value* c,
                      std::ptrdiff_t ldc) const;
  void multiply_otherwise(const Deviation& deviation, Site site, const Operand& left, const Operand& right,
                          mma::Start start, Value* c, std::ptrdiff_t ldc) const;
  /// Columns [begin, begin + count) of K, in descending steps of 16 if so asked.
  Operand part_of_k(const Operand& whole, mma::Side side, int begin, int count, bool descending) const;
  void cast_probabilities(Site site, Point point, std::optional<arith::Fp8> format, const Value* p,
                          Word* words, int n) const;
  double tanh(Site site, double x) const;
  void scale(Site site, const Value* x, Value* out, int n, double factor) const;
  void scale(Site site, Point point, Value* x, int n, double factor) const;
  void round_operand(mma::Side side, Operand& out) const;

  const mma::Engine& engine_;
  arith::TensorCoreRule rule_;
  remedies::LowPrecision low_;
  profile::SiteSet exact_;
  profile::Scalars scalars_;
  double exact_scale_;  ///< softmax_scale in fp64
  double c_[2];         ///< forward, backward: scale*log2(e) as in effect: fp64 where score_scale is exact
  double softcap_scale_[2];  ///< forward, backward: scale/softcap as in effect
  std::array<Deviation, profile::kPointCount> deviations_{};
  std::array<bool, profile::kPointCount> deviates_{};
  bool flushes_[2] = {true, true};  ///< forward, backward: FTZ
  bool fuses_[2] = {true, true};    ///< fused multiply-adds
  bool scales_dk_ = true, scales_dq_ = true;
};

}  // namespace bitattn::kernels
