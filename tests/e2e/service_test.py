"""The service as users see it: real processes, real sockets, the reference model, a long document."""

import math
import pathlib
import re
import subprocess
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import KVASIR, Service, read_stream  # noqa: E402

import grpc  # noqa: E402
from documents import make_document  # noqa: E402
from kvasir.v1 import generation_pb2  # noqa: E402

PAGE = 64
HEALTH_SERVING = b"\x08\x01"  # grpc.health.v1.HealthCheckResponse{status: SERVING}
DOCUMENT = make_document("multi_key", 7000, num_questions=8, seed=7)


def ask(service, question, document=DOCUMENT, **options):
    return service.generate(document.text + question.prompt, stop=".", max_tokens=24, **options)


def exact_answers(service, document=DOCUMENT, **options):
    """Returns the number of the document's questions that are answered exactly, and the answers."""
    answers = [ask(service, question, document, **options) for question in document.questions]
    return sum(a.text + "." == q.answer for a, q in zip(answers, document.questions)), answers


class OneWorker(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.service = cls.enterClassContext(Service(flags=["--mass-sample-rate=0.2", "--max-num-seqs=8"]))

    def test_answers_questions_about_a_cached_document(self):
        exact, answers = exact_answers(self.service, tenant_id="cached")
        self.assertGreaterEqual(exact, 7)
        first, later = answers[0], answers[1:]
        self.assertEqual(first.cached_tokens, 0)
        for answer in later:
            self.assertGreaterEqual(answer.cached_tokens, 6900, "the document was not found in the cache")
            self.assertEqual(answer.cached_tokens % PAGE, 0)
        processed = [p.processed_tokens for p in first.progress]
        self.assertEqual(processed, sorted(processed))
        self.assertGreater(len(processed), 5, "no progress while the prompt was read")
        self.assertEqual(processed[-1], first.finish.usage.prompt_tokens)
        self.assertTrue(any(p.HasField("eta") for p in first.progress))

    def test_tenants_do_not_share_prefixes(self):
        question = DOCUMENT.questions[0]
        ask(self.service, question, tenant_id="a")
        self.assertGreater(ask(self.service, question, tenant_id="a").cached_tokens, 0)
        self.assertEqual(ask(self.service, question, tenant_id="b").cached_tokens, 0)

    def test_greedy_and_seeded_sampling_repeat(self):
        options = dict(max_tokens=40, ignore_eos=True)
        prompt = DOCUMENT.text[:2000]
        greedy = [self.service.generate(prompt, **options).token_ids for _ in range(2)]
        self.assertEqual(greedy[0], greedy[1])
        self.assertEqual(len(greedy[0]), 40)
        seeded = [self.service.generate(prompt, temperature=1.0, seed=seed, **options).token_ids for seed in (1, 1, 2)]
        self.assertEqual(seeded[0], seeded[1])
        self.assertNotEqual(seeded[0], seeded[2])

    def test_penalties_bias_and_logprobs(self):
        options = dict(max_tokens=60, ignore_eos=True)
        prompt = DOCUMENT.text[:1500]
        plain = self.service.generate(prompt, logprobs=5, **options)
        self.assertEqual(len(plain.logprobs), 60)
        for token, logprobs in zip(plain.token_ids, plain.logprobs):
            top = logprobs.top
            self.assertEqual((top[0].token_id, top[0].logprob), (token, logprobs.logprob), "greedy takes the largest")
            self.assertEqual([t.logprob for t in top], sorted((t.logprob for t in top), reverse=True))
            self.assertEqual(len({t.token_id for t in top}), 5)
            self.assertLess(sum(math.exp(t.logprob) for t in top), 1.0001)
        distinct = self.service.generate(prompt, presence_penalty=2, frequency_penalty=2, **options)
        self.assertGreater(len(set(distinct.token_ids)), len(set(plain.token_ids)))
        first = plain.token_ids[0]
        self.assertNotIn(first, self.service.generate(prompt, logit_bias={first: -100}, **options).token_ids)
        again = self.service.generate(prompt, logprobs=5, tenant_id="cold", **options)
        for cold, cached in zip(again.logprobs, plain.logprobs):
            self.assertAlmostEqual(cold.logprob, cached.logprob, delta=0.05)  # bfloat16

    def test_many_streams_at_once_equal_each_alone(self):
        prompts = [DOCUMENT.text[i * 300:i * 300 + 1500 + 97 * i] for i in range(8)]
        alone = [self.service.generate(p, max_tokens=12, ignore_eos=True, tenant_id=f"alone{i}").token_ids
                 for i, p in enumerate(prompts)]
        together = [None] * len(prompts)

        def run(i):
            together[i] = self.service.generate(prompts[i], max_tokens=12, ignore_eos=True,
                                                tenant_id=f"together{i}").token_ids
        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(alone, together)

    def test_stop_conditions(self):
        text = self.service.generate(DOCUMENT.text[:1000], max_tokens=30, ignore_eos=True).text
        stop = text[5:9]
        answer = self.service.generate(DOCUMENT.text[:1000], max_tokens=30, ignore_eos=True, stop=stop)
        self.assertEqual(answer.text, text[:text.index(stop)])
        self.assertEqual(answer.finish.matched_stop_str, stop)
        self.assertEqual(answer.finish.reason, 1)
        kept = self.service.generate(DOCUMENT.text[:1000], max_tokens=30, ignore_eos=True, stop=stop,
                                     include_stop_str_in_output=True)
        self.assertEqual(kept.text, text[:text.index(stop) + len(stop)])
        by_length = self.service.generate(DOCUMENT.text[:1000], max_tokens=3, ignore_eos=True)
        self.assertEqual((by_length.finish.reason, len(by_length.token_ids)), (2, 3))
        token = by_length.token_ids[1]
        by_token = self.service.generate(DOCUMENT.text[:1000], max_tokens=3, stop_token_ids=[token])
        self.assertEqual(by_token.finish.matched_token_id, token)

    def test_bad_requests_say_what_is_wrong(self):
        cases = [
            (dict(prompt=""), "empty"),
            (dict(prompt=DOCUMENT.text * 3), "8192"),
            (dict(prompt="hi", max_tokens=0), "max_tokens"),
            (dict(prompt="hi", temperature=float("nan")), "temperature"),
            (dict(prompt="hi", top_p=0.0), "top_p"),
            (dict(prompt="hi", policy="nonsense"), "nonsense"),
            (dict(prompt=[999999]), "999999"),
            (dict(prompt="hi", request_id="x" * 200), "request_id"),
        ]
        for request, expected in cases:
            with self.subTest(expected=expected), self.assertRaises(grpc.RpcError) as raised:
                self.service.generate(**request)
            self.assertEqual(raised.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
            self.assertIn(expected, raised.exception.details())

    def test_a_running_request_id_is_refused_and_free_again_afterwards(self):
        stream = self.service.stream(DOCUMENT.text[:1000], request_id="once", max_tokens=2000, ignore_eos=True)
        next(stream)
        with self.assertRaises(grpc.RpcError) as raised:
            self.service.generate("hello", request_id="once")
        self.assertEqual(raised.exception.code(), grpc.StatusCode.ALREADY_EXISTS)
        stream.cancel()
        self.wait_idle()
        self.assertTrue(self.service.generate("hello", request_id="once", max_tokens=1).finish)

    def test_cancellation_and_deadline_free_the_request(self):
        stream = self.service.stream(DOCUMENT.text[:3000], max_tokens=4000, ignore_eos=True)
        next(stream)
        stream.cancel()
        self.wait_idle()
        with self.assertRaises(grpc.RpcError) as raised:
            self.service.generate(DOCUMENT.text[:3000], timeout_s=0.3, max_tokens=4000, ignore_eos=True)
        self.assertEqual(raised.exception.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
        self.wait_idle()

    def wait_idle(self):
        deadline = time.monotonic() + 10
        while self.service.metric("kvasir_num_requests_running") + self.service.metric("kvasir_num_requests_waiting"):
            self.assertLess(time.monotonic(), deadline, "the request was not freed")
            time.sleep(0.02)

    def test_health_and_reflection_answer(self):
        check = self.service.channel.unary_unary("/grpc.health.v1.Health/Check")
        name = b"kvasir.v1.Generation"
        self.assertEqual(check(b""), HEALTH_SERVING)
        self.assertEqual(check(b"\x0a" + bytes([len(name)]) + name), HEALTH_SERVING)
        reflect = self.service.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        self.assertIn(name, next(reflect(iter([b"\x3a\x00"]))))

    def test_generate_command_streams_and_sums_up(self):
        question = DOCUMENT.questions[1]
        run = subprocess.run([KVASIR, "generate", f"--server={self.service.address}", "--prompt-file=-", "--stop=.",
                              "--max-tokens=24"], input=DOCUMENT.text + question.prompt, capture_output=True, text=True,
                             timeout=120, check=True)
        self.assertEqual(run.stdout.strip() + ".", question.answer.strip())
        for words in ("time to first token", "blocks skipped", "page reads", "attention mass kept"):
            self.assertIn(words, run.stderr)


    def test_status_command_shows_workers_tiers_and_hits(self):
        ask(self.service, DOCUMENT.questions[0], tenant_id="status")
        ask(self.service, DOCUMENT.questions[1], tenant_id="status")
        run = subprocess.run([KVASIR, "status", f"--server={self.service.address}"], capture_output=True, text=True,
                             timeout=20, check=True)
        for words in ("serving", "needle-8k", "8,192 tokens", "device", "host", self.service.worker_metrics[0]):
            self.assertIn(words, run.stdout)
        hits = re.search(r"([\d,]+) of ([\d,]+) prompt tokens found", run.stdout).groups()
        self.assertGreater(int(hits[0].replace(",", "")), 6900)
        nobody = subprocess.run([KVASIR, "status", "--server=127.0.0.1:1", "--timeout=2"], capture_output=True,
                                text=True, timeout=20, check=False)
        self.assertEqual(nobody.returncode, 1)
        self.assertIn("UNAVAILABLE", nobody.stderr)

    def bench(self, *flags):
        return subprocess.run([KVASIR, "bench", f"--server={self.service.address}", "--quiet", *flags],
                              capture_output=True, text=True, timeout=120, check=False)

    def test_bench_command_measures_a_load(self):
        for loop in ([], ["--rate=50"]):
            run = self.bench("--streams=4", "--requests=8", "--prompt-tokens=200", "--max-tokens=8", *loop)
            self.assertEqual(run.returncode, 0, run.stderr)
            self.assertRegex(run.stdout, r"8 in [\d.]+ s, 0 failed; 0 of 1,600 prompt tokens cached")
            for name in ("time to first token, ms", "inter-token latency, ms"):
                times = [float(t) for t in re.search(name + r" +(.*)", run.stdout).group(1).split()]
                self.assertEqual(len(times), 4)
                self.assertGreater(min(times), 0)
                self.assertEqual(times[1:], sorted(times[1:]))

    def test_bench_command_measures_what_a_long_prompt_does_to_streams(self):
        run = self.bench("--streams=4", "--prompt-tokens=100", "--max-tokens=10", "--long-prompt-tokens=3000")
        verdict = re.search(r"p99 ([\d.]+) ms, bound ([\d.]+) \+ 1.5 x ([\d.]+) = ([\d.]+) ms: (held|MISSED)", run.stdout)
        self.assertTrue(verdict, run.stdout + run.stderr)
        p99, before, chunk, bound = (float(verdict.group(i)) for i in range(1, 5))
        self.assertAlmostEqual(bound, before + 1.5 * chunk, delta=0.2)
        self.assertEqual(run.returncode, 0 if p99 <= bound else 1)
        self.assertIn("alone", run.stdout)
        too_long = self.bench("--long-prompt-tokens=9000")
        self.assertEqual(too_long.returncode, 1)
        self.assertIn("--max-model-len", too_long.stderr)

    def test_tokenize_and_detokenize_are_inverse(self):
        tokens = self.service.stub.Tokenize(generation_pb2.TokenizeRequest(text=DOCUMENT.text)).token_ids
        self.assertGreater(len(tokens), 6900)
        request = generation_pb2.DetokenizeRequest(token_ids=tokens, skip_special_tokens=True)
        self.assertEqual(self.service.stub.Detokenize(request).text, DOCUMENT.text)


class Quest(unittest.TestCase):
    def test_most_blocks_are_skipped_and_answers_survive(self):
        flags = ["--sparse-selector=quest", "--sparse-token-budget=1536", "--sparse-window-tokens=256",
                 "--mass-sample-rate=0.2"]
        with Service(flags=flags) as service:
            exact, answers = exact_answers(service)
            report = answers[-1].finish.attention
            skipped = report.decode_blocks_skipped.selected_out
            self.assertGreater(skipped, 0.5 * report.decode_blocks_total)
            self.assertGreaterEqual(exact, 7)
            self.assertGreater(report.decode_measured_mass.samples, 0)
            self.assertGreater(report.decode_measured_mass.mean, 0.3)
            self.assertLess(report.decode_measured_mass.minimum, 1.0)

    def test_streaming_forgets_the_document(self):
        with Service(flags=["--sparse-selector=streaming"]) as service:
            exact, answers = exact_answers(service)
            self.assertLess(exact, 6, "sink and window alone cannot know the facts")
            self.assertGreater(answers[-1].finish.attention.decode_blocks_skipped.window, 0)


class TwoWorkers(unittest.TestCase):
    def test_tensor_parallel_answers_and_survives_a_killed_worker(self):
        with Service(flags=["--tensor-parallel-size=2", "--rank-timeout=3"]) as service:
            exact, _ = exact_answers(service)
            self.assertGreaterEqual(exact, 7)
            options = dict(max_tokens=1000, ignore_eos=True)
            clean = service.generate(DOCUMENT.text[:3000], **options)
            stream = service.stream(DOCUMENT.text[:3000], **options)
            next(stream)
            workers = subprocess.run(["pgrep", "-P", str(service.process.pid)], capture_output=True, text=True,
                                     check=True).stdout.split()
            self.assertEqual(len(workers), 2)
            subprocess.run(["kill", "-9", workers[1]], check=True)
            answer = read_stream(stream)
            self.assertTrue(any(p.waits_for_worker for p in answer.progress), "the kill met no stream")
            self.assertEqual(answer.token_ids, clean.token_ids)
            self.assertEqual(service.metric("kvasir_worker_group_losses_total"), 1)


class Tiers(unittest.TestCase):
    """Tokens do not depend on the part of the KV that the device tier holds."""

    FLAGS = ["--dtype=float32", "--kv-cache-dtype=float32"]

    def answers(self, flags):
        with Service(flags=self.FLAGS + flags) as service:
            _, answers = exact_answers(service)
            return [a.token_ids for a in answers], service.metrics(service.worker_metrics[0])

    def test_a_small_device_tier_changes_nothing_but_the_counters(self):
        # 7K tokens are 110 blocks of 786,432 bytes in float32.
        whole, metrics = self.answers(["--kv-device-size-gb=0.2"])
        self.assertEqual(self.lookups(metrics, "miss"), 0)
        tenth, metrics = self.answers(["--kv-device-size-gb=0.009", "--max-num-batched-tokens=128"])
        self.assertEqual(whole, tenth)
        self.assertGreater(self.lookups(metrics, "miss"), 0)

    @staticmethod
    def lookups(metrics, result):
        return sum(v for k, v in metrics.items()
                   if k.startswith("kvasir_kv_page_lookups_total") and f'result="{result}"' in k)


class Metrics(unittest.TestCase):
    def test_promtool_accepts_every_endpoint(self):
        with Service(flags=["--tensor-parallel-size=2"]) as service:
            service.generate("hello", max_tokens=4)
            self.assertEqual(len(service.worker_metrics), 2)
            for address in [service.metrics_address, *service.worker_metrics]:
                text = service.metrics_text(address)
                self.assertIn("# HELP kvasir_", text)
                run = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
                self.assertEqual((run.returncode, run.stderr.strip()), (0, ""), address)


if __name__ == "__main__":
    unittest.main(verbosity=2)
