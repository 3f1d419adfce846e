#pragma once
// All that one KV head of one sequence is computed from, measured, and made finite for those who cannot take
// anything else.

#include <cstdint>
#include <vector>

#include "reference/problem_view.hpp"
#include "reference/sliced_operands.hpp"

namespace bitattn::reference {

/// A matrix of finite BF16 numbers and what it was made from.
struct InputMatrix {
  Bf16Rows words;                     ///< rows with an infinity or a NaN are zeros here
  std::vector<std::uint8_t> spoiled;  ///< [row]: was it such a row?
  bool finite = true;                 ///< no such row
  double largest = 0;                 ///< largest finite magnitude
  double largest_norm = 0;  ///< at least the largest Euclidean norm of a row, its finite elements alone

  explicit InputMatrix(const Bf16Rows& original);
  InputMatrix(const InputMatrix&) =
      delete;  // `words` may point into `copy_`, which moves along but is not copied along
  InputMatrix& operator=(const InputMatrix&) = delete;
  InputMatrix(InputMatrix&&) = default;
  InputMatrix& operator=(InputMatrix&&) = default;
  ~InputMatrix() = default;

 private:
  std::vector<std::uint16_t> copy_;  ///< only where there is something to replace
};

/// What infinities and NaNs do to a row of queries.
enum class RowKind {
  finite,   ///< nothing: all that it sees is finite
  touched,  ///< something that has to be computed
  nan       ///< its softmax is NaN, and so are its outputs and the gradients of every key that it sees
};

class HeadInputs {
 public:
  HeadInputs(const ProblemView& problem, std::size_t sequence, std::size_t head_kv);

  const InputMatrix& k() const { return k_; }
  const InputMatrix& v() const { return v_; }
  /// `g` counts the query heads of the group.
  const InputMatrix& q(std::size_t g) const { return q_[g]; }
  const InputMatrix& dout(std::size_t g) const { return dout_[g]; }
  bool finite() const { return finite_; }
  double largest_q() const { return largest_q_; }
  double largest_dout() const { return largest_dout_; }
  /// At least the magnitude of every product of a row of q with a row of k.
  double largest_product() const { return largest_product_; }

  RowKind kind(std::size_t g, std::size_t row) const;

 private:
  const ProblemView& problem_;
  const Sequence& sequence_;
  std::size_t head_kv_;
  InputMatrix k_, v_;
  std::vector<InputMatrix> q_, dout_;
  bool finite_ = true;
  double largest_q_ = 0, largest_dout_ = 0, largest_product_ = 0;
};

}  // namespace bitattn::reference
