"""Plays faults beside streams, one at a time, and compares every stream with a clean run, token by token: what the tests of this
folder share.

Counters: req_lost, tok_dup, tok_missing, tok_diff are 0 in every run.
"""

import argparse
import pathlib
import random
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from support.tiny_model import make_tiny_model  # noqa: E402
from group import Group  # noqa: E402
from streams import Streams, load  # noqa: E402

RANK_TIMEOUT_S = 1
FLAGS = ["--mass-sample-rate=0", "--max-num-batched-tokens=256", "--kv-device-size-gb=0.05", "--kv-host-size-gb=0.2",
         "--max-model-len=8192", f"--rank-timeout={RANK_TIMEOUT_S}"]
STOP_S = 1.6  # of stops and partitions, at least: more than the rank timeout
CUT_S = 0.3  # of a delay: less than it


def percentile(times, part):
    return sorted(times)[min(len(times) - 1, int(part * len(times)))]


def with_stop_string(asked, answers):
    """Adds a request whose stop string, of several tokens, is in the middle of a clean answer."""
    text = answers[0].text
    stop = text[len(text) // 2:len(text) // 2 + 9]
    return [*asked, dict(asked[0], stop=stop)]


class FaultRuns(unittest.TestCase):
    options = None

    @classmethod
    def main(cls, description, counts):
        """Runs the tests of a script. `counts`: the options that say how many faults of which kind, (name, default, help)."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        for name, default, meaning in counts:
            parser.add_argument(name, type=int, default=default, help=meaning)
        parser.add_argument("--context", type=int, default=1000, help="tokens of the longest request")
        parser.add_argument("--patience", type=float, default=30, help="seconds for a stream to go on; more on a busy machine")
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--model", default="", help="a model folder; default: a random one that loads in no time")
        cls.options, rest = parser.parse_known_args()
        print(f"seed {cls.options.seed}")
        unittest.main(argv=[sys.argv[0], *rest], verbosity=2)

    def wait_until(self, condition, what):
        deadline = time.monotonic() + self.options.patience
        while not condition():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.005)

    def wait_at_most(self, seconds, condition):
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)

    def inject(self, group, rng, kind, noticed):
        """One fault. Returns the time at which it began and how long it held."""
        begun = time.monotonic()
        if kind in ("stop", "partition"):
            def hold():
                time.sleep(STOP_S)
                self.wait_until(noticed, f"{kind}: not noticed")  # at once, but on a busy machine
            fault = group.stop if kind == "stop" else group.cut
            fault(rng.randrange(group.ranks), hold)
            return begun, time.monotonic() - begun
        if kind == "delay":
            group.cut(rng.randrange(group.ranks), lambda: time.sleep(CUT_S))
        elif kind == "slow":
            group.slow(rng.randrange(group.ranks), STOP_S)
        elif kind == "coordinator":
            group.kill_coordinator()
        elif kind == "all":
            group.kill(*range(group.ranks))
        elif kind == "flip":
            group.kill_and_flip(rng.randrange(group.ranks), self.options.flips, rng)
        else:
            group.kill(rng.randrange(group.ranks))
        return begun, 0

    def faults(self, group, streams, kinds, rng):
        """Plays the faults, each when all streams of the one before go on. Returns the times to detect and to recover,
        and what became of the blocks in memory."""
        detected, recovered, blocks, slowest = [], [], {}, {}
        for kind in kinds:
            time.sleep(rng.uniform(0.02, 0.2))
            self.wait_until(lambda: any(streams.running), "no stream runs")
            before = len(streams.recoveries)
            losses = group.losses()

            def noticed(losses=losses):
                return group.losses() > losses
            begun, held = self.inject(group, rng, kind, noticed)
            if kind in ("delay", "slow"):
                # Some cost a group, a little later. The next fault meets one that is formed.
                self.wait_at_most(RANK_TIMEOUT_S, noticed)
            elif kind != "coordinator":
                self.wait_until(noticed, f"{kind}: not noticed")
            # A worker that is killed while the group forms is no loss of a group.
            self.wait_until(lambda: group.service.metric("kvasir_worker_up") == group.ranks, f"{kind}: no group forms")
            self.wait_until(streams.all_run, f"{kind}: a stream does not go on")
            told = streams.recoveries[before:]
            detected += [waits - begun for waits, _ in told]
            times = [on - begun - held for _, on in told]
            slowest[kind] = max([slowest.get(kind, 0), *times])
            recovered += times
            blocks = group.adoption()
        print("slowest to be as far as before:", ", ".join(f"{kind} {time:.2f} s" for kind, time in sorted(slowest.items())))
        return detected, recovered, blocks

    def play(self, name, kinds, ranks, seed, flags=(), disk_gb=0, hosts=None):
        resume = "coordinator" in kinds
        rng = random.Random(seed)
        with tempfile.TemporaryDirectory(prefix="kvasir-faults-") as folder:
            model = self.options.model or make_tiny_model(pathlib.Path(folder) / "model")
            with Group(model, ranks, [*FLAGS, *flags], disk_gb, hosts) as group:
                asked = load(self.options.context)
                asked = with_stop_string(asked, Streams(group, asked[:1]).clean())
                clean = Streams(group, asked).clean()
                rng.shuffle(kinds)
                with Streams(group, asked, resume) as streams:
                    detected, recovered, blocks = self.faults(group, streams, kinds, rng)
                self.compare(name, clean, streams, group, detected, recovered, kinds)
                self.assertEqual(group.ended, [], "a worker ended by itself")
                found = sum(group.found.values())
                left = sum(group.left[pid] for pid in group.found)
                print(f"{name}: blocks in memory {dict(blocks)}; of {left} sealed ones with a whole header that killed workers left "
                      f"{found} were adopted; {group.flips} bits were flipped", flush=True)
                self.assertGreater(blocks["used"], 0)
                self.assertGreaterEqual(found, 0.95 * left)
                # A flipped bit is in a header, in a block that is read again and dropped, or in one that nobody reads.
                if "flip" in kinds:
                    self.assertGreater(blocks["torn"] + blocks["checksum"], 0, f"{self.options.flips} flips a fault and none noticed")

    def compare(self, name, clean, streams, group, detected, recovered, kinds):
        refused = [a for _, a in streams.answers if a.error.startswith("UNAVAILABLE: no worker group") and not a.token_ids]
        accepted = [(i, a) for i, a in streams.answers if not any(a is r for r in refused)]
        lost = [a.error for _, a in accepted if a.error]
        different = [i for i, a in accepted if not a.error and a.comparable() != clean[i].comparable()]
        repeated = sum(a.repeated for _, a in accepted)
        missing = sum(a.missing for _, a in accepted)
        metrics = group.service.metrics()  # of the last coordinator
        preempted = sum(value for name, value in metrics.items()
                        if name.startswith("kvasir_num_preemptions_total") and 'kind="loss"' in name)
        print(f"{name}: {len(kinds)} faults, {len(accepted)} streams ended, {len(recovered)} resumed, {len(refused)} "
              f"refused: req_lost {len(lost)}, tok_dup {repeated}, tok_missing {missing}, tok_diff {len(different)}; "
              f"noticed p50 {percentile(detected, .5):.2f} s p99 {percentile(detected, .99):.2f} s, as far as "
              f"before p50 {percentile(recovered, .5):.2f} s p99 {percentile(recovered, .99):.2f} s, next token after the notice "
              f"p50 {percentile(streams.next_tokens, .5):.2f} s p99 {percentile(streams.next_tokens, .99):.2f} s", flush=True)
        self.assertEqual((lost, repeated, missing, different), ([], 0, 0, []))
        self.assertGreater(len(recovered), len(kinds) / 2, "faults met no streams")
        if "coordinator" in kinds:
            self.assertGreater(streams.asked_again, 0)
            resumed = {name: value for name, value in metrics.items() if name.startswith("kvasir_requests_resumed_total")}
            print(f"{name}: clients asked again {streams.asked_again} times; resumed by the last coordinator: "
                  f"{ {key.split('from=')[1]: int(value) for key, value in resumed.items()} }", flush=True)
            self.assertGreater(sum(resumed.values()), 0)
        else:
            self.assertGreater(preempted, 0)
