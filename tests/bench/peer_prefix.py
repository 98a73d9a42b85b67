#!/usr/bin/env python3
"""A prompt's prefix that a replica of another degree has read, fetched over each transport: time and bandwidth of the fetch,
and of the first token, beside computing it and beside ucx_perftest's puts, in turn.

    tests/bench/peer_prefix.py --build build/cpu

The model is random, and has a large one's KV: 1 MiB a block of 64 tokens and KV head, of which it has two. Its prompts are
read with a window, so that they are read soon. ucx_perftest (Debian's ucx-utils) puts the same bytes again and again: 1 MiB,
which stay in a core's cache, and through shared memory also 256 MiB, which come from memory as a prefix does. The first
prompt that a server fetches takes memory from the system, later ones use it again: the first is printed apart from the
medians of the others.
"""

import argparse
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1]), str(pathlib.Path(__file__).resolve().parent)]
from peer_bandwidth import COUNTS, perftest_put  # noqa: E402

MIB = 1 << 20
PUT_BYTES, LARGE_PUT_BYTES, LARGE_PUTS = MIB, 256 * MIB, 4
LAYERS, HEAD_DIM = 16, 128
BYTES_PER_TOKEN = 2 * MIB // 64


class Pair:
    """Two replicas that are each other's peers."""

    def __init__(self, folder, model, transports, ranks, longest):
        """Their host tiers hold little more than the longest prompt."""
        from support.peers import free_ports
        from support.service import Service
        from support.worker import write_secret

        secret = write_secret(folder, f"secret-{transports}-{ranks[0]}-{ranks[1]}")
        first = free_ports(sum(ranks))
        ports = (first, first + ranks[0])
        replicas = ",".join(f"127.0.0.1:{port}*{count}" for port, count in zip(ports, ranks))
        self.ranks = ranks[1]
        host_gb = 1.2 * longest * BYTES_PER_TOKEN / 1e9
        self.owner, self.asker = (Service(model=model, flags=[
            f"--peer-listen=127.0.0.1:{port}", f"--peers={replicas}", f"--peer-secret-file={secret}", "--mass-sample-rate=0",
            "--threads=1", f"--peer-transports={transports}", f"--tensor-parallel-size={count}", f"--max-model-len={longest + 64}",
            f"--kv-host-size-gb={host_gb / count}", f"--kv-device-size-gb={0.5 / count}", "--allow-long-max-model-len",
            "--sparse-selector=streaming", "--sparse-prefill-selector=streaming", "--sparse-window-tokens=64",
            "--sparse-sink-tokens=64"])
            for port, count in zip(ports, ranks))
        while self.asker.log().count(": linked, for blocks of") < max(ranks):
            time.sleep(0.1)

    def fetch(self, prompt):
        """The finish of the request that computed the prompt, of the one that fetched it, and the bytes fetched."""
        from support.peers import fetched_bytes, peer_blocks, shared_tokens

        options = dict(max_tokens=4, ignore_eos=True, logprobs=1)
        before = fetched_bytes(self.asker, self.ranks)
        computed = self.owner.generate(prompt, **options)
        fetched, again = (self.asker.generate(prompt, **options) for _ in range(2))
        assert fetched.finish.usage.cached_tokens.peer == shared_tokens(len(prompt)), (
            fetched.finish, [peer_blocks(self.asker, result) for result in ("fetched", "absent", "failed", "refused")])
        assert computed.token_ids == fetched.token_ids == again.token_ids
        assert fetched.logprobs == again.logprobs
        return computed.finish.timing, fetched.finish.timing, fetched_bytes(self.asker, self.ranks) - before

    def close(self):
        for service in (self.asker, self.owner):
            service.__exit__(None, None, None)


def table_row(rows, is_first):
    """Medians of what was measured in turn, after the first prompt, whose time stands beside them if it took memory."""
    mib, restore, here, there, puts, large = (statistics.median(column) for column in zip(*rows[1:]))
    times = sorted(row[1] for row in rows[1:])
    bandwidth = mib * 1000 / restore
    beside = f"{large:.0f} | {bandwidth / large:.2f}" if large else "- | -"
    return (f"{mib:.0f} | {f'{rows[0][1]:.0f}' if is_first else '-'} | {restore:.0f} ({times[0]:.0f} to {times[-1]:.0f}) | {bandwidth:.0f} | "
            f"{puts:.0f} | {bandwidth / puts:.2f} | {beside} | {here:.0f} | {there:.0f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/cpu")
    parser.add_argument("--tokens", default="8192,32768", help="lengths of prompts")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each length, after the first")
    args = parser.parse_args()
    os.environ["KVASIR_BUILD"] = args.build
    from support.peers import make_prompt
    from support.tiny_model import make_tiny_model

    lengths = sorted((int(length) for length in args.tokens.split(",")), reverse=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-peer-prefix-"))
    model = make_tiny_model(folder / "model", layers=LAYERS, head_dim=HEAD_DIM)
    print("| transports | ranks | tokens | fetched, MiB | the first, ms | later, ms | MiB/s | puts of 1 MiB, MiB/s | share "
          "| puts of 256 MiB, MiB/s | share | first token, fetched, ms | computed, ms |\n|" + "---|" * 13)
    seed = random.randrange(1 << 30)
    for transports, ranks in (("sm,tcp", (1, 1)), ("sm,tcp", (2, 1)), ("sm,tcp", (1, 2)),
                              ("tcp", (1, 1)), ("tcp", (2, 1)), ("tcp", (1, 2))):
        transport = transports.split(",")[0]
        pair = Pair(folder, model, transports, ranks, lengths[0])
        for length in lengths:
            rows = []
            for _ in range(1 + args.rounds):
                seed += 1
                computed, fetched, moved = pair.fetch(make_prompt(seed, length))
                large = perftest_put(transport, LARGE_PUT_BYTES, LARGE_PUTS) if transport == "sm" else 0
                rows.append([moved / MIB, *(span.ToMicroseconds() / 1000 for span in (
                    fetched.restore, fetched.time_to_first_token, computed.time_to_first_token)),
                    perftest_put(transport, PUT_BYTES, COUNTS[transport]), large])
            print(f"| {transports} | {ranks[0]} to {ranks[1]} | {length} | {table_row(rows, length == lengths[0])} |", flush=True)
        pair.close()


if __name__ == "__main__":
    main()
