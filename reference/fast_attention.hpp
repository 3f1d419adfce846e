#pragma once
// Attention forward and backward to about 115 bits, with the products in integers: many times faster than
// plain_attention(), from the same formulas, and with a proven bound for every element (docs/reference.md).
//
// Products of BF16 numbers are exact, and so are their sums: scores and dP. P and dS become fixed-point
// numbers of 128 bits under a common exponent for each row and chunk; their products with BF16 rows are exact
// again. 2^x is a table and a series with a proven error; MPFR has the constants, the logarithm and the
// divisions, once a row.
//
// Rows whose exponents span more than 44 bits take exact inner products from a wide register instead. Rows of
// queries that see an infinity or a NaN are NaN throughout or go through plain_attention_head(), which a KV
// head of a sequence does as a whole where its scores could pass 2^28 or scale or softcap are out of all
// proportion.

#include <span>

#include "reference/attention_rows.hpp"

namespace bitattn::reference {

/// Why a KV head of a sequence cannot go the fast way; nullptr if it can.
const char* fast_obstacle(const ProblemView& problem, std::size_t sequence, std::size_t head_kv);

/// The whole problem. The same bits come out for any number of threads and any processor.
void fast_attention(const ProblemView& problem, const Progress& progress, Sink& sink);

/// out, lse and dq of chosen rows alone, with the bits that fast_attention() gives them.
void fast_attention_rows(const ProblemView& problem, std::span<const RowId> rows, const Progress& progress,
                         Sink& sink);

}  // namespace bitattn::reference
