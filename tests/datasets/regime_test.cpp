// Regimes: pinned words, independence of the shape, statistics, and that each shows what it is for.

#include "datasets/regime.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>

#include "datasets/error.hpp"

namespace bitattn {
namespace {

double value(std::uint16_t word) {
  return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(word) << 16U));
}

std::vector<double> values(const Bf16Tensor& tensor) {
  std::vector<double> all;
  for (const std::uint16_t word : tensor.data) all.push_back(value(word));
  return all;
}

GenerateOptions options(const std::string& regime, std::uint64_t seed = 0) {
  GenerateOptions o;
  o.regime = regime;
  o.seed = seed;
  return o;
}

/// FNV-1a over the words of q, k, v, dout, low byte first.
std::uint64_t digest(const Problem& p) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const Bf16Tensor* tensor : {&p.q, &p.k, &p.v, &p.dout}) {
    for (const std::uint16_t word : tensor->data) {
      for (const unsigned shift : {0U, 8U}) hash = (hash ^ ((word >> shift) & 0xffU)) * 0x100000001b3U;
    }
  }
  return hash;
}

struct Pinned {
  const char* regime;
  double key_shift;
  std::uint16_t q, k, v, dout;  ///< first word of each
  std::uint64_t digest;
};

// Any machine, compiler and number of threads must give these: batch 2, heads 4:2, 33 x 47, head size 40,
// seed 20240607. The table is printed by regime_model.py, a second writing in another language.
constexpr Pinned kPinned[] = {
#include "tests/datasets/pinned_regimes.inc"
};

GenerateOptions pinned_options(const std::string& regime) {
  GenerateOptions o = options(regime, 20240607);
  o.batch = 2;
  o.heads_q = 4;
  o.heads_kv = 2;
  o.seqlen_q = 33;
  o.seqlen_k = 47;
  o.head_dim = 40;
  return o;
}

TEST(Regime, PinnedWordsOfEveryRegime) {
  std::vector<std::string> pinned;
  for (const Pinned& expected : kPinned) {
    GenerateOptions o = pinned_options(expected.regime);
    o.key_shift = expected.key_shift;
    if (o.key_shift == 0) pinned.emplace_back(expected.regime);
    const Problem p = generate(o);
    EXPECT_EQ(p.q.data[0], expected.q) << expected.regime;
    EXPECT_EQ(p.k.data[0], expected.k) << expected.regime;
    EXPECT_EQ(p.v.data[0], expected.v) << expected.regime;
    EXPECT_EQ(p.dout.data[0], expected.dout) << expected.regime;
    EXPECT_EQ(digest(p), expected.digest) << expected.regime << ", key shift " << expected.key_shift;
  }
  std::vector<std::string> all;
  for (const RegimeInfo& info : regimes()) all.push_back(info.name);
  EXPECT_EQ(pinned, all) << "every regime is pinned";
}

TEST(Regime, ALongerProblemBeginsLikeAShorterOne) {
  for (const char* regime : {"normal", "late", "wild", "opposed-sink"}) {
    GenerateOptions small = options(regime, 7);
    small.seqlen_q = 20;
    small.seqlen_k = 30;
    GenerateOptions large = small;
    large.batch = 2;
    large.seqlen_q = 50;
    large.seqlen_k = 40;
    const Problem a = generate(small);
    const Problem b = generate(large);
    EXPECT_TRUE(std::equal(a.q.data.begin(), a.q.data.end(), b.q.data.begin())) << regime;
    EXPECT_TRUE(std::equal(a.k.data.begin(), a.k.data.end(), b.k.data.begin())) << regime;
    EXPECT_TRUE(std::equal(a.v.data.begin(), a.v.data.end(), b.v.data.begin())) << regime;
    EXPECT_TRUE(std::equal(a.dout.data.begin(), a.dout.data.end(), b.dout.data.begin())) << regime;
  }
}

TEST(Regime, SeedsGiveDifferentProblemsAndTheSameSeedTheSame) {
  EXPECT_EQ(digest(generate(options("normal", 1))), digest(generate(options("normal", 1))));
  EXPECT_NE(digest(generate(options("normal", 1))), digest(generate(options("normal", 2))));
  EXPECT_NE(digest(generate(options("normal", 1))),
            digest(generate(options("normal", std::uint64_t{1} << 32U))));
}

