"""The service with a GPU per worker: a group answers as one GPU does, and a lost worker is an error within seconds."""

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

import grpc  # noqa: E402
from documents import make_document  # noqa: E402

DOCUMENT = make_document("multi_key", 7000, num_questions=8, seed=7)
FLAGS = ["--device=cuda", "--dtype=bfloat16", "--kv-cache-dtype=bfloat16", "--kv-device-size-gb=4", "--kv-host-size-gb=2",
         "--sparse-selector=quest"]
ERROR_WITHIN_S = 5


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

    def test_a_worker_that_is_gone_is_an_error_in_seconds_and_the_group_forms_again(self):
        with Service(flags=[*FLAGS, "--tensor-parallel-size=2"]) as service:
            # In the middle of a prompt, whose kernels run for the first time, and of an answer.
            for number, replies in ((signal.SIGKILL, 1), (signal.SIGSTOP, 40), (signal.SIGSTOP, 1), (signal.SIGSTOP, 1)):
                with self.subTest(signal=number.name, replies=replies):
                    self.expect_error(service, number, replies)
                    self.expect_answer_again(service)

    def expect_error(self, service, number, replies):
        stream = service.stream(DOCUMENT.text[:3000], max_tokens=4000, ignore_eos=True)
        for _ in range(replies):
            next(stream)
        workers = subprocess.run(["pgrep", "-P", str(service.process.pid)], capture_output=True, text=True,
                                 check=True).stdout.split()
        self.assertEqual(len(workers), 2)
        begin = time.monotonic()
        os.kill(int(workers[1]), number)
        with self.assertRaises(grpc.RpcError) as raised:
            for _ in stream:
                pass
        took = time.monotonic() - begin
        print(f"{number.name} after {replies} replies: {raised.exception.code().name} after {took:.2f} s: {raised.exception.details()}")
        self.assertLess(took, ERROR_WITHIN_S)
        if number == signal.SIGSTOP:
            os.kill(int(workers[1]), signal.SIGCONT)

    def expect_answer_again(self, service):
        deadline = time.monotonic() + 60
        while True:
            try:
                self.assertTrue(service.generate("hello", max_tokens=1).finish)
                return
            except grpc.RpcError as error:
                self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE)
                self.assertLess(time.monotonic(), deadline, "the group was not formed again")
                time.sleep(0.1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
