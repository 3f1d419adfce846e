#include "emu/mma/tile_product.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "emu/mma/scalar_engine.hpp"
#include "emu/mma/simd_engine.hpp"

namespace bitattn::mma {

std::span<const Engine* const> engines() {
  static const std::vector<const Engine*> all = [] {
    std::vector<const Engine*> list{&scalar_engine()};
    for (const Engine* engine : simd_engines()) list.push_back(engine);
    return list;
  }();
  return all;
}

const Engine* find_engine(std::string_view name) {
  for (const Engine* engine : engines()) {
    if (engine->name() == name) return engine;
  }
  return nullptr;
}

const Engine& default_engine() {
  static const Engine& chosen = []() -> const Engine& {
    const char* wanted = std::getenv("BITATTN_ENGINE");
    if (wanted == nullptr || *wanted == '\0') return *engines().back();
    const Engine* engine = find_engine(wanted);
    if (engine == nullptr) {
      throw std::invalid_argument("BITATTN_ENGINE names '" + std::string(wanted) +
                                  "', which this processor or build lacks");
    }
    return *engine;
  }();
  return chosen;
}

}  // namespace bitattn::mma
