#pragma once
// The scalar engine: the model itself, one fused step at a time. Every other engine is tested against it.

#include "emu/mma/tile_product.hpp"

namespace bitattn::mma {

const Engine& scalar_engine();

}  // namespace bitattn::mma
