#include "emu/kernels/site_numbers.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/mufu.hpp"
#include "emu/arith/reduce_add.hpp"

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

/// Exponent of a term as the tensor core takes it: not below that of the smallest normal number.
int exponent(double x) {
  return std::max(-126, std::ilogb(x));
}

/// The tensor core's step (docs/spec/hopper-arithmetic.md 1) for operands wider than BF16: the same
/// alignment, truncation and last rounding. Only for operands that no chip would take; a product is formed in
/// fp64.
double wide_step(const double* a, const double* b, std::ptrdiff_t b_stride, double c,
                 const arith::TensorCoreRule& rule) {
  double plain = c;
  int largest = rule.exponent_floor;
  if (c != 0) largest = std::max(largest, exponent(c));
  for (int i = 0; i < kStep; ++i) {
    const double y = b[i * b_stride];
    plain += a[i] * y;
    if (a[i] != 0 && y != 0) largest = std::max(largest, exponent(a[i]) + exponent(y));
  }
  if (!std::isfinite(plain)) return static_cast<double>(to_fp32(plain));
  const int shift = rule.aligned_fraction_bits - largest;
  auto sum = static_cast<std::int64_t>(std::trunc(std::ldexp(c, shift)));
  for (int i = 0; i < kStep; ++i) {
    sum += static_cast<std::int64_t>(std::trunc(std::ldexp(a[i] * b[i * b_stride], shift)));
  }
  return static_cast<double>(arith::from_bits(arith::detail::round_and_pack(sum, largest, rule)));
}

}  // namespace

SiteNumbers::SiteNumbers(const profile::Profile& profile, const profile::Call& call,
                         const Execution& execution)
    : engine_(execution.engine != nullptr ? *execution.engine : mma::default_engine()),
      rule_(tensor_core_rule(profile.arithmetic)),
      exact_(profile.exact),
      scalars_(profile::flash3_scalars(call)),
      exact_scale_(call.softmax_scale),
      c_(static_cast<double>(scalars_.scale_log2)),
      softcap_scale_{static_cast<double>(scalars_.softcap_scale),
                     static_cast<double>(scalars_.softcap_scale)} {
  if (exact(Site::score_scale))
    c_ = (call.softcap > 0 ? call.softcap : call.softmax_scale) * std::numbers::log2e;
  if (call.softcap > 0 && exact(Site::softcap)) softcap_scale_[0] = call.softmax_scale / call.softcap;
  if (call.softcap > 0 && exact(Site::softcap_backward))
    softcap_scale_[1] = call.softmax_scale / call.softcap;
}

// --- operations of a site

double SiteNumbers::add(Site site, double a, double b) const {
  if (exact(site)) return a + b;
  if (fits(a) && fits(b))
    return static_cast<double>(arith::ftz::add(static_cast<float>(a), static_cast<float>(b)));
  return rounded(a + b);
}

double SiteNumbers::mul(Site site, double a, double b) const {
  if (exact(site)) return a * b;
  if (fits(a) && fits(b))
    return static_cast<double>(arith::ftz::mul(static_cast<float>(a), static_cast<float>(b)));
  return rounded(a * b);
}

double SiteNumbers::fma(Site site, double a, double b, double c) const {
  if (exact(site)) return std::fma(a, b, c);
  if (fits(a) && fits(b) && fits(c)) {
    return static_cast<double>(
        arith::ftz::fma(static_cast<float>(a), static_cast<float>(b), static_cast<float>(c)));
  }
  return rounded(std::fma(a, b, c));
}

