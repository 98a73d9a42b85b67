#!/usr/bin/env python3
"""The service as its users meet it, beside Hugging Face transformers with `sdpa`: one call, one card, one set of tables.

Random weights of a published shape, dense and with the selector quest. transformers is measured first
and leaves the card to the service; its batches are static. Times of the service are those of
`kvasir bench`, over gRPC, tokenization included. Needs grpcio; without torch and transformers there is no peer.

    tests/gpu.sh bundle out/gpu && out/gpu/bin/gpu.sh service          # on a GPU machine
    tests/bench/gpu_service_bench.py --tensor-parallel-size=2 --lengths=8000,130000,510000 --peer=none

The tables: prompts by length; tokens of one stream by length of its context; steps of many streams; tokens of one request
that is asked twice, alone and among others.
"""

import argparse
import gc
import json
import os
import pathlib
import random
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import KVASIR, ROOT, Service  # noqa: E402

from padded_tokenizer import copy_shape  # noqa: E402

POLICIES = """
- name: quest
  prefill: {quest: {}, sink_tokens: 128, window_tokens: 1024, token_budget: 2048}
  decode: {quest: {}, sink_tokens: 128, window_tokens: 1024, token_budget: 2048}
- name: quest-decode
  prefill: {all: {}}
  decode: {quest: {}, sink_tokens: 128, window_tokens: 1024, token_budget: 2048}
"""
STREAM_TOKENS = 1024
PEER_STREAMS = 64  # at most


