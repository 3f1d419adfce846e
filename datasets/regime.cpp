#include "datasets/regime.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "datasets/capture_reader.hpp"
#include "datasets/deviate.hpp"
#include "datasets/error.hpp"
#include "datasets/philox.hpp"
#include "datasets/problem_check.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn {
namespace {

// --- recipes as data

/// How one element of a tensor is drawn; N is a standard normal deviate, u the direction of the KV head.
struct Draw {
  enum Kind : std::uint8_t { normal, sweep, log_uniform };
  Kind kind = normal;
  double spread = 1, direction = 0, mean = 0;  ///< normal: spread N + direction u + mean
  double low = 0, high = 0;  ///< sweep: 2^(low + (high - low) d/(D-1)) N; log_uniform: ± 2^U(low, high)
};

constexpr Draw normal(double spread, double direction, double mean) {
  return {Draw::normal, spread, direction, mean, 0, 0};
}
constexpr Draw sweep(double low, double high) {
  return {Draw::sweep, 0, 0, 0, low, high};
}
constexpr Draw log_uniform(double low, double high) {
  return {Draw::log_uniform, 0, 0, 0, low, high};
}

/// Which keys of a head are drawn by Recipe::special_key instead.
enum class SpecialKeys : std::uint8_t { none, first, first_and_seven, quarter };

struct Recipe {
  const char* name;
  const char* text;
  Draw q, k, v, dout;
  SpecialKeys special = SpecialKeys::none;
  Draw special_key{};
};

constexpr Draw kStandard = normal(1, 0, 0);
constexpr Draw kTwiceDirection = normal(0, 2, 0);

constexpr std::array<Recipe, 10> kRecipes{{
    {"normal", "q, k, v, dout = N(0,1)", kStandard, kStandard, kStandard, kStandard},
    {"normal3", "q, k = 3 N(0,1); v, dout = N(0,1)", normal(3, 0, 0), normal(3, 0, 0), kStandard, kStandard},
    {"late",
     "late in training: u = one direction per KV head with norm sqrt(D); k = 40 u + N(0,1); q = 2 u + "
     "N(0,1); v = "
     "N(0,1) - 1; dout = 2^-10 N(0,1)",
     normal(1, 2, 0), normal(1, 40, 0), normal(1, 0, -1), normal(0x1p-10, 0, 0)},
    {"ties",
     "tied row maxima: k = exactly 2 u at position 0 and at 7 random positions, else N(0,1); q = u + N(0,1); "
     "v = "
     "N(0,1) - 1.5; dout = N(0,1) + 0.5; u = one direction per KV head with norm sqrt(D)",
     normal(1, 1, 0), kStandard, normal(1, 0, -1.5), normal(1, 0, 0.5), SpecialKeys::first_and_seven,
     kTwiceDirection},
    {"peaky",
     "attention sink: first key = 2 u, other k = N(0,1); q = u/2 + N(0,1); v, dout = N(0,1); u = one "
     "direction per KV "
     "head with norm sqrt(D)",
     normal(1, 0.5, 0), kStandard, kStandard, kStandard, SpecialKeys::first, kTwiceDirection},
    {"wild", "random signs, magnitudes 2^U: q, k U(-20,6); v U(-30,30); dout U(-40,20)", log_uniform(-20, 6),
     log_uniform(-20, 6), log_uniform(-30, 30), log_uniform(-40, 20)},
    {"tiny",
     "magnitudes swept over the columns d, e = d/(D-1), through the subnormals of BF16: q, k = 2^(-8+8e) "
     "N(0,1); v = "
     "2^(-134+20e) N(0,1); dout = N(0,1)",
     sweep(-8, 0), sweep(-8, 0), sweep(-134, -114), kStandard},
    {"tinygrad",
     "magnitudes swept over the columns d, e = d/(D-1): q, k = 2^(-8+8e) N(0,1); v = N(0,1); dout = "
     "2^(-140+24e) "
     "N(0,1), many subnormals and zeros",
     sweep(-8, 0), sweep(-8, 0), kStandard, sweep(-140, -116)},
    {"opposed-sink",
     "a sink key opposed to the mean of the others: first key = 2 u, other k = N(0,1) - u; q = N(0,1)/2 + "
     "u/4; v, dout "
     "= N(0,1); u = one direction per KV head with norm sqrt(D)",
     normal(0.5, 0.25, 0), normal(1, -1, 0), kStandard, kStandard, SpecialKeys::first, kTwiceDirection},
    {"opposed-cluster",
     "diffuse rows whose weight lies on keys opposed to the mean key: a random quarter of the keys = N(0,1) "
     "- u, the "
     "others = N(0,1) + u; q = N(0,1)/2 - u/4; v = N(0,1) - 1; dout = N(0,1); u = one direction per KV head "
     "with norm "
     "sqrt(D)",
     normal(0.5, -0.25, 0), normal(1, 1, 0), normal(1, 0, -1), kStandard, SpecialKeys::quarter,
     normal(1, -1, 0)},
}};

const Recipe& recipe(const std::string& name) {
  std::string known;
  for (const Recipe& r : kRecipes) {
    if (name == r.name) return r;
    known += (known.empty() ? "" : ", ") + std::string(r.name);
  }
  throw InputError("regime " + printable(name, 40) + " is unknown, expected one of " + known);
}

// --- random words by place

/// What a word is for; part of the counter, so never renumber.
enum class Stream : std::uint32_t { q, k, v, dout, direction, special_keys, key_shift };

/// The 64-bit word of (seed, stream, batch element, token, head, d): Philox with key = seed (low word first)
/// and counter = (d / 2, token, batch element, stream * 2^16 + head); words 0 and 1 (low first) for even d, 2
/// and 3 for odd. It does not depend on the lengths, so a longer problem of the same seed begins like a
/// shorter one.
class Words {
 public:
  explicit Words(std::uint64_t seed)
      : key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32U)} {}

  std::uint64_t word(Stream stream, std::size_t b, std::size_t token, std::size_t h, std::size_t d) const {
    const PhiloxCounter words = philox(
        {static_cast<std::uint32_t>(d / 2), static_cast<std::uint32_t>(token), static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(stream) << 16U | static_cast<std::uint32_t>(h)},
        key_);
    const std::size_t at = d % 2 * 2;
    return words[at] | static_cast<std::uint64_t>(words[at + 1]) << 32U;
  }

 private:
  PhiloxKey key_;
};

