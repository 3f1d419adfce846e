#include <algorithm>
#include <string>

#include "gpu/common/buffer.hpp"
#include "gpu/common/launch.hpp"
#include "gpu/emulator/backward.cuh"
#include "gpu/emulator/flash3.hpp"
#include "gpu/emulator/forward.cuh"

namespace bitattn::gpu::emulator {

namespace {

constexpr int kGiB = 30;  ///< as a power of two

int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

unsigned unsigned_of(int n) {
  return static_cast<unsigned>(n);
}

/// The parts of a profile as device code reads them. Throws Error for what it does not have.
Rules rules_of(const profile::Profile& profile, const profile::Call& call) {
  const profile::Arithmetic& arithmetic = profile.arithmetic;
  const auto is_chip = [](profile::Function f) { return f == profile::Function::special_function_unit; };
  const auto refuse = [&](const char* what) {
    throw Error("the GPU emulator cannot run " + profile.name + ": it has no " + what);
  };
  if (!is_chip(arithmetic.ex2) || !is_chip(arithmetic.lg2) || !is_chip(arithmetic.rcp)) {
    refuse("correctly rounded functions");
  }
  if (!profile.exact.empty()) refuse("rounding sites run exactly");
  if (!profile.remedies.empty()) refuse("remedies");
  Rules rules{};
  rules.tensor_core = {arithmetic.tensor_core_fraction_bits, 23, -133,
                       arithmetic.tensor_core_rounds_to_nearest};
  rules.chip_tensor_core =
      arithmetic.tensor_core_fraction_bits == 25 && !arithmetic.tensor_core_rounds_to_nearest;
  rules.flush = arithmetic.flush_subnormals;
  rules.forward = profile.forward;
  rules.backward = profile.backward;
  rules.scalars = profile::flash3_scalars(call);
  return rules;
}

/// One call on the GPU, from upload to download.
class Flash3 {
 public:
  Flash3(const profile::Profile& profile, const Inputs& in, const ForwardOutputs& forward,
         const BackwardOutputs* backward, const Options& options)
      : profile_(profile),
        in_(in),
        forward_out_(forward),
        backward_out_(backward),
        options_(options),
        rules_(rules_of(profile, in.call)),
        device_(select_device()) {
    shape_.head_dim = in.call.head_dim;
    shape_.head_dim_v = in.call.head_dim_v;
    shape_.heads_q = in.call.heads_q;
    shape_.heads_kv = in.call.heads_kv;
    shape_.total_q = in.total_q;
    shape_.total_k = in.total_k;
    shape_.varlen = in.call.varlen;
  }

  Work run() {
    plan_forward();
    if (backward_out_ != nullptr) plan_backward();
    upload_inputs();
    run_forward();
    if (backward_out_ != nullptr) run_backward();
    return work_;
  }

 private:
  using Words = Buffer<std::uint16_t>;
  using Floats = Buffer<float>;

  std::size_t q_size() const { return size(in_.total_q, shape_.heads_q, shape_.head_dim); }
  std::size_t k_size() const { return size(in_.total_k, shape_.heads_kv, shape_.head_dim); }
  std::size_t v_size() const { return size(in_.total_k, shape_.heads_kv, shape_.head_dim_v); }
  std::size_t out_size() const { return size(in_.total_q, shape_.heads_q, shape_.head_dim_v); }
  static std::size_t size(int tokens, int heads, int columns) {
    return static_cast<std::size_t>(tokens) * static_cast<std::size_t>(heads) *
           static_cast<std::size_t>(columns);
  }
  int group() const { return shape_.heads_q / shape_.heads_kv; }

  void report(double products) {
    done_products_ += products;
    if (!options_.progress) return;
    const double all = work_.forward_products + work_.backward_products;
    options_.progress(all > 0 ? std::min(1.0, done_products_ / all) : 1.0);
  }

  // ---- Plans: units, tiles and key jobs, from the profile's own functions. ----

