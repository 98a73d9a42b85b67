"""Where the KV of contexts is kept: pins hold under pressure and end, and what is erased is in no file and in no shared
memory, which are searched byte by byte. Every test checks by counters that there was pressure, and that the bytes were
there before."""

import json
import os
import pathlib
import struct
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from e2e import on_demand_test  # noqa: E402
from e2e.contexts_test import FLAGS, OPTIONS, Client, ask_about, command, tokens_of  # noqa: E402
from e2e.disk_test import counter  # noqa: E402
from support.http_client import ask  # noqa: E402
from support.service import Service  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402

import grpc  # noqa: E402
from kvasir.v1 import contexts_pb2, generation_pb2  # noqa: E402

BLOCK_TOKENS = 64
SMALL_HOST = ["--max-model-len=1024", "--kv-host-size-gb=0.0022"]  # some 50 blocks
HOST, DISK, DEVICE = generation_pb2.TIER_HOST, generation_pb2.TIER_DISK, generation_pb2.TIER_DEVICE
ACCEPTED, CLIPPED, DEFERRED, REJECTED = range(1, 5)


def memory_files(service):
    """The host tiers of the local workers: files without a name, which the server holds open."""
    found = {}
    for link in pathlib.Path(f"/proc/{service.process.pid}/fd").iterdir():
        try:
            if "memfd:" in os.readlink(link):
                found[str(link)] = link.read_bytes()
        except OSError:
            pass  # closed meanwhile
    return found


def files_below(folder):
    return {str(path): path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file()}


def needles_of(tokens):
    """What tells the tokens in headers and manifests (four bytes each), and in records (varints)."""
    def varint(token):
        return bytes([token]) if token < 128 else bytes([token & 127 | 128, token >> 7])
    return [struct.pack("<16i", *tokens[:16]), struct.pack("<16i", *tokens[64:80]), b"".join(map(varint, tokens[:16]))]


class ContextHintsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-hints-")))
        cls.model = make_tiny_model(cls.folder / "model")

    def make_pressure(self, service, seed, prompts=12):
        evictions = service.metric("kvasir_prefix_cache_evictions_total")
        for i in range(prompts):
            service.generate(tokens_of(600, seed=seed + i), tenant_id="pressure", **OPTIONS)
        self.assertGreater(service.metric("kvasir_prefix_cache_evictions_total") - evictions, 20, "there was no pressure")

    def cached_of(self, service, name):
        return ask_about(service, name, [5, 6, 7]).cached_tokens

    def test_a_pin_holds_under_pressure_and_expires(self):
        with Service(model=self.model, flags=[*FLAGS, *SMALL_HOST]) as service:
            client = Client(service)
            for name, seed in (("pinned", 1), ("loose", 2)):
                client.create(name, tokens_of(256, seed=seed))
                client.await_read(name)
            hint = client.call("Pin", "PinContextRequest", name="pinned", ttl_s=600)
            self.assertEqual((hint.outcome, hint.blocks, hint.granted_blocks, hint.present_blocks, hint.tier), (ACCEPTED, 4, 4, 4, HOST))
            self.assertEqual(service.metrics()['kvasir_pinned_blocks{model_name="model",tier="host"}'], 4)
            self.make_pressure(service, seed=100)
            self.assertEqual(self.cached_of(service, "pinned"), 256)
            self.assertEqual(self.cached_of(service, "loose"), 0)
            self.assertEqual(client.get("pinned").pins[0].granted_blocks, 4)
            client.call("Pin", "PinContextRequest", name="pinned", ttl_s=1)
            deadline = time.monotonic() + 20
            while client.get("pinned").pins and time.monotonic() < deadline:
                time.sleep(0.05)
            self.assertEqual(list(client.get("pinned").pins), [])
            self.make_pressure(service, seed=200)
            self.assertEqual(self.cached_of(service, "pinned"), 0)

    def test_a_hit_refreshes_a_pin_that_says_so(self):
        with Service(model=self.model, flags=FLAGS) as service:
            client = Client(service)
            for name, refresh in (("fresh", True), ("stale", False)):
                client.create(name, tokens_of(128, seed=len(name)))
                client.await_read(name)
                client.call("Pin", "PinContextRequest", name=name, ttl_s=3, refresh_on_hit=refresh)
            deadline = time.monotonic() + 20
            while client.get("stale").pins and time.monotonic() < deadline:
                self.cached_of(service, "fresh")
                self.cached_of(service, "stale")
                time.sleep(0.1)
            self.assertEqual(list(client.get("stale").pins), [])
            self.assertEqual(len(client.get("fresh").pins), 1)

    def test_quotas_clip_and_reject_and_other_tiers_are_said(self):
        flags = [*FLAGS, "--context-pin-host-gb=0.0001"]  # 3 blocks of 32 KiB
        with Service(model=self.model, flags=flags) as service:
            client = Client(service)
            for name, seed in (("a", 1), ("b", 2)):
                client.create(name, tokens_of(128, seed=seed))
                client.await_read(name)
            hint = client.call("Pin", "PinContextRequest", name="a", tier=DEVICE)
            self.assertEqual((hint.outcome, hint.tier, hint.granted_blocks), (CLIPPED, HOST, 2))
            self.assertIn("device tier", hint.reason)
            hint = client.call("Pin", "PinContextRequest", name="b")
            self.assertEqual((hint.outcome, hint.granted_blocks), (CLIPPED, 1))
            client.create("c", tokens_of(128, seed=3))
            hint = client.call("Pin", "PinContextRequest", name="c")
            self.assertEqual((hint.outcome, hint.granted_blocks), (REJECTED, 0))
            other = Client(service, "other")
            other.create("a", tokens_of(128, seed=4))
            other.await_read("a")
            self.assertEqual(other.call("Pin", "PinContextRequest", name="a").outcome, ACCEPTED)
            self.assertEqual(client.call("Pin", "PinContextRequest", name="a", tier=DISK).outcome, REJECTED)
            self.assertEqual(client.call("Demote", "DemoteContextRequest", name="c").outcome, REJECTED)
            self.assertEqual(client.call("Unpin", "UnpinContextRequest", name="a").outcome, ACCEPTED)
            self.assertEqual(client.call("Unpin", "UnpinContextRequest", name="a").outcome, REJECTED)
            with self.assertRaises(grpc.RpcError) as caught:
                client.call("Pin", "PinContextRequest", name="a", ttl_s=0)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)

    def test_what_is_demoted_comes_back_from_disk(self):
        flags = [*FLAGS, f"--kv-disk-path={self.folder / 'demoted'}", "--kv-disk-size-gb=1"]
        with Service(model=self.model, flags=flags) as service:
            client = Client(service)
            client.create("doc", tokens_of(256, seed=1))
            client.await_read("doc")
            self.assertEqual(client.call("Prefetch", "PrefetchContextRequest", name="doc").outcome, ACCEPTED)
            self.assertEqual(client.call("Demote", "DemoteContextRequest", name="doc").outcome, DEFERRED)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                hint = client.call("Demote", "DemoteContextRequest", name="doc")
                if hint.granted_blocks == 0:
                    break
                time.sleep(0.05)
            self.assertEqual(hint.outcome, ACCEPTED, "it stayed in memory")
            self.assertEqual(client.call("Prefetch", "PrefetchContextRequest", name="doc").outcome, DEFERRED)
            client.await_read("doc")
            answer = ask_about(service, "doc", [5, 6, 7])
            self.assertEqual(answer.cached_tokens, 256)

    def test_pins_outlive_the_server(self):
        flags = [*FLAGS, *SMALL_HOST, f"--kv-disk-path={self.folder / 'outlived'}", "--kv-disk-size-gb=1"]
        with Service(model=self.model, flags=flags) as service:
            client = Client(service)
            client.create("doc", tokens_of(256, seed=1))
            client.await_read("doc")
            client.call("Pin", "PinContextRequest", name="doc", ttl_s=600)
            self.assertEqual(client.call("Pin", "PinContextRequest", name="doc", ttl_s=600, tier=DISK).granted_blocks, 4)
        with Service(model=self.model, flags=flags) as service:
            client = Client(service)
            client.await_read("doc")
            deadline = time.monotonic() + 20
            while any(pin.present_blocks < 4 for pin in client.get("doc").pins) and time.monotonic() < deadline:
                time.sleep(0.05)
            self.assertEqual(sorted((pin.tier, pin.present_blocks) for pin in client.get("doc").pins), [(HOST, 4), (DISK, 4)])

    def test_a_pin_on_disk_stays_when_others_give_way(self):
        flags = [*FLAGS, f"--kv-disk-path={self.folder / 'full'}", "--kv-disk-size-gb=0.002"]  # some 40 blocks
        with Service(model=self.model, flags=flags) as service:
            client = Client(service)
            for name, seed in (("pinned", 1), ("loose", 2)):
                client.create(name, tokens_of(256, seed=seed))
                client.await_read(name)
            self.assertEqual(client.call("Pin", "PinContextRequest", name="pinned", ttl_s=600, tier=DISK).granted_blocks, 4)
            for i in range(12):
                service.generate(tokens_of(600, seed=100 + i), **OPTIONS)
                time.sleep(0.1)
            worker = service.worker_metrics[0]
            self.assertGreater(service.metric("kvasir_kv_disk_written_bytes_total", worker), 0.004e9, "the disk was not full")
        with Service(model=self.model, flags=flags) as service:
            Client(service).await_read("pinned")
            for name in ("pinned", "loose"):
                ask_about(service, name, [5])
            disk = sum(value for key, value in service.metrics().items()
                       if key.startswith("kvasir_prompt_tokens_cached_by_source_total") and 'source="disk"' in key)
            # Blocks of the pinned one alone: three when it was read, whose last token was computed, and the last one when it
            # was asked about, if that had to come from disk too.
            self.assertIn(disk, (192, 256))

    def test_what_is_erased_is_in_no_file_and_no_shared_memory(self):
        store = self.folder / "erased"
        flags = [*FLAGS, "--tensor-parallel-size=2", f"--kv-disk-path={store}", "--kv-disk-size-gb=1"]
        secret, kept = tokens_of(400, seed=77), tokens_of(400, seed=78)
        with Service(model=self.model, flags=flags) as service:
            gone, stays = Client(service, "gone"), Client(service, "stays")
            for client, tokens in ((gone, secret), (stays, kept)):
                client.create("doc", tokens)
                client.await_read("doc")
                ask_about(service, "doc", [5, 6, 7], client.tenant)
            service.generate(secret, tenant_id="gone", **OPTIONS)
            self.await_stored(service, 12)
            before = {**files_below(store), **memory_files(service)}
            pages = self.pages_of(store, secret)
            self.assertEqual(len(pages), 12)  # 6 blocks of 2 KV heads
            needles = needles_of(secret)
            for needle in [*needles, *pages]:
                self.assertTrue(any(needle in data for data in before.values()), "it was not there before")
            evicted = gone.call("Evict", "EvictRequest", tenant=True)
            self.assertEqual((evicted.outcome, evicted.contexts, evicted.host_blocks, evicted.disk_blocks, evicted.blocks_in_use),
                             (ACCEPTED, 1, 6, 6, 0))
            self.assertGreater(min(evicted.record_bytes, evicted.host_bytes, evicted.disk_bytes), 400)
            after = {**files_below(store), **memory_files(service)}
            self.assertGreaterEqual(len(memory_files(service)), 2)
            for needle in [*needles, *pages]:
                self.assertEqual([name for name, data in after.items() if needle in data], [])
            for needle in needles_of(kept):
                self.assertTrue(any(needle in data for data in after.values()), "another tenant's was erased")
            self.assertEqual(gone.names(), [])
            self.assertEqual(ask_about(service, "doc", [5, 6, 7], "stays").cached_tokens, 384)
            self.assertEqual(service.generate(secret, tenant_id="gone", **OPTIONS).cached_tokens, 0)

    def test_blocks_whose_pages_lie_on_disk_only_are_erased(self):
        store = self.folder / "lean"
        secret = tokens_of(on_demand_test.BLOCKS * BLOCK_TOKENS, seed=79)
        flags = [*on_demand_test.FLAGS, *on_demand_test.ON_DEMAND, f"--kv-disk-path={store}"]
        with Service(model=self.model, flags=flags) as service:
            client = Client(service, "gone")
            client.create("doc", secret)
            client.await_read("doc")
            self.assertEqual(ask_about(service, "doc", [5, 6, 7], "gone").cached_tokens, len(secret))
            self.assertGreater(counter(service, "kvasir_kv_lean_blocks", 0), on_demand_test.BLOCKS / 4, "memory held it all")
            needles = [struct.pack("<16i", *secret[i:i + 16]) for i in range(0, len(secret), BLOCK_TOKENS)]
            needles += self.pages_of(store, secret)
            self.assertGreater(len(needles), 1.5 * on_demand_test.BLOCKS)
            before = {**files_below(store), **memory_files(service)}
            for needle in needles:
                self.assertTrue(any(needle in data for data in before.values()), "it was not there before")
            evicted = client.call("Evict", "EvictRequest", tenant=True)
            self.assertEqual((evicted.outcome, evicted.contexts, evicted.host_blocks, evicted.blocks_in_use),
                             (ACCEPTED, 1, on_demand_test.BLOCKS, 0))
            self.assertEqual(counter(service, "kvasir_kv_lean_blocks", 0), 0)
            after = {**files_below(store), **memory_files(service)}
            for needle in needles:
                self.assertEqual([name for name, data in after.items() if needle in data], [])

    def await_stored(self, service, blocks):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            used = sum(value for key, value in service.metrics(service.worker_metrics[0]).items()
                       if key.startswith("kvasir_kv_tier_pages") and 'tier="disk"' in key and 'state="used"' in key)
            if used >= 2 * blocks:  # pages of 2 layers and a KV head
                return
            time.sleep(0.05)
        self.fail("blocks were not stored")

    def pages_of(self, store, tokens):
        """A part of the first page of each stored extent whose header has the tokens."""
        heads = [struct.pack("<64i", *tokens[i:i + 64]) for i in range(0, len(tokens) - 63, 64)]
        found = []
        for path in pathlib.Path(store).rglob("*.segment"):
            data = path.read_bytes()
            for head in heads:
                at = data.find(head)
                while at >= 0:
                    begin = at - 192  # the tokens' place in the header
                    pages = struct.unpack_from("<Q", data, begin + 448 + 2 * 32 + 8)[0]  # offset of the third section
                    found.append(data[begin + pages:begin + pages + 64])
                    at = data.find(head, at + 1)
        return found

    def test_a_context_and_a_prefix_are_evicted_by_http_and_by_command(self):
        flags = [*FLAGS, f"--kv-disk-path={self.folder / 'prefix'}", "--kv-disk-size-gb=1"]
        with Service(model=self.model, flags=flags) as service:
            client = Client(service)
            tokens = tokens_of(200, seed=1)
            client.create("doc", tokens)
            client.await_read("doc")
            reply = ask(service, "POST", "/v1/contexts/doc/pin", {"ttl_s": 60})
            self.assertEqual((reply.status, reply.json["outcome"]), (200, "HINT_OUTCOME_ACCEPTED"), reply.body)
            self.assertIn("accepted", command(service, "unpin", "--name=doc").stdout)
            self.assertEqual(ask(service, "POST", "/v1/contexts/doc/prefetch").json["outcome"], "HINT_OUTCOME_ACCEPTED")
            reply = ask(service, "POST", "/v1/contexts/doc/evict")
            self.assertEqual((reply.status, reply.json["host_blocks"]), (200, "3"), reply.body)
            self.assertEqual(client.get("doc").state, contexts_pb2.CONTEXT_STATE_EVICTED)
            self.assertEqual(ask_about(service, "doc", [5]).cached_tokens, 0)
            reply = ask(service, "POST", "/v1/contexts:evict", {"prefix": {"ids": tokens[:128]}})
            self.assertEqual((reply.status, reply.json["host_blocks"]), (200, "2"), reply.body)
            # The block after the prefix may be on disk still.
            self.assertLessEqual(ask_about(service, "doc", [5]).cached_tokens, BLOCK_TOKENS)
            self.assertIn("blocks granted", command(service, "prefetch", "--name=doc").stdout)
            self.assertEqual(ask(service, "POST", "/v1/contexts/doc/demote").status, 200)
            printed = command(service, "evict", "--everything")
            self.assertEqual(printed.returncode, 0, printed.stderr)
            self.assertIn("1 contexts forgotten", printed.stdout)
            self.assertEqual(client.names(), [])
            self.assertEqual(ask(service, "POST", "/v1/contexts:evict", {}).status, 400)

    def test_every_call_by_each_door(self):
        """Those of HTTP, the command and gRPC that no other test makes."""
        flags = [*FLAGS, f"--kv-disk-path={self.folder / 'doors'}", "--kv-disk-size-gb=1"]
        with Service(model=self.model, flags=flags) as service:
            client, text = Client(service), "the pass key is w7 and the sky is blue " * 30

            def by_command(*arguments):
                done = command(service, *arguments, "--json")
                self.assertEqual(done.returncode, 0, done.stderr)
                return json.loads(done.stdout)

            by_command("create", "--name=doc", f"--text={text}", "--wait")
            blocks = client.get("doc").tokens // BLOCK_TOKENS
            self.assertGreater(blocks, 3)
            hint = by_command("pin", "--name=doc", "--tier=host", "--ttl=60")
            self.assertEqual((hint["outcome"], hint["granted_blocks"]), ("HINT_OUTCOME_ACCEPTED", blocks))
            self.assertEqual([pin.granted_blocks for pin in client.get("doc").pins], [blocks])
            reply = ask(service, "POST", "/v1/contexts/doc/unpin")
            self.assertEqual((reply.status, reply.json["outcome"]), (200, "HINT_OUTCOME_ACCEPTED"), reply.body)
            self.assertEqual(list(client.get("doc").pins), [])
            deadline = time.monotonic() + 20
            while by_command("demote", "--name=doc")["granted_blocks"] and time.monotonic() < deadline:
                time.sleep(0.05)
            client.call("Prefetch", "PrefetchContextRequest", name="doc")
            client.await_read("doc")
            self.assertGreater(counter(service, "kvasir_kv_transfer_bytes_total", **{"from": "disk"}), 0, "it stayed in memory")
            self.assertEqual(int(by_command("evict", f"--text={text}")["host_blocks"]), blocks)
            self.assertEqual(int(by_command("evict", "--name=doc")["host_blocks"]), 0, "the text's blocks are the context's")
            self.assertEqual(client.get("doc").state, contexts_pb2.CONTEXT_STATE_EVICTED)
            tokens = tokens_of(150, seed=1)
            self.assertEqual(service.generate(tokens, **OPTIONS).cached_tokens, 0)
            self.assertEqual(client.call("Evict", "EvictRequest", prefix={"ids": tokens[:128]}).host_blocks, 2)
            self.assertEqual(service.generate(tokens, **OPTIONS).cached_tokens, 0)
            reply = ask(service, "POST", "/v1/contexts:evict", {"tenant": True})
            self.assertEqual((reply.status, reply.json["contexts"]), (200, 1), reply.body)
            self.assertEqual(client.names(), [])
            client.create("again", tokens)
            self.assertEqual(by_command("evict", "--whole-tenant")["contexts"], 1)
            self.assertEqual(client.names(), [])

    def test_running_requests_of_an_erased_tenant_end(self):
        with Service(model=self.model, flags=FLAGS) as service:
            stream = service.stream(tokens_of(70, seed=1), tenant_id="gone", max_tokens=8000, ignore_eos=True)
            for response in stream:
                if response.HasField("tokens"):
                    break
            Client(service, "gone").call("Evict", "EvictRequest", tenant=True)
            with self.assertRaises(grpc.RpcError) as caught:
                for response in stream:
                    pass
            self.assertEqual(caught.exception.code(), grpc.StatusCode.CANCELLED)
            self.assertIn("erased", caught.exception.details())


if __name__ == "__main__":
    unittest.main()
