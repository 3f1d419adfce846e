#pragma once
// A sum in double whose rounding errors are kept beside it, for differences of nearly equal numbers.

namespace bitattn::audit {

/// Knuth's two-sum: the error of total() is one rounding of the result and about n * 2^-106 of the terms'
/// magnitudes.
class CompensatedSum {
 public:
  void add(double x) {
    const double sum = high_ + x;
    const double taken = sum - high_;
    low_ += (high_ - (sum - taken)) + (x - taken);
    high_ = sum;
  }
  double total() const { return high_ + low_; }
  /// total() - y, with what the sum's low part holds of the difference.
  double minus(double y) const { return (high_ - y) + low_; }

 private:
  double high_ = 0;
  double low_ = 0;
};

}  // namespace bitattn::audit
