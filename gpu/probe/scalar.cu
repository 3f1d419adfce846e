// The special functions, the conversions and the fp32 operations: the chip's instruction against emu/arith.

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/mufu.hpp"
#include "emu/arith/narrow_float.hpp"
#include "gpu/probe/operands.hpp"
#include "gpu/probe/tally.cuh"
#include "gpu/probe/units.hpp"

namespace bitattn::gpu::probe {

namespace {

using arith::from_bits;
using arith::to_bits;

// ---- Functions of one word ----

#define BITATTN_ONE_WORD(Name, ptx, model_expression)                   \
  struct Name {                                                         \
    __device__ static Outcome run(std::uint64_t i) {                    \
      const std::uint32_t x = static_cast<std::uint32_t>(i);            \
      float y;                                                          \
      asm volatile(ptx " %0, %1;" : "=f"(y) : "f"(__uint_as_float(x))); \
      return {{x, 0, 0}, __float_as_uint(y), model_expression};         \
    }                                                                   \
  };
BITATTN_ONE_WORD(Ex2, "ex2.approx.ftz.f32", arith::mufu::ex2(x))
BITATTN_ONE_WORD(Lg2, "lg2.approx.ftz.f32", arith::mufu::lg2(x))
BITATTN_ONE_WORD(Rcp, "rcp.approx.ftz.f32", arith::mufu::rcp(x))
BITATTN_ONE_WORD(Rsqrt, "rsqrt.approx.ftz.f32", arith::mufu::rsqrt(x))
BITATTN_ONE_WORD(Tanh, "tanh.approx.f32", arith::mufu::tanh(x))
BITATTN_ONE_WORD(Neg, "neg.ftz.f32", to_bits(arith::ftz::neg(from_bits(x))))
BITATTN_ONE_WORD(Abs, "abs.ftz.f32", to_bits(arith::ftz::abs(from_bits(x))))
#undef BITATTN_ONE_WORD

/// A packed conversion takes two values; the other one is something else, so that a half taken from it would
/// show.
__device__ std::uint32_t other_half(std::uint32_t x) {
  return x * 2654435761U ^ 0x5bd1e995U;
}

#define BITATTN_CONVERSION(Name, ptx, constraint, Word, high, low, model_expression)                   \
  struct Name {                                                                                        \
    __device__ static Outcome run(std::uint64_t i) {                                                   \
      const std::uint32_t x = static_cast<std::uint32_t>(i);                                           \
      const std::uint32_t other = other_half(x);                                                       \
      Word y;                                                                                          \
      asm volatile(ptx " %0, %1, %2;"                                                                  \
                   : constraint(y)                                                                     \
                   : "f"(__uint_as_float(high)), "f"(__uint_as_float(low)));                           \
      const auto model = [](std::uint32_t v) { return static_cast<std::uint32_t>(model_expression); }; \
      constexpr int kBits = static_cast<int>(sizeof(Word)) * 4;                                        \
      return {{x, 0, 0}, y, model(high) << kBits | model(low)};                                        \
    }                                                                                                  \
  };
BITATTN_CONVERSION(Bf16High, "cvt.rn.bf16x2.f32", "=r", std::uint32_t, x, other, arith::bf16_from_fp32(v))
BITATTN_CONVERSION(Bf16Low, "cvt.rn.bf16x2.f32", "=r", std::uint32_t, other, x, arith::bf16_from_fp32(v))
BITATTN_CONVERSION(F16, "cvt.rn.f16x2.f32", "=r", std::uint32_t, other, x, arith::f16_from_fp32(v))
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
BITATTN_CONVERSION(E4m3, "cvt.rn.satfinite.e4m3x2.f32", "=h", std::uint16_t, other, x,
                   arith::e4m3_from_fp32(v))
BITATTN_CONVERSION(E5m2, "cvt.rn.satfinite.e5m2x2.f32", "=h", std::uint16_t, other, x,
                   arith::e5m2_from_fp32(v))
#else
// Not on sm_80: the host does not ask for them there.
struct E4m3 {
  __device__ static Outcome run(std::uint64_t) { return {}; }
};
using E5m2 = E4m3;
#endif
#undef BITATTN_CONVERSION

struct Bf16Single {
  __device__ static Outcome run(std::uint64_t i) {
    const std::uint32_t x = static_cast<std::uint32_t>(i);
    std::uint16_t y;
    asm volatile("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(__uint_as_float(x)));
    return {{x, 0, 0}, y, arith::bf16_from_fp32(x)};
  }
};

// ---- fp32 operations ----

/// fp64 can hold a sum or a product of two fp32 numbers well enough that rounding it again gives the one
/// rounding of the exact value (53 >= 2*24 + 2), a product exactly: a second way to plain IEEE results, which
/// emu/arith takes from the chip itself when compiled for the device.
__device__ std::uint32_t rounded(double x) {
  return to_bits(arith::canonical(__double2float_rn(x)));
}

/// a*b + c: the product is exact in fp64; the sum is rounded to odd there, so that rounding again is right.
__device__ std::uint32_t rounded_fma(float a, float b, float c) {
  const double p = static_cast<double>(a) * static_cast<double>(b);
  const double z = static_cast<double>(c);
  const double s = __dadd_rn(p, z);
  const double bb = __dadd_rn(s, -p);
  const double error = __dadd_rn(__dadd_rn(p, -__dadd_rn(s, -bb)), __dadd_rn(z, -bb));
  long long bits = __double_as_longlong(s);
  if (error != 0 && error == error && s - s == 0 && (bits & 1) == 0) {
    // Towards the exact value by less than one place, then the last bit is set: sticky.
    if (s != 0 && (error > 0) != (s > 0)) --bits;
    bits |= 1;
  }
  return rounded(__longlong_as_double(bits));
}

#define BITATTN_BINARY(Name, ptx, model_expression)                 \
  struct Name {                                                     \
    __device__ static Outcome run(std::uint64_t i) {                \
      const Operands o = operands(i);                               \
      const float a = __uint_as_float(o.a);                         \
      const float b = __uint_as_float(o.b);                         \
      float y;                                                      \
      asm volatile(ptx " %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));  \
      return {{o.a, o.b, 0}, __float_as_uint(y), model_expression}; \
    }                                                               \
  };
BITATTN_BINARY(FtzAdd, "add.rn.ftz.f32", to_bits(arith::ftz::add(a, b)))
BITATTN_BINARY(FtzSub, "sub.rn.ftz.f32", to_bits(arith::ftz::sub(a, b)))
BITATTN_BINARY(FtzMul, "mul.rn.ftz.f32", to_bits(arith::ftz::mul(a, b)))
BITATTN_BINARY(FtzDiv, "div.approx.ftz.f32", to_bits(arith::ftz::div(a, b)))
BITATTN_BINARY(FtzMax, "max.ftz.f32", to_bits(arith::ftz::max(a, b)))
BITATTN_BINARY(FtzMin, "min.ftz.f32", to_bits(arith::ftz::min(a, b)))
BITATTN_BINARY(FtzMaxNan, "max.NaN.ftz.f32", to_bits(arith::ftz::max_nan(a, b)))
BITATTN_BINARY(PlainMax, "max.f32", to_bits(arith::max(a, b)))
BITATTN_BINARY(PlainAdd, "add.rn.f32", rounded(static_cast<double>(a) + static_cast<double>(b)))
BITATTN_BINARY(PlainMul, "mul.rn.f32", rounded(static_cast<double>(a) * static_cast<double>(b)))
#undef BITATTN_BINARY

#define BITATTN_FMA(Name, ptx, model_expression)                               \
  struct Name {                                                                \
    __device__ static Outcome run(std::uint64_t i) {                           \
      const Operands o = operands(i);                                          \
      const float a = __uint_as_float(o.a);                                    \
      const float b = __uint_as_float(o.b);                                    \
      const float c = __uint_as_float(o.c);                                    \
      float y;                                                                 \
      asm volatile(ptx " %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c)); \
      return {{o.a, o.b, o.c}, __float_as_uint(y), model_expression};          \
    }                                                                          \
  };
BITATTN_FMA(FtzFma, "fma.rn.ftz.f32", to_bits(arith::ftz::fma(a, b, c)))
BITATTN_FMA(PlainFma, "fma.rn.f32", rounded_fma(a, b, c))
#undef BITATTN_FMA

/// A wrong rule: flushes what IEEE arithmetic makes subnormal, so that 2^-126 - 2^-151 and above become zero.
struct WrongFlush {
  __device__ static Outcome run(std::uint64_t i) {
    Outcome outcome = FtzMul::run(i);
    outcome.model = arith::flush(to_bits(arith::mul(arith::ftz::in(from_bits(outcome.inputs[0])),
                                                    arith::ftz::in(from_bits(outcome.inputs[1])))));
    return outcome;
  }
};

constexpr std::uint64_t kAllWords = std::uint64_t{1} << 32;

template <class Check>
void all_words(Run& run, const char* group, const char* name) {
  Unit& unit = run.begin(group, name, "all 2^32");
  sweep_unit<Check>(unit, kAllWords, 1, run.device());
}

template <class Check>
void many_operands(Run& run, const char* name, int operands) {
  const std::uint64_t random = run.scaled(std::uint64_t{1} << 30);
  Unit& unit = run.begin("fp32", name, kPairsText);
  sweep_unit<Check>(unit, kBoundaryPairs + random, operands, run.device());
}

}  // namespace

void scalar_units(Run& run) {
  all_words<Ex2>(run, "function", "ex2.approx.ftz.f32");
  all_words<Lg2>(run, "function", "lg2.approx.ftz.f32");
  all_words<Rcp>(run, "function", "rcp.approx.ftz.f32");
  all_words<Rsqrt>(run, "function", "rsqrt.approx.ftz.f32");
  all_words<Tanh>(run, "function", "tanh.approx.f32");
  all_words<Neg>(run, "function", "neg.ftz.f32");
  all_words<Abs>(run, "function", "abs.ftz.f32");
  all_words<Bf16High>(run, "conversion", "cvt.rn.bf16x2.f32, upper half");
  all_words<Bf16Low>(run, "conversion", "cvt.rn.bf16x2.f32, lower half");
  all_words<Bf16Single>(run, "conversion", "cvt.rn.bf16.f32");
  all_words<F16>(run, "conversion", "cvt.rn.f16x2.f32");
  const bool has_fp8 = run.device().major > 8 || (run.device().major == 8 && run.device().minor >= 9);
  // The machine code for sm_80 is what 8.9 runs, and it lacks the FP8 conversions.
  if (has_fp8 && run.device().major >= 9) {
    all_words<E4m3>(run, "conversion", "cvt.rn.satfinite.e4m3x2.f32");
    all_words<E5m2>(run, "conversion", "cvt.rn.satfinite.e5m2x2.f32");
  } else {
    run.untested("conversion", "cvt.rn.satfinite.e4m3x2.f32", "needs sm_90 or later");
    run.untested("conversion", "cvt.rn.satfinite.e5m2x2.f32", "needs sm_90 or later");
  }
  many_operands<FtzAdd>(run, "add.rn.ftz.f32", 2);
  many_operands<FtzSub>(run, "sub.rn.ftz.f32", 2);
  many_operands<FtzMul>(run, "mul.rn.ftz.f32", 2);
  many_operands<FtzFma>(run, "fma.rn.ftz.f32", 3);
  many_operands<FtzDiv>(run, "div.approx.ftz.f32", 2);
  many_operands<FtzMax>(run, "max.ftz.f32", 2);
  many_operands<FtzMin>(run, "min.ftz.f32", 2);
  many_operands<FtzMaxNan>(run, "max.NaN.ftz.f32", 2);
  many_operands<PlainMax>(run, "max.f32", 2);
  many_operands<PlainAdd>(run, "add.rn.f32 (against fp64)", 2);
  many_operands<PlainMul>(run, "mul.rn.f32 (against fp64)", 2);
  many_operands<PlainFma>(run, "fma.rn.f32 (against fp64)", 3);

  Unit wrong;
  wrong.name = "mul.rn.ftz.f32 as if IEEE subnormals were flushed";
  sweep_unit<WrongFlush>(wrong, kBoundaryPairs + (std::uint64_t{1} << 24), 2, run.device());
  run.self_test(wrong);
}

}  // namespace bitattn::gpu::probe
