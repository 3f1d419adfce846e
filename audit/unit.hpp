#pragma once
// A part of a capture that can be computed alone with the same bits: one KV head of one sequence, whole, or
// some of its query rows with all keys they see, or its last keys with all queries that see them.

#include <string>

#include "audit/compare.hpp"
#include "datasets/result.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn::audit {

struct UnitRange {
  std::size_t sequence = 0;
  std::size_t first_kv = 0, count_kv = 1;  ///< KV heads
  std::size_t q_begin = 0, q_end = 0, k_begin = 0, k_end = 0;
};

struct Unit {
  UnitRange range;
  bool rows = true, keys = true;  ///< gives the tensors of its query rows, of its keys
  Capture capture;  ///< BSHD, one batch element; recorded tensors that the part cannot give are left out
};

/// All heads and tokens of a sequence's KV heads.
UnitRange whole_unit(const Problem& problem, std::size_t sequence, std::size_t first_kv,
                     std::size_t count_kv);

/// The part of a capture. dq, dq_accum, out and lse are kept only where the keys are all a row sees
/// (keep_rows), dk and dv only where the queries are all that see a key (keep_keys).
Unit make_unit(const Capture& capture, const UnitRange& range, bool keep_rows, bool keep_keys);

/// The profile with the tiles of the whole call, which a part's own lengths might choose otherwise.
profile::Profile pinned(const profile::Profile& profile, const Problem& whole);

/// Places of a unit's comparison in the whole capture's coordinates.
void shift_places(const UnitRange& range, const Problem& whole, Comparison& comparison);

}  // namespace bitattn::audit
