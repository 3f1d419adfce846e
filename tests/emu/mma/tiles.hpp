#pragma once
// Tiles that ask an engine's every path awkward questions: chains of fused steps whose operands and
// accumulators sit where products, alignment, cancellation, the guards between paths or the buffers' edges
// could go wrong.

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "emu/mma/tile_product.hpp"
#include "tests/emu/arith/random_bits.hpp"

namespace bitattn::test {

/// Operands of one tile product, in memory as their views want it, and what C holds before.
struct Tile {
  std::vector<std::uint16_t> a_memory, b_memory;
  mma::MatrixView a, b;
  mma::Start start = mma::Start::zero;
  std::vector<std::uint32_t> c;  ///< [rows][ldc], the columns past n belong to somebody else
  std::ptrdiff_t ldc = 0;
};

/// A matrix of BF16 words before it gets a memory order.
struct Words {
  int rows = 0, k = 0;
  std::vector<std::uint16_t> data;
  std::uint16_t& at(int r, int kk) {
    return data[static_cast<std::size_t>(r) * static_cast<std::size_t>(k) + static_cast<std::size_t>(kk)];
  }
};

enum class TileKind {
  ordinary,
  window_edge,
  pairs_cancel,
  c_cancels,
  zeros,
  extreme_significands,
  heavy,
  heavy_edge,
  attention,
  attention_tiny,
  large_c,
  guard_largest,
  guard_smallest,
  wide,
  subnormal_operands,
  underflow,
  overflow,
  random_finite,
  few_specials,
  random_bits,
};
inline constexpr std::array<std::string_view, 20> kTileKindNames{
    "ordinary",       "window_edge", "pairs_cancel",
    "c_cancels",      "zeros",       "extreme_significands",
    "heavy",          "heavy_edge",  "attention",
    "attention_tiny", "large_c",     "guard_largest",
    "guard_smallest", "wide",        "subnormal_operands",
    "underflow",      "overflow",    "random_finite",
    "few_specials",   "random_bits"};

/// What the accumulators hold before the first step.
enum class CKind {
  zero_start,
  zeros,
  like_products,
  near_smallest,
  near_add_limit,
  near_multiply_limit,
  subnormal,
  specials,
  random
};
inline constexpr int kCKinds = 9;

class TileMaker {
 public:
  explicit TileMaker(std::uint64_t seed) : random_(seed) {}

  Tile make(TileKind kind) {
    rows_ = random_.one_in(4) ? 1 : random_.between(1, 9);
    columns_ = random_.one_in(8) ? 1 : random_.between(1, 140);
    k_ = random_.one_in(4) ? random_.between(1, 40) : 16 * random_.between(1, 12);
    return arrange(words_of(kind));
  }

  RandomBits& random() { return random_; }

 private:
  struct Pair {
    Words a, b;
    int exponent = 0;  ///< about that of the largest products
    CKind c_kind = CKind::zero_start;
    bool cancel = false;
  };

  std::uint16_t number(int exponent, std::uint32_t fraction) {
    const std::uint32_t sign = random_.one_in(2) ? 0x8000U : 0U;
    if (exponent > 127) exponent = 127;
    if (exponent < -126)
      return static_cast<std::uint16_t>(
          sign | std::max((0x80U | (fraction & 0x7fU)) >> std::min(-126 - exponent, 8), 1U));
    return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(exponent + 127) << 7U |
                                      (fraction & 0x7fU));
  }
  std::uint16_t number(int exponent) { return number(exponent, random_.bits32()); }
  std::uint16_t zero() { return random_.one_in(2) ? std::uint16_t{0x8000U} : std::uint16_t{0}; }

