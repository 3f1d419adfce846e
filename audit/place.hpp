#pragma once
// Where an element of a tensor lies, in the words a user has for it: sequence, head, query or key, column,
// tile.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "audit/tiles.hpp"
#include "datasets/problem.hpp"

namespace bitattn::audit {

/// How a tensor's axes are to be read.
enum class Axes : std::uint8_t {
  query_columns,         ///< out, dq: [B,Sq,Hq,D], THD [total,Hq,D]
  key_columns,           ///< dk, dv: [B,Sk,Hkv,D], THD [total,Hkv,D]
  query_rows,            ///< lse: [B,Hq,Sq], THD [Hq,total]
  padded_query_rows,     ///< dpsum, lse_log2: [B,Hq,padded], THD [Hq,padded]
  padded_query_columns,  ///< dq_accum: [B,Hq,padded,D], THD [Hq,padded,D]
  padded_key_columns,    ///< dk_accum, dv_accum: [B,Hkv,padded,D], THD [Hkv,padded,D]
};

struct Place {
  std::size_t sequence = 0;  ///< batch element or packed sequence
  std::size_t head = 0;
  std::size_t row = 0;  ///< query i or key j within its sequence; past its end: padding
  std::size_t column = 0;
  bool of_keys = false;  ///< row is a key
  bool has_column = false;
  bool padding = false;  ///< belongs to no token
  int tile = -1;         ///< which tile of rows it lies in, -1: not known
  bool backward_tile = false;

  /// "b 0, h 1, i 300, d 17 (backward tile m 4)"; for packed sequences "sequence 2, …".
  std::string text(Layout layout) const;
};

/// The place of element `index` of a tensor of that shape. `forward`: its tile is one of the forward kernel.
Place place_of(const Problem& problem, const std::vector<std::size_t>& shape, Axes axes, bool forward,
               const TileSizes& tiles, std::size_t index);

/// Index of (sequence, head, row, column) in a tensor of that shape; the inverse of place_of.
std::size_t index_of(const Problem& problem, const std::vector<std::size_t>& shape, Axes axes,
                     const TileSizes& tiles, std::size_t sequence, std::size_t head, std::size_t row,
                     std::size_t column);

}  // namespace bitattn::audit