constexpr std::size_t kMostHeads = std::size_t{1} << 16U;

/// A vector of normal deviates scaled to `norm`.
std::vector<double> random_direction(const Words& words, Stream stream, std::size_t head, std::size_t dim,
                                     double norm) {
  std::vector<double> direction(dim);
  double squares = 0;
  for (std::size_t d = 0; d < dim; ++d) {
    direction[d] = normal_from_word(words.word(stream, 0, 0, head, d));
    squares += direction[d] * direction[d];
  }
  const double factor = norm / std::sqrt(squares);
  for (double& x : direction) x *= factor;
  return direction;
}

// --- tensors

struct Place {
  std::size_t b, token, head, d, dim;
};

double draw(const Draw& how, const Words& words, Stream stream, const Place& at,
            const std::vector<double>& direction) {
  const std::uint64_t word = words.word(stream, at.b, at.token, at.head, at.d);
  switch (how.kind) {
    case Draw::normal:
      return how.spread * normal_from_word(word) + how.direction * direction[at.d] + how.mean;
    case Draw::sweep: {
      const double e = at.dim < 2 ? 0.0 : static_cast<double>(at.d) / static_cast<double>(at.dim - 1);
      return exp2_of(how.low + (how.high - how.low) * e) * normal_from_word(word);
    }
    case Draw::log_uniform: {
      const double magnitude = exp2_of(how.low + (how.high - how.low) * uniform_from_word(word));
      return (word >> 63U) != 0U ? -magnitude : magnitude;
    }
  }
  return 0;
}

