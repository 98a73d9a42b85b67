"""The log beside what clients saw over HTTP: one line for every request and every refusal, with the id of the answer's
x-request-id, the tenant and key where they are known, tokens, cached tokens and times. No body and no key is in it."""

import hashlib
import json
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.chat_model import link_chat_model_that_refuses  # noqa: E402
from support.http_client import Reply, ask, open_connection, parse_events, raw_connection, read_to_end, send  # noqa: E402
from support.service import Service  # noqa: E402

os.environ.pop("KVASIR_BUILD", None)  # the server warns of variables that it does not know

SECRET = "Rumpelstiltskin"
PROMPT = f"{SECRET} said: " + "the straw is spun to gold. " * 40
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEYS = {name: "sk-" + secrets.token_hex(32) for name in ("red", "busy")}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STATUS = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 404: "NOT_FOUND", 405: "INVALID_ARGUMENT", 409: "ALREADY_EXISTS",
          413: "OUT_OF_RANGE", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}


def bearer(name, **headers):
    return {"authorization": f"Bearer {KEYS[name]}", **headers}


def without_fields(reason):
    """The words of a refusal without the name of its field, which the API calls otherwise than HTTP."""
    return re.sub(r"^(text|prompt): |\bsampling\.", "", reason)


def exchange(service, data):
    """The answer to raw bytes, after which the server closes."""
    with raw_connection(service) as connection:
        connection.sendall(data)
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    return Reply(int(first.split()[1]), {name.lower(): value for name, value in (h.split(": ", 1) for h in headers)}, body)


def lines(service):
    return [json.loads(line) for line in service.log().splitlines()]


def lines_of(service, *request_ids):
    """Waits until each id has a line, which may come a moment after the client's answer; returns all lines of them."""
    deadline = time.monotonic() + 10
    while True:
        found = [line for line in lines(service) if line.get("request_id") in request_ids]
        if {line["request_id"] for line in found} == set(request_ids) or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


