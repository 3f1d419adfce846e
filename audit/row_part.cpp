#include "audit/row_part.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

namespace bitattn::audit {

namespace {

constexpr std::size_t kBlock = 64;

/// The limit to the right of the diagonal that the mask has; -1: none.
int right_limit(const Problem& problem) {
  return problem.causal ? 0 : problem.window_right;
}

/// Lengths and window of a part.
struct Cut {
  std::size_t keys = 0;
  int window_left = -1;
};

Cut cut(const Problem& problem, const RowPart& part) {
  const SequenceSpan span = problem.sequence(part.sequence);
  Cut c{span.k_length, problem.window_left};
  const std::size_t end = part.first_row + part.rows;
  if (part.rows == span.q_length) return c;
  if (right_limit(problem) == 0) {
    // The last row's diagonal is the last key, as in a sequence that ends there.
    const std::size_t diagonal = end + span.k_length;
    c.keys = diagonal > span.q_length ? diagonal - span.q_length : 0;
  } else if (c.window_left >= 0) {
    c.window_left += static_cast<int>(span.q_length - end);
  }
  return c;
}

/// Does the kernel take the tiles that it takes for the whole? It drops the causal mask for a single query,
/// a limit to the right that a short sequence never meets, and a window that reaches back to the first key.
bool has_the_tiles_of_the_whole(const Problem& problem, const RowPart& part) {
  const SequenceSpan span = problem.sequence(part.sequence);
  if (part.rows == span.q_length) return true;
  if (part.rows < 2) return false;
  if (problem.window_left < 0 || problem.window_left >= static_cast<int>(problem.seqlen_k) - 1) return true;
  const Cut c = cut(problem, part);
  return c.window_left < static_cast<int>(c.keys) - 1;
}

/// Rows [first, last] of all heads of a KV head, and as many more as it takes to have the tiles of the whole;
/// those do not count.
RowPart make_part(const Problem& problem, std::size_t sequence, std::size_t kv_head, std::size_t first,
                  std::size_t last) {
  const SequenceSpan span = problem.sequence(sequence);
  RowPart part{sequence, kv_head, first, last - first + 1, {}};
  while (!has_the_tiles_of_the_whole(problem, part)) {
    if (part.first_row + part.rows < span.q_length) {
      ++part.rows;
    } else {
      --part.first_row;
      ++part.rows;
    }
  }
  if (part.rows == last - first + 1) return part;
  part.counted.assign(problem.group() * part.rows, 0);
  for (std::size_t g = 0; g < problem.group(); ++g) {
    for (std::size_t i = first; i <= last; ++i) part.counted[g * part.rows + i - part.first_row] = 1;
  }
  return part;
}

RowPart whole_part(const Problem& problem, std::size_t sequence, std::size_t kv_head) {
  return {sequence, kv_head, 0, problem.sequence(sequence).q_length, {}};
}

/// Vectors of tokens [token, token + tokens) and heads [head, head + heads).
Bf16Tensor copy(const Bf16Tensor& from, std::size_t token, std::size_t tokens, std::size_t all_heads,
                std::size_t head, std::size_t heads, std::size_t dim, std::vector<std::size_t> shape) {
  Bf16Tensor to;
  to.shape = std::move(shape);
  to.data.reserve(tokens * heads * dim);
  for (std::size_t t = token; t < token + tokens; ++t) {
    const auto begin = from.data.begin() + static_cast<std::ptrdiff_t>((t * all_heads + head) * dim);
    to.data.insert(to.data.end(), begin, begin + static_cast<std::ptrdiff_t>(heads * dim));
  }
  return to;
}

double squared(double x) {
  return std::isfinite(x) ? x * x : 0.0;
}

}  // namespace

bool can_cut_rows(const Problem& problem) {
  const int right = right_limit(problem);
  return right == 0 || right == -1;
}

Problem part_problem(const Problem& problem, const RowPart& part) {
  const SequenceSpan span = problem.sequence(part.sequence);
  const std::size_t group = problem.group();
  const Cut c = cut(problem, part);
  Problem p;
  p.layout = problem.layout;
  p.batch = 1;
  p.seqlen_q = part.rows;
  p.seqlen_k = c.keys;
  p.heads_q = group;
  p.heads_kv = 1;
  p.head_dim = problem.head_dim;
  p.head_dim_v = problem.head_dim_v;
  p.softmax_scale = problem.softmax_scale;
  p.softcap = problem.softcap;
  p.causal = problem.causal;
  p.window_left = c.window_left;
  p.window_right = problem.window_right;
  p.deterministic = problem.deterministic;
  p.causal_alignment = part.rows == span.q_length ? problem.causal_alignment : CausalAlignment::bottom_right;
  if (p.layout == Layout::thd) {
    p.cu_seqlens_q = {0, static_cast<std::int32_t>(part.rows)};
    p.cu_seqlens_k = {0, static_cast<std::int32_t>(c.keys)};
  }
  const auto shape = [&](std::size_t tokens, std::size_t heads, std::size_t dim) {
    std::vector<std::size_t> s{tokens, heads, dim};
    if (p.layout == Layout::bshd) s.insert(s.begin(), 1);
    return s;
  };
  const std::size_t q_token = span.q_begin + part.first_row;
  const std::size_t q_head = part.kv_head * group;
  p.q = copy(problem.q, q_token, part.rows, problem.heads_q, q_head, group, p.head_dim,
             shape(part.rows, group, p.head_dim));
  p.k = copy(problem.k, span.k_begin, c.keys, problem.heads_kv, part.kv_head, 1, p.head_dim,
             shape(c.keys, 1, p.head_dim));
  p.v = copy(problem.v, span.k_begin, c.keys, problem.heads_kv, part.kv_head, 1, p.head_dim_v,
             shape(c.keys, 1, p.head_dim_v));
  if (problem.dout.empty()) return p;
  p.dout = copy(problem.dout, q_token, part.rows, problem.heads_q, q_head, group, p.head_dim_v,
                shape(part.rows, group, p.head_dim_v));
  for (std::size_t i = 0; i < part.rows; ++i) {
    for (std::size_t g = 0; g < group; ++g) {
      if (part.counts(g, i)) continue;
      const auto at = p.dout.data.begin() + static_cast<std::ptrdiff_t>((i * group + g) * p.head_dim_v);
      std::fill(at, at + static_cast<std::ptrdiff_t>(p.head_dim_v), std::uint16_t{0});
    }
  }
  return p;
}

double visible_pairs(const Problem& problem, const RowPart& part) {
  const SequenceSpan span = problem.sequence(part.sequence);
  double pairs = 0;
  for (std::size_t i = part.first_row; i < part.first_row + part.rows; ++i) {
    const KeyRange range =
        visible_keys(problem, static_cast<std::int64_t>(i), static_cast<std::int64_t>(span.q_length),
                     static_cast<std::int64_t>(span.k_length));
    pairs += static_cast<double>(std::max<std::int64_t>(0, range.last - range.first));
  }
  return pairs * static_cast<double>(problem.group());
}

std::vector<RowPart> whole_parts(const Problem& problem) {
  std::vector<RowPart> parts;
  for (std::size_t b = 0; b < problem.batch; ++b) {
    for (std::size_t h = 0; h < problem.heads_kv; ++h) parts.push_back(whole_part(problem, b, h));
  }
  return parts;
}

std::vector<RowPart> worst_parts(const Problem& problem, const Fp64Tensor& badness, const Fp64Tensor& size,
                                 double most_pairs) {
  struct Candidate {
    RowPart part;
    double badness2 = 0, size2 = 0, pairs = 0;
    double rank() const { return badness2 == 0 ? 0 : size2 == 0 ? -1 : badness2 / size2; }
  };
  const auto measure = [&](RowPart part) {
    Candidate c{std::move(part)};
    for (std::size_t g = 0; g < problem.group(); ++g) {
      for (std::size_t i = 0; i < c.part.rows; ++i) {
        if (!c.part.counts(g, i)) continue;
        const std::size_t row =
            problem.row_index(c.part.sequence, c.part.kv_head * problem.group() + g, c.part.first_row + i);
        if (!std::isfinite(badness.data[row]) || !std::isfinite(size.data[row])) continue;
        c.badness2 += squared(badness.data[row]);
        c.size2 += squared(size.data[row]);
      }
    }
    c.pairs = visible_pairs(problem, c.part);
    return c;
  };
  std::vector<Candidate> heads;
  for (RowPart& part : whole_parts(problem)) {
    Candidate c = measure(std::move(part));
    if (c.pairs > 0) heads.push_back(std::move(c));
  }
  std::stable_sort(heads.begin(), heads.end(),
                   [](const Candidate& a, const Candidate& b) { return a.rank() > b.rank(); });
  std::vector<RowPart> parts;
  double pairs = 0;
  for (const Candidate& head : heads) {
    if (pairs + head.pairs > most_pairs) break;
    parts.push_back(head.part);
    pairs += head.pairs;
  }
  if (!parts.empty() || heads.empty()) return parts;
  const RowPart& worst = heads.front().part;
  if (!can_cut_rows(problem)) return {worst};
  std::vector<Candidate> blocks;
  for (std::size_t first = 0; first < worst.rows; first += kBlock) {
    const std::size_t last = std::min(worst.rows, first + kBlock) - 1;
    Candidate c = measure(make_part(problem, worst.sequence, worst.kv_head, first, last));
    if (c.pairs > 0) blocks.push_back(std::move(c));
  }
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const Candidate& a, const Candidate& b) { return a.badness2 > b.badness2; });
  for (const Candidate& block : blocks) {
    if (!parts.empty() && pairs + block.pairs > most_pairs) break;
    parts.push_back(block.part);
    pairs += block.pairs;
  }
  return parts;
}

