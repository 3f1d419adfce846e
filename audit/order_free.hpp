#pragma once
// A sum whose order the kernel leaves open: is a value the result of one order of the parts?

#include <cstdint>
#include <functional>
#include <span>

namespace bitattn::audit {

enum class OrderCheck : std::uint8_t {
  one_order,       ///< some order of the parts gives the value
  no_order,        ///< none does
  too_many_parts,  ///< more than kMostOrderedParts parts count: not looked at
};

inline constexpr std::size_t kMostOrderedParts = 6;

/// The bits of a part that is not there (OrderFreeParts).
inline constexpr std::uint32_t kAbsentPart = 0xffffffffU;

/// Does adding the parts to +0 in some order give a sum that `matches`? Parts of bits kAbsentPart are left
/// out. The sum is arith::bulk_reduce_add, or arith::global_reduce_add where flushed_adds
/// (docs/spec/fa3-operation-order.md 4.6).
OrderCheck check_orders(std::span<const float> parts, bool flushed_adds,
                        const std::function<bool(float)>& matches);

}  // namespace bitattn::audit
