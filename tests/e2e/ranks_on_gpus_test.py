"""The service with a GPU per worker: a group answers as one GPU does, a stream outlives a lost worker, and a store on disk is
warm for other tensor-parallel degrees, whichever device wrote it."""

import contextlib
import glob
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import Service, counter, grpc  # noqa: E402

from documents import make_document  # noqa: E402

DOCUMENT = make_document("multi_key", 7000, num_questions=8, seed=7)
ON_CPU = ["--dtype=bfloat16", "--kv-cache-dtype=bfloat16", "--kv-host-size-gb=2", "--sparse-selector=quest"]
FLAGS = ["--device=cuda", "--kv-device-size-gb=4", *ON_CPU]
RESTORED = "kvasir_kv_restored_pages_total"
BLOCK_TOKENS, TAIL_TOKENS, LAYERS, KV_HEADS = 64, 64, 6, 4
LONG = dict(max_tokens=4000, ignore_eos=True)
TOLD_WITHIN_S = 5   # that the stream waits for a worker
AGAIN_WITHIN_S = 60  # its next token: a process starts, loads its weights and reads the tokens so far
STALLED_S = 120  # a stream that takes longer is given up, and the server's log printed


def num_gpus():
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len([name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name])
    return len(glob.glob("/proc/driver/nvidia/gpus/*"))


def answers(service):
    return [service.generate(DOCUMENT.text + question.prompt, stop=".", max_tokens=24) for question in DOCUMENT.questions]


def exact(found):
    return sum(a.text + "." == q.answer for a, q in zip(found, DOCUMENT.questions))


def found_tokens(answer):
    """Returns how many of a prompt's tokens lie in blocks: its tail, which selects by itself, is always computed."""
    return (answer.finish.usage.prompt_tokens - TAIL_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS


@unittest.skipIf(num_gpus() < 1, "no GPU on this machine")
class OtherDegrees(unittest.TestCase):
    def setUp(self):
        self.store = self.enterContext(tempfile.TemporaryDirectory(prefix="kvasir-degrees-"))

    def serve(self, flags, ranks):
        return Service(flags=[*flags, f"--kv-disk-path={self.store}", "--kv-disk-size-gb=4", f"--tensor-parallel-size={ranks}"])

    def write(self, flags, ranks):
        with self.serve(flags, ranks) as service:
            found = answers(service)
        self.assertEqual(found[0].cached_tokens, 0, "nothing is there before")
        self.assertGreaterEqual(exact(found), 7)
        self.assertEqual(sorted(os.listdir(self.store)), [f"head{head}" for head in range(KV_HEADS)])
        return found

    def check_warm(self, flags, ranks, written):
        with self.serve(flags, ranks) as service:
            found = answers(service)
            for answer in found:
                self.assertEqual(answer.cached_tokens, found_tokens(answer), "only the tail is computed")
            self.assertEqual(found[0].finish.usage.cached_tokens.disk, found_tokens(found[0]))
            for rank in range(ranks):
                self.assertGreaterEqual(counter(service, RESTORED, rank, result="ok"),
                                        found_tokens(found[0]) // BLOCK_TOKENS * LAYERS * KV_HEADS // ranks)
                self.assertEqual(counter(service, RESTORED, rank, result="failed"), 0)
        same = sum(a.token_ids == b.token_ids for a, b in zip(found, written))
        print(f"exact answers {exact(written)} and {exact(found)} of 8, {same} with the same tokens")
        self.assertGreaterEqual(exact(found), 7)
        self.assertGreaterEqual(same, 7)

    def test_a_gpu_reads_what_two_ranks_on_a_cpu_wrote_and_they_what_it_wrote(self):
        self.check_warm(FLAGS, 1, self.write(ON_CPU, 2))
        self.store = self.enterContext(tempfile.TemporaryDirectory(prefix="kvasir-degrees-"))
        self.check_warm(ON_CPU, 2, self.write(FLAGS, 1))

    @unittest.skipIf(num_gpus() < 2, f"{num_gpus()} GPUs on this machine, 2 are needed")
    def test_one_gpu_reads_what_two_wrote_and_two_what_one_wrote(self):
        self.check_warm(FLAGS, 1, self.write(FLAGS, 2))
        self.store = self.enterContext(tempfile.TemporaryDirectory(prefix="kvasir-degrees-"))
        self.check_warm(FLAGS, 2, self.write(FLAGS, 1))


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
        workers = subprocess.run(["pgrep", "-P", str(service.process.pid)], capture_output=True, text=True,
                                 check=True).stdout.split()
        self.assertEqual(len(workers), 2)
        lost = int(workers[1])
        print(f"{number.name} to process {lost} after {replies} replies", flush=True)
        stream = service.stream(DOCUMENT.text[:3000], **LONG)
        stalled = threading.Timer(STALLED_S, stream.cancel)
        stalled.start()
        try:
            tokens, told, again = self.follow(stream, lost, number, replies)
        except grpc.RpcError:
            print(service.log()[-20000:], flush=True)
            raise
        finally:
            stalled.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.kill(lost, signal.SIGCONT)  # a process that stays stopped would keep the service from ending
        self.assertIsNotNone(told, "the stream ended before the worker was gone")
        print(f"told after {told:.2f} s, next token after {again:.2f} s")
        self.assertLess(told, TOLD_WITHIN_S)
        self.assertLess(again, AGAIN_WITHIN_S)
        self.assertEqual(tokens, clean)

    def follow(self, stream, lost, number, replies):
        """Reads the stream and sends the signal meanwhile. Returns its tokens, and after which times it was told to wait and went
        on."""
        tokens = []
        for _ in range(replies):
            tokens += next(stream).tokens.token_ids
        begin = time.monotonic()
        os.kill(lost, number)
        told = again = None
        for response in stream:
            if response.progress.waits_for_worker and told is None:
                told = time.monotonic() - begin
                if number == signal.SIGSTOP:
                    os.kill(lost, signal.SIGCONT)
            elif response.tokens.token_ids and told is not None:
                again = again or time.monotonic() - begin
            tokens += response.tokens.token_ids
        return tokens, told, again


if __name__ == "__main__":
    unittest.main(verbosity=2)
