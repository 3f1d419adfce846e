// emu/arith against what an H200 returned: the bundled vectors always, the larger set where BITATTN_GOLDENS
// names it.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/mufu.hpp"
#include "emu/arith/narrow_float.hpp"
#include "emu/arith/reduce_add.hpp"
#include "emu/arith/tensor_core.hpp"
#include "tests/emu/arith/exact_fp32.hpp"
#include "tests/emu/arith/golden_vectors.hpp"
#include "tests/emu/arith/show.hpp"
#include "tests/emu/arith/slow_tensor_core.hpp"

namespace bitattn::test {
namespace {

using arith::from_bits;
using arith::to_bits;

/// How many records each file holds: a file that lost some must not pass.
struct RecordCounts {
  std::size_t wgmma_bf16, mma_bf16, wgmma_f16, wgmma_fp8, wgmma_fp8_mixed, mma_sync_fp8, chains;
  std::size_t function, rsqrt_and_tanh, conversions, operations, reductions, specials;
};
constexpr RecordCounts kFullSet{10240, 2048,  2048,  2048,  1920,  2816, 2048,
                                14336, 12288, 16384, 24576, 15360, 14336};
constexpr RecordCounts kBundled{3520, 512, 512, 512, 480, 704, 512, 3584, 3072, 4096, 6144, 3840, 12352};

class Comparison {
 public:
  explicit Comparison(std::string folder) : folder_(std::move(folder) + "/") {}

  template <class Record>
  std::vector<Record> records(const std::string& file, std::size_t expected) const {
    auto all = read_records<Record>(folder_ + file);
    EXPECT_EQ(all.size(), expected) << folder_ << file;
    return all;
  }

  /// Runs `model` over records whose member `result` is what the chip returned, in words of fp32.
  template <class Record, class Model>
  void fp32_unit(const std::string& unit, std::span<const Record> all, std::uint32_t Record::*result,
                 Model&& model) {
    Tally tally{unit};
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::uint32_t ours = model(all[i]);
      const std::uint32_t chip = all[i].*result;
      tally.count(ours == chip, [&] {
        return fmt::format("record {}: chip {}, emu/arith {}{}", i, show_fp32(chip), show_fp32(ours),
                           inputs(all[i]));
      });
    }
    rows_.push_back(tally);
  }

  void add(const Tally& tally) { rows_.push_back(tally); }

  void dot_products(const RecordCounts& n);
  void functions(const RecordCounts& n);
  void conversions(const RecordCounts& n);
  void operations(const RecordCounts& n);
  void reductions(const RecordCounts& n);
  void specials(const RecordCounts& n);

  void finish() const {
    print_table(folder_, rows_);
    for (const Tally& row : rows_) {
      EXPECT_GT(row.cases, 0U) << row.unit;
      EXPECT_EQ(row.mismatches, 0U) << row.unit << ": " << row.first;
    }
  }

 private:
  static std::string inputs(const FunctionValue& r) { return fmt::format("; x {}", show_fp32(r.x)); }
  static std::string inputs(const Operation& r) {
    return fmt::format("; a {}, b {}, c {}", show_fp32(r.a), show_fp32(r.b), show_fp32(r.c));
  }
  static std::string inputs(const WideDotProduct& r) {
    return products(r.a, r.b, 16, 4) + "; c " + show_fp32(r.c);
  }
  static std::string inputs(const Fp8DotProduct& r) {
    return products(r.a, r.b, 32, 2) + "; c " + show_fp32(r.c);
  }
  static std::string inputs(const ChainOfFour& r) {
    return products(r.a[0], r.b[0], 16, 4) + " ...; c " + show_fp32(r.c);
  }
  template <class Word>
  static std::string products(const Word* a, const Word* b, int k, int digits) {
    std::string text = "; a*b";
    for (int i = 0; i < k; ++i)
      text += fmt::format(" {}*{}", show_bits(a[i], digits), show_bits(b[i], digits));
    return text;
  }

