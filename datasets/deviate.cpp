#include "datasets/deviate.hpp"

#include <array>
#include <bit>
#include <cfloat>
#include <cmath>

namespace bitattn {
namespace {

static_assert(FLT_EVAL_METHOD == 0, "double arithmetic must be rounded to double after every operation");

constexpr int kFractionBits = 52;
constexpr int kBias = 1023;
constexpr std::uint64_t kFraction = (std::uint64_t{1} << 52U) - 1;

// Coefficients of highest degree first.
template <std::size_t N>
double polynomial(const std::array<double, N>& coefficients, double x) {
  double sum = coefficients[0];
  for (std::size_t i = 1; i < N; ++i) sum = sum * x + coefficients[i];
  return sum;
}

// AS 241, PPND16: three rational approximations.
constexpr std::array kCentralTop{2509.0809287301226727, 33430.575583588128105, 67265.770927008700853,
                                 45921.953931549871457, 13731.693765509461125, 1971.5909503065514427,
                                 133.14166789178437745, 3.3871328727963666080};
constexpr std::array kCentralBottom{
    5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
    5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0};
constexpr std::array kMiddleTop{7.74545014278341407640e-4, 0.0227238449892691845833, 0.241780725177450611770,
                                1.27045825245236838258,    3.64784832476320460504,   5.76949722146069140550,
                                4.63033784615654529590,    1.42343711074968357734};
constexpr std::array kMiddleBottom{
    1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.148103976427480074590,
    0.689767334985100004550,   1.67638483018380384940,  2.05319162663775882187,   1.0};
constexpr std::array kFarTop{2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.00124266094738807843860,
                             0.0265321895265761230930,  0.296560571828504891230,   1.78482653991729133580,
                             5.46378491116411436990,    6.65790464350110377720};
constexpr std::array kFarBottom{2.04426310338993978564e-15, 1.42151175831644588870e-7,
                                1.84631831751005468180e-5,  7.86869131145613259100e-4,
                                0.0148753612908506148525,   0.136929880922735805310,
                                0.599832206555887937690,    1.0};

/// 2^e as a double, for exponents of normal numbers.
double power_of_two(int e) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(e + kBias) << kFractionBits);
}

/// 2^(1/2), 2^(1/4), …: repeated square roots, which IEEE rounds correctly.
std::array<double, 32> make_roots_of_two() {
  std::array<double, 32> roots{};
  double root = 2.0;
  for (double& r : roots) r = root = std::sqrt(root);
  return roots;
}

}  // namespace

double log_of(double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  int exponent = static_cast<int>(bits >> kFractionBits) - kBias;
  double m = std::bit_cast<double>((bits & kFraction) | (static_cast<std::uint64_t>(kBias) << kFractionBits));
  constexpr double kRootOfTwo = 1.4142135623730951;
  if (m > kRootOfTwo) {
    m *= 0.5;
    ++exponent;
  }
  // log m = 2 artanh z, z = (m - 1) / (m + 1), |z| < 0.172: the first term left out is below 2^-60 of the
  // sum.
  const double z = (m - 1.0) / (m + 1.0);
  const double square = z * z;
  double series = 1.0 / 23.0;
  for (int k = 21; k >= 1; k -= 2) series = series * square + 1.0 / k;
  // ln 2 in two parts; the first has trailing zeros, so its product with the exponent is exact.
  constexpr double kLn2High = 0x1.62e42fefa3800p-1;
  constexpr double kLn2Low = 0x1.ef35793c76730p-45;
  return exponent * kLn2High + (2.0 * z * series + exponent * kLn2Low);
}

double exp2_of(double x) {
  static const std::array<double, 32> roots = make_roots_of_two();
  int whole = static_cast<int>(x);
  if (whole > x) --whole;
  const auto fraction = static_cast<std::uint64_t>((x - whole) * 4294967296.0);
  double product = 1.0;
  for (std::size_t i = 0; i < roots.size(); ++i) {
    if (((fraction >> (31U - i)) & 1U) != 0U) product *= roots[i];
  }
  return product * power_of_two(whole);
}

double normal_from_word(std::uint64_t word) {
  const std::uint64_t m = (word >> 11U) & kFraction;
  const double tail = (static_cast<double>(m) + 0.5) * 0x1p-53;
  const double from_middle = 0.5 - tail;
  double deviate = 0;
  constexpr double kCentral = 0.425;
  constexpr double kFar = 5.0;
  if (from_middle <= kCentral) {
    const double r = 0.180625 - from_middle * from_middle;
    deviate = from_middle * polynomial(kCentralTop, r) / polynomial(kCentralBottom, r);
  } else {
    const double r = std::sqrt(-log_of(tail));
    deviate = r <= kFar ? polynomial(kMiddleTop, r - 1.6) / polynomial(kMiddleBottom, r - 1.6)
                        : polynomial(kFarTop, r - kFar) / polynomial(kFarBottom, r - kFar);
  }
  return (word >> 63U) != 0U ? -deviate : deviate;
}

double uniform_from_word(std::uint64_t word) {
  return (static_cast<double>((word >> 31U) & 0xffffffffU) + 0.5) * 0x1p-32;
}

std::uint16_t bf16_from_double(double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 48U) & 0x8000U);
  const int exponent = static_cast<int>((bits >> kFractionBits) & 0x7ffU) - kBias;
  constexpr int kSmallestNormal = -126;
  constexpr int kSmallestHalf = -134;  // half of the smallest subnormal: this and less rounds to zero
  constexpr std::uint16_t kInfinity = 0x7f80;
  if (exponent < kSmallestHalf) return sign;
  const std::uint64_t significand = (bits & kFraction) | (std::uint64_t{1} << kFractionBits);
  // The last place kept is 7 bits below the leading one, or 2^-133.
  const int shift = exponent >= kSmallestNormal ? 45 : 45 + kSmallestNormal - exponent;
  const std::uint64_t kept = significand >> shift;
  const std::uint64_t rest = significand & ((std::uint64_t{1} << shift) - 1);
  const std::uint64_t half = std::uint64_t{1} << (shift - 1);
  std::uint64_t rounded = kept + ((rest > half || (rest == half && (kept & 1U) != 0U)) ? 1 : 0);
  // A carry runs on into the exponent field, as it should.
  if (exponent >= kSmallestNormal) rounded += static_cast<std::uint64_t>(exponent - kSmallestNormal) << 7U;
  return static_cast<std::uint16_t>(sign | (rounded >= kInfinity ? kInfinity : rounded));
}

}  // namespace bitattn
