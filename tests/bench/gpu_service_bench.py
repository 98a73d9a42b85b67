#!/usr/bin/env python3
"""The service as its users meet it, beside Hugging Face transformers with `sdpa`: one call, one card, one set of tables.

Random weights of a published shape, dense and with the selector quest. transformers is measured first
and leaves the card to the service; its batches are static. Times of the service are those of
`kvasir bench`, over gRPC, tokenization included. Needs grpcio; without torch and transformers there is no peer.

    tests/gpu.sh bundle out/gpu && out/gpu/bin/gpu.sh table            # on a GPU machine
    tests/bench/gpu_service_bench.py --tensor-parallel-size=2 --lengths=8000,130000 --long-streams=4x130000 --peer=none
    tests/bench/gpu_service_bench.py --device=cpu --peer=none --shape=../needle-8k --lengths=500,2000 --batches=1,4,70 \
        --max-tokens=16 --flags=--max-num-batched-tokens=4096 --read-gb-per-s=$(tests/bench/read_speed.py 2)

The tables: prompts by length; tokens of one stream by length of its context; with --long-streams, streams of long
prompts that come together; steps of many streams; tokens of one request that is asked twice, alone and among others.
"Bytes alone" is the time in which a card reads what a step must read, at its own speed: weights, keys and values that
are attended to, and quest's bounds of pages. "Share" is that over the time between tokens.
"""

import argparse
import gc
import json
import math
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

SINK, WINDOW, BUDGET = 128, 1024, 2048
QUEST = f"{{quest: {{}}, sink_tokens: {SINK}, window_tokens: {WINDOW}, token_budget: {BUDGET}}}"
POLICIES = f"""
- name: quest
  prefill: {QUEST}
  decode: {QUEST}
- name: quest-decode
  prefill: {{all: {{}}}}
  decode: {QUEST}
"""
STREAM_TOKENS = 1024
PEER_STREAMS = 64  # at most
# More streams than this have a server of their own with smaller chunks: with buffers for chunks of 8,192 tokens the KV of 256
# streams of 1,024 tokens does not fit into 80 GB beside the weights, and what is measured would be paging.
LARGE_BATCH = 64
LARGE_BATCH_FLAGS = ["--max-num-batched-tokens=2048"]
ANSWER_TOKENS = 129  # of one stream
LONG_ANSWER_TOKENS = 513  # most tokens come after all prompts are read


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

    def gaps(self):
        """Returns how many gaps before steps rank 0 has had, at most as long as each bound in seconds, and the sum of all."""
        worker = self.service.worker_metrics[0]
        buckets = {float(re.search(r'le="([^"]+)"', name)[1]): count for name, count in self.service.metrics(worker).items()
                   if name.startswith("kvasir_step_gap_seconds_bucket")}
        return buckets, self.service.metric("kvasir_step_gap_seconds_sum", worker)


