#include "datasets/problem.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "datasets/error.hpp"
#include "datasets/problem_check.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn {

SequenceSpan Problem::sequence(std::size_t b) const {
  if (layout == Layout::bshd) return {b * seqlen_q, seqlen_q, b * seqlen_k, seqlen_k};
  const auto q_begin = static_cast<std::size_t>(cu_seqlens_q.at(b));
  const auto k_begin = static_cast<std::size_t>(cu_seqlens_k.at(b));
  return {q_begin, static_cast<std::size_t>(cu_seqlens_q.at(b + 1)) - q_begin, k_begin,
          static_cast<std::size_t>(cu_seqlens_k.at(b + 1)) - k_begin};
}

std::vector<std::size_t> Problem::q_shape() const {
  if (layout == Layout::thd) return {total_q(), heads_q, head_dim};
  return {batch, seqlen_q, heads_q, head_dim};
}

std::vector<std::size_t> Problem::k_shape() const {
  if (layout == Layout::thd) return {total_k(), heads_kv, head_dim};
  return {batch, seqlen_k, heads_kv, head_dim};
}

std::vector<std::size_t> Problem::v_shape() const {
  std::vector<std::size_t> shape = k_shape();
  shape.back() = head_dim_v;
  return shape;
}

std::vector<std::size_t> Problem::out_shape() const {
  std::vector<std::size_t> shape = q_shape();
  shape.back() = head_dim_v;
  return shape;
}

std::vector<std::size_t> Problem::row_shape() const {
  if (layout == Layout::thd) return {heads_q, total_q()};
  return {batch, heads_q, seqlen_q};
}

std::size_t Problem::row_index(std::size_t b, std::size_t h, std::size_t i) const {
  if (layout == Layout::thd) return h * total_q() + sequence(b).q_begin + i;
  return (b * heads_q + h) * seqlen_q + i;
}

std::string Problem::text(const std::string& name, const std::string& fallback) const {
  const auto found = attributes.find(name);
  if (found == attributes.end()) return fallback;
  if (const auto* s = std::get_if<std::string>(&found->second)) return *s;
  if (const auto* n = std::get_if<std::int64_t>(&found->second)) return std::to_string(*n);
  return shortest_text(std::get<double>(found->second));
}

std::int64_t Problem::integer(const std::string& name, std::int64_t fallback) const {
  const auto found = attributes.find(name);
  if (found == attributes.end()) return fallback;
  if (const auto* n = std::get_if<std::int64_t>(&found->second)) return *n;
  return fallback;
}

namespace {

/// [tokens, heads, dim] reduced to heads [first, first + count).
Bf16Tensor slice_tensor(const Bf16Tensor& tensor, std::size_t first, std::size_t count) {
  if (tensor.empty()) return {};
  const std::size_t heads = tensor.shape[tensor.shape.size() - 2];
  const std::size_t dim = tensor.shape.back();
  Bf16Tensor slice;
  slice.shape = tensor.shape;
  slice.shape[slice.shape.size() - 2] = count;
  const std::size_t row = heads * dim;
  const std::size_t tokens = row == 0 ? 0 : tensor.data.size() / row;
  slice.data.reserve(tokens * count * dim);
  for (std::size_t t = 0; t < tokens; ++t) {
    const auto from = tensor.data.begin() + static_cast<std::ptrdiff_t>(t * row + first * dim);
    slice.data.insert(slice.data.end(), from, from + static_cast<std::ptrdiff_t>(count * dim));
  }
  return slice;
}

std::vector<std::string> split_at_commas(const std::string& list) {
  std::vector<std::string> items;
  std::size_t begin = 0;
  while (begin <= list.size()) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    items.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return items;
}

/// Some kernels choose how to split keys by how many heads were launched, so a slice says what it was cut
/// from.
void note_launch(const Problem& problem, std::size_t first_q, std::size_t count_q, Attributes& attributes) {
  attributes.try_emplace("launch_batch", static_cast<std::int64_t>(problem.batch));
  attributes.try_emplace("launch_heads_q", static_cast<std::int64_t>(problem.heads_q));
  attributes.try_emplace("launch_heads_kv", static_cast<std::int64_t>(problem.heads_kv));
  // `heads_kept` lists batch * heads + head of the launch, batch by batch, for every stored head.
  std::vector<std::string> kept;
  if (problem.attributes.contains("heads_kept")) {
    kept = split_at_commas(problem.text("heads_kept"));
    if (kept.size() != problem.batch * problem.heads_q) return;  // another convention: leave the text alone
  } else {
    for (std::size_t f = 0; f < problem.batch * problem.heads_q; ++f) kept.push_back(std::to_string(f));
  }
  std::string list;
  for (std::size_t b = 0; b < problem.batch; ++b) {
    for (std::size_t h = first_q; h < first_q + count_q; ++h) {
      if (!list.empty()) list += ',';
      list += kept[b * problem.heads_q + h];
    }
  }
  attributes["heads_kept"] = list;
}

}  // namespace

