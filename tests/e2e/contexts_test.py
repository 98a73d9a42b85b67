"""Contexts: documents with a name, by gRPC, HTTP and the command line. A request that names one gets the tokens of a
request that sends all of it, and finds the document in the cache: every test checks by counters that it did."""

import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.http_client import ask, read_events  # noqa: E402
from support.service import KVASIR, Service, make_request, read_stream  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402

import grpc  # noqa: E402
from kvasir.v1 import contexts_pb2, contexts_pb2_grpc  # noqa: E402

BLOCK_TOKENS = 64
FLAGS = ["--kv-device-size-gb=0.01", "--kv-host-size-gb=0.05", "--mass-sample-rate=0", "--threads=1"]
OPTIONS = dict(max_tokens=6, ignore_eos=True)


def tokens_of(count, seed):
    rng = random.Random(seed)
    return [rng.randrange(3, 1400) for _ in range(count)]


class Client:
    """The calls of kvasir.v1.Contexts for one tenant."""

    def __init__(self, service, tenant=""):
        self.stub = contexts_pb2_grpc.ContextsStub(service.channel)
        self.tenant = tenant

    def call(self, method, request, /, **fields):
        kind = getattr(contexts_pb2, request)
        return getattr(self.stub, method)(kind(tenant_id=self.tenant, **fields))

    def create(self, name, tokens, **fields):
        return self.call("Create", "CreateContextRequest", name=name, token_ids={"ids": tokens}, **fields)

    def get(self, name):
        return self.call("Get", "GetContextRequest", name=name)

    def names(self):
        return [context.name for context in self.call("List", "ListContextsRequest").contexts]

    def await_read(self, name, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            context = self.get(name)
            if context.state == contexts_pb2.CONTEXT_STATE_READY:
                return context
            if context.state == contexts_pb2.CONTEXT_STATE_FAILED:
                raise AssertionError(f"{name} was not read: {context.state_reason}")
            time.sleep(0.02)
        raise AssertionError(f"{name} was not read within {timeout_s} s: {context}")


def ask_about(service, context, question, tenant="", **options):
    request = make_request(question, tenant_id=tenant, **{**OPTIONS, **options})
    request.context = context
    return read_stream(service.stub.Generate(request, timeout=60))


def command(service, *arguments):
    return subprocess.run([str(KVASIR), "context", *arguments, f"--server={service.address}"], capture_output=True, text=True,
                          timeout=60)


class ContextsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-contexts-")))
        cls.model = make_tiny_model(cls.folder / "model")
        (cls.model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
        cls.service = cls.enterClassContext(Service(model=cls.model, flags=FLAGS))

    def assertRefused(self, code, words, call, *arguments, **fields):
        with self.assertRaises(grpc.RpcError) as caught:
            call(*arguments, **fields)
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        self.assertIn(words, caught.exception.details())

    def test_a_question_gets_the_answer_of_the_whole_prompt_from_cached_blocks(self):
        document, question = tokens_of(300, seed=1), tokens_of(20, seed=2)
        expected = self.service.generate(document + question, tenant_id="plain", **OPTIONS)
        self.assertEqual(expected.cached_tokens, 0)
        client = Client(self.service, "reader")
        made = client.create("contract", document)
        self.assertEqual(made.tokens, 300)
        self.assertEqual(client.await_read("contract").processed_tokens, 300)
        answer = ask_about(self.service, "contract", question, "reader")
        self.assertEqual(answer.token_ids, expected.token_ids)
        self.assertEqual(answer.cached_tokens, 300 // BLOCK_TOKENS * BLOCK_TOKENS)
        self.assertEqual(answer.finish.usage.prompt_tokens, 320)

    def test_whole_blocks_at_the_end_of_a_document_are_cached_under_a_sparse_policy(self):
        flags = [*FLAGS, "--sparse-selector=quest", "--sparse-token-budget=64", "--sparse-window-tokens=64"]
        with Service(model=self.model, flags=flags) as service:
            client = Client(service)
            client.create("even", tokens_of(256, seed=3))
            client.await_read("even")
            answer = ask_about(service, "even", tokens_of(70, seed=4))
            self.assertEqual(answer.cached_tokens, 256)

    def test_a_fork_shares_the_blocks_of_its_origin(self):
        client = Client(self.service, "forks")
        document, more, question = tokens_of(200, seed=5), tokens_of(100, seed=6), tokens_of(9, seed=7)
        client.create("origin", document)
        client.await_read("origin")
        hits = self.service.metric("kvasir_prefix_cache_hits_total")
        client.call("Fork", "ForkContextRequest", name="origin", into="longer", token_ids={"ids": more})
        self.assertEqual(client.await_read("longer").tokens, 300)
        self.assertEqual(self.service.metric("kvasir_prefix_cache_hits_total") - hits, 192)
        client.call("Fork", "ForkContextRequest", name="origin", into="copy")
        self.assertEqual(client.await_read("copy").tokens, 200)
        answer = ask_about(self.service, "longer", question, "forks")
        self.assertEqual(answer.cached_tokens, 256)
        self.assertEqual(answer.token_ids, self.service.generate(document + more + question, **OPTIONS).token_ids)
        self.assertEqual(client.names(), ["copy", "longer", "origin"])

    def test_names_are_a_tenants_own(self):
        mine, theirs = Client(self.service, "mine"), Client(self.service, "theirs")
        mine.create("paper", tokens_of(100, seed=8))
        mine.await_read("paper")
        self.assertEqual(theirs.names(), [])
        self.assertRefused(grpc.StatusCode.NOT_FOUND, "no context paper", theirs.get, "paper")
        self.assertRefused(grpc.StatusCode.NOT_FOUND, "no context paper", ask_about, self.service, "paper", [5], "theirs")
        theirs.create("paper", tokens_of(50, seed=9))
        self.assertEqual(theirs.await_read("paper").tokens, 50)
        self.assertEqual(mine.get("paper").tokens, 100)
        theirs.call("Delete", "DeleteContextRequest", name="paper")
        self.assertEqual(mine.names(), ["paper"])
        self.assertEqual(theirs.names(), [])

    def test_errors_say_what_is_wrong(self):
        client = Client(self.service, "errors")
        client.create("once", tokens_of(70, seed=10))
        code = grpc.StatusCode
        self.assertRefused(code.ALREADY_EXISTS, "there is a context once", client.create, "once", [1, 2])
        self.assertRefused(code.INVALID_ARGUMENT, "name has a character outside", client.create, "Once", [1])
        self.assertRefused(code.INVALID_ARGUMENT, "more than the context", client.create, "long", tokens_of(20000, seed=1))
        self.assertRefused(code.INVALID_ARGUMENT, "token_ids.ids[0]", client.create, "outside", [1472])
        self.assertRefused(code.INVALID_ARGUMENT, "policy", client.create, "policy", [1], policy={"name": "none"})
        self.assertRefused(code.NOT_FOUND, "no context other", ask_about, self.service, "other", [5], "errors")
        self.assertRefused(code.NOT_FOUND, "no context other", client.call, "Delete", "DeleteContextRequest", name="other")
        self.assertRefused(code.NOT_FOUND, "no context other", client.call, "Fork", "ForkContextRequest", name="other",
                           into="new")
        self.assertEqual(client.names(), ["once"])

    def test_the_number_of_contexts_and_of_their_tokens_is_bounded(self):
        flags = [*FLAGS, "--max-contexts=3", "--max-context-tokens=201", "--max-tenant-contexts=2", "--max-tenant-context-tokens=200"]
        with Service(model=self.model, flags=flags) as service:
            client, other = Client(service), Client(service, "other")
            client.create("a", tokens_of(150, seed=1))
            exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
            self.assertRefused(exhausted, "--max-context-tokens", client.create, "b", tokens_of(52, seed=2))
            self.assertRefused(exhausted, "--max-tenant-context-tokens", client.create, "b", tokens_of(51, seed=2))
            client.create("b", tokens_of(50, seed=2))
            self.assertRefused(exhausted, "--max-tenant-contexts", client.create, "c", [1])
            other.create("c", [1])
            self.assertRefused(exhausted, "--max-contexts", other.create, "d", [1])
            other.call("Delete", "DeleteContextRequest", name="c")
            client.call("Delete", "DeleteContextRequest", name="a")
            client.create("c", tokens_of(150, seed=3))
            client.await_read("c")

    def test_http_has_every_call(self):
        document, question = tokens_of(140, seed=11), tokens_of(12, seed=12)
        salt = {"cache_salt": "http"}
        reply = ask(self.service, "POST", "/v1/contexts", {"name": "doc", "tokens": document, **salt})
        self.assertEqual((reply.status, reply.json["name"], reply.json["tokens"]), (200, "doc", 140), reply.body)
        Client(self.service, "http").await_read("doc")
        reply = ask(self.service, "GET", "/v1/contexts/doc", salt)
        self.assertEqual((reply.json["state"], reply.json["processed_tokens"]), ("CONTEXT_STATE_READY", 140))
        body = {"prompt": question, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "context": "doc", **salt}
        reply = ask(self.service, "POST", "/v1/completions", body)
        whole = ask(self.service, "POST", "/v1/completions", {**body, "context": None, "prompt": document + question})
        self.assertEqual(reply.json["choices"][0]["text"], whole.json["choices"][0]["text"])
        self.assertEqual(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"], 128)
        self.assertTrue(read_events(self.service, "/v1/completions", body).told)
        reply = ask(self.service, "POST", "/v1/contexts/doc/fork", {"into": "doc2", "tokens": [7], **salt})
        self.assertEqual((reply.status, reply.json["tokens"]), (200, 141), reply.body)
        names = [context["name"] for context in ask(self.service, "GET", "/v1/contexts", salt).json["contexts"]]
        self.assertEqual(names, ["doc", "doc2"])
        self.assertEqual(ask(self.service, "DELETE", "/v1/contexts/doc", salt).status, 200)
        self.assertEqual(ask(self.service, "GET", "/v1/contexts/doc", salt).status, 404)
        self.assertEqual(ask(self.service, "POST", "/v1/completions", body).status, 404)
        self.assertEqual(ask(self.service, "PUT", "/v1/contexts/doc2", salt).status, 405)
        self.assertEqual(ask(self.service, "GET", "/v1/contexts/doc2/none", salt).status, 404)

    def test_chat_follows_a_context(self):
        client = Client(self.service, "chats")
        client.create("doc", tokens_of(130, seed=13))
        client.await_read("doc")
        body = {"messages": [{"role": "user", "content": "w1"}], "context": "doc", "cache_salt": "chats", "max_tokens": 3}
        reply = ask(self.service, "POST", "/v1/chat/completions", body)
        self.assertEqual(reply.status, 200, reply.body)
        self.assertEqual(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"], 128, reply.body)

    def test_the_command_has_every_call(self):
        document = self.folder / "document.txt"
        document.write_text("the pass key is w7 and the sky is blue " * 30)
        made = command(self.service, "create", "--name=file", f"--file={document}", "--wait", "--json")
        self.assertEqual(made.returncode, 0, made.stderr)
        context = json.loads(made.stdout)
        self.assertEqual(context["state"], "CONTEXT_STATE_READY")
        self.assertGreater(context["tokens"], 128)
        self.assertEqual(command(self.service, "fork", "--name=file", "--into=file2", "--text=more", "--wait").returncode, 0)
        listed = command(self.service, "list").stdout
        self.assertIn("file2", listed)
        self.assertIn("ready", command(self.service, "get", "--name=file").stdout)
        hits = self.service.metric("kvasir_prefix_cache_hits_total")
        answer = subprocess.run([str(KVASIR), "generate", "--context=file", "--prompt=the pass key is", "--max-tokens=4", "--quiet",
                                 f"--server={self.service.address}"], capture_output=True, text=True, timeout=60)
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertGreaterEqual(self.service.metric("kvasir_prefix_cache_hits_total") - hits, 128)
        for name in ("file", "file2"):
            self.assertEqual(command(self.service, "delete", f"--name={name}").returncode, 0)
        missing = command(self.service, "get", "--name=file")
        self.assertEqual(missing.returncode, 1)
        self.assertIn("no context file", missing.stderr)
        self.assertEqual(command(self.service, "burn").returncode, 1)

    def test_contexts_outlive_the_server_beside_the_stores_on_disk(self):
        store = self.folder / "store"
        flags = [*FLAGS, f"--kv-disk-path={store}", "--kv-disk-size-gb=1"]
        document, question = tokens_of(200, seed=14), tokens_of(10, seed=15)
        with Service(model=self.model, flags=flags) as service:
            Client(service).create("kept", document)
            Client(service).await_read("kept")
            expected = ask_about(service, "kept", question).token_ids
        records = list((store / "contexts").iterdir())
        self.assertEqual(len(records), 1)
        self.assertEqual(records[0].stat().st_mode & 0o777, 0o600)
        with Service(model=self.model, flags=flags) as service:
            self.assertEqual(Client(service).get("kept").state, contexts_pb2.CONTEXT_STATE_READY)
            answer = ask_about(service, "kept", question)
            self.assertEqual(answer.token_ids, expected)
            self.assertEqual(answer.finish.usage.cached_tokens.disk, 192)
            Client(service).call("Delete", "DeleteContextRequest", name="kept")
            self.assertEqual(list((store / "contexts").iterdir()), [])
        records[0].parent.joinpath("0" * 64 + ".context").write_bytes(b"KVCTX001 not a record")
        with Service(model=self.model, flags=flags) as service:
            self.assertEqual(Client(service).names(), [])
            service.wait_for_log("is left out")


if __name__ == "__main__":
    unittest.main()
