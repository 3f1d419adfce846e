#include "bench/feedback_loop/text.hpp"

#include <fstream>
#include <iterator>

#include "datasets/error.hpp"
#include "datasets/philox.hpp"

namespace bitattn::feedback {

std::vector<std::uint8_t> read_text(const std::string& path, std::size_t least) {
  std::ifstream in(path, std::ios::binary);
  std::vector<std::uint8_t> bytes{std::istreambuf_iterator<char>(in), {}};
  if (!in || bytes.size() <= least) {
    throw InputError(path + ": expected a readable text of more than " + std::to_string(least) + " bytes");
  }
  return bytes;
}

Batch draw_batch(const std::vector<std::uint8_t>& text, const Shape& shape, std::uint64_t seed, int step) {
  constexpr std::uint32_t kStream = 3;  // weights are streams 1 and 2 (model.cpp)
  Batch batch;
  for (std::size_t b = 0; b < shape.batch; ++b) {
    const PhiloxCounter words =
        philox({static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(b), 0, kStream},
               {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32U)});
    const std::size_t begin = words[0] % (text.size() - shape.length);
    const auto first = text.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto length = static_cast<std::ptrdiff_t>(shape.length);
    batch.tokens.insert(batch.tokens.end(), first, first + length);
    batch.targets.insert(batch.targets.end(), first + 1, first + length + 1);
  }
  return batch;
}

}  // namespace bitattn::feedback