  std::string folder_;
  std::vector<Tally> rows_;
};

void Comparison::dot_products(const RecordCounts& n) {
  using namespace arith;
  const auto wide = [&](const std::string& file, std::size_t count, auto&& model) {
    const auto all = records<WideDotProduct>(file, count);
    fp32_unit<WideDotProduct>(file, all, &WideDotProduct::d, model);
  };
  const auto fp8 = [&](const std::string& file, std::size_t count, auto&& model) {
    const auto all = records<Fp8DotProduct>(file, count);
    fp32_unit<Fp8DotProduct>(file, all, &Fp8DotProduct::d, model);
  };
  const auto bf16 = [](const WideDotProduct& r) { return mma_bf16_k16(r.a, r.b, r.c); };
  wide("wgmma_bf16_k16.bin", n.wgmma_bf16, bf16);
  wide("mma_bf16_k16.bin", n.mma_bf16, bf16);
  wide("mma_bf16_k8x2.bin", n.mma_bf16,
       [](const WideDotProduct& r) { return mma_bf16_k8(r.a + 8, r.b + 8, mma_bf16_k8(r.a, r.b, r.c)); });
  wide("wgmma_f16_k16.bin", n.wgmma_f16, [](const WideDotProduct& r) { return mma_f16_k16(r.a, r.b, r.c); });
  fp8("wgmma_e4m3_k32.bin", n.wgmma_fp8,
      [](const Fp8DotProduct& r) { return wgmma_fp8_k32<E4m3, E4m3>(r.a, r.b, r.c); });
  fp8("wgmma_e5m2_k32.bin", n.wgmma_fp8,
      [](const Fp8DotProduct& r) { return wgmma_fp8_k32<E5m2, E5m2>(r.a, r.b, r.c); });
  fp8("wgmma_e4m3xe5m2_k32.bin", n.wgmma_fp8_mixed,
      [](const Fp8DotProduct& r) { return wgmma_fp8_k32<E4m3, E5m2>(r.a, r.b, r.c); });
  fp8("mma_sync_e4m3_k32.bin", n.mma_sync_fp8,
      [](const Fp8DotProduct& r) { return mma_sync_e4m3_k32(r.a, r.b, r.c); });
  const auto chains = records<ChainOfFour>("wgmma_bf16_chain4.bin", n.chains);
  fp32_unit<ChainOfFour>("wgmma_bf16_chain4.bin", chains, &ChainOfFour::d, [](const ChainOfFour& r) {
    std::uint32_t c = r.c;
    for (int step = 0; step < 4; ++step) c = mma_bf16_k16(r.a[step], r.b[step], c);
    return c;
  });
}

void Comparison::functions(const RecordCounts& n) {
  const auto function = [&](const std::string& file, std::size_t count, std::uint32_t (*f)(std::uint32_t)) {
    const auto all = records<FunctionValue>(file, count);
    fp32_unit<FunctionValue>(file, all, &FunctionValue::y, [&](const FunctionValue& r) { return f(r.x); });
  };
  function("mufu_ex2.bin", n.function, arith::mufu::ex2);
  function("mufu_lg2.bin", n.function, arith::mufu::lg2);
  function("mufu_rcp.bin", n.function, arith::mufu::rcp);
  function("mufu_rsq.bin", n.rsqrt_and_tanh, arith::mufu::rsqrt);
  function("mufu_tanh.bin", n.rsqrt_and_tanh, arith::mufu::tanh);
}

void Comparison::conversions(const RecordCounts& n) {
  Tally bf16{"cvt.bin bf16"};
  Tally f16{"cvt.bin f16"};
  Tally e4m3{"cvt.bin e4m3"};
  Tally e5m2{"cvt.bin e5m2"};
  for (const Conversions& r : records<Conversions>("cvt.bin", n.conversions)) {
    const auto count = [&](Tally& tally, std::uint32_t ours, std::uint32_t chip, int digits) {
      tally.count(ours == chip, [&] {
        return fmt::format("chip {}, emu/arith {}; x {}", show_bits(chip, digits), show_bits(ours, digits),
                           show_fp32(r.x));
      });
    };
    count(bf16, arith::bf16_from_fp32(r.x), r.bf16, 4);
    count(f16, arith::f16_from_fp32(r.x), r.f16, 4);
    count(e4m3, arith::e4m3_from_fp32(r.x), r.fp8 & 0xffU, 2);
    count(e5m2, arith::e5m2_from_fp32(r.x), r.fp8 >> 8U, 2);
  }
  for (const Tally* tally : {&bf16, &f16, &e4m3, &e5m2}) add(*tally);
}

using Binary = std::uint32_t (*)(const Operation&);

/// The operations by the names that fp32_specials.csv uses; fp32_ops.bin holds the first six in this order.
const std::vector<std::pair<std::string, Binary>>& operations_by_name() {
  using namespace arith;
#define BITATTN_OPERATION(name, expression)            \
  {                                                    \
    name, [](const Operation& r) {                     \
      [[maybe_unused]] const float a = from_bits(r.a); \
      [[maybe_unused]] const float b = from_bits(r.b); \
      [[maybe_unused]] const float c = from_bits(r.c); \
      return to_bits(expression);                      \
    }                                                  \
  }
  static const std::vector<std::pair<std::string, Binary>> all{
      BITATTN_OPERATION("fma.rn.ftz", ftz::fma(a, b, c)),
      BITATTN_OPERATION("mul.rn.ftz", ftz::mul(a, b)),
      BITATTN_OPERATION("add.rn.ftz", ftz::add(a, b)),
      BITATTN_OPERATION("fma.rn", arith::fma(a, b, c)),
      BITATTN_OPERATION("mul.rn", arith::mul(a, b)),
      BITATTN_OPERATION("add.rn", arith::add(a, b)),
      BITATTN_OPERATION("sub.rn.ftz", ftz::sub(a, b)),
      BITATTN_OPERATION("max", arith::max(a, b)),
      BITATTN_OPERATION("max.ftz", ftz::max(a, b)),
      BITATTN_OPERATION("max.NaN.ftz", ftz::max_nan(a, b)),
      BITATTN_OPERATION("min.ftz", ftz::min(a, b)),
      BITATTN_OPERATION("abs.ftz", ftz::abs(a)),
      BITATTN_OPERATION("neg.ftz", ftz::neg(a)),
      BITATTN_OPERATION("div.approx.ftz", ftz::div(a, b))};
#undef BITATTN_OPERATION
  return all;
}

void Comparison::operations(const RecordCounts& n) {
  const auto all = records<Operation>("fp32_ops.bin", n.operations);
  const std::size_t block = all.size() / 6;
  for (std::size_t i = 0; i < 6; ++i) {
    const auto& [name, model] = operations_by_name()[i];
    fp32_unit<Operation>("fp32_ops.bin " + name, std::span(all).subspan(i * block, block), &Operation::d,
                         model);
  }
}

void Comparison::reductions(const RecordCounts& n) {
  const auto all = records<Operation>("fp32_reductions.bin", n.reductions);
  const std::size_t block = all.size() / 5;
  const auto global = [](const Operation& r) {
    return to_bits(arith::global_reduce_add(from_bits(r.a), from_bits(r.b)));
  };
  const auto bulk = [](const Operation& r) {
    return to_bits(arith::bulk_reduce_add(from_bits(r.a), from_bits(r.b)));
  };
  const std::vector<std::string> names{"red.global.add", "atomicAdd", "atomicAdd float4", "cp.reduce.bulk",
                                       "atomicAdd shared"};
  for (std::size_t i = 0; i < 5; ++i) {
    const auto part = std::span<const Operation>(all).subspan(i * block, block);
    const std::string unit = "fp32_reductions.bin " + names[i];
    if (i < 3) {
      fp32_unit<Operation>(unit, part, &Operation::d, global);
    } else {
      fp32_unit<Operation>(unit, part, &Operation::d, bulk);
    }
  }
}

void Comparison::specials(const RecordCounts& n) {
  std::map<std::string, std::vector<Operation>> by_name;
  const auto rows = read_csv(folder_ + "fp32_specials.csv", "op,a,b,c,d");
  EXPECT_EQ(rows.size(), n.specials) << folder_ << "fp32_specials.csv";
  for (const auto& row : rows) {
    const auto word = [&](std::size_t i) {
      return static_cast<std::uint32_t>(std::stoul(row.at(i), nullptr, 16));
    };
    by_name[row.at(0)].push_back({word(1), word(2), word(3), word(4)});
  }
  EXPECT_EQ(by_name.size(), operations_by_name().size());
  for (const auto& [name, model] : operations_by_name()) {
    fp32_unit<Operation>("fp32_specials.csv " + name, by_name[name], &Operation::d, model);
  }
}

void compare_all(const std::string& folder, const RecordCounts& counts) {
  Comparison comparison(folder);
  comparison.dot_products(counts);
  comparison.functions(counts);
  comparison.conversions(counts);
  comparison.operations(counts);
  comparison.reductions(counts);
  comparison.specials(counts);
  comparison.finish();
}

const std::string kBundleFolder = std::string(BITATTN_BUNDLED_GOLDENS) + "/arithmetic";

TEST(ArithmeticVectors, Bundled) {
  compare_all(kBundleFolder, kBundled);
}

TEST(ArithmeticVectors, LargerSet) {
  const char* goldens = std::getenv("BITATTN_GOLDENS");
  if (goldens == nullptr) GTEST_SKIP() << "BITATTN_GOLDENS is not set";
  const std::string folder = std::string(goldens) + "/h200-arith";
  ASSERT_TRUE(std::filesystem::is_directory(folder)) << folder;
  compare_all(folder, kFullSet);
}

// The bundled dot products must be able to tell the chip from anything close to it: the slow model reproduces
// them, and each of its deviations fails on some.
TEST(ArithmeticVectors, BundledDotProductsNoticeEveryDeviation) {
  struct File {
    std::string name;
    SlowFormat format;
    SlowRule rule;
    std::vector<WideDotProduct> wide = {};
    std::vector<Fp8DotProduct> fp8 = {};

    std::size_t mismatches(const SlowRule& deviating) const {
      std::size_t n = 0;
      for (const auto& r : wide)
        n += slow_dot_product(r.a, format, r.b, format, 16, r.c, deviating) != r.d ? 1U : 0U;
      for (const auto& r : fp8)
        n += slow_dot_product(r.a, format, r.b, format, 32, r.c, deviating) != r.d ? 1U : 0U;
      return n;
    }
  };
  std::vector<File> files{{"wgmma_bf16_k16.bin", kSlowBf16, kSlowHopperWide},
                          {"wgmma_f16_k16.bin", kSlowF16, kSlowHopperWide},
                          {"wgmma_e4m3_k32.bin", kSlowE4m3, kSlowHopperFp8},
                          {"wgmma_e5m2_k32.bin", kSlowE5m2, kSlowHopperFp8}};
  for (File& file : files) {
    if (file.format.width() == 16) file.wide = read_records<WideDotProduct>(kBundleFolder + "/" + file.name);
    if (file.format.width() == 8) file.fp8 = read_records<Fp8DotProduct>(kBundleFolder + "/" + file.name);
    EXPECT_EQ(file.mismatches(file.rule), 0U) << file.name << ": the slow model differs from the chip";
  }
  struct Deviation {
    std::string name;
    void (*apply)(SlowRule&);
    std::size_t seen_by;  ///< the first so many files must notice
  };
  const std::vector<Deviation> deviations{
      {"F one less", [](SlowRule& r) { --r.aligned_fraction_bits; }, 4},
      {"F one more", [](SlowRule& r) { ++r.aligned_fraction_bits; }, 4},
      {"OF one less", [](SlowRule& r) { --r.result_fraction_bits; }, 4},
      {"floor instead of cut off", [](SlowRule& r) { r.align_toward_minus_infinity = true; }, 4},
      {"groups of 8", [](SlowRule& r) { r.group = 8; }, 4},
      {"exponent after normalisation", [](SlowRule& r) { r.normalise_products = true; }, 4},
      {"rounding to nearest", [](SlowRule& r) { r.round_to_nearest = true; }, 4},
      {"zero products in the maximum", [](SlowRule& r) { r.zero_products_enter_maximum = true; }, 4},
      {"zero c in the maximum", [](SlowRule& r) { r.zero_c_enters_maximum = true; }, 1},
      {"no exponent floor", [](SlowRule& r) { r.has_floor = false; }, 1},
      {"exponent floor -132", [](SlowRule& r) { r.exponent_floor = -132; }, 1},
      {"exponent floor -134", [](SlowRule& r) { r.exponent_floor = -134; }, 1},
      {"sign of an underflowed zero", [](SlowRule& r) { r.keep_sign_of_underflow = true; }, 1},
      {"subnormal operands flushed", [](SlowRule& r) { r.flush_subnormal_inputs = true; }, 4},
      {"overflow to the largest number", [](SlowRule& r) { r.saturate = true; }, 1},
  };
  std::string table = fmt::format("{:<32}", "mismatches of the deviating model");
  for (const File& file : files) table += fmt::format(" {:>20}", file.name);
  table += "\n";
  for (const Deviation& deviation : deviations) {
    table += fmt::format("{:<33}", deviation.name);
    for (std::size_t i = 0; i < files.size(); ++i) {
      SlowRule rule = files[i].rule;
      deviation.apply(rule);
      const std::size_t n = files[i].mismatches(rule);
      table += fmt::format(" {:>20}", n);
      if (i < deviation.seen_by) {
        EXPECT_GT(n, 0U) << deviation.name << " is not noticed by " << files[i].name;
      }
    }
    table += "\n";
  }
  fmt::print("{}", table);
}

// So must the bundled fp32 vectors: the exact model reproduces them, and no other rule for tiny results does.
TEST(ArithmeticVectors, BundledOperationsNoticeEveryUnderflowRule) {
  const auto operations = read_records<Operation>(kBundleFolder + "/fp32_ops.bin");
  const auto reductions = read_records<Operation>(kBundleFolder + "/fp32_reductions.bin");
  const auto exact = [](std::size_t operation, const Operation& r, Underflow underflow) {
    switch (operation % 3) {
      case 0:
        return exact_fma(r.a, r.b, r.c, underflow);
      case 1:
        return exact_mul(r.a, r.b, underflow);
      default:
        return exact_add(r.a, r.b, underflow);
    }
  };
  const auto mismatches = [&](std::size_t operation, Underflow underflow) {
    const std::size_t block = operations.size() / 6;
    std::size_t n = 0;
    for (const Operation& r : std::span(operations).subspan(operation * block, block)) {
      n += exact(operation, r, underflow) != r.d ? 1U : 0U;
    }
    return n;
  };
  const auto reduction_mismatches = [&](std::size_t form, Underflow underflow) {
    const std::size_t block = reductions.size() / 5;
    std::size_t n = 0;
    for (const Operation& r : std::span(reductions).subspan(form * block, block)) {
      n += exact_add(r.a, r.b, underflow) != r.d ? 1U : 0U;
    }
    return n;
  };
  for (std::size_t ftz = 0; ftz < 3; ++ftz) {
    EXPECT_EQ(mismatches(ftz, Underflow::kFlushAfterRounding), 0U);
    EXPECT_GT(mismatches(ftz, Underflow::kGradual), 0U);
    EXPECT_EQ(mismatches(ftz + 3, Underflow::kGradual), 0U);
    EXPECT_GT(mismatches(ftz + 3, Underflow::kFlushAfterRounding), 0U);
  }
  for (const Underflow wrong : {Underflow::kFlushBeforeRounding, Underflow::kFlushSubnormal}) {
    EXPECT_GT(mismatches(0, wrong), 0U);
    EXPECT_GT(mismatches(1, wrong), 0U);
  }
  for (std::size_t form = 0; form < 5; ++form) {
    const bool flushes = form < 3;
    EXPECT_EQ(reduction_mismatches(form, flushes ? Underflow::kFlushAfterRounding : Underflow::kGradual), 0U);
    EXPECT_GT(reduction_mismatches(form, flushes ? Underflow::kGradual : Underflow::kFlushAfterRounding), 0U);
  }
}

}  // namespace
}  // namespace bitattn::test