class HttpLogs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-http-logs-")))
        keys = folder / "keys.yaml"
        keys.write_text(json.dumps({"keys": [
            {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": f"{name}-team", **more}
            for (name, key), more in zip(KEYS.items(), ({}, {"concurrent-requests": 1}))]}))
        keys.chmod(0o600)
        (folder / "model").mkdir()
        model = link_chat_model_that_refuses(folder / "model")
        cls.service = cls.enterClassContext(Service(model=model, flags=[
            "--log-format=json", "--log-level=debug", f"--api-keys-file={keys}", "--max-num-seqs=4"]))

    def tearDown(self):
        for line in self.service.log().splitlines():
            for secret in (SECRET, "straw", "sk-wrong", *KEYS.values()):
                self.assertFalse(secret in line, line)

    def check_ended(self, reply, request_id, usage, began, first_token_s=None):
        (line,) = lines_of(self.service, request_id)
        self.assertEqual((line["message"], line["level"], line["status"], line["finish_reason"]),
                         ("request ended", "info", "OK", "length"))
        self.assertEqual((line["tenant"], line["api_key"], reply.headers["x-request-id"]), ("red-team", "red", request_id))
        cached = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
        self.assertEqual([line[name] for name in ("prompt_tokens", "answer_tokens", "cached_device", "cached_host", "cached_disk", "cached_peer")],
                         [usage["prompt_tokens"], usage["completion_tokens"], cached["device"], cached["host"], cached["disk"], cached["peer"]])
        self.assertAlmostEqual(line["skipped_share"], usage["kvasir"]["sparsity"], places=8)
        decode_s = line["mean_itl_s"] * (line["answer_tokens"] - 1)
        self.assertLessEqual(line["queue_s"], line["ttft_s"])
        self.assertLessEqual(line["ttft_s"] + decode_s, line["total_s"])
        self.assertLessEqual(line["total_s"], time.monotonic() - began)
        if first_token_s is not None:
            self.assertLessEqual(line["ttft_s"], first_token_s)

    def test_an_ended_stream_is_logged_as_its_client_saw_it(self):
        for request_id in ("cold", "again"):
            began = time.monotonic()
            connection = open_connection(self.service)
            send(connection, "POST", COMPLETIONS, {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "stream": True,
                                                   "stream_options": {"include_usage": True}},
                 bearer("red", **{"x-request-id": request_id, "traceparent": TRACE}))
            answer = connection.getresponse()
            text, first_token_s = "", None
            while piece := answer.read1(65536).decode():
                text += piece
                if first_token_s is None and "data: " in text:
                    first_token_s = time.monotonic() - began
            connection.close()
            events = parse_events(text)
            usage = events.chunks[-1]["usage"]
            self.assertEqual(len(events.told), 20)
            reply = Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, b"")
            self.check_ended(reply, request_id, usage, began, first_token_s)
            (line,) = lines_of(self.service, request_id)
            self.assertEqual((line["trace_id"], line["parent_id"]), tuple(TRACE.split("-")[1:3]))
        self.assertGreater(usage["prompt_tokens_details"]["cached_tokens"], 0)

    def test_an_ended_conversation_has_the_servers_id(self):
        began = time.monotonic()
        reply = ask(self.service, "POST", CHAT, {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9,
                                                 "ignore_eos": True}, bearer("red"))
        self.assertRegex(reply.headers["x-request-id"], re.compile("^req-[0-9a-f]{16}$"))
        self.assertEqual(reply.json["id"], "chatcmpl-" + reply.headers["x-request-id"])
        self.check_ended(reply, reply.headers["x-request-id"], reply.json["usage"], began)

    def test_a_client_that_leaves_is_logged(self):
        connection = open_connection(self.service)
        send(connection, "POST", COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True},
             bearer("red", **{"x-request-id": "leaves"}))
        connection.getresponse().read(100)
        connection.close()
        (line,) = lines_of(self.service, "leaves")
        self.assertEqual((line["message"], line["status"]), ("request ended", "CANCELLED"))

    def refusals(self):
        """Asks for what is refused: yields (status, key's name or None, answer)."""
        def post(body, path=COMPLETIONS, key="red", **headers):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            return ask(self.service, "POST", path, data, bearer(key, **headers) if key else headers)
        for body in (b'{"prompt": "' + SECRET.encode(), SECRET.encode(), b'{"' + SECRET.encode() + b'": 1, ' * 2 + b'"x": 1}',
                     {"prompt": "x", "temperature": SECRET}, {"prompt": {SECRET: 1}}, {"prompt": ""},
                     {"prompt": PROMPT * 100}, {"prompt": "x", "stop": [SECRET] * 200}, {"prompt": "x", "n": 1000}):
            yield 400, "red", post(body)
        yield 400, "red", post({"messages": [{"role": "user", "content": [{"type": SECRET}]}]}, CHAT)
        yield 400, "red", post({"messages": [{"role": SECRET, "content": "x"}]}, CHAT)
        yield 400, "red", post({"prompt": [SECRET]}, "/tokenize")
        yield 400, "red", post({"tokens": SECRET}, "/detokenize")
        yield 400, None, post({"prompt": "x"}, **{"x-request-id": "x" * 129})
        yield 400, None, exchange(self.service, b"nonsense\r\n\r\n")
        yield 401, None, post({"prompt": SECRET}, key=None, **{"x-request-id": "no-key"})
        yield 401, None, post({"prompt": SECRET}, key=None, authorization="Bearer sk-wrong")
        yield 401, None, ask(self.service, "GET", "/status/events")
        yield 404, "red", post({"prompt": SECRET}, "/v1/nothing", **{"x-request-id": "nowhere"})
        yield 404, "red", post({"prompt": "x", "model": SECRET})
        yield 404, "red", ask(self.service, "GET", f"/v1/models/{SECRET}", None, bearer("red"))
        yield 405, "red", ask(self.service, "GET", COMPLETIONS, None, bearer("red"))
        yield 413, None, exchange(self.service, b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n")
        running = open_connection(self.service)
        send(running, "POST", COMPLETIONS, {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True},
             bearer("busy", **{"x-request-id": "twin"}))
        running.getresponse().read(10)
        yield 429, "busy", post({"prompt": "x"}, key="busy")
        running.close()

    def test_a_refusal_has_one_line_with_what_the_client_saw(self):
        before = len([line for line in lines(self.service) if line["message"] == "request refused"])
        seen = list(self.refusals())
        last = ask(self.service, "GET", "/last", None, bearer("red"))
        lines_of(self.service, last.headers["x-request-id"])
        refused = [line for line in lines(self.service) if line["message"] == "request refused"][before:]
        self.assertEqual(len(refused), len(seen) + 1)
        for status, key, reply in seen:
            with self.subTest(status=status, body=reply.body[:100]):
                self.assertEqual(reply.status, status, reply.body)
                (line,) = [line for line in refused if line["request_id"] == reply.headers["x-request-id"]]
                self.assertEqual((line["status"], line["level"]), (STATUS[status], "warn" if status == 429 else "info"))
                self.assertEqual((line.get("api_key"), line["tenant"]), (key, f"{key}-team" if key else ""))
                said, quoted = re.fullmatch("([^\"']*)(.*)", reply.error["message"], re.DOTALL).groups()
                self.assertEqual(without_fields(line["reason"]), without_fields(said + ("..." if quoted else ""))[:256])
        self.assertLess({"no-key", "nowhere"}, {line["request_id"] for line in refused})


class Unserved(unittest.TestCase):
    def test_a_refusal_without_a_worker_is_logged_and_probes_are_not(self):
        with Service(flags=["--log-format=json"]) as service:
            (worker,) = subprocess.run(["pgrep", "-P", str(service.process.pid)], capture_output=True, text=True,
                                       check=True).stdout.split()
            os.kill(int(worker), signal.SIGKILL)
            deadline = time.monotonic() + 30
            while ask(service, "GET", "/health").status != 503:
                self.assertLess(time.monotonic(), deadline)
            refused = [ask(service, "POST", COMPLETIONS, {"prompt": "x"}), ask(service, "GET", "/v1/models")]
            self.assertEqual([reply.status for reply in refused], [503, 503])
            found = lines_of(service, *[reply.headers["x-request-id"] for reply in refused])
            self.assertEqual([(line["message"], line["status"], line["level"], line["reason"]) for line in found],
                             [("request refused", "UNAVAILABLE", "warn", reply.error["message"]) for reply in refused])
            self.assertEqual(len([line for line in lines(service) if line["message"] == "request refused"]), 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
