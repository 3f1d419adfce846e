#pragma once
// A profile: the data that fixes a kernel's operation order. Plain data; how it is run is the schedules'
// business.
//
// The defaults are FlashAttention-3's BF16 kernels on Hopper as nvcc 13.0.88 compiles them. Each field is one
// decision that changes bits; the tests flip every one of them and demand that the goldens notice. Source:
// docs/spec/fa3-operation-order.md (sections in brackets).

#include <cstdint>
#include <string>
#include <vector>

#include "emu/profile/deviation.hpp"
#include "emu/profile/remedies.hpp"
#include "emu/profile/sites.hpp"

namespace bitattn::profile {

/// How an approximated function is computed.
enum class Function : std::uint8_t {
  special_function_unit,  ///< the chip's MUFU
  correctly_rounded,      ///< fp64 rounded once to fp32, subnormal results flushed
};

/// Scalar and tensor-core arithmetic (docs/spec/hopper-arithmetic.md).
struct Arithmetic {
  bool flush_subnormals = true;  ///< FTZ in add, mul, fma, max (--use_fast_math)
  Function ex2 = Function::special_function_unit;
  Function lg2 = Function::special_function_unit;
  Function rcp = Function::special_function_unit;
  int tensor_core_fraction_bits = 25;  ///< bits kept below the largest exponent of a fused step
  bool tensor_core_rounds_to_nearest = false;
};

enum class KeyBlockOrder : std::uint8_t { right_to_left, left_to_right };
/// Which product of `c*ln2*m + log2(L)*ln2` the log-sum-exp fuses [2.7.3].
enum class LseFusion : std::uint8_t { max_term, log_term };
/// How the four partial sums of a row meet [2.7.1].
enum class QuadSum : std::uint8_t {
  across_then_beside,  ///< (l0 + l2) + (l1 + l3): shuffle xor 2, then xor 1
  beside_then_across,  ///< (l0 + l1) + (l2 + l3)
};

struct Forward {
  int block_n = 0;  ///< keys of a tile; 0: the kernel's own table [2.2]
  KeyBlockOrder key_blocks = KeyBlockOrder::right_to_left;  // [2.3]
  bool exponent_fused = true;  ///< p = ex2(fma(x, c, -m*c)) and not ex2(x*c - m*c) [2.5.7]
  bool row_sum_rescale_fused =
      true;  ///< the rescale of the running sum is fused with its first addition [2.5.8]
  QuadSum quad_sum = QuadSum::across_then_beside;
  LseFusion lse = LseFusion::max_term;
};

/// Which of the first two products of a thread's dot product dO.O is rounded on its own [3.1].
enum class DpsumStart : std::uint8_t { second_product_rounded, first_product_rounded };
/// dS from P, dP and D [4.3.6].
enum class DsOrder : std::uint8_t {
  subtract_then_multiply,  ///< P * (dP - D)
  fused,                   ///< fma(P, dP, -(P*D))
};

struct Backward {
  int block_n = 0;             ///< keys of a tile; 0: the kernel's own table [4.1]
  bool exponent_fused = true;  ///< P = ex2(fma(S, c, -E)) [4.3.5]
  DpsumStart dpsum = DpsumStart::second_product_rounded;
  DsOrder ds = DsOrder::subtract_then_multiply;
  bool ds_from_cast_p = false;       ///< dS from the BF16 P
  bool dq_order_reversed = false;    ///< key blocks added to dQ in the opposite order [4.6]
  bool bulk_reduce_flushes = false;  ///< the bulk reduce-add flushes subnormals [4.6]
};

struct Profile {
  std::string name = "fa3";
  Arithmetic arithmetic;
  Forward forward;
  Backward backward;
  RemedySet remedies;
  SiteSet exact;  ///< sites that are run exactly (fp64) and not as the chip does
  /// What this kernel does otherwise, at most one a point. Those of numbers are honoured where the schedules
  /// run over SiteNumbers and the point's site is not exact; those of structure always.
  std::vector<Deviation> deviations;
};

}  // namespace bitattn::profile
