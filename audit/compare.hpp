#pragma once
// Two results of one problem, tensor by tensor and bit by bit.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "audit/place.hpp"
#include "datasets/result.hpp"

namespace bitattn::audit {

enum class TensorVerdict : std::uint8_t {
  equal,               ///< every bit that was compared; elements of an open order: the result of one order
  differs,             ///< some element differs, or the shapes do
  order_not_compared,  ///< equal but for elements whose order of parts is open and too long to try out
  only_in_a,
  only_in_b,  ///< not compared
};

/// Two elements at one place.
struct ElementPair {
  Place place;
  double a = 0, b = 0;
  std::uint32_t a_bits = 0, b_bits = 0;  ///< 16 of them for BF16
  std::uint64_t ulps = 0;  ///< kUlpsOfNan where one is a NaN and the other is not, or both with other bits
};

inline constexpr std::uint64_t kUlpsOfNan = ~std::uint64_t{0};

struct TensorComparison {
  std::string tensor;
  bool bf16 = false;
  bool intermediate = false;
  TensorVerdict verdict = TensorVerdict::equal;
  std::size_t elements = 0;  ///< of the tensor; all others below add up to it
  std::size_t equal_bits = 0;
  std::size_t differing_bits = 0;
  std::size_t equal_in_one_order =
      0;  ///< other bits, but the result of one order of the parts (order not fixed)
  std::size_t order_not_compared = 0;  ///< other bits, order not fixed, more parts than are tried out
  std::size_t not_written = 0;         ///< padding that no kernel writes
  std::size_t nan_differences = 0;     ///< of the differing ones: at least one side is a NaN
  std::uint64_t largest_ulps = 0;      ///< among differing elements without a NaN
  /// |a - b| / |b|, Frobenius, over elements that are finite on both sides; NaN without any.
  double relative_error = 0;
  std::optional<ElementPair> first, worst;
  std::string remark;
};

struct Comparison {
  std::string capture, a, b;  ///< the capture's name and the backends'
  std::vector<TensorComparison> tensors;

  /// Every tensor that both have is equal in every bit compared. False too where there is nothing to compare.
  bool equal() const;
  std::size_t compared_tensors() const;
  std::size_t elements() const;  ///< compared
  std::size_t differing() const;
};

/// out, lse, dq, dk, dv and the intermediates. Places of padded accumulators that hold 0xffffffff on the side
/// of an emulated result (on both sides of two recorded ones) are counted and not compared. Where an emulated
/// result leaves the order of dQ, or of dK and dV, open, an element passes if it is the result of one order
/// of the parts that the result brings along.
Comparison compare_results(const std::string& capture, const Problem& problem, const Result& a,
                           const Result& b);

/// Distance in units in the last place: how many representable numbers lie between two. -0 and +0 are 0
/// apart.
std::uint64_t ulps_between_fp32(std::uint32_t a, std::uint32_t b);
std::uint64_t ulps_between_bf16(std::uint16_t a, std::uint16_t b);

/// q, k, v and dout of two problems of the same shapes.
std::vector<TensorComparison> compare_inputs(const Problem& a, const Problem& b);

/// In what two problems are not the same but for the elements of their tensors: layout, scale, mask, softcap,
/// lengths, shapes. "" if in nothing, else a clear line ("softcap is 15 against 0"). A dout that only one has
/// is none.
std::string problem_difference(const Problem& a, const Problem& b);

}  // namespace bitattn::audit
