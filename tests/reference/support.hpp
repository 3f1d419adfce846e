#pragma once
// Small problems with owned memory, a sink that keeps everything, and attention once more, written another
// way: in Boost's expressions, over any number type, with whole matrices.

#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "reference/attention_rows.hpp"

namespace bitattn::reference::testing {

/// fp64 to BF16, to nearest even, for test data.
inline std::uint16_t to_bf16(double x) {
  Number n = make_number(64);
  mpfr_set_d(raw(n), x, MPFR_RNDN);
  return round_to_bf16(raw(n));
}

/// A problem that owns its tensors, [token][head][d].
struct TestProblem {
  std::vector<Sequence> sequences;
  std::size_t heads_q = 1, heads_kv = 1, head_dim = 8, head_dim_v = 8;
  double softmax_scale = 0.3, softcap = 0;
  bool causal = false, top_left = false, backward = true;
  int window_left = -1, window_right = -1;
  std::vector<std::uint16_t> q, k, v, dout;

  std::size_t tokens_q() const {
    return sequences.empty() ? 0 : sequences.back().q_begin + sequences.back().q_length;
  }
  std::size_t tokens_k() const {
    return sequences.empty() ? 0 : sequences.back().k_begin + sequences.back().k_length;
  }

  void add_sequence(std::size_t q_length, std::size_t k_length) {
    sequences.push_back({tokens_q(), q_length, tokens_k(), k_length});
  }

  /// Every element of every tensor from `draw(tensor name, flat index)`.
  void fill(const std::function<double(char, std::size_t)>& draw) {
    const auto make = [&](std::vector<std::uint16_t>& words, char name, std::size_t size) {
      words.resize(size);
      for (std::size_t i = 0; i < size; ++i) words[i] = to_bf16(draw(name, i));
    };
    make(q, 'q', tokens_q() * heads_q * head_dim);
    make(k, 'k', tokens_k() * heads_kv * head_dim);
    make(v, 'v', tokens_k() * heads_kv * head_dim_v);
    make(dout, 'o', tokens_q() * heads_q * head_dim_v);
  }

  void fill_normal(std::uint64_t seed, double deviation = 1) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<double> normal(0, deviation);
    fill([&](char, std::size_t) { return normal(engine); });
  }

  ProblemView view() const {
    ProblemView p;
    const auto tensor = [](const std::vector<std::uint16_t>& words, std::size_t heads, std::size_t dim) {
      return TensorView{words.data(), static_cast<std::ptrdiff_t>(heads * dim),
                        static_cast<std::ptrdiff_t>(dim)};
    };
    p.q = tensor(q, heads_q, head_dim);
    p.k = tensor(k, heads_kv, head_dim);
    p.v = tensor(v, heads_kv, head_dim_v);
    if (backward) p.dout = tensor(dout, heads_q, head_dim_v);
    p.sequences = sequences;
    p.heads_q = heads_q;
    p.heads_kv = heads_kv;
    p.head_dim = head_dim;
    p.head_dim_v = head_dim_v;
    p.softmax_scale = softmax_scale;
    p.softcap = softcap;
    p.causal = causal;
    p.top_left = top_left;
    p.window_left = window_left;
    p.window_right = window_right;
    return p;
  }
};

/// A tensor of high-precision values with their bounds.
struct Values {
  std::vector<Number> value;
  std::vector<double> bound;
};

/// All outputs, [token][head][d]; lse [token][head].
class KeepAll : public Sink {
 public:
  explicit KeepAll(const TestProblem& problem) : problem_(problem) {
    const auto make = [](Values& v, std::size_t size) {
      v.value.resize(size);
      v.bound.assign(size, -1.0);
    };
    make(out, problem.tokens_q() * problem.heads_q * problem.head_dim_v);
    make(lse, problem.tokens_q() * problem.heads_q);
    make(dq, problem.backward ? problem.tokens_q() * problem.heads_q * problem.head_dim : 0);
    make(dk, problem.backward ? problem.tokens_k() * problem.heads_kv * problem.head_dim : 0);
    make(dv, problem.backward ? problem.tokens_k() * problem.heads_kv * problem.head_dim_v : 0);
  }

