"""HTTP clients that take nothing of their answers: each is noticed within --client-timeout, and until then costs at
most 1 MiB. The premises, that the answers did not fit into the sockets and that the bound was reached, are checked."""

import json
import os
import pathlib
import re
import socket
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.http_client import ask, read_events, read_to_end  # noqa: E402
from support.service import Service  # noqa: E402

COMPLETIONS = "/v1/completions"
TEXT = "Once upon a time"
TIMEOUT_S = 2
CLIENTS = int(os.environ.get("KVASIR_HTTP_READERS", 16))
MIB = 1 << 20


def ask_and_read_nothing(service, path, body, request_id):
    """Sends a request on a connection whose client has room for 4 KiB. Returns the connection."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    host, port = service.http_address.rsplit(":", 1)
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nx-request-id: {request_id}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def await_true(test, what, condition, within_s=60):
    deadline = time.monotonic() + within_s
    while not condition():
        test.assertLess(time.monotonic(), deadline, what)
        time.sleep(0.05)


class TakesNothing(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.service = cls.enterClassContext(Service(flags=[f"--client-timeout={TIMEOUT_S}", "--log-format=json"]))

    def test_a_whole_answer_that_is_not_taken_is_cut_off(self):
        began = time.monotonic()
        connection = ask_and_read_nothing(self.service, "/tokenize", {"prompt": "word " * 200_000, "return_token_strs": True}, "whole")
        await_true(self, "no answer", lambda: self.service.metric("kvasir_http_connections") == 1)
        await_true(self, "still connected", lambda: self.service.metric("kvasir_http_connections") == 0, within_s=TIMEOUT_S + 8)
        self.assertGreater(time.monotonic() - began, TIMEOUT_S)
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
        self.assertIn(b"200 OK", head)
        self.assertLess(len(body), int(re.search(rb"Content-Length: (\d+)", head)[1]), "it fits into the sockets")
        connection.close()

    def test_a_stream_that_is_not_taken_is_cut_off(self):
        connection = ask_and_read_nothing(self.service, COMPLETIONS, {"prompt": TEXT, "max_tokens": 8000, "ignore_eos": True,
                                                                      "stream": True}, "stream")
        self.service.wait_for_log('"request_id":"stream"', timeout_s=60)
        (line,) = [json.loads(line) for line in self.service.log().splitlines() if '"request_id":"stream"' in line]
        self.assertEqual((line["status"], line["reason"]), ("UNAVAILABLE", f"the client took nothing of its answer for {TIMEOUT_S}s"))
        self.assertNotIn(b"[DONE]", read_to_end(connection))
        connection.close()


class Costs(unittest.TestCase):
    @unittest.skipIf("SANITIZERS" in os.environ, "sanitizers keep memory that was freed")
    def test_what_waits_for_clients_that_do_not_read_is_at_most_1_mib_each(self):
        body = {"prompt": TEXT, "max_tokens": 4000, "ignore_eos": True, "logprobs": 20, "stream": True}
        with Service(flags=["--client-timeout=60", f"--max-num-seqs={CLIENTS}"]) as service:
            def memory(name):
                status = pathlib.Path(f"/proc/{service.process.pid}/status").read_text()
                return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", status)[1])
            read_events(service, COMPLETIONS, {**body, "max_tokens": 200})
            pathlib.Path(f"/proc/{service.process.pid}/clear_refs").write_text("5")  # VmHWM begins again
            before = memory("VmRSS")
            connections = [ask_and_read_nothing(service, COMPLETIONS, body, f"reader-{i}") for i in range(CLIENTS)]
            full = "the client does not read: 768 KiB of the answer wait for it"
            await_true(self, "the bound is not reached", lambda: service.log().count(full) == CLIENTS, within_s=120)
            self.assertEqual(ask(service, "GET", "/health").status, 200)
            each = (memory("VmHWM") - before) / CLIENTS
            print(f"{CLIENTS} clients that do not read: {each / MIB:.2f} MiB each at the peak")
            self.assertGreater(each, 0.3 * MIB, "nothing waited")
            self.assertLess(each, MIB)
            for connection in connections:
                connection.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