class Bench:
    def __init__(self, service):
        self.service = service

    def run(self, **flags):
        """Runs `kvasir bench` and returns its JSON."""
        command = [str(KVASIR), "bench", f"--server={self.service.address}", "--json", "--quiet",
                   *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}\n{self.service.log()}")
        return json.loads(done.stdout)

    def coordinator_seconds(self):
        fields = pathlib.Path(f"/proc/{self.service.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def steps(self):
        """Returns the number of steps of rank 0 and the seconds that they took."""
        text = self.service.metrics_text(self.service.worker_metrics[0])
        return [float(re.search(rf"^kvasir_step_seconds_{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)[1]) for name in ("count", "sum")]


def print_row(*cells):
    print("| " + " | ".join(f"{cell:.3g}" if isinstance(cell, float) and cell < 100 else f"{cell:.0f}" if isinstance(cell, float)
                            else str(cell) for cell in cells) + " |", flush=True)


def print_head(*cells):
    print()
    print_row(*cells)
    print("|" + "---|" * len(cells), flush=True)


def measure_peer(shape, arguments, lengths, batches):
    """Returns milliseconds of reading and of a step of transformers by (tokens, streams): the better of two rounds after
    one that warms up. The card's memory is free again afterwards."""
    from against_transformers import Peer  # needs torch and transformers, which a call without a peer does not
    peer = Peer(argparse.Namespace(model=shape, dummy=True, device=arguments.device, threads=os.cpu_count()))
    measured = {}
    for tokens, streams in [(length, 1) for length in lengths] + [(STREAM_TOKENS, n) for n in batches if n <= PEER_STREAMS]:
        rounds = []
        for seed in range(3):
            prompt = random.Random(seed).choices(range(1000, 100_000), k=tokens)
            rounds.append([1e3 * seconds for seconds in peer.measure(prompt, new_tokens=8, streams=streams)[1:]])
        measured[tokens, streams] = min(rounds[1:])
    del peer
    gc.collect()
    if arguments.device == "cuda":
        import torch
        torch.cuda.empty_cache()  # otherwise PyTorch keeps what it had
    return measured


def measure_prompts(bench, peer, lengths):
    print_head("prompt tokens", "transformers, ms", "dense, ms", "over transformers", "quest, ms", "then a token: transformers, ms",
               "dense, ms", "quest after a dense prompt, ms")
    for tokens in lengths:
        theirs = peer.get((tokens, 1))
        ours = {policy: bench.run(streams=1, requests=3, prompt_tokens=tokens, max_tokens=129, policy=policy)
                for policy in ("", "quest", "quest-decode")}
        first = {policy: result["time_to_first_token_ms"]["p50"] for policy, result in ours.items()}
        after = {policy: result["inter_token_latency_ms"]["p50"] for policy, result in ours.items()}
        print_row(tokens, theirs[0] if theirs else "", first[""], first[""] / theirs[0] if theirs else "", first["quest"],
                  theirs[1] if theirs else "", after[""], after["quest-decode"])


def measure_batches(bench, peer, batches, max_tokens):
    """Steps of streams that decode together. Gaps are what rank 0 does not spend in steps; CPU is the coordinator's."""
    print_head("streams", "transformers, ms a step", "ms between tokens, p50", "p99", "tokens a second", "gap between steps, us, mean",
               "coordinator's CPU, us a token")
    for streams in batches:
        theirs = peer.get((STREAM_TOKENS, streams), ("", ""))[1]
        cpu, (steps, busy) = bench.coordinator_seconds(), bench.steps()
        result = bench.run(streams=streams, requests=streams, prompt_tokens=STREAM_TOKENS, max_tokens=max_tokens)
        cpu, (steps, busy) = bench.coordinator_seconds() - cpu, [now - then for now, then in zip(bench.steps(), (steps, busy))]
        latency = result["inter_token_latency_ms"]
        tokens = result["generated_tokens"]
        print_row(streams, theirs, latency["p50"], latency["p99"], result["generated_tokens_per_s"],
                  1e6 * (result["seconds"] - busy) / steps, 1e6 * cpu / tokens)


def measure_repeats(service):
    """One request alone twice, and among 15 others that differ in length; prefixes are not shared."""
    def ask(tenant, length=3000):
        return service.generate([(17 * i * i + 29 * length) % 90_000 + 1000 for i in range(length)], max_tokens=32, ignore_eos=True,
                                tenant_id=tenant)
    alone = ask("alone").token_ids
    again = ask("again").token_ids
    with ThreadPoolExecutor(16) as pool:
        others = [pool.submit(ask, f"other-{i}", 1000 + 211 * i) for i in range(15)]
        among = pool.submit(ask, "among").result().token_ids
        for other in others:
            other.result()
    print(f"\nof 32 tokens, equal when asked again: {sum(a == b for a, b in zip(alone, again))}, among 15 others: "
          f"{sum(a == b for a, b in zip(alone, among))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="of tests/model/shapes (default llama-3.1-8b)")
    parser.add_argument("--lengths", default="8000,32000,130000", help="prompt tokens (default 8000,32000,130000)")
    parser.add_argument("--batches", default="1,8,16,32,64,256", help="streams (default 1,8,16,32,64,256)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of each stream of a batch (default 256)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--peer", default="transformers", choices=("transformers", "none"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--flags", default="--max-num-batched-tokens=8192 --kv-host-size-gb=60", help="more flags of the service")
    arguments = parser.parse_args()
    numbers = [[int(number) for number in text.split(",") if number] for text in (arguments.lengths, arguments.batches)]
    shape = ROOT / "tests" / "model" / "shapes" / arguments.shape
    peer = measure_peer(shape, arguments, *numbers) if arguments.peer == "transformers" else {}
    with tempfile.TemporaryDirectory(prefix="kvasir-shape-") as folder:
        copy_shape(shape, folder)
        policies = pathlib.Path(folder) / "policies.yaml"
        policies.write_text(POLICIES)
        flags = [f"--device={arguments.device}", "--load-format=dummy", "--dtype=bfloat16", f"--policies={policies}",
                 f"--tensor-parallel-size={arguments.tensor_parallel_size}", f"--max-num-seqs={max([16, *numbers[1]])}",
                 "--mass-sample-rate=0", "--enable-prefix-caching=false", *shlex.split(arguments.flags)]
        with Service(folder, flags) as service:
            bench = Bench(service)
            bench.run(streams=4, requests=4, prompt_tokens=1000, max_tokens=8)
            measure_prompts(bench, peer, numbers[0])
            measure_batches(bench, peer, numbers[1], arguments.max_tokens)
            measure_repeats(service)


if __name__ == "__main__":
    main()
