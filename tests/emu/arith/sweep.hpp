#pragma once
// Sweeps over all 2^32 inputs: digests of the special functions, and conversions against their intervals. On
// all cores, with progress; what fails is told as ranges of inputs.

#include <fmt/format.h>
#include <tbb/parallel_for.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "emu/arith/mufu.hpp"
#include "tests/emu/arith/golden_vectors.hpp"
#include "tests/emu/arith/narrow_rule.hpp"
#include "tests/emu/arith/random_bits.hpp"
#include "tests/emu/arith/show.hpp"

namespace bitattn::test {

/// Percent done, on standard error: in place on a terminal, else a line every ten percent.
class Progress {
 public:
  Progress(std::string what, std::uint64_t steps) : what_(std::move(what)), steps_(steps) {}

  void step() {
    const std::uint64_t percent = (++done_) * 100 / steps_;
    const std::scoped_lock lock(mutex_);
    if (percent < next_) return;
    if (terminal_) {
      fmt::print(stderr, "\r{} {:3}%{}", what_, percent, percent == 100 ? "\n" : "");
    } else {
      fmt::print(stderr, "{} {:3}%\n", what_, percent);
    }
    next_ = percent + (terminal_ ? 1 : 10);
  }

 private:
  std::string what_;
  std::uint64_t steps_;
  std::atomic<std::uint64_t> done_ = 0;
  std::mutex mutex_;
  std::uint64_t next_ = 0;
  bool terminal_ = ::isatty(STDERR_FILENO) != 0;
};

/// "0x3f800000 (0x1p+0) .. 0x3fffffff (0x1.fffffep+0)".
inline std::string show_range(std::uint32_t first, std::uint32_t last) {
  return show_fp32(first) + " .. " + show_fp32(last);
}

/// A special function, and its column in mufu_exhaustive_digest.csv.
struct SweptFunction {
  const char* name;
  std::size_t column;
  /// Sum mod 2^64 of mix(x << 32 | f(x)) over the 2^23 inputs of one sign and exponent.
  std::uint64_t (*digest)(std::uint32_t sign_and_exponent);
};

template <std::uint32_t (*f)(std::uint32_t)>
std::uint64_t digest_of(std::uint32_t sign_and_exponent) {
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < 1U << 23U; ++i) {
    const std::uint32_t x = sign_and_exponent << 23U | i;
    sum += mix(std::uint64_t{x} << 32U | f(x));
  }
  return sum;
}

inline constexpr std::array kSweptFunctions{SweptFunction{"ex2", 1, digest_of<arith::mufu::ex2>},
                                            SweptFunction{"lg2", 2, digest_of<arith::mufu::lg2>},
                                            SweptFunction{"rcp", 3, digest_of<arith::mufu::rcp>},
                                            SweptFunction{"rsqrt", 4, digest_of<arith::mufu::rsqrt>},
                                            SweptFunction{"tanh", 5, digest_of<arith::mufu::tanh>}};

/// The chip's digests of one function, all 512. Throws std::runtime_error if the table is not whole.
inline std::vector<std::uint64_t> measured_digests(const SweptFunction& function) {
  const std::string path = std::string(BITATTN_BUNDLED_GOLDENS) + "/arithmetic/mufu_exhaustive_digest.csv";
  std::vector<std::uint64_t> digests;
  for (const auto& row : read_csv(path, "sign_exponent,ex2,lg2,rcp,rsq,tanh")) {
    if (row.size() != 6 || std::stoul(row[0]) != digests.size()) throw std::runtime_error(path + ": bad row");
    digests.push_back(std::stoull(row[function.column], nullptr, 16));
  }
  if (digests.size() != 512) throw std::runtime_error(path + ": not 512 rows");
  return digests;
}

