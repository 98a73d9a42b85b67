"""Long prompts that another server reads (--prefill-servers): the one that answers fetches their blocks from its workers while
they read, and computes one token before the first."""

import os
import pathlib
import re
import signal
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.peers import BLOCK, FLAGS, OPTIONS, fetched_bytes, free_ports, make_prompt, peer_blocks, serve, shared_tokens  # noqa: E402
from support.service import Service, read_stream  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402
from support.worker import workers_of, write_secret  # noqa: E402

TOKENS = 5000
LONG = 8000  # many chunks
CHUNK = 512 // BLOCK  # blocks of a chunk, which are sealed together
# Blocks that come after one which was not sealed yet are asked for again with it: a chunk, or two on a busy machine.
MOST_AGAIN = 3 * CHUNK


class Servers(unittest.TestCase):
    """One that reads, and one that decodes."""

    decoder_ranks = 1

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-prefill-")))
        cls.model = make_tiny_model(cls.folder / "model")
        cls.secret = write_secret(cls.folder, "secret")

    def setUp(self):
        first = free_ports(1 + self.decoder_ranks)
        self.reader = serve(self.model, first, [], self.secret)
        self.addCleanup(self.reader.stop)
        self.decoder = self.enterContext(serve(
            self.model, first + 1, [f"{first}*1"], self.secret, f"--prefill-servers={self.reader.address}",
            "--prefill-min-tokens=1000", f"--tensor-parallel-size={self.decoder_ranks}"))
        self.wait(lambda: self.decoder.log().count(": linked, for blocks of") == self.decoder_ranks)

    def computed(self, service):
        return service.metric("kvasir_prompt_tokens_total") - service.metric("kvasir_prompt_tokens_cached_by_source_total")

    def clean(self, prompt, **options):
        with Service(model=self.model, flags=FLAGS) as service:
            return service.generate(prompt, **options)

    def wait(self, condition):
        deadline = time.monotonic() + 20
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)

    def see_fetches(self, count):
        """Waits until bytes have come `count` times, while the reader still reads."""
        seen = {0}
        while len(seen) <= count:
            came = fetched_bytes(self.decoder, self.decoder_ranks)
            if self.reader.metric("kvasir_num_requests_running") == 1:
                seen.add(came)
            elif came > 0:
                self.fail(f"the prompt is read, and of {came} bytes that have come only {sorted(seen)} came before")
        return max(seen)

    def read_and_fetch(self):
        prompt = make_prompt(6, LONG)
        stream = self.decoder.stream(prompt, **OPTIONS)
        came = self.see_fetches(3)
        answer = read_stream(stream)
        self.assertEqual(answer.token_ids, self.clean(prompt, **OPTIONS).token_ids)
        self.assertEqual(answer.finish.usage.cached_tokens.peer, shared_tokens(LONG))
        self.assertEqual(self.computed(self.decoder), LONG - shared_tokens(LONG))
        for rank in range(self.decoder_ranks):
            again = peer_blocks(self.decoder, "fetched", rank) - shared_tokens(LONG) // BLOCK
            self.assertIn(again, range(MOST_AGAIN))
        all_bytes = fetched_bytes(self.decoder, self.decoder_ranks)
        self.assertLess(came, all_bytes)
        print(f"{came} of {all_bytes} bytes seen to come while the prompt was read")


class Prefill(Servers):
    def test_a_long_prompt_is_computed_there_and_fetched(self):
        prompt = make_prompt(1, TOKENS)
        sampled = dict(max_tokens=40, ignore_eos=True, temperature=0.9, seed=3, logprobs=1, min_tokens=8)
        answer = self.decoder.generate(prompt, **sampled)
        expected = self.clean(prompt, **sampled)
        self.assertEqual(answer.token_ids, expected.token_ids)
        self.assertEqual(answer.logprobs, expected.logprobs)
        self.assertEqual(answer.finish.usage.cached_tokens.peer, shared_tokens(TOKENS))
        self.assertEqual(self.computed(self.decoder), TOKENS - shared_tokens(TOKENS))
        self.assertEqual(self.computed(self.reader), TOKENS)
        self.assertEqual(self.reader.metric("kvasir_generation_tokens_total"), 1)
        print(f"first token after {answer.finish.timing.time_to_first_token.ToMilliseconds()} ms, "
              f"computed by one server after {expected.finish.timing.time_to_first_token.ToMilliseconds()} ms")

    def test_short_prompts_and_those_with_log_probabilities_are_read_here(self):
        self.decoder.generate(make_prompt(2, 999), **OPTIONS)
        self.decoder.generate(make_prompt(3, 1500), prompt_logprobs=1, **OPTIONS)
        self.assertEqual(self.computed(self.decoder), 2499)
        self.assertEqual(self.computed(self.reader), 0)

    def test_a_server_that_is_gone_costs_time_only(self):
        prompt = make_prompt(4, TOKENS)
        self.reader.process.send_signal(signal.SIGKILL)
        self.reader.process.wait()
        answer = self.decoder.generate(prompt, **OPTIONS)
        self.assertEqual(answer.token_ids, self.clean(prompt, **OPTIONS).token_ids)
        self.assertEqual(self.computed(self.decoder), TOKENS)
        self.decoder.wait_for_log("does not read its prompt")

    def test_a_client_that_leaves_frees_its_place_there(self):
        stream = self.decoder.stream(make_prompt(5, TOKENS), max_tokens=3000, ignore_eos=True)
        self.wait(lambda: self.reader.metric("kvasir_num_requests_running") == 1)
        stream.cancel()
        self.wait(lambda: self.reader.metric("kvasir_num_requests_running") == 0)
        self.assertLess(self.computed(self.reader), TOKENS)
        self.assertEqual(self.decoder.metric("kvasir_num_requests_running"), 0)


