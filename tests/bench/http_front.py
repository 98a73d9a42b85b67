#!/usr/bin/env python3
"""Measures the time that the HTTP front adds to gRPC: streams over both in turn on one server, with the reference model.

    cmake --build build/cpu --target kvasir kvasir-worker kvasir_python_proto http_front_bench
    tests/bench/http_front.py --rounds=8

Prints, for each front, p50 and p99 of the time to the first token and from token to token over all rounds (median of the
rounds), and what HTTP adds. The load is http_front_bench, a thread a stream. Worker, server and load share the machine's
cores: --threads leaves some to the latter two, and other work on the machine spoils the figures.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import BUILD, Service  # noqa: E402

COLUMNS = ("first p50", "first p99", "gap p50", "gap p99")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100, help="of each answer")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of the worker")
    options = parser.parse_args()
    with Service(flags=[f"--max-num-seqs={options.streams}", f"--threads={options.threads}"]) as service:
        run = subprocess.run([BUILD / "tests" / "bench" / "http_front_bench", service.address, service.http_address,
                              str(options.streams), str(options.tokens), str(options.rounds)],
                             capture_output=True, text=True, check=True)
    rounds = {"grpc": [], "http": []}
    for front, *values, tokens in map(str.split, run.stdout.splitlines()):
        if front in rounds:
            assert int(tokens) == options.streams * options.tokens, f"{front}: {tokens} tokens came"
            rounds[front].append([1000 * float(value) for value in values])
    print(f"{options.streams} streams of {options.tokens} tokens, {options.rounds} rounds each in turn; ms, median (least, most) of the rounds\n")
    print("| front | " + " | ".join(COLUMNS) + " |\n|---|" + "---:|" * len(COLUMNS))
    for front, found in rounds.items():
        print(f"| {front} | " + " | ".join(f"{statistics.median(c):.2f} ({min(c):.2f}, {max(c):.2f})" for c in zip(*found)) + " |")
    added = [[h - g for g, h in zip(*pair)] for pair in zip(rounds["grpc"], rounds["http"])]
    print("| added | " + " | ".join(f"{statistics.median(c):+.2f} ({min(c):+.2f}, {max(c):+.2f})" for c in zip(*added)) + " |")


if __name__ == "__main__":
    main()
