#include "backends/input_remedies.hpp"

#include <algorithm>
#include <vector>

#include "emu/arith/bf16.hpp"
#include "emu/arith/fp32.hpp"
#include "emu/arith/fp32_ftz.hpp"
#include "emu/arith/mufu.hpp"

namespace bitattn {

namespace {

using profile::Remedy;

constexpr std::size_t kChunk = 128;  ///< tokens of a partial sum
constexpr float kEpsilon = 1e-6F;

float rsqrt(float x) {
  return arith::from_bits(arith::mufu::rsqrt(arith::to_bits(x)));
}

/// 1/sqrt(mean of the squares + epsilon) of one vector: squares by fused multiply-adds, columns ascending.
float inverse_rms(const std::uint16_t* x, std::size_t dim) {
  float squares = 0;
  for (std::size_t d = 0; d < dim; ++d) {
    const float value = arith::fp32_from_bf16(x[d]);
    squares = arith::ftz::fma(value, value, squares);
  }
  const float mean = arith::ftz::mul(squares, 1.0F / static_cast<float>(dim));
  return rsqrt(arith::ftz::add(mean, kEpsilon));
}

/// Sum over tokens in the order of centred-keys: chunks of 128, then the chunks.
template <class Term>
float chunked_sum(std::size_t tokens, const Term& term) {
  float sum = 0;
  for (std::size_t begin = 0; begin < tokens; begin += kChunk) {
    float chunk = 0;
    for (std::size_t t = begin; t < std::min(tokens, begin + kChunk); ++t) {
      chunk = arith::ftz::add(chunk, term(t));
    }
    sum = arith::ftz::add(sum, chunk);
  }
  return sum;
}

/// x := x * (1/rms) of every (token, head), with `gain` times the mean RMS of the head over its tokens.
void normalise(Bf16Tensor& x, std::size_t heads, std::size_t dim, bool gain) {
  if (dim == 0 || heads == 0) return;
  const std::size_t tokens = x.size() / (heads * dim);
  for (std::size_t h = 0; h < heads; ++h) {
    std::vector<float> inverse(tokens);
    for (std::size_t t = 0; t < tokens; ++t) {
      inverse[t] = inverse_rms(x.data.data() + (t * heads + h) * dim, dim);
    }
    float factor = 1;
    if (gain && tokens > 0) {
      const float sum = chunked_sum(tokens, [&](std::size_t t) { return 1.0F / inverse[t]; });
      factor = arith::ftz::mul(sum, 1.0F / static_cast<float>(tokens));
    }
    for (std::size_t t = 0; t < tokens; ++t) {
      std::uint16_t* row = x.data.data() + (t * heads + h) * dim;
      for (std::size_t d = 0; d < dim; ++d) {
        const float unit = arith::ftz::mul(arith::fp32_from_bf16(row[d]), inverse[t]);
        row[d] = arith::bf16_from_fp32(gain ? arith::ftz::mul(unit, factor) : unit);
      }
    }
  }
}

/// k := k - mean over the sequence, per head and column.
void remove_mean_key(Problem& problem, bool mean_in_bf16) {
  const std::size_t stride = problem.k_stride();
  for (std::size_t b = 0; b < problem.batch; ++b) {
    const SequenceSpan span = problem.sequence(b);
    if (span.k_length == 0) continue;
    std::uint16_t* keys = problem.k.data.data() + span.k_begin * stride;
    for (std::size_t column = 0; column < stride; ++column) {
      const float sum = chunked_sum(
          span.k_length, [&](std::size_t j) { return arith::fp32_from_bf16(keys[j * stride + column]); });
      float mean = arith::ftz::mul(sum, 1.0F / static_cast<float>(span.k_length));
      if (mean_in_bf16) mean = arith::fp32_from_bf16(arith::bf16_from_fp32(mean));
      for (std::size_t j = 0; j < span.k_length; ++j) {
        std::uint16_t& word = keys[j * stride + column];
        word = arith::bf16_from_fp32(arith::ftz::sub(arith::fp32_from_bf16(word), mean));
      }
    }
  }
}

}  // namespace

bool is_input_remedy(Remedy remedy) {
  switch (remedy) {
    case Remedy::mean_free_keys:
    case Remedy::mean_free_keys_bf16:
    case Remedy::qk_norm:
    case Remedy::qk_norm_gain:
      return true;
    default:
      return false;
  }
}

Problem remedy_inputs(const Problem& problem, const profile::RemedySet& remedies) {
  Problem remedied = problem;
  if (remedies.has(Remedy::qk_norm) || remedies.has(Remedy::qk_norm_gain)) {
    const bool gain = remedies.has(Remedy::qk_norm_gain);
    normalise(remedied.q, problem.heads_q, problem.head_dim, gain);
    normalise(remedied.k, problem.heads_kv, problem.head_dim, gain);
  }
  if (remedies.has(Remedy::mean_free_keys) || remedies.has(Remedy::mean_free_keys_bf16)) {
    remove_mean_key(remedied, remedies.has(Remedy::mean_free_keys_bf16));
  }
  return remedied;
}

}  // namespace bitattn
