"""Checks of the package `kvasir`, in a Python that has it: python_client_checks.py ADDRESS. Run by python_client_test.py.

Retries are played by a server in this process that fails as it is told.
"""

import asyncio
import concurrent.futures
import sys
import time
import unittest

import grpc
import kvasir
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from kvasir.v1 import generation_pb2, generation_pb2_grpc

ADDRESS = sys.argv.pop(1)
TEXT = "Once upon a time"


class RealServer(unittest.TestCase):
    def setUp(self):
        self.client = self.enterContext(kvasir.Client(ADDRESS))

    def test_an_answer_is_the_sum_of_its_stream(self):
        pieces = []
        answer = self.client.generate(TEXT, max_tokens=12, temperature=0, ignore_eos=True, logprobs=0, on_text=pieces.append)
        self.assertEqual(12, len(answer.token_ids))
        self.assertEqual(12, len(answer.logprobs))
        self.assertEqual(("length", None), (answer.finish_reason, answer.stopped_by))
        self.assertEqual(answer.text, "".join(pieces))
        self.assertEqual(12, answer.usage.completion_tokens)
        kinds = [type(event) for event in self.client.stream(TEXT, max_tokens=12, temperature=0, ignore_eos=True)]
        self.assertEqual(kinds[0], kvasir.Progress)
        self.assertEqual(kinds[-1], kvasir.Answer)

    def test_text_and_tokens_go_both_ways(self):
        tokens = self.client.tokenize(TEXT)
        self.assertEqual(TEXT, self.client.detokenize(tokens))
        self.assertNotEqual(TEXT, self.client.detokenize(tokens, skip_special_tokens=False))
        by_text = self.client.generate(TEXT, max_tokens=4, temperature=0)
        self.assertEqual(by_text.token_ids, self.client.generate(tokens, max_tokens=4, temperature=0).token_ids)

    def test_a_policy_and_its_numbers_reach_the_server(self):
        prompt = self.client.tokenize(TEXT) * 200
        sparse = self.client.generate(prompt, max_tokens=4, ignore_eos=True)
        self.assertGreater(sparse.pages_skipped_ratio, 0)
        wide = self.client.generate(prompt, max_tokens=4, ignore_eos=True, policy=kvasir.Policy(decode={"window_tokens": 4096}))
        self.assertEqual(wide.pages_skipped_ratio, 0)
        with self.assertRaises(kvasir.InvalidRequest) as raised:
            self.client.generate(TEXT, policy="no-such-policy")
        self.assertIn("no-such-policy", str(raised.exception))

    def test_a_stop_string_ends_the_answer(self):
        whole = self.client.generate(TEXT, max_tokens=12, temperature=0, ignore_eos=True).text
        answer = self.client.generate(TEXT, max_tokens=12, temperature=0, ignore_eos=True, stop=whole[-1])
        self.assertEqual(("stop", whole[-1]), (answer.finish_reason, answer.stopped_by))

    def test_prefixes_are_found_within_a_tenant(self):
        prompt = self.client.tokenize(TEXT) * 100
        self.client.generate(prompt, max_tokens=1, tenant_id="python-a")
        self.assertGreater(self.client.generate(prompt, max_tokens=1, tenant_id="python-a").usage.cached_tokens, 0)
        self.assertEqual(self.client.generate(prompt, max_tokens=1, tenant_id="python-b").usage.cached_tokens, 0)

    def test_a_context_is_read_once_and_found_by_its_name(self):
        document = TEXT + " there was a server" * 60
        self.client.contexts.create("doc", document, tenant_id="python-c")
        context = self.client.contexts.wait("doc", tenant_id="python-c")
        self.assertEqual(context.tokens, len(self.client.tokenize(document)))
        options = dict(max_tokens=4, temperature=0, tenant_id="python-c")
        answer = self.client.generate(" that", context="doc", **options)
        self.assertGreater(answer.usage.cached_tokens, context.tokens - 128)  # the prompt's tail is read anew
        joined = self.client.tokenize(document) + self.client.tokenize(" that", add_special_tokens=False)
        self.assertEqual(answer.token_ids, self.client.generate(joined, max_tokens=4, temperature=0).token_ids)
        pin = self.client.contexts.pin("doc", ttl_s=60, tenant_id="python-c")
        self.assertEqual(pin.granted_blocks, context.tokens // 64)
        self.client.contexts.unpin("doc", tenant_id="python-c")
        self.assertEqual([found.name for found in self.client.contexts.list(tenant_id="python-c")], ["doc"])
        self.assertEqual(self.client.contexts.list(), [])

        async def go_on():
            async with kvasir.AsyncClient(ADDRESS) as client:
                self.assertEqual((await client.contexts.get("doc", tenant_id="python-c")).tokens, context.tokens)
                again = await client.generate(" that", context="doc", **options)
                await client.contexts.delete("doc", tenant_id="python-c")
                return again.token_ids
        self.assertEqual(asyncio.run(go_on()), answer.token_ids)
        with self.assertRaises(kvasir.KvasirError) as raised:
            self.client.contexts.wait("doc", tenant_id="python-c")
        self.assertEqual(raised.exception.code, grpc.StatusCode.NOT_FOUND)

    def test_leaving_a_stream_cancels_the_request(self):
        stream = self.client.stream(TEXT, max_tokens=4000, ignore_eos=True)
        next(stream)
        stream.close()
        deadline = time.monotonic() + 20
        while self.client.server_info().requests_running:
            self.assertLess(time.monotonic(), deadline, "the request still runs")
            time.sleep(0.05)

    def test_wrong_options_are_named(self):
        with self.assertRaises(TypeError) as raised:
            self.client.generate(TEXT, max_token=3)
        self.assertIn("max_token;", str(raised.exception))
        with self.assertRaises(kvasir.InvalidRequest):
            self.client.generate(TEXT, max_tokens=10_000_000)
        with self.assertRaises(kvasir.DeadlineExceeded):
            self.client.generate(TEXT, max_tokens=4000, ignore_eos=True, timeout_s=0.2)

    def test_many_at_once(self):
        async def ask():
            async with kvasir.AsyncClient(ADDRESS) as client:
                self.assertEqual(await client.detokenize(await client.tokenize(TEXT)), TEXT)
                self.assertIn("default", (await client.model_info()).policies)
                return await asyncio.gather(*(client.generate(TEXT, max_tokens=4, temperature=0) for _ in range(16)))
        texts = {answer.text for answer in asyncio.run(ask())}
        self.assertEqual({self.client.generate(TEXT, max_tokens=4, temperature=0).text}, texts)


class FailingServer(generation_pb2_grpc.GenerationServicer):
    """Fails as often as it is told, then answers."""

    def __init__(self, code, failures, after=0, retry_after_s=None):
        self.code, self.failures, self.after, self.retry_after_s, self.calls = code, failures, after, retry_after_s, 0

    def Generate(self, request, context):
        self.calls += 1
        for index in range(self.after):
            yield generation_pb2.GenerateResponse(tokens=generation_pb2.Tokens(index=index, token_ids=[1], text="a"))
        if self.calls <= self.failures:
            if self.retry_after_s is not None:
                detail = any_pb2.Any()
                detail.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=int(self.retry_after_s * 1e9))))
                status = status_pb2.Status(code=self.code.value[0], message="told to fail", details=[detail])
                context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            context.abort(self.code, "told to fail")
        yield generation_pb2.GenerateResponse(finish=generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_STOP))


