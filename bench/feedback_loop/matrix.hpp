#pragma once
// Matrices of the small model and their products, in fp32 (the model) or fp64 (its gradient check). Every sum
// runs in one order whatever the number of threads, so that a run's numbers are its seed's.

#include <cstddef>
#include <vector>

namespace bitattn::feedback {

/// Row-major.
template <class Real>
struct Matrix {
  std::size_t rows = 0, columns = 0;
  std::vector<Real> data;

  Matrix() = default;
  Matrix(std::size_t r, std::size_t c) : rows(r), columns(c), data(r * c, Real{0}) {}
  Real* row(std::size_t r) { return data.data() + r * columns; }
  const Real* row(std::size_t r) const { return data.data() + r * columns; }
};

/// a . b
template <class Real>
Matrix<Real> product(const Matrix<Real>& a, const Matrix<Real>& b);
/// a . b^T: the gradient of a product's left factor.
template <class Real>
Matrix<Real> product_with_transposed(const Matrix<Real>& a, const Matrix<Real>& b);
/// sum += a^T . b: the gradient of its right factor.
template <class Real>
void add_transposed_product(const Matrix<Real>& a, const Matrix<Real>& b, Matrix<Real>& sum);

/// Root of the summed squares, in fp64.
template <class Real>
double norm(const Matrix<Real>& x);

/// Takes its mean over every `rows` consecutive rows from x, column by column; linear, and its own transpose.
/// The mean is summed in fp64, row by row.
template <class Real>
void centre(std::size_t rows, Matrix<Real>& x);

/// Mean over the vectors of `columns` elements of their norms.
template <class Real>
double mean_vector_norm(const Matrix<Real>& x, std::size_t columns);

}  // namespace bitattn::feedback