  void plan_forward() {
    const profile::ForwardTiles tiles = profile::flash3_forward_tiles(in_.call, profile_);
    forward_shape_ = shape_;
    forward_shape_.block_m = tiles.block_m;
    forward_shape_.block_n = tiles.block_n;
    forward_shape_.mask = tiles.mask;
    expect_block(tiles.block_n);
    const int packed = tiles.pack_gqa ? group() : 1;
    for (std::size_t s = 0; s < in_.sequences.size(); ++s) {
      const Sequence& sequence = in_.sequences[s];
      for (int head = 0; head < shape_.heads_q; head += packed) {
        const int unit = static_cast<int>(forward_units_.size());
        forward_units_.push_back({sequence.q_begin, sequence.q_length, sequence.k_begin, sequence.k_length,
                                  head, head / group(), packed, static_cast<int>(s)});
        const int rows = sequence.q_length * packed;
        for (int m = 0; m * tiles.block_m < rows; ++m) {
          const profile::KeyBlocks blocks =
              profile::flash3_key_blocks(tiles, m, sequence.q_length, sequence.k_length, packed);
          forward_tiles_.push_back(
              {unit, m * tiles.block_m, std::min(tiles.block_m, rows - m * tiles.block_m), blocks.first,
               std::max(blocks.first, blocks.last), blocks.causal_local_from, blocks.unmasked_from});
          work_.forward_products += tile_products(forward_tiles_.back());
        }
      }
    }
    // Tiles with many visits first: those that still have a visit to make are then the first ones of a wave.
    std::stable_sort(forward_tiles_.begin(), forward_tiles_.end(),
                     [](const ForwardTile& a, const ForwardTile& b) {
                       return a.last_block - a.first_block > b.last_block - b.first_block;
                     });
  }

  double tile_products(const ForwardTile& tile) const {
    const Shape& shape = forward_shape_;
    return static_cast<double>(tile.last_block - tile.first_block) * tile.rows * shape.block_n *
           (shape.head_dim + shape.head_dim_v);
  }

  static void expect_block(int block_n) {
    if (block_n % 8 != 0)
      throw Error("the GPU emulator wants key blocks of a multiple of 8 keys, not " +
                  std::to_string(block_n));
  }

  void plan_backward() {
    backward_tiles_ = profile::flash3_backward_tiles(in_.call, profile_);
    backward_shape_ = shape_;
    backward_shape_.block_m = backward_tiles_.block_m;
    backward_shape_.block_n = backward_tiles_.block_n;
    backward_shape_.padded_dim = backward_tiles_.head_dim;
    backward_shape_.mask = backward_tiles_.mask;
    expect_block(backward_tiles_.block_n);
    int most_blocks = 0;
    for (std::size_t s = 0; s < in_.sequences.size(); ++s) {
      const Sequence& sequence = in_.sequences[s];
      most_blocks = std::max(most_blocks, ceil_div(sequence.k_length, backward_tiles_.block_n));
      for (int head = 0; head < shape_.heads_q; ++head) {
        backward_units_.push_back({sequence.q_begin, sequence.q_length, sequence.k_begin, sequence.k_length,
                                   head, head / group(), 1, static_cast<int>(s)});
      }
    }
    // Key blocks in the order in which they are added to dQ; within one, units ascend, and with them the
    // query heads of a group, in the order in which they are added to dK and dV.
    const bool descending = backward_tiles_.dq_order == profile::DqOrder::descending;
    for (int visit = 0; visit < most_blocks; ++visit) {
      for (std::size_t u = 0; u < backward_units_.size(); ++u) {
        const RowUnit& unit = backward_units_[u];
        const int blocks = ceil_div(unit.k_length, backward_tiles_.block_n);
        if (visit >= blocks) continue;
        const int n = descending ? blocks - 1 - visit : visit;
        const profile::QueryBlocks visited =
            profile::flash3_query_blocks(backward_tiles_, n, unit.q_length, unit.k_length);
        KeyJob job{};
        job.unit = static_cast<int>(u);
        job.block_n = n;
        job.first_row = visited.first * backward_tiles_.block_m;
        job.rows = std::max(0, visited.last - visited.first) * backward_tiles_.block_m;
        jobs_.push_back(job);
        visits_.push_back(visit);
        work_.backward_products += job_products(job);
      }
    }
  }

  double job_products(const KeyJob& job) const {
    const Shape& shape = backward_shape_;
    return static_cast<double>(job.rows) * shape.block_n *
           (shape.head_dim + shape.head_dim_v + 3.0 * shape.padded_dim);
  }

  // ---- Memory. ----

