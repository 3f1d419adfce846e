#include "emu/profile/deviation.hpp"

#include <algorithm>

namespace bitattn::profile {

namespace {

using enum Stage;
constexpr PointClass kValue = PointClass::value;
constexpr PointClass kOperation = PointClass::operation;
constexpr PointClass kCast = PointClass::cast;
constexpr PointClass kFunction = PointClass::function;
constexpr PointClass kConstant = PointClass::constant;
constexpr PointClass kOperand = PointClass::operand;
constexpr PointClass kProduct = PointClass::product;

constexpr std::array<PointInfo, kPointCount> kPoints{{
    {Point::compiler, "compiler", both, PointClass::compiler, "compiler options"},
    {Point::compiler_forward, "compiler", forward, PointClass::compiler, "compiler options of the forward"},
    {Point::compiler_backward, "compiler", main, PointClass::compiler, "compiler options of the backward"},
    {Point::q, "operand", both, kOperand, "Q in every product"},
    {Point::k, "operand", both, kOperand, "K in every product"},
    {Point::v, "operand", both, kOperand, "V in every product"},
    {Point::mask, "mask", both, PointClass::mask, "mask of both passes"},
    {Point::head_map, "head_map", both, PointClass::head_map, "KV head in both passes"},
    {Point::c, "score_scale", both, kConstant, "c = softmax_scale*log2(e) in both passes"},
    {Point::q_forward, "operand", forward, kOperand, "Q in the forward"},
    {Point::k_forward, "operand", forward, kOperand, "K in the forward"},
    {Point::v_forward, "operand", forward, kOperand, "V in the forward"},
    {Point::head_map_forward, "head_map", forward, PointClass::head_map, "KV head in the forward"},
    {Point::head_map_forward_k, "head_map", forward, PointClass::head_map, "head of K in the forward"},
    {Point::head_map_forward_v, "head_map", forward, PointClass::head_map, "head of V in the forward"},
    {Point::blocks_forward, "block_order", forward, PointClass::key_blocks, "key blocks of the forward"},
    {Point::score, "score_mma", forward, kProduct, "score"},
    {Point::softcap, "softcap", forward, kOperation, "capped score"},
    {Point::mask_forward, "mask", forward, PointClass::mask, "mask of the forward"},
    {Point::row_max, "row_max_scale", forward, kValue, "row maximum"},
    {Point::c_forward, "score_scale", forward, kConstant, "c = softmax_scale*log2(e)"},
    {Point::exponent, "score_scale", forward, kOperation, "exponent fma(x, c, -m*c)"},
    {Point::scaled_max, "row_max_scale", forward, kOperation, "m*c"},
    {Point::p, "exp2", forward, kFunction, "exp2"},
    {Point::p_in_sum, "row_sum", forward, kValue, "p as the row sum adds it"},
    {Point::lane_sum, "row_sum", forward, kOperation, "each addition of the row sum"},
    {Point::row_sum, "row_sum", forward, kValue, "partial row sums between key blocks"},
    {Point::total, "row_sum", forward, kValue, "row sum L"},
    {Point::alpha, "rescale", forward, kFunction, "factor between key blocks"},
    {Point::rescaled_o, "rescale", forward, kOperation, "O rescaled between key blocks"},
    {Point::p_word, "p_cast", forward, kCast, "cast of P"},
    {Point::pv, "pv_mma", forward, kProduct, "O accumulated from P.V"},
    {Point::inverse, "rcp", forward, kFunction, "1/L"},
    {Point::normalised_o, "rcp", forward, kOperation, "O*(1/L)"},
    {Point::ln2, "lse", forward, kConstant, "ln(2) of the log-sum-exp"},
    {Point::log_total, "lse", forward, kFunction, "log2(L)"},
    {Point::lse, "lse", forward, kOperation, "log-sum-exp"},
    {Point::out_word, "o_cast", forward, kCast, "cast of O"},
    {Point::dout_in_dpsum, "operand", preprocess, kOperand, "dO as D reads it"},
    {Point::o_in_dpsum, "dpsum_o_cast", preprocess, kValue, "O as D reads it"},
    {Point::dpsum_product, "dpsum", preprocess, kValue, "each product dO*O"},
    {Point::dpsum_sum, "dpsum", preprocess, kOperation, "each addition of D"},
    {Point::dpsum, "dpsum", preprocess, kValue, "D"},
    {Point::lse_read, "lse_log2", preprocess, kValue, "log-sum-exp as the backward reads it"},
    {Point::log2e, "lse_log2", preprocess, kConstant, "log2(e) of the log-sum-exp"},
    {Point::lse_log2, "lse_log2", preprocess, kOperation, "log-sum-exp times log2(e)"},
    {Point::q_backward, "operand", main, kOperand, "Q in the backward"},
    {Point::k_backward, "operand", main, kOperand, "K in the backward"},
    {Point::v_backward, "operand", main, kOperand, "V in the backward"},
    {Point::dout_backward, "operand", main, kOperand, "dO in the backward's products"},
    {Point::q_in_s, "operand", main, kOperand, "Q in the backward's scores"},
    {Point::k_in_s, "operand", main, kOperand, "K in the backward's scores"},
    {Point::dout_in_dp, "operand", main, kOperand, "dO in dP"},
    {Point::v_in_dp, "operand", main, kOperand, "V in dP"},
    {Point::head_map_backward, "head_map", main, PointClass::head_map, "head of K and V in the backward"},
    {Point::head_map_backward_all, "head_map", main, PointClass::head_map, "KV head in the backward"},
    {Point::head_map_backward_k, "head_map", main, PointClass::head_map, "head of K in the backward"},
    {Point::head_map_backward_v, "head_map", main, PointClass::head_map, "head of V in the backward"},
    {Point::head_map_gradients, "head_map", main, PointClass::head_map, "KV head that dK and dV go to"},
    {Point::blocks_backward, "block_order", main, PointClass::key_blocks, "tiles of the backward"},
    {Point::score_backward, "score_mma_backward", main, kProduct, "score in the backward"},
    {Point::softcap_backward, "softcap_backward", main, kOperation, "capped score in the backward"},
    {Point::mask_backward, "mask", main, PointClass::mask, "mask of the backward"},
    {Point::c_backward, "p_backward", main, kConstant, "c = softmax_scale*log2(e) in the backward"},
    {Point::exponent_backward, "p_backward", main, kOperation, "exponent fma(S, c, -E)"},
    {Point::e_read, "p_backward", main, kValue, "E as the exponent reads it"},
    {Point::p_backward, "p_backward", main, kFunction, "exp2 in the backward"},
    {Point::dp, "dp_mma", main, kProduct, "dP"},
    {Point::d_read, "ds_sub", main, kValue, "D as dP - D reads it"},
    {Point::ds_difference, "ds_sub", main, kOperation, "dP - D"},
    {Point::p_in_ds, "ds_mul", main, kValue, "P as dS reads it"},
    {Point::ds, "ds_mul", main, kOperation, "P*(dP - D)"},
    {Point::pb_word, "pb_cast", main, kCast, "cast of the backward's P"},
    {Point::ds_word, "ds_cast", main, kCast, "cast of dS"},
    {Point::ds_word_in_dq, "ds_cast", main, kCast, "cast of dS as dQ reads it"},
    {Point::ds_word_in_dk, "ds_cast", main, kCast, "cast of dS as dK reads it"},
    {Point::dout_in_dv, "operand", main, kOperand, "dO in dV"},
    {Point::dv, "dv_mma", main, kProduct, "dV accumulated from P^T.dO"},
    {Point::q_in_dk, "operand", main, kOperand, "Q in dK"},
    {Point::dk, "dk_mma", main, kProduct, "dK accumulated from dS^T.Q"},
    {Point::k_in_dq, "operand", main, kOperand, "K in dQ"},
    {Point::dq_part, "dq_mma", main, kProduct, "a key block's part of dQ"},
    {Point::blocks_dkv, "block_order", main, PointClass::key_blocks, "query blocks of dK and dV"},
    {Point::blocks_dq, "block_order", main, PointClass::key_blocks, "key blocks of dQ"},
    {Point::dq_accum, "dq_reduce", main, kOperation, "each addition of dQ"},
    {Point::scale_dk, "dk_cast", main, kConstant, "softmax_scale of dK"},
    {Point::scaled_dk, "dk_cast", main, kOperation, "dK times softmax_scale"},
    {Point::dkv_accum, "dkv_reduce", main, kOperation, "each addition of dK and dV over query heads"},
    {Point::scale_dq, "dq_cast", postprocess, kConstant, "softmax_scale of dQ"},
    {Point::scaled_dq, "dq_cast", postprocess, kOperation, "dQ times softmax_scale"},
    {Point::dq_word, "dq_cast", postprocess, kCast, "cast of dQ"},
    {Point::dk_word, "dk_cast", main, kCast, "cast of dK"},
    {Point::dv_word, "dv_cast", main, kCast, "cast of dV"},
}};

constexpr bool in_program_order() {
  for (std::size_t i = 0; i < kPointCount; ++i) {
    if (static_cast<std::size_t>(kPoints[i].point) != i) return false;
  }
  return true;
}
static_assert(in_program_order());

std::string format_text(int parameter) {
  if (parameter > kBits) return std::to_string(parameter - kBits) + " significant bits";
  switch (static_cast<Format>(parameter)) {
    case Format::bf16:
      return "BF16";
    case Format::fp16:
      return "FP16";
    case Format::tf32:
      return "TF32";
    case Format::e4m3:
      return "E4M3";
    case Format::e5m2:
      return "E5M2";
    case Format::bits:
      break;
  }
  return "another format";
}

std::string signed_text(int n) {
  return (n > 0 ? "+" : "") + std::to_string(n);
}

std::string block_text(int n) {
  if (n >= 0) return "block " + std::to_string(n);
  return n == -1 ? "the last block" : "the last block but " + std::to_string(-1 - n);
}

std::string polynomial_text(int parameter) {
  const std::string degree = std::to_string(parameter % 10);
  switch (static_cast<PolynomialForm>(parameter / 10)) {
    case PolynomialForm::minimax_floor:
      return "by a polynomial of degree " + degree + ", near minimax on [0, 1)";
    case PolynomialForm::taylor_floor:
      return "by a Taylor polynomial of degree " + degree + " on [0, 1)";
    case PolynomialForm::minimax_nearest:
      return "by a polynomial of degree " + degree + ", near minimax on [-1/2, 1/2]";
    case PolynomialForm::taylor_nearest:
      return "by a Taylor polynomial of degree " + degree + " on [-1/2, 1/2]";
    case PolynomialForm::published_floor:
      return "by FlashAttention-4's polynomial of degree " + degree;
  }
  return "by a polynomial";
}

std::string kind_text(const Deviation& d) {
  const bool cast = info(d.point).point_class == PointClass::cast;
  switch (d.kind) {
    case Kind::narrowed:
      return (cast ? "to " : "rounded to ") + format_text(d.parameter);
    case Kind::narrowed_truncated:
      return "truncated to " + format_text(d.parameter);
    case Kind::narrowed_ties_away:
      return "rounded to " + format_text(d.parameter) + ", ties away from zero";
    case Kind::twice:
      return "rounded twice, by way of " + format_text(d.parameter);
    case Kind::truncated:
      return "truncated";
    case Kind::ties_away:
      return "rounded to nearest with ties away from zero";
    case Kind::away_from_zero:
      return "rounded away from zero";
    case Kind::upward:
      return "rounded upward";
    case Kind::downward:
      return "rounded downward";
    case Kind::stochastic:
      return "rounded stochastically";
    case Kind::ulps:
      return signed_text(d.parameter) + " ulp";
    case Kind::from_float:
      return "formed from fp32 factors in fp32";
    case Kind::correctly_rounded:
      return "correctly rounded and not the special-function unit's";
    case Kind::polynomial:
      return polynomial_text(d.parameter);
    case Kind::by_division:
      return "by a division, correctly rounded";
    case Kind::unfused:
      return "multiplied and added, not fused";
    case Kind::fused:
      return "fused";
    case Kind::other_fused:
      return "with the other product fused";
    case Kind::other_order:
      return "in another order";
    case Kind::flushed:
      return "flushing subnormals";
    case Kind::scaled_first:
      return "multiplied by softmax_scale first, later multiplications dropped";
    case Kind::scaled_after_cast:
      return "rounded to BF16, multiplied by softmax_scale and rounded again, later multiplications dropped";
    case Kind::cast_before_scaled:
      return "rounded to BF16 before the multiplication by softmax_scale";
    case Kind::dropped:
      return "left out";
    case Kind::added_apart:
      return "each block from zero, added in fp32";
    case Kind::added_apart_fused:
      return "each block from zero, added in fp32, fused with the rescaling";
    case Kind::halves:
      return "in two halves of its inner dimension, added in fp32";
    case Kind::k_descending:
      return "inner dimension in descending order";
    case Kind::kept_below:
      return "kept until it grows by more than " + std::to_string(d.parameter) + " in the exponent";
    case Kind::block_size:
      return std::to_string(d.parameter) + " keys each";
    case Kind::reversed:
      return "in the opposite order";
    case Kind::rotated:
      return "beginning " + std::to_string(d.parameter) + " later, wrapped around";
    case Kind::even_odd:
      return "even ones first, then odd ones";
    case Kind::skipped:
      return block_text(d.parameter) + " skipped";
    case Kind::taken_twice:
      return block_text(d.parameter) + " taken twice";
    case Kind::shifted:
      return "diagonal shifted by " + signed_text(d.parameter);
    case Kind::left_shifted:
      return "window's left edge shifted by " + signed_text(d.parameter);
    case Kind::right_shifted:
      return "window's right edge shifted by " + signed_text(d.parameter);
    case Kind::ignored:
      return "not applied";
    case Kind::top_left:
      return "aligned to the top left";
    case Kind::length_ignored:
      return "keys past the end not hidden";
    case Kind::modulo:
      return "h mod heads_kv and not h / group";
    case Kind::first_head:
      return "always the first";
    case Kind::next_head:
      return "the next one";
    case Kind::no_flush:
      return "-ftz=false";
    case Kind::no_fma:
      return "-fmad=false";
    case Kind::precise_division:
      return "-prec-div=true";
    case Kind::no_fast_math:
      return "without --use_fast_math";
  }
  return "";
}

class Candidates {
 public:
  explicit Candidates(Point point) : point_(point) {}
  Candidates& add(Kind kind, int parameter = 0) {
    list_.push_back({point_, kind, parameter});
    return *this;
  }
  Candidates& formats(Kind kind, std::initializer_list<Format> formats) {
    for (const Format f : formats) add(kind, static_cast<int>(f));
    return *this;
  }
  /// fp32 with fewer bits, down to `least`.
  Candidates& bits(Kind kind, int least, int most = 23) {
    for (int n = most; n >= least; --n) {
      if (n != 8 && n != 11) add(kind, kBits + n);  // BF16's, and TF32's
    }
    return *this;
  }
  Candidates& narrower() {
    using enum Format;
    formats(Kind::narrowed, {bf16, fp16, tf32, e4m3, e5m2});
    formats(Kind::narrowed_truncated, {bf16, fp16, tf32});
    formats(Kind::narrowed_ties_away, {bf16, fp16, tf32});
    return this->bits(Kind::narrowed, 3);
  }
  Candidates& directed() {
    return add(Kind::truncated).add(Kind::upward).add(Kind::downward).add(Kind::away_from_zero);
  }
  std::vector<Deviation> take() { return std::move(list_); }

