// Tile products of operands wider than BF16: in vector instructions the bits of the definition, and with BF16
// operands those of the tensor core.

#include "emu/kernels/wide_products.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32.hpp"
#include "tests/emu/arith/random_bits.hpp"

namespace bitattn {
namespace {

using kernels::WideProduct;

struct Tile {
  int rows, depth, columns;
  std::vector<double> left, right, c;
  WideProduct product(std::vector<double>& out) const {
    return {left.data(), right.data(), rows, depth, columns, out.data(), columns};
  }
};

enum class Numbers { usual, narrow, extreme, special };

double number(test::RandomBits& random, Numbers kind) {
  if (random.between(0, 9) == 0) return random.between(0, 1) == 0 ? 0.0 : -0.0;
  const double sign = random.between(0, 1) == 0 ? 1.0 : -1.0;
  const double significand = 1.0 + std::ldexp(static_cast<double>(random.bits32()), -32) +
                             std::ldexp(static_cast<double>(random.bits32() & 0xfffffU), -52);
  switch (kind) {
    case Numbers::usual:
      return sign * std::ldexp(significand, random.between(-12, 6));
    case Numbers::narrow:
      return static_cast<double>(
          arith::fp32_from_bf16(static_cast<std::uint16_t>(random.bits32() >> 16U & 0xbfffU)));
    case Numbers::extreme:  // products around 2^-126, below, and above 2^128
      switch (random.between(0, 5)) {
        case 0:
          return sign * std::ldexp(significand, random.between(60, 66));
        case 1:
          return sign * std::ldexp(significand, random.between(-700, -500));
        default:
          return sign * std::ldexp(significand, random.between(-72, -58));
      }
    case Numbers::special:
      if (random.between(0, 40) == 0) return sign * std::numeric_limits<double>::infinity();
      if (random.between(0, 60) == 0) return std::numeric_limits<double>::quiet_NaN();
      return sign * std::ldexp(significand, random.between(-4, 4));
  }
  return 0;
}

Tile tile(test::RandomBits& random, Numbers kind) {
  Tile t{random.between(1, 9), 16 * random.between(1, 5), random.between(1, 40), {}, {}, {}};
  t.left.resize(static_cast<std::size_t>(t.rows * t.depth));
  t.right.resize(static_cast<std::size_t>(t.depth * t.columns));
  t.c.resize(static_cast<std::size_t>(t.rows * t.columns));
  for (double& x : t.left) x = number(random, kind);
  for (double& x : t.right) x = number(random, kind);
  for (double& x : t.c) x = static_cast<double>(static_cast<float>(number(random, kind)));
  return t;
}

TEST(WideProducts, VectorsGiveTheBitsOfTheDefinition) {
  test::RandomBits random(5);
  for (const Numbers kind : {Numbers::usual, Numbers::narrow, Numbers::extreme, Numbers::special}) {
    for (int n = 0; n < 150; ++n) {
      const Tile t = tile(random, kind);
      std::vector<double> vector = t.c;
      std::vector<double> scalar = t.c;
      kernels::multiply_by_rule(t.product(vector), arith::kHopperWide);
      kernels::multiply_by_rule_scalar(t.product(scalar), arith::kHopperWide);
      for (std::size_t i = 0; i < scalar.size(); ++i) {
        ASSERT_EQ(std::bit_cast<std::uint64_t>(vector[i]), std::bit_cast<std::uint64_t>(scalar[i]))
            << vector[i] << " " << scalar[i];
      }
    }
  }
}

TEST(WideProducts, NarrowOperandsGiveTheTensorCoresBits) {
  test::RandomBits random(6);
  for (int n = 0; n < 150; ++n) {
    const Tile t = tile(random, Numbers::narrow);
    std::vector<double> c = t.c;
    kernels::multiply_by_rule(t.product(c), arith::kHopperWide);
    for (int m = 0; m < t.rows; ++m) {
      for (int column = 0; column < t.columns; ++column) {
        const auto at = static_cast<std::size_t>(m * t.columns + column);
        std::uint32_t expected = arith::to_bits(static_cast<float>(t.c[at]));
        for (int k = 0; k < t.depth; k += 16) {
          std::uint16_t a[16];
          std::uint16_t b[16];
          for (int i = 0; i < 16; ++i) {
            a[i] = arith::bf16_from_fp32(
                static_cast<float>(t.left[static_cast<std::size_t>(m * t.depth + k + i)]));
            b[i] = arith::bf16_from_fp32(
                static_cast<float>(t.right[static_cast<std::size_t>((k + i) * t.columns + column)]));
          }
          expected = arith::mma_bf16_k16(a, b, expected);
        }
        ASSERT_EQ(arith::to_bits(static_cast<float>(c[at])), expected);
      }
    }
  }
}

TEST(WideProducts, ExactIsTheSumOfProducts) {
  test::RandomBits random(7);
  for (int n = 0; n < 100; ++n) {
    const Tile t = tile(random, Numbers::usual);
    std::vector<double> c = t.c;
    kernels::multiply_exactly(t.product(c));
    for (int m = 0; m < t.rows; ++m) {
      for (int column = 0; column < t.columns; ++column) {
        const auto at = static_cast<std::size_t>(m * t.columns + column);
        long double sum = static_cast<long double>(t.c[at]);
        long double size = std::abs(sum);
        for (int k = 0; k < t.depth; ++k) {
          const long double product =
              static_cast<long double>(t.left[static_cast<std::size_t>(m * t.depth + k)]) *
              static_cast<long double>(t.right[static_cast<std::size_t>(k * t.columns + column)]);
          sum += product;
          size += std::abs(product);
        }
        ASSERT_LE(std::abs(static_cast<long double>(c[at]) - sum), 1e-14L * size);
      }
    }
  }
}

}  // namespace
}  // namespace bitattn