  /// Bytes that a forward tile takes in the workspace.
  std::size_t tile_bytes() const {
    const Shape& shape = forward_shape_;
    const std::size_t row =
        static_cast<std::size_t>(shape.block_n) * (sizeof(float) + sizeof(std::uint16_t)) +
        static_cast<std::size_t>(shape.head_dim_v) * sizeof(float) + 6 * sizeof(float);
    return row * static_cast<std::size_t>(shape.block_m) + sizeof(ForwardTile);
  }

  /// Bytes that a key job takes in the workspace.
  std::size_t job_bytes(const KeyJob& job) const {
    const Shape& shape = backward_shape_;
    const std::size_t pairs = static_cast<std::size_t>(job.rows) * static_cast<std::size_t>(shape.block_n);
    const std::size_t keys =
        static_cast<std::size_t>(shape.block_n) * static_cast<std::size_t>(shape.padded_dim);
    return pairs * (sizeof(float) + 2 * sizeof(std::uint16_t)) + 2 * keys * sizeof(float) + sizeof(KeyJob) +
           64;
  }

  /// What the workspace may take: as asked for, or a share of what is free, up to 4 GiB. Never less than
  /// `least`, for which there must be room.
  std::size_t workspace(std::size_t least, const char* pass) const {
    const std::size_t free = free_memory();
    // What CUDA itself and the fragmentation of its memory take.
    const std::size_t reserve = free / 16;
    if (least > free - reserve) {
      throw Error("too little GPU memory: the " + std::string(pass) + " of this call needs a workspace of " +
                  bytes_text(least) + ", " + device_.name + " has " + bytes_text(free) + " free");
    }
    const std::size_t wanted =
        options_.workspace > 0 ? options_.workspace : std::min((free - reserve) / 2, std::size_t{4} << kGiB);
    return std::min(std::max(wanted, least), free - reserve);
  }

  static void upload(Words& buffer, const std::uint16_t* data, std::size_t size, const char* what) {
    buffer.upload(std::span<const std::uint16_t>(data, size), what);
  }

  void upload_inputs() {
    upload(q_, in_.q, q_size(), "q");
    upload(k_, in_.k, k_size(), "k");
    upload(v_, in_.v, v_size(), "v");
    if (backward_out_ != nullptr) upload(dout_, in_.dout, out_size(), "dout");
    out_.allocate(out_size(), "out");
    lse_.allocate(forward_out_.row_count, "lse");
    // What belongs to no sequence stays zero.
    out_.fill_bytes(0, "out");
    lse_.fill_bytes(0, "lse");
    const std::vector<std::int64_t> rows(forward_out_.rows.begin(), forward_out_.rows.end());
    rows_.upload(rows, "row offsets");
  }

  // ---- Forward. ----

  void run_forward() {
    const Shape& shape = forward_shape_;
    Floats out_fp32(forward_out_.out_fp32 != nullptr ? out_size() : 0, "out before its cast");
    Buffer<RowUnit> units;
    units.upload(forward_units_, "units");
    const std::size_t wave =
        std::min(std::max(workspace(tile_bytes(), "forward") / tile_bytes(), std::size_t{1}),
                 std::max(forward_tiles_.size(), std::size_t{1}));
    const std::size_t rows = wave * static_cast<std::size_t>(shape.block_m);
    Floats scores(rows * static_cast<std::size_t>(shape.block_n), "scores");
    Words p(rows * static_cast<std::size_t>(shape.block_n), "P");
    Floats o(rows * static_cast<std::size_t>(shape.head_dim_v), "O in the making");
    Floats row_max(rows, "row maxima");
    Floats alpha(rows, "rescale factors");
    Floats sums(rows * 4, "row sums");
    Buffer<ForwardTile> tiles;

    ForwardState state{};
    state.rules = rules_;
    state.shape = shape;
    state.units = units.data();
    state.q = q_.data();
    state.k = k_.data();
    state.v = v_.data();
    state.scores = scores.data();
    state.p = p.data();
    state.o = o.data();
    state.row_max = row_max.data();
    state.alpha = alpha.data();
    state.sums = sums.data();
    state.out = out_.data();
    state.out_fp32 = out_fp32.data();
    state.lse = lse_.data();
    state.rows = rows_.data();

    Event begin;
    Event end;
    begin.record();
    for (std::size_t first = 0; first < forward_tiles_.size(); first += wave) {
      const std::size_t count = std::min(wave, forward_tiles_.size() - first);
      const std::span<const ForwardTile> here(forward_tiles_.data() + first, count);
      tiles.upload(here, "tiles");
      state.tiles = tiles.data();
      run_wave(state, here);
      double products = 0;
      for (const ForwardTile& tile : here) products += tile_products(tile);
      check(cudaDeviceSynchronize(), "the forward");
      report(products);
    }
    end.record();
    work_.forward_seconds = end.milliseconds_since(begin) * 1e-3;

    out_.download(forward_out_.out, out_size(), "out");
    lse_.download(forward_out_.lse, forward_out_.row_count, "lse");
    out_fp32.download(forward_out_.out_fp32, out_fp32.size(), "out before its cast");
  }

