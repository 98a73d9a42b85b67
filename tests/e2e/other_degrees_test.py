"""A store on disk that a service of one tensor-parallel degree wrote is warm for every other.

Answers are those of the service that wrote it, each prompt is found up to its last whole block, and every rank has read
what it holds. Version 1 of the format, which had a store for each rank of one degree, is refused with what to do.
"""

import pathlib
import shutil
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from e2e import disk_test  # noqa: E402
from e2e.disk_test import BLOCK_TOKENS, OPTIONS, counter, make_prompts, read_bytes, wait_until  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402
from support.worker import workers_of  # noqa: E402

LAYERS, TAIL = 2, 22


class OtherDegrees(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(disk_test.tempfile.TemporaryDirectory(prefix="kvasir-degrees-")))
        cls.models = {heads: make_tiny_model(cls.folder / f"model-{heads}", kv_heads=heads) for heads in (2, 4)}
        cls.prompts = make_prompts(4) + make_prompts(1, tokens=30 * BLOCK_TOKENS + TAIL, seed=9)
        cls.blocks = [len(prompt) // BLOCK_TOKENS for prompt in cls.prompts]

    def serve(self, store, ranks, *flags, kv_heads=2):
        return disk_test.Service(model=self.models[kv_heads], flags=[
            *disk_test.FLAGS, f"--kv-disk-path={store}", f"--tensor-parallel-size={ranks}", *flags])

    def write(self, store, ranks, kv_heads):
        """Fills a new store and returns the answers."""
        with self.serve(store, ranks, kv_heads=kv_heads) as service:
            answers = [service.generate(prompt, **OPTIONS) for prompt in self.prompts]
            for answer in answers:
                self.assertEqual(answer.cached_tokens, 0, "nothing is there before")
        return [answer.token_ids for answer in answers]

    def check_warm(self, store, ranks, kv_heads, expected):
        with self.serve(store, ranks, kv_heads=kv_heads) as service:
            answers = [service.generate(prompt, **OPTIONS) for prompt in self.prompts]
            self.assertEqual([answer.token_ids for answer in answers], expected)
            for answer, blocks, prompt in zip(answers, self.blocks, self.prompts):
                usage = answer.finish.usage
                self.assertEqual(usage.cached_tokens.disk, blocks * BLOCK_TOKENS)
                self.assertEqual(len(prompt) - answer.cached_tokens, TAIL, "only the tail is computed")
            self.assertEqual(len(service.worker_metrics), ranks)
            for rank in range(ranks):
                heads = max(1, kv_heads // ranks)
                self.assertEqual(counter(service, "kvasir_kv_restored_pages_total", rank, result="ok"),
                                 sum(self.blocks) * LAYERS * heads)
                self.assertEqual(counter(service, "kvasir_kv_restored_pages_total", rank, result="failed"), 0)
                self.assertEqual(counter(service, "kvasir_kv_page_checksum_failures_total", rank), 0)
                self.assertGreater(read_bytes(service, rank), 0)

    def check_all(self, written_at, kv_heads, degrees):
        store = self.folder / f"store-{written_at}-{kv_heads}"
        expected = self.write(store, written_at, kv_heads)
        self.assertEqual(sorted(path.name for path in store.iterdir()), [f"head{h}" for h in range(kv_heads)])
        for ranks in degrees:
            with self.subTest(written_at=written_at, read_at=ranks, kv_heads=kv_heads):
                self.check_warm(store, ranks, kv_heads, expected)

    def test_two_ranks_wrote_and_one_two_and_four_read(self):
        self.check_all(2, kv_heads=4, degrees=(1, 4, 2))

    def test_two_ranks_wrote_and_four_read_of_which_two_hold_each_head(self):
        self.check_all(2, kv_heads=2, degrees=(4, 1))

    def test_four_ranks_wrote_of_which_two_hold_each_head(self):
        self.check_all(4, kv_heads=2, degrees=(1, 2, 4))

    def test_a_store_without_manifests_is_warm_at_another_degree(self):
        store = self.folder / "segments"
        expected = self.write(store, 2, kv_heads=4)
        for head in range(4):
            shutil.rmtree(store / f"head{head}" / "manifest")
        self.check_warm(store, 1, 4, expected)

    def test_ranks_that_share_a_head_read_what_one_of_them_wrote_meanwhile(self):
        # The host tier is too small for all prompts, so that they come back from disk.
        prompts = make_prompts(30, seed=5)
        with self.serve("", 4) as service:
            expected = [service.generate(prompt, **OPTIONS).token_ids for prompt in prompts]
        with self.serve(self.folder / "meanwhile", 4, "--kv-host-size-gb=0.001", "--max-model-len=1024") as service:
            self.assertEqual([service.generate(prompt, **OPTIONS).token_ids for prompt in prompts], expected)
            self.assertEqual([read_bytes(service, rank) for rank in range(4)], [0] * 4)
            self.assertEqual(service.log().count("another rank writes it, this one follows"), 2)
            # Whoever follows has seen all that the others stored.
            stored = [lambda rank=rank: counter(service, "kvasir_kv_tier_pages", rank, tier="disk", state="used")
                      for rank in range(4)]
            wait_until(lambda: {pages() for pages in stored} == {60 * LAYERS}, "all ranks hold all blocks")
            answers = [service.generate(prompt, **OPTIONS) for prompt in prompts[:5]]
            self.assertEqual([answer.token_ids for answer in answers], expected[:5])
            self.assertEqual([answer.finish.usage.cached_tokens.disk for answer in answers], [2 * BLOCK_TOKENS] * 5)
            for rank in range(4):
                self.assertGreater(read_bytes(service, rank), 0)

    def test_when_the_writer_of_a_head_dies_the_store_goes_on(self):
        store = self.folder / "killed"
        expected = self.write(store, 2, kv_heads=2)
        with self.serve(store, 4) as service:
            for pid in workers_of(service)[::2]:
                disk_test.os.kill(pid, 9)
            wait_until(lambda: service.metric("kvasir_worker_group_losses_total") > 0, "the loss is noticed")
            wait_until(lambda: service.metric("kvasir_worker_up") == 4, "the group forms again")
            answers = [service.generate(prompt, **OPTIONS) for prompt in self.prompts]
            self.assertEqual([answer.token_ids for answer in answers], expected)
            self.assertEqual([answer.finish.usage.cached_tokens.disk for answer in answers],
                             [blocks * BLOCK_TOKENS for blocks in self.blocks])
            [new] = make_prompts(1, seed=11)
            service.generate(new, **OPTIONS)
        with self.serve(store, 1) as service:
            self.assertEqual(service.generate(new, **OPTIONS).finish.usage.cached_tokens.disk, 2 * BLOCK_TOKENS)

    def test_version_1_is_refused_with_what_to_do(self):
        store = self.folder / "version-1"
        (store / "tp2-rank0" / "segments").mkdir(parents=True)
        with self.assertRaises(RuntimeError) as raised:
            self.serve(store, 1)
        for words in ("tp2-rank0", "version 1", "Remove the folders tp*-rank*", "another kv_disk_path"):
            self.assertIn(words, str(raised.exception))
        self.assertEqual([path.name for path in store.iterdir()], ["tp2-rank0"], "left as it is")
        shutil.rmtree(store / "tp2-rank0")
        with self.serve(store, 1) as service:
            self.assertEqual(len(service.generate(self.prompts[0], **OPTIONS).token_ids), 6)


if __name__ == "__main__":
    unittest.main(verbosity=2)
