"""A disk that hangs, and damage to the manifest's log, beside an innocent stream."""

import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import disk_test  # noqa: E402
from support.innocent_stream import InnocentStream  # noqa: E402
from support.service import ROOT  # noqa: E402




class HungDisk(disk_test.DiskTest):
    def serve_hanging(self, hang):
        """Returns a service over a copy of the store. Reads and writes wait while the file `hang` exists."""
        library = self.folder / "hanging_pread.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, ROOT / "tests" / "support" / "failing_pread.c"], check=True)

        def prepare():
            disk_test.refuse_io_uring()  # reads go through pread, which can be replaced
            os.environ.update(LD_PRELOAD=str(library), FAILING_PREAD_HANG=str(hang))
        return self.serve(self.copy_of_store(), "--shutdown-timeout=1", preexec=prepare)

    def test_requests_wait_for_a_hung_disk_once_and_the_server_ends(self):
        hang = self.folder / "hang"
        with self.serve_hanging(hang) as service:
            self.assertEqual(self.ask(service, self.prompts[:1]), self.expected[:1])
            self.assertGreater(disk_test.read_bytes(service), 0)
            hang.touch()
            self.addCleanup(hang.unlink, missing_ok=True)
            waits = []
            with InnocentStream(service) as innocent:
                for prompt, expected in list(zip(self.prompts, self.expected))[1:]:
                    began = time.monotonic()
                    self.assertEqual(self.ask(service, [prompt]), [expected])
                    waits.append(time.monotonic() - began)
            print("requests whose prefix is on a hung disk waited " + ", ".join(f"{wait:.2f}" for wait in waits) + " s")
            innocent.check(self, longest_gap_s=2)
            self.assertLess(max(waits[1:]), 2)
            self.assertEqual(service.metric("kvasir_kv_disk_set_aside"), 1)
            service.wait_for_log("set aside")
            began = time.monotonic()
            service.channel.close()
            service.process.send_signal(signal.SIGTERM)
            self.assertEqual(service.process.wait(40), 0)
            took = time.monotonic() - began
            print(f"SIGTERM ended the server after {took:.2f} s")
            self.assertLess(took, 10)

    def test_a_disk_that_answers_again_is_used_again(self):
        hang = self.folder / "hang-a-while"
        with self.serve_hanging(hang) as service:
            hang.touch()
            self.assertEqual(self.ask(service, self.prompts[:2]), self.expected[:2])
            hang.unlink()
            time.sleep(5.1)  # SchedulerOptions::first_disk_pause
            before = disk_test.read_bytes(service)
            self.assertEqual(self.ask(service, self.prompts[2:]), self.expected[2:])
            self.assertGreater(disk_test.read_bytes(service), before)
            self.assertEqual(service.metric("kvasir_kv_disk_set_aside"), 0)


class FrozenFileSystem(disk_test.DiskTest):
    """A frozen file system: a process that waits for it cannot even be killed."""

    def frozen_later(self):
        image, mount = self.folder / "image", self.folder / "mount"
        mount.mkdir()
        with open(image, "wb") as file:
            file.truncate(64 << 20)
        for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, mount]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                self.skipTest(f"needs the right to mount: {done.stderr}")
        self.addCleanup(subprocess.run, ["umount", "-l", mount], check=False)
        self.addCleanup(subprocess.run, ["fsfreeze", "-u", mount], check=False, stderr=subprocess.DEVNULL)
        return mount

    def test_streams_go_on_and_the_server_ends(self):
        mount = self.frozen_later()
        with self.serve(mount / "store", "--shutdown-timeout=1") as service:
            self.assertEqual(self.ask(service, self.prompts[:3]), self.expected[:3])
            self.check_stored(service, 6)
            subprocess.run(["fsfreeze", "-f", mount], check=True)
            with InnocentStream(service) as innocent:
                began = time.monotonic()
                self.assertEqual(self.ask(service), self.expected)  # half of them are new and must be written
                answered = time.monotonic() - began
            innocent.check(self, longest_gap_s=2)
            self.assertLess(answered, 12)
            began = time.monotonic()
            service.channel.close()
            service.process.send_signal(signal.SIGTERM)
            self.assertEqual(service.process.wait(40), 0)
            took = time.monotonic() - began
            print(f"on a frozen file system: 6 answers after {answered:.2f} s, SIGTERM ended the server after {took:.2f} s")
            self.assertLess(took, 12)


class DamagedLog(disk_test.DiskTest):
    def test_a_flipped_bit_of_the_manifests_log_loses_nothing(self):
        store = self.copy_of_store()
        (log,) = [path for path in (store / "head0" / "manifest").glob("*.log") if path.stat().st_size > 0]
        data = bytearray(log.read_bytes())
        data[len(data) // 4] ^= 1
        log.write_bytes(data)
        with self.serve(store) as service:
            self.check_stored(service, 2 * len(self.prompts))
            service.wait_for_log("making the manifest anew from the segments")
            with InnocentStream(service) as innocent:
                self.assertEqual(self.ask(service), self.expected)
                self.assertGreater(disk_test.read_bytes(service), 0)
            innocent.check(self, longest_gap_s=2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
