#!/usr/bin/env python3
"""First token of a prompt that another replica has read, beside the first token where it was computed: over each transport, to
a replica of the same degree and of another one. tests/bench/peer_prefix.py --build build/cpu --model MODEL"""

import argparse
import os
import pathlib
import random
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))


def fetched_bytes(service, ranks):
    return sum(value for rank in range(ranks) for name, value in service.metrics(service.worker_metrics[rank]).items()
               if name.startswith("kvasir_kv_transfer_bytes_total") and 'from="peer"' in name)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default="build/cpu")
    parser.add_argument("--model", default="", help="a model folder; default: a random one that loads in no time")
    parser.add_argument("--tokens", default="8000,32000", help="lengths of prompts")
    parser.add_argument("--vocabulary", type=int, default=1400, help="prompts have tokens below it")
    args = parser.parse_args()
    os.environ["KVASIR_BUILD"] = args.build
    from support.peers import free_ports, peer_blocks, shared_tokens
    from support.service import Service
    from support.tiny_model import make_tiny_model
    from support.worker import write_secret

    lengths = [int(length) for length in args.tokens.split(",")]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-peer-prefix-"))
    model = args.model or make_tiny_model(folder / "model")
    secret = write_secret(folder, "secret")
    print("| transports | ranks | tokens | fetched, MB | first token where it was computed, ms | first token where it was fetched, ms "
          "| MB/s |\n|---|---|---|---|---|---|---|")
    for transports, ranks in (("sm,tcp", (1, 1)), ("tcp", (1, 1)), ("sm,tcp", (2, 1)), ("sm,tcp", (1, 2))):
        first = free_ports(sum(ranks))
        ports = (first, first + ranks[0])
        replicas = ",".join(f"127.0.0.1:{port}*{count}" for port, count in zip(ports, ranks))
        owner, asker = (Service(model=model, flags=[
            f"--peer-listen=127.0.0.1:{port}", f"--peers={replicas}", f"--peer-secret-file={secret}", "--mass-sample-rate=0", "--threads=1",
            f"--peer-transports={transports}", f"--tensor-parallel-size={count}", f"--max-model-len={max(lengths) + 64}",
            "--kv-host-size-gb=2", "--kv-device-size-gb=0.5", "--allow-long-max-model-len"]) for port, count in zip(ports, ranks))
        with owner, asker:
            while asker.log().count(": linked, for blocks of") < max(ranks):
                time.sleep(0.1)
            before = fetched_bytes(asker, ranks[1])
            for length in lengths:
                rng = random.Random(length)
                prompt = [rng.randrange(3, args.vocabulary) for _ in range(length)]
                computed, fetched = (service.generate(prompt, max_tokens=2, ignore_eos=True) for service in (owner, asker))
                assert computed.token_ids == fetched.token_ids
                there, here = (answer.finish.timing.time_to_first_token.ToMilliseconds() for answer in (computed, fetched))
                shared = fetched.finish.usage.cached_tokens.peer
                assert shared == shared_tokens(length), (shared, peer_blocks(asker, "failed"))
                moved, before = fetched_bytes(asker, ranks[1]) - before, fetched_bytes(asker, ranks[1])
                print(f"| {transports} | {ranks[0]} to {ranks[1]} | {length} | {moved / 1e6:.1f} | {there} | {here} | "
                      f"{moved / 1000 / here:.0f} |", flush=True)


if __name__ == "__main__":
    main()
