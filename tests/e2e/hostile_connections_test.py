"""Silent connections, more of them than the process may have files, lock nobody out."""

import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.innocent_stream import InnocentStream  # noqa: E402
from support.raw_http2 import RawConnection, connect  # noqa: E402
from support.service import BUILD, Service, make_request  # noqa: E402

import grpc  # noqa: E402
from kvasir.v1 import generation_pb2_grpc  # noqa: E402

LIMIT = 1024
IDLE = 1100
SERVING = b"\x08\x01"  # grpc.health.v1.HealthCheckResponse{status}
READINESS = b"\x0a\x14kvasir.v1.Generation"


def limit_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))


def setUpModule():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * IDLE), hard))


def open_idle_connections(address, count):
    """Opens connections. Half of them send nothing, half send the begin of HTTP/2."""
    opened = []
    for i in range(count):
        try:
            opened.append(RawConnection(address).socket if i % 2 else connect(address, 1))
        except OSError:
            pass  # refused, or no longer answered
    return opened


def new_channel(address):
    return grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def http_status(address, timeout_s=5):
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=timeout_s) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Coordinator(unittest.TestCase):
    def setUp(self):
        self.service = self.enterContext(Service(preexec=limit_files))

    def new_client(self, timeout_s=5):
        with new_channel(self.service.address) as channel:
            answer = generation_pb2_grpc.GenerationStub(channel).Generate(make_request("hello", max_tokens=1),
                                                                          timeout=timeout_s)
            return sum(len(response.tokens.token_ids) for response in answer)

    def test_more_idle_connections_than_files_lock_nobody_out(self):
        with InnocentStream(self.service) as innocent:
            idle = open_idle_connections(self.service.address, IDLE)
            began = time.monotonic()
            self.assertEqual(self.new_client(), 1)
            print(f"{len(idle)} idle connections; a new client was answered after {time.monotonic() - began:.3f} s")
            self.assertEqual(http_status(self.service.metrics_address)[0], 200)
            open_now = self.service.metric("kvasir_connections")
            self.assertTrue(0 < open_now <= LIMIT / 4, open_now)
            self.assertGreaterEqual(self.service.metric("kvasir_connections_dropped_total"), IDLE - LIMIT / 4)
        innocent.check(self, longest_gap_s=2)
        for connection in idle:
            connection.close()

    def test_a_port_that_cannot_accept_is_told_by_health_and_readiness(self):
        def ready():
            return self.service.channel.unary_unary("/grpc.health.v1.Health/Check")(READINESS) == SERVING

        def limit(soft):
            resource.prlimit(self.service.process.pid, resource.RLIMIT_NOFILE, (soft, LIMIT))

        self.assertTrue(ready())
        with InnocentStream(self.service) as innocent:
            numbers = {int(name) for name in os.listdir(f"/proc/{self.service.process.pid}/fd")}
            free = next(number for number in range(LIMIT) if number not in numbers)
            limit(free + 1)  # one file is left: enough for /health, not for the two of a client
            with self.assertRaises(grpc.RpcError):
                self.new_client(timeout_s=1)
            status, text = http_status(self.service.metrics_address)
            self.assertEqual(status, 503)
            self.assertIn("open files", text)
            self.assertFalse(ready())
            limit(LIMIT)
            deadline = time.monotonic() + 5
            while not ready() or http_status(self.service.metrics_address)[0] != 200:
                self.assertLess(time.monotonic(), deadline, "still not ready")
                time.sleep(0.05)
            self.assertEqual(self.new_client(), 1)
            self.assertGreater(self.service.metric("kvasir_connections_refused_total"), 0)
        innocent.check(self, longest_gap_s=2)


class Worker(unittest.TestCase):
    def test_more_idle_connections_than_files_lock_nobody_out_of_a_worker(self):
        with tempfile.TemporaryFile("w+") as log:
            worker = subprocess.Popen([BUILD / "worker" / "kvasir-worker", "--listen=127.0.0.1:0", "--metrics-port=0"],
                                      stdout=log, stderr=subprocess.STDOUT, preexec_fn=limit_files)
            self.addCleanup(worker.wait)
            self.addCleanup(worker.terminate)
            found = None
            while found is None:
                self.assertIsNone(worker.poll())
                time.sleep(0.02)
                log.seek(0)
                found = re.search(r"listening on (\S+)", log.read())
        idle = open_idle_connections(found[1], IDLE)
        with new_channel(found[1]) as channel:
            self.assertEqual(channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5), SERVING)
        for connection in idle:
            connection.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