class Floor:
    """The least milliseconds of a step of decode: those in which each rank reads its share of the step's bytes."""

    PAGE_TOKENS = 64

    def __init__(self, config, ranks, gb_per_s):
        hidden, heads, kv_heads = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        row = 2 * config.get("head_dim", hidden // heads)  # bytes in bfloat16
        layer = 2 * row * (heads + kv_heads) + 6 * config["intermediate_size"]
        self.weights = hidden * (config["num_hidden_layers"] * layer + 2 * config["vocab_size"])  # embeddings are not read
        self.token = 2 * row * kv_heads * config["num_hidden_layers"]
        self.bytes_per_ms = ranks * gb_per_s * 1e6

    def cells(self, ms, streams, context, quest=False):
        """Returns the cells of the floor and of its share of `ms`, empty where the speed of reading is not known."""
        if self.bytes_per_ms == 0:
            return "", ""
        attended = min(context, SINK + WINDOW + BUDGET) if quest else context
        bounds = context / self.PAGE_TOKENS if quest else 0  # a page's are as large as a token
        floor = (self.weights + streams * self.token * (attended + bounds)) / self.bytes_per_ms
        return floor, floor / ms


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


def measure_prompts(bench, peer, floor, lengths):
    print_head("prompt tokens", "transformers reads, ms", "dense, ms", "over transformers", "quest, ms")
    rows = []
    for tokens in lengths:
        theirs = peer.get((tokens, 1))
        ours = {policy: bench.run(streams=1, requests=3, prompt_tokens=tokens, max_tokens=ANSWER_TOKENS, policy=policy)
                for policy in ("", "quest", "quest-decode")}
        first = {policy: result["time_to_first_token_ms"]["p50"] for policy, result in ours.items()}
        after = {policy: result["inter_token_latency_ms"]["p50"] for policy, result in ours.items()}
        print_row(tokens, theirs[0] if theirs else "", first[""], first[""] / theirs[0] if theirs else "", first["quest"])
        context = tokens + ANSWER_TOKENS // 2
        rows.append([tokens, theirs[1] if theirs else "", after[""], *floor.cells(after[""], 1, context), after["quest-decode"],
                     *floor.cells(after["quest-decode"], 1, context, quest=True)])
    print_head("one stream after tokens", "transformers, ms a token", "dense, ms", "bytes alone, ms", "share",
               "quest after a dense prompt, ms", "bytes alone, ms", "share")
    for row in rows:
        print_row(*row)


def print_batches_head():
    print_head("streams", "transformers, ms a step", "ms between tokens, p50", "bytes alone, ms", "share", "p99", "tokens a second",
               "gap before a step, us, p50 at most", "mean, us", "coordinator's CPU, us a token")


def measure_batches(bench, peer, floor, batches, max_tokens):
    """Steps of streams that decode together. A gap is the time before a step in which rank 0 has none while a request waits
    for it; CPU is the coordinator's."""
    for streams in batches:
        theirs = peer.get((STREAM_TOKENS, streams), ("", ""))[1]
        cpu, (counts, seconds) = bench.coordinator_seconds(), bench.gaps()
        result = bench.run(streams=streams, requests=streams, prompt_tokens=STREAM_TOKENS, max_tokens=max_tokens)
        cpu, (counts_after, seconds_after) = bench.coordinator_seconds() - cpu, bench.gaps()
        gaps = {bound: count - counts[bound] for bound, count in counts_after.items()}
        number = gaps[math.inf]
        median = min(bound for bound, count in gaps.items() if 2 * count >= number)
        latency = result["inter_token_latency_ms"]
        tokens = result["generated_tokens"]
        print_row(streams, theirs, latency["p50"], *floor.cells(latency["p50"], streams, STREAM_TOKENS + max_tokens // 2),
                  latency["p99"], result["generated_tokens_per_s"], 1e6 * median, 1e6 * (seconds_after - seconds) / number,
                  1e6 * cpu / tokens)


def measure_long_streams(bench, cases):
    """Streams of long prompts that come together: the first tokens wait for the prompts before them."""
    print_head("streams", "of tokens", "policy", "s to the first token, p50", "ms between tokens, p50", "p99", "tokens a second, all")
    for streams, length in cases:
        for policy in ("", "quest"):
            result = bench.run(streams=streams, requests=streams, prompt_tokens=length, max_tokens=LONG_ANSWER_TOKENS, policy=policy)
            latency = result["inter_token_latency_ms"]
            print_row(streams, length, policy or "dense", result["time_to_first_token_ms"]["p50"] / 1e3, latency["p50"],
                      latency["p99"], result["generated_tokens_per_s"])


def measure_repeats(service, vocab_size):
    """One request alone twice, and among 15 others that differ in length; prefixes are not shared."""
    def ask(tenant, length=3000):
        return service.generate([(17 * i * i + 29 * length) % vocab_size for i in range(length)], max_tokens=32, ignore_eos=True,
                                tenant_id=tenant)
    alone = ask("alone").token_ids
    again = ask("again").token_ids
    with ThreadPoolExecutor(16) as pool:
        others = [pool.submit(ask, f"other-{i}", 1000 + 211 * i) for i in range(15)]
        among = pool.submit(ask, "among").result().token_ids
        for other in others:
            other.result()
    print_head("one request", "of 32 tokens, equal")
    print_row("asked again", sum(a == b for a, b in zip(alone, again)))
    print_row("among 15 others", sum(a == b for a, b in zip(alone, among)))


def warmed_up(service):
    bench = Bench(service)
    bench.run(streams=4, requests=4, prompt_tokens=1000, max_tokens=8)
    return bench


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="of tests/model/shapes (default llama-3.1-8b)")
    parser.add_argument("--lengths", default="8000,32000,130000", help="prompt tokens (default 8000,32000,130000)")
    parser.add_argument("--batches", default="1,8,16,32,64,256", help="streams (default 1,8,16,32,64,256)")
    parser.add_argument("--long-streams", default="", help="more streams, as 4x130000,2x510000 (default none)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of each stream of a batch (default 256)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--peer", default="transformers", choices=("transformers", "none"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--read-gb-per-s", type=float, default=0,
                        help="speed at which one card reads its memory; without it nothing is said of bytes alone")
    parser.add_argument("--flags", default="--max-num-batched-tokens=8192 --kv-host-size-gb=60", help="more flags of the service")
    arguments = parser.parse_args()
    lengths, batches = [[int(number) for number in text.split(",") if number] for text in (arguments.lengths, arguments.batches)]
    long_streams = [[int(number) for number in case.split("x")] for case in arguments.long_streams.split(",") if case]
    shape = ROOT / "tests" / "model" / "shapes" / arguments.shape
    config = json.loads((shape / "config.json").read_text())
    floor = Floor(config, arguments.tensor_parallel_size, arguments.read_gb_per_s)
    peer = measure_peer(shape, arguments, lengths, batches) if arguments.peer == "transformers" else {}
    small, large = [n for n in batches if n <= LARGE_BATCH], [n for n in batches if n > LARGE_BATCH]
    with tempfile.TemporaryDirectory(prefix="kvasir-shape-") as folder:
        copy_shape(shape, folder)
        policies = pathlib.Path(folder) / "policies.yaml"
        policies.write_text(POLICIES)
        flags = [f"--device={arguments.device}", "--load-format=dummy", "--dtype=bfloat16", f"--policies={policies}",
                 f"--tensor-parallel-size={arguments.tensor_parallel_size}", "--mass-sample-rate=0",
                 "--enable-prefix-caching=false", *shlex.split(arguments.flags)]
        with Service(folder, [*flags, f"--max-num-seqs={max([16, *small])}"]) as service:
            bench = warmed_up(service)
            measure_repeats(service, config["vocab_size"])
            measure_prompts(bench, peer, floor, lengths)
            if long_streams:
                measure_long_streams(bench, long_streams)
            print_batches_head()
            measure_batches(bench, peer, floor, small, arguments.max_tokens)
        if large:
            with Service(folder, [*flags, *LARGE_BATCH_FLAGS, f"--max-num-seqs={max(large)}"]) as service:
                measure_batches(warmed_up(service), peer, floor, large, arguments.max_tokens)


if __name__ == "__main__":
    main()
