// Every function of emu/arith called from a kernel: compiled and not run, so that "host and device" is what
// the compiler says and not what a comment says.

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/mufu.hpp"
#include "emu/arith/narrow_float.hpp"
#include "emu/arith/reduce_add.hpp"
#include "emu/arith/tensor_core.hpp"

namespace {

using namespace bitattn::arith;

__host__ __device__ std::uint32_t functions_of_one_word(std::uint32_t x) {
  const float f = from_bits(x);
  std::uint32_t sum = to_bits(f) + flush(x) + static_cast<std::uint32_t>(highest_bit(x | 1U));
  sum += is_nan(x) ? 1U : 0U;
  sum += is_infinite(x) ? 1U : 0U;
  sum += bf16_from_fp32(x) + bf16_from_fp32(f) + f16_from_fp32(x) + e4m3_from_fp32(x) + e5m2_from_fp32(x);
  sum += f16_from_e4m3(static_cast<std::uint8_t>(x));
  sum += fp32_bits_from_bf16(static_cast<std::uint16_t>(x));
  sum += to_bits(fp32_from_bf16(static_cast<std::uint16_t>(x)));
  sum += mufu::ex2(x) + mufu::lg2(x) + mufu::rcp(x) + mufu::rsqrt(x) + mufu::tanh(x);
  sum += to_bits(canonical(f)) + to_bits(ftz::in(f)) + to_bits(ftz::neg(f)) + to_bits(ftz::abs(f));
  return sum;
}

__host__ __device__ float functions_of_floats(float a, float b, float c) {
  float sum = add(a, b) + mul(a, b) + bitattn::arith::fma(a, b, c) + bitattn::arith::max(a, b);
  sum += ftz::add(a, b) + ftz::sub(a, b) + ftz::mul(a, b) + ftz::fma(a, b, c) + ftz::div(a, b);
  sum += ftz::max(a, b) + ftz::min(a, b) + ftz::max_nan(a, b);
  return sum + bulk_reduce_add(a, b) + global_reduce_add(a, b);
}

__host__ __device__ std::uint32_t tensor_core_steps(const std::uint16_t* a, const std::uint16_t* b,
                                                    const std::uint8_t* p, const std::uint8_t* q,
                                                    std::uint32_t c) {
  std::uint32_t sum = mma_bf16_k16(a, b, c) + mma_bf16_k16(a, b, c, {24, 23, -133}) + mma_bf16_k8(a, b, c);
  sum += mma_f16_k16(a, b, c) + mma_sync_e4m3_k32(p, q, c);
  sum += wgmma_fp8_k32<E4m3, E4m3>(p, q, c) + wgmma_fp8_k32<E5m2, E5m2>(p, q, c) +
         wgmma_fp8_k32<E4m3, E5m2>(p, q, c);
  return sum + fused_step<Bf16, Bf16>(a, b, 16, c, kHopperWide) +
         fused_step<E5m2, E4m3>(p, q, 32, c, kHopperFp8);
}

}  // namespace

__global__ void call_everything(std::uint32_t* out, const std::uint32_t* words, const float* floats,
                                const std::uint16_t* wide, const std::uint8_t* bytes) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const float f = functions_of_floats(floats[i], floats[i + 1], floats[i + 2]);
  out[i] =
      functions_of_one_word(words[i]) + to_bits(f) +
      tensor_core_steps(wide + 32 * i, wide + 32 * i + 16, bytes + 64 * i, bytes + 64 * i + 32, words[i]);
}

// The same functions on the host side of a CUDA file.
std::uint32_t call_everything_on_the_host(std::uint32_t x, const std::uint16_t* wide,
                                          const std::uint8_t* bytes) {
  const float f = from_bits(x);
  return functions_of_one_word(x) + to_bits(functions_of_floats(f, f, f)) +
         tensor_core_steps(wide, wide, bytes, bytes, x);
}