  void run_wave(const ForwardState& state, std::span<const ForwardTile> tiles) const {
    const Shape& shape = state.shape;
    const unsigned row_tiles = unsigned_of(ceil_div(shape.block_m, kTile));
    std::size_t active = tiles.size();
    for (int visit = 0; active > 0; ++visit) {
      while (active > 0 && tiles[active - 1].last_block - tiles[active - 1].first_block <= visit) --active;
      const unsigned n = static_cast<unsigned>(active);
      launch("forward: scores", forward_scores,
             dim3(n * unsigned_of(ceil_div(shape.block_n, kTile)), row_tiles), dim3(kThreads), state, visit);
      launch("forward: rows", forward_rows, dim3(n, unsigned_of(ceil_div(shape.block_m, kThreads / 4))),
             dim3(kThreads), state, visit);
      launch("forward: P.V", forward_pv, dim3(n * unsigned_of(ceil_div(shape.head_dim_v, kTile)), row_tiles),
             dim3(kThreads), state, visit);
    }
    launch("forward: end", forward_end,
           dim3(static_cast<unsigned>(tiles.size()), unsigned_of(ceil_div(shape.block_m, kThreads / 32))),
           dim3(kThreads), state);
  }

  // ---- Backward. ----

  void run_backward() {
    const Shape& shape = backward_shape_;
    const BackwardOutputs& out = *backward_out_;
    const auto dim = static_cast<std::size_t>(shape.padded_dim);
    const bool grouped = group() > 1;
    Buffer<RowUnit> units;
    units.upload(backward_units_, "units");
    Buffer<std::int64_t> q_rows;
    Buffer<std::int64_t> k_rows;
    q_rows.upload(std::vector<std::int64_t>(out.q_rows.begin(), out.q_rows.end()), "row offsets");
    k_rows.upload(std::vector<std::int64_t>(out.k_rows.begin(), out.k_rows.end()), "row offsets");
    // Places of padded arrays that no kernel writes stay 0xffffffff.
    Floats dpsum(out.q_row_count, "dpsum");
    Floats lse_log2(out.q_row_count, "lse_log2");
    Floats dq(out.q_row_count * dim, "dq_accum");
    for (Floats* padded : {&dpsum, &lse_log2, &dq}) padded->fill_bytes(0xff, "padded rows");
    Floats dk_sum(grouped ? out.k_row_count * dim : 0, "dk_accum");
    Floats dv_sum(grouped ? out.k_row_count * dim : 0, "dv_accum");
    for (Floats* sum : {&dk_sum, &dv_sum}) sum->fill_bytes(0, "sums over query heads");
    Words dq_words(q_size(), "dq");
    Words dk_words(k_size(), "dk");
    Words dv_words(v_size(), "dv");
    for (Words* words : {&dq_words, &dk_words, &dv_words}) words->fill_bytes(0, "gradients");
    Floats dq_fp32(out.dq_fp32 != nullptr ? q_size() : 0, "dq before its cast");
    Floats dk_fp32(out.dk_fp32 != nullptr ? k_size() : 0, "dk before its cast");
    Floats dv_fp32(out.dv_fp32 != nullptr ? v_size() : 0, "dv before its cast");

    BackwardState state{};
    state.rules = rules_;
    state.shape = shape;
    state.tiles = backward_tiles_;
    state.units = units.data();
    state.q = q_.data();
    state.k = k_.data();
    state.v = v_.data();
    state.dout = dout_.data();
    state.out = out_.data();
    state.lse = lse_.data();
    state.rows = rows_.data();
    state.q_rows = q_rows.data();
    state.k_rows = k_rows.data();
    state.dpsum = dpsum.data();
    state.lse_log2 = lse_log2.data();
    state.dq = dq.data();
    state.dk_sum = dk_sum.data();
    state.dv_sum = dv_sum.data();
    state.dq_words = dq_words.data();
    state.dk_words = dk_words.data();
    state.dv_words = dv_words.data();
    state.dq_fp32 = dq_fp32.data();
    state.dk_fp32 = dk_fp32.data();
    state.dv_fp32 = dv_fp32.data();

    int longest = 0;
    for (const RowUnit& unit : backward_units_) longest = std::max(longest, unit.q_length);
    const unsigned all_units = static_cast<unsigned>(backward_units_.size());
    Event begin;
    Event end;
    begin.record();
    launch("backward: rows", backward_rows,
           dim3(all_units, unsigned_of(ceil_div(ceil_div(longest, shape.block_m) * shape.block_m, kThreads))),
           dim3(kThreads), state);
    run_chunks(state);
    launch("backward: dQ's end", backward_queries_end,
           dim3(all_units, unsigned_of(ceil_div(longest, kThreads / 32))), dim3(kThreads), state);
    end.record();
    work_.backward_seconds = end.milliseconds_since(begin) * 1e-3;

    dq_words.download(out.dq, q_size(), "dq");
    dk_words.download(out.dk, k_size(), "dk");
    dv_words.download(out.dv, v_size(), "dv");
    dq_fp32.download(out.dq_fp32, dq_fp32.size(), "dq before its cast");
    dk_fp32.download(out.dk_fp32, dk_fp32.size(), "dk before its cast");
    dv_fp32.download(out.dv_fp32, dv_fp32.size(), "dv before its cast");
    if (out.dpsum != nullptr) dpsum.download(out.dpsum, dpsum.size(), "dpsum");
    if (out.lse_log2 != nullptr) lse_log2.download(out.lse_log2, lse_log2.size(), "lse_log2");
    if (out.dq_accum != nullptr) dq.download(out.dq_accum, dq.size(), "dq_accum");
    if (out.dk_accum != nullptr) dk_sum.download(out.dk_accum, dk_sum.size(), "dk_accum");
    if (out.dv_accum != nullptr) dv_sum.download(out.dv_accum, dv_sum.size(), "dv_accum");
  }

