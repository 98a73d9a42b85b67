#!/usr/bin/env python3
"""Time between the tokens of running streams while a long prompt is read: by another server (--prefill-servers), by their
own, and while there is none.

    tests/bench/prefill_beside_streams.py --build build/cpu
    tests/bench/prefill_beside_streams.py --build build/cpu --large --read-before --tokens=12288   # into fresh memory at first
    tests/bench/prefill_beside_streams.py --build out/gpu --gpus=0,1 --shape=tests/model/shapes/llama-3.1-8b   # a GPU for each

On a CPU each server has one core for itself. The client, which does little, shares that of the server that prefills, and goes
first there. With --large a block has as much KV as a large model's, and the prompt is read with a window; with --read-before
the other server has read the prompt already, so that its blocks come as fast as they can. `fetched` is the least share of
the prompt's blocks that came from the server which read it.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))


STREAM_PROMPT = 500  # tokens
LARGE_BYTES_PER_TOKEN = 32 * 4 * 128 * 2 * 4  # layers, KV heads, head_dim, K and V, fp32: 8 MiB a block


def on_core(core):
    return lambda: os.sched_setaffinity(0, {core})


class Streams:
    """Answers that go on until they are cancelled; the times of their tokens."""

    def __init__(self, service, count, prompt_of, max_tokens):
        self.calls = [service.stream(prompt_of(i), max_tokens=max_tokens, ignore_eos=True) for i in range(count)]
        self.times = [[] for _ in range(count)]
        self.ended = []  # why, before they were cancelled
        self.threads = [threading.Thread(target=self._read, args=(i,)) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def _read(self, index):
        import grpc

        try:
            for response in self.calls[index]:
                if response.WhichOneof("event") == "tokens":
                    self.times[index].append(time.monotonic())
            self.ended.append(f"it has all of its {len(self.times[index])} tokens")
        except grpc.RpcError as error:
            self.ended.append(error.details())

    def check(self):
        if self.ended:
            sys.exit(f"a stream ended too early: {self.ended[0]}")

    def stop(self):
        for call in self.calls:
            call.cancel()
        for thread in self.threads:
            thread.join()

    def gaps(self, begin, end):
        return [later - earlier for times in self.times for earlier, later in zip(times, times[1:]) if begin <= later <= end]


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def on_gpu(gpu):
    return lambda: os.environ.update(CUDA_VISIBLE_DEVICES=gpu)


class Pair:
    """A server that prefills and one that decodes, each on a core of its own, with a random model, or on a GPU."""

    def __init__(self, folder, tokens, gpus, shape, large):
        from support.peers import free_ports
        from support.service import Service
        from support.tiny_model import make_tiny_model
        from support.worker import write_secret

        from padded_tokenizer import copy_shape
        from prefill_first_token import WINDOW

        self.tokens = tokens  # prompts from this length on are read by the other server
        first = free_ports(2)
        if gpus:
            model, places = folder, [on_gpu(gpu) for gpu in gpus]
            copy_shape(shape, folder)
            flags = ["--device=cuda", "--dtype=bfloat16", "--load-format=dummy", "--kv-host-size-gb=20"]
        elif large:
            model, places = make_tiny_model(folder / "model", kv_heads=4, layers=32, head_dim=128), [on_core(0), on_core(1)]
            host = 2.4 * tokens * LARGE_BYTES_PER_TOKEN / 1e9
            flags = ["--threads=1", f"--kv-host-size-gb={host}", "--kv-device-size-gb=0.5", *WINDOW]
        else:
            model, places = make_tiny_model(folder / "model"), [on_core(0), on_core(1)]
            flags = ["--threads=1", "--kv-host-size-gb=2", "--kv-device-size-gb=0.5"]
        max_model_len = 2 * tokens if large else max(2 * tokens, 32768)
        self.answer_tokens = min(20000, max_model_len - STREAM_PROMPT)
        flags += [f"--peer-secret-file={write_secret(folder, 'secret')}", "--mass-sample-rate=0",
                  f"--max-model-len={max_model_len}", "--allow-long-max-model-len"]
        self.prefill = Service(model=model, preexec=places[0], flags=[*flags, f"--peer-listen=127.0.0.1:{first}"])
        self.decode = Service(model=model, preexec=places[1], flags=[
            *flags, f"--peer-listen=127.0.0.1:{first + 1}", f"--peers=127.0.0.1:{first}",
            f"--prefill-servers={self.prefill.address}", f"--prefill-min-tokens={tokens}"])
        self.decode.wait_for_log(": linked, for blocks of")

    def play(self, seed, num_streams, prompt_tokens, seconds, read_before):
        """Times between tokens of streams while a prompt is read, or for `seconds` if it is empty; how long that took; and the share
        of the prompt's blocks that came from the other server."""
        from support.peers import make_prompt, shared_tokens
        from support.service import read_stream

        if read_before and prompt_tokens >= self.tokens:
            self.prefill.generate(make_prompt(seed, prompt_tokens), max_tokens=1)
        streams = Streams(self.decode, num_streams, lambda i: make_prompt(seed * 100 + i, STREAM_PROMPT), self.answer_tokens)
        while any(len(times) < 100 for times in streams.times):
            streams.check()
            time.sleep(0.01)
        begin, fetched = time.monotonic(), 0
        if prompt_tokens:
            answer = read_stream(self.decode.stream(make_prompt(seed, prompt_tokens), max_tokens=1))
            fetched = answer.finish.usage.cached_tokens.peer / shared_tokens(prompt_tokens)
        else:
            time.sleep(seconds)
        end = time.monotonic()
        streams.check()
        streams.stop()
        return streams.gaps(begin, end), end - begin, fetched

    def close(self):
        for service in (self.decode, self.prefill):
            service.__exit__(None, None, None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/cpu")
    parser.add_argument("--tokens", type=int, default=32768, help="length of the prompt")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpus", default="", help="of the server that prefills and of the one that decodes: 0,1")
    parser.add_argument("--shape", default="tests/model/shapes/llama-3.1-8b", help="the model on GPUs, with random weights")
    parser.add_argument("--large", action="store_true", help="a model with 8 MiB of KV a block")
    parser.add_argument("--read-before", action="store_true", help="the other server has read the prompt before")
    args = parser.parse_args()
    os.environ["KVASIR_BUILD"] = args.build

    gpus = args.gpus.split(",") if args.gpus else []
    pair = Pair(pathlib.Path(tempfile.mkdtemp(prefix="kvasir-prefill-bench-")), args.tokens, gpus, args.shape, args.large)
    if not gpus:
        on_core(0)()
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    # One token less than what the other server reads: the streams' own reads it.
    cases = {"read by another server": args.tokens, "none": 0, "read by the streams' own": args.tokens - 1}
    gaps = {name: [] for name in cases}
    took = {name: [] for name in cases}
    fetched = {name: [] for name in cases}
    seconds = 0
    for number in range(args.rounds * len(cases)):
        name = list(cases)[number % len(cases)]
        round_gaps, seconds, share = pair.play(number + 1, args.streams, cases[name], seconds, args.read_before)
        gaps[name].append([1000 * gap for gap in round_gaps])
        took[name].append(seconds)
        fetched[name].append(share)
    pair.close()
    print(f"{args.streams} streams, a prompt of {args.tokens} tokens, {args.rounds} rounds\n\n"
          "| prompt | first token after, s | tokens | p50, ms | p99, ms | longest, ms | p99 of each round, ms | fetched, % |\n" + "|---" * 8 + "|")
    for name in cases:
        every = sum(gaps[name], [])
        first_token = "-" if name == "none" else f"{statistics.median(took[name]):.2f}"
        rounds = ", ".join(f"{percentile(round_gaps, 0.99):.2f}" for round_gaps in gaps[name])
        print(f"| {name} | {first_token} | {len(every)} | {percentile(every, 0.5):.2f} | {percentile(every, 0.99):.2f} | "
              f"{max(every):.1f} | {rounds} | {100 * min(fetched[name]):.0f} |")
    beside, alone = (percentile(sum(gaps[name], []), 0.99) for name in ("read by another server", "none"))
    print(f"\np99 beside a prompt that another server reads, of that without one: {beside / alone:.2f}")


if __name__ == "__main__":
    main()
