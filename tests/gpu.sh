#!/usr/bin/env bash
# What can be proven on a machine with a GPU (sm_90a), from a folder that brings its libraries.
#
#   tests/gpu.sh bundle FOLDER     where the CUDA toolkit is, no GPU needed: builds, and fills FOLDER
#   FOLDER/bin/gpu.sh run [LOGS]   on the GPU machine: kernel tests, compute-sanitizer, benchmarks beside PyTorch
#
# `run` needs a driver of CUDA 13; compute-sanitizer and PyTorch where they are to be used, and says when they are not
# there. Whole outputs go to LOGS (default FOLDER/logs), a short table comes last. Exit status 1 if anything failed.
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

bundle() {
  set -e
  cd "$here/.."
  cmake --preset cuda >/dev/null
  cmake --build --preset cuda --target kernels_attention_cuda_test attention_cuda_bench
  rm -rf "$1"
  cmake --install build/cuda --component gpu --prefix "$1"
}

# step NAME SECONDS COMMAND ...: runs it, and notes how it ended.
step() {
  local name=$1 seconds=$2
  shift 2
  if timeout "$seconds" "$@" >"$logs/$name.log" 2>&1; then
    results+=("ok      $name")
  else
    results+=("FAILED  $name: status $?, see $logs/$name.log")
    failed=1
  fi
}

run() {
  logs=${1:-$here/../logs}
  mkdir -p "$logs"
  results=()
  failed=0
  nvidia-smi -L || exit 1
  local test="$here/kernels_attention_cuda_test"
  step kernels 240 "$test"
  # Shapes of each kind and size: sanitizers are slow.
  local few='*ListsWith*/7:*ARowWithout*/2:*PrefillOver*/7:*HostTier*/5:*AbsentPages*/6'
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck synccheck initcheck; do
      step "$tool" 120 compute-sanitizer --tool "$tool" --error-exitcode 1 "$test" --gtest_filter="$few"
    done
  else
    results+=("absent  compute-sanitizer")
  fi
  step attention_bench 120 "$here/attention_cuda_bench"
  if python3 -c 'import torch' 2>/dev/null; then
    step peer_attention 180 python3 "$here/peer_attention.py"
  else
    results+=("absent  PyTorch")
  fi
  grep -h '^|' "$logs/attention_bench.log" "$logs/peer_attention.log" 2>/dev/null
  grep -hE '^\[  (PASSED|FAILED)' "$logs/kernels.log" | head -20
  printf '%s\n' "${results[@]}"
  exit "$failed"
}

case "${1:-}" in
  bundle) bundle "${2:?the folder to fill}" ;;
  run) run "${2:-}" ;;
  *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