struct Moments {
  double mean = 0, deviation = 0;
};
Moments moments(const std::vector<double>& x) {
  Moments m;
  for (const double v : x) m.mean += v / static_cast<double>(x.size());
  for (const double v : x) m.deviation += (v - m.mean) * (v - m.mean) / static_cast<double>(x.size());
  m.deviation = std::sqrt(m.deviation);
  return m;
}

/// Largest distance between the empirical distribution of x and the standard normal one.
double kolmogorov_smirnov(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  double worst = 0;
  const auto n = static_cast<double>(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double f = 0.5 * std::erfc(-x[i] / std::sqrt(2.0));
    worst = std::max(
        {worst, std::abs(f - static_cast<double>(i) / n), std::abs(f - static_cast<double>(i + 1) / n)});
  }
  return worst;
}

TEST(Regime, NormalIsNormal) {
  GenerateOptions o = options("normal", 3);
  o.heads_q = o.heads_kv = 4;
  o.seqlen_q = o.seqlen_k = 512;
  const Problem p = generate(o);
  for (const Bf16Tensor* tensor : {&p.q, &p.k, &p.v, &p.dout}) {
    const std::vector<double> x = values(*tensor);
    const auto n = static_cast<double>(x.size());
    const Moments m = moments(x);
    EXPECT_LT(std::abs(m.mean), 5 / std::sqrt(n));
    EXPECT_LT(std::abs(m.deviation - 1), 5 / std::sqrt(2 * n));
    // The rounding to BF16 alone moves the distribution by less than 0.001.
    EXPECT_LT(kolmogorov_smirnov(x), 2.0 / std::sqrt(n) + 0.001);
    double fourth = 0;
    for (const double v : x) fourth += v * v * v * v / n;
    EXPECT_NEAR(fourth, 3.0, 5 * std::sqrt(96 / n));
  }
  // Neighbours along every axis, and the same place in two tensors, are uncorrelated.
  const std::vector<double> x = values(p.q);
  const std::vector<double> y = values(p.k);
  const auto correlation = [&](const std::vector<double>& a, std::size_t lag) {
    double sum = 0;
    for (std::size_t i = 0; i + lag < x.size(); ++i) sum += x[i] * a[i + lag];
    return std::abs(sum) / std::sqrt(static_cast<double>(x.size()));
  };
  for (const std::size_t lag : {1U, 2U, 128U, 512U}) EXPECT_LT(correlation(x, lag), 5.0) << lag;
  EXPECT_LT(correlation(y, 0), 5.0);
}

/// Scaled logits of one query head against its keys: [row][key].
std::vector<std::vector<double>> logits(const Problem& p, std::size_t b, std::size_t h) {
  std::vector<std::vector<double>> rows(p.seqlen_q, std::vector<double>(p.seqlen_k));
  for (std::size_t i = 0; i < p.seqlen_q; ++i) {
    for (std::size_t j = 0; j < p.seqlen_k; ++j) {
      const std::uint16_t* q = &p.q.data[(b * p.seqlen_q + i) * p.q_stride() + h * p.head_dim];
      const std::uint16_t* k = &p.k.data[(b * p.seqlen_k + j) * p.k_stride() + h / p.group() * p.head_dim];
      double sum = 0;
      for (std::size_t d = 0; d < p.head_dim; ++d) sum += value(q[d]) * value(k[d]);
      rows[i][j] = sum * p.softmax_scale;
    }
  }
  return rows;
}

struct Range {
  double least = std::numeric_limits<double>::infinity(), most = -std::numeric_limits<double>::infinity();
};
Range row_maxima(const Problem& p) {
  Range range;
  for (std::size_t h = 0; h < p.heads_q; ++h) {
    for (const std::vector<double>& row : logits(p, 0, h)) {
      const double most = *std::max_element(row.begin(), row.end());
      range.least = std::min(range.least, most);
      range.most = std::max(range.most, most);
    }
  }
  return range;
}