  template <class Make>
  static Words fill(int rows, int k, Make&& make) {
    Words w{rows, k,
            std::vector<std::uint16_t>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(k))};
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < k; ++i) w.at(r, i) = make(r, i);
    }
    return w;
  }

  Pair words_of(TileKind kind) {
    Pair t;
    t.c_kind = static_cast<CKind>(random_.between(0, kCKinds - 1));
    const auto pair = [&](int a_exponent, int b_exponent, int a_width, int b_width) {
      t.exponent = a_exponent + b_exponent;
      t.a = fill(rows_, k_, [&](int, int) { return number(a_exponent - random_.between(0, a_width)); });
      t.b = fill(columns_, k_, [&](int, int) { return number(b_exponent - random_.between(0, b_width)); });
    };
    const auto some = [&](int low, int high) { return random_.between(low, high); };
    switch (kind) {
      case TileKind::ordinary:
        pair(some(-12, 8), some(-12, 8), some(0, 12), some(0, 12));
        break;
      case TileKind::window_edge: {
        // In each step one product leads, the others end around the place where the largest term cuts them.
        const int top = some(-8, 8);
        pair(top - some(4, 30), some(-8, 8), some(0, 6), some(0, 3));
        t.exponent = top + t.exponent;
        for (int i = 0; i < k_; i += 16) {
          if (random_.one_in(4)) continue;
          const int leader = std::min(k_ - 1, i + some(0, 15));
          for (int r = 0; r < rows_; ++r) t.a.at(r, leader) = number(top);
        }
        break;
      }
      case TileKind::pairs_cancel:
        pair(some(-12, 8), some(-12, 8), some(0, 20), some(0, 20));
        for (int i = 0; i + 1 < k_; i += 2) {
          for (int r = 0; r < rows_; ++r)
            t.a.at(r, i + 1) = static_cast<std::uint16_t>(t.a.at(r, i) ^ 0x8000U);
          for (int r = 0; r < columns_; ++r)
            t.b.at(r, i + 1) = static_cast<std::uint16_t>(t.b.at(r, i) ^ (random_.one_in(30) ? 1U : 0U));
        }
        break;
      case TileKind::c_cancels:
        pair(some(-12, 8), some(-12, 8), some(0, 20), some(0, 20));
        t.cancel = true;
        break;
      case TileKind::zeros: {
        pair(some(-12, 8), some(-12, 8), some(0, 20), some(0, 20));
        for (int r = 0; r < rows_; ++r) {
          const int live = random_.one_in(3) ? 0 : some(0, k_);
          for (int i = 0; i < k_; ++i) {
            if (i >= live || random_.one_in(3)) t.a.at(r, i) = zero();
          }
        }
        for (int r = 0; r < columns_; ++r) {
          const bool dead = random_.one_in(5);
          for (int i = 0; i < k_; ++i) {
            if (dead || random_.one_in(4)) t.b.at(r, i) = zero();
          }
        }
        break;
      }
      case TileKind::extreme_significands: {
        pair(some(-12, 8), some(-12, 8), some(0, 3), some(0, 3));
        constexpr std::array<std::uint16_t, 6> kFractions{0, 1, 0x7f, 0x7e, 0x7f, 0x40};
        for (std::uint16_t& w : t.a.data)
          w = static_cast<std::uint16_t>((w & 0xff80U) | kFractions[static_cast<std::size_t>(some(0, 5))]);
        for (std::uint16_t& w : t.b.data)
          w = static_cast<std::uint16_t>((w & 0xff80U) | kFractions[static_cast<std::size_t>(some(0, 5))]);
        break;
      }
      case TileKind::heavy:
      case TileKind::heavy_edge: {
        // Every product as large as its exponent allows, all of one sign, onto an accumulator as large: the
        // sum that leaves 32 bits. At the edge one significand of 16 is the largest that still fits, or the
        // next.
        const int ea = some(-12, 8);
        const int eb = some(-12, 8);
        const int least = random_.one_in(2) ? 0x7f : random_.between(0x60, 0x7e);
        const auto significand = [&] { return static_cast<std::uint32_t>(some(least, 0x7f)); };
        t.exponent = ea + eb;
        t.a = fill(rows_, k_, [&](int, int i) {
          return static_cast<std::uint16_t>(
              number(ea, kind == TileKind::heavy_edge && i % 16 == 7
                             ? 158U - 128U + static_cast<std::uint32_t>(some(0, 1))
                             : significand()) &
              0x7fffU);
        });
        t.b = fill(columns_, k_,
                   [&](int, int) { return static_cast<std::uint16_t>(number(eb, significand()) & 0x7fffU); });
        t.c_kind = CKind::like_products;
        break;
      }
      case TileKind::attention:
      case TileKind::attention_tiny: {
        const int spread = kind == TileKind::attention ? some(1, 20) : some(40, 134);
        const int first = some(0, k_);
        t.exponent = 0;
        t.a = fill(rows_, k_, [&](int r, int i) {
          if (i > first + r) return std::uint16_t{0};
          return static_cast<std::uint16_t>(number(-some(0, spread)) & 0x7fffU);
        });
        t.b = fill(columns_, k_, [&](int, int) { return number(some(-6, 2)); });
        break;
      }
      case TileKind::large_c:
        pair(some(-12, 8), some(-12, 8), some(0, 8), some(0, 8));
        t.exponent += some(0, 30);
        t.c_kind = CKind::like_products;
        break;
      case TileKind::guard_largest: {
        // The largest exponent fields on both sides of what each path takes.
        switch (some(0, 3)) {
          case 0:
            pair(64 + some(0, 1), some(-60, -20), some(0, 10), some(0, 10));
            break;
          case 1:
            pair(some(-60, -20), 64 + some(0, 1), some(0, 10), some(0, 10));
            break;
          case 2: {
            const int ea = some(-20, 30);
            pair(ea, 16 - ea + some(-1, 1), some(0, 10), some(0, 10));
            break;
          }
          default: {
            const int ea = some(28, 62);
            pair(ea, 90 - ea + some(-1, 1), some(0, 10), some(0, 10));
            break;
          }
        }
        break;
      }
      case TileKind::guard_smallest: {
        // Products around 2^-100, where a step's M comes near what the fast path takes; sometimes with a few
        // large ones.
        const int ea = some(-80, -20);
        const int eb = -100 - ea + some(-1, 1);
        pair(ea + 2, eb + 2, 2, 2);
        if (random_.one_in(2)) {
          for (std::uint16_t& w : t.a.data) {
            if (random_.one_in(12)) w = number(0);
          }
        }
        if (random_.one_in(2)) {
          for (std::uint16_t& w : t.b.data) {
            if (random_.one_in(3)) w = zero();
          }
        }
        // Cancellation down to the last bits of a small M, then steps in which some columns have no product:
        // what is left must still be there.
        if (random_.one_in(3)) {
          for (int i = 0; i + 1 < k_; i += 2) {
            for (int r = 0; r < rows_; ++r) {
              t.a.at(r, i + 1) =
                  static_cast<std::uint16_t>(t.a.at(r, i) ^ (random_.one_in(6) ? 0x8001U : 0x8000U));
            }
            for (int r = 0; r < columns_; ++r) {
              t.b.at(r, i + 1) = t.b.at(r, i);
              if (i % 32 >= 16 && r % 3 == 0) t.b.at(r, i) = t.b.at(r, i + 1) = zero();
            }
          }
        }
        if (random_.one_in(2)) t.c_kind = random_.one_in(2) ? CKind::near_smallest : CKind::zero_start;
        break;
      }
      case TileKind::wide:
        pair(some(-40, 60), some(-40, 60), some(20, 70), some(20, 70));
        break;
      case TileKind::subnormal_operands:
        if (random_.one_in(2)) {
          pair(-120, some(-10, 127), some(10, 14), some(0, 10));
        } else {
          pair(some(-10, 127), -120, some(0, 10), some(10, 14));
        }
        if (random_.one_in(3)) {
          for (std::uint16_t& w : t.a.data) {
            if (random_.one_in(4)) w = number(some(-3, 3));
          }
        }
        break;
      case TileKind::underflow: {
        const int ea = some(-100, -30);
        pair(ea, -128 - ea - some(0, 14), some(0, 20), some(0, 3));
        t.c_kind = random_.one_in(2) ? CKind::zero_start : CKind::subnormal;
        break;
      }
      case TileKind::overflow: {
        const int ea = some(20, 100);
        pair(ea, std::min(127, 124 - ea + some(0, 6)), some(0, 4), some(0, 4));
        break;
      }
      case TileKind::random_finite:
      case TileKind::random_bits: {
        const auto word = [&](int, int) {
          const std::uint32_t w = random_.bits32() >> 16U;
          const bool finite = kind == TileKind::random_bits || (w & 0x7f80U) != 0x7f80U;
          return static_cast<std::uint16_t>(finite ? w : w ^ 0x4000U);
        };
        t.a = fill(rows_, k_, word);
        t.b = fill(columns_, k_, word);
        if (random_.one_in(2)) t.c_kind = CKind::random;
        break;
      }
      case TileKind::few_specials: {
        pair(some(-12, 8), some(-12, 8), some(0, 12), some(0, 12));
        const auto spoil = [&](Words& w) {
          for (int n = some(0, 3); n > 0; --n) {
            const std::uint16_t fraction =
                random_.one_in(3) ? static_cast<std::uint16_t>(some(0, 127)) : std::uint16_t{0};
            w.data[static_cast<std::size_t>(some(0, static_cast<int>(w.data.size()) - 1))] =
                static_cast<std::uint16_t>(0x7f80U | (random_.one_in(2) ? 0x8000U : 0U) | fraction);
          }
          for (int n = some(0, 8); n > 0; --n)
            w.data[static_cast<std::size_t>(some(0, static_cast<int>(w.data.size()) - 1))] = zero();
        };
        spoil(t.a);
        spoil(t.b);
        break;
      }
    }
    return t;
  }

  std::uint32_t fp32(int exponent) {
    exponent = std::clamp(exponent, -126, 127);
    return (random_.bits32() & 0x807fffffU) | static_cast<std::uint32_t>(exponent + 127) << 23U;
  }

  std::uint32_t accumulator(CKind kind, int exponent) {
    switch (kind) {
      case CKind::zero_start:  // must be ignored
      case CKind::random:
        return random_.bits32();
      case CKind::zeros:
        return random_.bits32() & 0x80000000U;
      case CKind::like_products:
        return random_.one_in(2) ? fp32(exponent + random_.between(-3, 3)) | 0x7fffffU
                                 : fp32(exponent + random_.between(-12, 12));
      case CKind::near_smallest:
        return random_.one_in(4) ? random_.bits32() & 0x80000000U : fp32(-101 + random_.between(-2, 1));
      case CKind::near_add_limit:
        return fp32(25 + random_.between(-2, 1));
      case CKind::near_multiply_limit:
        return fp32(112 + random_.between(-2, 1));
      case CKind::subnormal:
        return random_.bits32() & 0x807fffffU;
      case CKind::specials: {
        constexpr std::array<std::uint32_t, 6> kValues{0x7f800000U, 0xff800000U, 0x7fffffffU,
                                                       0x7f800001U, 0xffc00000U, 0xffffffffU};
        return random_.one_in(20) ? kValues[static_cast<std::size_t>(random_.between(0, 5))] : fp32(exponent);
      }
    }
    return 0;
  }

  /// Lays the words out in memory: k contiguous, rows contiguous or neither; sometimes with edges left to the
  /// zero fill.
  mma::MatrixView place(Words& w, std::vector<std::uint16_t>& memory) {
    mma::MatrixView v;
    v.rows = w.rows;
    v.k = w.k;
    v.rows_in_memory = random_.one_in(4) ? random_.between(0, w.rows) : w.rows;
    v.k_in_memory = random_.one_in(4) ? random_.between(0, w.k) : w.k;
    switch (random_.between(0, 2)) {
      case 0:
        v.k_stride = 1;
        v.row_stride = w.k + random_.between(0, 9);
        break;
      case 1:
        v.row_stride = 1;
        v.k_stride = w.rows + random_.between(0, 9);
        break;
      default:
        v.k_stride = random_.between(2, 4);
        v.row_stride = v.k_stride * w.k + random_.between(0, 9);
        break;
    }
    // Exactly what may be read: one word further would be found by the address sanitizer. What lies between
    // and past the rows is NaN: no view may look at it.
    std::ptrdiff_t last = -1;
    if (v.rows_in_memory > 0 && v.k_in_memory > 0)
      last = (v.rows_in_memory - 1) * v.row_stride + (v.k_in_memory - 1) * v.k_stride;
    memory.assign(static_cast<std::size_t>(last + 1), 0x7fc0U);
    for (int r = 0; r < v.rows_in_memory; ++r) {
      for (int i = 0; i < v.k_in_memory; ++i)
        memory[static_cast<std::size_t>(r * v.row_stride + i * v.k_stride)] = w.at(r, i);
    }
    v.data = memory.data();
    return v;
  }

  Tile arrange(Pair words) {
    Tile t;
    t.a = place(words.a, t.a_memory);
    t.b = place(words.b, t.b_memory);
    t.ldc = columns_ + random_.between(0, 5);
    t.start = words.c_kind == CKind::zero_start && !words.cancel ? mma::Start::zero : mma::Start::accumulate;
    t.c.resize(static_cast<std::size_t>(rows_) * static_cast<std::size_t>(t.ldc));
    for (std::uint32_t& c : t.c) c = accumulator(words.c_kind, words.exponent);
    if (words.cancel) cancel(t);
    return t;
  }

  /// C becomes minus the product, give or take a few ulps.
  void cancel(Tile& t) {
    std::vector<float> product(t.c.size());
    const mma::Engine& scalar = *mma::find_engine("scalar");
    scalar.multiply(scalar.packed(t.a, mma::Side::left), scalar.packed(t.b, mma::Side::right),
                    mma::Start::zero, product.data(), t.ldc, arith::kHopperWide);
    for (std::size_t i = 0; i < t.c.size(); ++i) {
      t.c[i] = arith::to_bits(product[i]) ^ 0x80000000U;
      if ((t.c[i] & 0x7f800000U) != 0U) t.c[i] += static_cast<std::uint32_t>(random_.between(-2, 2));
    }
  }

  RandomBits random_;
  int rows_ = 0, columns_ = 0, k_ = 0;
};

}  // namespace bitattn::test
