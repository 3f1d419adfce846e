// The tensor core's fused step against a second model that was written apart, on random and adversarial
// operands.

#include "emu/arith/tensor_core.hpp"

#include <gtest/gtest.h>
#include <tbb/parallel_for.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "tests/emu/arith/dot_product_cases.hpp"
#include "tests/emu/arith/exact_fp32.hpp"
#include "tests/emu/arith/show.hpp"
#include "tests/emu/arith/slow_tensor_core.hpp"

namespace bitattn::test {
namespace {

constexpr std::uint64_t kCasesPerKind = 20'000;
constexpr std::uint64_t kCasesPerVariant = 500;

std::array<std::uint8_t, 32> bytes(const std::array<std::uint16_t, 32>& words) {
  std::array<std::uint8_t, 32> out{};
  for (std::size_t i = 0; i < 32; ++i) out[i] = static_cast<std::uint8_t>(words[i]);
  return out;
}

template <class A, class B>
std::uint32_t with_rule(const DotProductCase& x, int k, arith::TensorCoreRule rule) {
  return arith::fused_step<A, B>(x.a.data(), x.b.data(), k, x.c, rule);
}
template <class A, class B>
std::uint32_t fp8_entry(const DotProductCase& x) {
  return arith::wgmma_fp8_k32<A, B>(bytes(x.a).data(), bytes(x.b).data(), x.c);
}

/// One instruction: its formats, the chip's entry point in emu/arith, and fused_step with any rule.
struct Unit {
  std::string name;
  SlowFormat a, b;
  int k;
  SlowRule slow_rule;
  arith::TensorCoreRule rule;
  std::uint32_t (*entry)(const DotProductCase&);
  std::uint32_t (*step)(const DotProductCase&, int, arith::TensorCoreRule);

