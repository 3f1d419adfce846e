#pragma once
// A result: the outputs of one attention call, and what a kernel leaves in between where it was recorded or
// emulated.

#include <cstdint>
#include <string>
#include <vector>

#include "datasets/problem.hpp"
#include "datasets/tensor.hpp"

namespace bitattn {

/// Values before their last cast, as the backend has them (fp32 of a kernel, widened; the reference rounded
/// to fp64).
struct Uncast {
  Fp64Tensor out, lse, dq, dk, dv;  ///< shapes of out, lse, dq, dk, dv
};

/// Intermediates that some kernels leave in memory. Layouts as in the capture schema (docs/captures.md).
struct Intermediates {
  /// [B,Hq,Sq rounded up to bwd_block_m], THD [Hq,padded]; places no kernel writes hold 0xffffffff.
  Fp32Tensor dpsum, lse_log2;
  Fp32Tensor dq_accum;  ///< as dpsum with an axis [head dim rounded up]
  Fp32Tensor dk_accum,
      dv_accum;  ///< GQA only: [B,Hkv,Sk rounded up to bwd_block_n, head dim rounded up], THD [Hkv,padded,.]
};

/// dQ as the parts of its key blocks, kept where the kernel fixes no order of adding them (see
/// Result::dq_parts).
struct OrderFreeParts {
  std::size_t parts = 0;  ///< how many parts the array has room for
  /// [parts, ...shape of the accumulator]; parts a row does not have are NaN of bits 0xffffffff.
  Fp32Tensor values;
  bool flushed_adds = false;  ///< parts are added by FTZ (global atomics) and not by the bulk reduction
};

struct Result {
  std::string backend;  ///< which backend made it; "recorded" for what a capture holds
  Bf16Tensor out, dq, dk, dv;
  Fp32Tensor lse;
  Intermediates intermediates;
  Uncast uncast;                      ///< empty unless asked for
  bool dq_order_fixed = true;         ///< false: the real kernel adds the key blocks of dQ in any order
  bool dkv_order_fixed = true;        ///< false: the real kernel adds the query heads of a group in any order
  OrderFreeParts dq_parts;            ///< only where dq_order_fixed is false and it was asked for
  OrderFreeParts dk_parts, dv_parts;  ///< only where dkv_order_fixed is false and it was asked for
  std::vector<std::string> notes;     ///< what a reader of this result should know
};

/// A capture: a problem and, if recorded, a result. `name`: FILE.h5 or FILE.h5:/group.
struct Capture {
  std::string name;
  Problem problem;
  Result recorded;
  /// Was any tensor recorded, be it an intermediate one?
  bool has_recorded() const {
    const Intermediates& kept = recorded.intermediates;
    return !(recorded.out.empty() && recorded.lse.empty() && recorded.dq.empty() && recorded.dk.empty() &&
             recorded.dv.empty() && kept.dpsum.empty() && kept.lse_log2.empty() && kept.dq_accum.empty() &&
             kept.dk_accum.empty() && kept.dv_accum.empty());
  }
};

}  // namespace bitattn
