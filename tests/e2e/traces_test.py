"""Traces as a collector of OpenTelemetry gets them, beside what the clients saw: the classes and the service are those
that OpenTelemetry publishes (opentelemetry-proto of PyPI), in a server of this process."""

import concurrent.futures
import json
import os
import pathlib
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support import pypi  # noqa: E402
from support.certificates import Authority  # noqa: E402
from support.service import Service, make_request, read_stream  # noqa: E402

import grpc  # noqa: E402

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, INTERNAL = 2, 1
ERROR = 2
SLACK = 0.05  # seconds between two clocks that tell the same moment


class Collector:
    """Takes spans on a free port of 127.0.0.1, with `identity` by TLS."""

    def __init__(self, identity=None):
        pypi.use("opentelemetry-proto==1.27.0")
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
        self.reply, self.changed = trace_service_pb2.ExportTraceServiceResponse(), threading.Condition()
        self.requests = []
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        if identity:
            credentials = grpc.ssl_server_credentials([(identity.key.read_bytes(), identity.certificate.read_bytes())])
            port = self.server.add_secure_port("127.0.0.1:0", credentials)
        else:
            port = self.server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"{'https' if identity else 'http'}://127.0.0.1:{port}"
        self.server.start()

    def Export(self, request, _):  # the service's name  # noqa: N802
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()
        return self.reply

    def spans(self):
        return [span for request in self.requests for resource in request.resource_spans
                for scope in resource.scope_spans for span in scope.spans]

    def await_request(self, request_id, timeout_s=20):
        """Returns the span of a request and those below it, by name."""
        def find():
            return [span for span in self.spans() if attributes(span).get("gen_ai.response.id") == request_id]
        with self.changed:
            assert self.changed.wait_for(find, timeout_s), f"no span of {request_id}"
            [whole] = find()
            return whole, {span.name: span for span in self.spans() if span.parent_span_id == whole.span_id}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop(0)


def attributes(span):
    def plain(value):
        kind = value.WhichOneof("value")
        return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
    return {attribute.key: plain(attribute.value) for attribute in span.attributes}


def seconds(duration):
    return duration.seconds + 1e-9 * duration.nanos


def length(span):
    return 1e-9 * (span.end_time_unix_nano - span.start_time_unix_nano)


