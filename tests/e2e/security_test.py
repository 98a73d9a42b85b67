"""Who may use a worker: nobody without the group secret, over real sockets and processes. Kept from ps, environment,
logs, configuration and dumped memory: the secret. Kept from other users: the files of the disk tier."""

import os
import pathlib
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import KVASIR, ROOT, Service, grpc  # noqa: E402
from support.worker import WORKER, Worker, write_secret  # noqa: E402

MODEL = ROOT / "tests" / "model" / "needle-8k"
# CoordinatorMessage{shard_plan{kv{kv_disk_path: "/x"}}}: what a coordinator used to say first.
SHARD_PLAN = bytes([0x0A, 6, 0x32, 4, 0x22, 2]) + b"/x"
CHALLENGE = 0x32  # tag of WorkerMessage.challenge


def say(address, *messages):
    """Opens a worker's stream, sends the messages; returns what the worker told and the code of the end."""
    told = []
    with grpc.insecure_channel(address) as channel:
        stream = channel.stream_stream("/kvasir.v1.Worker/Run")(iter(messages), timeout=30)
        try:
            told += stream
        except grpc.RpcError as error:
            return told, error.code()
    return told, grpc.StatusCode.OK


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
        int(child) for task in os.listdir(f"/proc/{pid}/task") if int(task) != pid
        for child in pathlib.Path(f"/proc/{pid}/task/{task}/children").read_text().split()]


def dumped_memory_holds(pid, text):
    """Whether memory that a core dump would hold has the text."""
    writable, begin, end = False, 0, 0
    with open(f"/proc/{pid}/smaps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps.readlines():
            if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line):
                begin, end = int(mapping[1], 16), int(mapping[2], 16)
                writable = mapping[3].startswith("rw")
            elif line.startswith("VmFlags:") and writable and " dd" not in line and end - begin < 1 << 28:
                memory.seek(begin)
                try:
                    if text in memory.read(end - begin):
                        return True
                except OSError:  # unmapped since
                    pass
    return False


class Workers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvasir-test-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.secret = write_secret(self.folder, "secret")

    def test_without_the_secret_a_worker_tells_nothing_and_serves_its_coordinator(self):
        with Worker(self.folder, f"--group-secret-file={self.secret}") as worker:
            told, code = say(worker.address, SHARD_PLAN)
            self.assertEqual(code, grpc.StatusCode.FAILED_PRECONDITION)
            self.assertTrue(all(message[0] == CHALLENGE for message in told), told)
            wrong = bytes([0x22, 68, 0x0A, 32]) + bytes(32) + bytes([0x12, 32]) + bytes(32)  # a proof of nothing
            told, code = say(worker.address, wrong)
            self.assertEqual(code, grpc.StatusCode.UNAUTHENTICATED)
            self.assertTrue(all(message[0] == CHALLENGE for message in told), told)

            # Who came first and says nothing: a bare connection, and an open stream.
            with socket.create_connection(("127.0.0.1", worker.port)), grpc.insecure_channel(worker.address) as channel:
                leave = threading.Event()
                silent = channel.stream_stream("/kvasir.v1.Worker/Run")(iter(leave.wait, True))
                self.assertEqual(next(silent)[0], CHALLENGE)
                with Service(flags=[f"--workers={worker.address}", f"--group-secret-file={self.secret}"]) as service:
                    self.assertTrue(service.generate("What is the code?", max_tokens=4).token_ids)
                    self.assertNotIn(self.secret.read_text(), service.log() + worker.log())
                    for pid in service.process.pid, worker.process.pid:
                        self.assertFalse(dumped_memory_holds(pid, self.secret.read_text().encode()))
                leave.set()

    def test_a_coordinator_with_another_secret_or_none_ends_with_the_reason(self):
        other = write_secret(self.folder, "other")
        with Worker(self.folder, f"--group-secret-file={self.secret}") as worker:
            for flags in [f"--group-secret-file={other}"], []:
                done = subprocess.run(
                    [KVASIR, "serve", f"--model={MODEL}", "--port=0", "--metrics-port=0",
                     f"--workers={worker.address}", *flags], capture_output=True, text=True, timeout=60)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn("--group-secret-file", done.stderr)

    def test_files_that_others_may_read_and_open_ports_without_a_secret_are_refused(self):
        readable = write_secret(self.folder, "readable", 0o644)
        for flags, words in [
                (["--listen=127.0.0.1:0", f"--group-secret-file={readable}"], "chmod 600"),
                (["--listen=127.0.0.1:0", f"--group-secret-file={self.folder}/none"], "cannot be read"),
                (["--listen=0.0.0.0:0"], "--group-secret-file"), (["--listen=[::]:0"], "--group-secret-file")]:
            done = subprocess.run([WORKER, "--metrics-port=0", *flags], capture_output=True, text=True, timeout=30)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(words, done.stderr)
        done = subprocess.run([KVASIR, "serve", f"--model={MODEL}", f"--group-secret-file={self.secret}"],
                              capture_output=True, text=True, timeout=30)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("--workers", done.stderr)
        for command in [KVASIR, "serve"], [WORKER]:
            shown = subprocess.run([*command, f"--group-secret-file={self.secret}", "--print-config"],
                                   capture_output=True, text=True, timeout=30)
            self.assertIn(str(self.secret), shown.stdout)
            self.assertNotIn(self.secret.read_text(), shown.stdout + shown.stderr)


class LocalWorkers(unittest.TestCase):
    def test_their_secret_shows_nowhere_and_files_are_their_owners_alone(self):
        with tempfile.TemporaryDirectory(prefix="kvasir-test-") as disk:
            tier = pathlib.Path(disk) / "tier"
            with Service(flags=[f"--kv-disk-path={tier}"]) as service:
                service.generate("word " * 300, max_tokens=2)
                (worker,) = children(service.process.pid)
                arguments = pathlib.Path(f"/proc/{worker}/cmdline").read_text()
                path = pathlib.Path(re.search(r"--group-secret-file=([^\0]+)", arguments)[1])
                secret = path.read_text()
                self.assertGreaterEqual(len(secret), 64)
                self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
                self.assertEqual(stat.S_IMODE(path.parent.stat().st_mode), 0o700)
                for pid in service.process.pid, worker:
                    shown = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
                    shown += pathlib.Path(f"/proc/{pid}/environ").read_bytes()
                    self.assertNotIn(secret.encode(), shown)
                    self.assertFalse(dumped_memory_holds(pid, secret.encode()), pid)
                self.assertNotIn(secret, service.log())
            self.assertFalse(path.exists(), "it ends with the server")
            found = [tier, *tier.rglob("*")]
            self.assertGreater(len(found), 3)
            for entry in found:
                self.assertEqual(stat.S_IMODE(entry.stat().st_mode) & 0o077, 0, entry)


if __name__ == "__main__":
    unittest.main(verbosity=2)
