#include "tests/audit/problems.hpp"

#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "datasets/capture_file.hpp"
#include "emu/arith/bf16.hpp"

namespace bitattn::test {

Problem blank(const Shape& shape) {
  Problem p;
  p.batch = shape.batch;
  p.seqlen_q = shape.seqlen_q;
  p.seqlen_k = shape.seqlen_k;
  p.heads_q = shape.heads_q;
  p.heads_kv = shape.heads_kv;
  p.head_dim = p.head_dim_v = shape.head_dim;
  p.softmax_scale = 1 / std::sqrt(static_cast<double>(shape.head_dim));
  p.q = Bf16Tensor(p.q_shape());
  p.k = Bf16Tensor(p.k_shape());
  p.v = Bf16Tensor(p.v_shape());
  p.dout = Bf16Tensor(p.out_shape());
  return p;
}

Problem blank_packed(const std::vector<std::int32_t>& q_lengths, const std::vector<std::int32_t>& k_lengths,
                     const Shape& shape) {
  Problem p = blank(shape);
  p.layout = Layout::thd;
  p.batch = q_lengths.size();
  p.seqlen_q = p.seqlen_k = 0;
  p.cu_seqlens_q = p.cu_seqlens_k = {0};
  for (std::size_t b = 0; b < p.batch; ++b) {
    p.cu_seqlens_q.push_back(p.cu_seqlens_q.back() + q_lengths[b]);
    p.cu_seqlens_k.push_back(p.cu_seqlens_k.back() + k_lengths[b]);
    p.seqlen_q = std::max(p.seqlen_q, static_cast<std::size_t>(q_lengths[b]));
    p.seqlen_k = std::max(p.seqlen_k, static_cast<std::size_t>(k_lengths[b]));
  }
  const auto total_q = static_cast<std::size_t>(p.cu_seqlens_q.back());
  const auto total_k = static_cast<std::size_t>(p.cu_seqlens_k.back());
  p.q = Bf16Tensor({total_q, p.heads_q, p.head_dim});
  p.dout = Bf16Tensor({total_q, p.heads_q, p.head_dim_v});
  p.k = Bf16Tensor({total_k, p.heads_kv, p.head_dim});
  p.v = Bf16Tensor({total_k, p.heads_kv, p.head_dim_v});
  return p;
}

void fill(Problem& problem, std::uint64_t seed) {
  std::uint64_t state = seed * 0x9e3779b97f4a7c15U + 1;
  for (Bf16Tensor* tensor : {&problem.q, &problem.k, &problem.v, &problem.dout}) {
    for (std::uint16_t& word : tensor->data) {
      state ^= state << 13U;
      state ^= state >> 7U;
      state ^= state << 17U;
      const float x = static_cast<float>(static_cast<int>(state >> 40U) % 33) / 16.0F;
      word = arith::bf16_from_fp32((state & 1U) != 0U ? x : -x);
    }
  }
}

Capture bundled(const std::string& path) {
  return read_capture(std::string(BITATTN_BUNDLED_GOLDENS) + "/" + path);
}

std::string find_golden(const std::string& path) {
  namespace fs = std::filesystem;
  const char* large = std::getenv("BITATTN_GOLDENS");
  if (large != nullptr && fs::exists(fs::path(large) / path)) return (fs::path(large) / path).string();
  const fs::path own = fs::path(BITATTN_BUNDLED_GOLDENS) / path;
  return fs::exists(own) ? own.string() : "";
}

}  // namespace bitattn::test