class WhileItReads(Servers):
    def test_blocks_come_before_the_prompt_is_read(self):
        self.read_and_fetch()

    def test_a_reader_that_is_killed_costs_what_it_had_not_read(self):
        prompt = make_prompt(7, LONG)
        stream = self.decoder.stream(prompt, **OPTIONS)
        self.see_fetches(2)
        for victim in [self.reader.process.pid, *workers_of(self.reader)]:
            os.kill(victim, signal.SIGKILL)
        answer = read_stream(stream)
        self.assertEqual(answer.token_ids, self.clean(prompt, **OPTIONS).token_ids)
        fetched = answer.finish.usage.cached_tokens.peer
        self.assertGreater(fetched, (peer_blocks(self.decoder, "fetched") - MOST_AGAIN) * BLOCK)  # what came is used
        self.assertGreater(fetched, 0)
        self.assertLess(fetched, shared_tokens(LONG))
        self.assertEqual(self.computed(self.decoder), LONG - fetched)
        self.decoder.wait_for_log("does not read its prompt")

    def test_a_client_that_leaves_ends_the_fetches_too(self):
        stream = self.decoder.stream(make_prompt(8, LONG), **OPTIONS)
        self.see_fetches(1)
        self.assertEqual(self.decoder.metric("kvasir_num_requests_read_elsewhere"), 1)
        stream.cancel()
        self.wait(lambda: self.reader.metric("kvasir_num_requests_running") == 0)
        self.wait(lambda: self.decoder.metric("kvasir_num_requests_read_elsewhere") == 0)
        self.assertLess(self.computed(self.reader), LONG)

    def test_a_server_that_drains_ends_what_others_read_for_it(self):
        prompt = make_prompt(9, LONG)
        stream = self.decoder.stream(prompt, **OPTIONS)
        self.see_fetches(1)
        self.decoder.process.send_signal(signal.SIGTERM)
        self.assertEqual(read_stream(stream).token_ids, self.clean(prompt, **OPTIONS).token_ids)
        self.assertEqual(self.decoder.process.wait(60), 0)


class EachOther(unittest.TestCase):
    def test_two_servers_that_read_for_each_other_pass_no_prompt_on(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="kvasir-prefill-")))
        model, secret = make_tiny_model(folder / "model"), write_secret(folder, "secret")
        first = free_ports(4)
        one, other = [self.enterContext(serve(
            model, first + i, [f"{first + 1 - i}"], secret, f"--port={first + 2 + i}",
            f"--prefill-servers=127.0.0.1:{first + 3 - i}", "--prefill-min-tokens=1000")) for i in range(2)]
        for service in (one, other):
            service.wait_for_log(": linked, for blocks of")
        answer = one.generate(make_prompt(11, TOKENS), **OPTIONS)
        self.assertEqual(answer.finish.usage.cached_tokens.peer, shared_tokens(TOKENS))
        self.assertEqual(other.metric("kvasir_prompt_tokens_total"), TOKENS, "it read once")
        self.assertEqual(one.metric("kvasir_prompt_tokens_total"), TOKENS, "and asked for no more")
        self.assertEqual(other.generate(make_prompt(12, TOKENS), **OPTIONS).finish.usage.cached_tokens.peer, shared_tokens(TOKENS))


class WhileItReadsForTwoRanks(Servers):
    decoder_ranks = 2

    def test_each_rank_fetches_its_heads_before_the_prompt_is_read(self):
        self.read_and_fetch()


class Refused(unittest.TestCase):
    def test_what_cannot_serve_ends_the_start_with_words(self):
        for flags, words in ((["--prefill-servers=127.0.0.1:1"], "--prefill-servers needs addresses, and --peers"),
                             (["--prefill-servers=nowhere", "--peers=127.0.0.1:1"], "'nowhere' is no address of a server")):
            with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(RuntimeError, re.escape(words)):
                Service(model=make_tiny_model(pathlib.Path(folder) / "model"), flags=[*FLAGS, *flags])


if __name__ == "__main__":
    unittest.main(verbosity=2)