class Traces(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.collector = cls.enterClassContext(Collector())
        cls.service = cls.enterClassContext(Service(flags=[
            f"--otlp-endpoint={cls.collector.endpoint}", "--otlp-service-name=stories", "--served-model-name=needle",
            "--sparse-selector=quest", "--sparse-token-budget=64", "--sparse-sink-tokens=64", "--sparse-window-tokens=64"]))

    def call(self, request_id, flags="01", parent=True, **options):
        metadata = [("traceparent", f"00-{TRACE}-{PARENT}-{flags}")] if parent else []
        return read_stream(self.service.stub.Generate(make_request(request_id=request_id, **options), timeout=60,
                                                      metadata=metadata))

    def test_spans_tell_what_the_client_saw(self):
        prompt = list(range(3, 603))
        self.call("warm", prompt=prompt, max_tokens=2, ignore_eos=True, tenant_id="one")
        before = time.time()
        answer = self.call("seen", prompt=prompt, max_tokens=20, ignore_eos=True, temperature=0.5, top_p=0.75, top_k=7, seed=1,
                           tenant_id="one")
        after = time.time()
        whole, parts = self.collector.await_request("seen")
        self.assertEqual((whole.trace_id.hex(), whole.parent_span_id.hex()), (TRACE, PARENT))
        self.assertEqual((whole.name, whole.kind, whole.status.code), ("text_completion needle", SERVER, 0))
        self.assertEqual(whole.flags, 0x301, "sampled; the parent is remote")
        seen, usage, timing = attributes(whole), answer.finish.usage, answer.finish.timing
        self.assertGreater(answer.cached_tokens, 500)
        expected = {
            "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "kvasir",
            "gen_ai.request.model": "needle", "gen_ai.response.model": "needle",
            "gen_ai.response.id": "seen", "gen_ai.request.id": "seen", "gen_ai.request.max_tokens": 20,
            "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.75, "gen_ai.request.top_k": 7.0,
            "gen_ai.response.finish_reasons": ["length"], "gen_ai.usage.input_tokens": 600,
            "gen_ai.usage.output_tokens": len(answer.token_ids), "gen_ai.usage.cache_read.input_tokens": answer.cached_tokens,
            "kvasir.cached_tokens.device": usage.cached_tokens.device, "kvasir.cached_tokens.host": usage.cached_tokens.host,
            "kvasir.cached_tokens.disk": 0, "kvasir.cached_tokens.peer": 0, "kvasir.policy": "default", "kvasir.tenant": "one"}
        self.assertEqual({name: seen.get(name) for name in expected}, expected)
        queue, first, decode = (seconds(part) for part in (timing.queue, timing.time_to_first_token, timing.decode))
        times = {"time_in_queue": queue, "time_to_first_token": first, "time_in_model_prefill": first - queue,
                 "time_in_model_decode": decode, "time_in_model_inference": first - queue + decode, "e2e": length(whole)}
        for name, value in times.items():
            self.assertAlmostEqual(seen[f"gen_ai.latency.{name}"], value, delta=1e-6)
        self.assertGreater(seen["kvasir.skipped_share"], 0)
        self.assertEqual(seen.keys() - expected.keys(), {"kvasir.skipped_share", *(f"gen_ai.latency.{name}" for name in times)})
        self.assertLess(before - SLACK, 1e-9 * whole.start_time_unix_nano)
        self.assertLess(1e-9 * whole.end_time_unix_nano, after + SLACK)
        self.check_parts(whole, parts, ["queue", "prefill", "decode"])
        self.assertAlmostEqual(length(parts["queue"]), seconds(timing.queue), delta=1e-6)
        self.assertAlmostEqual(length(parts["queue"]) + length(parts["prefill"]), seconds(timing.time_to_first_token), delta=1e-6)
        self.assertAlmostEqual(length(parts["decode"]), seconds(timing.decode), delta=1e-6)

    def check_parts(self, whole, parts, names):
        """The parts follow on each other within the whole."""
        self.assertEqual(list(parts), names)
        end = whole.start_time_unix_nano
        for part in parts.values():
            self.assertEqual((part.trace_id, part.kind), (whole.trace_id, INTERNAL))
            self.assertEqual(part.start_time_unix_nano, end)
            self.assertGreaterEqual(part.end_time_unix_nano, end)
            end = part.end_time_unix_nano
        self.assertLessEqual(end, whole.end_time_unix_nano)
        self.assertEqual(len({whole.span_id, *(part.span_id for part in parts.values())}), 1 + len(parts))

    def test_who_says_not_sampled_is_not_traced_and_who_says_nothing_begins_a_trace(self):
        self.call("unsampled", flags="00", prompt=[5, 6], max_tokens=1)
        self.call("first", parent=False, prompt=[5, 6], max_tokens=1)
        self.call("second", parent=False, prompt=[5, 6], max_tokens=1)
        roots = [self.collector.await_request(name)[0] for name in ("first", "second")]
        for root in roots:
            self.assertEqual((root.parent_span_id, len(root.trace_id), root.flags), (b"", 16, 0x101))
        self.assertNotEqual(roots[0].trace_id, roots[1].trace_id)
        self.assertFalse([span for span in self.collector.spans() if attributes(span).get("gen_ai.response.id") == "unsampled"])

    def test_a_refusal_and_a_cancellation_are_traced(self):
        with self.assertRaises(grpc.RpcError):
            self.call("refused", prompt=[5], max_tokens=1, top_p=3)
        whole, parts = self.collector.await_request("refused")
        self.assertEqual((whole.name, whole.trace_id.hex(), parts), ("refused needle", TRACE, {}))
        self.assertEqual((attributes(whole)["error.type"], whole.status.code), ("INVALID_ARGUMENT", 0))
        with self.assertRaises(grpc.RpcError):
            read_stream(self.service.stub.Generate(make_request([5] * 4000, request_id="late", max_tokens=4000,
                                                                ignore_eos=True), timeout=0.3))
        whole, parts = self.collector.await_request("late")
        # The client's cancellation may be there before the server's clock says that it is late.
        self.assertIn((attributes(whole)["error.type"], whole.status.code), (("DEADLINE_EXCEEDED", ERROR), ("CANCELLED", 0)))
        self.check_parts(whole, parts, list(parts))
        self.assertIn("prefill", parts)
        self.assertNotIn("gen_ai.response.finish_reasons", attributes(whole))

    def test_requests_over_http_have_the_same_spans(self):
        body = {"model": "needle", "prompt": [7, 8, 9], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(f"http://{self.service.http_address}/v1/completions", json.dumps(body).encode(), {
            "Content-Type": "application/json", "x-request-id": "by-http", "traceparent": f"00-{TRACE}-{PARENT}-01"})
        with urllib.request.urlopen(request) as reply:
            usage = json.load(reply)["usage"]
        whole, parts = self.collector.await_request("by-http")
        self.assertEqual((whole.trace_id.hex(), whole.parent_span_id.hex()), (TRACE, PARENT))
        self.assertEqual(attributes(whole)["gen_ai.usage.output_tokens"], usage["completion_tokens"])
        self.check_parts(whole, parts, ["queue", "prefill", "decode"])

    def test_the_process_is_named(self):
        self.call("named", prompt=[5], max_tokens=1)
        self.collector.await_request("named")
        for request in self.collector.requests:
            [resource] = request.resource_spans
            named = attributes(resource.resource)
            self.assertEqual((named["service.name"], named["process.pid"]), ("stories", self.service.process.pid))
            self.assertEqual({scope.scope.name for scope in resource.scope_spans}, {"kvasir"})
        self.assertGreaterEqual(self.service.metric("kvasir_trace_spans_exported_total"), 1)
        self.assertEqual(self.service.metric("kvasir_trace_spans_dropped_total"), 0)


class OtherServers(unittest.TestCase):
    def test_blocks_from_disk_are_a_part_of_their_own(self):
        prompt = list(range(3, 503))
        with tempfile.TemporaryDirectory() as folder, Collector() as collector:
            flags = [f"--otlp-endpoint={collector.endpoint}", f"--kv-disk-path={folder}", "--kv-host-size-gb=0.1",
                     "--kv-disk-size-gb=1"]
            for name in ("stored", "restored"):
                with Service(flags=flags) as service:
                    answer = service.generate(prompt, request_id=name, max_tokens=2, ignore_eos=True)
            whole, parts = collector.await_request("restored")
            self.assertEqual(list(parts), ["queue", "restore", "prefill", "decode"])
            self.assertGreater(answer.finish.usage.cached_tokens.disk, 0)
            self.assertEqual(attributes(parts["restore"]), {"kvasir.restored_tokens": answer.finish.usage.cached_tokens.disk})
            self.assertEqual(attributes(whole)["kvasir.cached_tokens.disk"], answer.finish.usage.cached_tokens.disk)
            timing = answer.finish.timing
            self.assertAlmostEqual(length(parts["restore"]), seconds(timing.restore), delta=1e-6)
            self.assertGreater(length(parts["restore"]), 0)
            self.assertEqual(parts["queue"].end_time_unix_nano, parts["restore"].start_time_unix_nano)
            self.assertEqual(parts["restore"].end_time_unix_nano, parts["prefill"].start_time_unix_nano)
            self.assertNotIn("restore", collector.await_request("stored")[1])

    def test_a_collector_with_a_certificate(self):
        with tempfile.TemporaryDirectory() as folder:
            ca, stranger = Authority(folder, "ca"), Authority(folder, "stranger")
            with Collector(ca.issue("collector")) as collector:
                for trusted, arrives in ((ca, True), (stranger, False)):
                    flags = [f"--otlp-endpoint={collector.endpoint}", f"--tls-ca-file={trusted.certificate}"]
                    with Service(flags=flags) as service:
                        service.generate([5], max_tokens=1, request_id="encrypted")
                        if arrives:
                            collector.await_request("encrypted")
                            collector.requests.clear()
                    self.assertEqual(collector.requests, [])

    def test_the_variables_of_opentelemetry_serve(self):
        with Collector() as collector:
            variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_SERVICE_NAME": "by-variable"}
            with unittest.mock.patch.dict(os.environ, variables), Service() as service:
                service.generate([5], max_tokens=1, request_id="told")
                collector.await_request("told")
            names = {attributes(spans.resource)["service.name"]
                     for request in collector.requests for spans in request.resource_spans}
            self.assertEqual(names, {"by-variable"})

    def test_a_collector_that_is_away_costs_no_request(self):
        with Service(flags=["--otlp-endpoint=http://127.0.0.1:1"]) as service:
            begin = time.monotonic()
            for _ in range(20):
                service.generate([5, 6, 7], max_tokens=2, ignore_eos=True)
            self.assertLess(time.monotonic() - begin, 10)

    def test_endpoints_that_cannot_serve_are_refused(self):
        for flags, expected in (("--otlp-endpoint=127.0.0.1:4317", "expected http://HOST:PORT"),
                                ("--otlp-endpoint=http://127.0.0.1:4318/v1/traces", "without a path"),
                                ("--otlp-endpoint=https://127.0.0.1:4317", "no --tls-ca-file")):
            with self.assertRaises(RuntimeError) as refused:
                Service(flags=[flags])
            self.assertIn(expected, str(refused.exception))


if __name__ == "__main__":
    unittest.main(verbosity=2)