  DotProductCase make(int kind, std::uint64_t n) const {
    return dot_product_case(static_cast<CaseKind>(kind), n, a, b, k);
  }
  std::uint32_t slow(const DotProductCase& x, const SlowRule& deviating) const {
    return slow_dot_product(x.a.data(), a, x.b.data(), b, k, x.c, deviating);
  }
  std::string describe(const DotProductCase& x, std::uint32_t fast, std::uint32_t slow) const {
    std::string text = fmt::format("emu/arith {}, slow model {}; c {}; a*b", show_fp32(fast), show_fp32(slow),
                                   show_fp32(x.c));
    for (std::size_t i = 0; i < static_cast<std::size_t>(k); ++i) {
      text += fmt::format(" {}*{}", show_bits(x.a[i], a.width() / 4), show_bits(x.b[i], b.width() / 4));
    }
    return text;
  }
};

const std::vector<Unit>& units() {
  using namespace arith;
  static const std::vector<Unit> all{
      {"bf16 k16", kSlowBf16, kSlowBf16, 16, kSlowHopperWide, kHopperWide,
       [](const DotProductCase& x) { return mma_bf16_k16(x.a.data(), x.b.data(), x.c); },
       with_rule<Bf16, Bf16>},
      {"bf16 k8", kSlowBf16, kSlowBf16, 8, kSlowHopperWide, kHopperWide,
       [](const DotProductCase& x) { return mma_bf16_k8(x.a.data(), x.b.data(), x.c); },
       with_rule<Bf16, Bf16>},
      {"f16 k16", kSlowF16, kSlowF16, 16, kSlowHopperWide, kHopperWide,
       [](const DotProductCase& x) { return mma_f16_k16(x.a.data(), x.b.data(), x.c); }, with_rule<F16, F16>},
      {"e4m3 k32", kSlowE4m3, kSlowE4m3, 32, kSlowHopperFp8, kHopperFp8, fp8_entry<E4m3, E4m3>,
       with_rule<E4m3, E4m3>},
      {"e5m2 k32", kSlowE5m2, kSlowE5m2, 32, kSlowHopperFp8, kHopperFp8, fp8_entry<E5m2, E5m2>,
       with_rule<E5m2, E5m2>},
      {"e4m3*e5m2 k32", kSlowE4m3, kSlowE5m2, 32, kSlowHopperFp8, kHopperFp8, fp8_entry<E4m3, E5m2>,
       with_rule<E4m3, E5m2>},
  };
  return all;
}

using Model = std::function<std::uint32_t(const Unit&, const DotProductCase&)>;

/// Every unit and kind, `cases` of each, on all cores; [unit][kind].
std::vector<std::vector<Tally>> compare(std::uint64_t cases, const Model& fast, const Model& slow) {
  std::vector<std::vector<Tally>> tallies(units().size(), std::vector<Tally>(kCaseKinds));
  const int n = static_cast<int>(units().size()) * kCaseKinds;
  tbb::parallel_for(0, n, [&](int job) {
    const Unit& unit = units()[static_cast<std::size_t>(job / kCaseKinds)];
    const int kind = job % kCaseKinds;
    Tally tally{unit.name};
    for (std::uint64_t i = 0; i < cases; ++i) {
      const DotProductCase x = unit.make(kind, i);
      const std::uint32_t f = fast(unit, x);
      const std::uint32_t s = slow(unit, x);
      tally.count(f == s, [&] { return unit.describe(x, f, s); });
    }
    tallies[static_cast<std::size_t>(job / kCaseKinds)][static_cast<std::size_t>(kind)] = tally;
  });
  return tallies;
}

std::uint64_t total_mismatches(const std::vector<Tally>& by_kind) {
  std::uint64_t n = 0;
  for (const Tally& tally : by_kind) n += tally.mismatches;
  return n;
}

void expect_equal(const std::string& title, const std::vector<std::vector<Tally>>& tallies) {
  std::vector<Tally> rows;
  for (std::size_t u = 0; u < tallies.size(); ++u) {
    Tally row{units()[u].name};
    for (std::size_t kind = 0; kind < tallies[u].size(); ++kind) {
      const Tally& tally = tallies[u][kind];
      row.cases += tally.cases;
      row.mismatches += tally.mismatches;
      if (tally.mismatches != 0 && row.first.empty()) {
        row.first = fmt::format("{}: {}", kCaseKindNames[kind], tally.first);
      }
      EXPECT_EQ(tally.mismatches, 0U)
          << title << ", " << units()[u].name << ", " << kCaseKindNames[kind] << ": " << tally.first;
    }
    rows.push_back(row);
  }
  print_table(title, rows);
}

TEST(TensorCore, AgreesWithTheSlowModel) {
  const auto tallies = compare(
      kCasesPerKind, [](const Unit& unit, const DotProductCase& x) { return unit.entry(x); },
      [](const Unit& unit, const DotProductCase& x) { return unit.slow(x, unit.slow_rule); });
  expect_equal(fmt::format("{} kinds of operands, {} of each", kCaseKinds, kCasesPerKind), tallies);
}

// A rule is data: any value of it is the same rule in both models, not only the chip's.
TEST(TensorCore, OtherRulesAgreeWithTheSlowModelToo) {
  struct Variant {
    std::string name;
    int more_aligned_bits, floor;
    bool nearest;
  };
  for (const Variant& v :
       {Variant{"rounding to nearest", 0, -133, true}, Variant{"F one less", -1, -133, false},
        Variant{"F one more", 1, -133, false}, Variant{"F one less, to nearest", -1, -133, true},
        Variant{"floor -120", 0, -120, false}, Variant{"floor -150", 0, -150, false}}) {
    const auto tallies = compare(
        kCasesPerVariant,
        [&](const Unit& unit, const DotProductCase& x) {
          arith::TensorCoreRule rule = unit.rule;
          rule.aligned_fraction_bits += v.more_aligned_bits;
          rule.exponent_floor = v.floor;
          rule.round_to_nearest = v.nearest;
          return unit.step(x, unit.k, rule);
        },
        [&](const Unit& unit, const DotProductCase& x) {
          SlowRule rule = unit.slow_rule;
          rule.aligned_fraction_bits += v.more_aligned_bits;
          rule.exponent_floor = v.floor;
          rule.round_to_nearest = v.nearest;
          return unit.slow(x, rule);
        });
    expect_equal(v.name, tallies);
  }
}

// mma.sync m16n8k32 e4m3: two FP16 steps and an IEEE addition, each by the other models.
TEST(TensorCore, MmaSyncE4m3AgreesWithItsLowering) {
  // e4m3 to FP16 by search: the FP16 number of the same value, or FP16's NaN.
  std::array<std::uint16_t, 256> widened{};
  for (std::uint32_t v = 0; v < 256; ++v) {
    widened[v] = 0x7fffU;
    if (slow_decode(v, kSlowE4m3).nan) continue;
    for (std::uint32_t h = 0; h < 0x10000U; ++h) {
      const SlowOperand candidate = slow_decode(h, kSlowF16);
      if (candidate.nan || candidate.infinite || candidate.negative != (v >= 0x80U)) continue;
      if (slow_value(kSlowF16, h) == slow_value(kSlowE4m3, v)) widened[v] = static_cast<std::uint16_t>(h);
    }
    ASSERT_NE(widened[v], 0x7fffU);
    EXPECT_EQ(arith::f16_from_e4m3(static_cast<std::uint8_t>(v)), widened[v]) << show_bits(v, 2);
  }
  std::vector<Tally> rows;
  for (int kind = 0; kind < kCaseKinds; ++kind) {
    Tally tally{kCaseKindNames[static_cast<std::size_t>(kind)]};
    for (std::uint64_t n = 0; n < kCasesPerKind / 4; ++n) {
      const DotProductCase x = dot_product_case(static_cast<CaseKind>(kind), n, kSlowE4m3, kSlowE4m3, 32);
      std::array<std::array<std::uint16_t, 16>, 2> a{};
      std::array<std::array<std::uint16_t, 16>, 2> b{};
      for (std::size_t i = 0; i < 16; ++i) {  // products 0, 1, 4, 5, ... and 2, 3, 6, 7, ...
        const std::size_t source = i / 2 * 4 + i % 2;
        for (std::size_t half = 0; half < 2; ++half) {
          a[half][i] = widened[x.a[source + 2 * half]];
          b[half][i] = widened[x.b[source + 2 * half]];
        }
      }
      std::uint32_t t = 0;
      for (std::size_t half = 0; half < 2; ++half) {
        t = slow_dot_product(a[half].data(), kSlowF16, b[half].data(), kSlowF16, 16, t, kSlowHopperWide);
      }
      const std::uint32_t slow = exact_add(x.c, t, Underflow::kGradual);
      const std::uint32_t fast = arith::mma_sync_e4m3_k32(bytes(x.a).data(), bytes(x.b).data(), x.c);
      tally.count(fast == slow,
                  [&] { return fmt::format("{} and not {}", show_fp32(fast), show_fp32(slow)); });
    }
    EXPECT_EQ(tally.mismatches, 0U) << tally.unit << ": " << tally.first;
    rows.push_back(tally);
  }
  print_table("mma.sync e4m3 k32 by kind of operands", rows);
}

// The comparison above must be able to fail: every single deviation is seen, by the units where it can show.
TEST(TensorCore, EveryDeviationIsNoticed) {
  struct Deviation {
    std::string name;
    std::function<void(SlowRule&)> apply;
    std::vector<std::string> seen_by;  ///< units; empty: all
  };
  const std::vector<std::string> bf16{"bf16 k16", "bf16 k8"};
  const std::vector<std::string> fp8{"e4m3 k32", "e5m2 k32", "e4m3*e5m2 k32"};
  const std::vector<Deviation> deviations{
      {"F one less", [](SlowRule& r) { --r.aligned_fraction_bits; }, {}},
      {"F one more", [](SlowRule& r) { ++r.aligned_fraction_bits; }, {}},
      {"OF one less", [](SlowRule& r) { --r.result_fraction_bits; }, {}},
      {"OF 23 for FP8", [](SlowRule& r) { r.result_fraction_bits = 23; }, fp8},
      {"floor instead of cut off", [](SlowRule& r) { r.align_toward_minus_infinity = true; }, {}},
      {"two groups", [](SlowRule& r) { r.group = 4; }, {}},
      {"exponent after normalisation", [](SlowRule& r) { r.normalise_products = true; }, {}},
      {"rounding to nearest", [](SlowRule& r) { r.round_to_nearest = true; }, {}},
      {"zero products in the maximum", [](SlowRule& r) { r.zero_products_enter_maximum = true; }, {}},
      {"zero c in the maximum", [](SlowRule& r) { r.zero_c_enters_maximum = true; }, bf16},
      {"no exponent floor", [](SlowRule& r) { r.has_floor = false; }, bf16},
      {"exponent floor -132", [](SlowRule& r) { r.exponent_floor = -132; }, bf16},
      {"exponent floor -134", [](SlowRule& r) { r.exponent_floor = -134; }, bf16},
      {"exponent floor -126", [](SlowRule& r) { r.exponent_floor = -126; }, bf16},
      {"sign of an underflowed zero", [](SlowRule& r) { r.keep_sign_of_underflow = true; }, bf16},
      {"subnormal operands flushed", [](SlowRule& r) { r.flush_subnormal_inputs = true; }, {}},
      {"overflow to the largest number", [](SlowRule& r) { r.saturate = true; }, bf16},
  };
  std::string table =
      fmt::format("mismatches of {} a unit\n{:<32}", kCasesPerVariant * kCaseKinds, "deviation");
  for (const Unit& unit : units()) table += fmt::format(" {:>14}", unit.name);
  table += "\n";
  for (const Deviation& deviation : deviations) {
    const auto tallies = compare(
        kCasesPerVariant, [](const Unit& unit, const DotProductCase& x) { return unit.entry(x); },
        [&](const Unit& unit, const DotProductCase& x) {
          SlowRule rule = unit.slow_rule;
          deviation.apply(rule);
          if (deviation.name == "two groups") rule.group = unit.k / 2;
          return unit.slow(x, rule);
        });
    table += fmt::format("{:<32}", deviation.name);
    for (std::size_t u = 0; u < units().size(); ++u) {
      const std::uint64_t n = total_mismatches(tallies[u]);
      table += fmt::format(" {:>14}", n);
      const auto& seen_by = deviation.seen_by;
      if (seen_by.empty() || std::find(seen_by.begin(), seen_by.end(), units()[u].name) != seen_by.end()) {
        EXPECT_GT(n, 0U) << deviation.name << " is not noticed by " << units()[u].name;
      }
    }
    table += "\n";
  }
  fmt::print("{}", table);
}

// The same from the other side: emu/arith with a mutated TensorCoreRule against the slow model with the
// chip's.
TEST(TensorCore, EveryMutatedRuleIsNoticed) {
  struct Mutation {
    std::string name;
    std::function<void(arith::TensorCoreRule&)> apply;
    bool bf16_only;
  };
  for (const Mutation& mutation : std::vector<Mutation>{
           {"F one less", [](arith::TensorCoreRule& r) { --r.aligned_fraction_bits; }, false},
           {"F one more", [](arith::TensorCoreRule& r) { ++r.aligned_fraction_bits; }, false},
           {"OF one less", [](arith::TensorCoreRule& r) { --r.result_fraction_bits; }, false},
           {"floor -132", [](arith::TensorCoreRule& r) { r.exponent_floor = -132; }, true},
           {"floor -134", [](arith::TensorCoreRule& r) { r.exponent_floor = -134; }, true},
           {"no floor", [](arith::TensorCoreRule& r) { r.exponent_floor = -280; }, true},
           {"to nearest", [](arith::TensorCoreRule& r) { r.round_to_nearest = true; }, false},
       }) {
    const auto tallies = compare(
        kCasesPerVariant,
        [&](const Unit& unit, const DotProductCase& x) {
          arith::TensorCoreRule rule = unit.rule;
          mutation.apply(rule);
          return unit.step(x, unit.k, rule);
        },
        [](const Unit& unit, const DotProductCase& x) { return unit.slow(x, unit.slow_rule); });
    for (std::size_t u = 0; u < units().size(); ++u) {
      if (mutation.bf16_only && u > 1) continue;
      const std::uint64_t n = total_mismatches(tallies[u]);
      EXPECT_GT(n, 0U) << mutation.name << " is not noticed by " << units()[u].name;
    }
  }
}

}  // namespace
}  // namespace bitattn::test
