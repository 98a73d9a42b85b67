"""Logs of a running server beside what its clients saw: one line for every request and refusal, with the same id,
tokens, cached tokens and times; every line valid JSON whatever clients put into ids; no prompt and no answer."""

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
from support.service import Service, generation_pb2, make_request, read_stream  # noqa: E402

import grpc  # noqa: E402
from vllm.grpc import vllm_engine_pb2 as vllm  # noqa: E402
from vllm.grpc import vllm_engine_pb2_grpc  # noqa: E402

os.environ.pop("KVASIR_BUILD", None)  # the server warns of variables that it does not know

HOSTILE = 'a"}\n{"level":"error","message":"\u2028\u00fc\x1b[31m\\'
SECRET = "Rumpelstiltskin"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROMPT = f"{SECRET} said: " + "the straw is spun to gold. " * 40


def seconds(duration):
    return duration.seconds + 1e-9 * duration.nanos


def lines_of(service):
    return [json.loads(line) for line in service.log().splitlines()]


def without_quotes(reason):
    """The part of a refusal's reason that is logged: to its first quotation mark."""
    said, quoted = re.fullmatch("([^\"']*)(.*)", reason, re.DOTALL).groups()
    return (said + ("..." if quoted else ""))[:256]


def skipped_share(attention):
    total = attention.prefill_blocks_total + attention.decode_blocks_total
    skipped = sum(getattr(phase, reason) for phase in (attention.prefill_blocks_skipped, attention.decode_blocks_skipped)
                  for reason in ("selected_out", "window", "pruned", "terminated"))
    return skipped / total