  void query_row(const QueryRow& row) override {
    const std::size_t at =
        (problem_.sequences[row.id.sequence].q_begin + row.id.row) * problem_.heads_q + row.id.head;
    keep(out, at, row.out, row.out_bound);
    keep(lse, at, std::span(row.lse, 1), std::span(&row.lse_bound, 1));
    keep(dq, at, row.dq, row.dq_bound);
  }
  void key_row(const KeyRow& row) override {
    const std::size_t at =
        (problem_.sequences[row.sequence].k_begin + row.key) * problem_.heads_kv + row.head_kv;
    keep(dk, at, row.dk, row.dk_bound);
    keep(dv, at, row.dv, row.dv_bound);
  }

  Values out, lse, dq, dk, dv;

 private:
  static void keep(Values& to, std::size_t row, std::span<const Number> values,
                   std::span<const double> bounds) {
    for (std::size_t d = 0; d < values.size(); ++d) {
      Number& x = to.value[row * values.size() + d];
      mpfr_set_prec(raw(x), mpfr_get_prec(raw(values[d])));
      mpfr_set(raw(x), raw(values[d]), MPFR_RNDN);
      to.bound[row * values.size() + d] = bounds[d];
    }
  }

  const TestProblem& problem_;
};

/// The whole of attention on numbers of type T, straight from the formulas; inputs are arrays of T.
template <class T>
struct NaiveAttention {
  std::vector<T> q, k, v, dout;         ///< inputs, as in TestProblem
  std::vector<T> out, lse, dq, dk, dv;  ///< results

  explicit NaiveAttention(const TestProblem& problem) : problem_(problem) {
    const auto convert = [](const std::vector<std::uint16_t>& words) {
      std::vector<T> values;
      values.reserve(words.size());
      for (const std::uint16_t w : words) values.push_back(T(fp64_from_bf16(w)));
      return values;
    };
    q = convert(problem.q);
    k = convert(problem.k);
    v = convert(problem.v);
    dout = convert(problem.dout);
  }

  /// sum dout * out, with the outputs computed on the way.
  T forward() {
    using std::exp;
    using std::log;
    using std::tanh;
    const TestProblem& p = problem_;
    out.assign(dout.size(), T(0));
    lse.assign(p.tokens_q() * p.heads_q, T(0));
    T loss(0);
    each_row([&](std::size_t q_row, std::size_t i, const Sequence& s, std::size_t kv) {
      T sum(0);
      std::vector<T> weights(s.k_length, T(0));
      for (std::size_t j = 0; j < s.k_length; ++j) {
        if (!visible(i, j, s)) continue;
        T x = dot(q, q_row, k, k_row(s, j, kv), p.head_dim) * T(p.softmax_scale);
        if (p.softcap > 0) x = T(p.softcap) * tanh(T(x / T(p.softcap)));
        weights[j] = exp(x);
        sum += weights[j];
      }
      lse[q_row] = log(sum);
      for (std::size_t j = 0; j < s.k_length; ++j) {
        if (!visible(i, j, s)) continue;
        for (std::size_t d = 0; d < p.head_dim_v; ++d) {
          out[q_row * p.head_dim_v + d] += weights[j] / sum * v[k_row(s, j, kv) * p.head_dim_v + d];
        }
      }
      for (std::size_t d = 0; d < p.head_dim_v; ++d) {
        loss += out[q_row * p.head_dim_v + d] * dout[q_row * p.head_dim_v + d];
      }
    });
    return loss;
  }

  /// After forward(): the gradients, by the usual formulas.
  void backward() {
    using std::exp;
    using std::tanh;
    const TestProblem& p = problem_;
    dq.assign(q.size(), T(0));
    dk.assign(k.size(), T(0));
    dv.assign(v.size(), T(0));
    each_row([&](std::size_t q_row, std::size_t i, const Sequence& s, std::size_t kv) {
      const T big_d = dot(dout, q_row, out, q_row, p.head_dim_v);
      for (std::size_t j = 0; j < s.k_length; ++j) {
        if (!visible(i, j, s)) continue;
        const std::size_t kr = k_row(s, j, kv);
        T x = dot(q, q_row, k, kr, p.head_dim) * T(p.softmax_scale);
        T h(1);
        if (p.softcap > 0) {
          const T t = tanh(T(x / T(p.softcap)));
          h = T(1) - t * t;
          x = T(p.softcap) * t;
        }
        const T weight = exp(T(x - lse[q_row]));
        const T ds = weight * (dot(dout, q_row, v, kr, p.head_dim_v) - big_d) * h * T(p.softmax_scale);
        for (std::size_t d = 0; d < p.head_dim; ++d) {
          dq[q_row * p.head_dim + d] += ds * k[kr * p.head_dim + d];
          dk[kr * p.head_dim + d] += ds * q[q_row * p.head_dim + d];
        }
        for (std::size_t d = 0; d < p.head_dim_v; ++d) {
          dv[kr * p.head_dim_v + d] += weight * dout[q_row * p.head_dim_v + d];
        }
      }
    });
  }

