"""The disk tier under the real service: restarts, full and failing disks, damage, other stores.

Whatever happens to the disk, answers are those of a service without one. Every test also checks by counters that the
disk was read or refused as intended.
"""

import ctypes
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import KVASIR, ROOT, Service, counter  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402

PAGE_BYTES = 64 * 2 * 16 * 4
BLOCK_TOKENS = 64
FLAGS = ["--kv-device-size-gb=0.01", "--kv-host-size-gb=0.05", "--kv-disk-size-gb=1", "--mass-sample-rate=0",
         "--max-num-batched-tokens=1024", "--threads=1"]
OPTIONS = dict(max_tokens=6, ignore_eos=True)
SCALE = int(os.environ.get("KVASIR_TEST_SCALE", 1))


def make_prompts(count, tokens=150, seed=1):
    """Returns prompts of token ids that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 1400) for _ in range(tokens)] for _ in range(count)]


def read_bytes(service, rank=0):
    return counter(service, "kvasir_kv_transfer_bytes_total", rank, **{"from": "disk"})


def stored_pages(service):
    return counter(service, "kvasir_kv_tier_pages", tier="disk", state="used")


def wait_until(condition, what, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)


class DiskTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-disk-")))
        cls.model = make_tiny_model(cls.folder / "model")
        cls.prompts = make_prompts(6)
        with cls.serve(cls.folder / "base") as service:
            cls.expected = cls.ask(service)
            cls.check_stored(service, 2 * len(cls.prompts))

    @classmethod
    def serve(cls, store, *flags, model=None, **options):
        return Service(model=model or cls.model, flags=[*FLAGS, f"--kv-disk-path={store}", *flags], **options)

    @classmethod
    def ask(cls, service, prompts=None):
        return [service.generate(prompt, **OPTIONS).token_ids for prompt in prompts or cls.prompts]

    @staticmethod
    def check_stored(service, blocks):
        wait_until(lambda: stored_pages(service) == blocks * 4, f"{blocks} blocks are stored")

    def copy_of_store(self):
        copy = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(dir=self.folder))) / "store"
        shutil.copytree(self.folder / "base", copy)
        return copy

    def segments(self, store):
        """Returns those of the first KV head: a block is lost with one of its heads."""
        return sorted((store / "head0" / "segments").iterdir())

    def check_answers(self, store):
        """Serves over the store and checks the answers. Returns metrics and the log."""
        with self.serve(store) as service:
            self.assertEqual(self.ask(service), self.expected)
            return {"read": read_bytes(service),
                    "failures": counter(service, "kvasir_kv_page_checksum_failures_total", tier="disk"),
                    "not restored": counter(service, "kvasir_kv_restored_pages_total", result="failed"),
                    "log": service.log()}


class Restart(DiskTest):
    def test_prompts_are_found_after_a_restart(self):
        with self.serve(self.copy_of_store()) as service:
            answers = [service.generate(prompt, **OPTIONS) for prompt in self.prompts]
            self.assertEqual([a.token_ids for a in answers], self.expected)
            for answer in answers:
                self.assertEqual(answer.finish.usage.cached_tokens.disk, 2 * BLOCK_TOKENS)
            self.assertGreater(read_bytes(service), 0)
            self.assertGreater(counter(service, "kvasir_kv_transfer_seconds_total", **{"from": "disk"}), 0)
            again = service.generate(self.prompts[0], **OPTIONS)
            self.assertEqual((again.token_ids, again.finish.usage.cached_tokens.disk), (self.expected[0], 0))

    def test_two_ranks_find_what_both_have(self):
        store = self.folder / "two"
        answers = []
        for expect_disk in (0, 2 * BLOCK_TOKENS, 0):
            with self.serve(store, "--tensor-parallel-size=2") as service:
                answer = service.generate(self.prompts[0], **OPTIONS)
                answers.append(answer.token_ids)
                self.assertEqual(answers[-1], answers[0])
                self.assertEqual(answer.finish.usage.cached_tokens.disk, expect_disk)
                self.assertEqual([read_bytes(service, rank) > 0 for rank in (0, 1)], [expect_disk > 0] * 2)
            if expect_disk:
                shutil.rmtree(store / "head1")  # then neither rank reads

    def test_what_was_asked_last_is_stored_before_the_process_ends(self):
        # 60 blocks. A host tier of this size writes nine of them at a time.
        [prompt] = make_prompts(1, tokens=60 * BLOCK_TOKENS + 1, seed=7)
        store = self.folder / "last"
        for stored in (0, 60 * BLOCK_TOKENS):
            with self.serve(store, "--kv-host-size-gb=0.006", "--max-model-len=4096") as service:
                answer = service.generate(prompt, max_tokens=1)
                self.assertEqual(answer.finish.usage.cached_tokens.disk, stored)

    def test_the_command_says_what_came_from_disk(self):
        with self.serve(self.folder / "command") as service:
            prompt = "the quick brown fox jumps over the lazy dog " * 20
            service.generate(prompt, **OPTIONS)
        with self.serve(self.folder / "command") as service:
            run = subprocess.run([KVASIR, "generate", f"--server={service.address}", f"--prompt={prompt}",
                                  "--max-tokens=2", "--temperature=0"], capture_output=True, text=True, check=True)
            self.assertRegex(run.stderr, r"cached: 0 device, 0 host, [1-9]\d* disk")
            self.assertIn("time to first token", run.stderr)
            status = subprocess.run([KVASIR, "status", f"--server={service.address}"], capture_output=True, text=True,
                                    check=True)
            self.assertRegex(status.stdout, r"(?m)^disk ")


class Owner(DiskTest):
    def test_a_second_process_is_refused_and_told_why(self):
        store = self.copy_of_store()
        with self.serve(store) as service:
            with self.assertRaises(RuntimeError) as raised:
                self.serve(store)
            self.assertIn("kv_disk_path", str(raised.exception))
            self.assertEqual(self.ask(service), self.expected)
            self.assertGreater(read_bytes(service), 0)

    def test_a_store_of_another_model_or_type_is_refused_and_left_alone(self):
        store = self.copy_of_store()
        other = make_tiny_model(self.folder / "other", seed=2)
        for options in (dict(model=other), dict(flags="--kv-cache-dtype=bfloat16")):
            with self.subTest(options), self.assertRaises(RuntimeError) as raised:
                flags = [options["flags"]] if "flags" in options else []
                self.serve(store, *flags, model=options.get("model"))
            self.assertIn("kv_disk_path", str(raised.exception))
        self.assertGreater(self.check_answers(store)["read"], 0)


class Damage(DiskTest):
    def test_flipped_bits_never_change_an_answer(self):
        """A bit is flipped in each block. Some block of every prompt is damaged; none is served."""
        prompts = make_prompts(100 * SCALE, seed=2)
        blocks = 2 * len(prompts)
        store = self.folder / "flips"
        with self.serve(store) as service:
            expected = self.ask(service, prompts)
            self.check_stored(service, blocks)
        extent_bytes = sum(s.stat().st_size for s in self.segments(store)) // blocks
        rng = random.Random(3)
        for segment in self.segments(store):
            data = bytearray(segment.read_bytes())
            for begin in range(0, len(data), extent_bytes):
                # Any bit of the header or a page. Between them is padding.
                offset = rng.choice([rng.randrange(64), rng.randrange(extent_bytes - 2 * PAGE_BYTES, extent_bytes)])
                data[begin + offset] ^= 1 << rng.randrange(8)
            segment.write_bytes(data)
        with self.serve(store) as service:
            self.assertEqual(self.ask(service, prompts), expected)
            self.assertEqual(counter(service, "kvasir_kv_page_checksum_failures_total", tier="disk"), blocks)
            self.assertEqual(counter(service, "kvasir_kv_restored_pages_total", result="ok"), 0)

    def test_swapped_pages_and_extents_are_not_served(self):
        store = self.copy_of_store()
        [segment] = self.segments(store)
        data = bytearray(segment.read_bytes())
        extent = len(data) // 12
        # Swaps the last page of every block of the first half with that of a block of the second half.
        for i in range(6):
            a, b = (i + 1) * extent - PAGE_BYTES, (i + 7) * extent - PAGE_BYTES
            data[a:a + PAGE_BYTES], data[b:b + PAGE_BYTES] = data[b:b + PAGE_BYTES], data[a:a + PAGE_BYTES]
        segment.write_bytes(data)
        self.assertEqual(self.check_answers(store)["failures"], 12)
        store = self.copy_of_store()
        [segment] = self.segments(store)
        data = segment.read_bytes()
        segment.write_bytes(data[6 * extent:] + data[:6 * extent])
        self.assertEqual(self.check_answers(store)["failures"], 12)

    def test_truncated_segments_give_nothing_or_the_block(self):
        size = self.segments(self.copy_of_store())[0].stat().st_size
        for part in (0.0, 0.3, 0.9):
            with self.subTest(part):
                store = self.copy_of_store()
                with open(self.segments(store)[0], "r+b") as segment:
                    segment.truncate(int(part * size))
                self.assertEqual(self.check_answers(store)["read"] > 0, part > 0)

    def test_a_damaged_manifest_costs_at_most_its_blocks(self):
        rng = random.Random(4)
        found = 0
        for damage in ("flips", "cut", "gone"):
            with self.subTest(damage):
                store = self.copy_of_store()
                for path in sorted((store / "head0" / "manifest").iterdir()):
                    data = bytearray(path.read_bytes())
                    if damage == "gone":
                        path.unlink()
                    elif data and damage == "cut":
                        path.write_bytes(data[:rng.randrange(len(data))])
                    elif data:
                        for _ in range(1 + len(data) // 2000):
                            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                        path.write_bytes(data)
                found += self.check_answers(store)["read"]
        self.assertGreater(found, 0, "the manifest is made anew from the extents")


class Failure(DiskTest):
    def tmpfs(self, megabytes):
        mount = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", mount], check=False,
                              capture_output=True, text=True)
        if made.returncode != 0:
            self.skipTest(f"needs the right to mount: {made.stderr}")
        self.addCleanup(subprocess.run, ["umount", "-l", mount], check=False)
        return mount

    @staticmethod
    def fill(mount):
        """Fills all the free space, and returns the file that takes it."""
        filler = mount / "filler"
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                return filler

    def read_only(self, service):
        return counter(service, "kvasir_kv_tier_read_only", tier="disk")

    def test_a_disk_that_fills_up_turns_read_only_until_space_returns(self):
        mount = self.tmpfs(16)
        with self.serve(mount / "kv") as service:
            self.assertEqual(self.ask(service, self.prompts[:2]), self.expected[:2])
            self.check_stored(service, 4)
            filler = self.fill(mount)
            self.assertEqual(self.ask(service, self.prompts[2:4]), self.expected[2:4])
            wait_until(lambda: self.read_only(service) == 1, "the tier is read-only")
            self.assertGreater(counter(service, "kvasir_kv_writes_dropped_total"), 0)
            service.wait_for_log("read-only")
            stored = stored_pages(service)
            filler.unlink()
            time.sleep(1.1)  # the tier tries again after one second
            self.assertEqual(self.ask(service, self.prompts[4:]), self.expected[4:])
            wait_until(lambda: self.read_only(service) == 0, "the tier takes writes again")
            wait_until(lambda: stored_pages(service) > stored, "blocks are stored again")

    def test_a_disk_full_from_the_start_costs_nothing_but_the_tier(self):
        mount = self.tmpfs(1)
        self.fill(mount)
        with self.serve(mount / "kv") as service:
            self.assertEqual(self.ask(service, self.prompts[:2]), self.expected[:2])
            self.assertEqual(self.read_only(service), 1)
            service.wait_for_log("No space left")

    def test_segments_cut_under_the_running_service_are_computed_anew(self):
        # The host tier is too small for all prompts, so that they are read back from disk.
        prompts = make_prompts(30, seed=5)
        with self.serve(self.folder / "none", "--kv-disk-path=") as service:
            expected = self.ask(service, prompts)
        store = self.folder / "cut"
        with self.serve(store, "--kv-host-size-gb=0.001", "--max-model-len=1024") as service:
            self.assertEqual(self.ask(service, prompts), expected)
            self.assertEqual(self.ask(service, prompts[:3]), expected[:3])
            self.assertGreater(read_bytes(service), 0)
            for segment in self.segments(store):
                with open(segment, "r+b") as file:
                    file.truncate(0)
            self.assertEqual(self.ask(service, prompts), expected)
            self.assertGreater(counter(service, "kvasir_kv_restored_pages_total", result="failed"), 0)

    def test_a_folder_removed_under_the_running_service_is_done_without(self):
        store = self.copy_of_store()
        with self.serve(store) as service:
            self.assertEqual(self.ask(service, self.prompts[:1]), self.expected[:1])
            shutil.rmtree(store)
            self.assertEqual(self.ask(service), self.expected)
            for prompt in make_prompts(3, seed=6):
                self.assertEqual(len(service.generate(prompt, **OPTIONS).token_ids), 6)
            wait_until(lambda: self.read_only(service) == 1, "the tier is read-only")
            service.wait_for_log("LOCK was removed under this process")

    def serve_failing(self, times):
        """Returns a service over a copy of the store. The first `times` reads of each place are I/O errors."""
        library = self.folder / "failing_pread.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, ROOT / "tests" / "support" / "failing_pread.c"], check=True)

        def fail_reads():
            refuse_io_uring()  # reads go through pread, which can be replaced
            os.environ.update(LD_PRELOAD=str(library), FAILING_PREAD_TIMES=str(times))
        return self.serve(self.copy_of_store(), preexec=fail_reads)

    def test_a_read_error_that_passes_is_read_again(self):
        with self.serve_failing(times=1) as service:
            self.assertEqual(self.ask(service), self.expected)
            self.assertGreater(counter(service, "kvasir_kv_read_errors_total"), 0)
            self.assertGreater(counter(service, "kvasir_kv_restored_pages_total", result="ok"), 0)
            self.assertEqual(counter(service, "kvasir_kv_restored_pages_total", result="failed"), 0)

    def test_blocks_that_cannot_be_read_are_computed_anew(self):
        with self.serve_failing(times=1_000_000) as service:
            self.assertEqual(self.ask(service), self.expected)
            self.assertEqual(counter(service, "kvasir_kv_restored_pages_total", result="ok"), 0)
            self.assertGreater(counter(service, "kvasir_kv_restored_pages_total", result="failed"), 0)

    def test_without_io_uring_threads_do_the_work(self):
        with self.serve(self.copy_of_store(), preexec=refuse_io_uring) as service:
            self.assertEqual(self.ask(service), self.expected)
            self.assertGreater(read_bytes(service), 0)
            service.wait_for_log("through threads")


def refuse_io_uring():
    """Makes io_uring_setup fail with EPERM for this process and its children, as container runtimes do."""
    io_uring_setup, allow, eperm = 425, 0x7fff0000, 0x00050000 | 1
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in (
        (0x20, 0, 0, 0),                 # load the number of the call
        (0x15, 0, 1, io_uring_setup),    # if it is this one
        (0x06, 0, 0, eperm),
        (0x06, 0, 0, allow)))
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", 4, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, filter_mode, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    unittest.main(verbosity=2)
