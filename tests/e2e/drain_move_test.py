"""SIGTERM with --drain=move: running requests go on at another replica, which fetches their blocks, and clients notice nothing.
Every answer is that of a server that nobody stopped, token by token."""

import concurrent.futures
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.http_client import ask  # noqa: E402
from support.peers import FLAGS, free_ports, make_prompt, serve  # noqa: E402
from support.service import Service, read_stream  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402
from support.worker import workers_of, write_secret  # noqa: E402

import grpc  # noqa: E402

STREAMS = 64
ANSWER = dict(max_tokens=800, ignore_eos=True, logprobs=1)
FORMS = [dict(temperature=0), dict(temperature=0.9, seed=5, presence_penalty=0.3), dict(temperature=1, seed=2**63, top_p=0.9, min_tokens=9),
         dict(temperature=0, repetition_penalty=1.3, stop="no text has this")]


class DrainMove(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-drain-")))
        cls.model = make_tiny_model(cls.folder / "model")
        cls.secret = write_secret(cls.folder, "secret")
        cls.requests = [(make_prompt(i, 300 + 7 * i), {**ANSWER, **FORMS[i % len(FORMS)]}) for i in range(STREAMS)]
        with Service(model=cls.model, flags=[*FLAGS, "--max-num-seqs=64"]) as clean:
            cls.expected = list(concurrent.futures.ThreadPoolExecutor(STREAMS).map(
                lambda request: clean.generate(request[0], **request[1]), cls.requests))

    def setUp(self):
        first = free_ports(2)
        self.ports = [first, first + 1]

    def serve(self, index, *flags, model=None, at_once=64):
        return self.enterContext(serve(model or self.model, self.ports[index], self.ports, self.secret, f"--max-num-seqs={at_once}", *flags))

    def draining(self, *others, timeout=60, at_once=64):
        servers = ",".join(other if isinstance(other, str) else other.address for other in others)
        return self.serve(0, "--drain=move", f"--replica-servers={servers}", f"--shutdown-timeout={timeout}", at_once=at_once)

    def moved(self, service, result="moved"):
        return service.metrics().get(f'kvasir_requests_moved_total{{model_name="model",result="{result}"}}', 0)

    def wait(self, condition, what, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.01)

    def start(self, service, requests):
        """Streams the requests, and returns their futures once each has told some tokens."""
        pool = concurrent.futures.ThreadPoolExecutor(len(requests))
        self.addCleanup(pool.shutdown)
        begun = [threading.Event() for _ in requests]

        def read(request, event):
            def watch(stream):
                tokens = 0
                for response in stream:
                    tokens += len(response.tokens.token_ids)
                    if tokens >= 20:
                        event.set()
                    yield response
            return read_stream(watch(service.stream(request[0], **request[1])))

        futures = [pool.submit(read, request, event) for request, event in zip(requests, begun)]
        for event in begun:
            self.assertTrue(event.wait(60))
        return futures

    def check(self, futures, expected):
        for future, clean in zip(futures, expected):
            answer = future.result(120)
            self.assertEqual(answer.token_ids, clean.token_ids)
            self.assertEqual(answer.text, clean.text)
            self.assertEqual(len(answer.logprobs), len(clean.logprobs))
            self.assertEqual(answer.finish.usage.completion_tokens, clean.finish.usage.completion_tokens)

    def test_64_streams_go_on_at_another_replica_and_the_workers_end_before_them(self):
        other = self.serve(1)
        here = self.draining(other)
        here.wait_for_log(": linked, for blocks of")
        other.wait_for_log(": linked, for blocks of")
        futures = self.start(here, self.requests)
        [worker] = workers_of(here)
        here.process.send_signal(signal.SIGTERM)
        here.wait_for_log("the workers are free", 60)
        self.assertFalse(pathlib.Path(f"/proc/{worker}").exists())
        left = sum(not future.done() for future in futures)
        self.assertGreater(left, 0, "all answers ended before the workers did")
        moved = self.moved(here)
        self.assertGreater(moved, STREAMS / 2)
        self.assertEqual((self.moved(here, "stays"), self.moved(here, "lost")), (0, 0))
        self.check(futures, self.expected)
        self.assertEqual(here.process.wait(30), 0)
        fetched = sum(value for name, value in other.metrics().items()
                      if name.startswith("kvasir_prompt_tokens_cached_by_source_total") and 'source="peer"' in name)
        self.assertGreater(fetched, 0, "blocks were computed again, not fetched")
        print(f"{moved:.0f} of {STREAMS} streams moved, {left} ran on when the workers had ended, {fetched:.0f} tokens fetched")

    def test_a_waiting_request_and_answers_by_http_move_too(self):
        other = self.serve(1)
        here = self.draining(other, at_once=1)
        pool = self.enterContext(concurrent.futures.ThreadPoolExecutor(4))
        body = dict(model="model", prompt=self.requests[0][0], max_tokens=800, temperature=0, ignore_eos=True)
        futures = [pool.submit(ask, here, "POST", "/v1/completions", body) for _ in range(2)]
        futures.append(pool.submit(here.generate, self.requests[1][0], **self.requests[1][1]))
        self.wait(lambda: (here.metric("kvasir_num_requests_running"), here.metric("kvasir_num_requests_waiting")) == (1, 2), "two requests wait")
        here.process.send_signal(signal.SIGTERM)
        for future in futures[:2]:
            answer = future.result(120)
            self.assertEqual(answer.json["choices"][0]["text"], self.expected[0].text)
        self.assertEqual(futures[2].result(120).token_ids, self.expected[1].token_ids)
        self.assertEqual(here.process.wait(30), 0)
        self.assertIn("the workers are free", here.log())

    def test_requests_that_no_server_takes_go_on_here(self):
        stranger = self.serve(1, model=make_tiny_model(self.folder / "other", seed=2))
        here = self.draining(f"127.0.0.1:{free_ports(1)}", stranger)
        futures = self.start(here, self.requests[:4])
        here.process.send_signal(signal.SIGTERM)
        self.wait(lambda: self.moved(here, "stays") == 4, "they stay")
        self.check(futures, self.expected)
        self.assertEqual(here.process.wait(30), 0)
        self.assertIn("does not move to", here.log())
        self.assertIn("this server computes", here.log())  # of the stranger
        self.assertNotIn("the workers are free", here.log())

    def test_a_replica_that_dies_hands_them_to_the_next(self):
        second = self.enterContext(Service(model=self.model, flags=[*FLAGS, "--max-num-seqs=64"]))
        first = Service(model=self.model, flags=[*FLAGS, "--max-num-seqs=64"])  # and ends before its test
        here = self.draining(first, second)
        futures = self.start(here, self.requests[:8])
        here.process.send_signal(signal.SIGTERM)
        here.wait_for_log("the workers are free", 60)
        self.assertGreater(sum(not future.done() for future in futures), 0)
        first.process.kill()
        first.process.wait()
        self.check(futures, self.expected)
        self.assertEqual(here.process.wait(30), 0)
        self.assertIn("which ended it", here.log())

    def test_a_client_that_leaves_frees_its_place_there(self):
        other = self.serve(1)
        here = self.draining(other)
        stream = here.stream(self.requests[0][0], max_tokens=4000, ignore_eos=True)
        next(stream)
        here.process.send_signal(signal.SIGTERM)
        here.wait_for_log("the workers are free", 60)
        stream.cancel()
        self.assertEqual(here.process.wait(30), 0)
        self.wait(lambda: other.metric("kvasir_num_requests_running") == 0, "it runs on")

    def test_the_deadline_ends_what_has_moved(self):
        other = self.serve(1)
        here = self.draining(other, timeout=3)
        stream = here.stream(self.requests[0][0], max_tokens=7000, ignore_eos=True)
        next(stream)
        here.process.send_signal(signal.SIGTERM)
        with self.assertRaises(grpc.RpcError) as raised:
            read_stream(stream)
        self.assertEqual(raised.exception.code(), grpc.StatusCode.UNAVAILABLE)
        self.assertEqual(here.process.wait(30), 0)
        self.assertEqual(other.metric("kvasir_requests_resumed_total") > 0, True)
        self.wait(lambda: other.metric("kvasir_num_requests_running") == 0, "it runs on")

    def test_a_move_without_servers_is_refused_with_words(self):
        for flags, words in ((["--drain=move"], "--drain=move needs --replica-servers"),
                             (["--replica-servers=nowhere"], "'nowhere' is no address of a server")):
            with self.assertRaisesRegex(RuntimeError, words):
                Service(model=self.model, flags=[*FLAGS, *flags])


if __name__ == "__main__":
    unittest.main(verbosity=2)
