"""Long texts are tokenized on other threads than those that serve streams."""

import pathlib
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.innocent_stream import InnocentStream  # noqa: E402
from support.service import MESSAGE_BYTES, Service, make_request  # noqa: E402

import grpc  # noqa: E402
from kvasir.v1 import generation_pb2, generation_pb2_grpc  # noqa: E402

TEXTS = 3
TEXT = "word " * (36_000_000 // 5)


class Texts(unittest.TestCase):
    def first_token_beside(self, long_call):
        with Service(flags=["--kv-host-size-gb=0.1", "--kv-device-size-gb=0.05"]) as service:
            ended = []

            def run(channel):
                try:
                    long_call(generation_pb2_grpc.GenerationStub(channel))
                    ended.append("OK")
                except grpc.RpcError as error:
                    ended.append(error.code().name)

            channels = [grpc.insecure_channel(service.address, options=[
                ("grpc.max_send_message_length", MESSAGE_BYTES), ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.use_local_subchannel_pool", 1)]) for _ in range(TEXTS)]
            with InnocentStream(service) as innocent:
                calls = [threading.Thread(target=run, args=(channel,)) for channel in channels]
                for call in calls:
                    call.start()
                waits = []
                while any(call.is_alive() for call in calls):
                    began = time.monotonic()
                    service.generate("hello", max_tokens=1)
                    waits.append(time.monotonic() - began)
                    time.sleep(0.02)
            for channel in channels:
                channel.close()
            print(f"{TEXTS} texts of {len(TEXT)} bytes ended {sorted(set(ended))}; beside them a first token came after "
                  f"{max(waits):.3f} s at most")
            innocent.check(self, longest_gap_s=2)
            self.assertLess(max(waits), 1.5)
            return ended

    def test_tokenize(self):
        request = generation_pb2.TokenizeRequest(text=TEXT)
        ended = self.first_token_beside(lambda stub: stub.Tokenize(request, timeout=60))
        self.assertEqual(ended, ["OK"] * TEXTS)

    def test_generate(self):
        request = make_request(TEXT, max_tokens=1)
        ended = self.first_token_beside(lambda stub: list(stub.Generate(request, timeout=60)))
        self.assertEqual(ended, ["INVALID_ARGUMENT"] * TEXTS)  # longer than the context


if __name__ == "__main__":
    unittest.main(verbosity=2)
