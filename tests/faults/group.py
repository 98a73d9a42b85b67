"""A service whose workers a test may kill and stop: the test starts them, and starts one again as soon as it has ended.

    with Group(model, ranks=2, flags=["--rank-timeout=1"]) as group:
        stream = group.service.stream(...)
        group.kill(1)           # SIGKILL; another process takes its place
        group.stop(0, 1.5)      # SIGSTOP for 1.5 s
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import Service  # noqa: E402
from support.worker import WORKER, write_secret  # noqa: E402


class Group:
    def __init__(self, model, ranks, flags=(), disk_gb=0):
        self.scratch = tempfile.TemporaryDirectory(prefix="kvasir-faults-")
        self.folder = pathlib.Path(self.scratch.name)
        self.secret = write_secret(self.folder, "secret")
        self.addresses = [f"unix:{self.folder}/worker-{rank}.sock" for rank in range(ranks)]
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
                                     f"--group-secret-file={self.secret}"], stdout=log, stderr=subprocess.STDOUT)

    def _keep(self):
        while not self.ending.wait(0.01):
            for rank, worker in enumerate(self.workers):
                if worker.poll() is not None:
                    self.workers[rank] = self._launch(rank)

    @property
    def ranks(self):
        return len(self.workers)

    def kill(self, *ranks):
        for rank in ranks:
            self.workers[rank].kill()

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
            self.scratch.cleanup()
