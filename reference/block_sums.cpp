#include "reference/block_sums.hpp"

#include <gmp.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "reference/bound_arithmetic.hpp"

namespace bitattn::reference {
namespace {

constexpr std::int32_t kNothing = std::numeric_limits<std::int32_t>::min();
constexpr std::uint32_t kSliceMask = (1U << kSliceBits) - 1U;

/// x < 2^ceiling(x) for a normal double x > 0.
std::int32_t ceiling_exponent(double x) {
  return static_cast<std::int32_t>(std::bit_cast<std::uint64_t>(x) >> 52U & 0x7ffU) - 1022;
}

std::uint64_t add_with_carry(std::uint64_t a, std::uint64_t b, std::uint64_t& carry) {
  const U128 sum = static_cast<U128>(a) + b + carry;
  carry = high_half(sum);
  return low_half(sum);
}

/// register := floor(register / 2^shift).
template <class Register>
void shift_register(Register& x, std::int32_t shift) {
  if (shift == 0) return;
  const std::uint64_t sign = x[2] >> 63U != 0 ? ~std::uint64_t{0} : 0U;
  while (shift >= 64) {
    x = {x[1], x[2], sign};
    shift -= 64;
    if (shift >= 192) shift = 191;
  }
  if (shift == 0) return;
  const auto s = static_cast<unsigned>(shift);
  x = {x[0] >> s | x[1] << (64 - s), x[1] >> s | x[2] << (64 - s), x[2] >> s | sign << (64 - s)};
}

}  // namespace

void OuterLeft::clear_row(std::size_t r, std::size_t begin, std::size_t end) {
  rows_[r] = Row{};
  for (int l = 0; l < kOuterSlices; ++l) {
    double* const slice = data_.data() + static_cast<std::size_t>(l) * kChunk * kBlockRows + r;
    for (std::size_t k = begin; k < end; ++k) slice[k * kBlockRows] = 0;
  }
}

void OuterLeft::set_row(std::size_t r, std::span<const Wide> a, std::span<const ErrorTerm> errors,
                        const std::int32_t* exponents, std::size_t begin, std::size_t end) {
  std::int32_t top = kNothing;
  for (std::size_t k = begin; k < end; ++k) {
    if (!a[k].zero()) top = std::max(top, a[k].top() + exponents[k]);
  }
  if (!errors.empty()) {
    for (std::size_t k = begin; k < end; ++k) {
      const ErrorTerm& e = errors[k];
      if (e.fraction > 0) top = std::max(top, ceiling_exponent(e.fraction) + e.power + exponents[k]);
    }
  }
  if (top == kNothing) {
    clear_row(r, begin, end);
    return;
  }
  Row& row = rows_[r];
  row = {true, top, 0, 0, 0};
  double* const first = data_.data() + r;
  constexpr std::size_t kStride = kChunk * kBlockRows;
  for (std::size_t k = begin; k < end; ++k) {
    double* const to = first + k * kBlockRows;
    const std::int32_t shift = top - (a[k].top() + exponents[k]);
    const U128 x = a[k].zero() ? U128{0} : shift_right(a[k].significand, shift);
    const auto slice = [&](std::uint64_t bits) {
      const auto value =
          static_cast<double>(static_cast<std::int32_t>(static_cast<std::uint32_t>(bits) & kSliceMask));
      return a[k].negative ? -value : value;
    };
    const std::uint64_t high = high_half(x);
    const std::uint64_t low = low_half(x);
    to[0] = slice(high >> 42U);
    to[kStride] = slice(high >> 20U);
    to[2 * kStride] = slice(high << 2U | low >> 62U);
    to[3 * kStride] = slice(low >> 40U);
    to[4 * kStride] = slice(low >> 18U);
    to[5 * kStride] = slice(low << 4U);
    row.magnitude += a[k].zero() ? 0.0 : static_cast<double>(high) * 0x1p-64 + 0x1p-63;
    row.terms += a[k].zero() ? 0.0 : 1.0;
  }
  for (std::size_t k = begin; k < end && !errors.empty(); ++k) {
    if (errors[k].fraction > 0) row.error += scaled(errors[k].fraction, errors[k].power + exponents[k] - top);
  }
}

void BlockSums::reset(const OuterRight& right) {
  right_ = &right;
  rows_.fill(Row{});
  registers_.assign(kBlockRows * right.columns(), Register{});
}

void BlockSums::raise(std::size_t r, std::int32_t exponent) {
  Row& row = rows_[r];
  if (!row.any) {
    row.any = true;
    row.exponent = exponent;
    return;
  }
  if (exponent <= row.exponent) return;
  const std::int32_t shift = exponent - row.exponent;
  for (std::size_t d = 0; d < right_->columns(); ++d)
    shift_register(registers_[r * right_->columns() + d], shift);
  row.magnitude = scaled(row.magnitude, -shift);
  row.error = scaled(row.error, -shift);
  row.exponent = exponent;
}

void BlockSums::add(const OuterLeft& left, std::size_t chunk, std::size_t begin, std::size_t end) {
  if (begin >= end ||
      std::none_of(left.rows_.begin(), left.rows_.end(), [](const auto& row) { return row.any; }))
    return;
  const std::size_t columns = right_->columns();
  const int right_slices = right_->slices(chunk);
  totals_.assign(static_cast<std::size_t>(kOuterSlices) * kBlockRows * columns, 0);
  for (int s = 0; s < kOuterSlices; ++s) {
    std::array<SlicePair, OuterRight::kMaxSlices> pairs;
    std::size_t count = 0;
    for (int m = 0; m < right_slices && m <= s; ++m) {
      pairs[count++] = {left.block(s - m) + begin * kBlockRows, right_->block(chunk, m) + begin * columns};
    }
    add_exact_products({pairs.data(), count}, end - begin, columns, columns,
                       totals_.data() + static_cast<std::size_t>(s) * kBlockRows * columns, columns);
  }
  for (std::size_t r = 0; r < kBlockRows; ++r) {
    const OuterLeft::Row& from = left.rows_[r];
    if (!from.any) continue;
    raise(r, from.exponent);
    Row& row = rows_[r];
    const std::int32_t shift = row.exponent - from.exponent;
    const std::int64_t* const total = totals_.data() + r * columns;
    const std::size_t stride = kBlockRows * columns;
    for (std::size_t d = 0; d < columns; ++d) {
      // sum of total_s * 2^(22 (5 - s)), in two halves of three slices.
      const auto at = [&](std::size_t s) { return static_cast<I128>(total[s * stride + d]); };
      constexpr I128 kOne = I128{1} << kSliceBits;
      const I128 upper = (at(0) * kOne + at(1)) * kOne + at(2);
      const I128 lower = (at(3) * kOne + at(4)) * kOne + at(5);
      const U128 raised = static_cast<U128>(upper) << 2U;  // upper * 2^66 = raised * 2^64
      std::uint64_t carry = 0;
      Register x;
      x[0] = low_half(static_cast<U128>(lower));
      x[1] = add_with_carry(high_half(static_cast<U128>(lower)), low_half(raised), carry);
      x[2] = (lower < 0 ? ~std::uint64_t{0} : 0U) + high_half(raised) + carry;
      shift_register(x, shift);
      Register& to = registers_[r * columns + d];
      carry = 0;
      to[0] = add_with_carry(to[0], x[0], carry);
      to[1] = add_with_carry(to[1], x[1], carry);
      to[2] = add_with_carry(to[2], x[2], carry);
    }
    // Each product: what the cut of a to 128 bits loses, the pairs of slices left out, bits of b past its
    // last slice (docs/reference.md, "Sums"). Each chunk: the two shifts of a register.
    constexpr double kPerProduct = 1.5 * 0x1p-128;
    constexpr double kPerChunk = 4 * 0x1p-154;
    row.error += scaled(from.error + from.terms * kPerProduct, -shift) + kPerChunk;
    row.magnitude += scaled(from.magnitude, -shift);
  }
}

void BlockSums::get(mpfr_ptr to, std::size_t r, std::size_t d) const {
  Register x = registers_[r * right_->columns() + d];
  const bool negative = x[2] >> 63U != 0;
  if (negative) {
    std::uint64_t carry = 1;
    for (std::uint64_t& limb : x) limb = add_with_carry(~limb, 0, carry);
  }
  mp_size_t size = 3;
  while (size > 0 && x[static_cast<std::size_t>(size) - 1] == 0) --size;
  if (size == 0) {
    mpfr_set_zero(to, 1);
    return;
  }
  const std::array<mp_limb_t, 3> limbs{x[0], x[1], x[2]};
  mpz_t integer;
  const mpz_srcptr view = mpz_roinit_n(integer, limbs.data(), negative ? -size : size);
  mpfr_set_z_2exp(to, view, exponent(r, d) - kFractionBits, MPFR_RNDN);
}

}  // namespace bitattn::reference