double SiteNumbers::ex2(Site site, double x) const {
  return exact(site) ? std::exp2(x) : apply(arith::mufu::ex2, x);
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

double SiteNumbers::output_read_by_dpsum(double y) {
  return to_bf16(y);
}

double SiteNumbers::tanh(Site site, double x) const {
  return exact(site) ? std::tanh(x) : apply(arith::mufu::tanh, x);
}

void SiteNumbers::cast(Site site, const Value* x, Word* words, int n) const {
  if (exact(site)) {
    std::copy(x, x + n, words);
  } else {
    std::transform(x, x + n, words, to_bf16);
  }
}

void SiteNumbers::scale(Site site, const Value* x, Value* out, int n, double factor) const {
  for (int j = 0; j < n; ++j) out[j] = mul(site, x[j], factor);
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

void SiteNumbers::pack(const mma::MatrixView& view, mma::Side side, Operand& out) const {
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
  engine_.pack(view, side, out.packed);
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

void SiteNumbers::multiply(Site site, const Operand& left, const Operand& right, mma::Start start, Value* c,
                           std::ptrdiff_t ldc) const {
  const int rows = left.rows;
  const int columns = right.rows;
  if (start == mma::Start::zero) {
    for (int m = 0; m < rows; ++m) std::fill(c + m * ldc, c + m * ldc + columns, 0.0);
  }
  if (exact(site)) {
    for (int m = 0; m < rows; ++m) {
      const double* a = left.values.data() + index(m) * index(left.k);
      double* row = c + m * ldc;
      for (int k = 0; k < left.k; ++k) {
        const double factor = a[k];
        const double* b = right.values.data() + index(k) * index(columns);
        for (int n = 0; n < columns; ++n) row[n] += factor * b[n];
      }
    }
    return;
  }
  std::vector<float> narrow_c(index(rows) * index(columns));
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < columns; ++n)
      narrow_c[index(m) * index(columns) + index(n)] = to_fp32(c[m * ldc + n]);
  }
  if (left.narrow && right.narrow) {
    engine_.multiply(left.packed, right.packed, start, narrow_c.data(), columns, rule_);
    for (int m = 0; m < rows; ++m) {
      for (int n = 0; n < columns; ++n)
        c[m * ldc + n] = static_cast<double>(narrow_c[index(m) * index(columns) + index(n)]);
    }
    return;
  }
  for (int m = 0; m < rows; ++m) {
    const double* a = left.values.data() + index(m) * index(left.k);
    for (int n = 0; n < columns; ++n) {
      auto sum = static_cast<double>(narrow_c[index(m) * index(columns) + index(n)]);
      for (int k = 0; k < left.k; k += kStep) {
        sum =
            wide_step(a + k, right.values.data() + index(k) * index(columns) + index(n), columns, sum, rule_);
      }
      c[m * ldc + n] = sum;
    }
  }
}

// --- forward

void SiteNumbers::softcap(Value* x, int n) const {
  for (int j = 0; j < n; ++j) x[j] = tanh(Site::softcap, mul(Site::softcap, x[j], softcap_scale_[0]));
}

SiteNumbers::Value SiteNumbers::row_max(const Value* x, int n, Value start) const {
  // As the chip's maximum: a NaN gives the other operand, and a subnormal fp32 counts as zero unless its site
  // is exact.
  Value m = start;
  for (int j = 0; j < n; ++j) {
    const Value flushed = fits(x[j]) ? static_cast<double>(arith::ftz::in(static_cast<float>(x[j]))) : x[j];
    if (std::isnan(m) || flushed > m || (flushed == m && std::signbit(m))) m = flushed;
  }
  return m;
}

SiteNumbers::Value SiteNumbers::scaled_max(Value m) const {
  return mul(Site::row_max_scale, m, c_);
}

SiteNumbers::Value SiteNumbers::rescale_factor(Value previous, Value reference) const {
  return ex2(Site::rescale, mul(Site::rescale, add(Site::rescale, previous, -reference), c_));
}

void SiteNumbers::exponentials(Site argument, Site function, const Value* x, Value* p, int n,
                               double reference) const {
  for (int j = 0; j < n; ++j) p[j] = ex2(function, fma(argument, x[j], c_, -reference));
}

void SiteNumbers::forward_exponentials(const Value* x, Value* p, int n, Value scaled_max) const {
  exponentials(Site::score_scale, Site::exp2, x, p, n, scaled_max);
}

void SiteNumbers::add_to_row_sums(const Value* p, int n, bool first, Value alpha, Sums& sums) const {
  for (int q = 0; q < 4; ++q) {
    double l = first ? p[2 * q] : fma(Site::row_sum, alpha, sums.lane[q], p[2 * q]);
    l = add(Site::row_sum, l, p[2 * q + 1]);
    for (int v = 8; v < n; v += 8) {
      l = add(Site::row_sum, l, p[v + 2 * q]);
      l = add(Site::row_sum, l, p[v + 2 * q + 1]);
    }
    sums.lane[q] = l;
  }
}

void SiteNumbers::cast_p(const Value* p, Word* words, int n) const {
  cast(Site::p_cast, p, words, n);
}

void SiteNumbers::rescale_output(Value* o, int n, Value alpha) const {
  scale(Site::rescale, o, o, n, alpha);
}

SiteNumbers::Value SiteNumbers::total(const Sums& sums) const {
  const auto& l = sums.lane;
  return add(Site::row_sum, add(Site::row_sum, l[0], l[2]), add(Site::row_sum, l[1], l[3]));
}

SiteNumbers::Value SiteNumbers::inverse(Value total) const {
  return exact(Site::rcp) ? 1.0 / total : apply(arith::mufu::rcp, total);
}

SiteNumbers::Value SiteNumbers::log_sum_exp(Value m, Value total) const {
  if (exact(Site::lse)) return m * c_ * std::numbers::ln2 + std::log(total);
  const double c_ln2 = mul(Site::lse, c_, static_cast<double>(kLn2));
  const double log_total = apply(arith::mufu::lg2, total);
  return fma(Site::lse, c_ln2, m, mul(Site::lse, log_total, static_cast<double>(kLn2)));
}

void SiteNumbers::normalise(Value* o, int n, Value inverse) const {
  scale(Site::rcp, o, o, n, inverse);
}

void SiteNumbers::cast_output(const Value* o, Word* words, int n) const {
  cast(Site::o_cast, o, words, n);
}

// --- backward

SiteNumbers::Value SiteNumbers::dpsum(const std::uint16_t* dout, const Word* out, const Value* out_uncast,
                                      int columns, const profile::BackwardTiles& tiles) const {
  const bool uncast = exact(Site::dpsum_o_cast);
  const auto x = [&](int d) {
    return d < columns ? static_cast<double>(arith::fp32_from_bf16(dout[d])) : 0.0;
  };
  const auto o = [&](int d) { return d >= columns ? 0.0 : uncast ? out_uncast[d] : to_bf16(out[d]); };
  if (exact(Site::dpsum)) {
    double sum = 0;
    for (int d = 0; d < columns; ++d) sum += x(d) * o(d);
    return sum;
  }
  const int threads = tiles.dpsum_threads;
  std::array<double, kStep> partial{};
  for (int t = 0; t < threads; ++t) {
    const int first = 8 * t;
    double a = mul(Site::dpsum, x(first + 1), o(first + 1));
    a = fma(Site::dpsum, x(first), o(first), a);
    for (int base = first; base < tiles.head_dim; base += 8 * threads) {
      for (int d = base == first ? first + 2 : base; d < base + 8; ++d) a = fma(Site::dpsum, x(d), o(d), a);
    }
    partial[index(t)] = a;
  }
  for (int offset = threads / 2; offset > 0; offset /= 2) {
    for (int t = 0; t < offset; ++t)
      partial[index(t)] = add(Site::dpsum, partial[index(t)], partial[index(t + offset)]);
  }
  return partial[0];
}

SiteNumbers::Value SiteNumbers::lse_log2(Value lse) const {
  if (exact(Site::lse_log2)) return lse * std::numbers::log2e;
  return mul(Site::lse_log2, lse, static_cast<double>(kLog2E));
}

void SiteNumbers::softcap_with_derivative(Value* s, Value* h, int n) const {
  for (int j = 0; j < n; ++j) {
    const double x = mul(Site::softcap_backward, s[j], softcap_scale_[1]);
    const double t = tanh(Site::softcap_backward, x);
    s[j] = t;
    if (exact(Site::softcap_backward)) {
      const double cosh = std::cosh(x);  // 1 - t*t would be all cancellation where the cap is reached
      h[j] = 1.0 / (cosh * cosh);
    } else {
      h[j] = fma(Site::softcap_backward, -t, t, 1.0);
    }
  }
}

void SiteNumbers::backward_exponentials(const Value* s, Value* p, int n, Value lse_log2) const {
  exponentials(Site::p_backward, Site::p_backward, s, p, n, lse_log2);
}

void SiteNumbers::score_gradient(const Value* p, const Value* dp, Value* ds, int n, Value dpsum) const {
  for (int j = 0; j < n; ++j) ds[j] = mul(Site::ds_mul, p[j], add(Site::ds_sub, dp[j], -dpsum));
}

void SiteNumbers::apply_derivative(Value* ds, const Value* h, int n) const {
  for (int j = 0; j < n; ++j) ds[j] = mul(Site::ds_mul, ds[j], h[j]);
}

void SiteNumbers::cast_p_backward(const Value* p, Word* words, int n) const {
  cast(Site::pb_cast, p, words, n);
}

void SiteNumbers::cast_ds(const Value* ds, Word* words, int n) const {
  cast(Site::ds_cast, ds, words, n);
}

namespace {

void reduce(double* memory, const double* part, std::ptrdiff_t n, bool exact, bool flushes) {
  for (std::ptrdiff_t j = 0; j < n; ++j) {
    if (exact) {
      memory[j] += part[j];
    } else {
      const float m = to_fp32(memory[j]);
      const float p = to_fp32(part[j]);
      memory[j] =
          static_cast<double>(flushes ? arith::global_reduce_add(m, p) : arith::bulk_reduce_add(m, p));
    }
  }
}

}  // namespace

void SiteNumbers::reduce_dq(Value* memory, const Value* part, std::ptrdiff_t n, bool by_atomics) const {
  reduce(memory, part, n, exact(Site::dq_reduce), by_atomics);
}

void SiteNumbers::reduce_dkv(Value* memory, const Value* part, std::ptrdiff_t n) const {
  reduce(memory, part, n, exact(Site::dkv_reduce), false);
}

void SiteNumbers::scale_dq(Value* x, int n) const {
  scale(Site::dq_cast, x, x, n,
        exact(Site::dq_cast) ? exact_scale_ : static_cast<double>(scalars_.softmax_scale));
}

void SiteNumbers::scale_dk(Value* x, int n) const {
  scale(Site::dk_cast, x, x, n,
        exact(Site::dk_cast) ? exact_scale_ : static_cast<double>(scalars_.softmax_scale));
}

void SiteNumbers::postprocess_dkv(Value* x, int n) const {
  if (!exact(Site::dkv_reduce)) scale(Site::dkv_reduce, x, x, n, 1.0);
}

void SiteNumbers::cast_dq(const Value* x, Word* words, int n) const {
  cast(Site::dq_cast, x, words, n);
}
void SiteNumbers::cast_dk(const Value* x, Word* words, int n) const {
  cast(Site::dk_cast, x, words, n);
}
void SiteNumbers::cast_dv(const Value* x, Word* words, int n) const {
  cast(Site::dv_cast, x, words, n);
}

}  // namespace bitattn::kernels