/// Which keys of (b, head) are special. Random ones are those with the smallest words, so the choice is by
/// place too.
std::vector<bool> special_keys(SpecialKeys which, const Words& words, std::size_t b, std::size_t head,
                               std::size_t seqlen) {
  std::vector<bool> special(seqlen, false);
  if (seqlen == 0 || which == SpecialKeys::none) return special;
  const std::size_t first = which == SpecialKeys::quarter ? 0 : 1;  // the first key is special anyway
  if (first == 1) special[0] = true;
  std::size_t count = 0;
  if (which == SpecialKeys::first_and_seven) count = std::min<std::size_t>(7, seqlen - 1);
  if (which == SpecialKeys::quarter) count = seqlen / 4;
  std::vector<std::pair<std::uint64_t, std::size_t>> order;
  for (std::size_t j = first; j < seqlen && count > 0; ++j) {
    order.emplace_back(words.word(Stream::special_keys, b, j, head, 0), j);
  }
  std::sort(order.begin(), order.end());
  for (std::size_t i = 0; i < count; ++i) special[order[i].second] = true;
  return special;
}

/// Draws all of a tensor but k, whose directions are those of the query heads' KV heads.
void fill(Bf16Tensor& tensor, const std::vector<std::size_t>& shape, const Draw& how, const Words& words,
          Stream stream, const std::vector<std::vector<double>>& directions, std::size_t group) {
  tensor = Bf16Tensor(shape);
  std::size_t n = 0;
  for (std::size_t b = 0; b < shape[0]; ++b) {
    for (std::size_t t = 0; t < shape[1]; ++t) {
      for (std::size_t h = 0; h < shape[2]; ++h) {
        for (std::size_t d = 0; d < shape[3]; ++d) {
          tensor.data[n++] =
              bf16_from_double(draw(how, words, stream, {b, t, h, d, shape[3]}, directions[h / group]));
        }
      }
    }
  }
}

/// Keys head by head: drawn, shifted by one vector if asked for, then rounded once.
void fill_keys(Problem& problem, const Recipe& r, const Words& words,
               const std::vector<std::vector<double>>& directions, double key_shift) {
  problem.k = Bf16Tensor(problem.k_shape());
  const std::size_t dim = problem.head_dim;
  for (std::size_t h = 0; h < problem.heads_kv; ++h) {
    std::vector<double> keys(problem.batch * problem.seqlen_k * dim);
    double norms = 0;
    for (std::size_t b = 0; b < problem.batch; ++b) {
      const std::vector<bool> special = special_keys(r.special, words, b, h, problem.seqlen_k);
      for (std::size_t j = 0; j < problem.seqlen_k; ++j) {
        double* key = &keys[(b * problem.seqlen_k + j) * dim];
        double squares = 0;
        for (std::size_t d = 0; d < dim; ++d) {
          key[d] = draw(special[j] ? r.special_key : r.k, words, Stream::k, {b, j, h, d, dim}, directions[h]);
          squares += key[d] * key[d];
        }
        norms += std::sqrt(squares);
      }
    }
    const std::size_t count = problem.batch * problem.seqlen_k;
    std::vector<double> shift(dim, 0.0);
    if (key_shift != 0 && count > 0) {
      shift = random_direction(words, Stream::key_shift, h, dim,
                               key_shift * (norms / static_cast<double>(count)));
    }
    for (std::size_t t = 0; t < count; ++t) {
      for (std::size_t d = 0; d < dim; ++d) {
        const double x = keys[t * dim + d];
        problem.k.data[(t * problem.heads_kv + h) * dim + d] =
            bf16_from_double(key_shift == 0 ? x : x + shift[d]);
      }
    }
  }
}

