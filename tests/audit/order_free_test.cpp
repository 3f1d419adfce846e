// An element whose order of parts is open passes exactly when one order of them gives it.

#include "audit/order_free.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "emu/arith/bits.hpp"
#include "emu/arith/reduce_add.hpp"

namespace {

using bitattn::arith::from_bits;
using bitattn::arith::to_bits;
using bitattn::audit::check_orders;
using bitattn::audit::OrderCheck;

const float kAbsent = from_bits(bitattn::audit::kAbsentPart);

OrderCheck check(const std::vector<float>& parts, bool flushed, float wanted) {
  return check_orders(parts, flushed, [&](float sum) { return to_bits(sum) == to_bits(wanted); });
}

/// Sums of all orders by brute force over permutations, every part added in turn, zeros too.
std::vector<std::uint32_t> all_sums(std::vector<float> parts, bool flushed) {
  std::vector<std::uint32_t> sums;
  std::vector<std::size_t> order(parts.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  do {
    float sum = 0;
    for (const std::size_t i : order) {
      sum = flushed ? bitattn::arith::global_reduce_add(sum, parts[i])
                    : bitattn::arith::bulk_reduce_add(sum, parts[i]);
    }
    sums.push_back(to_bits(sum));
  } while (std::next_permutation(order.begin(), order.end()));
  std::sort(sums.begin(), sums.end());
  sums.erase(std::unique(sums.begin(), sums.end()), sums.end());
  return sums;
}

TEST(OrderFree, FindsExactlyTheSumsOfAllPermutations) {
  // Parts that round differently in different orders, with zeros of both signs, subnormals and exact
  // cancellation among them.
  const std::vector<std::vector<float>> cases{
      {1.0F, 0x1p-24F, 0x1p-24F},
      {1.0F, 0x1p-24F, -1.0F, 0x1p-30F},
      {0x1.8p-126F, -0x1.4p-126F, 0.0F, -0.0F},
      {0x1.8p-126F, -0x1.4p-126F},
      {0x1p-140F, 0x1p-141F, -0x1p-140F, 0.0F},
      {-0.0F, -0.0F},
      {1e30F, -1e30F, 1.0F, 3.0F, 0x1.fffffep-1F},
      {3.0F, 0x1p-22F, 0x1p-23F, -3.0F, 0x1.8p-23F, 7.0F},
  };
  for (const bool flushed : {false, true}) {
    for (const std::vector<float>& parts : cases) {
      const std::vector<std::uint32_t> sums = all_sums(parts, flushed);
      for (const std::uint32_t sum : sums) {
        EXPECT_EQ(check(parts, flushed, from_bits(sum)), OrderCheck::one_order) << from_bits(sum);
        for (const std::uint32_t near : {sum + 1, sum - 1, sum ^ 0x80000000U}) {
          const bool reachable = std::binary_search(sums.begin(), sums.end(), near);
          EXPECT_EQ(check(parts, flushed, from_bits(near)),
                    reachable ? OrderCheck::one_order : OrderCheck::no_order);
        }
      }
    }
  }
}

TEST(OrderFree, AbsentPartsDoNotCount) {
  EXPECT_EQ(check({kAbsent, 2.0F, kAbsent, 3.0F}, false, 5.0F), OrderCheck::one_order);
  EXPECT_EQ(check({kAbsent, kAbsent}, false, 0.0F), OrderCheck::one_order);
  EXPECT_EQ(check({kAbsent}, false, -0.0F), OrderCheck::no_order);
}

TEST(OrderFree, ARealNanIsAPartAndStaysTheChips) {
  EXPECT_EQ(check({from_bits(0x7fffffffU), 1.0F}, false, from_bits(0x7fffffffU)), OrderCheck::one_order);
  EXPECT_EQ(check({from_bits(0x7fffffffU), 1.0F}, false, from_bits(0x7fc00000U)), OrderCheck::no_order);
}

TEST(OrderFree, SixPartsAreTriedSevenAreNot) {
  const std::vector<float> six{1, 2, 4, 8, 16, 32};
  EXPECT_EQ(check(six, false, 63.0F), OrderCheck::one_order);
  std::vector<float> seven = six;
  seven.push_back(64);
  EXPECT_EQ(check(seven, false, 127.0F), OrderCheck::too_many_parts);
  // Parts that are zero change no sum, so they do not use up the six.
  std::vector<float> padded = six;
  padded.insert(padded.end(), {0.0F, -0.0F, kAbsent});
  EXPECT_EQ(check(padded, false, 63.0F), OrderCheck::one_order);
}

}  // namespace
