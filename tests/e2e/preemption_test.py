"""Streams that together need more KV than there is: all are preempted and restored, and clients see only a pause."""

import pathlib
import random
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import Service  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402

STREAMS = 8
FLAGS = ["--mass-sample-rate=0", "--max-num-batched-tokens=256", "--threads=1", "--kv-device-size-gb=0.01"]
SCARCE = ["--kv-host-size-gb=0.001", "--max-model-len=1024"]  # about 23 blocks; each stream needs 5
QUEST = ["--sparse-selector=quest", "--sparse-token-budget=64", "--sparse-window-tokens=64", "--sparse-sink-tokens=64"]


class Preemption(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-preempt-")))
        cls.model = make_tiny_model(cls.folder / "model")
        rng = random.Random(1)
        cls.prompts = [[rng.randrange(3, 1400) for _ in range(100)] for _ in range(STREAMS)]

    def run_streams(self, *flags):
        """Returns the tokens of all streams, and the coordinator's counters."""
        answers = [None] * STREAMS
        with Service(model=self.model, flags=[*FLAGS, *flags]) as service:
            def run(i):  # generate() checks that indices have no gaps and no repetitions
                answers[i] = service.generate(self.prompts[i], max_tokens=200, ignore_eos=True).token_ids
            threads = [threading.Thread(target=run, args=(i,)) for i in range(STREAMS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return answers, service.metrics()

    @staticmethod
    def count(metrics, name, label):
        return sum(value for key, value in metrics.items() if key.startswith(name + "{") and label in key)

    def check(self, *flags):
        expected, metrics = self.run_streams(*flags)
        self.assertEqual(self.count(metrics, "kvasir_num_preemptions_total", "kind"), 0)
        recomputed, metrics = self.run_streams(*flags, *SCARCE)
        self.assertEqual(recomputed, expected)
        self.assertGreater(self.count(metrics, "kvasir_num_preemptions_total", 'kind="recompute"'), 0)
        self.assertGreater(self.count(metrics, "kvasir_requests_resumed_total", "from"), 0)
        with tempfile.TemporaryDirectory(dir=self.folder) as store:
            swapped, metrics = self.run_streams(*flags, *SCARCE, f"--kv-disk-path={store}", "--kv-disk-size-gb=1")
        self.assertEqual(swapped, expected)
        self.assertGreater(self.count(metrics, "kvasir_num_preemptions_total", 'kind="swap"'), 0)
        self.assertGreater(self.count(metrics, "kvasir_requests_resumed_total", 'from="disk"'), 0)

    def test_dense_answers_are_those_of_a_service_with_room(self):
        self.check()

    def test_sparse_answers_are_those_of_a_service_with_room(self):
        self.check(*QUEST)


if __name__ == "__main__":
    unittest.main(verbosity=2)
