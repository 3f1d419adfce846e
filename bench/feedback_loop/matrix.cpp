#include "bench/feedback_loop/matrix.hpp"

#include <tbb/parallel_for.h>

#include <cmath>

namespace bitattn::feedback {

namespace {

/// sum_j += factor * x_j. Wider vectors change no bit: each element is one product and one sum.
__attribute__((target_clones("avx512f", "avx2", "default"))) void add_scaled(float factor, const float* x,
                                                                             float* sum, std::size_t n) {
  for (std::size_t j = 0; j < n; ++j) sum[j] += factor * x[j];
}
void add_scaled(double factor, const double* x, double* sum, std::size_t n) {
  for (std::size_t j = 0; j < n; ++j) sum[j] += factor * x[j];
}

}  // namespace

template <class Real>
Matrix<Real> product(const Matrix<Real>& a, const Matrix<Real>& b) {
  Matrix<Real> c(a.rows, b.columns);
  tbb::parallel_for(std::size_t{0}, a.rows, [&](std::size_t i) {
    for (std::size_t k = 0; k < a.columns; ++k) add_scaled(a.row(i)[k], b.row(k), c.row(i), b.columns);
  });
  return c;
}

template <class Real>
Matrix<Real> product_with_transposed(const Matrix<Real>& a, const Matrix<Real>& b) {
  Matrix<Real> transposed(b.columns, b.rows);
  for (std::size_t r = 0; r < b.rows; ++r) {
    for (std::size_t c = 0; c < b.columns; ++c) transposed.row(c)[r] = b.row(r)[c];
  }
  return product(a, transposed);
}

template <class Real>
void add_transposed_product(const Matrix<Real>& a, const Matrix<Real>& b, Matrix<Real>& sum) {
  tbb::parallel_for(std::size_t{0}, a.columns, [&](std::size_t k) {
    for (std::size_t t = 0; t < a.rows; ++t) add_scaled(a.row(t)[k], b.row(t), sum.row(k), b.columns);
  });
}

template <class Real>
double norm(const Matrix<Real>& x) {
  double squares = 0;
  for (const Real v : x.data) squares += static_cast<double>(v) * static_cast<double>(v);
  return std::sqrt(squares);
}

template <class Real>
void centre(std::size_t rows, Matrix<Real>& x) {
  for (std::size_t first = 0; first < x.rows; first += rows) {
    for (std::size_t c = 0; c < x.columns; ++c) {
      double sum = 0;
      for (std::size_t t = first; t < first + rows; ++t) sum += static_cast<double>(x.row(t)[c]);
      const auto mean = static_cast<Real>(sum / static_cast<double>(rows));
      for (std::size_t t = first; t < first + rows; ++t) x.row(t)[c] -= mean;
    }
  }
}

template <class Real>
double mean_vector_norm(const Matrix<Real>& x, std::size_t columns) {
  double norms = 0;
  const std::size_t vectors = x.data.size() / columns;
  for (std::size_t v = 0; v < vectors; ++v) {
    double squares = 0;
    for (std::size_t d = 0; d < columns; ++d) {
      const auto value = static_cast<double>(x.data[v * columns + d]);
      squares += value * value;
    }
    norms += std::sqrt(squares);
  }
  return norms / static_cast<double>(vectors);
}

#define BITATTN_INSTANTIATE(Real)                                                                \
  template Matrix<Real> product(const Matrix<Real>&, const Matrix<Real>&);                       \
  template Matrix<Real> product_with_transposed(const Matrix<Real>&, const Matrix<Real>&);       \
  template void add_transposed_product(const Matrix<Real>&, const Matrix<Real>&, Matrix<Real>&); \
  template double norm(const Matrix<Real>&);                                                     \
  template void centre(std::size_t, Matrix<Real>&);                                              \
  template double mean_vector_norm(const Matrix<Real>&, std::size_t);
BITATTN_INSTANTIATE(float)
BITATTN_INSTANTIATE(double)
#undef BITATTN_INSTANTIATE

}  // namespace bitattn::feedback
