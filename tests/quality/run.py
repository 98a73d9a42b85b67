#!/usr/bin/env python3
"""How often the service answers exactly, by task, length and policy.

Starts the real service with a reference model, asks questions about generated documents as separate requests over the
cached document, and prints one row a cell: exact answers with a 95 % interval (Wilson), share of blocks skipped, mass
kept where it was sampled, tokens per second.

    tests/quality/run.py --tasks multi_key pass_key key_value --lengths 8000 --answers 256 \\
        --policy "all=" --policy "quest=--sparse-selector=quest --sparse-token-budget=2048"
"""

import argparse
import math
import pathlib
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import Service  # noqa: E402

from documents import TASKS, make_document  # noqa: E402

QUESTIONS_A_DOCUMENT = 8


def wilson(successes, trials, z=1.96):
    """95 % interval of a proportion."""
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    centre = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    return centre - half, centre + half


class Cell:
    """Counts of one (policy, task, length)."""

    def __init__(self):
        self.exact = self.asked = self.total = self.skipped = self.samples = self.tokens = 0
        self.mass = 0.0
        self.minimum = 1.0

    def add(self, answer, expected):
        self.asked += 1
        self.exact += answer.text + "." == expected
        report = answer.finish.attention
        self.total += report.decode_blocks_total
        self.skipped += sum(getattr(report.decode_blocks_skipped, reason) for reason in ("selected_out", "window", "pruned"))
        self.tokens += len(answer.token_ids)
        if report.HasField("measured_mass"):
            self.samples += report.measured_mass.samples
            self.mass += report.measured_mass.mean * report.measured_mass.samples
            self.minimum = min(self.minimum, report.measured_mass.minimum)

    def row(self, policy, task, length, seconds):
        low, high = wilson(self.exact, self.asked)
        skipped = 100.0 * self.skipped / max(1, self.total)
        mass = f"{self.mass / self.samples:.4f}" if self.samples else "unknown"
        return (f"| {policy} | {task} | {length} | {self.exact}/{self.asked} = {self.exact / max(1, self.asked):.3f} "
                f"[{low:.3f}, {high:.3f}] | {skipped:.1f} % | {mass} | {self.tokens / seconds:.1f} |")


def ask_document(service, task, length, seed, questions, streams):
    """(answer, expected) of every question; the first request reads the document, the others find it cached."""
    document = make_document(task, length, num_questions=questions, seed=seed)

    def ask(question):
        return service.generate(document.text + question.prompt, stop=".", max_tokens=40), question.answer
    first = ask(document.questions[0])
    with ThreadPoolExecutor(streams) as pool:
        return [first, *pool.map(ask, document.questions[1:])]


def run_cell(service, task, length, arguments):
    cell = Cell()
    questions = 1 if task in ("pass_key", "common_words") else QUESTIONS_A_DOCUMENT
    seed = arguments.seed
    while cell.asked < arguments.answers:
        for answer, expected in ask_document(service, task, length, seed, questions, arguments.streams):
            cell.add(answer, expected)
        seed += 1
        print(f"\r{task} {length}: {cell.exact}/{cell.asked}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return cell


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tests/model/needle-8k", help="folder of the model (default needle-8k)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["multi_key", "pass_key", "key_value"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8000], help="tokens of a document (default 8000)")
    parser.add_argument("--answers", type=int, default=64, help="answers a cell, at least (default 64)")
    parser.add_argument("--streams", type=int, default=4, help="questions asked at once (default 4)")
    parser.add_argument("--seed", type=int, default=1000, help="seed of the first document (default 1000)")
    parser.add_argument("--policy", action="append", metavar="NAME=FLAGS",
                        help="a policy as flags of `kvasir serve`; may be repeated (default all=)")
    parser.add_argument("--flags", default="", help="further flags of `kvasir serve` for every policy")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, model {arguments.model}, flags '{arguments.flags}'")
    print("| policy | task | tokens | exact [95 %] | blocks skipped | mass kept | tokens/s |\n|---|---|---|---|---|---|---|")
    for policy in arguments.policy or ["all="]:
        name, _, flags = policy.partition("=")
        with Service(arguments.model, [*shlex.split(flags), *shlex.split(arguments.flags)]) as service:
            for task in arguments.tasks:
                for length in arguments.lengths:
                    start = time.monotonic()
                    cell = run_cell(service, task, length, arguments)
                    print(cell.row(name, task, length, time.monotonic() - start), flush=True)


if __name__ == "__main__":
    main()
