"""The queue under clients that leave as soon as they have come, and short requests beside a long one."""

import collections
import concurrent.futures
import pathlib
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.innocent_stream import InnocentStream  # noqa: E402
from support.raw_http2 import RawConnection, message_head  # noqa: E402
from support.service import Service, make_request, read_stream  # noqa: E402

import grpc  # noqa: E402
from documents import make_document  # noqa: E402
from kvasir.v1 import generation_pb2_grpc  # noqa: E402

GENERATE = "/kvasir.v1.Generation/Generate"
DOCUMENT = make_document("multi_key", 8000, num_questions=1, seed=5).text
INNOCENT_REQUESTS = 36


class Queue(unittest.TestCase):
    def serve(self, *flags):
        self.service = self.enterContext(Service(flags=flags))

    def test_requests_that_are_reset_leave_their_place_at_once(self):
        self.serve("--max-queue-len=32", "--max-num-batched-tokens=1024")
        prompt = make_request(DOCUMENT[:800], max_tokens=1).SerializeToString()
        ending = threading.Event()
        opened = [0]

        def open_and_reset():
            connection = RawConnection(self.service.address)
            streams = collections.deque()
            while not ending.is_set() and not connection.gone:
                stream = connection.call(GENERATE)
                if not connection.send(stream, message_head(len(prompt)) + prompt, end=True):
                    break
                streams.append(stream)
                if len(streams) > 8:  # after the time to reach the queue
                    connection.reset_stream(streams.popleft())
                opened[0] += 1
                time.sleep(1 / 900)
            connection.close()

        def ask(channel):
            try:
                read_stream(generation_pb2_grpc.GenerationStub(channel).Generate(make_request("hi", max_tokens=1)))
                return "answered"
            except grpc.RpcError as error:
                return error.code().name

        with InnocentStream(self.service) as innocent:
            long_prompt = self.service.stream(DOCUMENT[:30000], max_tokens=1)  # has long steps
            attacker = threading.Thread(target=open_and_reset)
            attacker.start()
            time.sleep(0.3)
            channel = grpc.insecure_channel(self.service.address, options=[("grpc.use_local_subchannel_pool", 1)])
            began = time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(6) as clients:
                answers = list(clients.map(ask, [channel] * INNOCENT_REQUESTS))
            took = time.monotonic() - began
            ending.set()
            attacker.join()
            long_prompt.cancel()
            channel.close()
        print(f"{opened[0]} requests opened and reset; {answers.count('answered')} of {INNOCENT_REQUESTS} innocent ones "
              f"answered in {took:.1f} s")
        innocent.check(self, longest_gap_s=10)  # a step of 1,024 tokens on a busy machine
        self.assertGreater(opened[0], 100)
        self.assertEqual(answers.count("answered"), INNOCENT_REQUESTS, answers)

    def test_short_requests_pass_a_long_prompt(self):
        self.serve()  # no innocent stream: beside decoding, steps leave room for others anyway
        read = threading.Event()

        def read_the_long_one():
            answer = self.service.generate(DOCUMENT[:30000], max_tokens=1)
            read.set()
            return answer.finish.usage.prompt_tokens, answer.token_times[0]

        with concurrent.futures.ThreadPoolExecutor(1) as client:
            long_prompt = client.submit(read_the_long_one)
            time.sleep(0.2)
            waits = []
            while not read.is_set():
                began = time.monotonic()
                self.service.generate(f"hello {len(waits)}", max_tokens=1)
                waits.append(time.monotonic() - began)
            prompt_tokens, took = long_prompt.result()
        print(f"beside a prompt of {prompt_tokens} tokens, read in {took:.2f} s, {len(waits) - 1} short requests were "
              f"answered, each after {min(waits):.2f} to {max(waits):.2f} s")
        self.assertLess(max(waits), took / 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