// The largest logits that goldens of these regimes have: normal 3.5..5, peaky 17.6, ties 28.4 (head size
// 128).
TEST(Regime, LogitsAreAsLargeAsTheRegimesPromise) {
  EXPECT_THAT(row_maxima(generate(options("normal", 5))).most,
              ::testing::AllOf(::testing::Gt(3.5), ::testing::Lt(6.0)));
  EXPECT_THAT(row_maxima(generate(options("normal3", 5))).most,
              ::testing::AllOf(::testing::Gt(31), ::testing::Lt(54)));
  EXPECT_THAT(row_maxima(generate(options("peaky", 5))).most,
              ::testing::AllOf(::testing::Gt(14), ::testing::Lt(21)));
  EXPECT_THAT(row_maxima(generate(options("ties", 5))).most,
              ::testing::AllOf(::testing::Gt(25), ::testing::Lt(35)));
  EXPECT_THAT(row_maxima(generate(options("tiny", 5))).most,
              ::testing::AllOf(::testing::Gt(0.6), ::testing::Lt(2.0)));
  EXPECT_THAT(row_maxima(generate(options("wild", 5))).most,
              ::testing::AllOf(::testing::Gt(400), ::testing::Lt(3000)));
}

TEST(Regime, LateHasLogitsFrom600To1400) {
  for (const std::size_t dim : {64U, 128U, 192U, 256U}) {
    GenerateOptions o = options("late", 11);
    o.head_dim = dim;
    o.heads_q = 2;
    const Problem p = generate(o);
    const double centre = 80 * std::sqrt(static_cast<double>(dim));
    for (std::size_t h = 0; h < 2; ++h) {
      for (const auto& row : logits(p, 0, h)) {
        for (const double x : row) {
          ASSERT_GT(x, centre - 260);
          ASSERT_LT(x, centre + 260);
        }
      }
    }
    const Range maxima = row_maxima(p);
    EXPECT_GT(maxima.least, 400);
    EXPECT_GT(maxima.most, 600);
    EXPECT_LT(maxima.most, 1500);
  }
}

TEST(Regime, TiesAreExact) {
  GenerateOptions o = options("ties", 2);
  o.batch = 2;
  o.heads_q = 2;
  o.heads_kv = 2;
  const Problem p = generate(o);
  for (std::size_t b = 0; b < 2; ++b) {
    for (std::size_t h = 0; h < 2; ++h) {
      // The eight identical keys, by their words.
      const auto key = [&](std::size_t j) { return &p.k.data[(b * 256 + j) * p.k_stride() + h * 128]; };
      std::vector<std::size_t> same;
      for (std::size_t j = 0; j < 256; ++j) {
        if (std::equal(key(0), key(0) + 128, key(j))) same.push_back(j);
      }
      EXPECT_EQ(same.size(), 8U);
      for (const auto& row : logits(p, b, h)) {
        const double most = *std::max_element(row.begin(), row.end());
        for (const std::size_t j : same) ASSERT_EQ(row[j], most);
        ASSERT_EQ(std::count(row.begin(), row.end(), most), 8);
      }
    }
  }
}

TEST(Regime, TiesInShortSequences) {
  for (const std::size_t length : {0U, 1U, 3U, 8U, 9U}) {
    GenerateOptions o = options("ties", 2);
    o.seqlen_k = length;
    const Problem p = generate(o);
    std::size_t same = 0;
    for (std::size_t j = 0; j < length; ++j) {
      same +=
          std::equal(p.k.data.begin(), p.k.data.begin() + 128, p.k.data.begin() + static_cast<long>(j) * 128)
              ? 1
              : 0;
    }
    EXPECT_EQ(same, std::min<std::size_t>(length, 8));
  }
}

TEST(Regime, SweepsReachTheSubnormals) {
  const Problem tiny = generate(options("tiny", 1));
  const Problem grad = generate(options("tinygrad", 1));
  const auto count = [](const Bf16Tensor& tensor) {
    std::map<std::string, std::size_t> kinds;
    for (const std::uint16_t w : tensor.data) {
      const unsigned magnitude = w & 0x7fffU;
      ++kinds[magnitude == 0 ? "zero" : (magnitude < 0x80 ? "subnormal" : "normal")];
    }
    return kinds;
  };
  EXPECT_GT(count(tiny.v)["subnormal"], 5000U);
  EXPECT_GT(count(tiny.v)["normal"], 5000U);
  EXPECT_GT(count(grad.dout)["zero"], 5000U);
  EXPECT_GT(count(grad.dout)["subnormal"], 5000U);
  EXPECT_GT(count(grad.dout)["normal"], 5000U);
  EXPECT_EQ(count(grad.v)["subnormal"], 0U);
  // First and last column of q: deviations 2^-8 and 1.
  std::vector<double> first;
  std::vector<double> last;
  for (std::size_t i = 0; i < 256; ++i) {
    first.push_back(value(tiny.q.data[i * 128]));
    last.push_back(value(tiny.q.data[i * 128 + 127]));
  }
  EXPECT_NEAR(moments(first).deviation * 256, 1.0, 0.25);
  EXPECT_NEAR(moments(last).deviation, 1.0, 0.25);
}

