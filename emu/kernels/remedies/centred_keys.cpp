#include "emu/kernels/remedies/centred_keys.hpp"

#include <tbb/parallel_for.h>

#include <algorithm>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32_ftz.hpp"

namespace bitattn::kernels::remedies {

namespace {

constexpr int kChunk = 128;  ///< keys of a partial sum
constexpr std::uint16_t kSign = 0x8000U;

}  // namespace

std::uint16_t key_centre(const std::uint16_t* keys, std::ptrdiff_t stride, int count) {
  if (count == 0) return 0;
  const std::uint16_t sign = keys[0] & kSign;
  float lowest = arith::from_bits(arith::kInfinity);
  float highest = 0;
  float sum = 0;
  for (int begin = 0; begin < count; begin += kChunk) {
    float chunk = 0;
    for (int j = begin; j < std::min(count, begin + kChunk); ++j) {
      const std::uint16_t word = keys[j * stride];
      const float magnitude = arith::ftz::in(arith::fp32_from_bf16(word & 0x7fffU));
      const bool usable =
          (word & kSign) == sign && magnitude > 0 && magnitude < arith::from_bits(arith::kInfinity);
      if (!usable) return 0;
      lowest = std::min(lowest, magnitude);
      highest = std::max(highest, magnitude);
      chunk = arith::ftz::add(chunk, magnitude);
    }
    sum = arith::ftz::add(sum, chunk);
  }
  // K in [kappa/2, 2 kappa] makes K - kappa exact (Sterbenz) and no larger than K.
  const float least = highest * 0.5F;
  const float most = lowest * 2.0F;
  if (least > most) return 0;
  const float mean = arith::ftz::mul(sum, 1.0F / static_cast<float>(count));
  const std::uint16_t kappa = arith::bf16_from_fp32(std::clamp(mean, least, most));
  const float rounded = arith::fp32_from_bf16(kappa);
  if (rounded < least || rounded > most) return 0;
  return sign | kappa;
}

std::vector<std::uint16_t> centred_keys(const AttentionInputs& inputs) {
  const profile::Call& call = inputs.call;
  const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(call.heads_kv) * call.head_dim;
  std::vector<std::uint16_t> centred(inputs.k, inputs.k + inputs.total_k * stride);
  tbb::parallel_for(0, static_cast<int>(inputs.sequences.size()), [&](int s) {
    const Sequence& sequence = inputs.sequences[static_cast<std::size_t>(s)];
    std::uint16_t* keys = centred.data() + sequence.k_begin * stride;
    for (std::ptrdiff_t column = 0; column < stride; ++column) {
      const std::uint16_t kappa = key_centre(keys + column, stride, sequence.k_length);
      if (kappa == 0) continue;
      for (int j = 0; j < sequence.k_length; ++j) {
        std::uint16_t& word = keys[j * stride + column];
        word =
            arith::bf16_from_fp32(arith::ftz::sub(arith::fp32_from_bf16(word), arith::fp32_from_bf16(kappa)));
      }
    }
  });
  return centred;
}

}  // namespace bitattn::kernels::remedies
