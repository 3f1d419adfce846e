#include "audit/compare.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <span>

#include "audit/order_free.hpp"
#include "datasets/shape_text.hpp"
#include "emu/arith/bf16.hpp"
#include "emu/arith/bits.hpp"
#include "emu/arith/fp32_ftz.hpp"

namespace bitattn::audit {

namespace {

constexpr std::uint32_t kNotWritten = 0xffffffffU;

/// Sign and magnitude to an integer that is ordered as the numbers are; both zeros are 0.
template <class Word>
std::int64_t ordered(Word bits) {
  constexpr Word kSign = static_cast<Word>(Word{1} << (sizeof(Word) * 8 - 1));
  const auto magnitude = static_cast<std::int64_t>(bits & static_cast<Word>(~kSign));
  return (bits & kSign) != 0 ? -magnitude : magnitude;
}

std::uint64_t distance(std::int64_t a, std::int64_t b) {
  return static_cast<std::uint64_t>(a > b ? a - b : b - a);
}

std::uint32_t bits_at(const Bf16Tensor& tensor, std::size_t i) {
  return tensor.data[i];
}
std::uint32_t bits_at(const Fp32Tensor& tensor, std::size_t i) {
  return arith::to_bits(tensor.data[i]);
}

double value_of(std::uint32_t bits, bool bf16) {
  return static_cast<double>(bf16 ? arith::fp32_from_bf16(static_cast<std::uint16_t>(bits))
                                  : arith::from_bits(bits));
}

bool is_emulated(const Result& result) {
  return result.backend != "recorded";
}

/// What checks whether an element of one side is the result of some order of the other side's parts.
struct OpenOrder {
  const OrderFreeParts* parts = nullptr;
  float scale = 1;           ///< multiplied to the sum before the last cast
  bool accumulator = false;  ///< the tensor is the sum itself
};

struct Operands {
  std::string name;
  Axes axes;
  bool forward;
  bool intermediate;
};

class TensorComparer {
 public:
  TensorComparer(const Problem& problem, const Result& a, const Result& b)
      : problem_(problem), a_(a), b_(b), tiles_(tile_sizes(problem)) {}

  template <class TensorType>
  void compare(const Operands& what, const TensorType& a, const TensorType& b,
               std::vector<OpenOrder> open = {}) {
    if (a.empty() && b.empty()) return;
    TensorComparison c;
    c.tensor = what.name;
    c.bf16 = std::is_same_v<TensorType, Bf16Tensor>;
    c.intermediate = what.intermediate;
    if (a.empty() || b.empty()) {
      c.verdict = a.empty() ? TensorVerdict::only_in_b : TensorVerdict::only_in_a;
      c.elements = a.empty() ? b.size() : a.size();
    } else if (a.shape != b.shape) {
      c.verdict = TensorVerdict::differs;
      c.elements = c.differing_bits = std::max(a.size(), b.size());
      c.remark = "shape " + shape_text(a.shape) + " against " + shape_text(b.shape);
    } else {
      compare_elements(what, a, b, open, c);
    }
    results.push_back(std::move(c));
  }

  std::vector<TensorComparison> results;

