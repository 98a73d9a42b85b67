#!/usr/bin/env bash
# Tests and benchmarks for a machine with a GPU, from a folder that brings its libraries.
#
#   tests/gpu.sh bundle FOLDER [FLAGS] builds and fills FOLDER; needs the CUDA toolkit, no GPU. FLAGS go to cmake:
#                                  -DKVASIR_CUDA_ARCHITECTURES=90 runs on Hopper what other cards run
#   FOLDER/bin/gpu.sh run [LOGS]   on the GPU machine: kernel tests, compute-sanitizer, benchmarks beside PyTorch
#   FOLDER/bin/gpu.sh test [LOGS]  only the tests, with compute-sanitizer
#   FOLDER/bin/gpu.sh bench [LOGS] only the benchmarks
#   FOLDER/bin/gpu.sh table [LOGS] what users of the service meet, in ten minutes: prompts, tokens and batches on all GPUs of the
#                                  machine beside transformers and beside the bytes that a step reads, one request asked again, and
#                                  how long a start takes. Writes 16 GB to /tmp
#   FOLDER/bin/gpu.sh models [LOGS] logits of each shape of model beside transformers; needs PyTorch and transformers
#
# They need a driver, and cuBLASLt and NCCL of CUDA 13. compute-sanitizer and PyTorch are optional elsewhere: a line says when
# they are absent. Whole outputs go to LOGS (default FOLDER/logs), a short table comes last. Exit status 1 if anything failed.
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

bundle() {
  set -e
  cd "$here/.."
  cmake --preset cuda "${@:2}" >/dev/null
  cmake --build --preset cuda --target \
    kernels_dense_cuda_test kernels_paged_cuda_test kernels_sparse_cuda_test kernels_attention_cuda_test \
    kernels_added_method_cuda_test kernels_ranks_cuda_test worker_cuda_test worker_cuda_parallel_test attention_cuda_bench dense_cuda_bench paging_cuda_bench \
    all_reduce_bench decode_step_bench prefill_step_bench kvasir kvasir-worker kvasir_python_proto
  rm -rf "$1"
  cmake --install build/cuda --component gpu --prefix "$1"
}

# begin NAME SECONDS COMMAND ...: starts it beside the steps that run already. Its exit status goes to a file.
begin() {
  local name=$1 seconds=$2
  shift 2
  steps+=("$name")
  {
    timeout "$seconds" "$@" >"$logs/$name.log" 2>&1
    echo $? >"$logs/$name.status"
  } &
}

# begin_parts NAME SECONDS PARTS PROGRAM: runs its tests in parts side by side, on all GPUs in turn. Models are beside bin.
begin_parts() {
  local name=$1 seconds=$2 parts=$3 part
  for ((part = 0; part < parts; ++part)); do
    begin "$name-$part" "$seconds" env --chdir="$here/.." CUDA_VISIBLE_DEVICES=$((next_gpu++ % gpus)) \
      GTEST_TOTAL_SHARDS="$parts" GTEST_SHARD_INDEX="$part" "$4"
  done
}

# count WORD: prints how many tests the logs on standard input sum up with it (PASSED, SKIPPED, FAILED).
count() {
  awk -v word="$1" '$0 ~ "^\\[ +" word " +\\] [0-9]+ tests?[,.]" {tests += $4} END {print tests + 0}'
}

# Adds how the steps ended to results.
collect() {
  local name status skipped
  for name in "${steps[@]}"; do
    status=$(cat "$logs/$name.status")
    skipped=$(count SKIPPED <"$logs/$name.log")
    if [ "$status" = 0 ] && [ "$skipped" -gt 0 ]; then
      results+=("ok      $name, $skipped skipped")
    elif [ "$status" = 0 ]; then
      results+=("ok      $name")
    else
      results+=("FAILED  $name: status $status, see $logs/$name.log")
      failed=1
    fi
  done
}

# Finds cuBLASLt and NCCL on the machine, in the CUDA toolkit or PyTorch: at hundreds of megabytes the bundle leaves them out.
find_libraries() {
  local folders library found
  folders=$(ls -d "${CUDA_HOME:-/usr/local/cuda}"/lib64 2>/dev/null
    python3 -c 'import glob, sys; print(*(f for p in sys.path for f in glob.glob(p + "/nvidia/*/lib")), sep="\n")')
  for library in libcublasLt.so.13 libnccl.so.2; do
    found=
    for folder in $folders; do
      [ -e "$folder/$library" ] && found=$folder && break
    done
    if [ -n "$found" ]; then
      export LD_LIBRARY_PATH="$found${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    elif ! ldconfig -p | grep -q "$library"; then
      results+=("absent  $library")
    fi
  done
}

# sanitized PROGRAM TOOL: prints the filters of its tests that run under the tool, a line each.
sanitized() {
  awk -v program="$1" -v tool="$2" '$1 == program && ($2 == "all" || tool != "racecheck") {print $3}' "$here/sanitized_tests.txt"
}

# A filter that chooses no test would leave its sanitizers silent.
check_sanitized() {
  local program filter
  for program in "${programs[@]}"; do
    while read -r filter; do
      "$here/kernels_${program}_cuda_test" --gtest_list_tests --gtest_filter="$filter" | grep -q '^  ' && continue
      results+=("FAILED  sanitized_tests.txt: $program has no test $filter")
      failed=1
    done < <(sanitized "$program" memcheck)
  done
}