/// Compares the digests of these blocks (sign and exponent each) and describes the ranges that differ; empty
/// if none.
inline std::string differing_digests(const SweptFunction& function, const std::vector<std::uint32_t>& blocks,
                                     bool show_progress) {
  const auto measured = measured_digests(function);
  std::vector<std::uint64_t> ours(512);
  Progress progress(function.name, blocks.size());
  tbb::parallel_for(std::size_t{0}, blocks.size(), [&](std::size_t i) {
    ours[blocks[i]] = function.digest(blocks[i]);
    if (show_progress) progress.step();
  });
  std::string text;
  for (std::size_t i = 0; i < blocks.size();) {
    std::size_t end = i;
    while (end < blocks.size() && blocks[end] == blocks[i] + (end - i) &&
           ours[blocks[end]] != measured[blocks[end]]) {
      ++end;
    }
    if (end > i) {
      const std::uint32_t first = blocks[i] << 23U;
      const std::uint32_t last = (blocks[end - 1] << 23U) + 0x7fffffU;
      text +=
          fmt::format("{}: {} of 512 blocks differ, inputs {}; first digest {:016x}, chip {:016x}\n",
                      function.name, end - i, show_range(first, last), ours[blocks[i]], measured[blocks[i]]);
    }
    i = std::max(end, i + 1);
  }
  return text;
}

/// Runs `convert` over all 2^32 inputs and describes the ranges it converts otherwise than the rule; empty if
/// none.
template <class Convert>
std::string differing_conversions(const NarrowRule& rule, Convert&& convert) {
  struct Failure {
    std::uint32_t first, last;
    std::uint32_t ours, expected;  // at `first`
  };
  const auto intervals = narrow_intervals(rule);
  constexpr std::uint32_t kPieces = 4096;
  constexpr std::uint32_t kPiece = 0x100000U;
  std::vector<std::vector<Failure>> failures(kPieces);
  std::atomic<std::uint64_t> failed = 0;
  Progress progress(rule.name, kPieces);
  tbb::parallel_for(0U, kPieces, [&](std::uint32_t piece) {
    const std::uint32_t piece_first = piece * kPiece;
    const std::uint32_t piece_last = piece_first + (kPiece - 1U);
    auto interval = std::lower_bound(intervals.begin(), intervals.end(), piece_first,
                                     [](const NarrowInterval& i, std::uint32_t x) { return i.last < x; });
    for (std::uint32_t first = piece_first; first <= piece_last; ++interval) {
      const std::uint32_t last = std::min(interval->last, piece_last);
      std::uint32_t differing = 0;
      for (std::uint32_t n = 0; n <= last - first; ++n) differing |= convert(first + n) ^ interval->code;
      if (differing != 0) {  // again, for the report
        for (std::uint32_t n = 0; n <= last - first; ++n) {
          const std::uint32_t x = first + n;
          const std::uint32_t code = convert(x);
          if (code == interval->code) continue;
          ++failed;
          if (!failures[piece].empty() && failures[piece].back().last + 1U == x) {
            failures[piece].back().last = x;
          } else if (failures[piece].size() < 16) {
            failures[piece].push_back({x, x, code, interval->code});
          }
        }
      }
      if (last == 0xffffffffU) break;
      first = last + 1U;
    }
    progress.step();
  });
  std::vector<Failure> ranges;
  for (const auto& piece : failures) {
    for (const Failure& f : piece) {
      if (!ranges.empty() && ranges.back().last + 1U == f.first) {
        ranges.back().last = f.last;
      } else {
        ranges.push_back(f);
      }
    }
  }
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(ranges.size(), 20); ++i) {
    const Failure& f = ranges[i];
    text += fmt::format("{}: inputs {} differ; the first gives {} and not {}\n", rule.name,
                        show_range(f.first, f.last), show_bits(f.ours, rule.digits()),
                        show_bits(f.expected, rule.digits()));
  }
  if (failed != 0) text += fmt::format("{}: {} inputs differ in all\n", rule.name, failed.load());
  return text;
}

}  // namespace bitattn::test
