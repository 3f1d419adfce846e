// Every element's place and back, for every kind of tensor and both layouts.

#include "audit/place.hpp"

#include <gtest/gtest.h>

#include "tests/audit/problems.hpp"

namespace {

using namespace bitattn;
using audit::Axes;
using audit::Place;
using audit::TileSizes;

void round_trip(const Problem& problem, const std::vector<std::size_t>& shape, Axes axes,
                const TileSizes& tiles) {
  std::size_t size = 1;
  for (const std::size_t d : shape) size *= d;
  ASSERT_GT(size, 0U);
  for (std::size_t i = 0; i < size; ++i) {
    const Place place = audit::place_of(problem, shape, axes, false, tiles, i);
    ASSERT_EQ(
        audit::index_of(problem, shape, axes, tiles, place.sequence, place.head, place.row, place.column), i)
        << place.text(problem.layout);
  }
}

TEST(Place, RoundTripsInEveryTensorOfABatch) {
  const Problem p = test::blank({2, 5, 7, 4, 2, 8});
  const TileSizes tiles{4, 4, 8, 8};
  round_trip(p, p.q_shape(), Axes::query_columns, tiles);
  round_trip(p, p.k_shape(), Axes::key_columns, tiles);
  round_trip(p, p.row_shape(), Axes::query_rows, tiles);
  round_trip(p, {2, 4, 8}, Axes::padded_query_rows, tiles);
  round_trip(p, {2, 4, 8, 64}, Axes::padded_query_columns, tiles);
  round_trip(p, {2, 2, 8, 64}, Axes::padded_key_columns, tiles);
}

TEST(Place, RoundTripsInPackedSequences) {
  const Problem p = test::blank_packed({3, 0, 9, 1}, {4, 2, 0, 5}, {1, 0, 0, 2, 1, 8});
  const TileSizes tiles{4, 4, 4, 4};
  round_trip(p, p.q_shape(), Axes::query_columns, tiles);
  round_trip(p, p.k_shape(), Axes::key_columns, tiles);
  round_trip(p, p.row_shape(), Axes::query_rows, tiles);
  const std::size_t padded = (13 + 4 * 4 + 3) / 4 * 4;
  round_trip(p, {2, padded}, Axes::padded_query_rows, tiles);
  round_trip(p, {2, padded, 64}, Axes::padded_query_columns, tiles);
}

TEST(Place, NamesSequenceHeadRowColumnAndTile) {
  const Problem p = test::blank({2, 300, 200, 4, 2, 8});
  const TileSizes tiles{128, 176, 80, 128};
  Place place = audit::place_of(p, p.q_shape(), Axes::query_columns, true, tiles,
                                audit::index_of(p, p.q_shape(), Axes::query_columns, tiles, 1, 2, 290, 5));
  EXPECT_EQ(place.text(p.layout), "b 1, h 2, i 290, d 5 (forward tile m 2)");
  place = audit::place_of(p, p.k_shape(), Axes::key_columns, false, tiles,
                          audit::index_of(p, p.k_shape(), Axes::key_columns, tiles, 0, 1, 130, 0));
  EXPECT_EQ(place.text(p.layout), "b 0, h 1, j 130, d 0 (backward tile n 1)");
  place = audit::place_of(p, {2, 4, 320}, Axes::padded_query_rows, false, tiles, 310);
  EXPECT_EQ(place.text(p.layout), "b 0, h 0, i 310, padding (backward tile m 3)");
  EXPECT_TRUE(place.padding);
}

TEST(Place, PackedSequencesCountRowsFromTheirOwnStart) {
  const Problem p = test::blank_packed({100, 256, 44}, {100, 256, 44}, {1, 0, 0, 1, 1, 128});
  const TileSizes tiles{128, 128, 64, 128};
  // The layout of the goldens: sequence b begins at floor((begin + b * 64) / 64) * 64.
  EXPECT_EQ(audit::index_of(p, {1, 640}, Axes::padded_query_rows, tiles, 1, 0, 0, 0), 128U);
  EXPECT_EQ(audit::index_of(p, {1, 640}, Axes::padded_query_rows, tiles, 2, 0, 3, 0),
            (356 + 128) / 64 * 64 + 3U);
  const Place place = audit::place_of(p, p.row_shape(), Axes::query_rows, true, tiles, 357);
  EXPECT_EQ(place.text(p.layout), "sequence 2, h 0, i 1 (forward tile m 0)");
}

TEST(Tiles, AreTheKernelsOwnUnlessTheCaptureSaysOtherwise) {
  Problem p = test::blank({1, 300, 300, 1, 1, 128});
  EXPECT_EQ(audit::tile_sizes(p).forward_n, 176);
  EXPECT_EQ(audit::tile_sizes(p).backward_m, 80);
  p.causal = true;
  EXPECT_EQ(audit::tile_sizes(p).forward_n, 128);
  EXPECT_EQ(audit::tile_sizes(p).backward_m, 64);
  p.attributes["bwd_block_m"] = std::int64_t{96};
  EXPECT_EQ(audit::tile_sizes(p).backward_m, 96);
}

}  // namespace
