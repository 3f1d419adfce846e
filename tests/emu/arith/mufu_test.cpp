// The special functions: their squarer, their tables, and a part of their digests over all inputs
// (exhaustive_test.cpp has the whole).

#include "emu/arith/mufu.hpp"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "tests/emu/arith/golden_vectors.hpp"
#include "tests/emu/arith/sweep.hpp"

namespace bitattn::test {
namespace {

// docs/spec/hopper-arithmetic.md 2, the definition: the sum over kept partial products.
std::uint32_t square_17_by_products(std::uint32_t u) {
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < 17; ++i) {
    if ((u >> i) % 2U == 0U) continue;
    if (2 * i >= 19) sum += std::uint64_t{1} << (2 * i);
    for (std::uint32_t j = i + 1; j < 17; ++j) {
      if ((u >> j) % 2U == 1U && i + j + 1 >= 19) sum += std::uint64_t{1} << (i + j + 1);
    }
  }
  EXPECT_EQ(sum % (std::uint64_t{1} << 19U), 0U);
  return static_cast<std::uint32_t>(sum >> 19U);
}

// The same page, "by rows": each row cut off by itself.
std::uint32_t square_17_by_rows(std::uint32_t u) {
  std::uint32_t s = 0;
  for (std::uint32_t i = 0; i < 17; ++i) {
    if ((u >> i & 1U) == 0U) continue;
    const std::uint64_t row = (std::uint64_t{u >> (i + 1)} << (2 * i + 2)) | (std::uint64_t{1} << (2 * i));
    s += static_cast<std::uint32_t>(row >> 19U);
  }
  return s;
}

TEST(Mufu, TheSquarerEqualsItsDefinitionOnAllInputs) {
  std::uint32_t cut_off_as_a_whole = 0;
  for (std::uint32_t u = 0; u < 1U << 17U; ++u) {
    const std::uint32_t s = arith::mufu::square_17(u);
    ASSERT_EQ(s, square_17_by_products(u)) << "u = " << u;
    ASSERT_EQ(s, square_17_by_rows(u)) << "u = " << u;
    if (s == (std::uint64_t{u} * u) >> 19U) ++cut_off_as_a_whole;
  }
  // It is no square with its lower bits cut off.
  EXPECT_LT(cut_off_as_a_whole, 1U << 16U);
  fmt::print("131072 inputs, 0 mismatches; {} of them are the cut off square\n", cut_off_as_a_whole);
}

// A few sign-exponent blocks of each function, both signs, every class of exponent: zeros and subnormals, the
// smallest and largest normal numbers, infinities and NaNs, and all exponents where a function changes from
// one to the next.
TEST(Mufu, SampledDigestsEqualTheChips) {
  std::vector<std::uint32_t> blocks;
  for (const std::uint32_t sign : {0U, 256U}) {
    for (const std::uint32_t exponent :
         {0U,   1U,   64U,  103U, 104U, 110U, 118U, 119U, 120U, 121U, 122U, 123U, 124U,
          125U, 126U, 127U, 128U, 129U, 130U, 133U, 134U, 135U, 190U, 253U, 254U, 255U}) {
      blocks.push_back(sign + exponent);
    }
  }
  for (const SweptFunction& function : kSweptFunctions) {
    EXPECT_EQ(differing_digests(function, blocks, false), "");
    fmt::print("{}: {} inputs in {} digests\n", function.name, blocks.size() << 23U, blocks.size());
  }
}

std::uint32_t ex2_with_one_wrong_bit(std::uint32_t x) {
  return arith::mufu::ex2(x) ^ (x == 0x3f123456U ? 1U : 0U);
}

// The comparison of digests must be able to fail, and name the range.
TEST(Mufu, AWrongValueChangesTheDigest) {
  const SweptFunction wrong{"ex2", 1, digest_of<ex2_with_one_wrong_bit>};
  const std::string text = differing_digests(wrong, {125U, 126U, 127U}, false);
  EXPECT_NE(text.find("0x3f000000 (0x1p-1) .. 0x3f7fffff (0x1.fffffep-1)"), std::string::npos) << text;
  EXPECT_EQ(text.find("0x3f800000"), std::string::npos) << text;
}

/// Rows of a table of docs/spec/data as integers.
std::vector<std::vector<int>> table_rows(const std::string& file, const std::string& header) {
  std::vector<std::vector<int>> rows;
  for (const auto& row : read_csv(std::string(BITATTN_SPEC_DATA) + "/" + file, header)) {
    std::vector<int>& numbers = rows.emplace_back();
    for (const auto& field : row) numbers.push_back(std::stoi(field));
  }
  return rows;
}

using SegmentOf = arith::mufu::table::Segment (*)(std::uint32_t);

void compare_table(const std::string& file, std::size_t segments, SegmentOf segment) {
  const auto rows = table_rows(file, "segment,C0,C1,C2");
  ASSERT_EQ(rows.size(), segments) << file;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto ours = segment(static_cast<std::uint32_t>(i));
    EXPECT_EQ(rows[i], (std::vector<int>{static_cast<int>(i), ours.c0, ours.c1, ours.c2}))
        << file << " row " << i;
  }
}

TEST(Mufu, TablesEqualThePublishedOnes) {
  namespace table = arith::mufu::table;
  compare_table("mufu_ex2_coeff.csv", std::size(table::ex2_host), table::ex2);
  compare_table("mufu_lg2_coeff.csv", std::size(table::lg2_host), table::lg2);
  compare_table("mufu_rcp_coeff.csv", std::size(table::rcp_host), table::rcp);
  compare_table("mufu_rsq_coeff.csv", std::size(table::rsqrt_host), table::rsqrt);

  const auto rows = table_rows("mufu_tanh_coeff.csv", "exponent,segment,C0,C1,C2");
  ASSERT_EQ(rows.size(), std::size(table::tanh_host));
  std::uint32_t next = 0;
  for (std::uint32_t i = 0; i < std::size(table::tanh_first_host); ++i) {  // exponents -8..2
    EXPECT_EQ(table::tanh_first(i), static_cast<std::int32_t>(next));
    for (int segment = 0; segment < 1 << table::tanh_bits(i); ++segment, ++next) {
      ASSERT_LT(next, rows.size());
      const auto ours = table::tanh(next);
      EXPECT_EQ(rows[next], (std::vector<int>{static_cast<int>(i) - 8, segment, ours.c0, ours.c1, ours.c2}))
          << "mufu_tanh_coeff.csv row " << next;
    }
  }
  EXPECT_EQ(next, rows.size());
}

}  // namespace
}  // namespace bitattn::test
