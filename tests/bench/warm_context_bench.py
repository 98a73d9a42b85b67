#!/usr/bin/env python3
"""Contexts that lie in the host tier, and are asked again: time to the first token, and between tokens, beside the same context
in the device tier and beside a first reading.

    tests/bench/warm_context_bench.py                                                           # needs a GPU
    tests/bench/warm_context_bench.py --programs=old=OTHER/coordinator/kvasir,new=BUILD/coordinator/kvasir   # one after the other

Random weights. The device tier has room for one context and a half, and three take turns, so that each lies in the host tier
when its turn comes; "device" asks the same context once more at once. Each question ends with tokens that no question had
before. Medians over the contexts; gaps are those between the first tokens and the mean over all.
"""

import argparse
import pathlib
import random
import re
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from support.service import KVASIR, ROOT, Service  # noqa: E402

import gpu_service_bench  # noqa: E402
from padded_tokenizer import copy_shape  # noqa: E402

CONTEXTS = 3
ANSWER = 128
POLICIES = {"dense": "", "dense prompt, quest": "quest-decode", "quest": "quest"}


def tokens_of(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(3, 1400) for _ in range(count)]


class Asked:
    """One request: milliseconds to its first token, those between its tokens, and where its prefix lay."""

    def __init__(self, service, prompt, policy):
        times, begin = [], time.monotonic()
        for response in service.stream(prompt, max_tokens=ANSWER, ignore_eos=True, policy=policy):
            if response.tokens.token_ids:
                times.append(time.monotonic())
            if response.WhichOneof("event") == "finish":
                self.cached = response.finish.usage.cached_tokens
        self.first = 1000 * (times[0] - begin)
        self.gaps = [1000 * (later - earlier) for earlier, later in zip(times, times[1:])]


def wait_until_pinned(service, seconds=60):
    """The host tier is pinned beside the first steps, which disturbs them."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pinned = re.findall(r"host tier: (\d+) of (\d+)", service.log())
        if pinned and pinned[-1][0] == pinned[-1][1]:
            return
        time.sleep(0.2)
    sys.exit(f"the host tier is not pinned after {seconds} s: {service.log()}")


def measure(service, name, arguments):
    seed = 0
    for label, policy in POLICIES.items():
        rows = {}
        seed += 1000
        contexts = [tokens_of(seed + i, arguments.context) for i in range(CONTEXTS)]
        rows["first reading", arguments.context] = [Asked(service, context, policy) for context in contexts]
        for new in arguments.new_tokens:
            for context in contexts:
                for where in ("host", "device"):
                    seed += 10
                    rows.setdefault((where, new), []).append(Asked(service, context + tokens_of(seed, new), policy))
        for (where, new), asked in rows.items():
            first = statistics.median(one.first for one in asked)
            gaps = [statistics.median(one.gaps[i] for one in asked) for i in range(4)]
            mean = statistics.median(statistics.mean(one.gaps) for one in asked)
            cached = [statistics.median_low(getattr(one.cached, tier) for one in asked) for tier in ("device", "host")]
            print(f"| {name} | {label} | {where} | {new} | {cached[0]} | {cached[1]} | {first:.0f} | "
                  f"{', '.join(f'{gap:.1f}' for gap in gaps)} | {mean:.2f} | {max(max(one.gaps) for one in asked):.1f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="of tests/model/shapes (default llama-3.1-8b)")
    parser.add_argument("--context", type=int, default=32704, help="tokens of each context (default 32704)")
    parser.add_argument("--new-tokens", default="64,1024", help="tokens after the context (default 64,1024)")
    parser.add_argument("--kv-bytes-per-token", type=int, default=131072, help="of the shape (default 131072)")
    parser.add_argument("--programs", default=str(KVASIR), help="kvasir of several builds, NAME=PATH,... (default: this build's)")
    arguments = parser.parse_args()
    arguments.new_tokens = [int(number) for number in arguments.new_tokens.split(",")]
    context = arguments.context * arguments.kv_bytes_per_token / 1e9
    with tempfile.TemporaryDirectory(prefix="kvasir-shape-") as folder:
        copy_shape(ROOT / "tests" / "model" / "shapes" / arguments.shape, folder)
        policies = pathlib.Path(folder) / "policies.yaml"
        policies.write_text(gpu_service_bench.POLICIES)
        flags = ["--device=cuda", "--load-format=dummy", "--dtype=bfloat16", "--mass-sample-rate=0", "--max-num-batched-tokens=8192",
                 f"--kv-device-size-gb={1.5 * context:.1f}", f"--kv-host-size-gb={1.6 * CONTEXTS * context:.1f}",
                 f"--policies={policies}"]
        print("| build | policy | prefix in | new tokens | from device | from host | first token, ms | then, ms | mean | longest |")
        print("|---" * 10 + "|")
        for program in arguments.programs.split(","):
            name, _, path = program.rpartition("=")
            with Service(folder, flags, program=path) as service:
                wait_until_pinned(service)
                measure(service, name, arguments)


if __name__ == "__main__":
    main()
