#pragma once
// Sums over keys (or over queries) of computed numbers times BF16 rows, kBlockRows sums at a time, in
// integers:
//
//   X[r][d] = sum_k a[r][k] * b[k][d]
//
// The a of one chunk become fixed-point numbers with a common exponent for each r, cut into slices; their
// products with the slices of b are exact; the total goes into a 192-bit register. What the cut loses and
// what the a are off by is carried along as a bound for each r. Derivation: docs/reference.md, "Sums".

#include <array>
#include <span>
#include <vector>

#include "reference/number.hpp"
#include "reference/sliced_operands.hpp"
#include "reference/wide.hpp"

namespace bitattn::reference {

/// A bound on the error of a number: fraction * 2^power. fraction is 0 or a normal double.
struct ErrorTerm {
  double fraction = 0;
  std::int32_t power = 0;
};

/// Slices of the computed numbers: 132 bits, of which 128 are used.
inline constexpr int kOuterSlices = 6;

/// The a of one chunk, as left-hand blocks.
class OuterLeft {
 public:
  OuterLeft() : data_(static_cast<std::size_t>(kOuterSlices) * kChunk * kBlockRows, 0.0) {}

  /// Row r: a[begin, end) of a chunk whose b rows have the exponents `exponents`; the spans cover the whole
  /// chunk. `errors` is empty where the a have no error that differs from number to number. Numbers outside
  /// [begin, end) are not read and must not be multiplied.
  void set_row(std::size_t r, std::span<const Wide> a, std::span<const ErrorTerm> errors,
               const std::int32_t* exponents, std::size_t begin, std::size_t end);
  /// No numbers in row r.
  void clear_row(std::size_t r, std::size_t begin, std::size_t end);

  const double* block(int slice) const {
    return data_.data() + static_cast<std::size_t>(slice) * kChunk * kBlockRows;
  }

 private:
  friend class BlockSums;
  struct Row {
    bool any = false;
    std::int32_t exponent = 0;  ///< all |a| and errors, b's exponents included, are below 2^exponent
    // In units of 2^exponent:
    double magnitude = 0;  ///< >= sum |a|
    double error = 0;      ///< >= sum of the errors
    double terms = 0;      ///< how many a are not 0
  };
  std::array<Row, kBlockRows> rows_;
  std::vector<double> data_;
};

class BlockSums {
 public:
  /// Sums with the rows of `right`, which must outlive this.
  void reset(const OuterRight& right);

  /// Adds the chunk's rows [begin, end) of `right`.
  void add(const OuterLeft& left, std::size_t chunk, std::size_t begin, std::size_t end);

  /// to := X[r][d], exactly as summed if `to` has 192 bits or more.
  void get(mpfr_ptr to, std::size_t r, std::size_t d) const;
  /// Bounds: `error` on |X - exact| and `magnitude` on sum |a||b|, both for element (r, d) as power-of-two
  /// multiples: the result is returned * 2^exponent(r, d).
  double error(std::size_t r) const { return rows_[r].error; }
  double magnitude(std::size_t r) const { return rows_[r].magnitude; }
  std::int32_t exponent(std::size_t r, std::size_t d) const {
    return rows_[r].exponent + right_->column_exponent(d);
  }

 private:
  using Register =
      std::array<std::uint64_t, 3>;  ///< 192-bit two's complement, units of 2^(exponent - kFractionBits)
  static constexpr int kFractionBits = kSliceBits * (kOuterSlices + 1);

  struct Row {
    bool any = false;
    std::int32_t exponent = 0;
    double magnitude = 0, error = 0;  ///< in units of 2^exponent
  };
  void raise(std::size_t r, std::int32_t exponent);

  const OuterRight* right_ = nullptr;
  std::array<Row, kBlockRows> rows_;
  std::vector<Register> registers_;
  std::vector<std::int64_t> totals_;  ///< [kOuterSlices][kBlockRows][columns]
};

}  // namespace bitattn::reference