Problem slice_heads(const Problem& problem, std::size_t first_kv, std::size_t count_kv) {
  if (count_kv == 0 || first_kv >= problem.heads_kv || count_kv > problem.heads_kv - first_kv) {
    throw InputError("heads " + std::to_string(first_kv) + ".." + std::to_string(first_kv + count_kv) +
                     " (end not included) asked for, the problem has KV heads 0.." +
                     std::to_string(problem.heads_kv));
  }
  const std::size_t first_q = first_kv * problem.group();
  const std::size_t count_q = count_kv * problem.group();
  Problem slice = problem;
  slice.heads_q = count_q;
  slice.heads_kv = count_kv;
  slice.q = slice_tensor(problem.q, first_q, count_q);
  slice.dout = slice_tensor(problem.dout, first_q, count_q);
  slice.k = slice_tensor(problem.k, first_kv, count_kv);
  slice.v = slice_tensor(problem.v, first_kv, count_kv);
  if (count_kv == problem.heads_kv) return slice;
  note_launch(problem, first_q, count_q, slice.attributes);
  for (const auto& [name, value] : {std::pair{"heads_q", count_q}, std::pair{"heads_kv", count_kv}}) {
    const auto found = slice.attributes.find(name);
    if (found != slice.attributes.end()) found->second = static_cast<std::int64_t>(value);
  }
  return slice;
}

namespace {

constexpr std::size_t kLargestHeadDim = 256;

[[noreturn]] void fail(const std::string& where, const std::string& what) {
  throw InputError(where + ": " + what);
}

void expect_shape(const std::vector<std::size_t>& found, const std::vector<std::size_t>& expected,
                  const char* name, const std::string& where) {
  if (found != expected) {
    fail(where, "tensor " + std::string(name) + " has shape " + shape_text(found) + ", expected " +
                    shape_text(expected));
  }
  checked_elements(expected, where + ": tensor " + name);
}

std::size_t longest_of(const std::vector<std::int32_t>& cu_seqlens) {
  std::int64_t most = 0;
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i)
    most = std::max(most, std::int64_t{cu_seqlens[i]} - cu_seqlens[i - 1]);
  return static_cast<std::size_t>(most);
}

/// Throws unless `offsets` starts at 0, never falls, and ends at `total`; returns the longest length.
std::size_t check_offsets(const std::vector<std::int32_t>& offsets, std::size_t total, const char* name,
                          const std::string& where) {
  if (offsets.size() < 2) {
    fail(where, std::string(name) + " has " + std::to_string(offsets.size()) +
                    " entries, expected at least 2 (sequences + 1)");
  }
  if (offsets.front() != 0) {
    fail(where, std::string(name) + "[0] is " + std::to_string(offsets.front()) + ", expected 0");
  }
  std::int64_t longest = 0;
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    const std::int64_t length = static_cast<std::int64_t>(offsets[i]) - offsets[i - 1];
    if (length < 0) {
      fail(where, std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(offsets[i]) +
                      ", expected at least the entry before it, " + std::to_string(offsets[i - 1]));
    }
    longest = std::max(longest, length);
  }
  if (static_cast<std::size_t>(offsets.back()) != total) {
    fail(where, std::string(name) + " ends at " + std::to_string(offsets.back()) +
                    ", expected the number of tokens, " + std::to_string(total));
  }
  return static_cast<std::size_t>(longest);
}

void check_window(int value, const char* name, const std::string& where) {
  if (value < -1) {
    fail(where, std::string(name) + " is " + std::to_string(value) + ", expected -1 (no limit) or more");
  }
}

}  // namespace

bool is_problem_attribute(const std::string& name) {
  static const std::set<std::string> kNames{"softmax_scale", "causal",         "window_left",
                                            "window_right",  "softcap",        "deterministic",
                                            "layout",        "schema_version", "causal_alignment"};
  return kNames.contains(name);
}

void set_sizes(Problem& p) {
  const std::size_t axes = p.q.shape.size();
  p.heads_q = p.q.shape[axes - 2];
  p.heads_kv = p.k.shape[axes - 2];
  p.head_dim = p.q.shape[axes - 1];
  p.head_dim_v = p.v.shape[axes - 1];
  if (p.layout == Layout::thd) {
    p.batch = p.cu_seqlens_q.empty() ? 0 : p.cu_seqlens_q.size() - 1;
    p.seqlen_q = longest_of(p.cu_seqlens_q);
    p.seqlen_k = longest_of(p.cu_seqlens_k);
  } else {
    p.batch = p.q.shape[0];
    p.seqlen_q = p.q.shape[1];
    p.seqlen_k = p.k.shape[1];
  }
}