 private:
  template <class TensorType>
  void compare_elements(const Operands& what, const TensorType& a, const TensorType& b,
                        const std::vector<OpenOrder>& open, TensorComparison& c) const {
    const bool any_emulated = is_emulated(a_) || is_emulated(b_);
    double difference2 = 0;
    double truth2 = 0;
    std::size_t finite_pairs = 0;
    std::optional<std::pair<std::size_t, std::uint64_t>> worst;
    c.elements = a.size();
    for (std::size_t i = 0; i < a.size(); ++i) {
      const std::uint32_t x = bits_at(a, i);
      const std::uint32_t y = bits_at(b, i);
      if (what.intermediate && not_written(x, y, any_emulated)) {
        ++c.not_written;
        continue;
      }
      const double vx = value_of(x, c.bf16);
      const double vy = value_of(y, c.bf16);
      if (std::isfinite(vx) && std::isfinite(vy)) {
        difference2 += (vx - vy) * (vx - vy);
        truth2 += vy * vy;
        ++finite_pairs;
      }
      if (x == y) {
        ++c.equal_bits;
        continue;
      }
      if (!open.empty()) {
        const OrderCheck check = check_open_order(what, a, open, i, x, y);
        if (check == OrderCheck::one_order) {
          ++c.equal_in_one_order;
          continue;
        }
        if (check == OrderCheck::too_many_parts) {
          ++c.order_not_compared;
          continue;
        }
      }
      ++c.differing_bits;
      const std::uint64_t ulps = ulps_of(x, y, c.bf16);
      if (ulps == kUlpsOfNan) {
        ++c.nan_differences;
      } else {
        c.largest_ulps = std::max(c.largest_ulps, ulps);
      }
      if (!c.first) c.first = pair_at(what, a, i, x, y, c.bf16, ulps);
      if (!worst || ulps > worst->second) worst = {i, ulps};
    }
    if (worst) {
      const std::size_t i = worst->first;
      c.worst = pair_at(what, a, i, bits_at(a, i), bits_at(b, i), c.bf16, worst->second);
    }
    c.relative_error = finite_pairs == 0  ? std::numeric_limits<double>::quiet_NaN()
                       : difference2 == 0 ? 0
                                          : std::sqrt(difference2 / truth2);
    c.verdict = c.differing_bits > 0       ? TensorVerdict::differs
                : c.order_not_compared > 0 ? TensorVerdict::order_not_compared
                                           : TensorVerdict::equal;
    if (c.order_not_compared > 0) c.remark = "order not fixed, not compared";
    if (c.order_not_compared == 0 && c.equal_in_one_order > 0)
      c.remark = "order not fixed, equal to one order";
  }

  bool not_written(std::uint32_t x, std::uint32_t y, bool any_emulated) const {
    if (!any_emulated) return x == kNotWritten && y == kNotWritten;
    return (is_emulated(a_) && x == kNotWritten) || (is_emulated(b_) && y == kNotWritten);
  }

  template <class TensorType>
  OrderCheck check_open_order(const Operands& what, const TensorType& tensor,
                              const std::vector<OpenOrder>& open, std::size_t i, std::uint32_t x,
                              std::uint32_t y) const {
    const Place place = place_of(problem_, tensor.shape, what.axes, what.forward, tiles_, i);
    OrderCheck best = OrderCheck::no_order;
    for (const OpenOrder& order : open) {
      const OrderFreeParts* parts = order.parts;
      // The result leaves the order open and brought no parts along: nothing to try.
      if (parts == nullptr || parts->parts == 0 || parts->values.empty()) {
        best = OrderCheck::too_many_parts;
        continue;
      }
      const std::vector<std::size_t> shape(parts->values.shape.begin() + 1, parts->values.shape.end());
      const std::size_t stride = parts->values.size() / parts->parts;
      const std::size_t element =
          order.accumulator ? i
                            : index_of(problem_, shape,
                                       place.of_keys ? Axes::padded_key_columns : Axes::padded_query_columns,
                                       tiles_, place.sequence, place.head, place.row, place.column);
      std::vector<float> values(parts->parts);
      for (std::size_t p = 0; p < parts->parts; ++p) values[p] = parts->values.data[p * stride + element];
      // The parts belong to one side, so its own value is one of the sums; the other side's has to be one
      // too.
      bool x_is_one = false;
      bool y_is_one = false;
      const OrderCheck check = check_orders(values, parts->flushed_adds, [&](float sum) {
        const std::uint32_t bits = order.accumulator
                                       ? arith::to_bits(sum)
                                       : arith::bf16_from_fp32(arith::ftz::mul(sum, order.scale));
        x_is_one = x_is_one || bits == x;
        y_is_one = y_is_one || bits == y;
        return x_is_one && y_is_one;
      });
      if (check == OrderCheck::one_order) return check;
      if (check == OrderCheck::too_many_parts) best = check;
    }
    return best;
  }

