#pragma once
// A problem: the inputs of one attention call, forward and backward. Names and layout follow the attention
// libraries.

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "datasets/tensor.hpp"

namespace bitattn {

enum class Layout : std::uint8_t { bshd, thd };
enum class CausalAlignment : std::uint8_t { bottom_right, top_left };

/// Everything a capture says about where it came from; kept and written back, never interpreted by
/// arithmetic.
using Attribute = std::variant<std::int64_t, double, std::string>;
using Attributes = std::map<std::string, Attribute>;

/// An attribute of several elements, row-major; kept and written back like the others.
struct AttributeArray {
  std::vector<std::size_t> shape;
  std::variant<std::vector<std::int64_t>, std::vector<double>, std::vector<std::string>> values;
};

/// Where the tokens of one batch element (BSHD) or one packed sequence (THD) lie along the token axis, in
/// tokens.
struct SequenceSpan {
  std::size_t q_begin = 0, q_length = 0;
  std::size_t k_begin = 0, k_length = 0;
};

struct Problem {
  Layout layout = Layout::bshd;
  std::size_t batch = 0;     ///< batch elements, or packed sequences
  std::size_t seqlen_q = 0;  ///< queries of a sequence; THD: the longest
  std::size_t seqlen_k = 0;  ///< keys of a sequence; THD: the longest
  std::size_t heads_q = 0, heads_kv = 0;
  std::size_t head_dim = 0;    ///< of q and k
  std::size_t head_dim_v = 0;  ///< of v, out and dout

  /// BSHD: q, dout [B,Sq,Hq,D], k, v [B,Sk,Hkv,D]. THD: [total,H,D].
  Bf16Tensor q, k, v;
  Bf16Tensor dout;                                       ///< empty: forward only
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;  ///< THD only, batch+1 entries each

  double softmax_scale = 0;
  bool causal = false;
  int window_left = -1, window_right = -1;  ///< -1: no limit
  double softcap = 0;                       ///< 0: none
  bool deterministic = true;
  CausalAlignment causal_alignment = CausalAlignment::bottom_right;
  Attributes attributes;  ///< all others of the capture: kernel, device, regime, seed, step, layer, …
  std::map<std::string, AttributeArray> array_attributes;

  std::size_t group() const {
    return heads_kv == 0 ? 0 : heads_q / heads_kv;
  }  ///< query heads to one KV head
  std::size_t total_q() const { return layout == Layout::bshd ? batch * seqlen_q : q.shape.at(0); }
  std::size_t total_k() const { return layout == Layout::bshd ? batch * seqlen_k : k.shape.at(0); }
  SequenceSpan sequence(std::size_t b) const;

  /// Token strides in elements; element (token, head, d) is data[token * stride + head * D + d] in both
  /// layouts.
  std::size_t q_stride() const { return heads_q * head_dim; }
  std::size_t k_stride() const { return heads_kv * head_dim; }
  std::size_t v_stride() const { return heads_kv * head_dim_v; }
  std::size_t out_stride() const { return heads_q * head_dim_v; }

  /// Shapes of the tensors that belong to this problem.
  std::vector<std::size_t> q_shape() const;    ///< q, dq
  std::vector<std::size_t> k_shape() const;    ///< k, dk
  std::vector<std::size_t> v_shape() const;    ///< v, dv
  std::vector<std::size_t> out_shape() const;  ///< out, dout
  std::vector<std::size_t> row_shape() const;  ///< lse and per-row findings: [B,Hq,Sq], THD [Hq,total]
  /// Index of (sequence b, head h, row i) in a tensor of row_shape().
  std::size_t row_index(std::size_t b, std::size_t h, std::size_t i) const;

  /// The attribute as text or a number, or the fallback where it is absent.
  std::string text(const std::string& name, const std::string& fallback = "") const;
  std::int64_t integer(const std::string& name, std::int64_t fallback) const;
};

/// Does query i of a sequence see key j? From the mathematics of the mask alone (sq, sk: lengths of the
/// sequence).
bool visible(const Problem& problem, std::int64_t i, std::int64_t j, std::int64_t sq, std::int64_t sk);

/// The visible keys of row i as one range [first, last), empty if first >= last. Every mask here is one range
/// a row.
struct KeyRange {
  std::int64_t first, last;
};
KeyRange visible_keys(const Problem& problem, std::int64_t i, std::int64_t sq, std::int64_t sk);

/// The same problem reduced to the query heads of KV heads [first_kv, first_kv + count_kv). A true part says
/// in the attributes launch_batch, launch_heads_q, launch_heads_kv and heads_kept what it was cut from, as
/// some kernels choose their order by that.
Problem slice_heads(const Problem& problem, std::size_t first_kv, std::size_t count_kv);

/// Throws InputError unless every shape, length, head count and number of the problem fits every other.
void check_problem(const Problem& problem, const std::string& where);

}  // namespace bitattn