  /// As many key blocks at a time as the workspace holds, in the order of dQ's additions.
  void run_chunks(BackwardState& state) {
    if (jobs_.empty()) return;
    const Shape& shape = backward_shape_;
    std::size_t largest = 0;
    std::size_t all = 0;
    for (const KeyJob& job : jobs_) {
      largest = std::max(largest, job_bytes(job));
      all += job_bytes(job);
    }
    const std::size_t room = std::min(workspace(largest, "backward"), all);
    Buffer<unsigned char> memory(room + kAlignment * 8, "the backward's workspace");
    for (std::size_t first = 0; first < jobs_.size();) {
      std::size_t bytes = 0;
      std::size_t last = first;
      std::int64_t rows = 0;
      for (; last < jobs_.size() && (last == first || bytes + job_bytes(jobs_[last]) <= room); ++last) {
        bytes += job_bytes(jobs_[last]);
        jobs_[last].workspace_row = rows;
        rows += jobs_[last].rows;
      }
      // The workspace, part by part.
      unsigned char* at = memory.data();
      const auto take = [&at](std::size_t size) -> void* {
        unsigned char* const here = at;
        at += (size + kAlignment - 1) / kAlignment * kAlignment;
        return here;
      };
      const std::size_t pairs = static_cast<std::size_t>(rows) * static_cast<std::size_t>(shape.block_n);
      const std::size_t keys = (last - first) * static_cast<std::size_t>(shape.block_n) *
                               static_cast<std::size_t>(shape.padded_dim);
      state.scores = static_cast<float*>(take(pairs * sizeof(float)));
      state.p = static_cast<std::uint16_t*>(take(pairs * sizeof(std::uint16_t)));
      state.ds = static_cast<std::uint16_t*>(take(pairs * sizeof(std::uint16_t)));
      state.dk = static_cast<float*>(take(keys * sizeof(float)));
      state.dv = static_cast<float*>(take(keys * sizeof(float)));
      run_chunk(state, first, last);
      first = last;
    }
  }