run_tests() {
  local -A parts=([dense]=1 [paged]=2 [sparse]=8 [attention]=4)
  for program in "${programs[@]}"; do
    begin_parts "$program" 400 "${parts[$program]}" "$here/kernels_${program}_cuda_test"
  done
  begin_parts engine 600 4 "$here/worker_cuda_test"
  begin added_method 100 "$here/kernels_added_method_cuda_test"
  wait
  # Ranks wait for each other on all GPUs, which must be theirs alone. They say which cases need more GPUs.
  begin ranks 200 "$here/kernels_ranks_cuda_test"
  wait
  begin parallel 300 env --chdir="$here/.." "$here/worker_cuda_parallel_test"
  wait
  if python3 -c 'import grpc' 2>/dev/null; then
    begin service 300 env KVASIR_BUILD="$here/.." python3 "$here/../tests/e2e/ranks_on_gpus_test.py"
    wait
  else
    results+=("absent  grpcio: the service is not tested")
  fi
  if command -v compute-sanitizer >/dev/null; then
    check_sanitized
    for program in "${programs[@]}"; do
      for tool in memcheck synccheck initcheck racecheck; do
        local filter
        filter=$(sanitized "$program" "$tool" | paste -sd:)
        [ -n "$filter" ] || continue
        begin "$program-$tool" 300 env CUDA_VISIBLE_DEVICES=$((next_gpu++ % gpus)) compute-sanitizer --tool "$tool" --error-exitcode 1 \
          "$here/kernels_${program}_cuda_test" --gtest_filter="$filter"
      done
    done
    wait
  else
    results+=("absent  compute-sanitizer")
  fi
}

run_benchmarks() {
  # Benchmarks have the machine to themselves.
  begin dense_bench 120 "$here/dense_cuda_bench"
  wait
  begin attention_bench 180 "$here/attention_cuda_bench"
  wait
  begin paging_bench 120 "$here/paging_cuda_bench"
  wait
  begin decode_step_bench 120 env --chdir="$here/.." "$here/decode_step_bench" --contexts=4096,131072
  wait
  begin prefill_step_bench 120 env --chdir="$here/.." "$here/prefill_step_bench"
  wait
  if [ "$gpus" -gt 1 ]; then
    begin all_reduce_bench 120 "$here/all_reduce_bench" "$gpus"
    wait
  else
    results+=("absent  a second GPU: sums over GPUs are not timed")
  fi
  if python3 -c 'import torch' 2>/dev/null; then
    begin peer_attention 400 python3 "$here/peer_attention.py" --ours="$logs/attention_bench.log"
    wait
  else
    results+=("absent  PyTorch")
  fi
}

# Each has the machine to itself.
run_table() {
  local speed peer=transformers
  begin decode_step_bench 60 env --chdir="$here/.." "$here/decode_step_bench" --contexts=8000,32000,130000 --policies=all,quest
  wait
  speed=$(sed -n 's/.*the GPU reads \([0-9.]*\) TB.*/\1e3/p' "$logs/decode_step_bench.log")
  if ! python3 -c 'import torch, transformers' 2>/dev/null; then
    results+=("absent  PyTorch or transformers")
    peer=none
  fi
  begin service_bench 400 env KVASIR_BUILD="$here/.." python3 "$here/../tests/bench/gpu_service_bench.py" \
    --tensor-parallel-size="$gpus" --peer="$peer" ${speed:+--read-gb-per-s="$speed"}
  wait
  begin start_bench 130 python3 "$here/../tests/bench/start_bench.py" --starts=2 --kills=1 --flags=--kv-host-size-gb=40
  wait
}

run_models() {
  begin models 580 env KVASIR_BUILD="$here/.." python3 "$here/../tests/quality/models_beside_transformers.py" --device=cuda
  wait
}

# print_tables NAME ...: prints the tables in the logs of these steps, those of them that ran.
print_tables() {
  local -a files=("${@/#/$logs/}")
  cat "${files[@]/%/.log}" 2>/dev/null | awk '/^(\||ready after)/ {if (NR > last + 1) print ""; print; last = NR}'
}

# run PHASE ... LOGS
run() {
  logs=${*: -1}
  mkdir -p "$logs"
  steps=()
  results=()
  failed=0
  programs=(dense paged sparse attention)
  nvidia-smi -L || exit 1
  gpus=$(nvidia-smi -L | wc -l)
  next_gpu=0
  find_libraries
  for phase in "${@:1:$#-1}"; do "$phase"; done
  collect
  print_tables dense_bench attention_bench paging_bench decode_step_bench prefill_step_bench all_reduce_bench peer_attention \
    service_bench start_bench models
  for program in "${programs[@]}" engine ranks added_method parallel; do
    compgen -G "$logs/$program*.log" >/dev/null || continue
    ended=$(cat "$logs/$program"{,-[0-9]}.log 2>/dev/null)
    echo "$program: $(count PASSED <<<"$ended") passed, $(count SKIPPED <<<"$ended") skipped, $(count FAILED <<<"$ended") failed"
  done
  grep -hE '^\[  FAILED  \] .*\(' "$logs"/*.log | head -40
  printf '%s\n' "${results[@]}"
  exit "$failed"
}

case "${1:-}" in
  bundle) bundle "${2:?the folder to fill}" "${@:3}" ;;
  run) run run_tests run_benchmarks "${2:-$here/../logs}" ;;
  test) run run_tests "${2:-$here/../logs}" ;;
  bench) run run_benchmarks "${2:-$here/../logs}" ;;
  table) run run_table "${2:-$here/../logs}" ;;
  models) run run_models "${2:-$here/../logs}" ;;
  *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
