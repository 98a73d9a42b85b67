"""A service whose workers a test may kill and stop: the test starts them, and starts one again as soon as it has ended.

    with Group(model, ranks=2, flags=["--rank-timeout=1"]) as group:
        stream = group.service.stream(...)
        group.kill(1)           # SIGKILL; another process takes its place, and its memory
        group.kill_coordinator()
        group.stop(0, hold)     # SIGSTOP until hold() returns

With Hosts (tests/support/hosts.py) every worker is on a host of its own, and the test and the service on the node:

        group.cut(1, 1.5)       # the link of worker 1 is down for 1.5 s
        group.slow(0, 1.5)      # it has 200 kbit/s
"""

import collections
import functools
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
from support.hosts import call  # noqa: E402
from support.service import Service  # noqa: E402
from support.worker import WORKER, write_secret  # noqa: E402

PAGE = 4096
MAGIC = b"KVEXTENT"


def sealed_extents(memory):
    """The extents that hold sealed blocks: the hash by where they begin, and their length. Holes of the file are not touched."""
    hashes, extent = {}, PAGE
    at, size = PAGE, os.fstat(memory).st_size
    while at < size:
        header = os.pread(memory, 192, at)
        if header[:len(MAGIC)] == MAGIC:
            hashes[at] = header[160:]
            extent = int.from_bytes(header[16:24], "little")
        at += extent
    return hashes, extent


def flip_bits(memory, count, rng):
    """Flips bits of extents that hold sealed blocks, anywhere in them. Returns how many, and the extents whose headers were hit."""
    hashes, extent = sealed_extents(memory)
    starts, torn = list(hashes), set()
    for _ in range(count if starts else 0):
        begin, inside = rng.choice(starts), rng.randrange(extent)
        at = begin + inside
        os.pwrite(memory, bytes([os.pread(memory, 1, at)[0] ^ 1 << rng.randrange(8)]), at)
        if inside < PAGE:
            torn.add(begin)
    return count if starts else 0, torn


class Group:
    def __init__(self, model, ranks, flags=(), disk_gb=0, hosts=None):
        self.hosts = hosts
        self.places = [f"10.77.0.{11 + rank}" for rank in range(ranks)]
        self.namespaces = [hosts.add(place) for place in self.places] if hosts else []
        self.scratch = tempfile.TemporaryDirectory(prefix="kvasir-faults-")
        self.folder = pathlib.Path(self.scratch.name)
        self.secret = write_secret(self.folder, "secret")
        self.addresses = [f"{self.places[rank]}:7000" if hosts else f"unix:{self.folder}/worker-{rank}.sock"
                          for rank in range(ranks)]
        self.memories = [os.memfd_create(f"kv-{rank}") for rank in range(ranks)]  # of the host tiers
        self.mu = threading.Lock()  # held while a worker is down on purpose
        self.adoptions = {}  # by process
        self.left = {}  # sealed blocks of a killed worker whose headers are whole, by the process that took its place
        self.found = {}  # those that it adopted
        self.flips = 0
        self.torn = {}  # by rank, until a process takes the killed one's place
        self.ended = []  # what workers said that nobody killed, before they ended
        self.workers = [self._launch(rank) for rank in range(ranks)]
        self.ending = threading.Event()
        self.keeper = threading.Thread(target=self._keep)
        self.keeper.start()
        disk = [f"--kv-disk-path={self.folder}/disk", f"--kv-disk-size-gb={disk_gb}"] if disk_gb else []
        self.serve = functools.partial(Service, model=model, flags=[
            f"--workers={','.join(self.addresses)}", f"--tensor-parallel-size={ranks}",
            f"--group-secret-file={self.secret}", *disk, *flags])
        self.service = self.serve()

    def _launch(self, rank):
        enter = ["nsenter", f"--net=/run/netns/{self.namespaces[rank]}"] if self.hosts else []
        place = [f"--collective-host={self.places[rank]}", f"--metrics-host={self.places[rank]}"] if self.hosts else []
        with open(self.folder / f"worker-{rank}.log", "ab") as log:
            return subprocess.Popen([*enter, WORKER, f"--listen={self.addresses[rank]}", "--threads=1", "--metrics-port=0", *place,
                                     f"--group-secret-file={self.secret}",
                                     f"--kv-memory-file=/proc/self/fd/{self.memories[rank]}"],
                                    pass_fds=[self.memories[rank]], stdout=log, stderr=subprocess.STDOUT)

    def _keep(self):
        while not self.ending.wait(0.01):
            with self.mu:
                for rank, worker in enumerate(self.workers):
                    if worker.poll() is not None:
                        if worker.returncode != -signal.SIGKILL:
                            log = (self.folder / f"worker-{rank}.log").read_text()
                            self.ended.append(f"rank {rank} ended with {worker.returncode}: {log[-2000:]}")
                        torn = self.torn.pop(rank, ())
                        left = len({name for at, name in sealed_extents(self.memories[rank])[0].items() if at not in torn})
                        self.workers[rank] = self._launch(rank)
                        self.left[self.workers[rank].pid] = left

    @property
    def ranks(self):
        return len(self.workers)

    def losses(self):
        return self.service.metric("kvasir_worker_group_losses_total")

    def kill(self, *ranks):
        for rank in ranks:
            self.workers[rank].kill()

    def kill_coordinator(self):
        """SIGKILL; another coordinator takes its place, at the same addresses, when this returns."""
        before = self.service
        before.process.kill()
        before.process.wait()
        port, http_port = (int(address.rsplit(":", 1)[1]) for address in (before.address, before.http_address))
        self.service = self.serve(port=port, http_port=http_port)
        before.channel.close()
        before.folder.cleanup()

    def kill_and_flip(self, rank, flips, rng):
        """SIGKILL; before another process takes its place, bits of its sealed blocks flip."""
        with self.mu:
            self.workers[rank].kill()
            self.workers[rank].wait()
            count, self.torn[rank] = flip_bits(self.memories[rank], flips, rng)
            self.flips += count

    def adoption(self):
        """What workers said of blocks that they found, each at the last call: adopted, used, and dropped by reason."""
        for rank in range(self.ranks):
            pid = self.workers[rank].pid
            counts = self.adoptions[pid] = collections.Counter()
            address = re.findall(r"metrics on (\S+)", (self.folder / f"worker-{rank}.log").read_text())[-1]
            for name, value in self.service.metrics(address).items():
                if found := re.match(r"kvasir_(?:blocks_(adopted)|adopted_blocks_(?:(used)|dropped))_total", name):
                    reason = re.search(r'reason="(\w+)"', name)
                    key = reason[1] if reason else found[1] or found[2]
                    counts[key] += int(value)
            if pid in self.left:
                self.found.setdefault(pid, counts["adopted"])
        return sum(self.adoptions.values(), collections.Counter())

    def stop(self, rank, hold):
        pid = self.workers[rank].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            hold()
        finally:
            os.kill(pid, signal.SIGCONT)

    def cut(self, rank, hold):
        port = self.hosts.port(self.namespaces[rank])
        call("ip", "link", "set", port, "down")
        try:
            hold()
        finally:
            call("ip", "link", "set", port, "up")

    def slow(self, rank, seconds):
        port = self.hosts.port(self.namespaces[rank])
        call("tc", "qdisc", "add", "dev", port, "root", "tbf", "rate", "200kbit", "burst", "16kbit", "latency", "400ms")
        try:
            time.sleep(seconds)
        finally:
            call("tc", "qdisc", "del", "dev", port, "root")

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
