#!/usr/bin/env bash
# Checks and times everything on a GPU host: the probe of the chip, the kernels and the emulator bit for bit against the
# captures and against the CPU emulator, then rates. Runs in a bundle as it is, or from a checkout on a build folder:
#
#   ./gpu_check.sh [OUT]                       in a bundle; results go to OUT (default: results)
#   bench/gpu_check.sh OUT BUILD               in a checkout
#
# BITATTN_GOLDENS: a folder of captures (fa3, fa3-corners, real-run) in place of the bundled ones.
# BITATTN_CHECK: the steps to run, of: probe kernels emulator captures layer rates sanitizer (default: all but sanitizer).
# Ends with 0 if every step did, 1 if one failed, 2 where there is no GPU.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
out="${1:-results}"
build="${2:-}"
mkdir -p "$out"
if [ -n "$build" ]; then
  build="$(cd "$build" && pwd)"
  captures="${BITATTN_GOLDENS:-$here/../datasets/goldens}"
else
  captures="${BITATTN_GOLDENS:-$here/captures}"
fi
export BITATTN_GOLDENS="$captures"
steps="${BITATTN_CHECK:-probe kernels emulator captures layer rates}"
failed=()

# A program by its name: bin of the bundle, or wherever the build left it.
program() {
  if [ -n "$build" ]; then find "$build" -maxdepth 4 -type f -perm -u+x -name "$1" -print -quit; else echo "$here/bin/$1"; fi
}
# step NAME SECONDS COMMAND...: runs it with a time limit, its output into OUT/NAME.txt and its verdict on the terminal.
step() {
  local name="$1" limit="$2"
  shift 2
  [ -x "$1" ] || return 0
  local begin=$SECONDS
  timeout "$limit" "$@" >"$out/$name.txt" 2>"$out/$name.err"
  local code=$?
  printf '%-28s %4d s  exit %d\n' "$name" $((SECONDS - begin)) "$code"
  [ "$code" = 0 ] || { failed+=("$name"); tail -n 5 "$out/$name.err" "$out/$name.txt"; }
}
wanted() { [[ " $steps " == *" $1 "* ]]; }

bitattn="$(program bitattn)"
{
  date -u
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv 2>&1
  "$bitattn" --version
} | tee "$out/host.txt"

if wanted probe; then
  step probe 300 "$bitattn" probe --quiet
  grep -q 'no usable NVIDIA GPU' "$out/probe.err" && { cat "$out/probe.err"; exit 2; }
fi
if wanted kernels; then
  step kernels-wgmma 120 "$(program test_gpu_kernels_wgmma)"
  step kernels-fa3 300 "$(program test_gpu_kernels_fa3)"
fi
if wanted emulator; then
  step emulator-step 120 "$(program test_gpu_emulator_step)"
  step emulator-fa3 300 "$(program test_gpu_emulator)"
fi
if wanted captures; then
  # The program itself: both GPU backends against what real kernels recorded.
  for folder in fa3 fa3-corners real-run; do
    [ -d "$captures/$folder" ] || continue
    step "captures-emu-gpu-$folder" 300 "$bitattn" compare "$captures/$folder" -a emu-gpu:fa3 -b recorded
  done
fi
if wanted layer; then
  # A whole layer through the program: what a user waits for, and every bit of it by three ways of computing it.
  layer="$out/layer.h5"
  step layer-generate 300 "$bitattn" generate "$layer" --regime normal --heads 32 --seqlen 8192 --dim 128 --causal --seed 1 --quiet
  step layer-run-emu-gpu 300 "$bitattn" run "$layer" -b emu-gpu:fa3 -o "$out/layer-out.h5" --quiet
  step layer-run-gpu 300 "$bitattn" run "$layer" -b gpu:fa3 -o "$out/layer-out.h5" --quiet
  step layer-emu-gpu-is-gpu 300 "$bitattn" compare "$layer" -a emu-gpu:fa3 -b gpu:fa3 --quiet
  step layer-emu-gpu-is-cpu 300 "$bitattn" compare "$layer" -a emu-gpu:fa3 -b fa3 --quiet
  rm -f "$layer" "$out/layer-out.h5"
fi
if wanted rates; then
  step rates-emulator 200 "$(program bitattn_gpu_emulator_bench)"
  step rates-kernels 200 "$(program bitattn_gpu_kernels_bench)"
fi
if wanted sanitizer && command -v compute-sanitizer >/dev/null; then
  # sanitized TOOL NAME SECONDS COMMAND...
  sanitized() { [ -x "$4" ] || return 0; step "sanitizer-$1-$2" "$3" "$(command -v compute-sanitizer)" --tool "$1" --error-exitcode 9 "${@:4}"; }
  sanitized memcheck emulator 180 "$(program test_gpu_emulator)" --gtest_filter='*SmallGrid*:*PackedSequences*'
  sanitized racecheck emulator 120 "$(program test_gpu_emulator)" --gtest_filter='*SmallGrid*'
  for tool in memcheck racecheck synccheck initcheck; do
    sanitized "$tool" kernels 120 "$(program test_gpu_kernels_fa3)" --gtest_filter='*SmallShapes*'
  done
  # Not racecheck: it slows the exhaustive sweeps down to hours.
  sanitized memcheck probe 120 "$bitattn" probe --quiet --share 0.001
fi

if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
echo "every step passed"
