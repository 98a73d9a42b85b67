"""Signals with other meanings, unusable temporary folders, and too little memory."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.innocent_stream import InnocentStream  # noqa: E402
from support.service import KVASIR, ROOT, Service  # noqa: E402

MODEL = ROOT / "tests" / "model" / "needle-8k"
SMALL = ["--kv-host-size-gb=0.1", "--kv-device-size-gb=0.05"]
GROUPS = pathlib.Path("/sys/fs/cgroup/memory")  # cgroups version 1


def workers_of(service):
    return [int(pid) for pid in subprocess.run(["pgrep", "-P", str(service.process.pid)], capture_output=True, text=True,
                                               check=True).stdout.split()]


def serve(flags=(), timeout_s=60, preexec=None, **variables):
    return subprocess.run([KVASIR, "serve", f"--model={MODEL}", "--port=0", "--http-port=0", "--metrics-port=0", *flags],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False,
                          env={**os.environ, **variables}, preexec_fn=preexec)


class Signals(unittest.TestCase):
    def test_stray_signals_are_ignored_and_sighup_drains(self):
        with tempfile.TemporaryDirectory(prefix="k") as folder:
            os.environ["TMPDIR"] = folder
            self.addCleanup(os.environ.pop, "TMPDIR")
            with Service(flags=SMALL) as service:
                with InnocentStream(service) as innocent:
                    for process in (service.process.pid, *workers_of(service)):
                        for stray in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
                            os.kill(process, stray)
                innocent.check(self, longest_gap_s=2)
                stream = service.stream("Once upon a time", max_tokens=500, ignore_eos=True)
                next(stream)
                service.process.send_signal(signal.SIGHUP)
                self.assertEqual(sum(len(r.tokens.token_ids) for r in stream), 500)
                self.assertEqual(service.process.wait(30), 0)
                self.assertEqual([name for name in os.listdir(folder) if name.startswith("kvasir-")
                                  and not name.startswith("kvasir-test-")], [], "a folder is left")


class TemporaryFolder(unittest.TestCase):
    def test_a_folder_that_is_not_there_or_too_long_is_told(self):
        with tempfile.TemporaryDirectory(prefix="k") as folder:
            long = pathlib.Path(folder) / ("x" * 110)
            long.mkdir()
            for name, why in ((f"{folder}/nonexistent", "No such file|Not a directory"), (str(long), "too long")):
                run = serve(TMPDIR=name, timeout_s=20)
                self.assertEqual(run.returncode, 1, run.stdout)
                self.assertRegex(run.stdout.splitlines()[-1], rf"TMPDIR is '{name}', ({why})")


@unittest.skipUnless(os.access(GROUPS, os.W_OK), "memory groups of version 1 cannot be made here")
class Memory(unittest.TestCase):
    def limit(self, megabytes):
        group = GROUPS / f"kvasir-test-{os.getpid()}-{megabytes}"
        group.mkdir()
        self.addCleanup(group.rmdir)
        (group / "memory.limit_in_bytes").write_text(str(megabytes * 1_000_000))
        return group, lambda: (group / "cgroup.procs").write_text(str(os.getpid()))

    def test_tiers_beyond_the_groups_limit_are_refused_at_start(self):
        _, join = self.limit(300)
        run = serve(["--kv-host-size-gb=2", "--kv-device-size-gb=0.05"], preexec=join)
        self.assertEqual(run.returncode, 1, run.stdout)
        self.assertIn("--kv-host-size-gb", run.stdout.splitlines()[-1])

    def test_a_worker_that_the_kernel_killed_for_memory_is_told_as_such(self):
        group, join = self.limit(900)
        with Service(flags=SMALL, preexec=join) as service:
            (worker,) = workers_of(service)
            # The worker's own group becomes too small; the coordinator lives on outside it.
            (GROUPS / f"{group.name}-worker").mkdir()
            small = GROUPS / f"{group.name}-worker"
            self.addCleanup(small.rmdir)
            (small / "memory.limit_in_bytes").write_text(str(8_000_000))
            (small / "memory.move_charge_at_immigrate").write_text("0")
            (small / "cgroup.procs").write_text(str(worker))
            stream = service.stream("word " * 5000, max_tokens=2000, ignore_eos=True)
            deadline = time.monotonic() + 30
            while "lack of memory" not in service.log():
                self.assertLess(time.monotonic(), deadline, service.log())
                time.sleep(0.05)
            stream.cancel()


if __name__ == "__main__":
    unittest.main(verbosity=2)
