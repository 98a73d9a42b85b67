"""Answers that go on after their coordinator was killed, from what the client has of them: by gRPC, by `kvasir generate`, and by the
header Last-Event-ID of HTTP. The workers outlive it and keep their blocks."""

import contextlib
import http.client
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "faults"))
from support.chat_model import make_tiny_chat_model  # noqa: E402
from support.http_client import ask, open_connection, send  # noqa: E402
from support.service import KVASIR, SLOWER  # noqa: E402
from group import Group  # noqa: E402
from runs import FLAGS  # noqa: E402
from streams import prompt  # noqa: E402

import grpc  # noqa: E402

PROMPT = prompt(1000)
SAMPLED = dict(max_tokens=400, ignore_eos=True, temperature=0.9, seed=5, logprobs=1, presence_penalty=0.3)


class Resume(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-resume-")))
        cls.group = cls.enterClassContext(Group(make_tiny_chat_model(folder / "model"), 1, FLAGS))

    @property
    def service(self):
        return self.group.service

    def resumed(self):
        return self.service.metric("kvasir_requests_resumed_total")

    def refused(self, expected, **options):
        with self.assertRaises(grpc.RpcError) as raised:
            self.service.generate(PROMPT, **options)
        self.assertEqual(raised.exception.code(), expected)
        return raised.exception.details()

    def test_by_grpc_from_the_workers_blocks(self):
        clean = self.service.generate(PROMPT, **SAMPLED)
        tokens, text, logprobs = [], "", []
        with self.assertRaises(grpc.RpcError) as raised:
            for response in self.service.stream(PROMPT, **SAMPLED):
                tokens += response.tokens.token_ids
                text += response.tokens.text
                logprobs += response.tokens.logprobs
                if len(tokens) == 150:
                    self.group.kill_coordinator()
        self.assertEqual(raised.exception.code(), grpc.StatusCode.UNAVAILABLE)
        self.assertLess(len(tokens), 400, "the answer ended before the kill")
        answer = []
        for response in self.service.stream(PROMPT, resume=tokens, **SAMPLED):
            answer.append(response)
            new = response.tokens
            if new.token_ids:
                self.assertEqual(new.index, len(tokens))
            tokens += new.token_ids
            text += new.text
            logprobs += new.logprobs
        self.assertEqual(tokens, clean.token_ids)
        self.assertEqual(text, clean.text)
        self.assertEqual(logprobs, clean.logprobs)
        usage = answer[-1].finish.usage
        self.assertEqual((usage.prompt_tokens, usage.completion_tokens), (1000, 400))
        cached = usage.cached_tokens
        self.assertGreaterEqual(cached.device + cached.host + cached.disk, 0.9 * len(PROMPT), "the workers lost their blocks")
        self.assertEqual(self.resumed(), 1)

    def test_an_answer_that_is_whole_only_ends(self):
        clean = self.service.generate(PROMPT, max_tokens=20)
        again = list(self.service.stream(PROMPT, max_tokens=20, resume=clean.token_ids))
        self.assertEqual([r.WhichOneof("event") for r in again if not r.HasField("progress")], ["finish"])
        self.assertEqual(again[-1].finish.reason, clean.finish.reason)

    def test_what_cannot_go_on_with_the_same_tokens_is_refused(self):
        clean = self.service.generate(PROMPT, max_tokens=20)
        words = self.refused(grpc.StatusCode.INVALID_ARGUMENT, max_tokens=20, temperature=0.5, resume=clean.token_ids[:5])
        self.assertIn("sampling.seed is not set", words)
        other = [*clean.token_ids[:4], clean.token_ids[4] + 1]
        words = self.refused(grpc.StatusCode.FAILED_PRECONDITION, max_tokens=20, resume=other)
        self.assertIn(f"resume.token_ids[4] is {other[4]}, this server computes {clean.token_ids[4]}", words)

    def command(self, *flags):
        return [str(KVASIR), "generate", f"--server={self.service.address}", "--prompt=" + "Tell me all. " * 30, "--max-tokens=1500",
                "--ignore-eos", *flags]

    def test_the_command_goes_on_by_itself(self):
        flags = ("--temperature=0.8", "--seed=7", "--logprobs=0")
        clean = subprocess.run(self.command(*flags), capture_output=True, check=True)
        # Unbuffered: communicate() does not see what a buffer holds.
        with subprocess.Popen(self.command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
            begin = process.stdout.read(200)
            self.group.kill_coordinator()
            rest, told = process.communicate(timeout=60 * SLOWER)
        self.assertEqual(process.returncode, 0, told)
        self.assertIn(b"asking it to go on", told)
        self.assertEqual(begin + rest, clean.stdout)
        lines = [line for line in told.splitlines() if b"logprob" in line]
        self.assertEqual(lines, [line for line in clean.stderr.splitlines() if b"logprob" in line])

    def test_the_command_ends_when_it_is_not_to_ask_again(self):
        with subprocess.Popen(self.command("--resume-timeout=0", "--quiet"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.read(200)
            self.group.kill_coordinator()
            _, told = process.communicate(timeout=60 * SLOWER)
        self.assertNotEqual(process.returncode, 0)
        self.assertIn(b"UNAVAILABLE", told)

    def events(self, path, body, headers=None, kill_after=None):
        """The events of a stream, (id, data), to its end or to its coordinator's."""
        events, lines = [], {}
        with contextlib.closing(open_connection(self.service)) as connection:
            send(connection, "POST", path, {**body, "stream": True}, headers)
            reply = connection.getresponse()
            self.assertEqual(reply.status, 200)
            with contextlib.suppress(*([ConnectionError, http.client.IncompleteRead] if kill_after else [])):
                for line in reply:
                    name, _, value = line.decode().rstrip("\n").partition(": ")
                    lines[name] = value
                    if line != b"\n":
                        continue
                    if lines.get("data", "").startswith("{"):
                        events.append((lines.get("id"), json.loads(lines["data"])))
                    lines = {}
                    if len(events) == kill_after:
                        self.group.kill_coordinator()
        return events

    def goes_on(self, path, body):
        body = {**body, "stream_options": {"event_ids": True}}
        clean = self.events(path, body)
        broken = self.events(path, body, kill_after=100)
        self.assertLess(len(broken), len(clean), "the answer ended before the kill")
        last = [event for event, _ in broken if event is not None][-1]
        rest = self.events(path, body, {"Last-Event-ID": last})
        self.assertEqual([self.without_name(event) for event in broken + rest], [self.without_name(event) for event in clean])

    def without_name(self, event):
        told, data = event
        return told, {key: value for key, value in data.items() if key not in ("id", "created")}

    def test_a_stream_of_completions(self):
        self.goes_on("/v1/completions", {"prompt": PROMPT, "logprobs": 1, **{k: v for k, v in SAMPLED.items() if k != "logprobs"}})

    def test_a_stream_of_chat(self):
        self.goes_on("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me all. " * 20}], "max_tokens": 1000,
                                              "ignore_eos": True, "temperature": 0})

    def test_a_stream_that_would_be_another_is_refused(self):
        reply = ask(self.service, "POST", "/v1/completions", {"prompt": "a", "stream": True}, headers={"Last-Event-ID": "3"})
        self.assertEqual(reply.status, 400)
        self.assertIn("seed is not set", reply.json["error"]["message"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
