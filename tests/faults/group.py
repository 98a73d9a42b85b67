"""A service whose workers a test may kill and stop: the test starts them, and starts one again as soon as it has ended.

    with Group(model, ranks=2, flags=["--rank-timeout=1"]) as group:
        stream = group.service.stream(...)
        group.kill(1)           # SIGKILL; another process takes its place, and its memory
        group.stop(0, 1.5)      # SIGSTOP for 1.5 s
"""

import collections
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import Service  # noqa: E402
from support.worker import WORKER, write_secret  # noqa: E402

PAGE = 4096
MAGIC = b"KVEXTENT"


def flip_bits(memory, count, rng):
    """Flips bits of extents that hold sealed blocks, anywhere in them."""
    starts, at = [], PAGE
    while True:
        try:
            at = os.lseek(memory, at, os.SEEK_DATA)
        except OSError:  # no more of it
            break
        end = os.lseek(memory, at, os.SEEK_HOLE)
        starts += [page for page in range(at, end, PAGE) if os.pread(memory, len(MAGIC), page) == MAGIC]
        at = end
    if not starts:
        return
    extent = int.from_bytes(os.pread(memory, 8, starts[0] + 16), "little")
    for _ in range(count):
        at = rng.choice(starts) + rng.randrange(extent)
        os.pwrite(memory, bytes([os.pread(memory, 1, at)[0] ^ 1 << rng.randrange(8)]), at)


class Group:
    def __init__(self, model, ranks, flags=(), disk_gb=0):
        self.scratch = tempfile.TemporaryDirectory(prefix="kvasir-faults-")
        self.folder = pathlib.Path(self.scratch.name)
        self.secret = write_secret(self.folder, "secret")
        self.addresses = [f"unix:{self.folder}/worker-{rank}.sock" for rank in range(ranks)]
        self.memories = [os.memfd_create(f"kv-{rank}") for rank in range(ranks)]  # of the host tiers
        self.mu = threading.Lock()  # held while a worker is down on purpose
        self.adoptions = {}  # by process
        self.workers = [self._launch(rank) for rank in range(ranks)]
        self.ending = threading.Event()
        self.keeper = threading.Thread(target=self._keep)
        self.keeper.start()
        disk = [f"--kv-disk-path={self.folder}/disk", f"--kv-disk-size-gb={disk_gb}"] if disk_gb else []
        self.service = Service(model=model, flags=[
            f"--workers={','.join(self.addresses)}", f"--tensor-parallel-size={ranks}",
            f"--group-secret-file={self.secret}", *disk, *flags])

    def _launch(self, rank):
        with open(self.folder / f"worker-{rank}.log", "ab") as log:
            return subprocess.Popen([WORKER, f"--listen={self.addresses[rank]}", "--threads=1", "--metrics-port=0",
                                     f"--group-secret-file={self.secret}",
                                     f"--kv-memory-file=/proc/self/fd/{self.memories[rank]}"],
                                    pass_fds=[self.memories[rank]], stdout=log, stderr=subprocess.STDOUT)

    def _keep(self):
        while not self.ending.wait(0.01):
            with self.mu:
                for rank, worker in enumerate(self.workers):
                    if worker.poll() is not None:
                        self.workers[rank] = self._launch(rank)

    @property
    def ranks(self):
        return len(self.workers)

    def kill(self, *ranks):
        for rank in ranks:
            self.workers[rank].kill()

    def kill_and_flip(self, rank, flips, rng):
        """SIGKILL; before another process takes its place, bits of its sealed blocks flip."""
        with self.mu:
            self.workers[rank].kill()
            self.workers[rank].wait()
            flip_bits(self.memories[rank], flips, rng)

    def adoption(self):
        """What workers said of blocks that they found, each at the last call: adopted, used, and dropped by reason."""
        for rank in range(self.ranks):
            counts = self.adoptions[self.workers[rank].pid] = collections.Counter()
            port = re.findall(r"metrics on \S+:(\d+)", (self.folder / f"worker-{rank}.log").read_text())[-1]
            for name, value in self.service.metrics(f"127.0.0.1:{port}").items():
                if found := re.match(r"kvasir_(?:blocks_(adopted)|adopted_blocks_(?:(used)|dropped))_total", name):
                    reason = re.search(r'reason="(\w+)"', name)
                    key = reason[1] if reason else found[1] or found[2]
                    counts[key] += int(value)
        return sum(self.adoptions.values(), collections.Counter())

    def stop(self, rank, seconds):
        pid = self.workers[rank].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        try:
            self.service.__exit__(*error)
        finally:
            self.ending.set()
            self.keeper.join()
            for worker in self.workers:
                worker.kill()
                worker.wait()
            for memory in self.memories:
                os.close(memory)
            self.scratch.cleanup()
