"""The worker that lends blocks is killed in the middle of giving them, again and again. Every prompt is answered with the
tokens of the replica that computed it, whatever had come.

    lost_peer_test.py              # the short form
    lost_peer_test.py --kills=100  # the long form
"""

import argparse
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.peers import BLOCK, free_ports, make_prompt, peer_blocks, serve, shared_tokens  # noqa: E402
from support.service import read_stream  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402
from support.worker import workers_of, write_secret  # noqa: E402

TOKENS = 2000
BLOCKS = shared_tokens(TOKENS) // BLOCK
OPTIONS = dict(max_tokens=8, ignore_eos=True, logprobs=1)


def await_log(service, text, count):
    deadline = time.monotonic() + 60
    while service.log().count(text) < count:
        assert time.monotonic() < deadline, service.log()
        time.sleep(0.01)


class LostPeers(unittest.TestCase):
    kills = 3  # in the middle of a transfer
    seed = 1
    longest_s = 0.02  # from the first block on: about as long as the transfer takes

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-lost-peer-")))
        cls.model = make_tiny_model(cls.folder / "model", layers=8, head_dim=128)  # 1 MiB a block
        cls.secret = write_secret(cls.folder, "secret")

    def play(self, rng, round_number, ranks, *flags):
        """Kills one lender."""
        first = free_ports(ranks + 1)
        replicas = [f"{first}*{ranks}", f"{first + ranks}*1"]
        # New ones each time: a borrower that saw a peer fail sets peers aside, and workers that die again and again
        # start later and later.
        with serve(self.model, first, [], self.secret, f"--tensor-parallel-size={ranks}", *flags) as owner, \
                serve(self.model, first + ranks, replicas, self.secret, *flags) as asker:
            return self.kill_one(owner, asker, ranks, round_number, rng)

    def kill_one(self, owner, asker, ranks, kill, rng):
        """Returns how many blocks had come, and of how many a part."""
        prompt = make_prompt(self.seed * 100_000 + kill, TOKENS)
        expected = owner.generate(prompt, **OPTIONS)
        await_log(asker, ": linked, for blocks of", ranks)
        victim = workers_of(owner)[rng.randrange(ranks)]
        os.kill(victim, signal.SIGSTOP)
        stream = asker.stream(prompt, **OPTIONS)
        self.wait(lambda: asker.metric("kvasir_num_requests_restoring") > 0)
        os.kill(victim, signal.SIGCONT)
        time.sleep(rng.uniform(0, self.longest_s))
        os.kill(victim, signal.SIGKILL)
        answer = read_stream(stream)
        self.assertEqual(answer.token_ids, expected.token_ids)
        if ranks == 1:  # sums over ranks differ in their last bits
            self.assertEqual(answer.logprobs, expected.logprobs)
        fetched, refused = (int(peer_blocks(asker, result)) for result in ("fetched", "refused"))
        self.assertEqual(refused, 0, "something wrong came, though it was not used")
        self.assertLessEqual(answer.finish.usage.cached_tokens.peer, fetched * BLOCK)
        again = asker.generate(prompt, **OPTIONS)
        self.assertEqual((again.token_ids, again.cached_tokens), (expected.token_ids, shared_tokens(TOKENS)))
        cut = re.findall(r": lost with \d+ blocks asked for, (\d+) of them begun", asker.log())
        return fetched, sum(int(count) for count in cut)

    def wait(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            self.assertLess(time.monotonic(), deadline)

    def test_every_prompt_is_answered(self):
        forms = [(1, "--peer-transports=sm,tcp"), (1, "--peer-transports=tcp"), (2, "--peer-transports=sm,tcp")]
        rng = random.Random(self.seed)
        kills = []
        while (middle := sum(0 < came < BLOCKS or cut > 0 for came, cut in kills)) < self.kills:
            self.assertLess(len(kills), 10 + 2 * self.kills, f"of {len(kills)} kills {middle} were in the middle of a transfer")
            kills.append(self.play(rng, len(kills), *forms[len(kills) % len(forms)]))
            if len(kills) % 10 == 0:
                print(f"{len(kills)} kills, so many blocks had come and begun to come: {kills[-10:]}", flush=True)
        cut = sum(cut > 0 for came, cut in kills)
        print(f"{len(kills)} kills, {middle} in the middle of the transfer of {BLOCKS} blocks, {cut} with blocks begun: {kills}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=LostPeers.kills)
    parser.add_argument("--seed", type=int, default=LostPeers.seed)
    options, rest = parser.parse_known_args()
    LostPeers.kills, LostPeers.seed = options.kills, options.seed
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
