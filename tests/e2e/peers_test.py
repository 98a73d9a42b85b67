"""Peers under the real service: what one replica has read, another one fetches from it instead of computing it.

Whatever happens to a peer, answers are those of a service without one. Every test also checks by counters that the peer
was asked, and what it gave.
"""

import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import time
import unittest

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1]), str(pathlib.Path(__file__).resolve().parents[1] / "faults")]
from group import flip_bits  # noqa: E402
from support.peers import BLOCK, FLAGS, OPTIONS, free_ports, make_prompt, peer_blocks, serve, shared_tokens  # noqa: E402
from support.service import Service, read_stream  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402
from support.worker import workers_of, write_secret  # noqa: E402

PROMPT_TOKENS = 8000
SHARED = shared_tokens(PROMPT_TOKENS)


def memory_of(pid):
    memory = [fd for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir() if "kvasir-kv" in os.readlink(fd)][0]
    return os.open(memory, os.O_RDWR)


class PeersTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-peers-")))
        cls.model = make_tiny_model(cls.folder / "model")
        cls.secret = write_secret(cls.folder, "secret")

    def serve(self, listen, peers, *flags, model=None, secret=None):
        return serve(model or self.model, listen, peers, secret or self.secret, *flags)

    def linked(self, service):
        service.wait_for_log(": linked, for blocks of")

    def check(self, answer, expected, from_peer):
        self.assertEqual(answer.token_ids, expected.token_ids)
        cached = answer.finish.usage.cached_tokens
        self.assertEqual((cached.device, cached.host, cached.disk), (0, 0, 0))
        self.assertEqual(cached.peer, from_peer)


