#include "audit/trace.hpp"

#include <algorithm>
#include <type_traits>

#include "emu/arith/bf16.hpp"

namespace bitattn::audit {

namespace {

std::vector<std::size_t> pair_shape(const Problem& problem) {
  std::vector<std::size_t> shape = problem.row_shape();
  shape.push_back(problem.seqlen_k);
  return shape;
}

}  // namespace

double full_trace_bytes(const Problem& problem) {
  double pairs = 1;
  for (const std::size_t d : pair_shape(problem)) pairs *= static_cast<double>(d);
  return pairs * sizeof(float) * (problem.dout.empty() ? 2 : 7);
}

FullTrace::FullTrace(const Problem& problem, CaptureWriter& writer, const std::string& group,
                     kernels::Observer& next)
    : problem_(problem), writer_(writer), group_(group), next_(next) {
  const std::vector<std::size_t> shape = pair_shape(problem);
  const auto create = [&](const char* name, const char* units, const char* description) {
    writer_.create_streamed_fp32(group_, std::string("trace/") + name, shape, units, description);
  };
  create("scores", "raw score (softcap: tanh)", "forward scores; masked: -inf");
  create("p_forward", "1",
         "forward numerators, fp32, as of the row's running maximum when their key block was done");
  if (problem.dout.empty()) return;
  create("p", "1", "P' of the backward, fp32");
  create("dp", "gradient of a probability", "dP = dO.V");
  create("ds", "gradient of a score", "dS before its cast (softcap: after its derivative)");
  create("p_bf16", "1", "P' rounded to BF16");
  create("ds_bf16", "gradient of a score", "dS rounded to BF16");
}

template <class T>
void FullTrace::write(const char* name, const Piece& piece, const T* values) {
  const auto sequence = static_cast<std::size_t>(piece.id.sequence);
  const SequenceSpan span = problem_.sequence(sequence);
  const int keys = std::min(piece.keys, static_cast<int>(span.k_length) - piece.key_begin);
  if (keys <= 0 || piece.rows <= 0) return;
  buffer_.resize(static_cast<std::size_t>(piece.rows) * static_cast<std::size_t>(keys));
  for (int r = 0; r < piece.rows; ++r) {
    const T* from = values + r * piece.row_stride;
    float* to = buffer_.data() + static_cast<std::ptrdiff_t>(r) * keys;
    for (int j = 0; j < keys; ++j) {
      if constexpr (std::is_same_v<T, float>) {
        to[j] = from[j];
      } else {
        to[j] = arith::fp32_from_bf16(from[j]);
      }
    }
  }
  const auto head = static_cast<std::size_t>(piece.id.head);
  const auto row = static_cast<std::size_t>(piece.row_begin);
  const auto key = static_cast<std::size_t>(piece.key_begin);
  const auto rows = static_cast<std::size_t>(piece.rows);
  const auto columns = static_cast<std::size_t>(keys);
  const std::string path = std::string("trace/") + name;
  if (problem_.layout == Layout::thd) {
    writer_.write_streamed_fp32(group_, path, {head, span.q_begin + row, key}, {1, rows, columns},
                                buffer_.data());
  } else {
    writer_.write_streamed_fp32(group_, path, {sequence, head, row, key}, {1, 1, rows, columns},
                                buffer_.data());
  }
}

void FullTrace::forward_block(const kernels::ForwardBlock& block) {
  next_.forward_block(block);
  const std::lock_guard lock(mutex_);
  const Piece piece{block.id, block.row_begin, block.rows, block.key_begin, block.keys, block.row_stride};
  write("scores", piece, block.scores);
  write("p_forward", piece, block.p);
}

void FullTrace::backward_rows(const kernels::BackwardRows& rows) {
  next_.backward_rows(rows);
  const std::lock_guard lock(mutex_);
  const Piece piece{rows.id, rows.row_begin, rows.rows, rows.key_begin, rows.keys, rows.row_stride};
  write("p", piece, rows.p);
  write("dp", piece, rows.dp);
  write("ds", piece, rows.ds);
  write("p_bf16", piece, rows.p_bf16);
  write("ds_bf16", piece, rows.ds_bf16);
}

}  // namespace bitattn::audit