void check_problem_without_data(const Problem& problem, const std::string& where) {
  const std::size_t rank = problem.layout == Layout::bshd ? 4 : 3;
  const char* layout = problem.layout == Layout::bshd ? "BSHD" : "THD";
  for (const auto& [tensor, name] :
       {std::pair{&problem.q, "q"}, std::pair{&problem.k, "k"}, std::pair{&problem.v, "v"}}) {
    if (tensor->shape.size() != rank) {
      fail(where, "tensor " + std::string(name) + " has shape " + shape_text(tensor->shape) + ", expected " +
                      std::to_string(rank) + " axes for layout " + layout);
    }
  }
  if (problem.batch == 0 && problem.layout == Layout::bshd) fail(where, "batch is 0, expected at least 1");
  if (problem.heads_q == 0 || problem.heads_kv == 0 || problem.heads_q % problem.heads_kv != 0) {
    fail(where, "q has " + std::to_string(problem.heads_q) + " heads and k has " +
                    std::to_string(problem.heads_kv) + ", expected a multiple of the KV heads");
  }
  for (const auto& [dim, name] :
       {std::pair{problem.head_dim, "q and k"}, std::pair{problem.head_dim_v, "v"}}) {
    if (dim == 0 || dim > kLargestHeadDim) {
      fail(where, "head size of " + std::string(name) + " is " + std::to_string(dim) + ", expected 1 to " +
                      std::to_string(kLargestHeadDim));
    }
  }
  if (problem.layout == Layout::thd) {
    const std::size_t longest_q =
        check_offsets(problem.cu_seqlens_q, problem.q.shape[0], "cu_seqlens_q", where);
    const std::size_t longest_k =
        check_offsets(problem.cu_seqlens_k, problem.k.shape[0], "cu_seqlens_k", where);
    if (problem.cu_seqlens_q.size() != problem.batch + 1 ||
        problem.cu_seqlens_k.size() != problem.batch + 1) {
      fail(where, "cu_seqlens_q has " + std::to_string(problem.cu_seqlens_q.size()) +
                      " entries and cu_seqlens_k " + std::to_string(problem.cu_seqlens_k.size()) +
                      ", expected " + std::to_string(problem.batch + 1) + " (sequences + 1) in both");
    }
    if (longest_q != problem.seqlen_q || longest_k != problem.seqlen_k) {
      fail(where, "seqlen_q, seqlen_k are " + std::to_string(problem.seqlen_q) + ", " +
                      std::to_string(problem.seqlen_k) + ", expected the longest sequences, " +
                      std::to_string(longest_q) + ", " + std::to_string(longest_k));
    }
  } else if (!problem.cu_seqlens_q.empty() || !problem.cu_seqlens_k.empty()) {
    fail(where, "cu_seqlens found, expected with layout THD only");
  }
  // Token counts beyond 31 bits would not fit the masks' and kernels' own index type.
  constexpr auto kMostTokens = static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max());
  for (const auto& [tokens, name] : {std::pair{problem.total_q(), "q"}, std::pair{problem.total_k(), "k"}}) {
    if (tokens > kMostTokens) {
      fail(where, "tensor " + std::string(name) + " has " + std::to_string(tokens) +
                      " tokens, expected at most " + std::to_string(kMostTokens));
    }
  }
  expect_shape(problem.q.shape, problem.q_shape(), "q", where);
  expect_shape(problem.k.shape, problem.k_shape(), "k", where);
  expect_shape(problem.v.shape, problem.v_shape(), "v", where);
  if (!problem.dout.empty()) expect_shape(problem.dout.shape, problem.out_shape(), "dout", where);
  if (!std::isfinite(problem.softmax_scale) || problem.softmax_scale <= 0) {
    fail(where,
         "softmax_scale is " + shortest_text(problem.softmax_scale) + ", expected a finite number above 0");
  }
  if (!std::isfinite(problem.softcap) || problem.softcap < 0) {
    fail(where,
         "softcap is " + shortest_text(problem.softcap) + ", expected 0 (none) or a finite number above 0");
  }
  check_window(problem.window_left, "window_left", where);
  check_window(problem.window_right, "window_right", where);
}

void check_problem(const Problem& problem, const std::string& where) {
  check_problem_without_data(problem, where);
  for (const auto& [tensor, name] : {std::pair{&problem.q, "q"}, std::pair{&problem.k, "k"},
                                     std::pair{&problem.v, "v"}, std::pair{&problem.dout, "dout"}}) {
    if (tensor->empty()) continue;
    const std::size_t expected = checked_elements(tensor->shape, where + ": tensor " + name);
    if (tensor->data.size() != expected) {
      fail(where, "tensor " + std::string(name) + " holds " + std::to_string(tensor->data.size()) +
                      " values, expected " + std::to_string(expected) + " for shape " +
                      shape_text(tensor->shape));
    }
  }
}

}  // namespace bitattn
