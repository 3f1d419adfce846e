#!/usr/bin/env bash
# Sets up, builds everything, and passes the tests. The long sweeps are apart: ctest --preset release -L exhaustive.
set -euo pipefail
cd "$(dirname "$0")"

bash scripts/install-dependencies.sh
cmake --preset release
cmake --build --preset release
ctest --preset release -LE exhaustive -j "$(nproc)" "$@"