class WithServer(unittest.TestCase):
    def serve(self, servicer):
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        self.addCleanup(server.stop, None)
        return f"127.0.0.1:{port}"


class Retries(WithServer):
    def ask(self, servicer, retry=kvasir.Retry(attempts=3, first_delay_s=0.01)):
        with kvasir.Client(self.serve(servicer), retry=retry) as client:
            return client.generate("x")

    def test_an_unavailable_server_is_asked_again(self):
        servicer = FailingServer(grpc.StatusCode.UNAVAILABLE, failures=2)
        self.assertEqual("stop", self.ask(servicer).finish_reason)
        self.assertEqual(3, servicer.calls)

    def test_it_gives_up_after_its_attempts(self):
        servicer = FailingServer(grpc.StatusCode.UNAVAILABLE, failures=3)
        with self.assertRaises(kvasir.Unavailable) as raised:
            self.ask(servicer)
        self.assertEqual("told to fail", str(raised.exception))
        self.assertEqual(3, servicer.calls)

    def test_a_full_server_is_asked_when_it_says(self):
        servicer = FailingServer(grpc.StatusCode.RESOURCE_EXHAUSTED, failures=1, retry_after_s=0.3)
        began = time.monotonic()
        self.ask(servicer)
        self.assertGreaterEqual(time.monotonic() - began, 0.3)
        self.assertEqual(2, servicer.calls)

    def test_what_cannot_help_is_not_tried_again(self):
        for code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL):
            servicer = FailingServer(code, failures=1)
            with self.assertRaises(kvasir.KvasirError):
                self.ask(servicer)
            self.assertEqual(1, servicer.calls, code)

    def test_a_stream_that_brought_something_is_not_tried_again(self):
        servicer = FailingServer(grpc.StatusCode.UNAVAILABLE, failures=1, after=2)
        with self.assertRaises(kvasir.Unavailable):
            self.ask(servicer)
        self.assertEqual(1, servicer.calls)

    def test_coroutines_retry_too(self):
        servicer = FailingServer(grpc.StatusCode.UNAVAILABLE, failures=2)

        async def ask():
            async with kvasir.AsyncClient(self.serve(servicer), retry=kvasir.Retry(attempts=3, first_delay_s=0.01)) as client:
                return await client.generate("x")
        self.assertEqual("stop", asyncio.run(ask()).finish_reason)


class KeyedServer(generation_pb2_grpc.GenerationServicer):
    """Answers who has the key."""

    def answer(self, context, reply):
        if dict(context.invocation_metadata()).get("authorization") != "Bearer sk-right":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid API key")
        return reply

    def Generate(self, request, context):
        finish = generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_STOP)
        yield self.answer(context, generation_pb2.GenerateResponse(finish=finish))

    def GetServerInfo(self, request, context):
        return self.answer(context, generation_pb2.GetServerInfoResponse())


class ApiKey(WithServer):
    def test_every_call_carries_the_key(self):
        address = self.serve(KeyedServer())

        async def ask(key):
            async with kvasir.AsyncClient(address, api_key=key) as client:
                await client.server_info()
                return await client.generate("x")

        def block(key):
            with kvasir.Client(address, api_key=key) as client:
                client.server_info()
                return client.generate("x")
        for call in (block, lambda key: asyncio.run(ask(key))):
            self.assertEqual("stop", call("sk-right").finish_reason)
            for key in ("", "sk-wrong"):
                with self.assertRaises(kvasir.Unauthenticated):
                    call(key)


if __name__ == "__main__":
    unittest.main(verbosity=1)
