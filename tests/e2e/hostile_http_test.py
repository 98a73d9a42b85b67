"""HTTP clients that drip, flood, stall, lie or send nonsense are refused or cut; others are served beside them."""

import json
import pathlib
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.http_client import ask, open_connection, raw_connection, read_to_end, receive, send  # noqa: E402
from support.innocent_stream import InnocentStream  # noqa: E402
from support.service import NO_FLOOD, SLOWER, Service  # noqa: E402

COMPLETIONS = "/v1/completions"
TEXT = "Once upon a time"
READERS = 6
SLOW_CLIENTS = 100


def post(body, path=COMPLETIONS, more=""):
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Hostile(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.service = cls.enterClassContext(Service(flags=["--client-timeout=2"]))

    def exchange(self, data):
        """Status and body of the answer to raw bytes, after which the server closes."""
        with raw_connection(self.service) as connection:
            connection.sendall(data)
            answer = read_to_end(connection)
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), head, body

    def refuse(self, status, data, *words):
        got, head, body = self.exchange(data)
        self.assertEqual(got, status, head)
        self.assertIn(b"Connection: close", head)
        for word in words:
            self.assertIn(word, json.loads(body)["error"]["message"])

    def test_what_is_no_http_is_refused(self):
        self.refuse(400, b"nonsense\r\n\r\n", "HTTP")
        self.refuse(400, b"GET / HTTP/1.1\r\nx: " + b"y" * 20000 + b"\r\n\r\n", "header")
        self.refuse(400, b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "HTTP")
        self.refuse(400, b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", "HTTP")
        self.refuse(413, b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", "67108864")

    def test_bodies_that_are_no_request_are_refused(self):
        deep = b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}"
        for body, word in [(b"{", "JSON"), (b"[]", "object"), (b'{"prompt": "x"', "JSON"), (deep, "deeper"),
                           (b'{"prompt": "\xff\xfe"}', "JSON"), (b'{"prompt": "x", "prompt": "y"}', "twice"), (b"", "JSON"),
                           (b'{"prompt": "x", "temperature": 1e999}', "JSON"), (b'{"prompt": "a\x00"}', "NUL"),
                           (json.dumps({"prompt": "x", **{str(i): i for i in range(5000)}}).encode(), "keys"),
                           (b'{"prompt": [' + b"0," * (1 << 23) + b"0]}", "values")]:
            with self.subTest(body=body[:40]):
                reply = ask(self.service, "POST", COMPLETIONS, body)
                self.assertEqual(reply.status, 400, reply.body)
                self.assertIn(word, reply.error["message"])

    def test_a_bad_request_id_is_refused(self):
        for request_id in ("x" * 129, "a b"):
            reply = ask(self.service, "GET", "/version", headers={"x-request-id": request_id})
            self.assertEqual(reply.status, 400)
            self.assertRegex(reply.headers["x-request-id"], "^req-[0-9a-f]{16}$")

    def test_a_large_body_is_taken_when_its_client_is_told_to_go_on(self):
        body = json.dumps({"prompt": "word " * 200000}).encode()
        with raw_connection(self.service) as connection:
            connection.sendall(post(b"", more="Expect: 100-continue\r\n").replace(b"Content-Length: 0", b"Content-Length: %d" % len(body)))
            self.assertEqual(connection.recv(100), b"HTTP/1.1 100 Continue\r\n\r\n")
            connection.sendall(body)
            self.assertTrue(connection.recv(100).startswith(b"HTTP/1.1 400"), "longer than the context")

    def test_chunked_bodies_and_pipelines_are_read(self):
        body = json.dumps({"prompt": TEXT, "max_tokens": 2}).encode()
        chunked = (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" +
                   b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:])) + b"0\r\n\r\n")
        last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        with raw_connection(self.service) as connection:
            connection.sendall(chunked + post(body) + post(body) + last)
            answer = read_to_end(connection)
        self.assertEqual(answer.count(b"HTTP/1.1 200 OK"), 4)

    def test_a_client_of_http_1_0_gets_a_stream_that_ends_with_the_connection(self):
        body = json.dumps({"prompt": TEXT, "max_tokens": 2, "stream": True}).encode()
        status, head, text = self.exchange(post(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        self.assertEqual(status, 200)
        self.assertNotIn(b"chunked", head)
        self.assertTrue(text.endswith(b"data: [DONE]\n\n"))

    def test_slow_clients_blind_nobody_and_are_cut(self):
        with InnocentStream(self.service) as innocent:
            slow = [raw_connection(self.service) for _ in range(SLOW_CLIENTS)]
            for i in range(12):
                for connection in slow:
                    try:
                        connection.send(b"GET /health HTTP/1.1\r\nHost"[i:i + 1])
                    except OSError:
                        pass  # the server has cut it
                began = time.monotonic()
                self.assertEqual(ask(self.service, "GET", "/health").status, 200)
                self.assertLess(time.monotonic() - began, 1)
                time.sleep(1)
        for connection in slow:
            connection.settimeout(2)
            self.assertEqual(read_to_end(connection), b"", "a slow client is still connected")
            connection.close()
        innocent.check(self, longest_gap_s=2)

    @unittest.skipIf(NO_FLOOD, "tokens come too slowly")
    def test_answers_that_nobody_reads_are_dropped(self):
        body = {"prompt": TEXT, "max_tokens": 6000, "ignore_eos": True, "logprobs": 20, "stream": True}
        with InnocentStream(self.service) as innocent:
            connections = [open_connection(self.service) for _ in range(READERS)]
            for connection in connections:
                send(connection, "POST", COMPLETIONS, body)
            begun = time.monotonic()
            deadline = begun + 60 * SLOWER
            while ask(self.service, "GET", "/load").json["requests_running"] > 1 or time.monotonic() < begun + 2:
                self.assertLess(time.monotonic(), deadline, "they still run")
                time.sleep(0.1)
        for connection in connections:
            connection.close()
        innocent.check(self, longest_gap_s=5)

    def test_the_server_outlives_all_of_this(self):
        connection = open_connection(self.service)
        send(connection, "POST", COMPLETIONS, {"prompt": TEXT, "max_tokens": 2})
        self.assertEqual(receive(connection).status, 200)
        connection.close()


class TooMany(unittest.TestCase):
    def test_idle_connections_give_way_to_new_ones(self):
        def limit():
            import resource
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        with Service(preexec=limit) as service:  # 64 connections
            idle = [raw_connection(service) for _ in range(100)]
            for _ in range(20):
                self.assertEqual(ask(service, "GET", "/health").status, 200)
            self.assertLessEqual(service.metric("kvasir_http_connections"), 64)
            for connection in idle:
                connection.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