  void run_chunk(BackwardState& state, std::size_t first, std::size_t last) {
    const Shape& shape = backward_shape_;
    const std::span<const KeyJob> jobs(jobs_.data() + first, last - first);
    Buffer<KeyJob> device_jobs;
    device_jobs.upload(jobs, "key jobs");
    state.jobs = device_jobs.data();
    const auto most_rows = [](std::span<const KeyJob> some) {
      int most = 0;
      for (const KeyJob& job : some) most = std::max(most, job.rows);
      return unsigned_of(ceil_div(most, kTile));
    };
    const unsigned n = static_cast<unsigned>(jobs.size());
    const unsigned key_tiles = unsigned_of(ceil_div(shape.block_n, kTile));
    const unsigned dim_tiles = unsigned_of(ceil_div(shape.padded_dim, kTile));
    const unsigned row_tiles = most_rows(jobs);
    launch("backward: scores", backward_scores, dim3(n * key_tiles, row_tiles), dim3(kThreads), state);
    launch("backward: gradients", backward_gradients, dim3(n * key_tiles, row_tiles), dim3(kThreads), state);
    launch("backward: dK, dV", backward_keys, dim3(n * dim_tiles, key_tiles, 2), dim3(kThreads), state);
    // dQ: the key blocks of a row one after the other.
    for (std::size_t begin = first; begin < last;) {
      std::size_t end = begin;
      while (end < last && visits_[end] == visits_[begin]) ++end;
      const std::span<const KeyJob> visit(jobs_.data() + begin, end - begin);
      state.jobs = device_jobs.data() + (begin - first);
      launch("backward: dQ", backward_queries,
             dim3(static_cast<unsigned>(visit.size()) * dim_tiles, most_rows(visit)), dim3(kThreads), state);
      begin = end;
    }
    state.jobs = device_jobs.data();
    const std::vector<KeyGroup> groups = groups_of(jobs);
    Buffer<KeyGroup> device_groups;
    device_groups.upload(groups, "groups");
    launch("backward: the ends of dK, dV", backward_keys_end, dim3(static_cast<unsigned>(groups.size())),
           dim3(kThreads), state, device_groups.data(), group());
    check(cudaDeviceSynchronize(), "the backward");
    double products = 0;
    for (const KeyJob& job : jobs) products += job_products(job);
    report(products);
  }

  /// Jobs of one key block and KV head, which are neighbours.
  std::vector<KeyGroup> groups_of(std::span<const KeyJob> jobs) const {
    std::vector<KeyGroup> groups;
    for (std::size_t j = 0; j < jobs.size(); ++j) {
      const RowUnit& unit = backward_units_[static_cast<std::size_t>(jobs[j].unit)];
      const int in_group = unit.head % group();
      if (in_group == 0 || groups.empty())
        groups.push_back({static_cast<int>(j), 0, jobs[j].unit, jobs[j].block_n, 0});
      ++groups.back().jobs;
      if (in_group == group() - 1) groups.back().last = 1;
    }
    return groups;
  }

  static constexpr std::size_t kAlignment = 256;

  const profile::Profile& profile_;
  const Inputs& in_;
  const ForwardOutputs& forward_out_;
  const BackwardOutputs* backward_out_;
  const Options& options_;
  Rules rules_;
  Device device_;
  Shape shape_{};
  Work work_;
  double done_products_ = 0;

  Shape forward_shape_{};
  std::vector<RowUnit> forward_units_;
  std::vector<ForwardTile> forward_tiles_;

  Shape backward_shape_{};
  profile::BackwardTiles backward_tiles_;
  std::vector<RowUnit> backward_units_;
  std::vector<KeyJob> jobs_;
  std::vector<int> visits_;  ///< [job]: position of its key block in the order of dQ's additions

  Words q_, k_, v_, dout_, out_;
  Floats lse_;
  Buffer<std::int64_t> rows_;
};

}  // namespace

Work flash3(const profile::Profile& profile, const Inputs& inputs, const ForwardOutputs& forward,
            const BackwardOutputs* backward, const Options& options) {
  return Flash3(profile, inputs, forward, inputs.dout == nullptr ? nullptr : backward, options).run();
}

}  // namespace bitattn::gpu::emulator
