#include "reference/number.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace bitattn::reference {

Number make_number(mpfr_prec_t bits) {
  Number x;
  mpfr_set_prec(raw(x), bits);
  return x;
}

std::vector<Number> make_numbers(std::size_t count, mpfr_prec_t bits) {
  std::vector<Number> numbers(count);
  for (Number& x : numbers) mpfr_set_prec(raw(x), bits);
  return numbers;
}

void set_zero(std::vector<Number>& numbers) {
  for (Number& x : numbers) mpfr_set_zero(raw(x), 1);
}

double fp64_from_bf16(std::uint16_t word) {
  return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(word) << 16U));
}

void set_bf16(mpfr_ptr x, std::uint16_t word) {
  mpfr_set_d(x, fp64_from_bf16(word), MPFR_RNDN);
}

namespace {

/// x to BF16, to nearest, ties to even, for |x| well inside the normal range.
std::uint16_t bf16_from_fp64(double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const std::uint64_t magnitude = bits & ~(std::uint64_t{1} << 63U);
  const std::uint64_t rounded =
      (magnitude + ((std::uint64_t{1} << 44U) - 1) + (magnitude >> 45U & 1U)) >> 45U;
  return static_cast<std::uint16_t>((bits >> 63U) << 15U | (rounded - ((1023U - 127U) << 7U)));
}

/// Does every number between low and high, both of one sign and well inside BF16's normal range, round to one
/// word?
bool same_word(double low, double high, std::uint16_t& word) {
  const double smaller = std::min(std::abs(low), std::abs(high));
  const double larger = std::max(std::abs(low), std::abs(high));
  if (std::signbit(low) != std::signbit(high) || !(smaller > 0x1p-125 && larger < 0x1p127)) return false;
  word = bf16_from_fp64(low);
  return word == bf16_from_fp64(high);
}

}  // namespace

std::uint16_t round_to_bf16(mpfr_srcptr x) {
  // Nearly always the neighbours of the nearest double leave no doubt.
  const double nearest = mpfr_get_d(x, MPFR_RNDN);
  std::uint16_t word = 0;
  if (same_word(nearest * (1 - 0x1p-52), nearest * (1 + 0x1p-52), word)) return word;
  if (mpfr_nan_p(x) != 0) return 0x7fffU;
  const std::uint16_t sign = mpfr_signbit(x) != 0 ? 0x8000U : 0U;
  if (mpfr_zero_p(x) != 0) return sign;
  // |x| in [2^(e-1), 2^e). The last place of a BF16 number there: 8 bits of significand, never below 2^-133.
  if (mpfr_inf_p(x) != 0 || mpfr_get_exp(x) > 128) return static_cast<std::uint16_t>(sign | 0x7f80U);
  const mpfr_exp_t place = std::max<mpfr_exp_t>(mpfr_get_exp(x) - 8, -133);
  Number scaled = make_number(mpfr_get_prec(x));
  mpfr_mul_2si(raw(scaled), x, -place, MPFR_RNDN);
  mpfr_abs(raw(scaled), raw(scaled), MPFR_RNDN);
  const unsigned long significand = mpfr_get_ui(raw(scaled), MPFR_RNDN);  // one rounding, 0 to 256
  // A significand of 128 to 255 at `place` has exponent field place + 134; a carry to 256, or out of the
  // subnormals (field 0, same place as field 1), falls out of the addition.
  const auto field = static_cast<unsigned long>(place + 133);
  return static_cast<std::uint16_t>(sign | (field * 128 + significand));
}

float round_to_fp32(mpfr_srcptr x) {
  return mpfr_get_flt(x, MPFR_RNDN);
}

double round_to_fp64(mpfr_srcptr x) {
  return mpfr_get_d(x, MPFR_RNDN);
}

bool bf16_decided(mpfr_srcptr x, double bound) {
  if (mpfr_number_p(x) == 0 || !std::isfinite(bound)) return false;
  const double nearest = mpfr_get_d(x, MPFR_RNDN);
  const double reach = bound + std::abs(nearest) * 0x1p-51;
  std::uint16_t word = 0;
  if (same_word(nearest - reach, nearest + reach, word)) return true;
  Number edge = make_number(mpfr_get_prec(x));
  mpfr_sub_d(raw(edge), x, bound, MPFR_RNDD);
  const std::uint16_t low = round_to_bf16(raw(edge));
  mpfr_add_d(raw(edge), x, bound, MPFR_RNDU);
  const std::uint16_t high = round_to_bf16(raw(edge));
  return low == high || ((low | high) & 0x7fffU) == 0;  // the sign of a zero is no value
}

}  // namespace bitattn::reference
