"""API keys over gRPC and HTTP, with real processes: who is let in, whose cache a request finds, limits, a key that is
taken back, and that keys are in no log, argument or configuration."""

import hashlib
import json
import pathlib
import secrets
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.http_client import ask  # noqa: E402
from support.service import KVASIR, ROOT, Service, generation_pb2, grpc, make_request, read_stream  # noqa: E402

from documents import make_document  # noqa: E402

DOCUMENT = make_document("multi_key", 2000, num_questions=1, seed=11).text
KEYS = {name: "sk-" + secrets.token_hex(32) for name in ("red", "blue", "busy", "small")}

SMALL_KV_GB = 0.02


def entry(name, key, **more):
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": f"{name}-team", **more}


def write_keys(path, *entries):
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps({"keys": list(entries)}))  # JSON is YAML
    draft.chmod(0o600)
    draft.rename(path)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


class ApiKeys(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-keys-")))
        cls.folder, cls.path = folder, folder / "keys.yaml"
        cls.entries = [entry("red", KEYS["red"]), entry("blue", KEYS["blue"]),
                       entry("busy", KEYS["busy"], **{"concurrent-requests": 1, "tokens-per-minute": 400}),
                       entry("small", KEYS["small"], **{"kv-size-gb": SMALL_KV_GB})]
        write_keys(cls.path, *cls.entries)
        cls.service = cls.enterClassContext(Service(flags=[f"--api-keys-file={cls.path}"]))

    def generate(self, key, prompt=DOCUMENT, **options):
        metadata = [("authorization", f"Bearer {key}")] if key else []
        return read_stream(self.service.stub.Generate(make_request(prompt, max_tokens=1, ignore_eos=True, **options),
                                                      metadata=metadata))

    def complete(self, key, **body):
        return ask(self.service, "POST", "/v1/completions", {"prompt": DOCUMENT, "max_tokens": 1, **body},
                   bearer(key) if key else {})

    def test_every_call_needs_a_key_and_probes_none(self):
        stub = self.service.stub
        for call, request in ((stub.Tokenize, generation_pb2.TokenizeRequest(text="x")),
                              (stub.Detokenize, generation_pb2.DetokenizeRequest(token_ids=[5])),
                              (stub.GetModelInfo, generation_pb2.GetModelInfoRequest()),
                              (stub.GetServerInfo, generation_pb2.GetServerInfoRequest()),
                              (lambda r, metadata: list(stub.Generate(r, metadata=metadata)), make_request("x"))):
            for key in ("", "sk-wrong", KEYS["red"][:-1]):
                with self.assertRaises(grpc.RpcError) as refused:
                    call(request, metadata=[("authorization", f"Bearer {key}")] if key else [])
                self.assertEqual(refused.exception.code(), grpc.StatusCode.UNAUTHENTICATED)
            call(request, metadata=[("authorization", f"Bearer {KEYS['red']}")])
        for method, path in (("GET", "/v1/models"), ("GET", "/version"), ("GET", "/load"), ("GET", "/metrics"),
                             ("GET", "/tokenizer_info"), ("GET", "/status/events"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
                             ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/status/selections"), ("GET", "/nothing")):
            reply = ask(self.service, method, path, {} if method == "POST" else None)
            self.assertEqual((reply.status, reply.error["type"]), (401, "authentication_error"), path)
            self.assertEqual(reply.headers["www-authenticate"], "Bearer")
            if path == "/status/events":
                continue  # it does not end
            known = ask(self.service, method, path, {} if method == "POST" else None, bearer(KEYS["blue"]))
            self.assertNotEqual(known.status, 401, path)
        for path in ("/health", "/ping", "/"):
            self.assertEqual(ask(self.service, "GET", path).status, 200)

    def test_tenants_with_one_document_find_nothing_of_each_other(self):
        self.assertEqual(self.generate(KEYS["red"]).cached_tokens, 0)
        self.assertGreater(self.generate(KEYS["red"]).cached_tokens, 1000)
        self.assertEqual(self.generate(KEYS["blue"]).cached_tokens, 0)
        # What a client claims leads nowhere else than into parts of its own tenant.
        for claim in ("red-team", "red-team:", ""):
            self.assertEqual(self.generate(KEYS["blue"], tenant_id=claim).cached_tokens > 0, claim == "")
        cached = self.complete(KEYS["red"]).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.assertGreater(cached, 1000)
        salted = self.complete(KEYS["red"], cache_salt="a").json["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.assertEqual(salted, 0)

    def test_limits_are_told_with_a_time_to_come_back(self):
        running = self.service.stub.Generate(make_request([5] * 20, max_tokens=2000, ignore_eos=True),
                                             metadata=[("authorization", f"Bearer {KEYS['busy']}")])
        next(running)
        reply = self.complete(KEYS["busy"])
        self.assertEqual(reply.status, 429, reply.body)
        self.assertIn("the API key busy has 1 running requests", reply.error["message"])
        for response in running:
            if response.HasField("tokens") and response.tokens.index > 500:
                running.cancel()
                break
        time.sleep(0.5)
        reply = self.complete(KEYS["busy"])
        self.assertEqual(reply.status, 429, reply.body)
        self.assertIn("400 tokens a minute", reply.error["message"])
        self.assertGreater(int(reply.headers["retry-after"]), 5)
        self.assertEqual(self.complete(KEYS["red"], prompt="x").status, 200, "the others go on")

    def test_the_kv_of_running_requests_is_bounded(self):
        [tier] = [tier for tier in self.service.stub.GetServerInfo(
            generation_pb2.GetServerInfoRequest(), metadata=[("authorization", f"Bearer {KEYS['red']}")]).tiers
                  if tier.tier == generation_pb2.TIER_HOST]
        blocks = int(SMALL_KV_GB * 1e9 / (tier.total_bytes / tier.total_blocks))  # that the key may hold
        self.assertGreater(blocks, 4)
        half = [5] * (blocks // 2 * 64)  # with one token of answer exactly its blocks
        running = self.service.stub.Generate(make_request(half[:-999], max_tokens=1000, ignore_eos=True),
                                             metadata=[("authorization", f"Bearer {KEYS['small']}")])
        next(running)
        refused = self.complete(KEYS["small"], prompt=half + [5] * 64 * 2)
        self.assertEqual(refused.status, 429, refused.body)
        self.assertRegex(refused.error["message"], rf"the API key small may hold {SMALL_KV_GB} GB of KV, of which [\d.]+ GB "
                         rf"are free beside its 1 running requests, and this request may reach [\d.]+ GB \({len(half) + 128} "
                         "tokens of prompt, 1 of answer\\); lower max_tokens, or wait for one to end")
        self.assertIn("retry-after", refused.headers)
        self.assertEqual(self.complete(KEYS["small"], prompt=half).status, 200, "what is free may be used")
        never = self.complete(KEYS["small"], prompt="x", max_tokens=(blocks + 1) * 64)
        self.assertEqual(never.status, 400, never.body)
        self.assertIn("lower max_tokens", never.error["message"])
        self.assertEqual(self.complete(KEYS["red"], prompt=half + [5] * 64 * 2).status, 200, "the others go on")
        running.cancel()
        self.await_reply(lambda: self.complete(KEYS["small"], prompt=half + [5] * 64 * 2), 200)

    def await_reply(self, call, status):
        deadline = time.monotonic() + 10
        while (reply := call()).status != status:
            self.assertLess(time.monotonic(), deadline, reply.body)
            time.sleep(0.1)

    def test_a_key_that_is_taken_back_is_refused(self):
        key = "sk-" + secrets.token_hex(32)
        write_keys(self.path, *self.entries, entry("short", key))
        self.await_status(key, 200)
        write_keys(self.path, *self.entries)
        self.await_status(key, 401)

    def await_status(self, key, status):
        deadline = time.monotonic() + 10
        while ask(self.service, "GET", "/version", None, bearer(key)).status != status:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.1)

    def test_commands_send_the_key_of_a_file(self):
        file = self.folder / "red.key"
        file.write_text(KEYS["red"] + "\n")
        for command in (["generate", "--prompt=x", "--max-tokens=1"], ["status"],
                        ["bench", "--streams=1", "--requests=1", "--prompt-tokens=20", "--max-tokens=2"]):
            for flags, code in (([], 1), ([f"--api-key-file={file}"], 0)):
                run = subprocess.run([KVASIR, *command, f"--server={self.service.address}", *flags], capture_output=True,
                                     text=True, timeout=60)
                self.assertEqual(run.returncode, code, f"{command}\n{run.stdout}{run.stderr}")
                self.assertNotIn(KEYS["red"], run.stdout + run.stderr)

    def test_keys_are_named_and_never_told(self):
        self.generate(KEYS["red"], prompt="x")
        self.service.wait_for_log('api_key="red"')
        said = self.service.log() + self.service.metrics_text()
        said += subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout
        for key in KEYS.values():
            self.assertNotIn(key, said)
            self.assertNotIn(hashlib.sha256(key.encode()).hexdigest(), said)


class Door(unittest.TestCase):
    def serve(self, *flags):
        return subprocess.run([KVASIR, "serve", "--model", ROOT / "tests" / "model" / "needle-8k", "--port=0",
                               "--http-port=0", "--metrics-port=0", *flags], capture_output=True, text=True, timeout=60)

    def test_a_server_that_would_answer_strangers_does_not_start(self):
        for host in ("0.0.0.0", "[::]"):
            refused = self.serve(f"--host={host}")
            self.assertEqual(refused.returncode, 1)
            self.assertIn("--allow-anonymous", refused.stderr)
        with tempfile.TemporaryDirectory() as folder:
            refused = self.serve("--host=0.0.0.0", f"--api-keys-file={folder}/none")
            self.assertIn("cannot be read", refused.stderr)
        with Service(flags=["--host=0.0.0.0", "--allow-anonymous"]) as service:
            self.assertTrue(service.generate("x", max_tokens=1).token_ids)


if __name__ == "__main__":
    unittest.main(verbosity=2)