 private:
  Point point_;
  std::vector<Deviation> list_;
};

void add_blocks(Candidates& to, Kind kind, int blocks) {
  for (int n = 0; n < std::min(blocks, 8); ++n) to.add(kind, n);
  for (int n = -1; n >= -std::min(blocks - 1, 3); --n) to.add(kind, n);
}

void add_block_kinds(Candidates& to, Point point, const DeviationScope& scope) {
  const bool key_side = point != Point::blocks_dkv;
  const int blocks = point == Point::blocks_forward ? scope.key_blocks_forward
                     : key_side                     ? scope.key_blocks_backward
                                                    : scope.query_blocks_backward;
  if (blocks > 1 && point != Point::blocks_backward) {
    to.add(Kind::reversed).add(Kind::even_odd);
    for (int n = 1; n < std::min(blocks, 4); ++n) to.add(Kind::rotated, n);
  }
  add_blocks(to, Kind::skipped, blocks);
  add_blocks(to, Kind::taken_twice, blocks);
  if (point == Point::blocks_forward || point == Point::blocks_backward) {
    for (const int n : {16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256}) {
      to.add(Kind::block_size, n);
    }
  }
}

void add_product_kinds(Candidates& to, Point point, bool softcap) {
  to.narrower();
  const bool score = point == Point::score || point == Point::score_backward;
  const bool chain = point == Point::pv || point == Point::dk || point == Point::dv;
  if (score && !softcap) to.add(Kind::scaled_first);
  if (chain) to.add(Kind::added_apart);
  if (point == Point::pv) to.add(Kind::added_apart_fused);
  if (point == Point::dq_part) to.add(Kind::scaled_first);
  to.add(Kind::halves).add(Kind::k_descending);
}

void add_operation_kinds(Candidates& to, Point point) {
  to.narrower();
  to.directed();
  switch (point) {
    case Point::exponent:
    case Point::exponent_backward:
    case Point::softcap_backward:
      to.add(Kind::unfused);
      break;
    case Point::lane_sum:
      to.add(Kind::unfused).add(Kind::other_order);
      break;
    case Point::lse:
      to.add(Kind::unfused).add(Kind::other_fused).add(Kind::scaled_first);
      break;
    case Point::dpsum_sum:
      to.add(Kind::unfused).add(Kind::other_fused).add(Kind::other_order);
      break;
    case Point::ds:
      to.add(Kind::fused).add(Kind::unfused).add(Kind::scaled_first);
      break;
    case Point::dq_accum:
    case Point::dkv_accum:
      to.add(Kind::flushed);
      break;
    case Point::scaled_dq:
    case Point::scaled_dk:
      to.add(Kind::cast_before_scaled).add(Kind::dropped);
      break;
    case Point::rescaled_o:
      to.add(Kind::dropped);
      break;
    default:
      break;
  }
}

void add_function_kinds(Candidates& to, Point point) {
  to.narrower();
  to.add(Kind::correctly_rounded);
  if (point == Point::inverse) to.add(Kind::by_division);
  if (point == Point::alpha) to.add(Kind::fused);
  if (point == Point::inverse || point == Point::log_total) return;
  for (int degree = 2; degree <= 6; ++degree) {
    for (int form = 0; form < kPolynomialForms; ++form) {
      const bool published = static_cast<PolynomialForm>(form) == PolynomialForm::published_floor;
      if (!published || degree == 3) to.add(Kind::polynomial, 10 * form + degree);
    }
  }
}

void add_mask_kinds(Candidates& to, const DeviationScope& scope) {
  if (scope.masked) {
    to.add(Kind::shifted, -1).add(Kind::shifted, 1).add(Kind::ignored);
    if (scope.with_lengths_apart) to.add(Kind::top_left);
  }
  if (scope.local) {
    for (const int n : {-1, 1}) to.add(Kind::left_shifted, n).add(Kind::right_shifted, n);
  }
  to.add(Kind::length_ignored);
}

}  // namespace

const PointInfo& info(Point point) {
  return kPoints[static_cast<std::size_t>(point)];
}

std::optional<Site> site_of(Point point) {
  for (const SiteInfo& site : kSites) {
    if (site.name == info(point).site) return site.site;
  }
  return std::nullopt;
}

std::string text(const Deviation& deviation) {
  const PointInfo& point = info(deviation.point);
  return std::string(point.site) + ": " + std::string(point.what) + " " + kind_text(deviation);
}

std::vector<Deviation> deviations_at(Point point, const DeviationScope& scope) {
  using enum Format;
  Candidates to(point);
  if ((point == Point::softcap || point == Point::softcap_backward) && !scope.softcap) return {};
  if (point == Point::dkv_accum && !scope.grouped) return {};
  switch (info(point).point_class) {
    case PointClass::value:
      to.narrower();
      if (point == Point::row_max)
        to.add(Kind::kept_below, 8).add(Kind::kept_below, 4).add(Kind::kept_below, 1);
      break;
    case PointClass::operation:
      add_operation_kinds(to, point);
      break;
    case PointClass::cast:
      to.add(Kind::truncated).add(Kind::ties_away).add(Kind::away_from_zero);
      to.add(Kind::upward).add(Kind::downward);
      to.formats(Kind::twice, {fp16, tf32, e4m3, e5m2});
      for (int n = 23; n > 8; --n) to.add(Kind::twice, kBits + n);
      to.formats(Kind::narrowed, {fp16, e4m3, e5m2}).bits(Kind::narrowed, 2, 7);
      if (point == Point::ds_word) to.add(Kind::scaled_after_cast);
      break;
    case PointClass::function:
      add_function_kinds(to, point);
      break;
    case PointClass::constant:
      for (const int n : {-1, 1, -2, 2, -3, 3, -4, 4}) to.add(Kind::ulps, n);
      to.formats(Kind::narrowed, {bf16, fp16, tf32});
      to.formats(Kind::narrowed_truncated, {bf16, fp16, tf32});
      if (point == Point::c || point == Point::c_forward || point == Point::c_backward) {
        to.add(Kind::from_float);
      }
      break;
    case PointClass::operand:
      to.formats(Kind::narrowed, {e4m3, e5m2, fp16}).bits(Kind::narrowed, 2, 7);
      to.formats(Kind::narrowed_truncated, {e4m3, e5m2});
      if ((point == Point::q_forward || point == Point::q_in_s) && !scope.softcap) to.add(Kind::scaled_first);
      break;
    case PointClass::product:
      add_product_kinds(to, point, scope.softcap);
      break;
    case PointClass::mask:
      add_mask_kinds(to, scope);
      break;
    case PointClass::key_blocks:
      add_block_kinds(to, point, scope);
      break;
    case PointClass::head_map:
      if (scope.several_heads && (scope.grouped || point != Point::head_map_gradients)) {
        if (scope.grouped) to.add(Kind::modulo);
        to.add(Kind::first_head).add(Kind::next_head);
      }
      break;
    case PointClass::compiler:
      to.add(Kind::no_fma).add(Kind::no_flush).add(Kind::precise_division).add(Kind::no_fast_math);
      break;
  }
  return to.take();
}

const Deviation* find(const std::vector<Deviation>& deviations, Point point) {
  const auto found = std::find_if(deviations.begin(), deviations.end(),
                                  [&](const Deviation& d) { return d.point == point; });
  return found == deviations.end() ? nullptr : &*found;
}

const Deviation* find(const std::vector<Deviation>& deviations, Point point, Point whole) {
  const Deviation* found = find(deviations, point);
  return found != nullptr ? found : find(deviations, whole);
}

int times_taken(int index, int count, const Deviation* deviation) {
  if (deviation == nullptr) return 1;
  const int at = deviation->parameter >= 0 ? deviation->parameter : count + deviation->parameter;
  if (at != index) return 1;
  if (deviation->kind == Kind::skipped) return 0;
  return deviation->kind == Kind::taken_twice ? 2 : 1;
}

std::vector<int> visited_blocks(int first, int last, bool descending, const Deviation* deviation) {
  std::vector<int> order;
  const int count = std::max(0, last - first);
  if (deviation != nullptr && deviation->kind == Kind::reversed) descending = !descending;
  for (int i = 0; i < count; ++i) order.push_back(descending ? last - 1 - i : first + i);
  if (deviation == nullptr || count == 0) return order;
  if (deviation->kind == Kind::rotated) {
    std::rotate(order.begin(), order.begin() + deviation->parameter % count, order.end());
  }
  if (deviation->kind == Kind::even_odd) {
    std::stable_partition(order.begin(), order.end(), [](int n) { return n % 2 == 0; });
  }
  std::vector<int> taken;
  for (const int n : order) {
    for (int t = times_taken(n - first, count, deviation); t > 0; --t) taken.push_back(n);
  }
  return taken;
}

int kv_head_of(int head, int heads_q, int heads_kv, const Deviation* deviation) {
  const int own = head / (heads_q / heads_kv);
  if (deviation == nullptr) return own;
  switch (deviation->kind) {
    case Kind::modulo:
      return head % heads_kv;
    case Kind::first_head:
      return 0;
    case Kind::next_head:
      return (own + 1) % heads_kv;
    default:
      return own;
  }
}

bool is_structural(const Deviation& deviation) {
  switch (info(deviation.point).point_class) {
    case PointClass::mask:
    case PointClass::key_blocks:
    case PointClass::head_map:
      return true;
    default:
      return false;
  }
}

}  // namespace bitattn::profile