class Logs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.service = cls.enterClassContext(Service(flags=[
            "--log-format=json", "--log-level=debug", "--tensor-parallel-size=2", "--max-num-seqs=4",
            "--sparse-selector=quest", "--sparse-token-budget=64", "--sparse-sink-tokens=64", "--sparse-window-tokens=64"]))

    def line_of(self, request_id):
        """Returns the only line of a request, which may come a moment after the client's answer."""
        deadline = time.monotonic() + 10
        while True:
            found = [line for line in lines_of(self.service) if line.get("request_id") == request_id]
            if found or time.monotonic() > deadline:
                self.assertEqual(len(found), 1, f"{request_id}: {found}")
                return found[0]
            time.sleep(0.02)

    def refused(self, code, metadata=(), **options):
        with self.assertRaises(grpc.RpcError) as raised:
            read_stream(self.service.stub.Generate(make_request(**options), timeout=60, metadata=metadata))
        self.assertEqual(raised.exception.code(), code)
        return dict(raised.exception.initial_metadata())["x-request-id"], raised.exception

    def check_ended(self, line, finish, tenant, wall_s):
        usage, timing = finish.usage, finish.timing
        self.assertEqual((line["message"], line["level"], line["status"], line["policy"], line["tenant"]),
                         ("request ended", "info", "OK", "default", tenant))
        self.assertEqual(line["finish_reason"], {1: "stop", 2: "length"}[finish.reason])
        cached = usage.cached_tokens
        self.assertEqual([line[name] for name in ("request_id", "prompt_tokens", "answer_tokens", "cached_device",
                                                  "cached_host", "cached_disk", "cached_peer")],
                         [finish.request_id, usage.prompt_tokens, usage.completion_tokens, cached.device, cached.host,
                          cached.disk, cached.peer])
        self.assertAlmostEqual(line["queue_s"], seconds(timing.queue), places=8)
        self.assertAlmostEqual(line["ttft_s"], seconds(timing.time_to_first_token), places=8)
        self.assertAlmostEqual(line["mean_itl_s"], seconds(timing.decode) / (usage.completion_tokens - 1), places=8)
        self.assertAlmostEqual(line["skipped_share"], skipped_share(finish.attention), places=8)
        self.assertLessEqual(seconds(timing.time_to_first_token) + seconds(timing.decode), line["total_s"])
        self.assertLessEqual(line["total_s"], wall_s)

    def test_an_ended_request_is_logged_as_its_client_saw_it(self):
        for request_id, tenant, stop in (("plain", "cold", ()), ("again", "cold", ()), (HOSTILE, HOSTILE, ()),
                                         ("stopped", "cold", " ")):
            with self.subTest(request_id=request_id):
                start = time.monotonic()
                answer = self.service.generate(PROMPT, request_id=request_id, tenant_id=tenant, max_tokens=8,
                                               ignore_eos=True, stop=stop)
                line = self.line_of(request_id)
                if answer.finish.usage.completion_tokens > 1:
                    self.check_ended(line, answer.finish, tenant, time.monotonic() - start)
                self.assertEqual(answer.finish.request_id, request_id)
        self.assertGreater(self.line_of("again")["cached_device"] + self.line_of("again")["cached_host"], 0)
        self.assertGreater(self.line_of("again")["skipped_share"], 0)

    def test_a_cancelled_request_is_logged_with_its_status(self):
        stream = self.service.stream(PROMPT, request_id="leaves", max_tokens=4000, ignore_eos=True)
        next(stream)
        stream.cancel()
        line = self.line_of("leaves")
        self.assertEqual((line["message"], line["status"]), ("request ended", "CANCELLED"))
        self.assertGreater(line["prompt_tokens"], 100)
        self.assertNotIn("finish_reason", line)

    def test_a_refusal_is_logged_with_its_reason(self):
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        for options in (dict(prompt=""), dict(prompt="hi", policy="nonsense"), dict(prompt="hi", top_p=0.0),
                        dict(prompt=SECRET, stop=SECRET * 200), dict(prompt=SECRET * 20000),
                        dict(prompt="hi", request_id="x" * 129)):
            with self.subTest(options=str(options)[:60]):
                request_id, error = self.refused(invalid, **options)
                line = self.line_of(request_id)
                self.assertEqual((line["message"], line["status"]), ("request refused", "INVALID_ARGUMENT"))
                self.assertEqual(line["reason"], without_quotes(error.details()))

    def test_a_running_id_is_refused_and_both_are_logged(self):
        stream = self.service.stream(PROMPT, request_id="twin", max_tokens=4000, ignore_eos=True)
        next(stream)
        self.refused(grpc.StatusCode.ALREADY_EXISTS, prompt="hi", request_id="twin")
        stream.cancel()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            found = sorted(line["status"] for line in lines_of(self.service) if line.get("request_id") == "twin")
            if len(found) == 2:
                break
            time.sleep(0.02)
        self.assertEqual(found, ["ALREADY_EXISTS", "CANCELLED"])

    def test_the_headers_id_and_trace_are_carried_and_the_id_returned(self):
        stream = self.service.stub.Generate(make_request("hi", max_tokens=2), timeout=60, metadata=[
            ("x-request-id", "from-header"), ("traceparent", TRACE)])
        self.assertEqual(dict(stream.initial_metadata())["x-request-id"], "from-header")
        self.assertEqual(read_stream(stream).finish.request_id, "from-header")
        line = self.line_of("from-header")
        self.assertEqual((line["trace_id"], line["parent_id"]), tuple(TRACE.split("-")[1:3]))
        stream = self.service.stub.Generate(make_request("hi", max_tokens=2), timeout=60,
                                            metadata=[("traceparent", TRACE.upper())])
        ours = dict(stream.initial_metadata())["x-request-id"]
        self.assertEqual(read_stream(stream).finish.request_id, ours)
        self.assertNotIn("trace_id", self.line_of(ours))

    def test_an_id_that_no_header_can_hold_is_returned_in_percent_encoding(self):
        stream = self.service.stream("hi", request_id="a\n\u00fc", max_tokens=2)
        self.assertEqual(dict(stream.initial_metadata())["x-request-id"], "a%0A%C3%BC")
        self.assertEqual(read_stream(stream).finish.request_id, "a\n\u00fc")

    def test_every_line_names_time_level_process_and_rank(self):
        ranks = set()
        for line in lines_of(self.service):
            self.assertRegex(line["time"], re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$"))
            self.assertIn(line["level"], ("debug", "info", "warn", "error"))
            self.assertIn(line["process"], ("coordinator", "worker"))
            if line["message"].startswith("rank "):
                ranks.add(line["rank"])
        self.assertEqual(ranks, {0, 1})

    def test_prompts_and_answers_are_not_logged(self):
        answer = self.service.generate(PROMPT, request_id="quiet", max_tokens=12, ignore_eos=True, stop=SECRET)
        self.line_of("quiet")
        log = self.service.log()
        self.assertNotIn(SECRET, log)
        self.assertNotIn("straw", log)
        self.assertGreater(len(answer.text), 10)  # or it might be there by chance
        self.assertNotIn(json.dumps(answer.text)[1:-1], log)


class Refusals(unittest.TestCase):
    """Every call that is refused, with keys, of each service of the port."""

    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-logs-")))
        cls.keys = {name: "sk-" + secrets.token_hex(32) for name in ("red", "busy")}
        entries = [{"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": f"{name}-team", **more}
                   for (name, key), more in zip(cls.keys.items(), ({}, {"concurrent-requests": 1}))]
        (folder / "keys.yaml").write_text(json.dumps({"keys": entries}))
        (folder / "keys.yaml").chmod(0o600)
        (folder / "model").mkdir()
        cls.service = cls.enterClassContext(Service(model=link_chat_model_that_refuses(folder / "model"), flags=[
            "--log-format=json", "--log-level=debug", f"--api-keys-file={folder / 'keys.yaml'}", "--max-num-seqs=4"]))
        cls.vllm = vllm_engine_pb2_grpc.VllmEngineStub(cls.service.channel)

    def calls(self):
        """What every key may ask: (call, request)."""
        stub, api, engine = self.service.stub, generation_pb2, self.vllm
        return [(stub.Generate, make_request("x")), (stub.Tokenize, api.TokenizeRequest(text=SECRET)),
                (stub.Tokenize, api.TokenizeRequest(text=SECRET * 20000)), (stub.Detokenize, api.DetokenizeRequest(token_ids=[5])),
                (stub.GetModelInfo, api.GetModelInfoRequest()), (stub.GetServerInfo, api.GetServerInfoRequest()),
                (engine.Generate, vllm.GenerateRequest(text=SECRET)), (engine.Embed, vllm.EmbedRequest()),
                (engine.Abort, vllm.AbortRequest()), (engine.GetModelInfo, vllm.GetModelInfoRequest()),
                (engine.GetServerInfo, vllm.GetServerInfoRequest())]

    def unserved(self):
        """What no key may ask: (code, call, request)."""
        stub, api, engine = self.service.stub, generation_pb2, self.vllm
        chat = api.ChatInput(messages=json.dumps([{"role": SECRET, "content": "x"}]))
        for call, request in ((stub.Tokenize, api.TokenizeRequest(text=SECRET, chat=chat)),
                              (stub.Tokenize, api.TokenizeRequest(chat=chat)), (stub.Generate, api.GenerateRequest(chat=chat)),
                              (stub.Tokenize, api.TokenizeRequest(chat=api.ChatInput(messages=SECRET))),
                              (stub.Detokenize, api.DetokenizeRequest(token_ids=[1 << 31])),
                              (stub.GetServerInfo, api.GetServerInfoRequest(max_requests=1 << 31)),
                              (stub.Generate, make_request(SECRET, policy="nonsense")),
                              (engine.Generate, vllm.GenerateRequest(request_id="x" * 200, text=SECRET)),
                              (engine.Generate, vllm.GenerateRequest())):
            yield "INVALID_ARGUMENT", call, request
        yield "UNIMPLEMENTED", engine.Embed, vllm.EmbedRequest()
        yield "UNIMPLEMENTED", engine.Generate, vllm.GenerateRequest(sampling_params=vllm.SamplingParams(n=2))
        for method in ("kvasir.v1.Generation/Embed", "vllm.grpc.engine.VllmEngine/GetLoads", "nobody.Nothing/None"):
            yield "UNIMPLEMENTED", self.service.channel.unary_unary("/" + method), b""
        for call, method in ((self.service.channel.unary_unary, "kvasir.v1.Generation/Tokenize"),
                             (self.service.channel.unary_stream, "kvasir.v1.Generation/Generate"),
                             (self.service.channel.unary_unary, "vllm.grpc.engine.VllmEngine/Abort")):
            yield "INVALID_ARGUMENT", call("/" + method), SECRET.encode() + b"\xff"

    def refuse(self, call, request, bearer):
        """Returns the error, whose call must not be answered."""
        with self.assertRaises(grpc.RpcError) as refused:
            answer = call(request, timeout=60, metadata=[("authorization", f"Bearer {bearer}")] if bearer else [])
            for _ in answer if hasattr(answer, "cancel") else ():
                pass
        return refused.exception

    def test_a_refusal_has_one_line_with_what_the_client_saw(self):
        seen = []
        for code, call, request in self.unserved():
            seen.append((code, "red", self.refuse(call, request, self.keys["red"])))
        for call, request in self.calls() + [(call, request) for _, call, request in self.unserved()]:
            seen += [("UNAUTHENTICATED", None, self.refuse(call, request, bearer)) for bearer in ("", "sk-wrong")]
        running = self.service.stub.Generate(make_request("x", max_tokens=4000, ignore_eos=True),
                                             metadata=[("authorization", f"Bearer {self.keys['busy']}")])
        next(running)
        seen.append(("RESOURCE_EXHAUSTED", "busy", self.refuse(self.service.stub.Generate, make_request("x"), self.keys["busy"])))
        running.cancel()
        self.check_lines(self.service, seen)
        for secret in (SECRET, "sk-wrong", *self.keys.values()):
            self.assertNotIn(secret, self.service.log())

    def check_lines(self, service, seen):
        deadline = time.monotonic() + 10
        while len(refused := [line for line in lines_of(service) if line["message"] == "request refused"]) < len(seen):
            self.assertLess(time.monotonic(), deadline, f"{len(refused)} lines of {len(seen)} refusals")
            time.sleep(0.05)
        self.assertEqual(len(refused), len(seen))
        for code, key, error in seen:
            with self.subTest(code, details=error.details()[:100]):
                self.assertEqual(error.code().name, code)
                request_id = dict(error.initial_metadata())["x-request-id"]
                (line,) = [line for line in refused if line["request_id"] == request_id]
                level = "warn" if code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE") else "info"
                self.assertEqual((line["status"], line["level"], line["reason"]), (code, level, without_quotes(error.details())))
                self.assertEqual((line.get("api_key"), line["tenant"]), (key, f"{key}-team" if key else ""))

    def test_a_call_without_a_worker_is_logged(self):
        with Service(flags=["--log-format=json"]) as service:
            (worker,) = subprocess.run(["pgrep", "-P", str(service.process.pid)], capture_output=True, text=True,
                                       check=True).stdout.split()
            os.kill(int(worker), signal.SIGKILL)
            service.wait_for_log("starting it again")
            engine = vllm_engine_pb2_grpc.VllmEngineStub(service.channel)
            seen = [("UNAVAILABLE", None, self.refuse(call, request, "")) for call, request in (
                (service.stub.GetModelInfo, generation_pb2.GetModelInfoRequest()), (service.stub.Generate, make_request("x")),
                (engine.GetModelInfo, vllm.GetModelInfoRequest()))]
            self.check_lines(service, seen)


if __name__ == "__main__":
    unittest.main(verbosity=2)
