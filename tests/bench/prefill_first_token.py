#!/usr/bin/env python3
"""Time to the first token of a prompt that another server reads (--prefill-servers), beside that of a server which reads it
itself: of one build or of several, in turn.

    tests/bench/prefill_first_token.py --build build/cpu
    tests/bench/prefill_first_token.py --build build/cpu --programs=OTHER/coordinator/kvasir   # and of another build

Host tiers hold little more than one prompt, so that each prompt lies in memory that the one before had. Two models: the
reference model, with little KV a token, and a random one with as much as a large model has, whose prompts are read with a
window, so that they are read soon. `after the reading` is what the server that answers waits for blocks once
the other one has read the prompt, `least fetched` the share of a prompt's blocks that it got: it computes the others.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

KV_BYTES_PER_TOKEN = 2 * (1 << 20) // 64  # at most
WINDOW = ["--sparse-selector=streaming", "--sparse-prefill-selector=streaming", "--sparse-window-tokens=64",
          "--sparse-sink-tokens=64"]


class Pair:
    """A server that reads prompts and one that answers, both of one program."""

    def __init__(self, program, model, secret, transports, tokens, flags):
        from support.peers import free_ports
        from support.service import Service

        first = free_ports(2)
        common = [f"--peer-secret-file={secret}", f"--peer-transports={transports}", "--mass-sample-rate=0", "--threads=1",
                  f"--kv-host-size-gb={1.2 * tokens * KV_BYTES_PER_TOKEN / 1e9}", "--kv-device-size-gb=0.3", f"--max-model-len={tokens + 192}",
                  "--allow-long-max-model-len", *flags]
        self.reader = Service(model=model, program=program, flags=[*common, f"--peer-listen=127.0.0.1:{first}"])
        self.decoder = Service(model=model, program=program, flags=[
            *common, f"--peer-listen=127.0.0.1:{first + 1}", f"--peers=127.0.0.1:{first}",
            f"--prefill-servers={self.reader.address}", f"--prefill-min-tokens={tokens}"])
        self.decoder.wait_for_log(": linked, for blocks of")

    def close(self):
        for service in (self.decoder, self.reader):
            service.__exit__(None, None, None)


def measure(service, prompt):
    """Milliseconds to the first token and those of them spent waiting for blocks, and tokens that came from a peer."""
    finish = service.generate(prompt, max_tokens=4, ignore_eos=True).finish
    timing = finish.timing
    return timing.time_to_first_token.ToMicroseconds() / 1000, timing.restore.ToMicroseconds() / 1000, finish.usage.cached_tokens.peer


def compare(programs, model, secret, transports, args, flags):
    from support.peers import make_prompt, shared_tokens

    pairs = [Pair(program, model, secret, transports, args.tokens, flags) for program in programs]
    times = {(kind, i): [] for i in range(len(pairs)) for kind in ("elsewhere", "here")}
    for number in range(1 + args.rounds):
        for i, pair in enumerate(pairs):
            seed = number * len(pairs) + i
            first, restore, from_peer = measure(pair.decoder, make_prompt(2 * seed, args.tokens))
            here, _, _ = measure(pair.reader, make_prompt(2 * seed + 1, args.tokens))
            if number > 0:  # the first takes memory from the system
                times["elsewhere", i].append((first, restore, from_peer / shared_tokens(args.tokens)))
                times["here", i].append(here)
    for pair in pairs:
        pair.close()
    for i, program in enumerate(programs):
        first, restore, fetched = (sorted(column) for column in zip(*times["elsewhere", i]))
        yield (program, statistics.median(first), first[0], first[-1], statistics.median(restore), statistics.median(times["here", i]),
               100 * fetched[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/cpu")
    parser.add_argument("--programs", default="", help="kvasir of other builds, separated by commas")
    parser.add_argument("--tokens", type=int, default=8000, help="length of prompts")
    parser.add_argument("--flags", default="", help="of the servers, separated by spaces: --device=cuda --dtype=bfloat16")
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each server, after the first")
    args = parser.parse_args()
    os.environ["KVASIR_BUILD"] = args.build
    from support.service import KVASIR
    from support.tiny_model import make_tiny_model
    from support.worker import write_secret

    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-first-token-"))
    secret = write_secret(folder, "secret")
    large = make_tiny_model(folder / "model", layers=16, head_dim=128)
    programs = [str(KVASIR), *(pathlib.Path(name).resolve() for name in args.programs.split(",") if name)]
    print(f"prompts of {args.tokens} tokens, medians of {args.rounds}, ms\n\n"
          "| model | transport | program | first token | least | most | after the reading | read by itself | least fetched, % |\n|" + "---|" * 9)
    for name, model, transports, flags in (("needle-8k", "tests/model/needle-8k", "sm,tcp", []),
                                           ("2 MiB of KV a block", large, "sm,tcp", WINDOW),
                                           ("2 MiB of KV a block", large, "tcp", WINDOW)):
        for program, *numbers in compare(programs, model, secret, transports, args, [*flags, *args.flags.split()]):
            print(f"| {name} | {transports} | {program} | " + " | ".join(f"{number:.0f}" for number in numbers) + " |", flush=True)


if __name__ == "__main__":
    main()
