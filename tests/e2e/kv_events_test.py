"""A router's reader of KV events, on the real server: it follows the published blocks over random requests with evictions,
and then foretells exactly how many tokens of each prompt are cached. Needs pyzmq and msgpack of PyPI.
"""

import pathlib
import random
import struct
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support import pypi  # noqa: E402
from support.prometheus import free_port  # noqa: E402
from support.service import Service  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402

BLOCK = 64
END = -1
REQUESTS, PROBES = 1000, 30


class Reader:
    """Blocks by parent and tokens, from replays alone: what a router does that starts late."""

    def __init__(self, address):
        import zmq
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, 10000)
        self.socket.connect(address)
        self.next, self.blocks, self.cleared, self.removed = 0, {}, 0, 0

    def catch_up(self):
        """The second answer has every event that happened before the first question."""
        for _ in range(2):
            self.replay()

    def replay(self):
        import msgpack
        self.socket.send_multipart([b"", struct.pack(">q", self.next)])
        while True:
            empty, number, batch = self.socket.recv_multipart()
            assert empty == b""
            if struct.unpack(">q", number)[0] == END:
                return
            assert struct.unpack(">q", number)[0] == self.next, "a batch is missing"
            self.next += 1
            for event in msgpack.unpackb(batch)[1]:
                self.apply(*event)

    def apply(self, kind, hashes=(), *fields):
        if kind == "BlockStored":
            parent, tokens, size, _, medium = fields
            assert (size, medium) == (BLOCK, "CPU")
            self.blocks[hashes[0]] = (parent, tuple(tokens))
        elif kind == "BlockRemoved":
            del self.blocks[hashes[0]]
            self.removed += 1
        else:
            assert kind == "AllBlocksCleared", kind
            self.blocks.clear()
            self.cleared += 1

    def cached(self, prompt):
        """Tokens at the start of the prompt that are cached; the last one is always computed."""
        found = {place: block for block, place in self.blocks.items()}
        parent, hits = None, 0
        while (hits + 1) * BLOCK < len(prompt):
            block = found.get((parent, tuple(prompt[hits * BLOCK:(hits + 1) * BLOCK])))
            if block is None:
                break
            parent, hits = block, hits + 1
        return hits * BLOCK

    def close(self):
        self.socket.close(0)


def random_prompt(chance):
    """Prompts share beginnings: each block is one of two."""
    return [token for _ in range(chance.randint(1, 6)) for token in [chance.randint(3, 4)] * BLOCK] + [5]


class KvEvents(unittest.TestCase):
    def test_a_reader_foretells_what_is_cached(self):
        pypi.use("pyzmq==26.4.0", "msgpack==1.1.0")
        chance = random.Random(1)
        with tempfile.TemporaryDirectory() as model:
            make_tiny_model(model)
            ports = [free_port(), free_port()]
            flags = ["--max-model-len=512", "--kv-host-size-gb=0.0009", "--kv-device-size-gb=0.0009",
                     f"--kv-events-endpoint=tcp://127.0.0.1:{ports[0]}", f"--kv-events-replay-endpoint=tcp://127.0.0.1:{ports[1]}"]
            with Service(model=model, flags=flags) as service:
                reader = Reader(f"tcp://127.0.0.1:{ports[1]}")
                self.addCleanup(reader.close)
                for _ in range(REQUESTS):
                    service.generate(random_prompt(chance), max_tokens=1)
                hits = []
                for _ in range(PROBES):
                    prompt = random_prompt(chance)
                    time.sleep(0.05)  # the last request gives back its blocks after its answer
                    reader.catch_up()
                    foretold = reader.cached(prompt)
                    self.assertEqual(service.generate(prompt, max_tokens=1).cached_tokens, foretold)
                    hits.append(foretold)
                print(f"{REQUESTS} requests, {reader.removed} blocks evicted; {PROBES} more found the 0 to {max(hits)} cached tokens "
                      "that the reader foretold")
                self.assertGreater(reader.removed, 50)
                self.assertGreater(len(set(hits)), 2, hits)

    def test_an_address_that_is_taken_is_refused(self):
        with self.assertRaises(RuntimeError) as raised:
            Service(flags=["--kv-events-endpoint=tcp://192.0.2.1:5557"])
        self.assertIn("--kv-events-endpoint tcp://192.0.2.1:5557", str(raised.exception))


if __name__ == "__main__":
    unittest.main(verbosity=2)
