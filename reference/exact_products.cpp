// Compiled with contraction allowed: every operation here is exact, so a fused multiply-add gives the same
// bits.
#include "reference/exact_products.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace bitattn::reference {
namespace {

template <int Lanes>
struct Vectors {
  typedef double Doubles
      __attribute__((vector_size(Lanes * 8)));  // NOLINT(modernize-use-using): GCC 12 loses
  typedef std::int64_t Integers
      __attribute__((vector_size(Lanes * 8)));                   // NOLINT: the attribute of a dependent alias
  typedef float Floats __attribute__((vector_size(Lanes * 4)));  // NOLINT
};

template <class Vector>
[[gnu::always_inline]] inline void load(Vector& to, const void* from) {
  std::memcpy(&to, from, sizeof(Vector));
}

/// Lanes doubles at a time, `Rows` rows by two vectors of columns in registers.
template <int Lanes, int Rows>
[[gnu::always_inline]] inline void multiply(std::span<const SlicePair> pairs, std::size_t depth,
                                            std::size_t columns, std::size_t b_stride, std::int64_t* sums,
                                            std::size_t sums_stride) {
  using Doubles = typename Vectors<Lanes>::Doubles;
  using Integers = typename Vectors<Lanes>::Integers;
  using Floats = typename Vectors<Lanes>::Floats;
  static_assert(kBlockRows % Rows == 0);

  for (std::size_t row = 0; row < kBlockRows; row += Rows) {
    for (std::size_t column = 0; column < columns; column += 2 * Lanes) {
      Doubles sum[Rows][2] = {};
      std::size_t length = 0;  // products in `sum` so far
      const auto flush = [&]() __attribute__((always_inline)) {
        for (int r = 0; r < Rows; ++r) {
          for (int half = 0; half < 2; ++half) {
            std::int64_t* const to = sums + (row + static_cast<std::size_t>(r)) * sums_stride + column +
                                     static_cast<std::size_t>(half) * Lanes;
            Integers total;
            load(total, to);
            total += __builtin_convertvector(sum[r][half], Integers);
            std::memcpy(to, &total, sizeof(total));
            sum[r][half] = Doubles{};
          }
        }
        length = 0;
      };
      for (const SlicePair& pair : pairs) {
        for (std::size_t begin = 0; begin < depth;) {
          if (length == kLongestSum) flush();
          const std::size_t end = std::min(depth, begin + kLongestSum - length);
          const double* a = pair.a + begin * kBlockRows + row;
          const float* b = pair.b + begin * b_stride + column;
          for (std::size_t k = begin; k < end; ++k, a += kBlockRows, b += b_stride) {
            Floats low;
            Floats high;
            load(low, b);
            load(high, b + Lanes);
            const Doubles b0 = __builtin_convertvector(low, Doubles);
            const Doubles b1 = __builtin_convertvector(high, Doubles);
            for (int r = 0; r < Rows; ++r) {
              sum[r][0] += a[r] * b0;
              sum[r][1] += a[r] * b1;
            }
          }
          length += end - begin;
          begin = end;
        }
      }
      flush();
    }
  }
}

void multiply_plain(std::span<const SlicePair> pairs, std::size_t depth, std::size_t columns,
                    std::size_t b_stride, std::int64_t* sums, std::size_t sums_stride) {
  multiply<2, 4>(pairs, depth, columns, b_stride, sums, sums_stride);
}

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] void multiply_avx2(std::span<const SlicePair> pairs, std::size_t depth,
                                               std::size_t columns, std::size_t b_stride, std::int64_t* sums,
                                               std::size_t sums_stride) {
  multiply<4, 4>(pairs, depth, columns, b_stride, sums, sums_stride);
}

[[gnu::target("avx512f,avx512dq,avx2,fma")]] void multiply_avx512(std::span<const SlicePair> pairs,
                                                                  std::size_t depth, std::size_t columns,
                                                                  std::size_t b_stride, std::int64_t* sums,
                                                                  std::size_t sums_stride) {
  multiply<8, 8>(pairs, depth, columns, b_stride, sums, sums_stride);
}
#endif

std::vector<AddExactProducts> engines() {
  std::vector<AddExactProducts> all;
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512dq") != 0;
  const bool avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  if (avx512) all.push_back(multiply_avx512);
  if (avx2) all.push_back(multiply_avx2);
#endif
  all.push_back(multiply_plain);
  return all;
}

}  // namespace

std::span<const AddExactProducts> exact_product_engines() {
  static const std::vector<AddExactProducts> all = engines();
  return all;
}

void add_exact_products(std::span<const SlicePair> pairs, std::size_t depth, std::size_t columns,
                        std::size_t b_stride, std::int64_t* sums, std::size_t sums_stride) {
  static const AddExactProducts fastest = exact_product_engines().front();
  fastest(pairs, depth, columns, b_stride, sums, sums_stride);
}

}  // namespace bitattn::reference
