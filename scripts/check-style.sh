#!/usr/bin/env bash
# clang-format over all C++ and CUDA sources, and with --tidy clang-tidy over what build/release compiles (slow). Both version 14.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t sources < <(git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh')
clang-format --dry-run --Werror "${sources[@]}"
echo "clang-format: ${#sources[@]} files clean"
if [ "${1:-}" = --tidy ]; then
  mapfile -t compiled < <(git ls-files '*.cpp' | grep -v '^gpu/' | grep -v '_test\.cpp$')
  printf '%s\n' "${compiled[@]}" | xargs -P "$(nproc)" -n 4 clang-tidy --quiet -p build/release
  echo "clang-tidy: ${#compiled[@]} files clean"
fi
