"""A worker is killed in the middle of answers that came through every door: HTTP whole and streamed, several choices,
chat, vLLM's gRPC, our gRPC. Each ends as it does without a fault. A request that kills its workers ends after three."""

import pathlib
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from support.chat_model import make_tiny_chat_model  # noqa: E402
from support.http_client import ask, read_events  # noqa: E402
from group import Group  # noqa: E402
from runs import FLAGS  # noqa: E402
from streams import prompt  # noqa: E402

import grpc  # noqa: E402
from vllm.grpc import vllm_engine_pb2 as vllm  # noqa: E402
from vllm.grpc import vllm_engine_pb2_grpc  # noqa: E402

PROMPT = prompt(150)
TOKENS = 600
COMPLETION = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.9, "seed": 5}


class EveryDoor(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-doors-")))
        cls.group = cls.enterClassContext(Group(make_tiny_chat_model(folder / "model"), 1, FLAGS))
        cls.service = cls.group.service

    def wait_until(self, condition, what):
        deadline = time.monotonic() + 30
        while not condition():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.005)

    def answers(self, read):
        """What `read` returns without a fault, and with one in its midst."""
        clean = read()
        losses = self.service.metric("kvasir_worker_group_losses_total")
        preempted = self.service.metric("kvasir_num_preemptions_total")
        found = []
        thread = threading.Thread(target=lambda: found.append(read()))
        thread.start()
        self.wait_until(lambda: self.service.metric("kvasir_num_requests_running"), "it does not run")
        time.sleep(0.1)
        self.group.kill(0)
        thread.join()
        self.assertEqual(self.service.metric("kvasir_worker_group_losses_total"), losses + 1)
        self.assertGreater(self.service.metric("kvasir_num_preemptions_total"), preempted, "the kill met no request")
        return clean, found[0]

    def test_a_whole_http_answer(self):
        def read():
            reply = ask(self.service, "POST", "/v1/completions", {**COMPLETION, "logprobs": 1})
            self.assertEqual(reply.status, 200, reply.body)
            return reply.json["choices"], reply.json["usage"]["completion_tokens"]
        clean, faulty = self.answers(read)
        self.assertEqual(clean, faulty)

    def test_streamed_choices_of_one_prompt(self):
        comments = []

        def read():
            events = read_events(self.service, "/v1/completions", {**COMPLETION, "n": 3})
            comments[:] = events.comments
            return [events.text(choice) for choice in range(3)]
        clean, faulty = self.answers(read)
        self.assertEqual(clean, faulty)
        self.assertEqual(len(set(clean)), 3)
        self.assertIn("waiting for a worker", comments)

    def test_a_streamed_chat(self):
        body = {"messages": [{"role": "user", "content": "Tell me all. " * 20}], "max_tokens": TOKENS, "ignore_eos": True,
                "temperature": 0}

        def read():
            events = read_events(self.service, "/v1/chat/completions", body)
            return "".join(c["choices"][0]["delta"].get("content") or "" for c in events.told)
        clean, faulty = self.answers(read)
        self.assertEqual(clean, faulty)
        self.assertTrue(clean)

    def test_vllms_grpc(self):
        stub = vllm_engine_pb2_grpc.VllmEngineStub(self.service.channel)

        def read():
            request = vllm.GenerateRequest(stream=True, sampling_params=vllm.SamplingParams(
                temperature=0.9, seed=6, max_tokens=TOKENS, ignore_eos=True))
            request.tokenized.input_ids.extend(PROMPT)
            return [token for response in stub.Generate(request) for token in response.chunk.token_ids]
        clean, faulty = self.answers(read)
        self.assertEqual(clean, faulty)
        self.assertEqual(len(clean), TOKENS)

    def test_health_and_log_tell_of_the_loss(self):
        stream = self.service.stream(PROMPT, max_tokens=3000, ignore_eos=True, temperature=0)
        next(stream)
        self.group.kill(0)
        states = set()
        waits = False
        for response in stream:
            if response.progress.waits_for_worker:
                waits = True
                page = ask(self.service, "GET", "/health")
                states.add(page.status)
        self.assertTrue(waits)
        self.assertIn(503, states)
        self.service.wait_for_log("lost the worker group, forming it again")
        self.service.wait_for_log("1 sequences preempted")

    def test_a_request_whose_workers_die_ends_after_three_losses_without_a_token(self):
        long = prompt(8000)
        stream = self.service.stream(long, max_tokens=10, ignore_eos=True)
        next(stream)
        kills = 0
        with self.assertRaises(grpc.RpcError) as raised:
            self.group.kill(0)
            kills += 1
            for response in stream:
                self.assertFalse(response.tokens.token_ids, "the machine is too fast for this test: it answered")
                # A fast machine may read some of the prompt between two kills, and the count of losses begins again.
                if response.progress.waits_for_worker and kills < 30:
                    self.wait_until(lambda: self.service.metric("kvasir_num_requests_running"), "it does not run")
                    self.group.kill(0)
                    kills += 1
        self.assertGreaterEqual(kills, 3)
        self.assertEqual(raised.exception.code(), grpc.StatusCode.UNAVAILABLE)
        self.assertIn("lost 3 times in a row", raised.exception.details())
        self.wait_until(lambda: ask(self.service, "GET", "/health").status == 200, "the group was not formed again")
        self.assertTrue(self.service.generate(PROMPT, max_tokens=3).finish)


if __name__ == "__main__":
    unittest.main(verbosity=2)
