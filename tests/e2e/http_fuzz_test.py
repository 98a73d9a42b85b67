"""Random hostile HTTP requests: torn heads, bodies of wrong types, mutated bytes, clients that leave.

Whatever comes, each answer is well-formed HTTP with a status of docs/api.md below 500, errors are OpenAI's JSON, a stream
beside them goes on, and nothing is left of the requests: no memory, descriptor, connection or running request.
KVASIR_FUZZ_REQUESTS is the number of requests (600), KVASIR_FUZZ_SEED the seed.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import random
import re
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.http_client import ask, raw_connection, read_to_end  # noqa: E402
from support.innocent_stream import InnocentStream  # noqa: E402
from support.service import ROOT, Service  # noqa: E402

REQUESTS = int(os.environ.get("KVASIR_FUZZ_REQUESTS", "600"))
SEED = int(os.environ.get("KVASIR_FUZZ_SEED", "1"))
CLIENTS = 8
STATUSES = {200, 400, 404, 405, 409, 413, 429}
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
OTHERS = ("/", "/health", "/v1/models", "/v1/models/x", "/version", "/load", "/nothing", "/%00", "/../etc", "*", "//", "/?" + "a" * 2000)
SEEDS = [path.read_bytes() for path in sorted((ROOT / "tests" / "fuzz" / "corpus" / "http_body").iterdir())]
FIELDS = ("prompt", "messages", "max_tokens", "n", "stream", "stop", "logprobs", "echo", "seed", "logit_bias", "temperature",
          "top_p", "top_k", "min_p", "stop_token_ids", "stream_options", "sparsity", "quality", "cache_salt", "tokens",
          "tools", "chat_template_kwargs", "response_format", "model", "best_of", "suffix", "top_logprobs")


def value(rng, depth=0):
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind in (1, 2):
        return rng.choice([0, 1, -1, 2, 3.5, 129, 2**31, 2**63, -2**63, 1e300, 5])
    if kind in (3, 4, 5):
        return rng.choice(["", "x", "user", "a\u0000b", "\ud83e\udd8a", "<|end_of_text|>", "default", "\u202e" * 20, "word " * 300])
    if kind == 6:
        return {rng.choice(("role", "content", "type", "text", "name", "x")): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [value(rng, depth + 1) for _ in range(rng.randrange(4))]


def body(rng):
    if rng.random() < 0.3:
        return rng.choice(SEEDS)
    fields = {name: value(rng) for name in rng.sample(FIELDS, rng.randrange(6))}
    if rng.random() < 0.5:
        fields["prompt"] = rng.choice(["x", [1, 2, 3], ["a", "b"], [[5], [6]]])
    if rng.random() < 0.3:
        fields["messages"] = [{"role": "user", "content": value(rng)}]
    fields.update(max_tokens=rng.choice([1, 2, 3, 0, -1, 10**9, "3"]), n=rng.choice([1, 1, 1, 2, 0, 129, 1e300]))
    return json.dumps(fields).encode("utf-8", "surrogatepass")


def mutated(rng, data):
    data = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[at:at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            data[at:at] = rng.choice([b"\r\n", b"\r\n\r\n", b"\0", b"\xff", b"{" * 50, b"9" * 30, b": ", b"chunked"])
        elif kind == 2:
            del data[at:at + rng.randrange(1, 40)]
        else:
            del data[at:]
    return bytes(data)


def request(rng):
    """Returns the bytes of a request, and whether it is complete: then the server closes after the answer."""
    if rng.random() < 0.2:
        method = rng.choice(["GET", "POST", "PUT", "HEAD", "OPTIONS", "G" * 100])
        head = f"{method} {rng.choice(OTHERS + PATHS)} HTTP/1.1\r\nConnection: close\r\n"
        return (head + rng.choice(["", "x: " + "y" * 20000 + "\r\n", "x-request-id: \u00fc\r\n", "Expect: 100-continue\r\n"]) +
                "\r\n").encode(), True
    data = body(rng)
    length = f"Content-Length: {len(data)}"
    if rng.random() < 0.1:
        data, length = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data), "Transfer-Encoding: chunked"
    whole = f"POST {rng.choice(PATHS)} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{length}\r\n\r\n".encode() + data
    return (whole, True) if rng.random() < 0.6 else (mutated(rng, whole), False)


def answers(data, to_head):
    """Yields (status, body) of each answer in the bytes, to HEAD without a body; raises where they are no HTTP."""
    while data:
        head, found, rest = data.partition(b"\r\n\r\n")
        lines = head.decode("ascii").split("\r\n")
        status = int(re.fullmatch(r"HTTP/1\.1 (\d{3}) [A-Za-z ]+", lines[0])[1])
        if status == 100:
            data = rest
            continue
        headers = {name.lower(): text for name, text in (line.split(": ", 1) for line in lines[1:])}
        assert found and headers["x-request-id"], head
        if "content-length" not in headers:  # a stream
            assert status == 200 and (b"[DONE]" in rest or headers["content-type"] == "text/event-stream"), rest[-200:]
            return (yield status, rest)
        size = 0 if to_head else int(headers["content-length"])
        assert len(rest) >= size, f"{len(rest)} of {size} bytes came"
        yield status, rest[:size]
        data = rest[size:]


class HttpFuzz(unittest.TestCase):
    def exchange(self, number):
        """Sends request `number`; returns the statuses of the answers."""
        rng = random.Random(SEED * 1_000_003 + number)
        data, complete = request(rng)
        with raw_connection(self.service) as connection:
            connection.settimeout(60)
            try:
                connection.sendall(data)
                if not complete:
                    connection.shutdown(1)
            except OSError:
                pass  # it was refused while it came
            if rng.random() < 0.05:
                return ["left"]
            got = read_to_end(connection)
        statuses = []
        try:
            to_head = data.startswith(b"HEAD ")
            for status, text in answers(got, to_head):
                statuses.append(status)
                if status >= 400 and not to_head:
                    error = json.loads(text)["error"]
                    assert isinstance(error["message"], str) and {"type", "param", "code"} <= error.keys(), error
            assert set(statuses) <= STATUSES, statuses
            assert statuses or not complete, "no answer"
        except Exception as failure:
            raise AssertionError(f"request {number} of seed {SEED}: {data[:300]!r}\n{got[:600]!r}") from failure
        return statuses or ["none"]

    def run_numbers(self, numbers):
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            return collections.Counter(status for found in pool.map(self.exchange, numbers) for status in found)

    def held(self):
        """Memory in bytes, descriptors and connections of the server."""
        return [self.service.metric(name) for name in ("process_resident_memory_bytes", "process_open_fds", "kvasir_http_connections")]

    def test_every_answer_is_proper_and_nothing_is_left(self):
        with Service() as self.service:
            with InnocentStream(self.service) as innocent:
                warm = REQUESTS // 10
                self.run_numbers(range(warm))
                before = self.held()
                began = time.monotonic()
                found = self.run_numbers(range(warm, REQUESTS))
                took = time.monotonic() - began
            innocent.check(self, longest_gap_s=5)
            deadline = time.monotonic() + 20
            while ask(self.service, "GET", "/load").json["server_load"] or self.service.metric("kvasir_http_connections"):
                self.assertLess(time.monotonic(), deadline, "requests or connections are left")
                time.sleep(0.1)
            after = self.held()
            print(f"{REQUESTS - warm} requests in {took:.0f} s: {dict(found)}; memory {before[0] / 2**20:.1f} MiB before, "
                  f"{after[0] / 2**20:.1f} after; descriptors {before[1]:.0f}, {after[1]:.0f}")
            self.assertLess(after[0] - before[0], 24 << 20)
            self.assertLessEqual(after[1], before[1] + 2)
            self.assertGreater(min(found[200], found[400], found[404], found[405]), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
