#include "emu/kernels/site_numbers.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/mufu.hpp"
#include "emu/arith/reduce_add.hpp"
#include "emu/kernels/deviant.hpp"
#include "emu/kernels/wide_products.hpp"

namespace bitattn::kernels {

namespace {

constexpr int kStep = 16;
constexpr float kLn2 = arith::from_bits(0x3f317218U);
constexpr float kLog2E = arith::from_bits(0x3fb8aa3bU);

std::size_t index(std::ptrdiff_t i) {
  return static_cast<std::size_t>(i);
}

/// Could an fp32 register hold x?
bool fits(double x) {
  return std::isnan(x) || static_cast<double>(static_cast<float>(x)) == x;
}

float to_fp32(double x) {
  return arith::canonical(static_cast<float>(x));
}

/// fp64 to fp32 as an FTZ operation would store it, widened again.
double rounded(double x) {
  return static_cast<double>(arith::ftz::in(to_fp32(x)));
}

double apply(std::uint32_t (*function)(std::uint32_t), double x) {
  return static_cast<double>(arith::from_bits(function(arith::to_bits(to_fp32(x)))));
}

/// The BF16 number nearest to x (through fp32, as the chip's cast sees it).
double to_bf16(double x) {
  return static_cast<double>(arith::fp32_from_bf16(arith::bf16_from_fp32(to_fp32(x))));
}

bool is_bf16(double x) {
  return (arith::to_bits(static_cast<float>(x)) & 0xffffU) == 0U && fits(x);
}

}  // namespace

SiteNumbers::SiteNumbers(const profile::Profile& profile, const profile::Call& call,
                         const Execution& execution)
    : engine_(execution.engine != nullptr ? *execution.engine : mma::default_engine()),
      rule_(tensor_core_rule(profile.arithmetic)),
      low_(profile.remedies),
      exact_(profile.exact),
      scalars_(profile::flash3_scalars(call)),
      exact_scale_(call.softmax_scale),
      c_{static_cast<double>(scalars_.scale_log2), static_cast<double>(scalars_.scale_log2)},
      softcap_scale_{static_cast<double>(scalars_.softcap_scale),
                     static_cast<double>(scalars_.softcap_scale)} {
  if (exact(Site::score_scale)) {
    c_[0] = c_[1] = (call.softcap > 0 ? call.softcap : call.softmax_scale) * std::numbers::log2e;
  }
  if (call.softcap > 0 && exact(Site::softcap)) softcap_scale_[0] = call.softmax_scale / call.softcap;
  if (call.softcap > 0 && exact(Site::softcap_backward))
    softcap_scale_[1] = call.softmax_scale / call.softcap;
  take_deviations(profile);
}

// --- deviations

void SiteNumbers::set(const Deviation& deviation) {
  const auto site = profile::site_of(deviation.point);
  if (site && exact(*site)) return;
  const auto i = static_cast<std::size_t>(deviation.point);
  deviations_[i] = deviation;
  deviates_[i] = true;
}

void SiteNumbers::take_compiler(Point point, int first_pass, int last_pass) {
  const Deviation* d = at(point);
  if (d == nullptr) return;
  for (int pass = first_pass; pass <= last_pass; ++pass) {
    if (d->kind == Kind::no_fma) fuses_[pass] = false;
    if (d->kind == Kind::no_flush || d->kind == Kind::no_fast_math) flushes_[pass] = false;
    const bool divides = d->kind == Kind::precise_division || d->kind == Kind::no_fast_math;
    if (divides && pass == 0) set({Point::inverse, Kind::correctly_rounded, 0});
  }
}

void SiteNumbers::take_deviations(const profile::Profile& profile) {
  // The profile's own fields say the same things in other words.
  const profile::Forward& f = profile.forward;
  const profile::Backward& b = profile.backward;
  const profile::Arithmetic& a = profile.arithmetic;
  constexpr int kBf16Format = static_cast<int>(profile::Format::bf16);
  if (!f.exponent_fused) set({Point::exponent, Kind::unfused, 0});
  if (!f.row_sum_rescale_fused) set({Point::lane_sum, Kind::unfused, 0});
  if (f.quad_sum == profile::QuadSum::beside_then_across) set({Point::total, Kind::other_order, 0});
  if (f.lse == profile::LseFusion::log_term) set({Point::lse, Kind::other_fused, 0});
  if (!b.exponent_fused) set({Point::exponent_backward, Kind::unfused, 0});
  if (b.dpsum == profile::DpsumStart::first_product_rounded) {
    set({Point::dpsum_sum, Kind::other_fused, 0});
  }
  if (b.ds == profile::DsOrder::fused) set({Point::ds, Kind::fused, 0});
  if (b.ds_from_cast_p) set({Point::p_in_ds, Kind::narrowed, kBf16Format});
  if (b.bulk_reduce_flushes) {
    set({Point::dq_accum, Kind::flushed, 0});
    set({Point::dkv_accum, Kind::flushed, 0});
  }
  if (a.ex2 == profile::Function::correctly_rounded) {
    for (const Point point : {Point::p, Point::alpha, Point::p_backward}) {
      set({point, Kind::correctly_rounded, 0});
    }
  }
  if (a.lg2 == profile::Function::correctly_rounded) set({Point::log_total, Kind::correctly_rounded, 0});
  if (a.rcp == profile::Function::correctly_rounded) set({Point::inverse, Kind::correctly_rounded, 0});
  if (!a.flush_subnormals) flushes_[0] = flushes_[1] = false;

  for (const Deviation& d : profile.deviations) set(d);
  // A point that stands for several.
  const auto spread = [this](Point from, std::initializer_list<Point> to) {
    if (!deviates_[static_cast<std::size_t>(from)]) return;
    for (const Point point : to) {
      if (deviates_[static_cast<std::size_t>(point)]) continue;
      Deviation d = deviations_[static_cast<std::size_t>(from)];
      d.point = point;
      set(d);
    }
  };
  spread(Point::q, {Point::q_forward, Point::q_backward});
  spread(Point::k, {Point::k_forward, Point::k_backward});
  spread(Point::v, {Point::v_forward, Point::v_backward});
  spread(Point::c, {Point::c_forward, Point::c_backward});
  spread(Point::q_backward, {Point::q_in_s, Point::q_in_dk});
  spread(Point::k_backward, {Point::k_in_s, Point::k_in_dq});
  spread(Point::v_backward, {Point::v_in_dp});
  spread(Point::dout_backward, {Point::dout_in_dp, Point::dout_in_dv});
  take_compiler(Point::compiler, 0, 1);
  take_compiler(Point::compiler_forward, 0, 0);
  take_compiler(Point::compiler_backward, 1, 1);

  const auto constant_c = [&](int pass, Point point, bool scaled_first) {
    const auto c = static_cast<float>(c_[pass]);
    if (scaled_first) {
      c_[pass] = static_cast<double>(kLog2E);
    } else if (deviates(point, Kind::from_float)) {
      const float scale = softcapped() ? static_cast<float>(c / kLog2E) : scalars_.softmax_scale;
      c_[pass] = static_cast<double>(arith::mul(scale, kLog2E));
    } else if (at(point) != nullptr) {
      c_[pass] = static_cast<double>(constant(point, c));
    }
  };
  constant_c(0, Point::c_forward,
             deviates(Point::score, Kind::scaled_first) || deviates(Point::q_forward, Kind::scaled_first));
  constant_c(
      1, Point::c_backward,
      deviates(Point::score_backward, Kind::scaled_first) || deviates(Point::q_in_s, Kind::scaled_first));
  const bool scaled_ds =
      deviates(Point::ds, Kind::scaled_first) || deviates(Point::ds_word, Kind::scaled_after_cast);
  scales_dk_ = !scaled_ds && !deviates(Point::scaled_dk, Kind::dropped);
  scales_dq_ = !scaled_ds && !deviates(Point::scaled_dq, Kind::dropped) &&
               !deviates(Point::dq_part, Kind::scaled_first);
}

float SiteNumbers::constant(Point point, float x) const {
  const Deviation* d = at(point);
  if (d == nullptr) return x;
  if (d->kind == Kind::ulps) return ulps_away(x, d->parameter);
  return static_cast<float>(deviated_value(*d, static_cast<double>(x)));
}

double SiteNumbers::value(Point point, double x) const {
  const Deviation* d = at(point);
  return d == nullptr ? x : deviated_value(*d, x);
}

double SiteNumbers::add(Site site, Point point, double a, double b) const {
  const Deviation* d = at(point);
  if (d == nullptr || !rounds_otherwise(*d)) return value(point, add(site, a, b));
  const ExactSum sum = exact_sum(a, b);
  return deviated_operation(*d, sum.high, sum.low, flushes_[backward(site) ? 1 : 0]);
}

double SiteNumbers::mul(Site site, Point point, double a, double b) const {
  const Deviation* d = at(point);
  if (d == nullptr || !rounds_otherwise(*d)) return value(point, mul(site, a, b));
  return deviated_operation(*d, a * b, 0, flushes_[backward(site) ? 1 : 0]);
}

double SiteNumbers::fma(Site site, Point point, double a, double b, double c) const {
  const Deviation* d = at(point);
  if (d != nullptr && d->kind == Kind::unfused) return add(site, mul(site, a, b), c);
  if (d == nullptr || !rounds_otherwise(*d)) return value(point, fma(site, a, b, c));
  const ExactSum sum = exact_sum(a * b, c);
  return deviated_operation(*d, sum.high, sum.low, flushes_[backward(site) ? 1 : 0]);
}

double SiteNumbers::function(Site site, Point point, double x) const {
  const Deviation* d = at(point);
  if (d == nullptr) return ex2(site, x);
  if (d->kind == Kind::correctly_rounded) return rounded(std::exp2(x));
  if (d->kind == Kind::polynomial) return deviated_exp2(*d, x);
  return deviated_value(*d, ex2(site, x));
}

// --- operations of a site

double SiteNumbers::add(Site site, double a, double b) const {
  if (exact(site)) return a + b;
  const bool flush = flushes_[backward(site) ? 1 : 0];
  if (fits(a) && fits(b)) {
    const auto x = static_cast<float>(a);
    const auto y = static_cast<float>(b);
    return static_cast<double>(flush ? arith::ftz::add(x, y) : arith::add(x, y));
  }
  return rounded(a + b);
}

double SiteNumbers::mul(Site site, double a, double b) const {
  if (exact(site)) return a * b;
  const bool flush = flushes_[backward(site) ? 1 : 0];
  if (fits(a) && fits(b)) {
    const auto x = static_cast<float>(a);
    const auto y = static_cast<float>(b);
    return static_cast<double>(flush ? arith::ftz::mul(x, y) : arith::mul(x, y));
  }
  return rounded(a * b);
}

double SiteNumbers::fma(Site site, double a, double b, double c) const {
  if (exact(site)) return std::fma(a, b, c);
  const std::size_t pass = backward(site) ? 1 : 0;
  if (!fuses_[pass]) return add(site, mul(site, a, b), c);
  if (fits(a) && fits(b) && fits(c)) {
    const auto x = static_cast<float>(a);
    const auto y = static_cast<float>(b);
    const auto z = static_cast<float>(c);
    return static_cast<double>(flushes_[pass] ? arith::ftz::fma(x, y, z) : arith::fma(x, y, z));
  }
  return rounded(std::fma(a, b, c));
}

double SiteNumbers::ex2(Site site, double x) const {
  if (exact(site)) return std::exp2(x);
  if (!flushes_[backward(site) ? 1 : 0] && x < -126) {  // without -ftz the compiler keeps subnormal results
    const auto root = static_cast<float>(apply(arith::mufu::ex2, 0.5 * x));
    return static_cast<double>(arith::mul(root, root));
  }
  return apply(arith::mufu::ex2, x);
}

double SiteNumbers::lg2(Site site, double x) const {
  return exact(site) ? std::log2(x) : apply(arith::mufu::lg2, x);
}

double SiteNumbers::rcp(Site site, double x) const {
  return exact(site) ? 1.0 / x : apply(arith::mufu::rcp, x);
}

void SiteNumbers::add_scaled(Site site, double factor, const double* x, double* sum, int n) const {
  for (int j = 0; j < n; ++j) sum[j] = fma(site, factor, x[j], sum[j]);
}

SiteNumbers::Word SiteNumbers::cast(Site site, double x) const {
  return exact(site) ? x : to_bf16(x);
}

SiteNumbers::Word SiteNumbers::cast_fp8(Site site, double x, arith::Fp8 format, int exponent) const {
  return exact(site) ? x : to_bf16(static_cast<double>(arith::through_fp8(format, to_fp32(x), exponent)));
}

void SiteNumbers::cast_probabilities(Site site, Point point, std::optional<arith::Fp8> format, const Value* p,
                                     Word* words, int n) const {
  if (!format) {
    cast(point, p, words, n);
    return;
  }
  for (int j = 0; j < n; ++j) words[j] = cast_fp8(site, p[j], *format, remedies::kPExponent);
}

double SiteNumbers::output_read_by_dpsum(double y) {
  return to_bf16(y);
}

double SiteNumbers::tanh(Site site, double x) const {
  return exact(site) ? std::tanh(x) : apply(arith::mufu::tanh, x);
}

void SiteNumbers::cast(Point point, const Value* x, Word* words, int n) const {
  if (exact(*profile::site_of(point))) {
    std::copy(x, x + n, words);
  } else if (const Deviation* d = at(point); d != nullptr && d->kind == Kind::scaled_after_cast) {
    const auto scale = static_cast<double>(scalars_.softmax_scale);
    for (int j = 0; j < n; ++j) words[j] = to_bf16(mul(Site::ds_cast, to_bf16(x[j]), scale));
  } else if (d != nullptr) {
    for (int j = 0; j < n; ++j) words[j] = deviated_cast(*d, x[j], static_cast<std::uint64_t>(j));
  } else {
    std::transform(x, x + n, words, to_bf16);
  }
}

void SiteNumbers::scale(Site site, const Value* x, Value* out, int n, double factor) const {
  for (int j = 0; j < n; ++j) out[j] = mul(site, x[j], factor);
}

void SiteNumbers::scale(Site site, Point point, Value* x, int n, double factor) const {
  if (at(point) == nullptr) return scale(site, x, x, n, factor);
  for (int j = 0; j < n; ++j) x[j] = mul(site, point, x[j], factor);
}

// --- products

void SiteNumbers::round_operand(mma::Side side, Operand& out) const {
  out.narrow = std::all_of(out.values.begin(), out.values.end(), is_bf16);
  if (!out.narrow) return;
  std::vector<std::uint16_t> words(out.values.size());
  std::transform(out.values.begin(), out.values.end(), words.begin(),
                 [](double x) { return arith::bf16_from_fp32(static_cast<float>(x)); });
  const bool left = side == mma::Side::left;
  engine_.pack(mma::whole(words.data(), left ? out.k : 1, left ? 1 : out.rows, out.rows, out.k), side,
               out.packed);
}

void SiteNumbers::pack(Point point, const mma::MatrixView& view, mma::Side side, Operand& out) const {
  out.rows = view.rows;
  out.k = (view.k + kStep - 1) / kStep * kStep;
  out.narrow = true;
  out.values.assign(index(out.rows) * index(out.k), 0.0);
  const bool left = side == mma::Side::left;
  for (int r = 0; r < std::min(view.rows, view.rows_in_memory); ++r) {
    for (int k = 0; k < std::min(view.k, view.k_in_memory); ++k) {
      const std::size_t at =
          left ? index(r) * index(out.k) + index(k) : index(k) * index(out.rows) + index(r);
      out.values[at] = static_cast<double>(arith::fp32_from_bf16(view.at(r, k)));
    }
  }
  const Deviation* d = at(point);
  if (d == nullptr) {
    engine_.pack(view, side, out.packed);
    return;
  }
  for (double& x : out.values) {
    if (d->kind == Kind::scaled_first) {
      x = to_bf16(static_cast<double>(arith::mul(static_cast<float>(x), scalars_.softmax_scale)));
    } else {
      x = deviated_cast(*d, x, 0);
    }
  }
  round_operand(side, out);
}

void SiteNumbers::pack(const Word* data, std::ptrdiff_t row_stride, std::ptrdiff_t k_stride, int rows, int k,
                       mma::Side side, Operand& out) const {
  out.rows = rows;
  out.k = (k + kStep - 1) / kStep * kStep;
  out.values.assign(index(out.rows) * index(out.k), 0.0);
  const bool left = side == mma::Side::left;
  for (int r = 0; r < rows; ++r) {
    for (int kk = 0; kk < k; ++kk) {
      const std::size_t at = left ? index(r) * index(out.k) + index(kk) : index(kk) * index(rows) + index(r);
      out.values[at] = data[r * row_stride + kk * k_stride];
    }
  }
  round_operand(side, out);
}

namespace {

/// The accumulator of a product's site.
profile::Point product_point(profile::Site site) {
  using profile::Point;
  using profile::Site;
  switch (site) {
    case Site::score_mma:
      return Point::score;
    case Site::pv_mma:
      return Point::pv;
    case Site::score_mma_backward:
      return Point::score_backward;
    case Site::dp_mma:
      return Point::dp;
    case Site::dv_mma:
      return Point::dv;
    case Site::dk_mma:
      return Point::dk;
    default:
      return Point::dq_part;
  }
}

}  // namespace

void SiteNumbers::multiply(Site site, const Operand& left, const Operand& right, mma::Start start, Value* c,
                           std::ptrdiff_t ldc) const {
  const Deviation* d = at(product_point(site));
  if (d == nullptr) {
    multiply_block(site, left, right, start, c, ldc);
  } else {
    multiply_otherwise(*d, site, left, right, start, c, ldc);
  }
}

SiteNumbers::Operand SiteNumbers::part_of_k(const Operand& whole, mma::Side side, int begin, int count,
                                            bool descending) const {
  Operand part;
  part.rows = whole.rows;
  part.k = count;
  part.values.resize(index(whole.rows) * index(count));
  const bool left = side == mma::Side::left;
  for (int k = 0; k < count; ++k) {
    const int step = k / kStep;
    const int from = begin + (descending ? count / kStep - 1 - step : step) * kStep + k % kStep;
    for (int r = 0; r < whole.rows; ++r) {
      const std::size_t to =
          left ? index(r) * index(count) + index(k) : index(k) * index(whole.rows) + index(r);
      const std::size_t at =
          left ? index(r) * index(whole.k) + index(from) : index(from) * index(whole.rows) + index(r);
      part.values[to] = whole.values[at];
    }
  }
  round_operand(side, part);
  return part;
}

void SiteNumbers::multiply_otherwise(const Deviation& d, Site site, const Operand& left, const Operand& right,
                                     mma::Start start, Value* c, std::ptrdiff_t ldc) const {
  const int rows = left.rows;
  const int columns = right.rows;
  const auto part = [&](int begin, int count, bool descending, mma::Start from, Value* to,
                        std::ptrdiff_t stride) {
    multiply_block(site, part_of_k(left, mma::Side::left, begin, count, descending),
                   part_of_k(right, mma::Side::right, begin, count, descending), from, to, stride);
  };
  std::vector<Value> apart;
  const auto add_apart = [&](bool fused) {
    for (int m = 0; m < rows; ++m) {
      for (int n = 0; n < columns; ++n) {
        Value& sum = c[m * ldc + n];
        const Value term = apart[index(m) * index(columns) + index(n)];
        if (start == mma::Start::zero) {
          sum = term;
        } else if (fused) {
          const ExactSum exact_value = exact_sum(sum, term);
          sum = deviated_operation(d, exact_value.high, exact_value.low, flushes_[backward(site) ? 1 : 0]);
        } else {
          sum = add(site, sum, term);
        }
      }
    }
  };
  switch (d.kind) {
    case Kind::added_apart:
    case Kind::added_apart_fused:
      apart.resize(index(rows) * index(columns));
      multiply_block(site, left, right, mma::Start::zero, apart.data(), columns);
      add_apart(d.kind == Kind::added_apart_fused);
      return;
    case Kind::halves: {
      const int half = (left.k / kStep + 1) / 2 * kStep;
      part(0, half, false, start, c, ldc);
      if (half == left.k) return;
      apart.resize(index(rows) * index(columns));
      part(half, left.k - half, false, mma::Start::zero, apart.data(), columns);
      start = mma::Start::accumulate;
      add_apart(false);
      return;
    }
    case Kind::k_descending:
      part(0, left.k, true, start, c, ldc);
      return;
    default:
      break;
  }
  multiply_block(site, left, right, start, c, ldc);
  for (int m = 0; m < rows; ++m) {
    Value* row = c + m * ldc;
    for (int n = 0; n < columns; ++n) {
      row[n] = d.kind == Kind::scaled_first ? mul(site, row[n], static_cast<double>(scalars_.softmax_scale))
                                            : deviated_value(d, row[n]);
    }
  }
}

namespace {

/// A tile cast for the FP8 tensor core, from the BF16 numbers nearest to it.
mma::Fp8Operand fp8_operand(mma::Side side, const SiteNumbers::Operand& operand) {
  std::vector<std::uint16_t> words(operand.values.size());
  std::transform(operand.values.begin(), operand.values.end(), words.begin(),
                 [](double x) { return arith::bf16_from_fp32(to_fp32(x)); });
  const bool left = side == mma::Side::left;
  mma::Fp8Operand narrow;
  mma::pack_fp8(
      mma::whole(words.data(), left ? operand.k : 1, left ? 1 : operand.rows, operand.rows, operand.k),
      narrow);
  return narrow;
}

}  // namespace

void SiteNumbers::multiply_block(Site site, const Operand& left, const Operand& right, mma::Start start,
                                 Value* c, std::ptrdiff_t ldc) const {
  const int rows = left.rows;
  const int columns = right.rows;
  if (start == mma::Start::zero) {
    for (int m = 0; m < rows; ++m) std::fill(c + m * ldc, c + m * ldc + columns, 0.0);
  }
  const WideProduct wide{left.values.data(), right.values.data(), rows, left.k, columns, c, ldc};
  if (exact(site)) return multiply_exactly(wide);
  const bool fp8 = low_.fp8_product(site);
  if (fp8 || (left.narrow && right.narrow)) {
    std::vector<float> narrow_c(index(rows) * index(columns));
    for (int m = 0; m < rows; ++m) {
      for (int n = 0; n < columns; ++n)
        narrow_c[index(m) * index(columns) + index(n)] = to_fp32(c[m * ldc + n]);
    }
    if (fp8) {
      mma::multiply_fp8(fp8_operand(mma::Side::left, left), fp8_operand(mma::Side::right, right), start,
                        narrow_c.data(), columns);
    } else {
      engine_.multiply(left.packed, right.packed, start, narrow_c.data(), columns, rule_);
    }
    for (int m = 0; m < rows; ++m) {
      for (int n = 0; n < columns; ++n)
        c[m * ldc + n] = static_cast<double>(narrow_c[index(m) * index(columns) + index(n)]);
    }
    return;
  }
  for (int m = 0; m < rows; ++m) {  // an exact site before may have left more than an accumulator holds
    for (int n = 0; n < columns; ++n) c[m * ldc + n] = static_cast<double>(to_fp32(c[m * ldc + n]));
  }
  multiply_by_rule(wide, rule_);
}

// --- forward

void SiteNumbers::softcap(Value* x, int n) const {
  for (int j = 0; j < n; ++j) {
    x[j] = value(Point::softcap, tanh(Site::softcap, mul(Site::softcap, x[j], softcap_scale_[0])));
  }
}

SiteNumbers::Value SiteNumbers::row_max(const Value* x, int n, Value start) const {
  // As the chip's maximum: a NaN gives the other operand, and a subnormal fp32 counts as zero unless its site
  // is exact.
  Value m = start;
  for (int j = 0; j < n; ++j) {
    const Value flushed = fits(x[j]) ? static_cast<double>(arith::ftz::in(static_cast<float>(x[j]))) : x[j];
    if (std::isnan(m) || flushed > m || (flushed == m && std::signbit(m))) m = flushed;
  }
  const Deviation* d = at(Point::row_max);
  if (d == nullptr) return m;
  if (d->kind == Kind::kept_below) return (m - start) * c_[0] <= d->parameter ? start : m;
  return deviated_value(*d, m);
}

SiteNumbers::Value SiteNumbers::scaled_max(Value m) const {
  return mul(Site::row_max_scale, Point::scaled_max, m, c_[0]);
}

SiteNumbers::Value SiteNumbers::rescale_factor(Value previous, Value reference) const {
  constexpr Site kSite = Site::rescale;
  if (deviates(Point::alpha, Kind::fused)) {
    return ex2(kSite, fma(kSite, previous, c_[0], -mul(kSite, reference, c_[0])));
  }
  return function(kSite, Point::alpha, mul(kSite, add(kSite, previous, -reference), c_[0]));
}

void SiteNumbers::forward_exponentials(const Value* x, Value* p, int n, Value scaled_max) const {
  for (int j = 0; j < n; ++j) {
    p[j] = function(Site::exp2, Point::p, fma(Site::score_scale, Point::exponent, x[j], c_[0], -scaled_max));
  }
}

void SiteNumbers::add_to_row_sums(const Value* p, int n, bool first, Value alpha, Sums& sums) const {
  constexpr Site kSite = Site::row_sum;
  const bool narrowed = at(Point::p_in_sum) != nullptr;
  const auto term = [&](int j) { return narrowed ? value(Point::p_in_sum, p[j]) : p[j]; };
  for (int q = 0; q < 4; ++q) {
    double l = first ? term(2 * q) : fma(kSite, Point::lane_sum, alpha, sums.lane[q], term(2 * q));
    l = add(kSite, Point::lane_sum, l, term(2 * q + 1));
    for (int v = 8; v < n; v += 8) {
      l = add(kSite, Point::lane_sum, l, term(v + 2 * q));
      l = add(kSite, Point::lane_sum, l, term(v + 2 * q + 1));
    }
    sums.lane[q] = value(Point::row_sum, l);
  }
}

void SiteNumbers::cast_p(const Value* p, Word* words, int n) const {
  cast_probabilities(Site::p_cast, Point::p_word, low_.p, p, words, n);
}

void SiteNumbers::rescale_output(Value* o, int n, Value alpha) const {
  if (deviates(Point::rescaled_o, Kind::dropped)) return;
  if (deviates(Point::pv, Kind::added_apart_fused)) {
    for (int j = 0; j < n; ++j) o[j] *= alpha;  // exact in fp64; the addition rounds
    return;
  }
  scale(Site::rescale, Point::rescaled_o, o, n, alpha);
}

SiteNumbers::Value SiteNumbers::total(const Sums& sums) const {
  constexpr Site kSite = Site::row_sum;
  const auto& l = sums.lane;
  const bool beside =
      deviates(Point::total, Kind::other_order) || deviates(Point::lane_sum, Kind::other_order);
  const double sum = beside ? add(kSite, Point::lane_sum, add(kSite, Point::lane_sum, l[0], l[1]),
                                  add(kSite, Point::lane_sum, l[2], l[3]))
                            : add(kSite, Point::lane_sum, add(kSite, Point::lane_sum, l[0], l[2]),
                                  add(kSite, Point::lane_sum, l[1], l[3]));
  return value(Point::total, sum);
}

SiteNumbers::Value SiteNumbers::inverse(Value total) const {
  if (exact(Site::rcp)) return 1.0 / total;
  if (deviates(Point::inverse, Kind::by_division)) return total;
  if (deviates(Point::inverse, Kind::correctly_rounded)) return rounded(1.0 / total);
  return value(Point::inverse, apply(arith::mufu::rcp, total));
}

SiteNumbers::Value SiteNumbers::log_sum_exp(Value m, Value total) const {
  constexpr Site kSite = Site::lse;
  if (exact(kSite)) return m * c_[0] * std::numbers::ln2 + std::log(total);
  const auto ln2 = static_cast<double>(constant(Point::ln2, kLn2));
  const Deviation* d = at(Point::lse);
  const Kind kind = d == nullptr ? Kind::narrowed : d->kind;
  const double c_ln2 =
      kind == Kind::scaled_first ? static_cast<double>(scalars_.softmax_scale) : mul(kSite, c_[0], ln2);
  const double log_total = deviates(Point::log_total, Kind::correctly_rounded)
                               ? rounded(std::log2(total))
                               : value(Point::log_total, apply(arith::mufu::lg2, total));
  if (kind == Kind::unfused) return add(kSite, mul(kSite, c_ln2, m), mul(kSite, log_total, ln2));
  if (kind == Kind::other_fused) return fma(kSite, log_total, ln2, mul(kSite, c_ln2, m));
  return fma(kSite, Point::lse, c_ln2, m, mul(kSite, log_total, ln2));
}

void SiteNumbers::normalise(Value* o, int n, Value inverse) const {
  if (deviates(Point::inverse, Kind::by_division)) {
    for (int j = 0; j < n; ++j) o[j] = inverse == 0 ? mul(Site::rcp, o[j], 0.0) : rounded(o[j] / inverse);
    return;
  }
  scale(Site::rcp, Point::normalised_o, o, n, inverse);
}

void SiteNumbers::cast_output(const Value* o, Word* words, int n) const {
  cast(Point::out_word, o, words, n);
}

// --- backward

SiteNumbers::Value SiteNumbers::dpsum(const std::uint16_t* dout, const Word* out, const Value* out_uncast,
                                      int columns, const profile::BackwardTiles& tiles) const {
  constexpr Site kSite = Site::dpsum;
  const bool uncast = exact(Site::dpsum_o_cast);
  const auto x = [&](int d) {
    if (d >= columns) return 0.0;
    return value(Point::dout_in_dpsum, static_cast<double>(arith::fp32_from_bf16(dout[d])));
  };
  const auto o = [&](int d) {
    if (d >= columns) return 0.0;
    return uncast ? out_uncast[d] : value(Point::o_in_dpsum, to_bf16(out[d]));
  };
  if (exact(kSite)) {
    double sum = 0;
    for (int d = 0; d < columns; ++d) sum += x(d) * o(d);
    return sum;
  }
  const bool rounds_products =
      at(Point::dpsum_product) != nullptr || deviates(Point::dpsum_sum, Kind::unfused);
  const auto product = [&](int d) { return value(Point::dpsum_product, mul(kSite, x(d), o(d))); };
  const auto add_product = [&](double sum, int d) {
    if (rounds_products) return add(kSite, Point::dpsum_sum, sum, product(d));
    return fma(kSite, Point::dpsum_sum, x(d), o(d), sum);
  };
  const int threads = tiles.dpsum_threads;
  // Which of a thread's first two products starts the sum, rounded on its own.
  const bool in_order = rounds_products || deviates(Point::dpsum_sum, Kind::other_fused);
  std::array<double, kStep> partial{};
  for (int t = 0; t < threads; ++t) {
    const int first = 8 * t;
    double a = product(in_order ? first : first + 1);
    a = add_product(a, in_order ? first + 1 : first);
    for (int base = first; base < tiles.head_dim; base += 8 * threads) {
      for (int d = base == first ? first + 2 : base; d < base + 8; ++d) a = add_product(a, d);
    }
    partial[index(t)] = a;
  }
  if (deviates(Point::dpsum_sum, Kind::other_order)) {
    for (int t = 1; t < threads; ++t) {
      partial[0] = add(kSite, Point::dpsum_sum, partial[0], partial[index(t)]);
    }
    return value(Point::dpsum, partial[0]);
  }
  for (int offset = threads / 2; offset > 0; offset /= 2) {
    for (int t = 0; t < offset; ++t) {
      partial[index(t)] = add(kSite, Point::dpsum_sum, partial[index(t)], partial[index(t + offset)]);
    }
  }
  return value(Point::dpsum, partial[0]);
}

SiteNumbers::Value SiteNumbers::lse_log2(Value lse) const {
  if (exact(Site::lse_log2)) return lse * std::numbers::log2e;
  return mul(Site::lse_log2, Point::lse_log2, value(Point::lse_read, lse),
             static_cast<double>(constant(Point::log2e, kLog2E)));
}

void SiteNumbers::softcap_with_derivative(Value* s, Value* h, int n) const {
  for (int j = 0; j < n; ++j) {
    const double x = mul(Site::softcap_backward, s[j], softcap_scale_[1]);
    const double t = value(Point::softcap_backward, tanh(Site::softcap_backward, x));
    s[j] = t;
    if (exact(Site::softcap_backward)) {
      const double cosh = std::cosh(x);  // 1 - t*t would be all cancellation where the cap is reached
      h[j] = 1.0 / (cosh * cosh);
    } else if (deviates(Point::softcap_backward, Kind::unfused)) {
      h[j] = add(Site::softcap_backward, mul(Site::softcap_backward, -t, t), 1.0);
    } else {
      h[j] = fma(Site::softcap_backward, -t, t, 1.0);
    }
  }
}

void SiteNumbers::backward_exponentials(const Value* s, Value* p, int n, Value lse_log2) const {
  constexpr Site kSite = Site::p_backward;
  const double e = value(Point::e_read, lse_log2);
  for (int j = 0; j < n; ++j) {
    p[j] = function(kSite, Point::p_backward, fma(kSite, Point::exponent_backward, s[j], c_[1], -e));
  }
}

void SiteNumbers::score_gradient(const Value* p, const Value* dp, Value* ds, int n, Value dpsum) const {
  const Deviation* d = at(Point::ds);
  const Kind kind = d == nullptr ? Kind::narrowed : d->kind;
  const double subtracted = value(Point::d_read, dpsum);
  for (int j = 0; j < n; ++j) {
    const double factor = value(Point::p_in_ds, p[j]);
    if (kind == Kind::fused) {
      ds[j] = fma(Site::ds_mul, factor, dp[j], -mul(Site::ds_mul, factor, subtracted));
    } else if (kind == Kind::unfused) {
      ds[j] = add(Site::ds_mul, mul(Site::ds_mul, factor, dp[j]), -mul(Site::ds_mul, factor, subtracted));
    } else {
      ds[j] =
          mul(Site::ds_mul, Point::ds, factor, add(Site::ds_sub, Point::ds_difference, dp[j], -subtracted));
    }
    if (kind == Kind::scaled_first && !softcapped()) {
      ds[j] = mul(Site::ds_mul, ds[j], static_cast<double>(scalars_.softmax_scale));
    }
  }
}

void SiteNumbers::apply_derivative(Value* ds, const Value* h, int n) const {
  for (int j = 0; j < n; ++j) {
    ds[j] = mul(Site::ds_mul, ds[j], h[j]);
    if (deviates(Point::ds, Kind::scaled_first)) {
      ds[j] = mul(Site::ds_mul, ds[j], static_cast<double>(scalars_.softmax_scale));
    }
  }
}

void SiteNumbers::cast_p_backward(const Value* p, Word* words, int n) const {
  cast_probabilities(Site::pb_cast, Point::pb_word, low_.p_backward, p, words, n);
}

bool SiteNumbers::casts_ds_apart() const {
  return at(Point::ds_word_in_dq) != nullptr || at(Point::ds_word_in_dk) != nullptr;
}

void SiteNumbers::cast_ds(const Value* ds, Word* words, int n) const {
  cast(at(Point::ds_word_in_dq) != nullptr ? Point::ds_word_in_dq : Point::ds_word, ds, words, n);
}

void SiteNumbers::cast_ds_for_dk(const Value* ds, Word* words, int n) const {
  cast(at(Point::ds_word_in_dk) != nullptr ? Point::ds_word_in_dk : Point::ds_word, ds, words, n);
}

namespace {

void reduce(double* memory, const double* part, std::ptrdiff_t n, bool exact, bool flushes,
            const profile::Deviation* deviation) {
  if (deviation != nullptr && deviation->kind == profile::Kind::flushed) flushes = true;
  for (std::ptrdiff_t j = 0; j < n; ++j) {
    if (exact) {
      memory[j] += part[j];
      continue;
    }
    const float m = to_fp32(memory[j]);
    const float p = to_fp32(part[j]);
    if (deviation != nullptr && rounds_otherwise(*deviation)) {
      const ExactSum sum = exact_sum(static_cast<double>(m), static_cast<double>(p));
      memory[j] = deviated_operation(*deviation, sum.high, sum.low, flushes);
      continue;
    }
    memory[j] = static_cast<double>(flushes ? arith::global_reduce_add(m, p) : arith::bulk_reduce_add(m, p));
    if (deviation != nullptr) memory[j] = deviated_value(*deviation, memory[j]);
  }
}

}  // namespace

void SiteNumbers::reduce_dq(Value* memory, const Value* part, std::ptrdiff_t n, bool by_atomics) const {
  reduce(memory, part, n, exact(Site::dq_reduce), by_atomics, at(Point::dq_accum));
}

void SiteNumbers::reduce_dkv(Value* memory, const Value* part, std::ptrdiff_t n) const {
  reduce(memory, part, n, exact(Site::dkv_reduce), false, at(Point::dkv_accum));
}

void SiteNumbers::scale_dq(Value* x, int n) const {
  if (!scales_dq_) return;
  if (deviates(Point::scaled_dq, Kind::cast_before_scaled)) std::transform(x, x + n, x, to_bf16);
  const float factor = constant(Point::scale_dq, scalars_.softmax_scale);
  scale(Site::dq_cast, Point::scaled_dq, x, n,
        exact(Site::dq_cast) ? exact_scale_ : static_cast<double>(factor));
}

void SiteNumbers::scale_dk(Value* x, int n) const {
  if (!scales_dk_) return;
  if (deviates(Point::scaled_dk, Kind::cast_before_scaled)) std::transform(x, x + n, x, to_bf16);
  const float factor = constant(Point::scale_dk, scalars_.softmax_scale);
  scale(Site::dk_cast, Point::scaled_dk, x, n,
        exact(Site::dk_cast) ? exact_scale_ : static_cast<double>(factor));
}

void SiteNumbers::postprocess_dkv(Value* x, int n) const {
  if (!exact(Site::dkv_reduce)) scale(Site::dkv_reduce, x, x, n, 1.0);
}

void SiteNumbers::cast_dq(const Value* x, Word* words, int n) const {
  cast(Point::dq_word, x, words, n);
}
void SiteNumbers::cast_dk(const Value* x, Word* words, int n) const {
  cast(Point::dk_word, x, words, n);
}
void SiteNumbers::cast_dv(const Value* x, Word* words, int n) const {
  cast(Point::dv_word, x, words, n);
}

}  // namespace bitattn::kernels
