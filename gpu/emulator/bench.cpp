// How fast the GPU emulator is: one layer, forward and backward, by the GPU's own events; the median of
// several runs over rotated inputs.
//
//   bitattn_gpu_emulator_bench [SEQLEN HEADS HEAD_DIM full|causal RUNS]

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "emu/arith/bf16.hpp"
#include "gpu/common/device.hpp"
#include "gpu/emulator/flash3.hpp"

namespace {

using namespace bitattn;

/// About normal: the sum of twelve uniform numbers, from a counter.
std::vector<std::uint16_t> deviates(std::size_t count, std::uint64_t seed) {
  std::vector<std::uint16_t> words(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t z = (i + 1) * 0x9e3779b97f4a7c15ULL + seed * 0xd1342543de82ef95ULL;
    float sum = -6.0F;
    for (int round = 0; round < 3; ++round) {
      z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9ULL;
      z = (z ^ (z >> 27U)) * 0x94d049bb133111ebULL;
      z ^= z >> 31U;
      for (unsigned part = 0; part < 4; ++part)
        sum += static_cast<float>(z >> (16U * part) & 0xffffU) / 65536.0F;
    }
    words[i] = arith::bf16_from_fp32(sum);
  }
  return words;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Layer {
  int seqlen = 8192, heads = 32, head_dim = 128;
  bool causal = true;
  int runs = 3;
};

void bench(const Layer& layer) {
  constexpr int kInputSets = 2;
  const std::size_t size = static_cast<std::size_t>(layer.seqlen) * static_cast<std::size_t>(layer.heads) *
                           static_cast<std::size_t>(layer.head_dim);
  const std::size_t rows = static_cast<std::size_t>(layer.seqlen) * static_cast<std::size_t>(layer.heads);
  std::vector<std::vector<std::uint16_t>> inputs;
  for (int i = 0; i < 4 * kInputSets; ++i) inputs.push_back(deviates(size, static_cast<std::uint64_t>(i)));

  gpu::emulator::Inputs in;
  in.call.head_dim = in.call.head_dim_v = layer.head_dim;
  in.call.heads_q = in.call.heads_kv = layer.heads;
  in.call.seqlen_q = in.call.seqlen_k = layer.seqlen;
  in.call.softmax_scale = 1.0 / std::sqrt(static_cast<double>(layer.head_dim));
  in.call.causal = layer.causal;
  const gpu::emulator::Sequence sequence{0, layer.seqlen, 0, layer.seqlen};
  in.sequences = {&sequence, 1};
  in.total_q = in.total_k = layer.seqlen;

  const profile::Profile profile;
  const profile::BackwardTiles tiles = profile::flash3_backward_tiles(in.call, profile);
  const auto padded = [&](int block) {
    return static_cast<std::ptrdiff_t>((layer.seqlen + block - 1) / block) * block;
  };
  std::vector<std::ptrdiff_t> row_offsets;
  std::vector<std::ptrdiff_t> q_rows;
  std::vector<std::ptrdiff_t> k_rows;
  for (int h = 0; h < layer.heads; ++h) {
    row_offsets.push_back(static_cast<std::ptrdiff_t>(h) * layer.seqlen);
    q_rows.push_back(h * padded(tiles.block_m));
    k_rows.push_back(h * padded(tiles.block_n));
  }
  std::vector<std::uint16_t> out(size);
  std::vector<std::uint16_t> dq(size);
  std::vector<std::uint16_t> dk(size);
  std::vector<std::uint16_t> dv(size);
  std::vector<float> lse(rows);
  gpu::emulator::ForwardOutputs forward;
  forward.out = out.data();
  forward.lse = lse.data();
  forward.rows = row_offsets;
  forward.row_count = lse.size();
  gpu::emulator::BackwardOutputs backward;
  backward.dq = dq.data();
  backward.dk = dk.data();
  backward.dv = dv.data();
  backward.q_rows = q_rows;
  backward.k_rows = k_rows;
  backward.q_row_count = static_cast<std::size_t>(layer.heads * padded(tiles.block_m));
  backward.k_row_count = static_cast<std::size_t>(layer.heads * padded(tiles.block_n));

  std::vector<double> forward_seconds;
  std::vector<double> backward_seconds;
  std::vector<double> wall_seconds;
  gpu::emulator::Work work;
  for (int run = -1; run < layer.runs; ++run) {  // the first one warms up
    const std::size_t set = static_cast<std::size_t>(run + 1) % kInputSets * 4;
    in.q = inputs[set].data();
    in.k = inputs[set + 1].data();
    in.v = inputs[set + 2].data();
    in.dout = inputs[set + 3].data();
    const auto begin = std::chrono::steady_clock::now();
    work = gpu::emulator::flash3(profile, in, forward, &backward, {});
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
    if (run < 0) continue;
    forward_seconds.push_back(work.forward_seconds);
    backward_seconds.push_back(work.backward_seconds);
    wall_seconds.push_back(wall.count());
  }
  const double f = median(forward_seconds);
  const double b = median(backward_seconds);
  std::printf(
      "S=%-6d heads=%-3d d=%-4d %-6s forward %8.4f s %7.1f G/s  backward %8.4f s %7.1f G/s  both %7.1f G/s  "
      "with transfers %7.3f s\n",
      layer.seqlen, layer.heads, layer.head_dim, layer.causal ? "causal" : "full", f,
      work.forward_products / f * 1e-9, b, work.backward_products / b * 1e-9,
      (work.forward_products + work.backward_products) / (f + b) * 1e-9, median(wall_seconds));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::printf("%s\nfused products a second of the kernel's own tiles, median of the runs\n",
                gpu::select_device().text().c_str());
    if (argc == 6) {
      Layer layer;
      layer.seqlen = std::atoi(argv[1]);
      layer.heads = std::atoi(argv[2]);
      layer.head_dim = std::atoi(argv[3]);
      layer.causal = std::strcmp(argv[4], "causal") == 0;
      layer.runs = std::atoi(argv[5]);
      bench(layer);
      return 0;
    }
    for (const Layer& layer :
         {Layer{512, 1, 128, true, 5}, Layer{2048, 4, 128, true, 5}, Layer{4096, 32, 128, true, 3},
          Layer{4096, 32, 128, false, 3}, Layer{4096, 32, 64, true, 3}, Layer{8192, 1, 128, true, 3},
          Layer{8192, 32, 128, true, 3}}) {
      bench(layer);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
