// fp32 arithmetic, with and without flush to zero, and the reductions, against exact values rounded once.

#include "emu/arith/fp32.hpp"

#include <gtest/gtest.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/reduce_add.hpp"
#include "tests/emu/arith/exact_fp32.hpp"
#include "tests/emu/arith/random_bits.hpp"
#include "tests/emu/arith/show.hpp"

namespace bitattn::test {
namespace {

using arith::from_bits;
using arith::to_bits;

struct Operands {
  std::uint32_t a, b, c;
};

/// Magnitudes at which something changes: zeros, subnormals, the smallest normal numbers, 1, ties, the
/// largest numbers, infinity, NaNs quiet and signalling.
const std::vector<std::uint32_t>& special_values() {
  static const std::vector<std::uint32_t> all = [] {
    std::vector<std::uint32_t> values;
    for (const std::uint32_t magnitude :
         {0x00000000U, 0x00000001U, 0x00000002U, 0x00400000U, 0x007fffffU, 0x00800000U,
          0x00800001U, 0x00ffffffU, 0x01000000U, 0x0c7fffffU, 0x1f800000U, 0x20000000U,
          0x33800000U, 0x34000000U, 0x3effffffU, 0x3f000000U, 0x3f7fffffU, 0x3f800000U,
          0x3f800001U, 0x40000000U, 0x4b7fffffU, 0x4b800000U, 0x5f000000U, 0x7effffffU,
          0x7f000000U, 0x7f7fffffU, 0x7f800000U, 0x7f800001U, 0x7fc12345U, 0x7fffffffU}) {
      values.push_back(magnitude);
      values.push_back(magnitude | 0x80000000U);
    }
    return values;
  }();
  return all;
}

std::uint32_t fp32(bool negative, int exponent, std::uint32_t fraction) {
  const auto field = static_cast<std::uint32_t>(std::clamp(exponent + 127, 0, 254));
  return (negative ? 0x80000000U : 0U) | field << 23U | (fraction & 0x7fffffU);
}

std::uint32_t random_near(RandomBits& random, int exponent, int width) {
  const int e = exponent + random.between(-width, width);
  // A few significands of few bits, so that exact results and ties are not rare.
  const std::uint32_t mask = random.one_in(3) ? 0x7fffffU << random.between(8, 22) : 0x7fffffU;
  return fp32(random.one_in(2), e, random.bits32() & mask);
}

/// a*b + c whose exact value lies within a few 2^-151 (and far smaller steps) of 2^-126 - 2^-151, either
/// sign.
Operands at_smallest_normal(RandomBits& random) {
  const bool negative = random.one_in(2);
  const int split = random.between(-40, 40);
  switch (random.between(0, 4)) {
    case 0: {
      // Product of two significands near 2^k: m1 * m2 about 2^(23+24), m1 odd and random.
      const std::uint32_t m1 = 0x800000U | (random.bits32() & 0x7fffffU);
      const std::uint64_t target = (std::uint64_t{1} << 47U) - (std::uint64_t{1} << 22U);
      const std::uint64_t m2 = target / m1 + static_cast<std::uint64_t>(random.between(0, 3)) - 1U;
      if (m2 < 0x800000U || m2 > 0xffffffU) return at_smallest_normal(random);
      const int e1 = -63 + split;
      return {fp32(negative, e1, m1), fp32(random.one_in(2), -127 - e1, static_cast<std::uint32_t>(m2)), 0U};
    }
    case 1: {
      // 2^25 - 1 = 18631 * 1801: the product is exactly 2^-126 - 2^-151, which rounds up to the smallest
      // normal number.
      const std::uint32_t m1 = 18631U << 9U;
      const std::uint32_t m2 = 1801U << 13U;
      const int e1 = -70 + split;
      return {fp32(negative, e1, m1), fp32(random.one_in(2), -127 - e1, m2), random.bits32() & 0x80000000U};
    }
    case 2: {
      // c = ±2^-126 and a product against it: ∓2^-151 times (1 + a few last places), or far smaller.
      const int e = random.one_in(2) ? -151 : random.between(-252, -148);
      const int e1 = std::clamp(e / 2 + split, -126, e + 126);
      const std::uint32_t f = random.one_in(3) ? 0U : static_cast<std::uint32_t>(random.between(1, 3));
      return {fp32(negative, e1, f), fp32(false, e - e1, random.one_in(2) ? 0U : 1U),
              fp32(!negative, -126, static_cast<std::uint32_t>(random.between(0, 1)))};
    }
    case 3: {
      // The same with a product a hair above or below 2^-151, too little for the sum to show in double: only
      // the sum's rounding error decides. Significands whose product is 2^47 give or take 2^17.
      for (;;) {
        const std::uint64_t m1 = 0x800000U | (random.bits32() & 0x7fffffU);
        const std::uint64_t target = std::uint64_t{1} << 47U;
        const std::uint64_t m2 = target / m1 + static_cast<std::uint64_t>(random.between(0, 1));
        const std::uint64_t rest = m1 * m2 > target ? m1 * m2 - target : target - m1 * m2;
        if (m2 < 0x800000U || m2 > 0xffffffU || rest > 1U << 17U) continue;
        const int e1 = -76 + split;
        return {fp32(negative, e1, static_cast<std::uint32_t>(m1)),
                fp32(false, -152 - e1, static_cast<std::uint32_t>(m2)), fp32(!negative, -126, 0)};
      }
    }
    default: {
      // A product of some 2^-126 and c taking most of it away, or adding to it.
      const int e1 = -62 + split;
      return {fp32(negative, e1, random.bits32()), fp32(false, -126 - e1, random.bits32() & 0xfU),
              fp32(!negative, -126, random.bits32() & 0x7fffffU)};
    }
  }
}

struct Kind {
  std::string name;
  std::uint64_t cases;
  std::function<Operands(std::uint64_t)> make;
};

std::vector<Kind> kinds() {
  const auto random_kind = [](const std::string& name, std::uint64_t cases, auto&& make) {
    return Kind{name, cases, [make, name](std::uint64_t n) {
                  RandomBits random(mix(n) + name.size());
                  return make(random);
                }};
  };
  const std::uint64_t n = special_values().size();
  return {
      {"triples of special values", n * n * n,
       [n](std::uint64_t i) {
         const auto& v = special_values();
         return Operands{v[i % n], v[i / n % n], v[i / n / n]};
       }},
      random_kind("random bits", 50'000,
                  [](RandomBits& r) {
                    return Operands{r.bits32(), r.bits32(), r.bits32()};
                  }),
      random_kind("near each other", 50'000,
                  [](RandomBits& r) {
                    const int e = r.between(-50, 50);
                    return Operands{random_near(r, e, 3), random_near(r, 0, 2), random_near(r, e, 25)};
                  }),
      random_kind("c cancels the product", 50'000,
                  [](RandomBits& r) {
                    const std::uint32_t a = random_near(r, r.between(-60, 60), 0);
                    const std::uint32_t b = random_near(r, 0, 10);
                    const float product = std::bit_cast<float>(a) * std::bit_cast<float>(b);
                    const auto shift = static_cast<std::uint32_t>(r.between(-2, 2));
                    return Operands{a, b, (std::bit_cast<std::uint32_t>(product) ^ 0x80000000U) + shift};
                  }),
      random_kind(
          "results around and below 2^-126", 50'000,
          [](RandomBits& r) {
            const int e = r.between(-100, -26);
            return Operands{random_near(r, e, 2), random_near(r, -126 - e, 4), random_near(r, -124, 3)};
          }),
      random_kind("at 2^-126 - 2^-151", 150'000, [](RandomBits& r) { return at_smallest_normal(r); }),
      random_kind(
          "sums below 2^-120", 50'000,
          [](RandomBits& r) {
            return Operands{random_near(r, -125, 3), random_near(r, -125, 3), random_near(r, -125, 3)};
          }),
      random_kind("overflow", 50'000,
                  [](RandomBits& r) {
                    const int e = r.between(0, 127);
                    return Operands{random_near(r, e, 1), random_near(r, 127 - e, 1), random_near(r, 126, 1)};
                  }),
  };
}

using Function = std::function<std::uint32_t(const Operands&)>;

struct Unit {
  std::string name;
  Function ours, exact;
};

Tally compare(const std::string& name, const std::vector<Kind>& all, const Function& ours,
              const Function& exact) {
  Tally tally{name};
  for (const Kind& kind : all) {
    for (std::uint64_t i = 0; i < kind.cases; ++i) {
      const Operands x = kind.make(i);
      const std::uint32_t r = ours(x);
      const std::uint32_t e = exact(x);
      tally.count(r == e, [&] {
        return fmt::format("{}: a {}, b {}, c {}: emu/arith {}, exact {}", kind.name, show_fp32(x.a),
                           show_fp32(x.b), show_fp32(x.c), show_fp32(r), show_fp32(e));
      });
    }
  }
  return tally;
}

#define BITATTN_OURS(expression)                     \
  [](const Operands& x) {                            \
    [[maybe_unused]] const float a = from_bits(x.a); \
    [[maybe_unused]] const float b = from_bits(x.b); \
    [[maybe_unused]] const float c = from_bits(x.c); \
    return to_bits(expression);                      \
  }
#define BITATTN_EXACT(expression) [](const Operands& x) -> std::uint32_t { return expression; }

constexpr Underflow kFtz = Underflow::kFlushAfterRounding;
constexpr Underflow kIeee = Underflow::kGradual;

std::uint32_t exact_negate(std::uint32_t x) {
  return x ^ 0x80000000U;
}

std::vector<Unit> units() {
  using namespace arith;
  return {
      {"fma", BITATTN_OURS(arith::fma(a, b, c)), BITATTN_EXACT(exact_fma(x.a, x.b, x.c, kIeee))},
      {"mul", BITATTN_OURS(arith::mul(a, b)), BITATTN_EXACT(exact_mul(x.a, x.b, kIeee))},
      {"add", BITATTN_OURS(arith::add(a, b)), BITATTN_EXACT(exact_add(x.a, x.b, kIeee))},
      {"max", BITATTN_OURS(arith::max(a, b)), BITATTN_EXACT(exact_extreme(x.a, x.b, true, kIeee))},
      {"ftz::fma", BITATTN_OURS(ftz::fma(a, b, c)), BITATTN_EXACT(exact_fma(x.a, x.b, x.c, kFtz))},
      {"ftz::mul", BITATTN_OURS(ftz::mul(a, b)), BITATTN_EXACT(exact_mul(x.a, x.b, kFtz))},
      {"ftz::add", BITATTN_OURS(ftz::add(a, b)), BITATTN_EXACT(exact_add(x.a, x.b, kFtz))},
      {"ftz::add of a, c", BITATTN_OURS(ftz::add(a, c)), BITATTN_EXACT(exact_add(x.a, x.c, kFtz))},
      {"ftz::sub", BITATTN_OURS(ftz::sub(a, b)), BITATTN_EXACT(exact_add(x.a, exact_negate(x.b), kFtz))},
      {"ftz::max", BITATTN_OURS(ftz::max(a, b)), BITATTN_EXACT(exact_extreme(x.a, x.b, true, kFtz))},
      {"ftz::min", BITATTN_OURS(ftz::min(a, b)), BITATTN_EXACT(exact_extreme(x.a, x.b, false, kFtz))},
      {"ftz::max_nan", BITATTN_OURS(ftz::max_nan(a, b)),
       BITATTN_EXACT(detail::is_nan_pattern(x.a) || detail::is_nan_pattern(x.b)
                         ? 0x7fffffffU
                         : exact_extreme(x.a, x.b, true, kFtz))},
      {"ftz::neg", BITATTN_OURS(ftz::neg(a)),
       BITATTN_EXACT(detail::is_nan_pattern(x.a) ? 0x7fffffffU : exact_negate(exact_input(x.a, kFtz)))},
      {"ftz::abs", BITATTN_OURS(ftz::abs(a)),
       BITATTN_EXACT(detail::is_nan_pattern(x.a) ? 0x7fffffffU : exact_input(x.a, kFtz) % 0x80000000U)},
      // The reciprocal has its own proof (all 2^32 inputs); the product after it is one exact product rounded
      // once.
      {"ftz::div", BITATTN_OURS(ftz::div(a, b)), BITATTN_EXACT(exact_mul(x.a, arith::mufu::rcp(x.b), kFtz))},
      {"global_reduce_add", BITATTN_OURS(global_reduce_add(a, b)), BITATTN_EXACT(exact_add(x.a, x.b, kFtz))},
      {"global_reduce_add of a, c", BITATTN_OURS(global_reduce_add(a, c)),
       BITATTN_EXACT(exact_add(x.a, x.c, kFtz))},
      {"bulk_reduce_add", BITATTN_OURS(bulk_reduce_add(a, b)), BITATTN_EXACT(exact_add(x.a, x.b, kIeee))},
      {"bulk_reduce_add of a, c", BITATTN_OURS(bulk_reduce_add(a, c)),
       BITATTN_EXACT(exact_add(x.a, x.c, kIeee))},
  };
}

TEST(Fp32, EqualsTheExactValueRoundedOnce) {
  const std::vector<Unit> all = units();
  std::vector<Tally> rows(all.size());
  tbb::parallel_for(std::size_t{0}, all.size(), [&](std::size_t i) {
    rows[i] = compare(all[i].name, kinds(), all[i].ours, all[i].exact);
  });
  for (const Tally& row : rows) EXPECT_EQ(row.mismatches, 0U) << row.unit << ": " << row.first;
  print_table("fp32 against exact values", rows);
}

// Tiny after rounding is not tiny before rounding, nor an IEEE result that is subnormal: the cases above tell
// them apart.
TEST(Fp32, OtherUnderflowRulesAreNoticed) {
  std::vector<Kind> edge;
  for (const Kind& kind : kinds()) {
    if (kind.name == "at 2^-126 - 2^-151") edge.push_back(kind);
  }
  ASSERT_EQ(edge.size(), 1U);
  std::vector<Tally> rows;
  for (const auto& [name, wrong] : {std::pair{"tiny before rounding", Underflow::kFlushBeforeRounding},
                                    std::pair{"IEEE result subnormal", Underflow::kFlushSubnormal},
                                    std::pair{"no flush", Underflow::kGradual}}) {
    rows.push_back(compare(fmt::format("ftz::fma, {}", name), edge, BITATTN_OURS(arith::ftz::fma(a, b, c)),
                           [&, rule = wrong](const Operands& x) { return exact_fma(x.a, x.b, x.c, rule); }));
    rows.push_back(compare(fmt::format("ftz::mul, {}", name), edge, BITATTN_OURS(arith::ftz::mul(a, b)),
                           [&, rule = wrong](const Operands& x) { return exact_mul(x.a, x.b, rule); }));
  }
  for (const Tally& row : rows) EXPECT_GT(row.mismatches, row.cases / 100) << row.unit;
  print_table("wrong rules, mismatches wanted", rows);
}

// The edge itself, written out.
TEST(Fp32, TheSmallestNormalEdge) {
  using namespace arith;
  const float smallest = 0x1p-126F;
  const float tie_a = 18631.0F * 0x1p-70F;  // times 1801 * 2^-81: (2^25 - 1) * 2^-151 = 2^-126 - 2^-151
  const float tie_b = 1801.0F * 0x1p-81F;
  EXPECT_EQ(to_bits(ftz::mul(tie_a, tie_b)), to_bits(smallest));
  EXPECT_EQ(to_bits(ftz::mul(-tie_a, tie_b)), to_bits(-smallest));
  EXPECT_EQ(to_bits(ftz::fma(tie_a, tie_b, 0.0F)), to_bits(smallest));
  // 2^-126 - 2^-151 from a sum; then 2^-198 less, and 2^-198 more.
  EXPECT_EQ(to_bits(ftz::fma(-0x1p-75F, 0x1p-76F, smallest)), to_bits(smallest));
  EXPECT_EQ(to_bits(ftz::fma(-0x1p-75F, 0x1.000002p-76F, smallest)), 0U);
  EXPECT_EQ(to_bits(ftz::fma(-0x1p-75F, 0x1.fffffep-77F, smallest)), to_bits(smallest));
  EXPECT_EQ(to_bits(ftz::fma(0x1p-75F, 0x1.000002p-76F, -smallest)), 0x80000000U);
  // Far below: the two-sum's error term alone decides.
  EXPECT_EQ(to_bits(ftz::fma(-0x1p-126F, 0x1p-126F, smallest)), to_bits(smallest));
  // A flushed operand counts as a zero of its sign.
  EXPECT_EQ(to_bits(ftz::add(from_bits(0x807fffffU), from_bits(0x80000001U))), 0x80000000U);
  EXPECT_EQ(to_bits(ftz::fma(from_bits(0x00000001U), 0x1p127F, from_bits(0x80000000U))), 0U);
  // A sum of normal numbers below 2^-126 is exact, and flushed; the bulk reduction keeps it.
  EXPECT_EQ(to_bits(global_reduce_add(0x1.8p-126F, -0x1p-126F)), 0U);
  EXPECT_EQ(to_bits(bulk_reduce_add(0x1.8p-126F, -0x1p-126F)), 0x00400000U);
}

// div.approx.ftz.f32 promises 2 ulp for 2^-126 <= |b| <= 2^126; the exact quotient says how many it has.
TEST(Fp32, DivisionIsWithinTwoUlps) {
  RandomBits random(7);
  Exact worst = 0;  // error in units of 2^-40 ulp
  for (int i = 0; i < 200'000; ++i) {
    const std::uint32_t a = random_near(random, random.between(-60, 60), 0);
    const std::uint32_t b = random_near(random, random.between(-60, 60), 0);
    const std::uint32_t q = to_bits(arith::ftz::div(from_bits(a), from_bits(b)));
    const Exact exact_b = exact_from_fp32(b);
    const Exact product = exact_from_fp32(q) * exact_b / power_of_two(0);  // exact: a whole number of units
    const Exact error = abs(Exact(product - exact_from_fp32(a)));          // times |b| what q is off
    const Exact ulp_times_b =
        power_of_two(binary_exponent(exact_from_fp32(q)) - 23) * abs(exact_b) / power_of_two(0);
    EXPECT_LE(error, 2 * ulp_times_b) << show_fp32(a) << " / " << show_fp32(b) << " = " << show_fp32(q);
    worst = std::max(worst, Exact((error << 40U) / ulp_times_b));
  }
  fmt::print("largest error of 200000 quotients: {:.3f} ulp\n", std::ldexp(worst.convert_to<double>(), -40));
  EXPECT_GT(worst, Exact(1) << 39U) << "a correctly rounded division would not be the chip's";
}

}  // namespace
}  // namespace bitattn::test
