#include "audit/order_free.hpp"

#include <array>

#include "emu/arith/bits.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/reduce_add.hpp"

namespace bitattn::audit {

namespace {

struct Search {
  std::array<float, kMostOrderedParts> parts{};
  std::size_t count = 0;
  bool flushed = false;
  const std::function<bool(float)>* matches = nullptr;

  // Sums of the same parts so far are not shared between orders: up to 1957 additions for six parts.
  bool from(float sum, unsigned used) const {
    if (used == (1U << count) - 1U) return (*matches)(sum);
    for (std::size_t i = 0; i < count; ++i) {
      if ((used >> i & 1U) != 0U) continue;
      const float next =
          flushed ? arith::global_reduce_add(sum, parts[i]) : arith::bulk_reduce_add(sum, parts[i]);
      if (from(next, used | 1U << i)) return true;
    }
    return false;
  }
};

}  // namespace

OrderCheck check_orders(std::span<const float> parts, bool flushed_adds,
                        const std::function<bool(float)>& matches) {
  Search search;
  search.flushed = flushed_adds;
  search.matches = &matches;
  bool positive_zero = false;
  for (const float part : parts) {
    if (arith::to_bits(part) == kAbsentPart) continue;
    const float value = flushed_adds ? arith::ftz::in(part) : part;
    if (value == 0) {
      // A zero part changes nothing, with one exception: a sum that was flushed to -0 becomes +0 by a later
      // +0. One +0 stands for all of them.
      const bool negative = (arith::to_bits(value) & arith::kSignBit) != 0U;
      if (!flushed_adds || negative || positive_zero) continue;
      positive_zero = true;
    }
    if (search.count == kMostOrderedParts) return OrderCheck::too_many_parts;
    search.parts[search.count++] = value;
  }
  return search.from(0.0F, 0) ? OrderCheck::one_order : OrderCheck::no_order;
}

}  // namespace bitattn::audit
