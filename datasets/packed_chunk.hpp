#pragma once
// One chunk of a tensor as HDF5's shuffle, deflate and Fletcher-32 filters would store it, made without the
// library: it packs one chunk at a time, which took longer than all else for a large layer.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

struct libdeflate_compressor;

namespace bitattn {

/// A row-major array in memory, cut into chunks of one shape. Chunks that reach past it are filled with
/// zeros.
struct ChunkGrid {
  std::vector<std::size_t> shape;  ///< of the array, at least one axis, no axis empty
  std::vector<std::size_t> chunk;  ///< of a chunk, no axis longer than the array's
  std::size_t element = 0;         ///< bytes of an element

  std::size_t chunks() const;
  std::size_t chunk_bytes() const;
  /// First element of a chunk along each axis. Chunks are counted with the last axis fastest.
  std::vector<std::size_t> origin(std::size_t index) const;
};

/// Fletcher's checksum as HDF5 has it: big-endian 16-bit words modulo 65535, where 0 stands as 65535 unless
/// every word is 0; a last odd byte counts as a word's upper one.
std::uint32_t fletcher32(const unsigned char* data, std::size_t size);

/// Packs chunks, one after the other. Not for several threads at a time.
class ChunkPacker {
 public:
  ChunkPacker();
  ChunkPacker(const ChunkPacker&) = delete;
  ChunkPacker& operator=(const ChunkPacker&) = delete;
  ~ChunkPacker();

  /// The stored bytes of one chunk of `data`: shuffled, deflated, the checksum of what came of that behind
  /// it. The same data gives the same bytes.
  std::vector<unsigned char> pack(const ChunkGrid& grid, const void* data, std::size_t index);

 private:
  std::unique_ptr<libdeflate_compressor, void (*)(libdeflate_compressor*)> compressor_;
  std::vector<unsigned char> shuffled_;
};

}  // namespace bitattn