TEST(Regime, WildIsLogUniform) {
  const Problem p = generate(options("wild", 9));
  const auto check = [](const Bf16Tensor& tensor, double low, double high) {
    double sum = 0;
    double least = 1e9;
    double most = -1e9;
    double signs = 0;
    for (const std::uint16_t w : tensor.data) {
      const double e = std::log2(std::abs(value(w)));
      sum += e;
      least = std::min(least, e);
      most = std::max(most, e);
      signs += value(w) < 0 ? -1 : 1;
    }
    const auto n = static_cast<double>(tensor.data.size());
    EXPECT_NEAR(sum / n, (low + high) / 2, 5 * (high - low) / std::sqrt(12 * n));
    EXPECT_NEAR(least, low, 0.1);
    EXPECT_NEAR(most, high, 0.1);
    EXPECT_LT(std::abs(signs), 5 * std::sqrt(n));
  };
  check(p.q, -20, 6);
  check(p.k, -20, 6);
  check(p.v, -30, 30);
  check(p.dout, -40, 20);
}

/// Mean key of a head, and the first key, along the unit vector of the first key.
TEST(Regime, TheOpposedSinkIsOpposedAndHoldsMostOfTheWeight) {
  const Problem p = generate(options("opposed-sink", 4));
  std::vector<double> mean(128, 0);
  for (std::size_t j = 1; j < 256; ++j) {
    for (std::size_t d = 0; d < 128; ++d) mean[d] += value(p.k.data[j * 128 + d]) / 255;
  }
  double dot = 0;
  double sink = 0;
  for (std::size_t d = 0; d < 128; ++d) {
    dot += mean[d] * value(p.k.data[d]);
    sink += value(p.k.data[d]) * value(p.k.data[d]);
  }
  EXPECT_NEAR(dot / sink, -0.5, 0.05);
  double weight = 0;
  for (const auto& row : logits(p, 0, 0)) {
    double sum = 0;
    for (const double x : row) sum += std::exp(x - row[0]);
    weight += 1 / sum / 256;
  }
  EXPECT_GT(weight, 0.8);
  EXPECT_LT(weight, 0.97);
}

TEST(Regime, TheOpposedClusterIsAQuarterAndHoldsTheWeight) {
  const Problem p = generate(options("opposed-cluster", 4));
  const auto rows = logits(p, 0, 0);
  // Keys of the cluster have a mean logit of about +sqrt(128)/4, the others of minus that.
  std::vector<double> mean(256, 0);
  for (const auto& row : rows) {
    for (std::size_t j = 0; j < 256; ++j) mean[j] += row[j] / 256;
  }
  const auto in_cluster = [&](std::size_t j) { return mean[j] > 0; };
  std::size_t members = 0;
  for (std::size_t j = 0; j < 256; ++j) members += in_cluster(j) ? 1 : 0;
  EXPECT_EQ(members, 64U);
  double weight = 0;
  for (const auto& row : rows) {
    double all = 0;
    double cluster = 0;
    for (std::size_t j = 0; j < 256; ++j) {
      all += std::exp(row[j]);
      cluster += in_cluster(j) ? std::exp(row[j]) : 0;
    }
    weight += cluster / all / 256;
  }
  EXPECT_GT(weight, 0.95);
}

