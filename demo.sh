#!/usr/bin/env bash
# Sets up, builds, and runs the main job: a capture of a real training run, computed by the real FlashAttention-3 kernels on an
# H200, computed again here to the last bit, and diagnosed.
set -euo pipefail
cd "$(dirname "$0")"

bash scripts/install-dependencies.sh
{
  cmake --preset release -DBITATTN_TESTS=OFF -DBITATTN_BENCH=OFF -DBITATTN_CUDA=OFF -B build/demo
  cmake --build build/demo --target bitattn
} >&2
exec build/demo/bitattn diagnose datasets/goldens/real-run/step_000783_layer_0.h5 "$@"