class Fetching(PeersTest):
    def fetch(self, *flags, ranks=1):
        first = free_ports(2 * ranks)
        ports = [first, first + ranks]
        flags = [f"--tensor-parallel-size={ranks}", *flags]
        prompt = make_prompt(ranks, PROMPT_TOKENS)
        with self.serve(ports[0], ports, *flags) as owner, self.serve(ports[1], ports, *flags) as asker:
            self.linked(asker)
            expected = owner.generate(prompt, **OPTIONS)
            self.assertEqual(expected.cached_tokens, 0)
            answer = asker.generate(prompt, **OPTIONS)
            self.check(answer, expected, SHARED)
            computed = asker.metric("kvasir_prompt_tokens_total") - asker.metric("kvasir_prompt_tokens_cached_by_source_total")
            self.assertEqual(computed, PROMPT_TOKENS - SHARED)
            for rank in range(ranks):
                self.assertEqual(peer_blocks(asker, "fetched", rank), SHARED // BLOCK)
                self.assertEqual([peer_blocks(asker, result, rank) for result in ("absent", "failed", "refused")], [0, 0, 0])
            times = [a.finish.timing.time_to_first_token.ToMilliseconds() for a in (expected, answer)]
            print(f"{ranks} ranks {flags[1:]}: {SHARED} tokens fetched; first token after {times[1]} ms, computed after {times[0]} ms")
            again = asker.generate(prompt, **OPTIONS)  # from its own memory
            self.assertEqual((again.token_ids, again.finish.usage.cached_tokens.peer), (expected.token_ids, 0))
            self.assertEqual(again.cached_tokens, SHARED)

    def test_a_prompt_that_a_peer_has_read_is_fetched_through_shared_memory(self):
        self.fetch()

    def test_and_over_tcp(self):
        self.fetch("--peer-transports=tcp")

    def test_each_of_two_ranks_fetches_its_heads(self):
        self.fetch(ranks=2)

    def test_what_was_fetched_is_lent_on(self):
        first_port = free_ports(3)
        ports = [first_port + i for i in range(3)]
        prompt = make_prompt(3, 1000)
        with self.serve(ports[0], ports[1:2]) as first, self.serve(ports[1], ports[:1]) as second:
            self.linked(second)
            expected = first.generate(prompt, **OPTIONS)
            self.check(second.generate(prompt, **OPTIONS), expected, 960)
            with self.serve(ports[2], ports[1:2]) as third:
                self.linked(third)
                self.check(third.generate(prompt, **OPTIONS), expected, 960)

    def test_the_first_of_two_peers_that_has_a_block_gives_it(self):
        first_port = free_ports(3)
        ports = [first_port + i for i in range(3)]
        prompt = make_prompt(4, 1000)
        longer = prompt[:640] + make_prompt(5, 500)
        with self.serve(ports[0], []) as first, self.serve(ports[1], []) as second:
            first.generate(prompt[:641], **OPTIONS)
            expected = second.generate(longer, **OPTIONS)
            with self.serve(ports[2], ports) as asker:
                asker.wait_for_log(f"peer 127.0.0.1:{ports[1]}: linked")
                asker.wait_for_log(f"peer 127.0.0.1:{ports[0]}: linked")
                self.check(asker.generate(longer, **OPTIONS), expected, 1088)
                for owner, lent in ((first, 10), (second, 7)):
                    owner.generate(make_prompt(9, 70), max_tokens=1)  # counts are told after a step
                    self.assertEqual(peer_blocks(owner, "lent"), lent)


class OtherDegrees(PeersTest):
    """The tiny model has two KV heads: at degree 4 two ranks share each."""

    def fetch(self, owner_ranks, asker_ranks, *flags):
        first = free_ports(owner_ranks + asker_ranks)
        ports = [first, first + owner_ranks]
        replicas = [f"{ports[0]}*{owner_ranks}", f"{ports[1]}*{asker_ranks}"]
        prompt = make_prompt(20 + owner_ranks, 2000)
        shared = shared_tokens(len(prompt))
        with self.serve(ports[0], replicas, f"--tensor-parallel-size={owner_ranks}", *flags) as owner, \
                self.serve(ports[1], replicas, f"--tensor-parallel-size={asker_ranks}", *flags) as asker:
            for service in (owner, asker):  # each worker of the larger group has a link to one of the smaller
                deadline = time.monotonic() + 60
                while service.log().count(": linked, for blocks of") < max(owner_ranks, asker_ranks):
                    self.assertLess(time.monotonic(), deadline, service.log())
                    time.sleep(0.05)
            expected = owner.generate(prompt, **OPTIONS)
            self.assertEqual(expected.cached_tokens, 0)
            answer = asker.generate(prompt, **OPTIONS)
            self.check(answer, expected, shared)
            computed = asker.metric("kvasir_prompt_tokens_total") - asker.metric("kvasir_prompt_tokens_cached_by_source_total")
            self.assertEqual(computed, len(prompt) - shared)
            for rank in range(asker_ranks):
                self.assertEqual(peer_blocks(asker, "fetched", rank), shared // BLOCK)
                self.assertEqual([peer_blocks(asker, result, rank) for result in ("absent", "failed", "refused")], [0, 0, 0])
            longer = answer.token_ids + prompt[:500]  # and back: what the asker made is lent to the owner
            expected = asker.generate(longer, **OPTIONS)
            self.check(owner.generate(longer, **OPTIONS), expected, shared_tokens(len(longer)))

    def test_two_ranks_fetch_from_one(self):
        self.fetch(1, 2)

    def test_one_rank_fetches_from_two(self):
        self.fetch(2, 1)

    def test_ranks_that_share_heads_fetch_from_ranks_that_do_not(self):
        self.fetch(2, 4, "--peer-transports=tcp")


class Failing(PeersTest):
    def setUp(self):
        first = free_ports(2)
        self.ports = [first, first + 1]
        self.owner = self.enterContext(self.serve(first, self.ports))
        self.asker = self.enterContext(self.serve(first + 1, self.ports))
        self.linked(self.asker)

    def ask_while_restoring(self, prompt):
        """Asks for a prompt, and returns the stream once its blocks are asked for."""
        stream = self.asker.stream(prompt, **OPTIONS)
        deadline = time.monotonic() + 20
        while self.asker.metric("kvasir_num_requests_restoring") == 0:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.005)
        return stream

    def test_a_stopped_owner_costs_its_patience(self):
        prompt = make_prompt(11, PROMPT_TOKENS)
        expected = self.owner.generate(prompt, **OPTIONS)
        [pid] = workers_of(self.owner)
        os.kill(pid, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            self.check(self.asker.generate(prompt, **OPTIONS), expected, 0)
            self.assertGreater(time.monotonic() - begun, 2)
            self.assertGreater(peer_blocks(self.asker, "failed"), 0)
            self.asker.wait_for_log("silent for 2000 ms")
        finally:
            os.kill(pid, signal.SIGCONT)

    def test_an_owner_that_is_killed_while_it_is_asked_costs_time_and_comes_back(self):
        prompt = make_prompt(12, PROMPT_TOKENS)
        expected = self.owner.generate(prompt, **OPTIONS)
        [pid] = workers_of(self.owner)
        os.kill(pid, signal.SIGSTOP)  # so that it is in the middle of it
        stream = self.ask_while_restoring(prompt)
        os.kill(pid, signal.SIGKILL)
        self.check(read_stream(stream), expected, 0)
        failed = time.monotonic()
        self.assertEqual(self.asker.metric("kvasir_peers_set_aside"), 1)
        self.assertGreater(peer_blocks(self.asker, "failed"), 0)
        deadline = time.monotonic() + 60
        while self.asker.log().count(": linked, for blocks of") < 2:
            self.assertLess(time.monotonic(), deadline, self.asker.log())
            time.sleep(0.05)
        other = make_prompt(13, 1000)
        self.check(self.asker.generate(other, **OPTIONS), self.owner.generate(other, **OPTIONS), 0)
        time.sleep(max(0, failed + 6 - time.monotonic()))  # peers are asked again after 5 s
        third = make_prompt(14, 1000)
        expected = self.owner.generate(third, **OPTIONS)
        self.check(self.asker.generate(third, **OPTIONS), expected, 960)

    def test_wrong_bytes_are_refused_and_never_used(self):
        prompt = make_prompt(15, PROMPT_TOKENS)
        expected = self.owner.generate(prompt, **OPTIONS)
        memory = memory_of(workers_of(self.owner)[0])
        self.addCleanup(os.close, memory)
        flipped, _ = flip_bits(memory, 600, random.Random(1))
        self.assertEqual(flipped, 600)
        answer = self.asker.generate(prompt, **OPTIONS)
        self.assertEqual(answer.token_ids, expected.token_ids)
        self.assertLess(answer.finish.usage.cached_tokens.peer, SHARED)
        self.assertGreater(peer_blocks(self.asker, "refused"), 0)
        self.asker.wait_for_log("it sent wrong bytes")

    def test_a_peer_of_another_model_is_refused(self):
        other = make_tiny_model(self.folder / "other", seed=2)
        prompt = make_prompt(16, 1000)
        self.owner.generate(prompt, **OPTIONS)
        port = free_ports(1)
        with self.serve(port, self.ports[:1], model=other) as stranger:
            stranger.wait_for_log("peers must serve the same model")
            answer = stranger.generate(prompt, **OPTIONS)
            self.assertEqual(answer.cached_tokens, 0)
            self.assertEqual([peer_blocks(stranger, result) for result in ("fetched", "refused")], [0, 0])

    def test_a_peer_with_another_secret_is_told_nothing(self):
        prompt = make_prompt(17, 1000)
        expected = self.owner.generate(prompt, **OPTIONS)
        with self.serve(free_ports(1), self.ports[:1], secret=write_secret(self.folder, "other-secret")) as stranger:
            self.owner.wait_for_log("does not prove the secret")
            self.check(stranger.generate(prompt, **OPTIONS), expected, 0)
            self.assertNotIn("for blocks of", stranger.log())


class Refused(PeersTest):
    def test_flags_that_cannot_serve_end_the_start_with_words(self):
        for flags, words in (
                (["--peers=nowhere"], "'nowhere' is no address of a peer"),
                (["--peers=127.0.0.1:1*0"], "'127.0.0.1:1*0' is no replica"),
                (["--peer-listen=0.0.0.0:7000"], "--peer-secret-file"),
                (["--peer-listen=127.0.0.1:70000"], "is no address of a peer"),
                (["--peer-listen=127.0.0.1:0", "--peer-secret-file=/nowhere"], "--peer-secret-file /nowhere cannot be read")):
            with self.subTest(flags=flags), self.assertRaisesRegex(RuntimeError, re.escape(words)):
                Service(model=self.model, flags=[*FLAGS, *flags])


if __name__ == "__main__":
    unittest.main(verbosity=2)
