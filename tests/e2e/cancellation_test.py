"""Clients that leave at any moment leave nothing behind: no request, slot or block, and no memory."""

import concurrent.futures
import pathlib
import random
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import Service, make_request  # noqa: E402

import grpc  # noqa: E402
from documents import make_document  # noqa: E402
from kvasir.v1 import generation_pb2, generation_pb2_grpc  # noqa: E402

DOCUMENT = make_document("multi_key", 4000, num_questions=1, seed=5).text
CLIENTS = 8
MOST_GROWTH = 8 << 20  # bytes, from the 100th request to the 500th


def resident_bytes(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")


class Cancellations(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # The tiers are small, so that they are full, and their memory taken, before the 100th request.
        cls.service = cls.enterClassContext(Service(flags=[
            "--kv-device-size-gb=0.02", "--kv-host-size-gb=0.05", "--max-model-len=7872", "--max-num-seqs=4",
            "--max-queue-len=64"]))
        workers = subprocess.run(["pgrep", "-P", str(cls.service.process.pid)], capture_output=True, text=True,
                                 check=True).stdout.split()
        cls.processes = {"coordinator": cls.service.process.pid, "worker": int(workers[0])}

    def leave_at_random(self, seed):
        """Sends a request that its client gives up at any point of its life: cancels it, or closes its connection."""
        rng = random.Random(seed)
        begin = rng.randrange(len(DOCUMENT) // 2)
        request = make_request(DOCUMENT[begin:begin + rng.randrange(20, 3000)], max_tokens=rng.randrange(1, 200),
                               ignore_eos=True, request_id=f"leaver-{seed}")
        if rng.random() < 0.5:
            request.sampling.temperature = 1.0
            request.sampling.repetition_penalty = 1.2
            request.sampling.logprobs = 5
        disconnects = rng.random() < 0.3
        channel = grpc.insecure_channel(self.service.address, options=[("grpc.use_local_subchannel_pool", 1)]) \
            if disconnects else self.service.channel
        stream = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=60)
        try:
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.1)  # before the client reads anything
            else:
                for _ in range(rng.randrange(1, 12)):
                    next(stream)
        except StopIteration:
            return "finished"
        if disconnects:
            channel.close()
            return "disconnected"
        stream.cancel()
        return "cancelled"

    def run_requests(self, seeds):
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
            return list(clients.map(self.leave_at_random, seeds))

    def server_info(self):
        return self.service.stub.GetServerInfo(generation_pb2.GetServerInfoRequest())

    def wait_idle(self):
        deadline = time.monotonic() + 60
        while True:
            info = self.server_info()
            if info.requests_running == 0 and info.requests_waiting == 0:
                return
            self.assertLess(time.monotonic(), deadline, f"requests are left: {info}")
            time.sleep(0.02)

    def resident(self):
        self.wait_idle()
        self.service.generate("hello", max_tokens=1)  # its steps free all that has ended
        return {name: resident_bytes(pid) for name, pid in self.processes.items()}

    def test_500_clients_that_leave_at_random_leave_nothing(self):
        ends = self.run_requests(range(100))
        before = self.resident()
        ends += self.run_requests(range(100, 500))
        after = self.resident()
        counts = {end: ends.count(end) for end in sorted(set(ends))}
        growth = {name: after[name] - before[name] for name in before}
        print("ends:", counts)
        for name, bytes_after in after.items():
            print(f"{name}: {before[name] / 2**20:.1f} MiB after 100 requests, {bytes_after / 2**20:.1f} after 500, "
                  f"{growth[name] / 2**20:+.2f} MiB")

        self.assertGreater(counts["cancelled"], 200)
        self.assertGreater(counts["disconnected"], 80)
        info = self.server_info()
        self.assertEqual((info.requests_running, info.requests_waiting), (0, 0))
        # 500 requests and two of resident(). Each ended once, except those that left before the server saw them.
        ended = info.requests_finished + info.requests_rejected
        self.assertTrue(400 < ended <= 502, ended)
        metrics = self.service.metrics()
        for name in ("kvasir_num_requests_running", "kvasir_num_requests_waiting", "kvasir_kv_cache_usage_perc"):
            self.assertEqual([v for k, v in metrics.items() if k.split("{")[0] == name], [0], name)
        for name, grown in growth.items():
            self.assertLessEqual(grown, MOST_GROWTH, name)
        # Slots and blocks still serve as many requests as at the start, and every id is free again.
        answers = [self.service.stream(DOCUMENT[i * 100:i * 100 + 1500], max_tokens=8, ignore_eos=True,
                                       request_id=f"leaver-{i}") for i in range(4)]
        for answer in answers:
            self.assertEqual(sum(len(r.tokens.token_ids) for r in answer), 8)


if __name__ == "__main__":
    unittest.main(verbosity=2)
