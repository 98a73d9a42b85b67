"""Requests that need more KV than memory holds: their blocks lie on disk and are read page by page.

Answers, and the log probabilities of their tokens, are those of a service that holds everything in memory. Every test
also checks by counters that blocks left memory and came back as pages.
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from e2e.disk_test import counter, make_prompts, wait_until  # noqa: E402
from support.service import KVASIR, ROOT, Service  # noqa: E402
from support.tiny_model import KV_HEADS, make_tiny_model  # noqa: E402

BLOCK_TOKENS = 64
BLOCKS = 90  # of the document; memory holds some 20 whole
PAGE_BYTES = 8192
HOST_BYTES = 2_600_000  # half of it for single pages: not enough for those of one layer
FLAGS = ["--mass-sample-rate=0", "--max-num-batched-tokens=512", "--threads=1", "--max-model-len=8192"]
IN_MEMORY = ["--kv-device-size-gb=0.01", "--kv-host-size-gb=0.05"]
ON_DEMAND = ["--kv-device-size-gb=0.001", f"--kv-host-size-gb={HOST_BYTES / 1e9}", "--kv-disk-size-gb=1",
             "--kv-on-demand-size-gb=0.01"]
QUEST = ["--sparse-selector=quest", "--sparse-token-budget=512", "--sparse-sink-tokens=64", "--sparse-window-tokens=128",
         "--sparse-dense-layers=0"]
OPTIONS = dict(max_tokens=24, ignore_eos=True, logprobs=1)


class OnDemand(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-on-demand-")))
        cls.model = make_tiny_model(cls.folder / "model")
        [document] = make_prompts(1, tokens=BLOCKS * BLOCK_TOKENS, seed=5)
        cls.questions = [document + question for question in make_prompts(2, tokens=30, seed=6)]

    def serve(self, *flags):
        return Service(model=self.model, flags=[*FLAGS, *flags])

    def expected(self, *flags):
        with self.serve(*IN_MEMORY, *flags) as service:
            return [service.generate(question, **OPTIONS) for question in self.questions]

    def check_same(self, answers, expected):
        for answer, other in zip(answers, expected):
            self.assertEqual(answer.token_ids, other.token_ids)
            self.assertEqual(str(answer.logprobs), str(other.logprobs))

    def check(self, *flags, ranks=1):
        expected = self.expected(*flags)
        store = f"--kv-disk-path={self.folder / 'store'}{'-'.join(flags)}"
        with self.serve(*ON_DEMAND, store, *flags) as service:
            answers = [service.generate(question, **OPTIONS) for question in self.questions]
            self.check_same(answers, expected)
            for rank in range(ranks):
                self.assertGreater(counter(service, "kvasir_kv_shed_blocks_total", rank), BLOCKS / 8)
                self.assertGreater(counter(service, "kvasir_kv_disk_page_reads_total", rank, result="ok"), 0)
                self.assertEqual(counter(service, "kvasir_kv_disk_page_reads_total", rank, result="failed"), 0)
                self.assertEqual(counter(service, "kvasir_failed_rows_total", rank), 0)
            self.assertEqual(service.metric("kvasir_num_preemptions_total"), 0)
            wait_until(lambda: counter(service, "kvasir_kv_tier_pages", tier="disk", state="used") >= BLOCKS * 4 / ranks,
                       "the document is stored")
        with self.serve(*ON_DEMAND, store, *flags) as service:  # the document is opened lazily
            answer = service.generate(self.questions[1], **OPTIONS)
            self.check_same([answer], expected[1:])
            self.assertGreaterEqual(answer.finish.usage.cached_tokens.disk, (BLOCKS - 2) * BLOCK_TOKENS)
            for rank in range(ranks):
                self.assertGreaterEqual(counter(service, "kvasir_kv_lean_blocks", rank), BLOCKS - 2)
            return answer

    def test_dense(self):
        self.assertGreater(BLOCKS * KV_HEADS * PAGE_BYTES, HOST_BYTES / 2)
        answer = self.check()
        self.assertGreater(answer.finish.attention.disk_page_waits, 0)
        self.assertGreater(answer.finish.attention.disk_wait_s, 0)

    def test_quest(self):
        self.check(*QUEST)

    def test_pages_that_are_damaged_on_disk_are_computed_again(self):
        expected = self.expected()
        store = self.folder / "damaged"
        with self.serve(*ON_DEMAND, f"--kv-disk-path={store}") as service:
            service.generate(self.questions[0], **OPTIONS)
            wait_until(lambda: counter(service, "kvasir_kv_tier_pages", tier="disk", state="used") >= BLOCKS * 4,
                       "the document is stored")
            blocks = int(counter(service, "kvasir_kv_tier_pages", tier="disk", state="used")) // 4
        segments = sorted((store / "head0" / "segments").iterdir())
        extent = sum(s.stat().st_size for s in segments) // blocks
        for segment in segments:  # a bit of the last page of every tenth block
            data = bytearray(segment.read_bytes())
            for begin in range(0, len(data), 10 * extent):
                data[begin + extent - PAGE_BYTES // 2] ^= 1
            segment.write_bytes(data)
        with self.serve(*ON_DEMAND, f"--kv-disk-path={store}") as service:
            answer = service.generate(self.questions[1], **OPTIONS)
            self.check_same([answer], expected[1:])
            self.assertGreater(counter(service, "kvasir_kv_disk_page_reads_total", result="failed"), BLOCKS / 20)
            self.assertGreater(counter(service, "kvasir_failed_rows_total", code="DATA_LOSS"), 0)
            self.assertEqual(sum(value for name, value in service.metrics().items() if 'kind="damage"' in name), 1)

    def test_two_ranks(self):
        self.check("--tensor-parallel-size=2", ranks=2)


class Refused(unittest.TestCase):
    def test_without_a_disk(self):
        run = subprocess.run([KVASIR, "serve", f"--model={ROOT / 'tests/model/needle-8k'}", "--port=0", "--http-port=0",
                              "--metrics-port=0", "--kv-on-demand-size-gb=1"], capture_output=True, text=True, timeout=60)
        self.assertNotEqual(run.returncode, 0)
        self.assertIn("without kv_disk_path", run.stdout + run.stderr)


if __name__ == "__main__":
    unittest.main()