void refuse_larger_than_memory(const Problem& problem) {
  const std::string what = "the problem asked for";
  std::size_t elements = 0;
  for (const auto& shape : {problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.out_shape()}) {
    elements += checked_elements(shape, what);
  }
  const std::size_t most = machine_memory() / sizeof(std::uint16_t);
  if (elements >= most) {
    throw InputError(what + " has " + std::to_string(elements) + " elements, expected fewer than " +
                     std::to_string(most) + ", this machine's memory");
  }
}

/// A shift beyond BF16's range would leave infinities, which no regime means to have.
void refuse_infinite_keys(const Problem& problem, double key_shift) {
  const bool infinite = std::any_of(problem.k.data.begin(), problem.k.data.end(),
                                    [](std::uint16_t word) { return (word & 0x7f80U) == 0x7f80U; });
  if (infinite) {
    throw InputError("generate: key_shift " + shortest_text(key_shift) +
                     " makes keys beyond the range of BF16");
  }
}

}  // namespace

const std::vector<RegimeInfo>& regimes() {
  static const std::vector<RegimeInfo> all = [] {
    std::vector<RegimeInfo> list;
    list.reserve(kRecipes.size());
    for (const Recipe& r : kRecipes) list.push_back({r.name, r.text});
    return list;
  }();
  return all;
}

Problem generate(const GenerateOptions& options) {
  const Recipe& r = recipe(options.regime);
  Problem problem;
  problem.batch = options.batch;
  problem.seqlen_q = options.seqlen_q;
  problem.seqlen_k = options.seqlen_k;
  problem.heads_q = options.heads_q;
  problem.heads_kv = options.heads_kv;
  problem.head_dim = problem.head_dim_v = options.head_dim;
  problem.causal = options.causal;
  problem.window_left = options.window_left;
  problem.window_right = options.window_right;
  problem.softcap = options.softcap;
  problem.softmax_scale = options.softmax_scale;
  if (problem.softmax_scale == 0)
    problem.softmax_scale = 1.0 / std::sqrt(static_cast<double>(options.head_dim));
  problem.q.shape = problem.q_shape();
  problem.k.shape = problem.k_shape();
  problem.v.shape = problem.v_shape();
  problem.dout.shape = problem.out_shape();
  check_problem_without_data(problem, "generate");
  if (options.heads_q > kMostHeads || options.batch > std::numeric_limits<std::uint32_t>::max()) {
    throw InputError("generate: " + std::to_string(options.heads_q) + " heads, expected at most " +
                     std::to_string(kMostHeads));
  }
  if (!std::isfinite(options.key_shift)) throw InputError("generate: key_shift is not a finite number");
  refuse_larger_than_memory(problem);

  const Words words(options.seed);
  std::vector<std::vector<double>> directions;
  const double norm = std::sqrt(static_cast<double>(options.head_dim));
  for (std::size_t h = 0; h < options.heads_kv; ++h) {
    directions.push_back(random_direction(words, Stream::direction, h, options.head_dim, norm));
  }
  const std::size_t group = problem.group();
  fill(problem.q, problem.q_shape(), r.q, words, Stream::q, directions, group);
  fill_keys(problem, r, words, directions, options.key_shift);
  refuse_infinite_keys(problem, options.key_shift);
  fill(problem.v, problem.v_shape(), r.v, words, Stream::v, directions, 1);
  fill(problem.dout, problem.out_shape(), r.dout, words, Stream::dout, directions, group);

  problem.attributes["regime"] = std::string(r.name);
  problem.attributes["regime_text"] = std::string(r.text);
  problem.attributes["generator"] = std::string("bitattn 1, Philox 4x32-10, AS 241");
  if (options.seed <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    problem.attributes["seed"] = static_cast<std::int64_t>(options.seed);
  } else {
    problem.attributes["seed"] = std::to_string(options.seed);
  }
  if (options.key_shift != 0) problem.attributes["key_shift"] = options.key_shift;
  return problem;
}

}  // namespace bitattn
