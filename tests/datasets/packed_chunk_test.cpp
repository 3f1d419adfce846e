// Proves: a chunk packed here is one that the HDF5 library's own filters take apart again, and its checksum
// is theirs.

#include "datasets/packed_chunk.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "datasets/hdf5_support.hpp"
#include "datasets/philox.hpp"
#include "tests/datasets/hdf5_builder.hpp"

namespace bitattn {
namespace {

using hdf5::Handle;
using Bytes = std::vector<unsigned char>;

/// Random bytes; every third run of 32 is zeros, so that something can be packed.
Bytes some_bytes(std::size_t size, std::uint32_t stream) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) {
    if (i / 32 % 3 == 2) continue;
    bytes[i] = static_cast<unsigned char>(philox({static_cast<std::uint32_t>(i), stream, 0, 0}, {5, 6})[0]);
  }
  return bytes;
}

Handle new_file(const std::string& path) {
  return Handle(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose);
}

hid_t type_of(std::size_t bytes) {
  return bytes == 2 ? H5T_STD_U16LE : bytes == 4 ? H5T_IEEE_F32LE : H5T_IEEE_F64LE;
}

std::vector<hsize_t> to_hsize(const std::vector<std::size_t>& shape) {
  return {shape.begin(), shape.end()};
}

const ChunkGrid kGrids[] = {
    {{1}, {1}, 2},
    {{1000}, {1000}, 4},
    {{1000}, {300}, 8},
    {{1, 1500, 3, 64}, {1, 188, 3, 64}, 2},
    {{2, 4, 33}, {1, 2, 33}, 4},
    {{3, 5, 7, 9}, {2, 3, 4, 5}, 8},
    {{5, 1, 7}, {2, 1, 7}, 2},
    {{2, 3, 4, 5, 6}, {1, 2, 3, 2, 4}, 4},
};

TEST(PackedChunk, TheLibraryReadsTheSameBytes) {
  const test::TemporaryFolder folder;
  const Handle file = new_file(folder / "a.h5");
  std::uint32_t stream = 0;
  for (const ChunkGrid& grid : kGrids) {
    std::size_t elements = 1;
    for (const std::size_t d : grid.shape) elements *= d;
    const Bytes data = some_bytes(elements * grid.element, ++stream);
    const std::vector<hsize_t> dims = to_hsize(grid.shape);
    const std::vector<hsize_t> chunk = to_hsize(grid.chunk);
    const Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr), H5Sclose);
    const Handle create(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_chunk(create.get(), static_cast<int>(chunk.size()), chunk.data());
    H5Pset_shuffle(create.get());
    H5Pset_deflate(create.get(), 4);
    H5Pset_fletcher32(create.get());
    const Handle set(H5Dcreate2(file.get(), std::to_string(stream).c_str(), type_of(grid.element),
                                space.get(), H5P_DEFAULT, create.get(), H5P_DEFAULT),
                     H5Dclose);
    ASSERT_TRUE(set);
    ChunkPacker packer;
    for (std::size_t i = 0; i < grid.chunks(); ++i) {
      const Bytes packed = packer.pack(grid, data.data(), i);
      const std::vector<hsize_t> at = to_hsize(grid.origin(i));
      ASSERT_GE(H5Dwrite_chunk(set.get(), H5P_DEFAULT, 0, at.data(), packed.size(), packed.data()), 0);
    }
    Bytes back(data.size());
    ASSERT_GE(H5Dread(set.get(), type_of(grid.element), H5S_ALL, H5S_ALL, H5P_DEFAULT, back.data()), 0)
        << "grid " << stream;
    EXPECT_TRUE(back == data) << "grid " << stream;
  }
}

/// What lies outside the array is as if the array went on with zeros.
TEST(PackedChunk, EdgesAreFilledWithZeros) {
  const ChunkGrid ragged{{3, 5, 7}, {2, 3, 4}, 4};
  const ChunkGrid whole{{4, 6, 8}, {2, 3, 4}, 4};
  const Bytes data = some_bytes(std::size_t{3} * 5 * 7 * 4, 50);
  Bytes padded(std::size_t{4} * 6 * 8 * 4);
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = 0; j < 5; ++j) {
      std::memcpy(&padded[(i * 6 + j) * 8 * 4], &data[(i * 5 + j) * 7 * 4], std::size_t{7} * 4);
    }
  }
  ASSERT_EQ(ragged.chunks(), whole.chunks());
  ChunkPacker packer;
  for (std::size_t i = 0; i < whole.chunks(); ++i) {
    EXPECT_TRUE(packer.pack(ragged, data.data(), i) == packer.pack(whole, padded.data(), i)) << i;
  }
}

/// Sums that are a multiple of the modulus, nothing but zeros, odd ends.
TEST(PackedChunk, TheChecksumIsTheLibrarys) {
  std::vector<Bytes> cases{Bytes(1), Bytes(2), Bytes(101), Bytes(300'000), Bytes(1, 0xff)};
  for (const std::size_t size : {2U, 3U, 4U, 5U, 719U, 720U, 721U, 722U, 131'072U, 131'073U, 300'001U}) {
    cases.emplace_back(size, 0xff);
    cases.push_back(some_bytes(size, static_cast<std::uint32_t>(size)));
  }
  cases.push_back({0x80, 0x00, 0x7f, 0xff});              // the sum is the modulus
  cases.push_back({0x00, 0x01, 0xff, 0xfd, 0x00, 0x01});  // the sum of sums is twice the modulus
  const test::TemporaryFolder folder;
  const Handle file = new_file(folder / "a.h5");
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Bytes& data = cases[i];
    const hsize_t size = data.size();
    const Handle space(H5Screate_simple(1, &size, nullptr), H5Sclose);
    const Handle create(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_chunk(create.get(), 1, &size);
    H5Pset_fletcher32(create.get());
    const Handle set(H5Dcreate2(file.get(), std::to_string(i).c_str(), H5T_STD_U8LE, space.get(), H5P_DEFAULT,
                                create.get(), H5P_DEFAULT),
                     H5Dclose);
    ASSERT_GE(H5Dwrite(set.get(), H5T_STD_U8LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, data.data()), 0);
    H5Fflush(file.get(), H5F_SCOPE_GLOBAL);
    Bytes stored(data.size() + 4);
    const hsize_t origin = 0;
    std::uint32_t filters = 0;
    ASSERT_GE(H5Dread_chunk(set.get(), H5P_DEFAULT, &origin, &filters, stored.data()), 0);
    std::uint32_t theirs = 0;
    std::memcpy(&theirs, &stored[data.size()], sizeof theirs);
    EXPECT_EQ(fletcher32(data.data(), data.size()), theirs) << "case " << i << ", " << size << " bytes";
  }
}

TEST(PackedChunk, TheSameDataGivesTheSameBytes) {
  const ChunkGrid grid{{64, 1024}, {16, 1024}, 2};
  const Bytes data = some_bytes(std::size_t{64} * 1024 * 2, 60);
  ChunkPacker one;
  ChunkPacker other;
  const Bytes first = one.pack(grid, data.data(), 2);
  one.pack(grid, data.data(), 1);
  EXPECT_TRUE(one.pack(grid, data.data(), 2) == first);
  EXPECT_TRUE(other.pack(grid, data.data(), 2) == first);
  EXPECT_LT(first.size(), grid.chunk_bytes());
}

}  // namespace
}  // namespace bitattn
