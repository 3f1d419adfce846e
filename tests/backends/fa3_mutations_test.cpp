// Proves: the bundled goldens can tell right from wrong. The emulator with ONE decision of its operation
// order changed must differ from some recorded bit. The list is that of docs/spec/fa3-operation-order.md 11.

#include <gtest/gtest.h>

#include <cstdio>
#include <functional>

#include "backends/emulator.hpp"
#include "tests/backends/goldens.hpp"

namespace bitattn {
namespace {

using profile::Profile;

struct Mutation {
  const char* name;
  std::function<void(Profile&)> apply;
};

const std::vector<Mutation>& mutations() {
  static const std::vector<Mutation> all{
      {"RowSumRescaleNotFused", [](Profile& p) { p.forward.row_sum_rescale_fused = false; }},
      {"LseFusesTheLogTerm", [](Profile& p) { p.forward.lse = profile::LseFusion::log_term; }},
      {"DpsumRoundsProduct0",
       [](Profile& p) { p.backward.dpsum = profile::DpsumStart::first_product_rounded; }},
      {"DqOrderReversed", [](Profile& p) { p.backward.dq_order_reversed = true; }},
      {"ForwardExponentProductRounded", [](Profile& p) { p.forward.exponent_fused = false; }},
      {"BackwardExponentProductRounded", [](Profile& p) { p.backward.exponent_fused = false; }},
      {"NoFlushInScalarOps", [](Profile& p) { p.arithmetic.flush_subnormals = false; }},
      {"BulkReduceFlushes", [](Profile& p) { p.backward.bulk_reduce_flushes = true; }},
      {"Ex2CorrectlyRounded", [](Profile& p) { p.arithmetic.ex2 = profile::Function::correctly_rounded; }},
      {"Lg2CorrectlyRounded", [](Profile& p) { p.arithmetic.lg2 = profile::Function::correctly_rounded; }},
      {"RcpCorrectlyRounded", [](Profile& p) { p.arithmetic.rcp = profile::Function::correctly_rounded; }},
      {"QuadSumBesideThenAcross",
       [](Profile& p) { p.forward.quad_sum = profile::QuadSum::beside_then_across; }},
      {"ForwardKeyBlocksLeftToRight",
       [](Profile& p) { p.forward.key_blocks = profile::KeyBlockOrder::left_to_right; }},
      {"DsFused", [](Profile& p) { p.backward.ds = profile::DsOrder::fused; }},
      {"DsFromTheCastP", [](Profile& p) { p.backward.ds_from_cast_p = true; }},
      {"ForwardBlockN128", [](Profile& p) { p.forward.block_n = 128; }},
      {"BackwardBlockN64", [](Profile& p) { p.backward.block_n = 64; }},
      {"TensorCoreKeeps24Bits", [](Profile& p) { p.arithmetic.tensor_core_fraction_bits = 24; }},
      {"TensorCoreRoundsToNearest", [](Profile& p) { p.arithmetic.tensor_core_rounds_to_nearest = true; }},
  };
  return all;
}

class Mutated : public ::testing::TestWithParam<std::size_t> {};

TEST_P(Mutated, IsNoticedByTheBundledCaptures) {
  const Mutation& mutation = mutations()[GetParam()];
  Profile profile;
  mutation.apply(profile);
  std::size_t noticed = 0;
  std::size_t tried = 0;
  for (const std::string& path : test::bundled_captures("fa3")) {
    const Capture capture = test::load(path);
    const Result emulated = emulator_backend(profile)->run(capture, {});
    const test::Difference d = test::difference(capture.recorded, emulated);
    ++tried;
    if (d.differing == 0) continue;
    ++noticed;
    std::printf("%s: noticed by %s: %s\n", mutation.name, path.substr(path.rfind('/') + 1).c_str(),
                d.text.c_str());
    break;  // one witness is enough; the unmutated emulator gives every bit of this file (fa3_goldens_test)
  }
  EXPECT_EQ(noticed, 1U) << mutation.name << " went unnoticed in " << tried << " captures";
}

INSTANTIATE_TEST_SUITE_P(Fa3, Mutated, ::testing::Range<std::size_t>(0, mutations().size()),
                         [](const ::testing::TestParamInfo<std::size_t>& tested) {
                           return std::string(mutations()[tested.param].name);
                         });

}  // namespace
}  // namespace bitattn