TEST(Regime, KeyShiftAddsOneVectorOfTheAskedLengthToAllKeysOfAHead) {
  GenerateOptions o = options("normal", 6);
  o.heads_q = o.heads_kv = 2;
  const Problem plain = generate(o);
  o.key_shift = 10;
  const Problem shifted = generate(o);
  EXPECT_EQ(plain.q.data, shifted.q.data);
  EXPECT_EQ(plain.v.data, shifted.v.data);
  std::vector<std::vector<double>> shift(2, std::vector<double>(128, 0));
  for (std::size_t h = 0; h < 2; ++h) {
    double mean_norm = 0;
    for (std::size_t j = 0; j < 256; ++j) {
      double squares = 0;
      for (std::size_t d = 0; d < 128; ++d) {
        const std::size_t at = (j * 2 + h) * 128 + d;
        shift[h][d] += (value(shifted.k.data[at]) - value(plain.k.data[at])) / 256;
        squares += value(plain.k.data[at]) * value(plain.k.data[at]);
      }
      mean_norm += std::sqrt(squares) / 256;
    }
    double length = 0;
    for (const double x : shift[h]) length += x * x;
    EXPECT_NEAR(std::sqrt(length) / mean_norm, 10, 0.01);
    // Each key differs from the head's shift by roundings only.
    for (std::size_t j = 0; j < 256; ++j) {
      for (std::size_t d = 0; d < 128; ++d) {
        const std::size_t at = (j * 2 + h) * 128 + d;
        const double rounding = std::abs(value(shifted.k.data[at])) / 128 + 0.05;
        ASSERT_NEAR(value(shifted.k.data[at]) - value(plain.k.data[at]), shift[h][d], rounding);
      }
    }
  }
  EXPECT_NE(shift[0], shift[1]);
  EXPECT_EQ(std::get<double>(shifted.attributes.at("key_shift")), 10.0);
}

TEST(Regime, QueryHeadsOfAGroupShareTheDirectionOfTheirKvHead) {
  GenerateOptions o = options("late", 8);
  o.heads_q = 4;
  o.heads_kv = 2;
  const Problem p = generate(o);
  // With another head's direction, logits would be 80 sqrt(128) times the cosine of two random directions.
  for (std::size_t h = 0; h < 4; ++h) EXPECT_GT(logits(p, 0, h)[0][0], 700) << h;
}

TEST(Regime, SaysWhatItIs) {
  GenerateOptions o = options("peaky", 77);
  o.causal = true;
  o.window_left = 5;
  o.softcap = 20;
  const Problem p = generate(o);
  EXPECT_EQ(p.text("regime"), "peaky");
  EXPECT_EQ(p.integer("seed", 0), 77);
  EXPECT_THAT(p.text("regime_text"), ::testing::HasSubstr("attention sink"));
  EXPECT_TRUE(p.causal);
  EXPECT_EQ(p.window_left, 5);
  EXPECT_EQ(p.softcap, 20);
  EXPECT_EQ(p.softmax_scale, 1 / std::sqrt(128.0));
  check_problem(p, "peaky");
  EXPECT_EQ(generate(options("normal", ~std::uint64_t{0})).text("seed"), "18446744073709551615");
}

std::string refusal(const GenerateOptions& o) {
  try {
    generate(o);
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Regime, RefusesWhatDoesNotFit) {
  using ::testing::HasSubstr;
  EXPECT_THAT(refusal(options("nonsense")),
              HasSubstr("regime nonsense is unknown, expected one of normal, normal3"));
  GenerateOptions o = options("normal");
  o.heads_q = 3;
  o.heads_kv = 2;
  EXPECT_THAT(refusal(o), HasSubstr("multiple of the KV heads"));
  o = options("normal");
  o.head_dim = 300;
  EXPECT_THAT(refusal(o), HasSubstr("is 300, expected 1 to 256"));
  o = options("normal");
  o.batch = 0;
  EXPECT_THAT(refusal(o), HasSubstr("batch is 0"));
  o = options("normal");
  o.softmax_scale = -1;
  EXPECT_THAT(refusal(o), HasSubstr("softmax_scale is -1"));
  o = options("normal");
  o.key_shift = std::numeric_limits<double>::infinity();
  EXPECT_THAT(refusal(o), HasSubstr("key_shift"));
  o = options("normal");
  o.batch = std::size_t{1} << 30U;
  o.seqlen_q = std::size_t{1} << 30U;
  EXPECT_THAT(refusal(o), HasSubstr("tokens"));
  o = options("normal");
  o.heads_q = o.heads_kv = 65536;
  o.seqlen_q = o.seqlen_k = 1U << 20U;
  EXPECT_THAT(refusal(o), HasSubstr("this machine's memory"));
}

}  // namespace
}  // namespace bitattn