  bool visible(std::size_t query, std::size_t key, const Sequence& s) const {
    const auto i = static_cast<std::int64_t>(query);
    const auto j = static_cast<std::int64_t>(key);
    const std::int64_t shift =
        problem_.top_left ? 0 : static_cast<std::int64_t>(s.k_length) - static_cast<std::int64_t>(s.q_length);
    if (problem_.causal && j > i + shift) return false;
    if (problem_.window_right >= 0 && j > i + shift + problem_.window_right) return false;
    return problem_.window_left < 0 || j >= i + shift - problem_.window_left;
  }

 private:
  /// f(row of queries in memory, row in its sequence, sequence, KV head), for rows that see something.
  template <class F>
  void each_row(const F& f) const {
    for (const Sequence& s : problem_.sequences) {
      for (std::size_t h = 0; h < problem_.heads_q; ++h) {
        for (std::size_t i = 0; i < s.q_length; ++i) {
          bool any = false;
          for (std::size_t j = 0; j < s.k_length; ++j) any = any || visible(i, j, s);
          if (any) {
            f((s.q_begin + i) * problem_.heads_q + h, i, s, h / (problem_.heads_q / problem_.heads_kv));
          }
        }
      }
    }
  }
  std::size_t k_row(const Sequence& s, std::size_t j, std::size_t kv) const {
    return (s.k_begin + j) * problem_.heads_kv + kv;
  }
  static T dot(const std::vector<T>& a, std::size_t a_row, const std::vector<T>& b, std::size_t b_row,
               std::size_t n) {
    T sum(0);
    for (std::size_t d = 0; d < n; ++d) sum += a[a_row * n + d] * b[b_row * n + d];
    return sum;
  }

  const TestProblem& problem_;
};

/// The shapes and masks that every implementation is tried on.
inline std::vector<std::pair<const char*, TestProblem>> varied_problems() {
  std::vector<std::pair<const char*, TestProblem>> all;
  const auto add = [&](const char* name, auto&& set) {
    TestProblem p;
    set(p);
    if (p.sequences.empty()) p.add_sequence(9, 13);
    p.fill_normal(all.size() + 1);
    all.emplace_back(name, std::move(p));
  };
  add("full", [](TestProblem&) {});
  add("causal_bottom_right", [](TestProblem& p) { p.causal = true; });
  add("causal_top_left", [](TestProblem& p) { p.causal = p.top_left = true; });
  add("causal_empty_rows", [](TestProblem& p) {
    p.causal = true;
    p.add_sequence(17, 6);
  });
  add("window", [](TestProblem& p) {
    p.window_left = 3;
    p.window_right = 2;
    p.add_sequence(20, 14);
  });
  add("window_left_only_top_left", [](TestProblem& p) {
    p.window_left = 4;
    p.top_left = true;
    p.add_sequence(11, 7);
  });
  add("window_causal", [](TestProblem& p) {
    p.causal = true;
    p.window_left = 2;
    p.window_right = 5;
    p.add_sequence(15, 15);
  });
  add("softcap", [](TestProblem& p) {
    p.softcap = 0.75;
    p.softmax_scale = 0.6;
  });
  add("softcap_negative_scale", [](TestProblem& p) {
    p.softcap = 20;
    p.softmax_scale = -1.25;
    p.causal = true;
  });
  add("gqa_other_value_size", [](TestProblem& p) {
    p.heads_q = 6;
    p.heads_kv = 2;
    p.head_dim_v = 5;
    p.head_dim = 11;
    p.causal = true;
    p.add_sequence(8, 10);
  });
  add("mqa", [](TestProblem& p) {
    p.heads_q = 4;
    p.add_sequence(5, 9);
  });
  add("varlen", [](TestProblem& p) {
    p.heads_q = 2;
    p.causal = true;
    p.add_sequence(3, 7);
    p.add_sequence(0, 4);
    p.add_sequence(6, 0);
    p.add_sequence(1, 1);
    p.add_sequence(8, 5);
  });
  add("one_query", [](TestProblem& p) {
    p.causal = true;
    p.add_sequence(1, 19);
  });
  return all;
}

}  // namespace bitattn::reference::testing
