"""Contexts that leave one server and come to another one of another degree, by gRPC, HTTP and the command line: their
blocks are found in the cache, not computed. What is damaged, or another tenant's or model's, is refused whole. One
transfer runs at a time, ends when its context is forgotten, and holds up nobody."""

import pathlib
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from e2e import on_demand_test  # noqa: E402
from e2e.contexts_test import FLAGS, Client, ask_about, command, tokens_of  # noqa: E402
from e2e.disk_test import counter, read_bytes  # noqa: E402
from support.http_client import ask  # noqa: E402
from support.service import Service  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402

import grpc  # noqa: E402
from kvasir.v1 import contexts_pb2  # noqa: E402

DOCUMENT, QUESTION = tokens_of(300, seed=1), tokens_of(12, seed=2)
CACHED = 256  # whole blocks of the document


def import_parts(client, name, parts, tenant=None):
    tenant = client.tenant if tenant is None else tenant
    return client.stub.Import(contexts_pb2.ImportContextRequest(name=name, tenant_id=tenant, part=part) for part in parts)


class ContextTransferTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-transfer-")))
        cls.model = make_tiny_model(cls.folder / "model")
        cls.file = cls.folder / "doc.context"
        with Service(model=cls.model, flags=[*FLAGS, "--tensor-parallel-size=2"]) as service:
            client = Client(service)
            client.create("doc", DOCUMENT)
            client.await_read("doc")
            cls.expected = ask_about(service, "doc", QUESTION).token_ids
            cls.parts = list(client.call("Export", "ExportContextRequest", name="doc"))
            reply = ask(service, "GET", "/v1/contexts/doc/export")
            assert reply.status == 200, reply.body
            cls.frames = reply.body
            exported = command(service, "export", "--name=doc", f"--file={cls.file}")
            assert exported.returncode == 0, exported.stderr
            assert ask(service, "GET", "/v1/contexts/none/export").status == 404
        cls.one = cls.enterClassContext(Service(model=cls.model, flags=FLAGS))

    def check_imported(self, service, client, name):
        client.await_read(name)
        self.assertEqual(client.get(name).tokens, len(DOCUMENT))
        answer = ask_about(service, name, QUESTION, client.tenant)
        self.assertEqual(answer.cached_tokens, CACHED)
        self.assertEqual(answer.token_ids, self.expected)

    def test_the_parts_are_those_of_every_kv_head(self):
        self.assertEqual(self.parts[0].head.token_ids, DOCUMENT)
        self.assertEqual([(part.extent.block, part.extent.head) for part in self.parts[1:]],
                         [(block, head) for block in range(4) for head in range(2)])
        self.assertEqual(self.file.read_bytes(), self.frames)

    def test_another_degree_imports_by_grpc_and_computes_none_of_its_blocks(self):
        with Service(model=self.model, flags=FLAGS) as service:
            client = Client(service)
            self.assertEqual(service.generate(DOCUMENT[:200], tenant_id="other", max_tokens=1).cached_tokens, 0)
            hits = service.metric("kvasir_prefix_cache_hits_total")
            self.assertEqual(import_parts(client, "moved", self.parts).tokens, 300)
            client.await_read("moved")
            self.assertEqual(service.metric("kvasir_prefix_cache_hits_total") - hits, CACHED)  # by the read
            self.check_imported(service, client, "moved")
            import_parts(client, "again", self.parts)  # what is there is left as it is
            self.check_imported(service, client, "again")
            self.assertEqual(client.call("Evict", "EvictRequest", tenant=True).host_blocks, CACHED // 64)  # they have an owner

    def test_http_and_the_command_import_too(self):
        for name, take in (("http", self.import_by_http), ("command", self.import_by_command)):
            with self.subTest(name), Service(model=self.model, flags=FLAGS) as service:
                take(service)
                self.check_imported(service, Client(service), "moved")

    def import_by_http(self, service):
        reply = ask(service, "POST", "/v1/contexts/moved/import", self.frames)
        self.assertEqual((reply.status, reply.json["name"]), (200, "moved"), reply.body)

    def import_by_command(self, service):
        done = command(service, "import", "--name=moved", f"--file={self.file}", "--wait")
        self.assertEqual(done.returncode, 0, done.stderr)

    def assertRefused(self, code, words, parts, client=None, name="bad"):
        client = client or Client(self.one)
        with self.assertRaises(grpc.RpcError) as caught:
            import_parts(client, name, parts)
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        self.assertIn(words, caught.exception.details())
        self.assertEqual(client.names(), [])

    def changed(self, index, **fields):
        parts = [contexts_pb2.ContextPart.FromString(part.SerializeToString()) for part in self.parts]
        for name, value in fields.items():
            setattr(parts[index].extent if index else parts[index].head, name, value)
        return parts

    def test_what_is_not_whole_is_refused_and_leaves_no_context(self):
        code = grpc.StatusCode
        Client(self.one).call("Evict", "EvictRequest", tenant=True)  # blocks that are there would not be taken
        extent = bytearray(self.parts[3].extent.extent)
        extent[-5] ^= 1
        self.assertRefused(code.INVALID_ARGUMENT, "more than 50331648", self.parts[:1] + self.heads_of_30_mb(2))
        self.assertRefused(code.DATA_LOSS, "checksum", self.changed(3, extent=bytes(extent)))
        self.assertRefused(code.DATA_LOSS, "another tenant's", self.parts, Client(self.one, "stranger"))
        self.assertRefused(code.FAILED_PRECONDITION, "weights", self.changed(0, weights_hash="00"))
        self.assertRefused(code.FAILED_PRECONDITION, "KV", self.changed(0, kv_form="rotated/int8"))
        self.assertRefused(code.INVALID_ARGUMENT, "was due", self.parts[:1] + self.parts[5:])
        self.assertRefused(code.INVALID_ARGUMENT, "in order", self.parts[:3] + self.parts[2:])
        self.assertRefused(code.INVALID_ARGUMENT, "name", self.parts[:1], name="")
        self.assertRefused(code.INVALID_ARGUMENT, "end after 3", self.parts[:-2])
        self.assertRefused(code.NOT_FOUND, "KV head 1 is missing", self.parts[:-1])
        self.assertRefused(code.INVALID_ARGUMENT, "no head", self.parts[1:])
        self.assertEqual(ask(self.one, "POST", "/v1/contexts/bad/import", self.frames[:-9]).status, 400)
        self.assertEqual(ask(self.one, "POST", "/v1/contexts/bad/import", b"nothing of the kind").status, 400)
        self.assertEqual(Client(self.one).names(), [])

    def heads_of_30_mb(self, count):
        return [contexts_pb2.ContextPart(extent={"block": 0, "head": head, "extent": bytes(30_000_000)}) for head in range(count)]

    def test_what_came_from_disk_is_exported_too(self):
        flags = [*FLAGS, f"--kv-disk-path={self.folder / 'demoted'}", "--kv-disk-size-gb=1"]
        with Service(model=self.model, flags=flags) as service:
            client = Client(service)
            import_parts(client, "doc", self.parts)
            client.await_read("doc")
            deadline = time.monotonic() + 20
            while client.call("Demote", "DemoteContextRequest", name="doc").granted_blocks and time.monotonic() < deadline:
                time.sleep(0.05)
            client.call("Prefetch", "PrefetchContextRequest", name="doc")
            client.await_read("doc")
            self.assertGreater(read_bytes(service), 0)
            parts = list(client.call("Export", "ExportContextRequest", name="doc"))
        with Service(model=self.model, flags=FLAGS) as service:
            import_parts(Client(service), "moved", parts)
            self.check_imported(service, Client(service), "moved")

    def test_pages_on_disk_only_are_not_exported(self):
        tokens = tokens_of(on_demand_test.BLOCKS * 64, seed=7)
        flags = [*on_demand_test.FLAGS, *on_demand_test.ON_DEMAND, f"--kv-disk-path={self.folder / 'lean'}"]
        with Service(model=self.model, flags=flags) as service:
            client = Client(service)
            client.create("doc", tokens)
            client.await_read("doc")
            self.assertGreater(counter(service, "kvasir_kv_lean_blocks", 0), 0, "no block left memory")
            with self.assertRaises(grpc.RpcError) as caught:
                list(client.call("Export", "ExportContextRequest", name="doc"))
            self.assertEqual(caught.exception.code(), grpc.StatusCode.FAILED_PRECONDITION, caught.exception.details())
            self.assertIn("lie on disk only", caught.exception.details())
            self.assertEqual(ask_about(service, "doc", QUESTION).cached_tokens, len(tokens))  # it is as it was

    def test_a_transfer_excludes_others_and_holds_up_nobody(self):
        client, go_on = Client(self.one, "stalled"), threading.Event()

        def stalled():
            yield contexts_pb2.ImportContextRequest(name="slow", tenant_id="stalled", part=self.parts[0])
            go_on.wait(60)

        call = client.stub.Import.future(stalled())
        try:
            deadline = time.monotonic() + 20
            while client.names() != ["slow"] and time.monotonic() < deadline:
                time.sleep(0.02)
            for _ in range(4):  # as many as would take all threads for texts, if they waited in them
                self.assertRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, "another context", self.parts)
            self.assertEqual(ask(self.one, "POST", "/v1/contexts/bad/import", self.frames).status, 429)
            self.assertEqual(client.names(), ["slow"])
        finally:
            go_on.set()
        with self.assertRaises(grpc.RpcError) as caught:
            call.result()
        self.assertIn("end after 0 of 4", caught.exception.details())
        self.assertEqual(client.names(), [])

    def test_a_context_that_is_forgotten_while_it_comes_leaves_nothing(self):
        for name, forget in (("delete", ("Delete", "DeleteContextRequest", dict(name="bad"))),
                             ("evict", ("Evict", "EvictRequest", dict(context="bad"))),
                             ("tenant", ("Evict", "EvictRequest", dict(tenant=True)))):
            with self.subTest(name):
                client = Client(self.one)

                def parts():
                    yield from self.parts[:5]  # two blocks
                    deadline = time.monotonic() + 20
                    while client.names() != ["bad"] and time.monotonic() < deadline:
                        time.sleep(0.02)
                    client.call(forget[0], forget[1], **forget[2])
                    yield from self.parts[5:]

                self.assertRefused(grpc.StatusCode.ABORTED, "deleted or evicted", parts())
                if name == "tenant":
                    self.assertEqual(self.one.generate(DOCUMENT, max_tokens=1).cached_tokens, 0)

    def test_what_is_not_in_memory_is_not_exported(self):
        client = Client(self.one, "evicted")
        client.create("doc", DOCUMENT)
        client.await_read("doc")
        client.call("Evict", "EvictRequest", context="doc")
        with self.assertRaises(grpc.RpcError) as caught:
            list(client.call("Export", "ExportContextRequest", name="doc"))
        self.assertEqual(caught.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
        self.assertIn("0 of 4 blocks", caught.exception.details())


if __name__ == "__main__":
    unittest.main()