std::vector<RowPart> parts_of_rows(const Problem& problem, const std::vector<RowId>& rows,
                                   double most_pairs) {
  const std::size_t group = problem.group();
  const bool cuts = can_cut_rows(problem);
  // By sequence, KV head and block of rows; in the order in which the rows were given.
  std::map<std::array<std::size_t, 3>, std::vector<RowId>> blocks;
  std::vector<std::array<std::size_t, 3>> order;
  for (const RowId& row : rows) {
    const std::array<std::size_t, 3> key{row.sequence, row.head / group, cuts ? row.row / kBlock : 0};
    if (blocks[key].empty()) order.push_back(key);
    blocks[key].push_back(row);
  }
  std::vector<RowPart> parts;
  double pairs = 0;
  for (const auto& key : order) {
    const std::vector<RowId>& wanted = blocks[key];
    const auto [low, high] = std::minmax_element(
        wanted.begin(), wanted.end(), [](const RowId& a, const RowId& b) { return a.row < b.row; });
    RowPart part =
        cuts ? make_part(problem, key[0], key[1], low->row, high->row) : whole_part(problem, key[0], key[1]);
    part.counted.assign(group * part.rows, 0);
    for (const RowId& row : wanted) part.counted[row.head % group * part.rows + row.row - part.first_row] = 1;
    const double more = visible_pairs(problem, part);
    if (!parts.empty() && pairs + more > most_pairs) break;
    parts.push_back(std::move(part));
    pairs += more;
  }
  return parts;
}

}  // namespace bitattn::audit
