#!/usr/bin/env bash
# Goes from a fresh clone to answers: installs packages, builds (without CUDA), starts a coordinator and
# two tensor-parallel workers with the reference model, asks eight questions about a generated document
# of about 8K tokens, and shuts down. Exits 0 when at least seven answers are exact.
#
#   deploy/quickstart.sh [--seed N] [--skip-install]
set -euo pipefail
cd "$(dirname "$0")/.."

seed=1
install=1
while (($#)); do
  case "$1" in
    --seed) seed="$2"; shift ;;
    --skip-install) install=0 ;;
    *) sed -n '2,6p' "$0"; exit 2 ;;
  esac
  shift
done

say() { printf '\n== %s\n' "$*"; }

if ((install)); then
  say "installing packages"
  deploy/install_packages.sh
fi

say "building"
cmake --preset cpu -DKVASIR_BUILD_TESTS=OFF >/dev/null
cmake --build --preset cpu --target kvasir kvasir-worker

work=$(mktemp -d)
server_pid=""
stop_server() {
  if [[ -n "$server_pid" ]]; then
    kill -TERM "$server_pid" 2>/dev/null || true
    wait "$server_pid" && status=0 || status=$?
    server_pid=""
    echo "server exit status: $status"
    return "$status"
  fi
}
trap 'stop_server || true; rm -rf "$work"' EXIT

kvasir=build/cpu/coordinator/kvasir
say "starting the server: coordinator and 2 workers"
"$kvasir" serve --model tests/model/needle-8k --tensor-parallel-size 2 --port 0 --http-port 0 --metrics-port 0 \
  --ready-file "$work/ready" >"$work/server.log" 2>&1 &
server_pid=$!
for _ in $(seq 600); do
  [[ -s "$work/ready" ]] && break
  if ! kill -0 "$server_pid" 2>/dev/null; then
    cat "$work/server.log"
    exit 1
  fi
  sleep 0.1
done
if [[ ! -s "$work/ready" ]]; then
  cat "$work/server.log"
  echo "the server was not ready within 60 s"
  exit 1
fi
address=$(sed -n 's/^grpc: //p' "$work/ready")
metrics=$(sed -n 's/^metrics: //p' "$work/ready")

say "a document of about 8K tokens and 8 questions (seed $seed)"
python3 tests/model/documents.py --task multi_key --tokens 8000 --questions 8 --seed "$seed" \
  >"$work/document.json"
python3 - "$work" <<'PY'
import json, pathlib, sys
work = pathlib.Path(sys.argv[1])
document = json.loads((work / "document.json").read_text())
for i, question in enumerate(document["questions"]):
    (work / f"prompt-{i}").write_text(document["text"] + question["prompt"])
    (work / f"question-{i}").write_text(question["prompt"] + "\n")
    (work / f"answer-{i}").write_text(question["answer"])
PY

exact=0
for i in 0 1 2 3 4 5 6 7; do
  say "question $((i + 1)): $(cat "$work/question-$i")"
  "$kvasir" generate --server "$address" --prompt-file "$work/prompt-$i" --max-tokens 24 --stop . |
    tee "$work/answer"
  expected=$(cat "$work/answer-$i")
  if [[ "$(tr -d '[:space:]' <"$work/answer")" == "$(tr -d '[:space:].' <<<"$expected")" ]]; then
    exact=$((exact + 1))
  else
    echo "expected: $expected"
  fi
done

# Each process serves its own metrics: the coordinator those of requests and the prefix cache, the workers
# those of attention and tiers.
coordinator_metrics=(
  kvasir_prompt_tokens_cached_by_source_total
  kvasir_prefix_cache_queries_total
  kvasir_prefix_cache_hits_total
  kvasir_generation_tokens_total
)
worker_metrics=(
  kvasir_attention_blocks_total
  kvasir_attention_blocks_skipped_total
  kvasir_kv_page_lookups_total
)
say "metrics of the coordinator ($metrics)"
deploy/print_metrics.py "$metrics" "${coordinator_metrics[@]}"
for worker in $(sed -n 's/^worker-[0-9]*: //p' "$work/ready"); do
  say "metrics of a worker ($worker)"
  deploy/print_metrics.py "$worker" "${worker_metrics[@]}"
done

say "shutting down"
stop_server
echo "exact answers: $exact of 8"
((exact >= 7))
