#pragma once
// Deviations: one decision of a kernel taken otherwise than FlashAttention-3 takes it. Plain data, and the
// one place where a deviation is put into words. A deviation is a point of the operation order (a value, an
// operation, a constant, an operand, a piece of the structure), a kind, and the kind's parameter.
//
// Every point belongs to a rounding site (emu/profile/sites.hpp) or to one of the names for what is no
// rounding: operand, mask, block_order, head_map, compiler. How a deviation is run: emu/kernels/deviant.hpp
// for numbers, the schedules for structure.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "emu/profile/sites.hpp"

namespace bitattn::profile {

/// A point of the operation order, in program order.
enum class Point : std::uint8_t {
  compiler,  ///< options of the compiler, in both passes
  compiler_forward,
  compiler_backward,
  q,  ///< an operand as every product reads it, in both passes
  k,
  v,
  mask,      ///< in both passes
  head_map,  ///< which KV head a query head reads, in both passes
  c,         ///< softmax_scale * log2(e), in both passes
  // forward
  q_forward,
  k_forward,
  v_forward,
  head_map_forward,
  head_map_forward_k,
  head_map_forward_v,
  blocks_forward,
  score,
  softcap,
  mask_forward,
  row_max,
  c_forward,
  exponent,
  scaled_max,
  p,
  p_in_sum,
  lane_sum,
  row_sum,
  total,
  alpha,
  rescaled_o,
  p_word,
  pv,
  inverse,
  normalised_o,
  ln2,
  log_total,
  lse,
  out_word,
  // backward: preprocess
  dout_in_dpsum,
  o_in_dpsum,
  dpsum_product,
  dpsum_sum,
  dpsum,
  lse_read,
  log2e,
  lse_log2,
  // backward: main loop
  q_backward,
  k_backward,
  v_backward,
  dout_backward,
  q_in_s,
  k_in_s,
  dout_in_dp,
  v_in_dp,
  head_map_backward,      ///< of K and V as they are loaded
  head_map_backward_all,  ///< the same, and into which KV head dK and dV go
  head_map_backward_k,
  head_map_backward_v,
  head_map_gradients,  ///< into which KV head a query head's dK and dV go
  blocks_backward,
  score_backward,
  softcap_backward,
  mask_backward,
  c_backward,
  exponent_backward,
  e_read,
  p_backward,
  dp,
  d_read,
  ds_difference,
  p_in_ds,
  ds,
  pb_word,
  ds_word,
  ds_word_in_dq,
  ds_word_in_dk,
  dout_in_dv,
  dv,
  q_in_dk,
  dk,
  k_in_dq,
  dq_part,
  blocks_dkv,  ///< query blocks as dK and dV are accumulated over them
  blocks_dq,   ///< key blocks as dQ is accumulated over them
  dq_accum,
  scale_dk,
  scaled_dk,
  dkv_accum,
  // backward: the last casts
  scale_dq,
  scaled_dq,
  dq_word,
  dk_word,
  dv_word,
};
inline constexpr std::size_t kPointCount = static_cast<std::size_t>(Point::dv_word) + 1;

/// A number format to which a value is rounded.
enum class Format : std::uint8_t {
  bf16,
  fp16,
  tf32,
  e4m3,
  e5m2,
  bits,  ///< fp32 with fewer significant bits: Deviation::parameter is kBits + that many
};
inline constexpr int kBits = 100;

enum class Kind : std::uint8_t {
  // a value, after the chip's own rounding; parameter: a Format, or kBits + significant bits
  narrowed,            ///< to nearest even
  narrowed_truncated,  ///< toward zero
  narrowed_ties_away,  ///< to nearest, ties away from zero
  // a rounding (fp32 operation, or cast to BF16) done otherwise
  twice,  ///< a cast by way of another format (parameter)
  truncated,
  ties_away,
  away_from_zero,
  upward,
  downward,
  stochastic,  ///< each neighbour with the probability that makes the mean right
  // a constant
  ulps,        ///< parameter: how many off
  from_float,  ///< formed in fp32 from fp32 factors
  // a function
  correctly_rounded,
  polynomial,   ///< exp2; parameter: degree + 10 * PolynomialForm
  by_division,  ///< O / L and not O * (1/L)
  // operations
  unfused,
  fused,
  other_fused,         ///< the other of two products is fused
  other_order,         ///< the same terms added in another order
  flushed,             ///< an addition that flushes subnormals
  scaled_first,        ///< multiplied by softmax_scale early; the later multiplications dropped
  scaled_after_cast,   ///< cast, multiplied by softmax_scale, cast again; the later multiplications dropped
  cast_before_scaled,  ///< rounded to BF16, then multiplied by softmax_scale and cast
  dropped,             ///< not done at all
  added_apart,         ///< a block's product is formed from zero and added in fp32
  added_apart_fused,   ///< the same, the addition fused with the rescaling
  halves,              ///< the product in two halves of K, each from zero, added in fp32
  k_descending,        ///< the steps of K in descending order
  kept_below,  ///< the running maximum stays unless it grows by more than this (in the exponent; parameter)
  // structure
  block_size,    ///< parameter: keys of a tile
  reversed,      ///< the opposite order
  rotated,       ///< the order begins `parameter` blocks later and wraps around
  even_odd,      ///< even blocks first, then odd ones
  skipped,       ///< parameter: block index, counted from the right edge where negative (-1: the last)
  taken_twice,   ///< the same
  shifted,       ///< the diagonal is `parameter` keys to the right
  left_shifted,  ///< the window's left edge is `parameter` keys to the left
  right_shifted,
  ignored,         ///< the causal or local test is not done
  top_left,        ///< the diagonal begins at the first key
  length_ignored,  ///< keys past the end are not hidden
  modulo,          ///< KV head h % heads_kv and not h / group
  first_head,      ///< KV head 0
  next_head,       ///< the next KV head, modulo heads_kv
  // compiler
  no_flush,          ///< -ftz=false
  no_fma,            ///< -fmad=false
  precise_division,  ///< -prec-div=true
  no_fast_math,      ///< without --use_fast_math
};

/// On which interval, and how, a polynomial stands for 2^f, f the argument's fraction.
enum class PolynomialForm : std::uint8_t {
  minimax_floor,    ///< f in [0, 1), nearly minimax, constant term 1
  taylor_floor,     ///< f in [0, 1), Taylor
  minimax_nearest,  ///< f in [-1/2, 1/2]
  taylor_nearest,
  published_floor,  ///< degree 3: the coefficients published with FlashAttention-4; others as minimax_floor
};
inline constexpr int kPolynomialForms = 5;

struct Deviation {
  Point point = Point::compiler;
  Kind kind = Kind::narrowed;
  int parameter = 0;
  bool operator==(const Deviation&) const = default;
};

/// Which kernel a point belongs to.
enum class Stage : std::uint8_t { both, forward, preprocess, main, postprocess };

/// What a point is, which settles the kinds that make sense there.
enum class PointClass : std::uint8_t {
  value,      ///< an fp32 value that is stored or carried on
  operation,  ///< the result of one fp32 addition, multiplication or fused multiply-add
  cast,       ///< a cast to BF16
  function,   ///< the result of the special-function unit
  constant,   ///< an fp32 constant
  operand,    ///< a BF16 input as a product reads it
  product,    ///< a tensor-core product and its accumulator
  mask,
  key_blocks,  ///< blocks of a loop
  head_map,
  compiler,
};

struct PointInfo {
  Point point;
  std::string_view site;  ///< a name of kSites, or operand, mask, block_order, head_map, compiler
  Stage stage;
  PointClass point_class;
  std::string_view what;
};
const PointInfo& info(Point point);

/// The rounding site a point belongs to; none for structure, operands and the compiler.
std::optional<Site> site_of(Point point);

/// "dpsum: each product dO*O kept in BF16".
std::string text(const Deviation& deviation);

/// What of a call decides which deviations can show.
struct DeviationScope {
  bool masked = false;  ///< causal or local
  bool local = false;
  bool softcap = false;
  bool grouped = false;             ///< several query heads to a KV head
  bool several_heads = false;       ///< more than one KV head
  bool with_lengths_apart = false;  ///< queries and keys differ in number
  int key_blocks_forward = 1, key_blocks_backward = 1, query_blocks_backward = 1;
};

/// Every deviation at a point that the schedules can run and that can show there, likely kinds first. A
/// search space, not a list of known bugs: each kind that makes sense for the point's class, each format,
/// each block.
std::vector<Deviation> deviations_at(Point point, const DeviationScope& scope);

/// The deviation of this point among several; nullptr where there is none.
const Deviation* find(const std::vector<Deviation>& deviations, Point point);

/// The same, and where the point has none, that of the point which stands for it and others (`whole`).
const Deviation* find(const std::vector<Deviation>& deviations, Point point, Point whole);

/// Blocks [first, last) in the order in which a loop takes them.
std::vector<int> visited_blocks(int first, int last, bool descending, const Deviation* deviation);
/// How often block `index` of `count` is taken: 1, unless the deviation skips it or takes it twice.
int times_taken(int index, int count, const Deviation* deviation);
/// The KV head that belongs to a query head.
int kv_head_of(int head, int heads_q, int heads_kv, const Deviation* deviation);

/// Does a deviation change the schedule's structure (blocks, masks, heads) and no number?
bool is_structural(const Deviation& deviation);

}  // namespace bitattn::profile
