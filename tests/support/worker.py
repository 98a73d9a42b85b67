"""Workers that a test starts itself, without a server.

    with Worker(folder, f"--group-secret-file={write_secret(folder, 'secret')}") as worker:
        socket.create_connection(("127.0.0.1", worker.port))
"""

import pathlib
import re
import secrets
import subprocess
import time

from support.service import BUILD

WORKER = BUILD / "worker" / "kvasir-worker"


def write_secret(folder, name, mode=0o600):
    """Writes a new group secret and returns its path."""
    path = pathlib.Path(folder) / name
    path.write_text(secrets.token_hex(32))
    path.chmod(mode)
    return path


def workers_of(service):
    """Returns the process ids of a server's local workers, by rank."""
    listed = subprocess.run(["pgrep", "-P", str(service.process.pid)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


class Worker:
    """A kvasir-worker on free ports of loopback. Its log lies in `folder`."""

    def __init__(self, folder, *flags):
        self.log_path = pathlib.Path(folder) / f"worker-{secrets.token_hex(4)}.log"
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen([WORKER, "--listen=127.0.0.1:0", "--metrics-port=0", "--threads=1", *flags],
                                            stdout=log, stderr=subprocess.STDOUT)
        self.address = self.await_log(r"listening on (\S+)")
        self.port = int(self.address.rsplit(":", 1)[1])
        self.metrics_port = int(self.await_log(r"metrics on \S+:(\d+)"))

    def log(self):
        return self.log_path.read_text()

    def await_log(self, pattern):
        """Returns the pattern's group in the log, where it comes within 30 s."""
        deadline = time.monotonic() + 30
        while not (found := re.search(pattern, self.log())):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.02)
        return found[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
