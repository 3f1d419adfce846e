// Times the kernels at the shapes of FlashAttention-3's own timings and prints both side by side.
//
//   bitattn_gpu_kernels_bench
//
// CUDA events around each call, warm-up calls, then the median of many; three sets of inputs in turn. The
// backward is all of its kernels together. FLOPs: forward 4*B*H*Sq*Sk*D, backward 2.5 times that, halved
// under a causal mask.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "gpu/common/buffer.hpp"
#include "gpu/common/launch.hpp"
#include "gpu/kernels/bitattn_kernels.h"

namespace {

using namespace bitattn;

/// FlashAttention-3 with deterministic=True on an H200 of the same kind, two measurements (median of 20,
/// milliseconds).
struct Peer {
  int batch, heads, length, head_dim;
  bool causal;
  double forward[2], backward[2];
};
constexpr Peer kPeers[] = {
    {2, 16, 4096, 128, false, {0.3854, 0.3940}, {1.5745, 1.4138}},
    {2, 16, 4096, 128, true, {0.2085, 0.2122}, {0.8095, 0.7698}},
    {2, 32, 4096, 64, false, {0.5294, 0.5351}, {1.7380, 1.7306}},
    {2, 32, 4096, 64, true, {0.2921, 0.2944}, {0.7275, 0.7380}},
};
constexpr int kSets = 3;
constexpr int kWarmUps = 10;
constexpr int kCalls = 40;

void check_status(int status) {
  if (status != BITATTN_KERNELS_OK) throw gpu::Error(bitattn_kernels_message());
}

/// BF16 words of sums of four uniforms: unit variance.
std::vector<std::uint16_t> inputs(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint16_t> words(count);
  for (auto& word : words) {
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(random() >> 8) * 0x1p-24F - 0.5F;
    const float x = sum * std::sqrt(3.0F);
    std::uint32_t bits = 0;
    static_assert(sizeof bits == sizeof x);
    __builtin_memcpy(&bits, &x, sizeof bits);
    word = static_cast<std::uint16_t>(bits >> 16U);
  }
  return words;
}

struct Set {
  gpu::Buffer<std::uint16_t> q, k, v, dout, out, dq, dk, dv;
  gpu::Buffer<float> lse;
};

template <class Call>
double median_milliseconds(const Call& call) {
  std::vector<float> times;
  for (int i = 0; i < kWarmUps + kCalls; ++i) {
    gpu::Event start;
    gpu::Event end;
    start.record();
    call(i % kSets);
    end.record();
    const float milliseconds = end.milliseconds_since(start);
    if (i >= kWarmUps) times.push_back(milliseconds);
  }
  std::nth_element(times.begin(), times.begin() + kCalls / 2, times.end());
  return times[kCalls / 2];
}

void row(const Peer& peer, const char* pass, double milliseconds, double flops, const double (&theirs)[2]) {
  const double best = std::min(theirs[0], theirs[1]);
  std::printf("| %d, %d, %d, %d | %s | %s | %.4f | %.0f | %.4f / %.4f | %.2f |\n", peer.batch, peer.heads,
              peer.length, peer.head_dim, peer.causal ? "causal" : "none", pass, milliseconds,
              flops / milliseconds * 1e-9, theirs[0], theirs[1], best / milliseconds);
  std::fflush(stdout);
}

void measure(const Peer& peer) {
  BitattnCall call{};
  call.batch = peer.batch;
  call.heads_q = call.heads_kv = peer.heads;
  call.seqlen_q = call.seqlen_k = peer.length;
  call.head_dim = peer.head_dim;
  call.softmax_scale = 1.0 / std::sqrt(static_cast<double>(peer.head_dim));
  call.causal = peer.causal ? 1 : 0;
  const std::size_t rows = static_cast<std::size_t>(peer.batch) * static_cast<std::size_t>(peer.heads) *
                           static_cast<std::size_t>(peer.length);
  const std::size_t count = rows * static_cast<std::size_t>(peer.head_dim);
  const std::vector<std::uint16_t> words = inputs(count + 4 * kSets * 64, 1);
  Set sets[kSets];
  unsigned shift = 0;
  for (Set& set : sets) {
    for (auto* buffer : {&set.q, &set.k, &set.v, &set.dout}) {
      buffer->upload({words.data() + 64 * shift++, count},
                     "inputs");  // shifted: other inputs without another hour
    }
    for (auto* buffer : {&set.out, &set.dq, &set.dk, &set.dv}) buffer->allocate(count, "outputs");
    set.lse.allocate(rows, "lse");
  }
  gpu::Buffer<unsigned char> workspace(bitattn_kernels_backward_workspace(&call), "workspace");
  const auto view = [&](const gpu::Buffer<std::uint16_t>& buffer) {
    const std::int64_t token = static_cast<std::int64_t>(peer.heads) * peer.head_dim;
    return BitattnTensor{buffer.data(), peer.length * token, token, peer.head_dim};
  };
  const double flops = 4.0 * static_cast<double>(count) * peer.length / (peer.causal ? 2 : 1);
  row(peer, "forward", median_milliseconds([&](int i) {
        Set& s = sets[i];
        check_status(bitattn_kernels_forward(&call, view(s.q), view(s.k), view(s.v), view(s.out),
                                             s.lse.data(), nullptr));
      }),
      flops, peer.forward);
  row(peer, "backward", median_milliseconds([&](int i) {
        Set& s = sets[i];
        check_status(bitattn_kernels_backward(&call, view(s.q), view(s.k), view(s.v), view(s.out),
                                              s.lse.data(), view(s.dout), view(s.dq), view(s.dk), view(s.dv),
                                              workspace.data(), workspace.size(), nullptr, nullptr));
      }),
      2.5 * flops, peer.backward);
}

}  // namespace

int main() {
  try {
    std::printf("%s\n\n", gpu::select_device().text().c_str());
    check_status(bitattn_kernels_check_device());
    std::printf(
        "| B, H, S, D | mask | pass | median ms | TFLOP/s | FlashAttention-3, ms (two runs) | its time / "
        "ours |\n");
    std::printf("| --- | --- | --- | --- | --- | --- | --- |\n");
    for (const Peer& peer : kPeers) measure(peer);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bitattn_gpu_kernels_bench: %s\n", error.what());
    return 2;
  }
}