  template <class TensorType>
  ElementPair pair_at(const Operands& what, const TensorType& tensor, std::size_t i, std::uint32_t x,
                      std::uint32_t y, bool bf16, std::uint64_t ulps) const {
    ElementPair pair;
    pair.place = place_of(problem_, tensor.shape, what.axes, what.forward, tiles_, i);
    pair.a = value_of(x, bf16);
    pair.b = value_of(y, bf16);
    pair.a_bits = x;
    pair.b_bits = y;
    pair.ulps = ulps;
    return pair;
  }

  static std::uint64_t ulps_of(std::uint32_t x, std::uint32_t y, bool bf16) {
    if (std::isnan(value_of(x, bf16)) || std::isnan(value_of(y, bf16))) return kUlpsOfNan;
    return bf16 ? ulps_between_bf16(static_cast<std::uint16_t>(x), static_cast<std::uint16_t>(y))
                : ulps_between_fp32(x, y);
  }

  const Problem& problem_;
  const Result& a_;
  const Result& b_;
  TileSizes tiles_;
};

/// How many keys after its own a query sees at most; -1: all.
int right_limit(const Problem& problem) {
  return problem.causal ? 0 : problem.window_right;
}

/// Does it matter for the mask how queries and keys are aligned?
bool is_aligned(const Problem& problem) {
  if (right_limit(problem) < 0 && problem.window_left < 0) return false;
  for (std::size_t b = 0; b < problem.batch; ++b) {
    if (problem.sequence(b).q_length != problem.sequence(b).k_length) return true;
  }
  return false;
}

}  // namespace

std::uint64_t ulps_between_fp32(std::uint32_t a, std::uint32_t b) {
  return distance(ordered(a), ordered(b));
}
std::uint64_t ulps_between_bf16(std::uint16_t a, std::uint16_t b) {
  return distance(ordered(a), ordered(b));
}

Comparison compare_results(const std::string& capture, const Problem& problem, const Result& a,
                           const Result& b) {
  Comparison comparison;
  comparison.capture = capture;
  comparison.a = a.backend;
  comparison.b = b.backend;
  TensorComparer comparer(problem, a, b);

  const auto scale = static_cast<float>(problem.softmax_scale);
  const auto open_orders = [&](bool Result::*fixed, OrderFreeParts Result::*parts, float factor,
                               bool accumulator) {
    std::vector<OpenOrder> open;
    for (const Result* side : {&a, &b}) {
      if (is_emulated(*side) && !(side->*fixed)) open.push_back({&(side->*parts), factor, accumulator});
    }
    return open;
  };

  comparer.compare({"out", Axes::query_columns, true, false}, a.out, b.out);
  comparer.compare({"lse", Axes::query_rows, true, false}, a.lse, b.lse);
  comparer.compare({"dq", Axes::query_columns, false, false}, a.dq, b.dq,
                   open_orders(&Result::dq_order_fixed, &Result::dq_parts, scale, false));
  comparer.compare({"dk", Axes::key_columns, false, false}, a.dk, b.dk,
                   open_orders(&Result::dkv_order_fixed, &Result::dk_parts, 1.0F, false));
  comparer.compare({"dv", Axes::key_columns, false, false}, a.dv, b.dv,
                   open_orders(&Result::dkv_order_fixed, &Result::dv_parts, 1.0F, false));
  const Intermediates& x = a.intermediates;
  const Intermediates& y = b.intermediates;
  comparer.compare({"dpsum", Axes::padded_query_rows, false, true}, x.dpsum, y.dpsum);
  comparer.compare({"lse_log2", Axes::padded_query_rows, false, true}, x.lse_log2, y.lse_log2);
  comparer.compare({"dq_accum", Axes::padded_query_columns, false, true}, x.dq_accum, y.dq_accum,
                   open_orders(&Result::dq_order_fixed, &Result::dq_parts, 1.0F, true));
  comparer.compare({"dk_accum", Axes::padded_key_columns, false, true}, x.dk_accum, y.dk_accum,
                   open_orders(&Result::dkv_order_fixed, &Result::dk_parts, 1.0F, true));
  comparer.compare({"dv_accum", Axes::padded_key_columns, false, true}, x.dv_accum, y.dv_accum,
                   open_orders(&Result::dkv_order_fixed, &Result::dv_parts, 1.0F, true));
  comparison.tensors = std::move(comparer.results);
  return comparison;
}

std::size_t Comparison::compared_tensors() const {
  return static_cast<std::size_t>(
      std::count_if(tensors.begin(), tensors.end(), [](const TensorComparison& t) {
        return t.verdict != TensorVerdict::only_in_a && t.verdict != TensorVerdict::only_in_b;
      }));
}

bool Comparison::equal() const {
  return compared_tensors() > 0 && differing() == 0;
}

std::size_t Comparison::elements() const {
  std::size_t n = 0;
  for (const TensorComparison& t : tensors) {
    if (t.verdict == TensorVerdict::only_in_a || t.verdict == TensorVerdict::only_in_b) continue;
    n += t.elements - t.not_written - t.order_not_compared;
  }
  return n;
}

std::size_t Comparison::differing() const {
  std::size_t n = 0;
  for (const TensorComparison& t : tensors) {
    // A tensor without elements whose shapes differ still differs.
    if (t.verdict == TensorVerdict::differs) n += std::max<std::size_t>(1, t.differing_bits);
  }
  return n;
}

std::vector<TensorComparison> compare_inputs(const Problem& a, const Problem& b) {
  Result none;
  none.backend = "recorded";
  TensorComparer comparer(a, none, none);
  comparer.compare({"q", Axes::query_columns, true, false}, a.q, b.q);
  comparer.compare({"k", Axes::key_columns, true, false}, a.k, b.k);
  comparer.compare({"v", Axes::key_columns, true, false}, a.v, b.v);
  comparer.compare({"dout", Axes::query_columns, false, false}, a.dout, b.dout);
  return std::move(comparer.results);
}

std::string problem_difference(const Problem& a, const Problem& b) {
  const auto number = [](const char* name, double x, double y) {
    return std::string(name) + " is " + shortest_text(x) + " against " + shortest_text(y);
  };
  if (a.layout != b.layout) return "the layouts differ";
  if (a.softmax_scale != b.softmax_scale) return number("softmax_scale", a.softmax_scale, b.softmax_scale);
  if (a.softcap != b.softcap) return number("softcap", a.softcap, b.softcap);
  if (a.window_left != b.window_left) return number("window_left", a.window_left, b.window_left);
  // One mask may be said in two ways: causal is a window_right of 0, and an alignment matters only where
  // lengths differ.
  if (right_limit(a) != right_limit(b)) {
    if (a.causal != b.causal) return "one is causal, the other is not";
    return number("window_right", a.window_right, b.window_right);
  }
  if (a.causal_alignment != b.causal_alignment && is_aligned(a)) return "causal_alignment differs";
  if (a.cu_seqlens_q != b.cu_seqlens_q) return "cu_seqlens_q differs";
  if (a.cu_seqlens_k != b.cu_seqlens_k) return "cu_seqlens_k differs";
  struct Input {
    const char* name;
    const Bf16Tensor* x;
    const Bf16Tensor* y;
  };
  for (const Input& input : {Input{"q", &a.q, &b.q}, Input{"k", &a.k, &b.k}, Input{"v", &a.v, &b.v},
                             Input{"dout", &a.dout, &b.dout}}) {
    const bool only_one = input.x->empty() || input.y->empty();
    if (!only_one && input.x->shape != input.y->shape) {
      return std::string(input.name) + " has shape " + shape_text(input.x->shape) + " against " +
             shape_text(input.y->shape);
    }
  }
  return "";
}

}  // namespace bitattn::audit
