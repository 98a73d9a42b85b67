"""The service with a GPU per worker: a group answers as one GPU does, and a stream outlives a lost worker."""

import glob
import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import Service  # noqa: E402

from documents import make_document  # noqa: E402

DOCUMENT = make_document("multi_key", 7000, num_questions=8, seed=7)
FLAGS = ["--device=cuda", "--dtype=bfloat16", "--kv-cache-dtype=bfloat16", "--kv-device-size-gb=4", "--kv-host-size-gb=2",
         "--sparse-selector=quest"]
LONG = dict(max_tokens=4000, ignore_eos=True)
TOLD_WITHIN_S = 5   # that the stream waits for a worker
AGAIN_WITHIN_S = 60  # its next token: a process starts, loads its weights and reads the tokens so far


def num_gpus():
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len([name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name])
    return len(glob.glob("/proc/driver/nvidia/gpus/*"))


def answers(service):
    return [service.generate(DOCUMENT.text + question.prompt, stop=".", max_tokens=24) for question in DOCUMENT.questions]


def exact(found):
    return sum(a.text + "." == q.answer for a, q in zip(found, DOCUMENT.questions))


@unittest.skipIf(num_gpus() < 2, f"{num_gpus()} GPUs on this machine, 2 are needed")
class TwoGpus(unittest.TestCase):
    def test_two_answer_as_one_does(self):
        with Service(flags=FLAGS) as one:
            alone = answers(one)
        with Service(flags=[*FLAGS, "--tensor-parallel-size=2"]) as two:
            together = answers(two)
        self.assertGreaterEqual(exact(alone), 7)
        self.assertGreaterEqual(exact(together), 7)
        same = sum(a.token_ids == b.token_ids for a, b in zip(alone, together))
        print(f"exact answers {exact(alone)} and {exact(together)} of 8, {same} with the same tokens")
        self.assertGreaterEqual(same, 7)

    def test_streams_outlive_a_worker_that_is_gone(self):
        with Service(flags=[*FLAGS, "--tensor-parallel-size=2"]) as service:
            clean = service.generate(DOCUMENT.text[:3000], **LONG).token_ids
            # In the middle of a prompt, whose kernels run for the first time, and of an answer.
            for number, replies in ((signal.SIGKILL, 1), (signal.SIGSTOP, 40), (signal.SIGSTOP, 1), (signal.SIGSTOP, 1)):
                with self.subTest(signal=number.name, replies=replies):
                    self.lose_a_worker(service, number, replies, clean)

    def lose_a_worker(self, service, number, replies, clean):
        stream = service.stream(DOCUMENT.text[:3000], **LONG)
        tokens = []
        for _ in range(replies):
            tokens += next(stream).tokens.token_ids
        workers = subprocess.run(["pgrep", "-P", str(service.process.pid)], capture_output=True, text=True,
                                 check=True).stdout.split()
        self.assertEqual(len(workers), 2)
        begin = time.monotonic()
        os.kill(int(workers[1]), number)
        told = again = None
        for response in stream:
            if response.progress.waits_for_worker and told is None:
                told = time.monotonic() - begin
                if number == signal.SIGSTOP:
                    os.kill(int(workers[1]), signal.SIGCONT)
            elif response.tokens.token_ids and told is not None:
                again = again or time.monotonic() - begin
            tokens += response.tokens.token_ids
        self.assertIsNotNone(told, "the stream ended before the worker was gone")
        print(f"{number.name} after {replies} replies: told after {told:.2f} s, next token after {again:.2f} s")
        self.assertLess(told, TOLD_WITHIN_S)
        self.assertLess(again, AGAIN_WITHIN_S)
        self.assertEqual(tokens, clean)


if __name__ == "__main__":
    unittest.main(verbosity=2)
