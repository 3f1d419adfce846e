#pragma once
// The gradient of one score, with a bound on its error. Derivation: docs/reference.md, "A row".

#include "reference/block_sums.hpp"
#include "reference/bound_arithmetic.hpp"
#include "reference/problem_view.hpp"
#include "reference/wide.hpp"

namespace bitattn::reference {

/// What a row of queries leaves for its score gradients.
///
///   P_ij = numerator_ij * inverse_sum        dS_ij = P_ij * ((dP_ij - dP_reference) - d)
///
/// with `reference` the row's largest score, d = sum_j P_ij (dP_ij - dP_reference). So a row with nearly all
/// its weight on one key keeps the small differences that its gradient is made of.
struct RowState {
  KeyRange keys;
  std::size_t reference = 0;
  Wide inverse_sum, dp_reference, d;
  double p_error = 0;           ///< of P, relative
  double numerator_error = 0;   ///< of the numerators, relative
  double derivative_error = 0;  ///< of the softcap derivative, relative
  double d_error = 0;           ///< of d, absolute
  double dp_reference_magnitude = 0, d_magnitude = 0;
};

/// dP - D of one pair and a bound on its error.
struct ScoreGradient {
  Wide value;
  double error;
};
inline ScoreGradient score_gradient(const RowState& row, std::size_t key, const Wide& dp) {
  Wide difference;
  double error = row.d_error;
  if (key != row.reference) {
    difference = add(dp, negated(row.dp_reference));
    error += (magnitude(dp) + row.dp_reference_magnitude) * 0x1p-126;
  }
  error += (magnitude(difference) + row.d_magnitude) * 0x1p-127;
  return {add(difference, negated(row.d)), error * kSlack};
}

/// weight * gradient [* derivative] and a bound on its error; the weight is off by weight_error, relatively.
struct Weighted {
  Wide value;
  ErrorTerm error;
};
inline Weighted weighted_gradient(const Wide& weight, double weight_error, const ScoreGradient& g,
                                  const Wide* derivative, double derivative_error) {
  Weighted w;
  w.value = multiply(weight, g.value);
  double factor = 1;
  if (derivative != nullptr) {
    w.value = multiply(w.value, *derivative);
    factor = magnitude(*derivative) * (1 + derivative_error);
  }
  const double relative = weight_error + derivative_error + 0x1p-125;
  const double error =
      ((magnitude(g.value) + g.error) * relative + g.error) * fraction(weight) * factor * kSlack;
  if (error >= 0x1p-1022) w.error = {error, weight.top()};
  return w;
}

}  // namespace bitattn::reference
