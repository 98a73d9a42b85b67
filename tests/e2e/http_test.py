"""The HTTP API as clients see it: real processes, real sockets, completions whole and as streams, and its errors."""

import asyncio
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.chat_model import link_chat_model  # noqa: E402
from support.http_client import (ask, open_connection, parse_events, raw_connection, read_events, read_to_end,  # noqa: E402
                                 receive, send)
from support.service import ROOT, SLOWER, Service  # noqa: E402

from documents import make_document  # noqa: E402

COMPLETIONS = "/v1/completions"
MODEL = "needle-8k"
TEXT = "Once upon a time"
DOCUMENT = make_document("multi_key", 3000, num_questions=2, seed=7)


class Http(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.service = cls.enterClassContext(Service(flags=["--max-num-seqs=64"]))

    def complete(self, **body):
        reply = ask(self.service, "POST", COMPLETIONS, {"temperature": 0, **body})
        self.assertEqual(reply.status, 200, reply.body)
        return reply.json

    def stream(self, **body):
        return read_events(self.service, COMPLETIONS, {"temperature": 0, **body})

    def refuse(self, status, path=COMPLETIONS, method="POST", **body):
        reply = ask(self.service, method, path, body)
        self.assertEqual(reply.status, status, reply.body)
        self.assertEqual(set(reply.error), {"message", "type", "param", "code"})
        return reply

    # --- the server ---

    def test_probes_and_the_model(self):
        for path in ("/health", "/ping"):
            self.assertEqual(ask(self.service, "GET", path).status, 200)
        self.assertRegex(ask(self.service, "GET", "/version").json["version"], r"^\d+\.\d+\.\d+$")
        self.await_running(0)
        listed = ask(self.service, "GET", "/v1/models").json
        self.assertEqual(listed["object"], "list")
        (model,) = listed["data"]
        self.assertEqual((model["id"], model["object"], model["parent"], model["permission"]), (MODEL, "model", None, []))
        self.assertEqual(model["max_model_len"], 8192)
        self.assertTrue((pathlib.Path(model["root"]) / "tokenizer.json").exists())
        self.assertEqual(ask(self.service, "GET", f"/v1/models/{MODEL}").json, model)

    def test_metrics_are_those_of_the_metrics_port(self):
        reply = ask(self.service, "GET", "/metrics")
        self.assertTrue(reply.headers["content-type"].startswith("text/plain"))
        names = {line.split("{")[0].split(" ")[0] for line in reply.body.decode().splitlines() if not line.startswith("#")}
        self.assertIn("kvasir_num_requests_running", names)
        self.assertGreater(self.service.metric("kvasir_http_answers_total"), 0)

    def test_wrong_routes_methods_and_models(self):
        self.assertEqual(self.refuse(404, "/v1/nothing", "GET").error["type"], "not_found_error")
        self.assertEqual(self.refuse(405, "/v1/models").headers["allow"], "GET, HEAD")
        self.assertEqual(self.refuse(405, COMPLETIONS, "GET").headers["allow"], "POST")
        self.assertEqual(self.refuse(404, prompt="x", model="gpt-4").error["code"], "model_not_found")
        self.assertEqual(self.refuse(404, "/v1/models/gpt-4", "GET").error["code"], "model_not_found")

    def test_head_is_answered_as_get_without_the_body(self):
        connection = open_connection(self.service)

        def asked(method, path):
            send(connection, method, path)
            return receive(connection)
        for path in ("/health", "/ping", "/version", "/load", "/v1/models", f"/v1/models/{MODEL}", "/metrics", "/",
                     "/tokenizer_info", "/v1/nothing", "/v1/models/gpt-4"):
            head, get = asked("HEAD", path), asked("GET", path)  # bytes of a body would spoil the next answer
            for told in (head, get):
                del told.headers["x-request-id"]
                if path == "/metrics":  # which counts these
                    self.assertGreater(int(told.headers.pop("content-length")), 1000)
            self.assertEqual((head.status, head.headers, head.body), (get.status, get.headers, b""), path)
        for path, allow in ((COMPLETIONS, "POST"), ("/status/events", "GET")):
            head = asked("HEAD", path)
            self.assertEqual((head.status, head.headers["allow"], head.body), (405, allow, b""), path)
        connection.close()
        metrics_port = socket.create_connection(self.service.metrics_address.rsplit(":", 1), 60)
        for connection, asked, status in ((raw_connection(self.service), b"HEAD / HTTP/1.1\r\nx: " + b"y" * 20000, b"400"),
                                          (metrics_port, b"HEAD /metrics HTTP/1.1", b"200")):
            with connection:
                connection.sendall(asked + b"\r\n\r\n")
                head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
            self.assertEqual((head.split()[1], body), (status, b""), asked[:40])

    def test_keep_alive_and_request_ids(self):
        connection = open_connection(self.service)
        for i in range(3):
            send(connection, "POST", COMPLETIONS, {"prompt": TEXT, "max_tokens": 2, "stream": i == 1},
                 {"x-request-id": f"contract-{i}"})
            reply = receive(connection)
            self.assertEqual(reply.headers["x-request-id"], f"contract-{i}")
            chunk = parse_events(reply.body.decode()).chunks[0] if i == 1 else reply.json
            self.assertEqual(chunk["id"], f"cmpl-contract-{i}")
        connection.close()
        self.assertRegex(ask(self.service, "POST", COMPLETIONS, {"prompt": TEXT}).headers["x-request-id"], r"^req-[0-9a-f]{16}$")

    # --- completions ---

    def test_an_answer_is_that_of_grpc(self):
        expected = self.service.generate(TEXT, max_tokens=12, ignore_eos=True)
        options = dict(prompt=TEXT, max_tokens=12, ignore_eos=True)
        whole = self.complete(**options)
        self.assertEqual(whole["object"], "text_completion")
        (choice,) = whole["choices"]
        self.assertEqual((choice["text"], choice["finish_reason"]), (expected.text, "length"))
        streamed = self.stream(**options)
        self.assertEqual(streamed.text(), expected.text)
        usage = whole["usage"]
        self.assertEqual((usage["prompt_tokens"], usage["completion_tokens"]), (expected.finish.usage.prompt_tokens, 12))
        self.assertEqual(usage["kvasir"], {"sparsity": 0, "blocks_skipped": 0, "mass": 1})

    def test_every_form_of_a_prompt(self):
        ids = ask(self.service, "POST", "/tokenize", {"prompt": TEXT}).json["tokens"]
        texts = [choice["text"] for prompt in (TEXT, [TEXT], ids, [ids])
                 for choice in self.complete(prompt=prompt, max_tokens=6)["choices"]]
        self.assertEqual(len(set(texts)), 1)
        two = self.complete(prompt=[TEXT, "Another text"], max_tokens=6)
        self.assertEqual([choice["index"] for choice in two["choices"]], [0, 1])
        self.assertEqual(two["choices"][0]["text"], texts[0])
        self.assertNotEqual(two["choices"][1]["text"], texts[0])

    def test_one_event_a_token(self):
        events = self.stream(prompt=TEXT, max_tokens=9, ignore_eos=True, stream_options={"include_usage": True})
        self.assertEqual(len(events.told), 9)
        self.assertEqual([chunk["choices"][0]["finish_reason"] for chunk in events.told], [None] * 8 + ["length"])
        last = events.chunks[-1]
        self.assertEqual((last["choices"], last["usage"]["completion_tokens"]), ([], 9))
        self.assertTrue(all(chunk["usage"] is None for chunk in events.told))

    def test_continuous_usage(self):
        events = self.stream(prompt=TEXT, max_tokens=5, ignore_eos=True,
                             stream_options={"include_usage": True, "continuous_usage_stats": True})
        self.assertEqual([chunk["usage"]["completion_tokens"] for chunk in events.told], [1, 2, 3, 4, 5])
        self.assertGreater(events.told[0]["usage"]["prompt_tokens"], 0)

    def test_progress_is_told_in_comments(self):
        events = self.stream(prompt=DOCUMENT.text, max_tokens=2, cache_salt="progress")
        self.assertGreater(len(events.comments), 2)
        for comment in events.comments:
            self.assertRegex(comment, r"^reading prompt \d+/\d+$")

    def test_stops(self):
        full = self.complete(prompt=TEXT, max_tokens=20, ignore_eos=True)["choices"][0]["text"]
        stop = full[8:11]
        for stops in (stop, [stop, "never said"]):
            (choice,) = self.complete(prompt=TEXT, max_tokens=20, ignore_eos=True, stop=stops)["choices"]
            self.assertEqual((choice["text"], choice["finish_reason"], choice["stop_reason"]),
                             (full[:full.index(stop)], "stop", stop))
        events = self.stream(prompt=TEXT, max_tokens=20, ignore_eos=True, stop=stop)
        self.assertEqual(events.text(), full[:full.index(stop)])
        self.assertEqual(events.told[-1]["choices"][0]["finish_reason"], "stop")

    def test_logprobs_in_the_legacy_form(self):
        (choice,) = self.complete(prompt=TEXT, max_tokens=5, ignore_eos=True, logprobs=3)["choices"]
        logprobs = choice["logprobs"]
        self.assertEqual({len(logprobs[name]) for name in logprobs}, {5})
        self.assertEqual("".join(logprobs["tokens"]), choice["text"])
        for token, chosen, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
            self.assertEqual(top[token], chosen)
            self.assertEqual(max(top.values()), chosen, "the answer is greedy")
            self.assertEqual(len(top), 3)
        self.assertEqual(logprobs["text_offset"],
                         [len("".join(logprobs["tokens"][:i])) for i in range(5)])
        events = self.stream(prompt=TEXT, max_tokens=5, ignore_eos=True, logprobs=3)
        told = [chunk["choices"][0]["logprobs"] for chunk in events.told]
        for name in logprobs:
            self.assertEqual(sum((chunk[name] for chunk in told), []), logprobs[name])
        self.assertIsNone(self.complete(prompt=TEXT, max_tokens=1)["choices"][0]["logprobs"])

    def test_several_answers_share_the_prompt(self):
        options = dict(prompt=DOCUMENT.text, n=3, seed=7, max_tokens=6, temperature=1, ignore_eos=True, cache_salt="several")
        first = self.complete(**options)
        texts = [choice["text"] for choice in first["choices"]]
        self.assertEqual([choice["index"] for choice in first["choices"]], [0, 1, 2])
        self.assertEqual(len(set(texts)), 3, "the answers do not differ")
        usage = first["usage"]
        self.assertEqual(usage["completion_tokens"], 18)
        self.assertLess(usage["prompt_tokens"], 3500, "a prompt counts once")
        # Two of three found it in the cache.
        self.assertGreater(usage["prompt_tokens_details"]["cached_tokens"], 2 * 2800)
        again = [choice["text"] for choice in self.complete(**options)["choices"]]
        self.assertEqual(again, texts, "the seed does not repeat")

    def test_echo_and_logit_bias_and_penalties(self):
        (choice,) = self.complete(prompt=TEXT, max_tokens=3, echo=True)["choices"]
        self.assertTrue(choice["text"].startswith(TEXT))
        self.assertEqual(self.stream(prompt=TEXT, max_tokens=3, echo=True).text(), choice["text"])
        token = ask(self.service, "POST", "/tokenize", {"prompt": "x", "add_special_tokens": False}).json["tokens"][0]
        biased = self.complete(prompt=TEXT, max_tokens=4, logit_bias={str(token): 100}, ignore_eos=True)
        self.assertEqual(biased["choices"][0]["text"], "xxxx")
        plain = self.complete(prompt=TEXT, max_tokens=30, ignore_eos=True)["choices"][0]["text"]
        self.assertNotEqual(self.complete(prompt=TEXT, max_tokens=30, ignore_eos=True, frequency_penalty=2,
                                          presence_penalty=2, repetition_penalty=2)["choices"][0]["text"], plain)

    def test_what_clients_send_besides_is_ignored(self):
        self.complete(model=MODEL, prompt=TEXT, max_tokens=2, user="u", store=True, metadata={"a": "b"}, service_tier="auto",
                      prompt_cache_key="k", logprobs=None, stop=None, n=None, suffix=None, best_of=1, top_k=-1, min_p=0.0)

    def test_wrong_fields_are_named(self):
        for field, value in [("prompt", 5), ("prompt", [True]), ("prompt", None), ("prompt", [[1, "a"]]), ("max_tokens", "many"),
                             ("max_tokens", 0), ("max_tokens", 1 << 40), ("temperature", "hot"), ("temperature", 101),
                             ("top_p", 0), ("stop", 5), ("stop", [1]), ("stop", ["x"] * 65), ("logit_bias", {"a": 1}),
                             ("logit_bias", {"1": 101}), ("n", 0), ("n", 129), ("best_of", 2), ("suffix", "end"),
                             ("seed", 1.5), ("logprobs", 21), ("logprobs", -1), ("stream", "yes"), ("stream_options", 1),
                             ("stop_token_ids", "all"), ("sparsity", 3), ("quality", "best"), ("cache_salt", 1),
                             ("use_beam_search", True), ("echo", "loud"), ("min_tokens", 99)]:
            with self.subTest(field=field, value=value):
                reply = self.refuse(400, **{"prompt": TEXT, "max_tokens": 2, field: value})
                self.assertEqual(reply.error["param"], field, reply.body)
                self.assertIn(field, reply.error["message"])
                self.assertEqual(reply.error["type"], "invalid_request_error")
        self.assertIn("context", self.refuse(400, prompt=TEXT, max_tokens=8192).error["message"])
        self.assertEqual(self.refuse(400, prompt=[[100000]]).error["param"], "prompt")

    def test_policies_of_a_request(self):
        self.assertIn("nothing", self.refuse(400, prompt=TEXT, sparsity="nothing").error["message"])
        self.complete(prompt=TEXT, max_tokens=2, sparsity="default")
        self.complete(prompt=TEXT, max_tokens=2, sparsity={"name": "default"})

    def test_cached_tokens_are_told_by_tier(self):
        options = dict(prompt=DOCUMENT.text, max_tokens=1)
        self.assertEqual(self.complete(cache_salt="a", **options)["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        details = self.complete(cache_salt="a", **options)["usage"]["prompt_tokens_details"]
        self.assertGreater(details["cached_tokens"], 2500)
        self.assertEqual(sum(details["cached_tokens_by_tier"].values()), details["cached_tokens"])
        self.assertEqual(self.complete(cache_salt="b", **options)["usage"]["prompt_tokens_details"]["cached_tokens"], 0)

    def test_tokens_and_texts(self):
        tokens = ask(self.service, "POST", "/tokenize", {"prompt": TEXT, "return_token_strs": True}).json
        self.assertEqual((tokens["count"], tokens["max_model_len"]), (len(tokens["tokens"]), 8192))
        self.assertEqual(len(tokens["token_strs"]), tokens["count"])
        bare = ask(self.service, "POST", "/tokenize", {"prompt": TEXT, "add_special_tokens": False}).json["tokens"]
        self.assertEqual(ask(self.service, "POST", "/detokenize", {"tokens": bare}).json, {"prompt": TEXT})
        self.assertEqual(self.refuse(400, "/detokenize", tokens=[1 << 30]).error["param"], "tokens")
        self.assertEqual(self.refuse(400, "/tokenize").error["param"], "prompt")

    def test_the_tokenizer_is_described(self):
        info = ask(self.service, "GET", "/tokenizer_info").json
        self.assertEqual((info["bos_token"], info["eos_token"], info["pad_token"]),
                         ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"))
        self.assertIn("chat_template", info)

    def test_64_streams_at_once(self):
        expected = self.complete(prompt=TEXT, max_tokens=24, ignore_eos=True)["choices"][0]["text"]
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            texts = list(pool.map(lambda _: self.stream(prompt=TEXT, max_tokens=24, ignore_eos=True).text(), range(64)))
        self.assertEqual(set(texts), {expected})

    def test_a_client_that_is_gone_frees_its_place(self):
        for stream in (True, False):
            connection = open_connection(self.service)
            send(connection, "POST", COMPLETIONS, {"prompt": TEXT, "max_tokens": 7000, "ignore_eos": True, "stream": stream})
            if stream:
                connection.getresponse().read(200)
            self.await_running(1)
            connection.close()
            self.await_running(0, within_s=2)

    def await_running(self, count, within_s=10):
        deadline = time.monotonic() + within_s
        while ask(self.service, "GET", "/load").json["requests_running"] != count:
            self.assertLess(time.monotonic(), deadline, f"not {count} running")
            time.sleep(0.01)


class ManyStreams(unittest.TestCase):
    STREAMS = 2000 // SLOWER

    async def read_one(self, service, begun, all_begun):
        host, port = service.http_address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": TEXT, "max_tokens": 3, "ignore_eos": True, "stream": True, "temperature": 0}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        begun.append(1)
        if len(begun) == self.STREAMS:
            all_begun.set()
        text = await reader.read()
        writer.close()
        return text

    # Names of the threads that gRPC 1.51 starts by itself: 10 on 2 cores, more on more, none for a stream. jemalloc has one.
    LIBRARIES_THREADS = {"jemalloc_bg_thd", "default-executo", "resolver-execut", "grpc_global_tim", "event_engine",
                         "timer_manager", "nexting_thread", "grpcpp_sync_ser"}

    def usage(self, service):
        """The server's memory in KiB, and its threads by their names."""
        process = pathlib.Path(f"/proc/{service.process.pid}")
        memory = int(re.search(r"^VmRSS:\s+(\d+)", (process / "status").read_text(), re.M)[1])
        return memory, collections.Counter(path.read_text().strip() for path in process.glob("task/*/comm"))

    async def read_all(self, service):
        begun, all_begun = [], asyncio.Event()
        streams = asyncio.gather(*[self.read_one(service, begun, all_begun) for _ in range(self.STREAMS)])
        await all_begun.wait()
        during = self.usage(service)
        return await streams, during

    def test_2000_streams_need_neither_threads_nor_much_memory(self):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard != resource.RLIM_INFINITY and hard < 5 * self.STREAMS:  # a connection may take a quarter of them
            self.skipTest(f"{self.STREAMS} connections need {5 * self.STREAMS} open files; ulimit -Hn is {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with Service(flags=["--max-num-seqs=256", "--max-queue-len=2000"]) as service:
            ask(service, "POST", COMPLETIONS, {"prompt": TEXT, "max_tokens": 3})
            idle, _ = self.usage(service)
            texts, (memory, threads) = asyncio.run(self.read_all(service))
            own = sum(count for name, count in threads.items() if name not in self.LIBRARIES_THREADS)
            print(f"{self.STREAMS} streams: {(memory - idle) >> 10} MiB above idle, {own} threads of our own and "
                  f"{threads.total() - own} of gRPC: {dict(threads)}")
            self.assertTrue(all(text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for text in texts))
            self.assertLessEqual(own, os.cpu_count() + 8)
            if "SANITIZERS" not in os.environ:  # which keep memory that was freed
                self.assertLess(memory - idle, 200 << 10)


class Documentation(unittest.TestCase):
    def test_curl_lines_run_as_written(self):
        section = (ROOT / "docs" / "api.md").read_text().split("## HTTP\n")[1].split("\n## ")[0]
        lines = [line for block in re.findall(r"```sh\n(.*?)```", section, re.S) for line in block.splitlines()]
        lines += re.findall(r"^curl .*$", (ROOT / "README.md").read_text(), re.M)
        self.assertGreater(len(lines), 8)
        model = link_chat_model(self.enterContext(tempfile.TemporaryDirectory()))
        with Service(model=model) as service, tempfile.TemporaryDirectory() as home:
            # The documents' port leads to the port of this server.
            (pathlib.Path(home) / ".curlrc").write_text(f'connect-to = "127.0.0.1:8000:{service.http_address}"\nfail\n')
            for line in lines:
                run = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60,
                                     env={**os.environ, "CURL_HOME": home})
                self.assertEqual(run.returncode, 0, f"{line}\n{run.stdout}{run.stderr}")
                self.assertTrue(run.stdout, line)


class FullQueue(unittest.TestCase):
    def test_too_many_requests_are_told_when_to_come_back(self):
        with Service(flags=["--max-num-seqs=1", "--max-queue-len=0"]) as service:
            connection = open_connection(service)
            send(connection, "POST", COMPLETIONS, {"prompt": TEXT, "max_tokens": 7000, "ignore_eos": True, "stream": True})
            connection.getresponse().read(100)
            reply = ask(service, "POST", COMPLETIONS, {"prompt": TEXT})
            self.assertEqual((reply.status, reply.error["type"]), (429, "rate_limit_error"), reply.body)
            self.assertGreaterEqual(int(reply.headers["retry-after"]), 1)
            connection.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
