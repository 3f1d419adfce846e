#pragma once
// Where a row goes wrong: measured row by row while the emulator runs, through its observer, so that nothing
// of size S*S is kept. Definitions, units and sources of every figure: docs/diagnose.md.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <vector>

#include "datasets/problem.hpp"
#include "emu/kernels/observer.hpp"

namespace bitattn::audit {

/// One value per (sequence, query head, query row): tensors of Problem::row_shape(). Rows that see no key
/// hold NaN (row_max -inf, tied_maxima 0), and so does everything that only a backward shows where there is
/// none.
struct RowFindings {
  float scale_log2 = std::numeric_limits<float>::quiet_NaN();  ///< c; NaN: no emulated kernel was observed
  Fp32Tensor row_max, row_sum;                                 ///< m (raw score units), L
  Fp32Tensor row_max_residue;                                  ///< fma(m, c, -rn(m*c)), fp32 with FTZ
  Fp32Tensor largest_block_residue;   ///< of the running maxima after each key block, the residue of largest
                                      ///< magnitude
  Fp32Tensor block_residues;          ///< asked for: [...rows, key blocks], NaN where a row skips a block
  Tensor<std::uint32_t> tied_maxima;  ///< visible keys whose score equals m

  Fp32Tensor dpsum, lse_log2;
  Fp64Tensor p_sum_excess;  ///< sum_j P' - 1
  Fp64Tensor before_cast;   ///< R before: sum_j dS, fp32 values (softcap: before the multiply by 1 - tanh^2)
  Fp64Tensor after_cast;    ///< R after: sum_j BF16(dS). With softcap no row sum of it is 0 in theory: NaN
  /// R after = g_minus_d - d_p_excess + eta + beta, row by row (softcap: R before, and beta is NaN).
  Fp64Tensor g_minus_d;      ///< sum_j P' dP - D
  Fp64Tensor d_p_excess;     ///< D (sum_j P' - 1)
  Fp64Tensor eta;            ///< rounding of dP - D and of the product to fp32
  Fp64Tensor beta;           ///< rounding of dS to BF16
  Fp64Tensor leak;           ///< norm of softmax_scale * R * key, key averaged with the row's P'
  Fp64Tensor leak_mean_key;  ///< the same with the mean of the row's visible keys
  /// Not by row: vectors in the shape of dk, softmax_scale * sum_i R_i (P'_ij / sum_j P'_ij) Q_i over the
  /// query heads of a group: what the row sums put into dK. Rows whose R is not finite are left out.
  Fp64Tensor leak_dk;
  Fp64Tensor uncancelled;  ///< norm of softmax_scale * sum_j |dS| |K_j|, dS from a D that is consistent with
                           ///< P' and dP
};

class RowLocator final : public kernels::Observer {
 public:
  struct Options {
    bool block_residues = false;
  };
  RowLocator(const Problem& problem, const Options& options);

  void forward_block(const kernels::ForwardBlock& block) override;
  void forward_rows(const kernels::ForwardRows& rows) override;
  void backward_rows(const kernels::BackwardRows& rows) override;

  const RowFindings& findings() const { return findings_; }
  RowFindings& findings() { return findings_; }

 private:
  /// Sums of the keys [0, b * kStep) of one sequence and KV head; NaN and infinities left out and counted
  /// instead.
  struct KeySums {
    std::vector<double> sums;  ///< [steps + 1][head_dim]
    std::vector<std::uint32_t>
        not_finite;  ///< [keys + 1], how many keys before this one hold a NaN or an infinity
  };

  void allocate_block_residues(std::size_t keys_of_block);
  KeySums sum_keys(std::size_t sequence, std::size_t kv_head) const;
  double mean_key_norm(std::size_t sequence, std::size_t kv_head, KeyRange range) const;

  const Problem& problem_;
  Options options_;
  RowFindings findings_;
  std::vector<KeySums> key_sums_;          ///< [sequence * heads_kv + kv_head]
  std::vector<std::mutex> leak_dk_locks_;  ///< [sequence * heads_kv + kv_head]
  std::once_flag block_residues_allocated_, scale_known_;
};

/// The row-max residue of a maximum m in raw score units: fma(m, c, -rn(m*c)) as the chip would give it.
float row_max_residue(float m, float scale_log2);

/// Root mean square, largest magnitude and number of the finite values among those of rows that see a key;
/// NaN where there are none.
struct RowStatistics {
  std::size_t rows = 0;        ///< rows with a finite value
  std::size_t not_finite = 0;  ///< rows that see a key and hold none
  std::size_t nonzero = 0;
  double rms = 0;
  double largest = 0;          ///< magnitude
  std::size_t largest_at = 0;  ///< index into the tensor
};

/// head >= 0: rows of that query head only.
RowStatistics row_statistics(const Problem& problem, const Fp64Tensor& values, int head = -1);
RowStatistics row_statistics(const Problem& problem, const Fp32Tensor& values, int head = -1);

/// Calls f(sequence, head, row, index into a tensor of row_shape()) for every row that sees a key.
template <class F>
void for_each_row_with_keys(const Problem& problem, F&& f) {
  for (std::size_t b = 0; b < problem.batch; ++b) {
    const SequenceSpan span = problem.sequence(b);
    for (std::size_t i = 0; i < span.q_length; ++i) {
      const KeyRange range =
          visible_keys(problem, static_cast<std::int64_t>(i), static_cast<std::int64_t>(span.q_length),
                       static_cast<std::int64_t>(span.k_length));
      if (range.first >= range.last) continue;
      for (std::size_t h = 0; h < problem.heads_q; ++h) f(b, h, i, problem.row_index(b, h, i));
    }
  }
}

}  // namespace bitattn::audit
