#pragma once
// What the small model learns from: windows of a text, drawn by seed and step.

#include <cstdint>
#include <string>
#include <vector>

#include "bench/feedback_loop/attention_step.hpp"

namespace bitattn::feedback {

/// A step's bytes and the bytes that follow each of them: [batch * length].
struct Batch {
  std::vector<std::uint8_t> tokens, targets;
};

/// The bytes of a file. Throws InputError if there are no more than `least`.
std::vector<std::uint8_t> read_text(const std::string& path, std::size_t least);

/// The same windows on every machine. `text` is longer than a sequence.
Batch draw_batch(const std::vector<std::uint8_t>& text, const Shape& shape, std::uint64_t seed, int step);

}  // namespace bitattn::feedback
